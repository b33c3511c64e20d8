"""Compare load generators against a null server with known timing."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "gateway"))

from peers import Unavailable, install  # noqa: E402
from processes import child_environment, end_on_sigterm, end_tree, tail_of  # noqa: E402

from bedplate.measure.load.null_server import MODEL  # noqa: E402
from bedplate.values.statistics import compute_quantile  # noqa: E402

FIRST_MS = 50.0
INTERVAL_MS = 20.0
TOKENS = 64
PROMPT_TOKENS = 128
STREAM_S = (FIRST_MS + INTERVAL_MS * (TOKENS - 1)) / 1000
ROUNDS = {1: 12, 16: 8, 64: 8, 256: 6}
"""Streams per slot."""
LIMIT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """Command-line settings."""

    names: tuple[str, ...]
    streams: tuple[int, ...]
    repeats: int
    server_core: int
    core: int
    nice: int
    realtime: bool
    work: Path
    have: dict[str, Path]
    json_file: Path | None

    def rounds(self, streams: int) -> int:
        """Streams per slot."""
        return ROUNDS[min(ROUNDS, key=lambda known: abs(known - streams))]


@dataclass
class Told:
    """Figures that a generator reports to its user."""

    p50_ms: float
    p99_ms: float
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """One generator at one number of streams, in one repeat."""

    p50_ms: float
    p99_ms: float
    cpu_s: float
    start_s: float
    delivered: float
    """Measured concurrency between the ramp and the last request, divided by the requested concurrency."""
    requests: int
    server_p50_ms: float
    server_p99_ms: float
    """When the null server actually sent its first tokens, by its own clock."""
    more: dict[str, Any] = field(default_factory=dict)


CommandMaker = Callable[[Path, "Job"], list[str]]


@dataclass(frozen=True)
class Job:
    """One run of one generator."""

    url: str
    streams: int
    requests: int
    folder: Path
    tokenizer: Path


@dataclass(frozen=True)
class Generator:
    """A load generator: how it is installed, started and read."""

    name: str
    command: CommandMaker
    told: Callable[[Job, bytes], Told]
    requirement: str | None = None


def bedplate_command(_env: Path, job: Job) -> list[str]:
    """bedplate's generator. Its warm-up is separate; it measures as many streams as the others."""
    seconds = job.requests / job.streams * STREAM_S
    options = ["--url", job.url, "--streams", str(job.streams), "--seconds", f"{seconds:.3f}"]
    return [sys.executable, str(HERE / "ours.py"), *options, "--warmup", f"{2 * STREAM_S:.3f}"]


def bedplate_told(_job: Job, output: bytes) -> Told:
    """Its report."""
    report = json.loads(output)
    report.pop("ttft_ms")
    return Told(report.pop("p50_ms"), report.pop("p99_ms"), report)


def vllm_command(env: Path, job: Job) -> list[str]:
    """vLLM's own client."""
    return [
        *(str(env / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", job.url),
        *("--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(job.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS)),
        *("--num-prompts", str(job.requests), "--max-concurrency", str(job.streams), "--ignore-eos"),
        *("--percentile-metrics", "ttft", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(job.folder), "--result-filename", "vllm.json"),
    ]


def vllm_told(job: Job, _output: bytes) -> Told:
    """Its result file."""
    report = json.loads((job.folder / "vllm.json").read_text())
    return Told(report["median_ttft_ms"], report["p99_ttft_ms"], {"completed": report["completed"]})


def aiperf_command(env: Path, job: Job) -> list[str]:
    """AIPerf, configured to use the server's token counts."""
    return [
        *(str(env / "bin" / "aiperf"), "profile", "--model", MODEL, "--url", job.url),
        *("--endpoint-type", "completions", "--streaming", "--concurrency", str(job.streams)),
        *("--request-count", str(job.requests), "--tokenizer", str(job.tokenizer), "--use-server-token-count"),
        *("--isl", str(PROMPT_TOKENS), "--isl-stddev", "0", "--osl", str(TOKENS), "--ui", "none"),
        *("--random-seed", "0", "--artifact-dir", str(job.folder)),
    ]


def aiperf_told(job: Job, _output: bytes) -> Told:
    """Its summary."""
    (found,) = job.folder.rglob("profile_export_aiperf.json")
    report = json.loads(found.read_text())
    ttft = report["time_to_first_token"]
    return Told(ttft["p50"], ttft["p99"], {"completed": report["request_count"]["avg"]})


def guidellm_command(env: Path, job: Job) -> list[str]:
    """GuideLLM."""
    return [
        *(str(env / "bin" / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={job.url},model={MODEL},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={job.streams}"),
        *("--constraint", f"kind=max_requests,count={job.requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={job.tokenizer}"),
        *("--output", f"kind=json,path={job.folder / 'guidellm.json'}"),
    ]


def guidellm_told(job: Job, _output: bytes) -> Told:
    """Its report."""
    (benchmark,) = json.loads((job.folder / "guidellm.json").read_text())["benchmarks"]
    ttft = benchmark["metrics"]["time_to_first_token_ms"]["successful"]
    return Told(ttft["percentiles"]["p50"], ttft["percentiles"]["p99"], {"completed": ttft["count"]})


GENERATORS = (
    Generator("bedplate", bedplate_command, bedplate_told),
    Generator("vllm", vllm_command, vllm_told, requirement="vllm==0.32.0"),
    Generator("aiperf", aiperf_command, aiperf_told, requirement="aiperf==0.13.0"),
    Generator("guidellm", guidellm_command, guidellm_told, requirement="guidellm==0.8.1"),
)


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer, which the other generators need to create prompts; bedplate needs none."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    # As in every byte-level tokenizer, unprintable bytes are mapped to characters beyond 255.
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_only,
        "decoder": bytes_only,
    }
    tokenizer |= {"model": model, "normalizer": None, "post_processor": None, "truncation": None, "padding": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256}))
    return folder


def prepare_child(core: int, settings: Settings) -> Callable[[], None]:
    """Set core and priority in a child before it runs its program; its children inherit them."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        if settings.nice:
            os.setpriority(os.PRIO_PROCESS, 0, settings.nice)
        if settings.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))

    return prepare


@contextlib.contextmanager
def null_server(settings: Settings, folder: Path) -> Iterator[str]:
    """Run the server on its core."""
    options = [f"--first-ms={FIRST_MS}", f"--interval-ms={INTERVAL_MS}", f"--tokens={TOKENS}"]
    with (folder / "null.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bedplate.measure.load.null_server", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare_child(settings.server_core, settings),
        )
        try:
            line = process.stdout.readline() if process.stdout else b""
            yield f"http://{line.split()[-1].decode()}"
        finally:
            end_tree(process)


def times_of(url: str) -> list[tuple[int, int, int]]:
    """The server's record since the last query: arrival of requests, departure of first and last tokens."""
    with urllib.request.urlopen(f"{url}/null/times", timeout=30) as answer:
        found: list[tuple[int, int, int]] = json.load(answer)["times_ns"]
    return found


def delivered(times: Sequence[tuple[int, int, int]], streams: int) -> float:
    """Mean concurrency, from the time when all slots had started to the arrival of the last request."""
    ordered = sorted(times)
    start, end = ordered[min(streams, len(ordered) - 1)][0], ordered[-1][0]
    if end <= start:
        return 0.0
    busy = sum(max(0, min(last, end) - max(came, start)) for came, _, last in ordered)
    return busy / (end - start) / streams


def run_one(generator: Generator, env: Path, settings: Settings, job: Job) -> Result:
    """Run one generator to its end, and record its report and the server's."""
    times_of(job.url)
    log = job.folder / "output.log"
    begin_ns = time.monotonic_ns()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            generator.command(env, job),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=job.folder,
            env=child_environment({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}),
            start_new_session=True,
            preexec_fn=prepare_child(settings.core, settings),
        )
        try:
            output, cpu_s, status = finished(process)
        finally:
            end_tree(process)
    times = times_of(job.url)
    if status or not times:
        with log.open("rb") as written:
            raise Unavailable(f"ended with status {status}: {tail_of(written) or output[-400:].decode()}")
    told = generator.told(job, output)
    held = sorted((first - came) / 1e6 for came, first, _ in times)
    return Result(
        p50_ms=told.p50_ms,
        p99_ms=told.p99_ms,
        cpu_s=cpu_s,
        start_s=(min(times)[0] - begin_ns) / 1e9,
        delivered=delivered(times, job.streams),
        requests=len(times),
        server_p50_ms=compute_quantile(held, 0.5),
        server_p99_ms=compute_quantile(held, 0.99),
        more=told.more,
    )


def finished(process: subprocess.Popen[bytes]) -> tuple[bytes, float, int]:
    """Output, CPU seconds of the whole tree, status."""

    def give_up(_number: int, _frame: object) -> None:
        raise Unavailable(f"did not finish within {LIMIT_S:.0f} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(LIMIT_S))
    try:
        output = process.stdout.read() if process.stdout else b""
        _, status, use = os.wait4(process.pid, 0)
    finally:
        signal.alarm(0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return output, use.ru_utime + use.ru_stime, process.returncode


def environment_of(generator: Generator, settings: Settings) -> Path:
    """Environment of a generator; installed on first use."""
    if generator.requirement is None:
        return settings.work
    if generator.name in settings.have:
        return settings.have[generator.name]
    env = settings.work / generator.requirement.replace("==", "-")
    if not (env / "bin" / generator.name).exists():
        say(f"installing {generator.requirement} into {env}")
        try:
            install(generator.requirement, env)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{generator.requirement} could not be installed: {error}") from error
    return env


def run_all(settings: Settings) -> tuple[dict[str, dict[int, list[Result]]], dict[str, str]]:
    """Repeat the whole set in rotated order; return the results and why others were skipped."""
    known = {each.name: each for each in GENERATORS}
    results: dict[str, dict[int, list[Result]]] = {
        name: {streams: [] for streams in settings.streams} for name in settings.names
    }
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="load-bench-") as scratch:
        folder = Path(scratch)
        tokenizer = write_tokenizer(folder / "tokenizer")
        with null_server(settings, folder) as url:
            for number in range(settings.repeats):
                turn = number % len(settings.names)
                for name in settings.names[turn:] + settings.names[:turn]:
                    for streams in settings.streams:
                        if name in skipped:
                            continue
                        own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
                        job = Job(url, streams, streams * settings.rounds(streams), own, tokenizer)
                        try:
                            result = run_one(known[name], environment_of(known[name], settings), settings, job)
                        except (Unavailable, OSError, ValueError, KeyError) as reason:
                            skipped[name] = f"{type(reason).__name__}: {reason}"
                            say(f"  {name} skipped: {skipped[name]}")
                            continue
                        results[name][streams].append(result)
                        say(f"repeat {number + 1}, {name}, {streams} streams: {describe(result)}")
    return results, skipped


def describe(result: Result) -> str:
    """One line about a result, for the progress."""
    error = f"{result.p50_ms - FIRST_MS:+.2f}/{result.p99_ms - FIRST_MS:+.2f} ms"
    own = f"{result.server_p50_ms - FIRST_MS:+.2f}/{result.server_p99_ms - FIRST_MS:+.2f}"
    share = f"{result.delivered:.0%} of the load"
    return f"{error} (server {own}), {share}, {result.cpu_s:.1f} CPU-s, start {result.start_s:.1f} s"


def middle(results: Sequence[Result], of: Callable[[Result], float]) -> float | None:
    """The median over the repeats."""
    return statistics.median(map(of, results)) if results else None


def number(value: float | None, form: str) -> str:
    """A figure of the table."""
    return "-" if value is None else format(value, form)


def table(results: dict[str, dict[int, list[Result]]], settings: Settings) -> str:
    """The medians as a markdown table."""
    heads = ["generator", *(f"TTFT error p50 / p99 ms, {n} streams" for n in settings.streams)]
    heads += ["delivered load", "CPU-s", "start s"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, levels in results.items():
        cells = [
            f"{number(middle(found, lambda r: r.p50_ms - FIRST_MS), '+.2f')} / "
            f"{number(middle(found, lambda r: r.p99_ms - FIRST_MS), '+.2f')}"
            for found in levels.values()
        ]
        shares = " / ".join(number(middle(found, lambda r: r.delivered), ".0%") for found in levels.values())
        cpu = " / ".join(number(middle(found, lambda r: r.cpu_s), ".1f") for found in levels.values())
        starts = [result for found in levels.values() for result in found]
        rows.append([name, *cells, shares, cpu, number(middle(starts, lambda r: r.start_s), ".1f")])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def goals(results: dict[str, dict[int, list[Result]]], settings: Settings) -> list[str]:
    """Compare bedplate with its goals, within this run."""
    lines = []
    limits = {64: (0.3, 3.0), 256: (0.5, 8.0)}
    ours = results.get("bedplate", {})
    for n in settings.streams:
        mine = ours.get(n) or []
        if not mine:
            continue
        p50, p99 = (middle(mine, lambda r: r.p50_ms - FIRST_MS), middle(mine, lambda r: r.p99_ms - FIRST_MS))
        if n in limits and p50 is not None and p99 is not None:
            met = p50 <= limits[n][0] and p99 <= limits[n][1]
            lines.append(f"{n} streams: {p50:+.2f} / {p99:+.2f} ms, goal {limits[n]}: {'met' if met else 'missed'}")
        others = {name: found[n] for name, found in results.items() if name != "bedplate" and found[n]}
        if not others:
            continue
        best = min(others, key=lambda name: middle(others[name], lambda r: abs(r.p99_ms - FIRST_MS)) or 0.0)
        least = min(middle(found, lambda r: r.cpu_s) or 0.0 for found in others.values())
        their = [
            middle(others[best], lambda r: r.p50_ms - FIRST_MS),
            middle(others[best], lambda r: r.p99_ms - FIRST_MS),
        ]
        cpu = (middle(mine, lambda r: r.cpu_s) or 0.0) / least
        lines.append(
            f"{n} streams: {best} {their[0]:+.2f} / {their[1]:+.2f} ms; {cpu:.2f} x the lowest CPU time of the others"
        )
    return lines


def machine() -> dict[str, Any]:
    """Versions and settings that the figures depend on."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


def parse_settings() -> Settings:
    """Read the command line."""
    names = tuple(each.name for each in GENERATORS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"comma-separated, of {','.join(names)}")
    parser.add_argument("--streams", default="1,16,64,256", help="comma-separated numbers of concurrent streams")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of the whole set, in rotated order")
    parser.add_argument(
        "--cores", default="0,1", help="core of the null server, core of the generator; may be the same"
    )
    parser.add_argument("--nice", type=int, default=0, help="of all measured processes; negative needs privileges")
    parser.add_argument("--realtime", action="store_true", help="run with real-time priority; needs privileges")
    parser.add_argument("--have", action="append", default=[], metavar="NAME=ENV", help="an existing environment")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "bedplate" / "load-bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    options = parser.parse_args()
    wanted = tuple(options.only.split(",")) if options.only else names
    if set(wanted) - set(names):
        parser.error(f"unknown generator: {', '.join(sorted(set(wanted) - set(names)))}")
    try:
        streams = tuple(sorted({int(each) for each in options.streams.split(",")}))
        server_core, core = (int(each) for each in options.cores.split(","))
        have = {name: Path(env) for name, env in (each.split("=", 1) for each in options.have)}
    except ValueError:
        parser.error("--streams takes numbers, --cores two numbers, --have NAME=ENV")
    if not {server_core, core} <= os.sched_getaffinity(0):
        parser.error("--cores needs cores that this process may use")
    return Settings(
        names=wanted,
        streams=streams,
        repeats=options.repeats,
        server_core=server_core,
        core=core,
        nice=options.nice,
        realtime=options.realtime,
        work=options.work.expanduser().resolve(),
        have=have,
        json_file=options.json,
    )


def main() -> int:
    """Run the comparison."""
    settings = parse_settings()
    end_on_sigterm()
    begin = datetime.datetime.now(datetime.UTC)
    try:
        results, skipped = run_all(settings)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    print(table(results, settings), "", *goals(results, settings), sep="\n")
    print(*(f"{name}: skipped, {reason}" for name, reason in skipped.items()), sep="\n")
    if settings.json_file:
        document = {
            "begin": begin.isoformat(timespec="seconds"),
            "cores": [settings.server_core, settings.core],
            "machine": machine(),
            "results": {n: {s: [asdict(r) for r in found] for s, found in lv.items()} for n, lv in results.items()},
            "skipped": skipped,
        }
        settings.json_file.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
