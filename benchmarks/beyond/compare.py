"""Cost and benefit of distributed serving on one machine: bedplate's replicas, Ray Serve and Dynamo at one endpoint.

    python benchmarks/beyond/compare.py --json beyond.json --only llama,mocker
    python benchmarks/beyond/compare.py --json beyond.json                      the remaining cases

Prints two tables. The first shows the cost of each layer: the same engine and the same load, with and without it. The
second shows the benefit of a router: prompts with shared prefixes, routed by KV cache contents or round robin. Every
case is a fixed number of requests. It is saved as soon as it is measured, and is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bedplate.errors import BedplateError
from bedplate.measure.load import LoadTarget, compute_delivered_tok_s, measure_apart, prepare, run
from bedplate.values.run import Load
from bedplate.values.statistics import compute_quantile

REPLICAS = 2
CONTEXT_TOKENS = 2048
SLOTS = 8
READY_S = 900.0
"""Time limit of a first start, which installs and converts."""
STOP_S = 60.0
LONGEST_CASE_S = 240.0
ROUTED_IN_FLIGHT = 4
ANSWER_TOKENS = 16
"""Short answers, so that prompts take most of the time."""
FEWEST_FOR_P95 = 20
WORDS = [
    "river", "stone", "copper", "lantern", "orchard", "winter", "signal", "harbor", "meadow", "engine", "paper",
    "silver", "thunder", "garden", "mirror", "candle", "forest", "window", "letter", "bridge", "summer", "market",
    "island", "velvet", "hammer", "planet", "saddle", "barrel", "feather", "compass",
]  # fmt: skip


@dataclass(frozen=True)
class Visit:
    """One start of two engines behind one endpoint, and its measurements."""

    name: str
    arguments: tuple[str, ...]
    layer: str | None = None
    """Its row in the first table."""
    router: str | None = None
    """Its row in the second table; visits with the same row are merged."""
    texts: int = 1
    """Seed of the router's traffic: visits with the same number get the same traffic."""
    env: Mapping[str, str] = field(default_factory=dict)


LLAMA, VLLM = ("--engine", "llama.cpp"), ("--engine", "vllm")
RAY, DYNAMO = ("--on", "ray"), ("--on", "dynamo")
MOCKER = (*DYNAMO, "--engine", "mocker")
IN_TURNS = {"DYN_ROUTER_MODE": "round-robin"}
KV, TURNS = "Dynamo, KV router, vLLM", "Dynamo, round robin, vLLM"
VISITS = (
    Visit("llama", LLAMA, layer="llama.cpp"),
    Visit("llama-ray", (*RAY, *LLAMA), layer="llama.cpp on Ray"),
    Visit("vllm", VLLM, layer="vLLM", router="bedplate's gateway, vLLM"),
    Visit("vllm-ray", (*RAY, *VLLM), layer="vLLM on Ray", router="Ray Serve, vLLM"),
    # The two policies run in the order A B B A, so that drift of the machine affects both equally.
    Visit("dynamo-kv-1", (*DYNAMO, *VLLM), layer="vLLM on Dynamo", router=KV),
    Visit("dynamo-turns-1", (*DYNAMO, *VLLM), router=TURNS, env=IN_TURNS),
    Visit("dynamo-turns-2", (*DYNAMO, *VLLM), router=TURNS, texts=2, env=IN_TURNS),
    Visit("dynamo-kv-2", (*DYNAMO, *VLLM), router=KV, texts=2),
    Visit("mocker-kv", MOCKER, router="Dynamo, KV router, mocker"),
    Visit("mocker-turns", MOCKER, router="Dynamo, round robin, mocker", env=IN_TURNS),
)


@dataclass(frozen=True)
class Settings:
    """Settings that are the same for every system; one file holds results for one set of settings."""

    prompt_tokens: int
    output_tokens: int
    alone: int
    """Measured requests, one at a time."""
    at_once: int
    """Measured requests at concurrency 4."""
    prefixes: int
    prefix_words: int
    warm_requests: int
    requests: int

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Concurrency, and the number of measured requests."""
        return ((1, self.alone), (4, self.at_once))


@dataclass(frozen=True)
class Case:
    """Measurements of one visit under one load, by request."""

    visit: str
    kind: str
    """layer or router."""
    engine: str
    concurrency: int
    at: str
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    tokens: float
    """Output tokens within the measurement window."""
    seconds: float
    requests: int
    failed: int
    memory_gb: float | None = None
    prompt_tokens: int = 0
    """Tokens of prompts whose answers report how many were cached."""
    cached_tokens: int = 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


# results


class Kept:
    """The file of results; without a path, only the results of this run."""

    def __init__(self, path: Path | None, settings: Settings) -> None:
        self.path, self.settings = path, settings
        self.cases: dict[tuple[str, str, int], Case] = {}
        if path is None or not path.exists():
            return
        told = json.loads(path.read_text())
        if told["settings"] != asdict(settings):
            sys.exit(f"{path} was measured with {told['settings']}; take another file, or the same settings")
        for one in told["cases"]:
            self.put(Case(**{**one, "ttft_ms": tuple(one["ttft_ms"]), "tpot_ms": tuple(one["tpot_ms"])}))

    def put(self, case: Case) -> None:
        self.cases[case.visit, case.kind, case.concurrency] = case

    def add(self, case: Case) -> None:
        self.put(case)
        if self.path is None:
            return
        told = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "settings": asdict(self.settings),
            "cases": [asdict(one) for one in self.cases.values()],
        }
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(told, indent=1))
        fresh.replace(self.path)

    def missing(self, visit: Visit) -> list[tuple[str, int, int]]:
        """Kind, concurrency and number of requests of the measurements that are still missing."""
        wanted = [("layer", at_once, count) for at_once, count in self.settings.layers] if visit.layer else []
        if visit.router:
            wanted.append(("router", ROUTED_IN_FLIGHT, self.settings.requests))
        return [one for one in wanted if (visit.name, one[0], one[1]) not in self.cases]

    def of(self, kind: str, names: Sequence[str], concurrency: int) -> list[Case]:
        return [self.cases[key] for name in names if (key := (name, kind, concurrency)) in self.cases]


# serving


@contextlib.contextmanager
def served(visit: Visit) -> Iterator[dict[str, Any]]:
    """Run `bedplate serve` for a with block and yield its endpoint; stop all its processes afterwards."""
    command = [sys.executable, "-m", "bedplate", "serve", "--json", "--port", "0", "--no-check"]
    command += ["--replicas", str(REPLICAS), "--context", str(CONTEXT_TOKENS), "--concurrency", str(SLOTS)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *visit.arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            env={**os.environ, **visit.env}, start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(READY_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            timer.cancel()
            if not line:
                log.seek(0)
                raise RuntimeError(f"{visit.name} did not start: {log.read().decode(errors='replace')[-1500:]}")
            yield json.loads(line)
        finally:
            timer.cancel()
            stopped(process, visit.name)


def stopped(process: subprocess.Popen[bytes], name: str) -> None:
    """Stop the process. Report and kill what remains, because it would affect the next measurement."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _, left = psutil.wait_procs(below, timeout=10)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        if left:
            say(f"! {name} left {len(left)} processes behind")
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def memory_gb(pid: int) -> float:
    """Memory of the whole process tree; where PSS is unavailable, shared pages count once for each process."""
    total = 0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
    return total / 1e9


def engine_of(endpoint: Mapping[str, Any]) -> str:
    return f"{endpoint['engine']} {endpoint['engine_version']}"


# cost of a layer


def layer(visit: Visit, endpoint: Mapping[str, Any], settings: Settings, concurrency: int, count: int) -> Case:
    target = LoadTarget.from_url(endpoint["url"])
    load = Load(concurrency=concurrency, prompt_tokens=settings.prompt_tokens, output_tokens=settings.output_tokens)
    repeat = measure_apart(
        target, load, prepared=run(prepare(target, load)), seconds=1.0, least_requests=count,
        most_seconds=LONGEST_CASE_S, round=concurrency,
    )  # fmt: skip
    good = [sample for sample in repeat.samples if sample.outcome == "ok"]
    return Case(
        visit=visit.name,
        kind="layer",
        engine=engine_of(endpoint),
        concurrency=concurrency,
        at=now(),
        ttft_ms=tuple(sample.ttft_ms for sample in good if sample.ttft_ms is not None),
        tpot_ms=tuple(sample.tpot_ms for sample in good if sample.tpot_ms is not None),
        tokens=(compute_delivered_tok_s(repeat) or 0.0) * repeat.seconds,
        seconds=repeat.seconds,
        requests=len(repeat.samples),
        failed=len(repeat.samples) - len(good),
        memory_gb=memory_gb(endpoint["pid"]),
    )


# benefit of a router


@dataclass
class Told:
    """One request as seen by its client."""

    ttft_ms: float | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    whole: bool = False


def traffic(settings: Settings, seed: int) -> list[str]:
    """Prompts that each begin with one of a few long texts, in a random order that is the same for all systems."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=settings.prefix_words)) for _ in range(settings.prefixes)]
    order = [texts[number % len(texts)] for number in range(settings.warm_requests + settings.requests)]
    chance.shuffle(order)
    return [f"{text} {' '.join(chance.choices(WORDS, k=16))}" for text in order]


async def ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int) -> Told:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    told, began = Told(), time.perf_counter()
    async with session.post(f"{url}/completions", json=body) as answer:
        answer.raise_for_status()
        async for raw in answer.content:
            line = raw.strip()
            if line == b"data: [DONE]":
                told.whole = True
            elif line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    break
                if told.ttft_ms is None and any(choice.get("text") for choice in event.get("choices") or ()):
                    told.ttft_ms = 1000 * (time.perf_counter() - began)
                if usage := event.get("usage"):
                    told.output_tokens, told.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                    told.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return told


async def closed_loop(
    url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int
) -> tuple[list[Told], float]:
    """Send all prompts at this concurrency; return the results and the duration."""
    waiting, found = iter(prompts), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LONGEST_CASE_S)) as session:

        async def client() -> None:
            for prompt in waiting:
                try:
                    found.append(await ask(session, url, model, prompt, tokens))
                except (aiohttp.ClientError, TimeoutError):
                    found.append(Told())

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return found, time.perf_counter() - began


def warmed(endpoint: Mapping[str, Any], settings: Settings) -> None:
    """Send a few requests to each engine, because first requests take longer."""
    chance = random.Random("warm-up")
    prompts = [" ".join(chance.choices(WORDS, k=settings.prompt_tokens)) for _ in range(8)]
    run(closed_loop(endpoint["url"], endpoint["model"], prompts, ROUTED_IN_FLIGHT, ANSWER_TOKENS))


def router(visit: Visit, endpoint: Mapping[str, Any], settings: Settings) -> Case:
    prompts, warm = traffic(settings, visit.texts), settings.warm_requests
    url, model = endpoint["url"], endpoint["model"]
    run(closed_loop(url, model, prompts[:warm], ROUTED_IN_FLIGHT, ANSWER_TOKENS))
    told, took_s = run(closed_loop(url, model, prompts[warm:], ROUTED_IN_FLIGHT, ANSWER_TOKENS))
    good = [one for one in told if one.whole and one.ttft_ms is not None]
    known = [one for one in good if one.cached_tokens is not None]
    return Case(
        visit=visit.name,
        kind="router",
        engine=engine_of(endpoint),
        concurrency=ROUTED_IN_FLIGHT,
        at=now(),
        ttft_ms=tuple(one.ttft_ms for one in good if one.ttft_ms is not None),
        tpot_ms=(),
        tokens=sum(one.output_tokens for one in good),
        seconds=took_s,
        requests=len(told),
        failed=len(told) - len(good),
        prompt_tokens=sum(one.prompt_tokens for one in known),
        cached_tokens=sum(one.cached_tokens or 0 for one in known),
    )


# all cases


def visited(visit: Visit, kept: Kept) -> None:
    """Start the system and measure what is missing."""
    began = time.monotonic()
    with served(visit) as endpoint:
        say(f"{visit.name}: ready after {time.monotonic() - began:.0f} s")
        warmed(endpoint, kept.settings)
        for kind, concurrency, count in kept.missing(visit):
            if kind == "layer":
                case = layer(visit, endpoint, kept.settings, concurrency, count)
            else:
                case = router(visit, endpoint, kept.settings)
            kept.add(case)
            came = f"TTFT {p50(case.ttft_ms)} ms, {case.tokens / case.seconds:.1f} tok/s"
            spent = f"{case.failed} of {case.requests} failed, {time.monotonic() - began:.0f} s so far"
            say(f"  {kind}, {concurrency} in flight: {came}, {spent}")


def named(words: Sequence[str]) -> list[Visit]:
    """Systems with one of these names, or with one of these words in their names, in the usual order."""
    parts = {part for visit in VISITS for part in (visit.name, *visit.name.split("-"))}
    if unknown := [word for word in words if word not in parts]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(visit.name for visit in VISITS)}")
    return [visit for visit in VISITS if not words or {visit.name, *visit.name.split("-")} & set(words)]


# the tables


def p50(values: Sequence[float], digits: int = 0) -> str:
    return f"{compute_quantile(sorted(values), 0.5):.{digits}f}" if values else "-"


def p95(values: Sequence[float]) -> str:
    """For few requests, the slowest one, marked with `<`."""
    if not values:
        return "-"
    few = len(values) < FEWEST_FOR_P95
    return f"< {max(values):.0f}" if few else f"{compute_quantile(sorted(values), 0.95):.0f}"


def joined(cases: Sequence[Case]) -> Case:
    """Merge the requests of several visits."""
    first = cases[0]
    return Case(
        visit=first.visit,
        kind=first.kind,
        engine=first.engine,
        concurrency=first.concurrency,
        at=first.at,
        ttft_ms=tuple(one for case in cases for one in case.ttft_ms),
        tpot_ms=tuple(one for case in cases for one in case.tpot_ms),
        tokens=sum(case.tokens for case in cases),
        seconds=sum(case.seconds for case in cases),
        requests=sum(case.requests for case in cases),
        failed=sum(case.failed for case in cases),
        memory_gb=first.memory_gb,
        prompt_tokens=sum(case.prompt_tokens for case in cases),
        cached_tokens=sum(case.cached_tokens for case in cases),
    )


def layer_table(kept: Kept) -> str:
    lines = [
        "| | engine | concurrency | TTFT ms p50 | p95 | TPOT ms p50 | tok/s | memory GB | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {visit.layer} × {REPLICAS} | {one.engine} | {concurrency} | {p50(one.ttft_ms)} | {p95(one.ttft_ms)} "
        f"| {p50(one.tpot_ms, 1)} | {one.tokens / one.seconds:.1f} | {one.memory_gb or 0:.1f} "
        f"| {one.failed} of {one.requests} |"
        for concurrency, _ in kept.settings.layers
        for visit in VISITS
        for one in kept.of("layer", [visit.name], concurrency)
    ]
    return "\n".join(lines)


def router_table(kept: Kept) -> str:
    lines = [
        "| | engine | TTFT ms p50 | p95 | tok/s | prompt cached | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label in dict.fromkeys(visit.router for visit in VISITS if visit.router):
        cases = kept.of("router", [visit.name for visit in VISITS if visit.router == label], ROUTED_IN_FLIGHT)
        if cases:
            one = joined(cases)
            cached = f"{one.cached_tokens / one.prompt_tokens:.0%}" if one.prompt_tokens else "not told"
            lines.append(
                f"| {label} × {REPLICAS} | {one.engine} | {p50(one.ttft_ms)} | {p95(one.ttft_ms)} "
                f"| {one.tokens / one.seconds:.1f} | {cached} | {one.failed} of {one.requests} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="WORDS", default="", help=f"of {', '.join(one.name for one in VISITS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results that are in it are not measured again")
    parser.add_argument("--tables", action="store_true", help="measures nothing")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--alone", type=int, default=8, help="measured requests of the first table, one at a time")
    parser.add_argument("--at-once", type=int, default=24, help="measured requests of that table, at concurrency 4")
    parser.add_argument("--prefixes", type=int, default=30, help="number of long texts that prompts begin with")
    parser.add_argument("--prefix-words", type=int, default=500, help="words of each text")
    parser.add_argument("--warm-requests", type=int, default=60, help="warm-up requests of the second table")
    parser.add_argument("--requests", type=int, default=60, help="measured requests of the second table, per visit")
    arguments = parser.parse_args()
    settings = Settings(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        alone=arguments.alone,
        at_once=arguments.at_once,
        prefixes=arguments.prefixes,
        prefix_words=arguments.prefix_words,
        warm_requests=arguments.warm_requests,
        requests=arguments.requests,
    )
    kept = Kept(arguments.json, settings)
    # A signal or a time limit that ends this program also stops what it serves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))
    failed = 0
    for visit in named([word for word in arguments.only.split(",") if word]):
        if arguments.tables or not kept.missing(visit):
            continue
        try:
            visited(visit, kept)
        except (BedplateError, RuntimeError, OSError) as error:
            failed += 1
            say(f"! {visit.name}: {error}")
    print(f"{layer_table(kept)}\n\n{router_table(kept)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
