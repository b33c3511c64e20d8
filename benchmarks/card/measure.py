"""Gathers the figures of docs/gpu.md on a machine with a GPU where vLLM and SGLang are registered with bedplate.

    python benchmarks/card/measure.py --list
    python benchmarks/card/measure.py --out DIR --steps all --budget 9m
    python benchmarks/card/measure.py --out DIR --steps vllm-8b,moe-vllm --budget 9m --pack results.tar.xz
    python benchmarks/card/measure.py --out DIR --steps all --budget 25m --detach
    python benchmarks/card/measure.py --out DIR --wait 9m --pack results.tar.xz

Each step writes its run files and its log to DIR/STEP as soon as it has them. DIR/state.json says which steps are done:
a later call with the same DIR goes on with the others, and takes up again what was cut short. A step is begun only if
its expected time is left of the budget and its engines are registered. `--detach` goes on in the background while other
commands run; with `--wait-for-engines` these may bring another engine. `--pack` writes everything but the models to one
archive.

Without a GPU, `--tiny --replace vllm=llama.cpp --replace sglang=pytorch` goes through all steps with small shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bedplate.values.units import parse_duration

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RANDOM_LLAMA = REPOSITORY / "benchmarks" / "models" / "random_llama.py"
CUT_S, END_S = 25.0, 10.0
"""How long a command may take to end after SIGINT, with which `bench` writes what it has; then after SIGTERM."""
SAMPLED = (
    "timestamp,memory.used,utilization.gpu,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
)
QUESTION = "What is the capital of France? Answer in one sentence."
HOLD = """import torch, time
free, _ = torch.cuda.mem_get_info()
held = torch.empty({held}, dtype=torch.uint8, device="cuda")
{then}"""
WAIT = "print('held', flush=True); time.sleep(3600)"
COMPUTE = (
    "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16); print('held', flush=True)\nwhile True: a @ a"
)


class StepFailed(Exception):
    pass


class OutOfTime(Exception):
    """The budget is used up; the step is taken up again by the next call."""


EXPECTED = (
    StepFailed, OSError, http.client.HTTPException, ValueError, LookupError, subprocess.SubprocessError,
)  # fmt: skip
"""What ends one step and not the others."""


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    expected_s: float
    take: Callable[[Taking], None]
    needs: tuple[str, ...] = ()
    """Engines that must be registered or installed; a step waits for them as long as others can be taken."""
    optional: bool = False
    """Taken only where it is named."""


@dataclass
class Taking:
    """One step under way."""

    step: Step
    given: argparse.Namespace
    folder: Path
    deadline: float
    began: float = field(default_factory=time.monotonic)

    @property
    def tiny(self) -> bool:
        return bool(self.given.tiny)

    def engine(self, name: str) -> str:
        """The engine that stands in for this one on a machine without it."""
        others: dict[str, str] = dict(pair.split("=", 1) for pair in self.given.replace)
        return others.get(name, name)

    def model(self, shape: str) -> str:
        return str(models_dir(self.given) / (f"tiny-{shape}" if self.tiny else shape))

    def loads(self, *counts: int) -> str:
        return ",".join(map(str, (1, 2) if self.tiny else counts))

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.step.name} +{time.monotonic() - self.began:.0f}s: {text}"
        print(line, flush=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(line + "\n")

    def keep(self, name: str, what: Any) -> None:
        (self.folder / name).write_text(json.dumps(what, indent=1, default=str))

    def command(
        self,
        words: Sequence[str],
        *,
        to: str | None = None,
        limit_s: float = 600.0,
        needed: bool = True,
        env: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Runs it, its output to the file `to` (else the log) at once; a needed one that fails ends the step."""
        if self.given.dry_run:
            print(f"  {shlex.join(words)}")
            return 0, "{}"
        began = time.monotonic()
        target, errors = self.folder / (to or "output.txt"), self.folder / "log.txt"
        from_byte = target.stat().st_size if to is None and target.exists() else 0
        self.say(f"$ {shlex.join(words)}")
        with target.open("ab" if to is None else "wb") as out, errors.open("ab") as err:
            process = subprocess.Popen(
                words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **(env or {})}, cwd=REPOSITORY,
            )  # fmt: skip
            try:
                code = process.wait(timeout=max(1.0, min(limit_s, self.left_s())))
            except BaseException as error:
                end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                self.say(f"ended after {time.monotonic() - began:.0f} s, its limit")
                if self.left_s() <= 1:
                    raise OutOfTime from error
                code = 124
        self.say(f"exit status {code} after {time.monotonic() - began:.1f} s")
        if needed and code != 0:
            raise StepFailed(f"{shlex.join(words[:6])} … ended with status {code}: {last_line(errors)}")
        with target.open("rb") as text:
            text.seek(from_byte)
            return code, text.read().decode("utf-8", "replace")

    def bedplate(self, *words: str, **how: Any) -> tuple[int, str]:
        return self.command([sys.executable, "-m", "bedplate", *words], **how)

    @contextlib.contextmanager
    def service(self, engine: str, note: str, *more: str, check: bool = True) -> Iterator[dict[str, Any]]:
        """A service in the background; how long it took to be ready is kept, and its logs with it."""
        name = f"card-{note}".replace(".", "-")
        began, wall = time.monotonic(), time.time()
        words = ["serve", *more, "--engine", engine, "--port", "0", "-d", "--name", name, "--json"]
        try:
            _, text = self.bedplate(*words, *([] if check else ["--no-check"]), to=f"{note}.endpoint.json")
            if self.given.dry_run:
                yield {"url": "URL", "model": "MODEL", "name": name, "pid": 0, "log": ""}
                return
            endpoint: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
            took = {"ready_s": time.monotonic() - began, "began": wall, "endpoint": endpoint}
            self.keep(f"{note}.start.json", took)
            self.say(f"{engine} is ready after {took['ready_s']:.1f} s")
            yield endpoint
        finally:
            if not self.given.dry_run:
                self._stop(name)
                self.copy_logs(note, since=wall)

    def _stop(self, name: str) -> None:
        words = [sys.executable, "-m", "bedplate", "stop", name, "--drain", "2"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, capture_output=True, timeout=60)

    def copy_logs(self, note: str, since: float) -> None:
        """What bedplate and the engines wrote since then."""
        for log in sorted((home() / "logs").glob("*.log")):
            if log.stat().st_mtime >= since - 1:
                target = self.folder / f"{note}-logs" / log.name
                target.parent.mkdir(exist_ok=True)
                shutil.copy(log, target)

    def ask(self, endpoint: dict[str, Any], limit_s: float = 60.0) -> str:
        body = {
            "model": endpoint["model"],
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 24,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{endpoint['url']}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return str(json.loads(answer.read())["choices"][0]["message"]["content"])

    def torch_python(self) -> str:
        """A Python with PyTorch: that of an engine that is registered or installed, else this one."""
        return str(self.given.torch_python or self.python_of(("pytorch", "vllm", "sglang")))

    def python_of(self, engines: Sequence[str]) -> str:
        for engine in engines:
            for manifest in (home() / "engines" / engine).glob("*/bedplate.json"):
                found = json.loads(manifest.read_text())
                python = found.get("adopted") or str(manifest.parent / "bin" / "python")
                if Path(python).exists():
                    return str(python)
        return sys.executable

    @contextlib.contextmanager
    def held_memory(self, held: str, then: str = WAIT) -> Iterator[None]:
        """Another process that holds so many bytes of the GPU, of those that are `free`; with COMPUTE it is busy."""
        if self.tiny or self.given.dry_run:
            print(f"  (another process holds {held} bytes of the GPU)")
            yield
            return
        words = [self.torch_python(), "-c", HOLD.format(held=held, then=then)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield
        finally:
            end(process, gently=False)


def end(process: subprocess.Popen[bytes], gently: bool = True) -> None:
    """Ends a command and all that it started: SIGINT first, with which bedplate writes what it has measured."""
    for number, wait_s in ((signal.SIGINT, CUT_S), (signal.SIGTERM, END_S)) if gently else ():
        with contextlib.suppress(ProcessLookupError):
            # The leader alone: what it started, it ends in order.
            process.send_signal(number)
        try:
            process.wait(wait_s)
            break
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def home() -> Path:
    if (given := os.environ.get("BEDPLATE_HOME")) is not None:
        return Path(given)
    from bedplate.home import get_home as found

    return found()


def models_dir(given: argparse.Namespace) -> Path:
    return Path(given.models) if given.models else given.out / "weights"


def last_line(path: Path, lines: int = 40) -> str:
    """The last error in the last lines, else the last line."""
    found = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    errors = [line for line in found[-lines:] if line.startswith(("error", "Error"))]
    return (errors or found or [""])[-1][:300]


# steps


def take_facts(step: Taking) -> None:
    step.bedplate("--version", to="bedplate.txt", needed=False)
    step.bedplate("probe", "--measure", to="probe.txt", needed=False)
    step.bedplate("probe", "--json", to="machine.json", needed=False)
    step.bedplate("engines", "--json", to="engines.json", needed=False)
    step.bedplate("doctor", to="doctor.txt", needed=False)
    for name, words in {
        "nvidia-smi-q.txt": ["nvidia-smi", "-q"],
        "nvcc.txt": ["nvcc", "--version"],
        "packages.txt": [step.torch_python(), "-m", "pip", "list"],
        "cpu.txt": ["lscpu"],
        "disk.txt": ["df", "-h", str(step.given.out)],
    }.items():
        if shutil.which(words[0]) or Path(words[0]).exists():
            step.command(words, to=name, needed=False, limit_s=60)
    for manifest in (home() / "engines").glob("*/*/bedplate.json"):
        shutil.copy(manifest, step.folder / f"{manifest.parent.parent.name}-{manifest.parent.name}.json")


def find_tokenizer(step: Taking) -> Path | None:
    """The model whose tokenizer the random models have."""
    like: Path | None = step.given.like or next((home() / "models" / "builtin").glob("*.gguf"), None)
    if like is None and not step.given.dry_run:
        raise StepFailed(f"the built-in model is not in {home() / 'models' / 'builtin'}")
    return like


def take_models(step: Taking) -> None:
    like = find_tokenizer(step)
    for shape in ("8b", "moe"):
        out = Path(step.model(shape))
        if (out / "model.safetensors.index.json").exists():
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        named = {"8b": "tiny", "moe": "tiny-moe"}[shape] if step.tiny else shape
        write_model(step, like, named, "bf16", out)


def write_model(step: Taking, like: Path | None, shape: str, form: str, out: Path) -> None:
    words = [str(RANDOM_LLAMA), "--like", str(like), "--shape", shape, "--form", form, "--out", str(out)]
    step.command([step.torch_python(), *words])


def serve_twice(name: str, *, then_kill: bool = False, native: bool = False) -> Callable[[Taking], None]:
    """A cold start and one that finds the compile cache, with the start-up check and an answer each.

    With `then_kill`, the second one's engine core is killed at the end, which saves a start. `native`: with the build
    for this machine, which the cold start makes if it is not there.
    """

    def take(step: Taking) -> None:
        engine = step.engine(name)
        users = "4" if step.tiny else "64"
        step.bedplate("plan", "--engine", engine, "--users", users, "--json", to="plan.json")
        for note in ("cold", "warm"):
            build = list_build_options(step) if native else []
            with step.service(engine, note, "--users", users, *build) as endpoint:
                if not step.given.dry_run:
                    step.keep(f"{note}.answer.json", {"question": QUESTION, "answer": step.ask(endpoint)})
                step.bedplate("status", endpoint["name"], "--json", to=f"{note}.status.json", needed=False)
                if then_kill and note == "warm" and not step.given.dry_run:
                    kill_core(step, endpoint, 45)

    return take


def bench_shape(name: str, shape: str, *counts: int, budget: str = "80s") -> Callable[[Taking], None]:
    def take(step: Taking) -> None:
        bench_model(step, step.engine(name), step.model(shape), counts or (1, 16, 64, 256), budget=budget)

    return take


def bench_model(step: Taking, engine: str, model: str, counts: Sequence[int], *more: str, budget: str = "80s") -> None:
    """Plans for each load and one run of all; `more` are further options of the run."""
    prompt, output = ("32", "8") if step.tiny else ("512", "128")
    sizes = ["--prompt-tokens", prompt, "--output-tokens", output]
    loads = step.loads(*counts)
    for count in loads.split(","):
        words = ["plan", model, "--engine", engine, "--concurrency", count, *sizes, "--json"]
        step.bedplate(*words, to=f"plan-{count}.json", limit_s=60, needed=False)
    began = time.time()
    try:
        step.bedplate(
            "bench", model, "--engines", engine, "--concurrency", loads, *sizes, "--no-quality",
            "--seconds", "1" if step.tiny else "6", "--repeats", "2", "--budget", "20s" if step.tiny else budget,
            *more, "-o", str(step.folder / "run.json"),
        )  # fmt: skip
    finally:
        if not step.given.dry_run:
            step.copy_logs("bench", began)


def side_by_side(
    shape: str,
    sides: Sequence[str],
    loads: str,
    rounds: int,
    first_loads: str = "",
    *,
    seconds: int = 4,
    tiny_loads: str = "1:32/8,2:48/8/32",
) -> Callable[[Taking], None]:
    def take(step: Taking) -> None:
        named = []
        for side in sides:
            engine, colon, how = side.partition(":")
            named.append(f"{step.engine(engine)}{colon}{how}")
        began = time.time()
        short = ["--loads", tiny_loads, "--rounds", "3", "--seconds", "1"]
        words = short if step.tiny else ["--loads", loads, "--rounds", str(rounds), "--seconds", str(seconds)]
        if first_loads:
            words = [*words, "--first-loads", "2:64/2,2:64/2/56" if step.tiny else first_loads]
        try:
            step.command(
                [sys.executable, str(HERE / "side_by_side.py"), step.model(shape), "--sides", ",".join(named), *words,
                 "--out", str(step.folder)],
                limit_s=900,
            )  # fmt: skip
        finally:
            if not step.given.dry_run:
                step.copy_logs("sides", began)

    return take


def take_compare(step: Taking) -> None:
    side_by_side("8b", ("vllm", "sglang"), "64,64:2048/128/1792", 4)(step)
    a, b = (step.folder / f"{step.engine(name)}.json" for name in ("vllm", "sglang"))
    step.bedplate("compare", str(a), str(b), "--allow", "quantization", to="compare.txt", needed=False)


def take_agent(step: Taking) -> None:
    """Both engines side by side with sessions of agents: growing conversations with tool calls and a common beginning.

    Each engine starts once for all rounds, and while the first one starts, the packages of the second one are read. The
    caches of 12 sessions fit in half of the memory of a GPU of 141 GB.
    """
    with reading_packages(step, "sglang"):
        side_by_side("8b", ("vllm", "sglang"), "agent=12", 3, seconds=25, tiny_loads="agent=2:2000/8")(step)
    runs = [str(step.folder / f"{step.engine(name)}.json") for name in ("vllm", "sglang")]
    step.bedplate("compare", *runs, "--allow", "quantization", to="compare.txt", needed=False)


@contextlib.contextmanager
def reading_packages(step: Taking, engine: str) -> Iterator[None]:
    """Meanwhile, another process imports the engine, so that its packages are in the page cache when it starts."""
    if step.tiny or step.given.dry_run:
        print(f"  (another process imports {engine})")
        yield
        return
    words = [step.python_of((engine,)), "-c", f"import {engine}.srt.entrypoints.http_server"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        end(process, gently=False)


BOTTLENECKS = {
    "few sequences": "vllm:slots=8",
    "small KV cache": "vllm:--num-gpu-blocks-override=640",
    "no CUDA graphs": "vllm:--enforce-eager",
}


def take_bottlenecks(step: Taking) -> None:
    """Bottlenecks made on purpose beside the plan without them: what `diagnose` says of each, and what is gained."""
    sides = ["vllm", "vllm:slots=1"] if step.tiny else ["vllm", *BOTTLENECKS.values()]
    try:
        # The fourth bottleneck, a long prefill, is a workload: without a shared prefix and with one.
        side_by_side("8b", sides, "1,64", 3, "16:4096/16,16:4096/16/4080")(step)
    finally:
        for run in sorted(step.folder.glob("*.json")):
            if run.stem != "verdicts" and not run.stem.startswith("diagnosis"):
                step.bedplate("diagnose", str(run), to=f"diagnosis-{run.stem}.txt", needed=False, limit_s=60)
                words = ["diagnose", str(run), "--json"]
                step.bedplate(*words, to=f"diagnosis-{run.stem}.json", needed=False, limit_s=60)


NGRAM = "+".join(
    f"--speculative-config.{name}={value}"
    for name, value in {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}.items()
)
OPTIONS = ("vllm", "vllm:--kv-cache-dtype=fp8", "vllm:--no-enable-prefix-caching", f"vllm:{NGRAM}")


def take_options(step: Taking) -> None:
    """The plan beside an FP8 cache, no prefix cache and n-gram speculation: unique prompts and a shared prefix."""
    sides = OPTIONS[:1] if step.tiny else OPTIONS
    side_by_side("8b", sides, "1,64,64:2048/128/1792", 3)(step)


def measure_empty(shape: str) -> Callable[[Taking], None]:
    """A shape that is too large to be written in the time: files without content, and weights that vLLM fills in."""

    def take(step: Taking) -> None:
        out = Path(step.model(shape))
        if not (out / "model.safetensors.index.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            named = {"32b": "tiny", "mla": "tiny-mla"}[shape] if step.tiny else shape
            write_model(step, find_tokenizer(step), named, "bf16" if step.tiny else "empty", out)
        for count in step.loads(1, 16, 64, 256).split(","):
            sizes = ("--prompt-tokens", "512", "--output-tokens", "128")
            words = ("plan", str(out), "--engine", step.engine("vllm"), "--concurrency", count, *sizes, "--json")
            step.bedplate(*words, to=f"plan-{count}.json", limit_s=60, needed=False)
        side_by_side(shape, ("vllm" if step.tiny else "vllm:--load-format=dummy",), "1,16,64,256", 2)(step)

    return take


def take_migrate(step: Taking) -> None:
    """From one engine to the other and back under streams; every answer is looked at."""
    first, second = step.engine("vllm"), step.engine("sglang")
    users = "4" if step.tiny else "64"
    with step.service(first, "service", "--users", users, "--context", "2048", check=False) as endpoint:
        words = [("migrate", engine, endpoint["name"], "--step-limit", "10", "--json") for engine in (second, first)]
        if step.given.dry_run:
            for one in words:
                step.bedplate(*one)
            return
        # Tokens of another engine may take longer: what is looked at here is whether requests are lost.
        more = ("--slower", "20", *(("--prefixes", "8") if step.tiny else ()))
        rows = asyncio.run(_migrate_under_streams(step, endpoint, [(*one, *more) for one in words], int(users)))
        step.keep("streams.json", rows)
        if rows["failed"] or rows["truncated"] or rows["duplicated"]:
            raise StepFailed(f"{len(rows['failed'])} failed, {len(rows['truncated'])} truncated answers")
        if lost := [one for one in rows["migrations"] if one["outcome"] != "migrated"]:
            raise StepFailed(f"to {lost[0]['to']}: {lost[0]['outcome']}, {lost[0]['reason']}")


async def _migrate_under_streams(
    step: Taking, endpoint: dict[str, Any], commands: Sequence[Sequence[str]], count: int
) -> dict[str, Any]:
    sys.path.insert(0, str(REPOSITORY))
    from tests.soak.streams import Streams

    done = []
    async with Streams(endpoint["url"], endpoint["model"], count, 8 if step.tiny else 128) as streams:
        await asyncio.sleep(3)
        for number, words in enumerate(commands):
            before, began = streams.counts.whole, time.monotonic()
            to = f"migrate-{number + 1}.json"
            code, text = await asyncio.to_thread(lambda w=words, t=to: step.bedplate(*w, to=t, needed=False))  # type: ignore[misc]
            result = json.loads(text) if text.strip().startswith("{") else {}
            done.append({
                "to": words[1], "status": code, "outcome": result.get("outcome"), "reason": result.get("reason"),
                "side_by_side": result.get("side_by_side"), "seconds": time.monotonic() - began,
                "answers_meanwhile": streams.counts.whole - before,
            })  # fmt: skip
            await asyncio.sleep(3)
    counts = streams.counts
    return {
        "streams": count, "migrations": done, "whole": counts.whole, "failed": counts.failed,
        "truncated": counts.truncated, "duplicated": counts.duplicated, "rejected": counts.turned_away,
        "longest_s": max(counts.took_s, default=None),
    }  # fmt: skip


def take_core_killed(step: Taking) -> None:
    with step.service(step.engine("vllm"), "killed", "--users", "4", check=False) as endpoint:
        if not step.given.dry_run:
            kill_core(step, endpoint, 150)


def kill_core(step: Taking, endpoint: dict[str, Any], limit_s: float) -> None:
    """The engine core is killed, and the API server is not: what `serve` notices, and when it answers again."""
    import psutil

    below = psutil.Process(endpoint["pid"]).children(recursive=True)
    seen = [{"pid": one.pid, "name": one.name(), "words": one.cmdline()[:8]} for one in below]
    step.keep("processes.json", seen)
    # vLLM names its core VLLM::EngineCore; a process without a core of its own dies as a whole.
    core = next((one for one in below if "EngineCore" in " ".join((one.name(), *one.cmdline()[:1]))), below[-1])
    step.say(f"killing {core.pid} {core.name()}")
    core.kill()
    began, rows = time.monotonic(), []
    while time.monotonic() - began < min(limit_s, step.left_s() - 30):
        row: dict[str, Any] = {"s": round(time.monotonic() - began, 1)}
        try:
            row["answer"] = step.ask(endpoint, 10)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        words = [sys.executable, "-m", "bedplate", "status", endpoint["name"], "--json"]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60)
        with contextlib.suppress(ValueError, LookupError):
            engines = json.loads(told.stdout)["models"][0]["engines"]
            row["state"] = [(one["state"], one["reason"], one["restarts"]) for one in engines]
        rows.append(row)
        step.keep("after.json", rows)
        if "answer" in row and row["s"] > 3:
            break
        time.sleep(0.5)
    step.say(f"after {time.monotonic() - began:.1f} s: {rows[-1] if rows else 'no time was left to look'}")


def take_out_of_memory(step: Taking) -> None:
    """Logs of a model that does not fit, first its weights and then its cache: the engine alone, without the plan."""
    if step.tiny:
        return
    python, model = step.python_of(("vllm",)), step.model("8b")
    vllm = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", "8899", "--enforce-eager"]
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with step.held_memory("free - 10 * 10**9"):
        words = [*vllm, "--gpu-memory-utilization", "0.05", "--max-model-len", "2048"]
        step.command(words, to="vllm-weights.log", limit_s=70, needed=False, env=env)
    words = [*vllm, "--gpu-memory-utilization", "0.13", "--max-model-len", "131072"]
    step.command(words, to="vllm-cache.log", limit_s=70, needed=False, env=env)


def take_busy_gpu(step: Taking) -> None:
    """Another process holds 60 GB and computes: `bench` waits for it, then refuses and names it."""
    engine, model = step.engine("vllm"), step.model("8b")
    with step.held_memory("60 * 10**9", COMPUTE):
        step.bedplate("probe", to="probe.txt", needed=False)
        step.bedplate("plan", model, "--engine", engine, "--concurrency", "64", to="plan.txt", needed=False)
        if shutil.which("nvidia-smi"):
            step.command(["nvidia-smi", "-q"], to="nvidia-smi-q.txt", needed=False)
            step.command(["nvidia-smi", "pmon", "-c", "1", "-s", "u"], to="nvidia-smi-pmon.txt", needed=False)
        if step.tiny:
            return
        code, _ = step.bedplate("bench", model, "--engines", engine, "--wait-for-gpu", "8s", needed=False)
    if not step.given.dry_run:
        check_refusal(step, code, "(process ")


def check_refusal(step: Taking, code: int, words: str) -> None:
    text = last_line(step.folder / "log.txt", lines=8)
    step.keep("refused.json", {"status": code, "error": text})
    if code != 3 or words not in text:
        raise StepFailed(f"bench did not refuse the GPU: status {code}, {text}")


def take_shared_gpu(step: Taking) -> None:
    """A service starts beside a process that computes, and `bench` flags it; then two benches measure it at once."""
    short = ("--prompt-tokens", "32", "--output-tokens", "8", "--seconds", "1")
    sizes = short if step.tiny else ("--prompt-tokens", "128", "--output-tokens", "64", "--seconds", "4")
    users = "2" if step.tiny else "16"

    def bench(url: str, to: str, *more: str) -> int:
        words = ("bench", "--url", url, "--concurrency", users, *sizes, "--repeats", "1", "--no-quality", *more)
        code, _ = step.bedplate(*words, "-o", str(step.folder / f"{to}.json"), to=f"{to}.txt", needed=False)
        return code

    with contextlib.ExitStack() as other, concurrent.futures.ThreadPoolExecutor() as pool:
        other.enter_context(step.held_memory("10 * 10**9", COMPUTE))
        model = step.model("8b")
        with step.service(step.engine("vllm"), "shared", model, "--users", users, check=False) as endpoint:
            url = endpoint["url"]
            codes = {"beside a process": bench(url, "beside-a-process", "--allow-busy-gpu")}
            other.close()
            first = pool.submit(bench, url, "first", "--wait-for-gpu", "20s", "--repeats", "3")
            while not first.done() and not any((home() / "run" / "measuring").glob("*.json")):
                time.sleep(0.2)
            codes["second, refused"] = bench(url, "second", "--wait-for-gpu", "1s")
            codes["third, allowed"] = bench(url, "third", "--allow-busy-gpu")
            codes["first"] = first.result()
    if step.given.dry_run:
        return
    flags = {name: list_flags(step.folder / f"{name}.json") for name in ("beside-a-process", "first", "third")}
    step.keep("outcome.json", {"statuses": codes, "flags": flags})
    expected = {"beside a process": 0, "second, refused": 3, "third, allowed": 0, "first": 0}
    if not step.tiny and (codes != expected or not all("busy" in kinds for kinds in flags.values())):
        raise StepFailed(f"statuses {codes}, flags {flags}")


def list_flags(path: Path) -> dict[str, str]:
    """Kinds and texts of the flags in a run file."""
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    return {flag["kind"]: flag["text"] for cell in cells for flag in cell["flags"]}


def take_tune(name: str) -> Callable[[Taking], None]:
    def take(step: Taking) -> None:
        minutes = max(1.0, min(10.0, (step.left_s() - 60) / 60)) if not step.tiny else 1.0
        sizes = ["--prompt-tokens", "32", "--output-tokens", "8"] if step.tiny else []
        began = time.time()
        try:
            code, _ = step.bedplate(
                "tune", step.model("8b"), "--engine", step.engine(name), "--concurrency", step.loads(64).split(",")[-1],
                *sizes, "--budget", f"{minutes:.0f}m", "--export", str(step.folder / "tuned.json"), "--json",
                to="tune.json", needed=False, limit_s=60 * minutes + 240,
            )  # fmt: skip
            if code not in (0, 1):
                raise StepFailed(f"tune ended with status {code}: {last_line(step.folder / 'log.txt')}")
        finally:
            if not step.given.dry_run:
                step.copy_logs("tune", began)

    return take


def write_gguf(step: Taking, shape: str = "8b") -> Path:
    """A shape with 4-bit weights, written once."""
    out = Path(step.model(shape)).with_suffix(".gguf")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        tiny = {"8b": "tiny", "moe": "tiny-moe"}[shape]
        # Rows of the small experts are too short for blocks of 4-bit weights.
        write_model(step, find_tokenizer(step), tiny if step.tiny else shape, "q8_0" if step.tiny else "q4_k", out)
    return out


def list_build_options(step: Taking) -> list[str]:
    return [] if step.tiny else ["--build", "native"]


LEFT_FOR_EXPERTS = 13 << 30
"""Enough for the mixture of experts in 8 bits with its cache, and less than its 16-bit weights."""


def take_experts_in_little_memory(step: Taking) -> None:
    """vLLM quantizes experts while it loads them, where the free memory does not hold all of their 16-bit weights."""
    engine, model = step.engine("vllm"), step.model("moe")
    words = (model, "--users", "1", "--context", "2048")
    with step.held_memory(f"free - {LEFT_FOR_EXPERTS}"):
        step.bedplate("plan", *words, "--engine", engine, "--json", to="plan.json", needed=False)
        with step.service(engine, "experts", *words, check=False) as endpoint:
            if not step.given.dry_run:
                step.keep("answer.json", {"question": QUESTION, "answer": step.ask(endpoint)})


def take_llama_cpp(step: Taking) -> None:
    """The CUDA build of llama.cpp, where its source package is here (UV_FIND_LINKS); builds it if it is not built."""
    with step.service("llama.cpp", "service", *list_build_options(step)) as endpoint:
        if not step.given.dry_run:
            step.keep("answer.json", {"question": QUESTION, "answer": step.ask(endpoint)})
    # A burst of 256 requests takes about a minute.
    counts = (1, 16, 64, 256)
    bench_model(step, "llama.cpp", str(write_gguf(step)), counts, *list_build_options(step), budget="240s")


def take_llama_cpp_experts(step: Taking) -> None:
    model = str(write_gguf(step, "moe"))
    bench_model(step, "llama.cpp", model, (1, 16, 64, 256), *list_build_options(step), budget="240s")


LEFT_FREE = 4 << 30
"""Less than the 8 B shape needs with 4-bit weights and its cache."""


def take_offload(step: Taking) -> None:
    """llama.cpp where the GPU's free memory holds only part of the layers: the plan puts the others on the host."""
    model = str(write_gguf(step))
    with step.held_memory(f"free - {LEFT_FREE}"):
        step.bedplate("plan", model, "--engine", "llama.cpp", to="plan.txt", needed=False)
        bench_model(step, "llama.cpp", model, (1, 4), *list_build_options(step))


VLLM, SGLANG, BOTH = ("vllm",), ("sglang",), ("vllm", "sglang")
STEPS = (
    Step("facts", "the machine, its packages and what it measures", 50, take_facts),
    Step("models", "an 8 B dense shape and a mixture of experts with random weights", 85, take_models),
    Step(
        "vllm-serve",
        "vLLM: built-in model, cold and warm start, start-up check; then its core is killed",
        345,
        serve_twice("vllm", then_kill=True),
        (*VLLM, "pytorch"),
    ),
    Step("vllm-8b", "vLLM: 8 B shape at 1, 16, 64, 256", 210, bench_shape("vllm", "8b"), VLLM),
    Step(
        "vllm-defaults",
        "vLLM: the plan against the engine's defaults, 8 B, interleaved",
        350,
        side_by_side("8b", ("vllm", "vllm:defaults"), "1,64", 5),
        VLLM,
    ),
    Step("bottlenecks", "vLLM: four bottlenecks made on purpose, and diagnose", 610, take_bottlenecks, VLLM),
    Step("moe-vllm", "vLLM: mixture of experts at 1, 16, 64, 256", 190, bench_shape("vllm", "moe"), VLLM),
    Step("sglang-serve", "SGLang: built-in model, cold and warm start, start-up check", 240, serve_twice("sglang"),
         (*SGLANG, "pytorch")),
    Step("sglang-8b", "SGLang: 8 B shape at 1, 16, 64, 256", 240, bench_shape("sglang", "8b", budget="200s"), SGLANG),
    Step(
        "compare",
        "vLLM against SGLang, 8 B, unique prompts and a shared prefix, interleaved",
        320,
        take_compare,
        BOTH,
    ),
    Step("agent", "vLLM against SGLang, 8 B, sessions of agents, interleaved", 600, take_agent, BOTH, optional=True),
    Step("migrate", "vLLM to SGLang and back under 64 streams", 370, take_migrate, (*BOTH, "pytorch")),
    Step("moe-sglang", "SGLang: mixture of experts at 1, 16, 64, 256", 240, bench_shape("sglang", "moe", budget="200s"),
         SGLANG),
    Step("busy-gpu", "bench refuses a GPU that another process uses", 45, take_busy_gpu, VLLM),
    Step("shared-gpu", "serve and bench beside another process, and two benches at once", 140, take_shared_gpu, VLLM),
    Step("out-of-memory", "vLLM: logs of weights and of a cache that do not fit", 90, take_out_of_memory, VLLM),
    Step("tune", "vLLM: tune the 8 B shape at 64", 660, take_tune("vllm"), VLLM),
    Step("tune-sglang", "SGLang: tune the 8 B shape at 64", 660, take_tune("sglang"), SGLANG, optional=True),
    Step("sglang-defaults", "SGLang: the plan against the engine's defaults, 8 B, interleaved", 350,
         side_by_side("8b", ("sglang", "sglang:defaults"), "1,64", 5), SGLANG, optional=True),
    Step("options", "vLLM: FP8 cache, no prefix cache, n-gram speculation beside the plan", 550, take_options, VLLM,
         optional=True),
    Step("dense-32b", "vLLM: a 32 B dense shape at 1, 16, 64, 256", 365, measure_empty("32b"), VLLM, optional=True),
    Step("mla", "vLLM: latent attention and experts at 1, 16, 64, 256", 280, measure_empty("mla"), VLLM, optional=True),
    Step("moe-memory", "vLLM: experts in 8 bits, where the free memory does not hold them in 16", 100,
         take_experts_in_little_memory, VLLM, optional=True),
    Step("core-killed", "vLLM: the engine core is killed", 130, take_core_killed, VLLM, optional=True),
    Step("pytorch-serve", "PyTorch: built-in model, cold and warm start, start-up check", 130, serve_twice("pytorch"),
         ("pytorch",), optional=True),
    Step("llama.cpp-serve", "llama.cpp, CUDA build: built-in model, cold and warm start; builds it if needed", 360,
         serve_twice("llama.cpp", native=True), optional=True),
    Step("pytorch-64", "PyTorch: 8 B shape at 64", 200, bench_shape("pytorch", "8b", 64, budget="180s"), ("pytorch",),
         optional=True),
    Step("llama.cpp", "llama.cpp, CUDA build: built-in model, 8 B shape at 1, 16, 64, 256", 480, take_llama_cpp,
         optional=True),
    Step("moe-llama.cpp", "llama.cpp, CUDA build: mixture of experts at 1, 16, 64, 256", 280, take_llama_cpp_experts,
         optional=True),
    Step("offload", "llama.cpp: 8 B shape with part of its layers on the host", 120, take_offload, optional=True),
    Step("pytorch-8b", "PyTorch: 8 B shape at 1, 16, 64", 260, bench_shape("pytorch", "8b", 1, 16, 64, budget="240s"),
         ("pytorch",), optional=True),
)  # fmt: skip


NEXT = ("models", "tune", "agent")
"""What docs/gpu.md lacks. SGLang may arrive during the first two."""


# the whole


class State:
    """Which steps are done, kept in DIR/state.json after each of them."""

    def __init__(self, out: Path) -> None:
        self.path = out / "state.json"
        self.steps: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def is_done(self, name: str) -> bool:
        return self.steps.get(name, {}).get("state") == "done"

    def set(self, name: str, **what: Any) -> None:
        self.steps[name] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **what}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.steps, indent=1))
        new.replace(self.path)


def chosen_steps(text: str) -> list[Step]:
    known = {step.name: step for step in STEPS}
    if text == "all":
        return [step for step in STEPS if not step.optional]
    text = ",".join(NEXT) if text == "next" else text
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"unknown step {unknown[0]!r}; choose from {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def take_all(given: argparse.Namespace) -> int:
    deadline = time.monotonic() + parse_duration(given.budget)
    state, bad, late = State(given.out), 0, 0
    pending = [step for step in chosen_steps(given.steps) if given.again or not state.is_done(step.name)]
    with sampled_gpu(given):
        while pending:
            step = next((one for one in pending if given.dry_run or not missing(one, given)), None)
            left_s = deadline - time.monotonic()
            if step is None:
                wanted = ", ".join(missing(pending[0], given))
                if not given.wait_for_engines or left_s < pending[0].expected_s:
                    print(f"{pending[0].name}: not begun, {wanted} is not registered", flush=True)
                    return 4
                time.sleep(1)
                continue
            pending.remove(step)
            expected_s = 1.0 if given.dry_run or given.tiny else step.expected_s
            if left_s < expected_s:
                print(f"{step.name}: not begun, takes about {expected_s:.0f} s and {left_s:.0f} s are left", flush=True)
                late += 1
                continue
            bad += not take_one(step, given, state, deadline)
    return 1 if bad else 4 if late else 0


def missing(step: Step, given: argparse.Namespace) -> list[str]:
    """The engines that a step needs and that are not here yet."""
    names = [Taking(step, given, given.out, 0.0).engine(name) for name in step.needs]
    return [name for name in names if not any((home() / "engines" / name).glob("*/bedplate.json"))]


def take_one(step: Step, given: argparse.Namespace, state: State, deadline: float) -> bool:
    folder = given.out / step.name
    folder.mkdir(parents=True, exist_ok=True)
    taking = Taking(step, given, folder, deadline)
    print(f"== {step.name}: {step.what} (about {step.expected_s:.0f} s)", flush=True)
    if given.dry_run:
        step.take(taking)
        return True
    state.set(step.name, state="begun")
    outcome, why = "done", ""
    try:
        step.take(taking)
    except OutOfTime:
        outcome, why = "cut short", "the budget was used up"
    except KeyboardInterrupt:
        state.set(step.name, state="cut short", why="interrupted")
        raise
    except EXPECTED as error:
        outcome, why = "failed", f"{type(error).__name__}: {error}"
    took_s = round(time.monotonic() - taking.began, 1)
    taking.say(f"{outcome} after {took_s} s{f': {why}' if why else ''}")
    state.set(step.name, state=outcome, seconds=took_s, **({"why": why} if why else {}))
    return outcome == "done"


@contextlib.contextmanager
def sampled_gpu(given: argparse.Namespace) -> Iterator[None]:
    """Memory, clocks, power and what throttles the GPU, twice a second from beginning to end: DIR/gpu.csv."""
    if given.dry_run or shutil.which("nvidia-smi") is None:
        yield
        return
    with (given.out / "gpu.csv").open("a") as file:
        words = ["nvidia-smi", f"--query-gpu={SAMPLED}", "--format=csv,noheader,nounits", "-lms", "500"]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def pack(given: argparse.Namespace) -> None:
    """All of DIR but the models, and a copy of the store with every measurement, in one archive."""
    if (store := home() / "store.sqlite").exists():
        copy = given.out / "store.sqlite"
        with contextlib.closing(sqlite3.connect(store)) as live, contextlib.closing(sqlite3.connect(copy)) as kept:
            live.backup(kept)
    with tarfile.open(given.pack, "w:xz", preset=3) as archive:
        for path in sorted(given.out.rglob("*")):
            if path.is_file() and models_dir(given) not in path.parents and path.resolve() != given.pack.resolve():
                with contextlib.suppress(FileNotFoundError):  # what a background process has replaced meanwhile
                    archive.add(path, f"card/{path.relative_to(given.out)}")
    print(f"{given.pack}: {given.pack.stat().st_size / 1e6:.1f} MB", flush=True)


def detach(given: argparse.Namespace) -> None:
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with (given.out / "measure.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).resolve()), *words], stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    (given.out / "measure.pid").write_text(str(process.pid))
    print(f"process {process.pid} measures in the background: {given.out / 'measure.log'}")


def wait(given: argparse.Namespace) -> None:
    """Shows what the background process writes, until it ends or the time is over."""
    until = time.monotonic() + parse_duration(given.wait)
    pid, log = int((given.out / "measure.pid").read_text()), given.out / "measure.log"
    shown = max(0, log.stat().st_size - 4000)
    while True:
        alive = is_running(pid)
        with log.open("rb") as file:
            file.seek(shown)
            text = file.read()
        shown += len(text)
        print(text.decode("utf-8", "replace"), end="", flush=True)
        if not alive or time.monotonic() > until:
            print("the background process has ended" if not alive else "the background process goes on", flush=True)
            return
        time.sleep(2)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def show_list(state: State) -> None:
    for step in STEPS:
        now = state.steps.get(step.name, {}).get("state", "optional" if step.optional else "to do")
        print(f"{step.name:14} {step.expected_s:5.0f} s  {now:9}  {step.what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("card-results"), help="where results go")
    parser.add_argument("--steps", help="names with commas between them, or all, or next: those that docs/gpu.md lacks")
    parser.add_argument("--budget", default="9m", help="for all steps of this call: 540s, 9m")
    parser.add_argument("--like", type=Path, help="folder or GGUF with the tokenizer of the random models")
    parser.add_argument("--torch-python", help="a Python with PyTorch, to write them (default: a registered engine's)")
    parser.add_argument("--models", help="folder of the random models (default: DIR/weights)")
    parser.add_argument("--list", action="store_true", help="show the steps, how long each takes and its state")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--again", action="store_true", help="take steps that are done once more")
    parser.add_argument(
        "--wait-for-engines", action="store_true", help="wait until the engines of a step are registered"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes and loads, to try the program itself")
    parser.add_argument("--replace", action="append", default=[], metavar="ENGINE=OTHER", help="a stand-in for --tiny")
    parser.add_argument("--detach", action="store_true", help="go on in the background and return at once")
    parser.add_argument("--wait", metavar="TIME", help="wait so long for what goes on in the background")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="at the end, write all results to a .tar.xz")
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    # An end that is asked for ends what was started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.list:
        show_list(State(given.out))
        return 0
    if given.detach:
        detach(given)
        return 0
    code = 0
    try:
        if given.wait is not None:
            wait(given)
        elif given.steps is not None:
            code = take_all(given)
    except KeyboardInterrupt:
        code = 130
    finally:
        if given.pack is not None and not given.dry_run:
            pack(given)
    if not given.dry_run:
        show_list(State(given.out))
    return code


if __name__ == "__main__":
    sys.exit(main())
