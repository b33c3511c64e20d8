"""Compare streaming gateways in front of a null engine with known timing."""

import argparse
import contextlib
import datetime
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from peers import FORWARDER, HERE, KEY_VARIABLE, PEERS, Peer, Ports, Unavailable, environment_of
from processes import end_on_sigterm, free_ports, measure, running, tail_of, tree_cpu_s, tree_rss_mb

from bedplate.measure.load.null_server import HEADER_HELP, HEADER_MODES

DIRECT = "direct"
READY_LIMIT_S = 180.0
ROUNDS = {1: 8, 16: 7, 64: 8, 256: 8}
QUICK_ROUNDS = {1: 4, 16: 4, 64: 4, 256: 3}
# A direct p99 this far from the engine's own first token means that the machine is too noisy.
NOISY_MS = 1.0
CROWDED_SHARE = 0.15
SETTLE_S = 1.0
"""Time for work that a gateway does after an answer, such as logging, so that its CPU time is counted."""


@dataclass(frozen=True)
class Settings:
    """Command-line settings."""

    names: tuple[str, ...]
    streams: tuple[int, ...]
    repeats: int
    quick: bool
    work: Path
    json_file: Path | None
    nice: int
    harness_core: int
    gateway_core: int
    headers: str

    @property
    def plain_seconds(self) -> float:
        """Seconds for which plain requests are counted."""
        return 1.5 if self.quick else 4.0

    def rounds(self, streams: int) -> int:
        """Streams per slot, including the warm-up stream."""
        table = QUICK_ROUNDS if self.quick else ROUNDS
        return table[min(table, key=lambda known: abs(known - streams))]


@dataclass
class Level:
    """One gateway at one number of streams, in one repeat."""

    report: dict[str, Any]
    cpu_s: float | None
    core_busy_by_others: float

    @property
    def cpu_s_per_100k(self) -> float | None:
        """CPU seconds of the gateway per 100,000 chunks."""
        chunks = self.report["chunks"]
        return None if self.cpu_s is None or not chunks else self.cpu_s / chunks * 100_000


@dataclass
class Repeat:
    """One gateway in one repeat."""

    levels: dict[int, Level] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    rss_mb: float | None = None


@dataclass
class Summary:
    """The medians of a gateway over its repeats."""

    name: str
    repeats: int
    raw_p50_ms: dict[int, float | None]
    raw_p99_ms: dict[int, float | None]
    added_p50_ms: dict[int, float | None]
    added_p99_ms: dict[int, float | None]
    cpu_s_per_100k: dict[int, float | None]
    requests_per_s: float | None
    cpu_us_per_request: float | None
    rss_mb: float | None
    streams: int
    failed: int
    plain_errors: int
    cut: list[int]


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def median(values: Iterable[float | None]) -> float | None:
    """Median of the measured values."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def wait_until_serving(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a plain completion succeeds, which every gateway here must support."""
    body = json.dumps({"model": "null-model", "messages": [{"role": "user", "content": "ready?"}]})
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ[KEY_VARIABLE]}"}
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if b'"choices"' in response.read() and response.status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    with log.open("rb") as output:
        raise Unavailable(f"did not become ready: {tail_of(output) or 'no output'}")


class Bench:
    """The null engine and the load against it, one gateway after the other."""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self.settings = settings
        self.scratch = scratch
        self.upstream = 0

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """Run the null engine on the harness core."""
        self.upstream = free_ports(1)[0]
        log = self.scratch / "null_server.log"
        options = ["--port", str(self.upstream), "--headers", self.settings.headers]
        command = [sys.executable, "-m", "bedplate.measure.load.null_server", *options]
        with running(command, self.settings.harness_core, self.settings.nice, log) as process:
            wait_until_serving(self.upstream, process, log)
            yield

    def repeat_direct(self) -> Repeat:
        """Measure the null engine with nothing in front of it."""
        return self.run_levels(DIRECT, self.upstream, None, self.settings.streams)

    def repeat_peer(self, peer: Peer) -> Repeat:
        """Start a gateway, measure it and stop it."""
        env = environment_of(peer, self.settings.work)
        gateway, spare = free_ports(2)
        folder = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=self.scratch))
        command = peer.command(env, folder, Ports(self.upstream, gateway, spare))
        log = folder / "output.log"
        core, nice = self.settings.gateway_core, self.settings.nice
        with running(command, core, nice, log, dict(peer.environment)) as process:
            wait_until_serving(gateway, process, log)
            return self.run_levels(peer.name, gateway, process.pid, self.settings.streams)

    def run_levels(self, name: str, port: int, pid: int | None, levels: Sequence[int]) -> Repeat:
        """Run every number of streams, then plain requests."""
        result = Repeat()
        for streams in levels:
            level = self.run_level(port, pid, streams)
            result.levels[streams] = level
            if pid is not None:
                result.rss_mb = max(result.rss_mb or 0.0, tree_rss_mb(pid))
            say(f"  {name}, {streams} streams: {describe(level)}")
        cpu = tree_cpu_s(pid) if pid else 0.0
        result.plain = self.load("plain", port, "--seconds", str(self.settings.plain_seconds))
        if pid is not None:
            time.sleep(SETTLE_S)
            result.plain["cpu_us"] = (tree_cpu_s(pid) - cpu) * 1e6 / max(1, result.plain["requests"])
        say(f"  {name}, plain: {result.plain['per_second']:,.0f} requests/s, {result.plain['errors']} errors")
        return result

    def run_level(self, port: int, pid: int | None, streams: int) -> Level:
        """Run one number of streams and record the CPU time that the gateway used."""
        rounds = self.settings.rounds(streams)
        cpu, busy, begin = (tree_cpu_s(pid) if pid else 0.0), self.core_busy_s(), time.monotonic()
        report = self.load("stream", port, "--streams", str(streams), "--rounds", str(rounds))
        used = tree_cpu_s(pid) - cpu if pid else None
        elapsed = time.monotonic() - begin
        others = max(0.0, (self.core_busy_s() - busy - (used or 0.0)) / elapsed)
        return Level(report, used, others)

    def core_busy_s(self) -> float:
        """Seconds that the gateway's core has not been idle since boot."""
        times = psutil.cpu_times(percpu=True)[self.settings.gateway_core]
        return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)

    def load(self, mode: str, port: int, *options: str) -> dict[str, Any]:
        """Run load.py on the harness core."""
        command = [sys.executable, str(HERE / "load.py"), mode, "--port", str(port), *options]
        output = measure(command, self.settings.harness_core, self.settings.nice, limit_s=150)
        report: dict[str, Any] = json.loads(output)
        return report


def describe(level: Level) -> str:
    """One line about a level, for the progress."""
    report = level.report
    failed = report["errors"] + report["truncated"]
    parts = [f"{report['complete']}/{report['started']} streams complete"]
    if report["ttft_p50_ms"] is not None:
        parts.append(f"TTFT {report['ttft_p50_ms']:.2f}/{report['ttft_p99_ms']:.2f} ms")
    if level.cpu_s_per_100k is not None:
        parts.append(f"{level.cpu_s_per_100k:.2f} CPU-s/100k chunks")
    if failed:
        parts.append(f"FAILED {failed}: {report['messages']}")
    if report["cut"]:
        parts.append("cut short")
    return ", ".join(parts)


def run_all(settings: Settings) -> tuple[dict[str, list[Repeat | None]], dict[str, str]]:
    """Repeat the whole set in rotated order; return the repeats of each gateway and why others were skipped."""
    results: dict[str, list[Repeat | None]] = {name: [] for name in settings.names}
    skipped: dict[str, str] = {}
    peers = {peer.name: peer for peer in PEERS}
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
        bench = Bench(settings, Path(folder))
        with bench.engine():
            for number in range(settings.repeats):
                turn = number % len(settings.names)
                for name in settings.names[turn:] + settings.names[:turn]:
                    peer = peers.get(name)
                    if name in skipped or (peer is not None and peer.slow and number > 0):
                        results[name].append(None)
                        continue
                    say(f"repeat {number + 1}/{settings.repeats}: {name}")
                    try:
                        results[name].append(bench.repeat_peer(peer) if peer else bench.repeat_direct())
                    except Unavailable as reason:
                        skipped[name] = str(reason)
                        results[name].append(None)
                        say(f"  skipped: {reason}")
    return {name: repeats for name, repeats in results.items() if any(repeats)}, skipped


def ttft(repeat: Repeat | None, streams: int, key: str) -> float | None:
    """One TTFT figure of one repeat."""
    if repeat is None or streams not in repeat.levels:
        return None
    value: float | None = repeat.levels[streams].report[key]
    return value


def added(repeats: list[Repeat | None], direct: list[Repeat | None], streams: int, key: str) -> float | None:
    """The median, over the repeats, of what a gateway adds to the direct figure of the same repeat."""
    pairs = [(ttft(mine, streams, key), ttft(base, streams, key)) for mine, base in zip(repeats, direct, strict=True)]
    return median(mine - base for mine, base in pairs if mine is not None and base is not None)


def summarize(name: str, repeats: list[Repeat | None], direct: list[Repeat | None], levels: Sequence[int]) -> Summary:
    """The medians of one gateway."""
    ran = [repeat for repeat in repeats if repeat is not None]
    reports = [level.report for repeat in ran for level in repeat.levels.values()]
    return Summary(
        name=name,
        repeats=len(ran),
        raw_p50_ms={n: median(ttft(each, n, "ttft_p50_ms") for each in ran) for n in levels},
        raw_p99_ms={n: median(ttft(each, n, "ttft_p99_ms") for each in ran) for n in levels},
        added_p50_ms={n: added(repeats, direct, n, "ttft_p50_ms") for n in levels},
        added_p99_ms={n: added(repeats, direct, n, "ttft_p99_ms") for n in levels},
        cpu_s_per_100k={n: median(each.levels[n].cpu_s_per_100k for each in ran) for n in levels},
        requests_per_s=median(each.plain["per_second"] for each in ran),
        cpu_us_per_request=median(each.plain.get("cpu_us") for each in ran),
        rss_mb=median(each.rss_mb for each in ran),
        streams=sum(report["started"] for report in reports),
        failed=sum(report["errors"] + report["truncated"] for report in reports),
        plain_errors=sum(each.plain["errors"] for each in ran),
        cut=sorted({n for each in ran for n, level in each.levels.items() if level.report["cut"]}),
    )


def number(value: float | None, digits: int = 2) -> str:
    """A figure of the table."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(summaries: Sequence[Summary], levels: Sequence[int]) -> str:
    """The results as a markdown table."""
    top = max(levels)
    heads = ["gateway", *(f"+TTFT p50 / p99 ms, {n} streams" for n in levels)]
    heads += ["plain req/s", "CPU-µs / plain request", f"CPU-s / 100k chunks ({top})", "RSS MB", "failed streams"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for each in summaries:
        if each.name == DIRECT:
            cells = [f"({number(each.raw_p50_ms[n])} / {number(each.raw_p99_ms[n])})" for n in levels]
        else:
            cells = [f"{number(each.added_p50_ms[n])} / {number(each.added_p99_ms[n])}" for n in levels]
        cells = [cell + ("*" if n in each.cut else "") for cell, n in zip(cells, levels, strict=True)]
        cells += [number(each.requests_per_s, 0), number(each.cpu_us_per_request, 0)]
        cells += [number(each.cpu_s_per_100k[top]), number(each.rss_mb, 0)]
        rows.append([each.name, *cells, f"{each.failed} of {each.streams}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def notes(summaries: Sequence[Summary], skipped: dict[str, str], settings: Settings) -> list[str]:
    """Notes to print below the table."""
    lines = ["direct: raw TTFT in brackets; the other rows add to it."]
    for each in summaries:
        if each.cut:
            lines.append(f"* {each.name}: too slow for all rounds at {each.cut} streams; no stream started after 20 s.")
        if each.repeats < settings.repeats:
            lines.append(f"{each.name}: measured in {each.repeats} of {settings.repeats} repeats.")
        if each.plain_errors:
            lines.append(f"{each.name}: {each.plain_errors} plain requests failed.")
        if each.name == DIRECT:
            for n, p99 in each.raw_p99_ms.items():
                p50 = each.raw_p50_ms[n]
                if p99 is not None and p50 is not None and p99 - p50 > NOISY_MS:
                    lines.append(f"noisy machine: direct p99 at {n} streams is {p99 - p50:.1f} ms above its p50.")
    return lines + [f"{name}: skipped, {reason}" for name, reason in skipped.items()]


def crowding(results: dict[str, list[Repeat | None]]) -> list[str]:
    """Gateways that shared their core with other processes, and in how many of their levels."""
    lines = []
    for name, repeats in results.items():
        shares = [level.core_busy_by_others for each in repeats if each for level in each.levels.values()]
        crowded = [share for share in shares if share > CROWDED_SHARE]
        if crowded:
            worst = f"up to {max(crowded):.0%} of the gateway's core"
            lines.append(f"other work: {worst} in {len(crowded)} of {len(shares)} levels of {name}.")
    return lines


def targets(summaries: Sequence[Summary], levels: Sequence[int]) -> list[dict[str, Any]]:
    """Compare bedplate with its goals, as far as both sides of a goal were measured."""
    found: list[dict[str, Any]] = []

    def goal(title: str, values: dict[str, float | None], mine: str, other: str, sign: str, limit: float) -> None:
        if mine not in values or other not in values:
            return
        top, bottom = values[mine], values[other]
        # A difference of two noisy percentiles can be zero or less, and then has no ratio.
        ratio = top / bottom if top is not None and bottom is not None and bottom > 0 else None
        met = None if ratio is None else (ratio <= limit if sign == "<=" else ratio >= limit)
        target = {"target": f"{mine}: {title} / {other}'s", "goal": limit, "at_most": sign == "<="}
        found.append({**target, "values": [top, bottom], "ratio": ratio, "met": met})

    router, tenants, top = "vllm-router", "bedplate-tenants", max(levels)
    p99 = {n: {each.name: each.added_p99_ms[n] for each in summaries} for n in levels}
    for n in [n for n in levels if n in (64, 256)]:
        p50 = {each.name: each.added_p50_ms[n] for each in summaries}
        goal(f"added TTFT p50 in ms at {n} streams", p50, "bedplate", router, "<=", 2.0)
        goal(f"added TTFT p99 in ms at {n} streams", p99[n], "bedplate", router, "<=", 2.0)
    cpu = {each.name: each.cpu_s_per_100k[top] for each in summaries}
    rates = {each.name: each.requests_per_s for each in summaries}
    goal(f"CPU-s per 100k chunks at {top} streams", cpu, "bedplate", router, "<=", 1.5)
    goal("plain requests/s", rates, "bedplate", "litellm", ">=", 50.0)
    for mine in (tenants, FORWARDER):
        goal(f"added TTFT p99 in ms at {top} streams", p99[top], mine, router, "<=", 1.0)
        goal("plain requests/s", rates, mine, router, ">=", 2.0)
        goal(f"CPU-s per 100k chunks at {top} streams", cpu, mine, "nginx", "<=", 1.5)
    return found


def target_line(target: dict[str, Any]) -> str:
    """Text for one goal."""
    sign = "<=" if target["at_most"] else ">="
    verdict = {True: "met", False: "missed", None: "not measured"}[target["met"]]
    mine, other = ("-" if value is None else f"{value:,.2f}" for value in target["values"])
    ratio = "" if target["ratio"] is None else f" = {target['ratio']:.2f}x"
    name = "floor: " if target["target"].startswith(FORWARDER) else ""
    return f"{name}{target['target']}: {mine} / {other}{ratio}, goal {sign} {target['goal']:g}x: {verdict}"


def machine() -> dict[str, Any]:
    """Versions and settings that the figures depend on."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "python_build": {"compiler": platform.python_compiler(), "options": sysconfig.get_config_var("CONFIG_ARGS")},
        "requirements": [peer.requirement for peer in PEERS if peer.requirement],
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write all measurements."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"wrote {path}")


def default_work() -> Path:
    """Where peer environments are kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bedplate" / "gateway-bench"


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line."""
    known = (DIRECT, *(peer.name for peer in PEERS))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"comma-separated, of {','.join(known)}; direct always runs")
    parser.add_argument("--streams", default="1,16,64,256", help="comma-separated numbers of concurrent streams")
    parser.add_argument("--repeats", type=int, help="repeats of the whole set (default 3, 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a smoke test, not for publication")
    parser.add_argument("--work", type=Path, default=default_work(), help="folder for environments of other gateways")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--nice", type=int, default=0, help="of all measured processes; negative needs privileges")
    parser.add_argument("--cores", default="0,1", help="core of the engine and the load, core of the gateway")
    parser.add_argument("--headers", choices=HEADER_MODES, default=HEADER_MODES[0], help=HEADER_HELP)
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(",")) if options.only else set(known)
    if wanted - set(known):
        parser.error(f"unknown gateway: {', '.join(sorted(wanted - set(known)))}")
    try:
        streams = tuple(sorted({int(each) for each in options.streams.split(",")}))
        harness_core, gateway_core = (int(each) for each in options.cores.split(","))
    except ValueError:
        parser.error("--streams takes numbers, --cores takes two numbers")
    if not streams or min(streams) < 1 or max(streams) > 2000:
        parser.error("--streams must be between 1 and 2000")
    if not {harness_core, gateway_core} <= os.sched_getaffinity(0) or harness_core == gateway_core:
        parser.error("--cores needs two different cores that this process may use")
    repeats = options.repeats or (1 if options.quick else 3)
    if not 1 <= repeats <= 100:
        parser.error("--repeats must be between 1 and 100")
    return Settings(
        names=tuple(name for name in known if name in wanted | {DIRECT}),
        streams=streams,
        repeats=repeats,
        quick=options.quick,
        work=options.work.expanduser().resolve(),
        json_file=options.json,
        nice=options.nice,
        harness_core=harness_core,
        gateway_core=gateway_core,
        headers=options.headers,
    )


def main() -> int:
    """Run the comparison."""
    settings = parse_settings()
    end_on_sigterm()
    os.sched_setaffinity(0, {settings.harness_core})
    begin = datetime.datetime.now(datetime.UTC)
    try:
        results, skipped = run_all(settings)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    direct = results[DIRECT]
    summaries = [summarize(name, repeats, direct, settings.streams) for name, repeats in results.items()]
    goals = targets(summaries, settings.streams)
    remarks = notes(summaries, skipped, settings) + crowding(results)
    print(table(summaries, settings.streams), *remarks, sep="\n\n")
    print("", *map(target_line, goals), sep="\n")
    if settings.json_file:
        repeats = {name: [asdict(each) if each else None for each in runs] for name, runs in results.items()}
        document = {
            "begin": begin.isoformat(timespec="seconds"),
            "settings": {key: value for key, value in asdict(settings).items() if key not in ("work", "json_file")},
            "machine": machine(),
            "summaries": [asdict(each) for each in summaries],
            "targets": goals,
            "skipped": skipped,
            "repeats": repeats,
        }
        write_json(settings.json_file, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
