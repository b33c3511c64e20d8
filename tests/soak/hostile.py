"""Hostile clients against real engines: other tenants are answered as before, and nothing fails or grows.

    python -m tests.soak.hostile --minutes 30

Each part has a home of its own, with the engines and models of BEDPLATE_HOME if that is set; otherwise they are
installed. `--only` chooses one of three parts:

- `checks`: the defences of docs/security.md by name. Runs the tests that show them (POINTS). Those that concern a
  running endpoint use a real engine.
- `gateway`: serves the built-in model with llama.cpp. One tenant has two streams, first alone and then beside clients
  that send generated requests (tests/soak/grammar.py): all paths, headers, bodies and kinds of framing, sent in parts,
  aborted, and without a valid key.
- `shipped`: serves it with ONNX Runtime, or another engine (`--shipped-engine`) whose HTTP server is bedplate's. The
  same clients send their requests to its private port, with and without its key. The tenant's streams go through the
  gateway.

Prints a table. Exits with 1 when

- a check fails,
- an answer has status 500 or 502 or names a traceback, or a log does,
- the private port answers a request without its key,
- memory is not flat, or the engine was restarted. Memory, without mapped files, is sampled during the attack. The
  first quarter is not judged, as caches and pools fill. The median of the last third of the other samples may exceed
  that of the first third by 16 MiB, or by 2 % if that is more,
- a stream of the other tenant fails, or its p95 TTFT beside attacks on the gateway is more than twice the one alone. If
  other processes used more than a tenth of the CPU, the p95 is shown and not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import copy
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from tests.fleet.serving import Serving, serving
from tests.measuring import OtherLoad
from tests.private_ports import find_private_port
from tests.soak.flood import Seen, create_keys
from tests.soak.grammar import HostileRequest, generate_request
from tests.soak.streams import Streams

from bedplate.engines import get_engine
from bedplate.measure.flags import BUSY

ROOT = Path(__file__).parents[2]
PARTS = ("checks", "gateway", "shipped")
STREAMS, TOKENS = 2, 16
SLOTS = 4
CLIENTS = 16
ANSWER_LIMIT_S = 20.0
"""How long a hostile client waits for an answer that may never come, as its request may be incomplete."""
IDLE_S = 1.0
"""An answer in which nothing arrives for this long is complete, or never will be."""
MOST_TIMES = 2.0
FEWEST_TIMES = 20
"""Fewer times to first token have no 95th percentile."""
MOST_GROWTH_BYTES, MOST_GROWTH_SHARE = 16 * 2**20, 0.02
SAMPLE_S = 2.0
WARMING = 0.25
"""Share of the time in which memory may grow: caches and pools fill."""
SHOWN_CHARACTERS = 2000
"""Of a traceback. The logs are in a temporary home."""
WRONG_STATUSES = {"500", "502"}
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


class Point(NamedTuple):
    """A defence, and the tests that show it: files, or functions of them."""

    name: str
    tests: tuple[str, ...]


CLIENTS_OF_REAL_ENGINE = "tests/e2e/test_hostile_clients.py::test_hostile_clients_without_keys"
POINTS = (
    Point("one request that makes many sequences", (
        "tests/e2e/test_hostile_tenants.py::test_each_sequence_is_recorded_as_the_engine_counts_it",
        "tests/e2e/test_hostile_tenants.py::test_more_sequences_than_slots_are_refused",
    )),
    Point("aborted requests", (
        "tests/e2e/test_hostile_tenants.py::test_aborted_streams_are_recorded_as_the_engine_counts_them",
    )),
    Point("shares of tenants", ("tests/run/gateway/test_fair_shares.py",)),
    Point("mistakes of clients", ("tests/e2e/test_mistakes.py",)),
    Point("hung engines", ("tests/e2e/test_hung_engine.py", "tests/fleet/test_hung_engines.py")),
    Point("stop and migrate --cancel", ("tests/e2e/test_interrupted_work.py",)),
    Point("requests byte by byte", (
        "tests/e2e/test_hostile_tenants.py::test_request_byte_by_byte_gets_408", "tests/run/gateway/test_arrival.py",
    )),
    Point("descriptors", (CLIENTS_OF_REAL_ENGINE,)),
    Point("foreign Host and Origin", (
        CLIENTS_OF_REAL_ENGINE, "tests/run/gateway/test_origins.py", "tests/run/gateway/test_foreign_pages.py",
    )),
    Point("closed when keys are lost", (
        "tests/e2e/test_hostile_clients.py::test_endpoint_stays_closed_when_its_store_is_gone",
    )),
    Point("private ports", ("tests/e2e/test_closed_ports.py",)),
    Point("hidden names of models", (
        "tests/run/gateway/test_tenants.py::test_names_of_other_tenants_models_appear_nowhere",
        "tests/run/gateway/test_tenants.py::test_hidden_model_is_not_revealed_while_models_are_registered",
    )),
    Point("logs", (CLIENTS_OF_REAL_ENGINE, "tests/run/test_engine_log.py", "tests/test_home.py")),
    Point("bundles", ("tests/bundling/test_hostile.py",)),
    Point("emitted files", ("tests/deploy/test_emitted_hostile.py",)),
    Point("supply chain", ("tests/run/test_locks.py", "tests/run/test_hub.py", "tests/run/test_transport.py")),
    Point("capabilities", ("tests/e2e/test_mistakes.py", "tests/run/gateway/test_mistakes.py")),
    Point("reasons of refusals", (
        "tests/e2e/test_hostile_tenants.py::test_refused_requests_are_counted_by_reason",
        "tests/e2e/test_mistakes.py::test_the_engine_is_not_blamed",
    )),
)  # fmt: skip


class Row(NamedTuple):
    what: str
    result: str
    goal: str
    holds: bool = True


@dataclass
class Results:
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def add_answer(self, seed: str, sent: HostileRequest, answer: bytes, *, must_refuse: bool) -> None:
        found = STATUS_LINE.findall(answer)
        self.statuses.update(status.decode() for status in found or [b"none"])
        is_wrong = any(status.decode() in WRONG_STATUSES for status in found) or b"Traceback" in answer
        is_wrong = is_wrong or (must_refuse and any(status[:1] == b"2" for status in found))
        if is_wrong and len(self.wrong) < 50:
            self.wrong.append(f"{seed}: {answer[:600]!r} to {b''.join(sent.parts)[:1500]!r}")

    def compute_growth(self) -> tuple[int, int]:
        """By how many bytes the memory grew, from the median after warming up to the one at the end, and the limit."""
        settled = self.memory_bytes[int(WARMING * len(self.memory_bytes)) :]
        third = max(1, len(settled) // 3)
        before = statistics.median(settled[:third])
        return int(statistics.median(settled[-third:]) - before), max(
            MOST_GROWTH_BYTES, int(MOST_GROWTH_SHARE * before)
        )

    def describe_memory(self) -> str:
        """Shows whether it levels off."""
        ends = [self.memory_bytes[max(0, len(self.memory_bytes) * part // 6 - 1)] for part in range(1, 7)]
        return ", ".join(f"{one / 2**20:.1f}" for one in ends) + " MiB"


async def send_request(host: str, port: int, sent: HostileRequest, limit_s: float = ANSWER_LIMIT_S) -> bytes:
    answer = b""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), limit_s)
    except OSError:
        return answer
    try:
        for part in sent.parts:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), limit_s)
            if sent.pause_s:
                await asyncio.sleep(sent.pause_s)
        while sent.ends in ("reads", "resets early"):
            part = await asyncio.wait_for(reader.read(65_536), IDLE_S if answer else limit_s)
            answer += part
            if not part or sent.ends == "resets early":
                break
    except (OSError, TimeoutError, RuntimeError):  # uvloop raises the last one if the server has closed
        pass
    finally:
        if sent.ends.startswith("resets"):
            pipe = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):  # the server may have closed it
                # l_onoff 1, l_linger 0: closing sends RST.
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.close()
    return answer


async def attack(
    url: str,
    model: str,
    keys: tuple[str | None, ...],
    seconds: float,
    seed: int,
    results: Results,
    *,
    needs_key: bool = False,
) -> None:
    """Sends generated requests. `needs_key`: without one, no path may be answered."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    until = time.monotonic() + seconds

    async def run_client(number: int) -> None:
        count = 0
        while time.monotonic() < until:
            name = f"{seed}:{number}:{count}"
            random_ = random.Random(name)
            key = random_.choice(keys)
            sent = generate_request(random_, model, key)
            answer = await send_request(host, port, sent)
            results.add_answer(name, sent, answer, must_refuse=needs_key and key is None)
            count += 1

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(run_client(number))


async def sample_process(process: psutil.Process, results: Results) -> None:
    while True:
        memory = process.memory_info()
        # Without pages of files, such as weights that are mapped: the system drops them when it needs the memory.
        results.memory_bytes.append(memory.rss - memory.shared)
        results.files.append(process.num_fds())
        await asyncio.sleep(SAMPLE_S)


def count_restarts(one: Serving) -> int:
    with urllib.request.urlopen(f"{one.root}/health") as answer:
        text = answer.read().decode()
    return sum(map(int, re.findall(r'"restarts": ?(\d+)', text)))


def find_tracebacks(one: Serving) -> list[str]:
    """In what `serve` printed and in the logs that its endpoint names."""
    texts = {"printed": "".join(one.printed)}
    if log := one.endpoint.get("log"):
        for path in Path(log).parent.glob(f"{Path(log).stem.split('@')[0]}*.log"):
            texts[path.name] = path.read_text(errors="replace")
    marked = {name: text.find("Traceback (most recent") for name, text in texts.items()}
    return [
        f"{name} has a traceback: {texts[name][place : place + SHOWN_CHARACTERS]}"
        for name, place in marked.items()
        if place >= 0
    ]


async def attack_service(part: str, engine: str, seconds: float, seed: int) -> list[Row]:
    """Serves a model, and attacks its gateway or the private port of its engine."""
    alone, beside, results, others = Seen(), Seen(), Results(), OtherLoad()
    service = serving("--engine", engine, "--concurrency", str(SLOTS))
    with use_own_home(), create_keys() as (quiet_key, hostile_key), service as one:
        one.wait_ready()
        url, model = one.endpoint["url"], one.endpoint["model"]
        engine_pids = [process.pid for process in one.engine_processes()]
        async with Streams(url, model, STREAMS, TOKENS, key=quiet_key) as quiet:
            await asyncio.sleep(5)
            before = copy.deepcopy(quiet.counts)
            await asyncio.sleep(min(60.0, seconds / 4))
            alone.add(quiet.counts, before)
            before = copy.deepcopy(quiet.counts)
            at_engine = part == "shipped"
            process = one.engine_processes()[0] if at_engine else psutil.Process(one.process.pid)
            sampling = asyncio.create_task(sample_process(process, results))
            if at_engine:
                at = find_private_port(one.engine_processes(), get_engine(engine))
                address, keys = f"http://127.0.0.1:{at.port}", (at.key, at.key, None)
            else:
                address, keys = one.root, (hostile_key, hostile_key, None)
            await attack(address, model, keys, seconds, seed, results, needs_key=at_engine)
            sampling.cancel()
            beside.add(quiet.counts, before)
        results.wrong += find_tracebacks(one)
        if restarts := count_restarts(one):
            results.wrong.append(f"the engine was restarted {restarts} times")
        if [process.pid for process in one.engine_processes()] != engine_pids:
            results.wrong.append("the engine's processes are others than before")
        one.stop()
    return report_attack(part, alone, beside, results, others.share())


def report_attack(part: str, alone: Seen, beside: Seen, results: Results, others: float) -> list[Row]:
    growth, most = results.compute_growth()
    wrong = [*alone.wrong, *beside.wrong]
    for text in [*results.wrong, *wrong][:20]:
        print(f"{part}: {text}", file=sys.stderr)
    rows = [
        Row(
            "answers by status",
            json.dumps(dict(sorted(results.statuses.items()))),
            "no 500, no 502",
            not WRONG_STATUSES & set(results.statuses),
        ),
        Row("wrong answers, tracebacks, restarts", str(len(results.wrong)), "0", not results.wrong),
        Row("growth of memory", f"{growth / 2**20:.1f} MiB", f"at most {most / 2**20:.0f} MiB", growth <= most),
        Row("memory at the end of each sixth of the time", results.describe_memory(), ""),
        Row("open files, at most and at the end", f"{max(results.files)}, {results.files[-1]}", ""),
        Row("complete answers of the other tenant", f"{alone.whole} and {beside.whole}", ""),
        Row("its failed, truncated or duplicated answers", str(len(wrong)), "0", not wrong),
    ]
    is_judged = part == "gateway" and others <= BUSY
    goal = f"at most {MOST_TIMES:g} times" if part == "gateway" else "not a goal: the gateway is bypassed"
    if part == "gateway" and not is_judged:
        goal += f"; not judged: other processes used {others:.0%} of the CPU"
    fewest = min(len(alone.ttft_ms), len(beside.ttft_ms))
    if fewest < FEWEST_TIMES:
        rows.append(Row("its p95 TTFT", f"too few answers: {fewest} of {FEWEST_TIMES}", goal, not is_judged))
    else:
        times = beside.p95_ms / alone.p95_ms
        result = f"{alone.p95_ms:.0f} and {beside.p95_ms:.0f} ms: {times:.2f} times"
        rows.append(Row("its p95 TTFT alone and during the attack", result, goal, not is_judged or times <= MOST_TIMES))
    return [row._replace(what=f"{part}: {row.what}") for row in rows]


@contextlib.contextmanager
def use_own_home() -> Iterator[Path]:
    """Sets BEDPLATE_HOME to a home without keys and services, with the engines and models of the one before."""
    before = os.environ.get("BEDPLATE_HOME")
    with tempfile.TemporaryDirectory(prefix="bedplate-hostile-") as folder:
        for name in ("engines", "models", "prepared") if before is not None else ():
            shared = Path(str(before), name).resolve()
            shared.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).symlink_to(shared)
        os.environ["BEDPLATE_HOME"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["BEDPLATE_HOME"]
            if before is not None:
                os.environ["BEDPLATE_HOME"] = before


def run_checks() -> list[Row]:
    """Runs the tests of all points in one process, one after the other."""
    chosen = sorted({test for point in POINTS for test in point.tests})
    with use_own_home() as home:
        found = home / "results.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={home}/tests"]
        words += ["-o", "junit_family=xunit1", f"--junitxml={found}", *chosen]
        environment = {**os.environ, "BEDPLATE_TEST_HOME": str(home), "BEDPLATE_FLEET": "1"}
        subprocess.run(words, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(found).iter("testcase")) if found.exists() else []
    return [summarize_point(point, cases) for point in POINTS]


def summarize_point(point: Point, cases: list[ElementTree.Element]) -> Row:
    """The results of one point. It holds if each of its files or functions has a test that passed, and none failed."""
    counts: collections.Counter[str] = collections.Counter()
    holds = True
    for test in point.tests:
        own = [case for case in cases if test in (case.get("file"), get_function(case))]
        outcomes = ["failed" if {"failure", "error"} & (kinds := {one.tag for one in case}) else
                    "skipped" if "skipped" in kinds else "passed" for case in own]  # fmt: skip
        counts.update(outcomes)
        holds = holds and bool(own) and "failed" not in outcomes
    result = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"
    return Row(f"check: {point.name}", result, "none failed", holds and counts["passed"] > 0)


def get_function(case: ElementTree.Element) -> str:
    return f"{case.get('file')}::{(case.get('name') or '').partition('[')[0]}"


def run(options: argparse.Namespace) -> int:
    rows: list[Row] = []
    for part in options.only or PARTS:
        if part == "checks":
            rows += run_checks()
        else:
            engine = options.shipped_engine if part == "shipped" else "llama.cpp"
            rows += asyncio.run(attack_service(part, engine, 60 * options.minutes, options.seed))
    print("| | | goal | |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.what} | {row.result} | {row.goal} | {'ok' if row.holds else 'FAILED'} |")
    return 0 if all(row.holds for row in rows) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the attack on each server")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; several times for several")
    parser.add_argument(
        "--shipped-engine", default="onnxruntime", metavar="ID", help="an engine behind bedplate's server"
    )
    parser.add_argument("--seed", type=int, default=0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the service as Ctrl-C does
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
