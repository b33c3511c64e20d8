"""Hostile clients against a real engine: other tenants are answered as before, and nothing fails or grows.

    python tests/soak/hostile.py --seconds 1800

Serves the built-in model with llama.cpp of BEDPLATE_HOME. One tenant has two streams, first alone and then beside
clients that send generated requests (tests/soak/grammar.py): all paths, headers, bodies and kinds of framing, sent in
parts, aborted, and without a valid key. Prints a table. Exits with 1 when

- an answer has status 500 or 502 or names a traceback, or a log does,
- the gateway's memory or its open files grow, or the engine was restarted,
- a stream of the other tenant fails, or its p95 TTFT is more than twice the one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import copy
import json
import random
import re
import signal
import socket
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from tests.fleet.serving import Serving, serving
from tests.soak.flood import Seen, create_keys
from tests.soak.grammar import HostileRequest, generate_request
from tests.soak.streams import Streams

STREAMS, TOKENS = 2, 16
CLIENTS = 16
ANSWER_LIMIT_S = 20.0
"""How long a hostile client waits for an answer that may never come, as its request may be incomplete."""
IDLE_S = 1.0
"""An answer in which nothing arrives for this long is complete, or never will be."""
MOST_TIMES = 2.0
MOST_GROWTH_BYTES = 16 * 2**20
SAMPLE_S = 2.0
WARMING = 0.25
"""Share of the time in which memory may grow: caches and pools fill."""
WRONG_STATUSES = {500, 502}
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass
class Results:
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def add_answer(self, seed: str, sent: HostileRequest, answer: bytes) -> None:
        found = STATUS_LINE.findall(answer)
        self.statuses.update(status.decode() for status in found or [b"none"])
        is_wrong = any(int(status) in WRONG_STATUSES for status in found) or b"Traceback" in answer
        if is_wrong and len(self.wrong) < 50:
            self.wrong.append(f"{seed}: {answer[:600]!r} to {b''.join(sent.parts)[:1500]!r}")

    def compute_growth(self) -> int:
        """Of the gateway's memory, from the median after warming up to the one at the end."""
        settled = self.memory_bytes[int(WARMING * len(self.memory_bytes)) :]
        third = max(1, len(settled) // 3)
        return int(statistics.median(settled[-third:]) - statistics.median(settled[:third])) if settled else 0


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
    url: str, model: str, keys: tuple[str | None, ...], seconds: float, seed: int, results: Results
) -> None:
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    until = time.monotonic() + seconds

    async def run_client(number: int) -> None:
        count = 0
        while time.monotonic() < until:
            name = f"{seed}:{number}:{count}"
            random_ = random.Random(name)
            sent = generate_request(random_, model, random_.choice(keys))
            results.add_answer(name, sent, await send_request(host, port, sent))
            count += 1

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(run_client(number))


async def sample_process(process: psutil.Process, results: Results) -> None:
    while True:
        results.memory_bytes.append(process.memory_info().rss)
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
    return [f"{name} has a traceback" for name, text in texts.items() if "Traceback (most recent" in text]


async def run(options: argparse.Namespace) -> int:
    alone, beside, results = Seen(), Seen(), Results()
    with create_keys() as (quiet_key, hostile_key), serving("--engine", options.engine, "--concurrency", "4") as one:
        one.wait_ready()
        url, model = one.endpoint["url"], one.endpoint["model"]
        process = psutil.Process(one.process.pid)
        async with Streams(url, model, STREAMS, TOKENS, key=quiet_key) as quiet:
            await asyncio.sleep(5)
            before = copy.deepcopy(quiet.counts)
            await asyncio.sleep(min(60.0, options.seconds / 4))
            alone.add(quiet.counts, before)
            before = copy.deepcopy(quiet.counts)
            sampling = asyncio.create_task(sample_process(process, results))
            await attack(one.root, model, (hostile_key, hostile_key, None), options.seconds, options.seed, results)
            sampling.cancel()
            beside.add(quiet.counts, before)
        results.wrong += find_tracebacks(one)
        if restarts := count_restarts(one):
            results.wrong.append(f"the engine was restarted {restarts} times")
        one.stop()
    return report(alone, beside, results)


def report(alone: Seen, beside: Seen, results: Results) -> int:
    times, growth = beside.p95_ms / alone.p95_ms, results.compute_growth()
    wrong = [*results.wrong, *alone.wrong, *beside.wrong]
    rows = [
        ("", "", "goal"),
        ("---", "---:", "---"),
        ("answers by status", json.dumps(dict(sorted(results.statuses.items()))), "no 500, no 502"),
        ("wrong answers, tracebacks, restarts", str(len(results.wrong)), "0"),
        ("growth of the gateway's memory", f"{growth / 2**20:.1f} MiB", f"at most {MOST_GROWTH_BYTES / 2**20:.0f} MiB"),
        ("open files, at most and at the end", f"{max(results.files)}, {results.files[-1]}", ""),
        ("p95 TTFT of the other tenant", f"{alone.p95_ms:.0f} and {beside.p95_ms:.0f} ms: {times:.2f} times",
         f"at most {MOST_TIMES:g} times"),
        ("its complete answers", f"{alone.whole} and {beside.whole}", ""),
        ("its failed, truncated or duplicated answers", str(len(alone.wrong) + len(beside.wrong)), "0"),
    ]  # fmt: skip
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    for text in wrong[:20]:
        print(text, file=sys.stderr)
    return 0 if not wrong and growth <= MOST_GROWTH_BYTES and times <= MOST_TIMES else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--engine", default="llama.cpp")
    parser.add_argument("--seed", type=int, default=0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the service as Ctrl-C does
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
