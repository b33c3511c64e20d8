"""Measures whether a shadow slows real requests: the same requests with and without one, interleaved, in one run.

    python tests/soak/shadows.py --engine pytorch --rounds 3

Serves the built-in model with llama.cpp in the background and sends requests at random moments, so that `bedplate
shadow` has idle time to use, and requests arrive while it works. Uses the engines in BEDPLATE_HOME. Measures the
latency at the client; and, since other processes affect that, the CPU time that the shadow's own processes used while
requests were running. Prints a table. Exits with 1 when requests take significantly longer with a shadow, or when the
shadow used more than 1 % of their time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil

from bedplate.values.statistics import compute_quantile

NAME = "soak-shadows"
Phase = Literal["without", "while it loads", "while it is tried"]
PHASES: tuple[Phase, ...] = ("without", "while it loads", "while it is tried")
RESAMPLES = 2000
WORDS = ("river", "stone", "lamp", "cloud", "house", "bread", "winter", "song", "garden", "bridge", "letter", "road")
MORE = 0.05
"""Limit of the lower end of the confidence interval of the slowdown."""


MOST_TAKEN = 0.01
"""Limit of the CPU time of the shadow's processes, as a share of the requests' time."""


@dataclass
class Timed:
    phase: Phase
    ttft_ms: float
    tpot_ms: float
    took_ms: float = 1.0
    shadow_ms: float = 0.0
    """CPU time of the shadow's processes meanwhile."""


class Others:
    """All descendants of a host except those that existed before the shadow."""

    def __init__(self, host: int) -> None:
        self._host = psutil.Process(host)
        self._before = {one.pid for one in self._host.children(recursive=True)}

    def busy_ms(self) -> dict[int, float]:
        """The CPU time of each so far, from the kernel's scheduler."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for one in self._host.children(recursive=True):
                if one.pid not in self._before:
                    found[one.pid] = _read_cpu_ms(one.pid)
        return found


def _read_cpu_ms(pid: int) -> float:
    """The sum over all running threads."""
    total = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(path.read_text().split()[0]) / 1e6
    return total


def compute_increase(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU time between two samples, without processes that ended meanwhile and with new ones."""
    return sum(max(0.0, taken - before.get(pid, 0.0)) for pid, taken in after.items())


class Visitors:
    """Clients that send requests at random moments (open loop)."""

    def __init__(self, url: str, model: str, others: Others, options: argparse.Namespace) -> None:
        self.url, self.model, self.others, self.options = url, model, others, options
        self.phase: Phase = "without"
        self.timed: list[Timed] = []
        self.failed: list[str] = []
        self._dice = random.Random(options.seed)
        self._number = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._dice.expovariate(1 / self.options.gap_s))
                group.create_task(self._one(session))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        self._number += 1
        words = " ".join(self._dice.choice(WORDS) for _ in range(self._dice.randint(20, 120)))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Number {self._number}: {words}"}],
            "max_tokens": self.options.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        before = self.others.busy_ms()
        phase, began, first, last = self.phase, time.monotonic(), 0.0, 0.0
        try:
            async with session.post(f"{self.url}/chat/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        last = time.monotonic()
                        first = first or last
                if answer.status != 200 or not first:
                    raise aiohttp.ClientError(f"HTTP {answer.status}")
        except aiohttp.ClientError as error:
            self.failed.append(str(error))
            return
        took_ms, taken_ms = 1000 * (time.monotonic() - began), compute_increase(before, self.others.busy_ms())
        tpot_ms = 1000 * (last - first) / (self.options.tokens - 1)
        if phase == self.phase:  # otherwise it overlapped two phases
            self.timed.append(Timed(phase, 1000 * (first - began), tpot_ms, took_ms, taken_ms))


def run_bedplate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bedplate", *words], capture_output=True, text=True, env=build_environment()
    )


def build_environment() -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


async def run_shadow(options: argparse.Namespace, visitors: Visitors, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs `bedplate shadow`, and sets the phase from its output."""
    words = ("shadow", options.engine, NAME, "--share", "100%", "--for", f"{options.for_s:g}s", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bedplate", *words, env=build_environment(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    visitors.phase = "while it loads"
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("no pipes")
    async for raw in process.stderr:
        line = raw.decode().rstrip()
        if line:
            say(line)
        if "comparing answers" in line:
            visitors.phase = "while it is tried"
    said = await process.stdout.read()
    await process.wait()
    visitors.phase = "without"
    found: dict[str, Any] = json.loads(said) if said.strip() else {}
    return found


async def measure(endpoint: dict[str, Any], options: argparse.Namespace, say: Callable[[str], None]) -> Visitors:
    visitors = Visitors(endpoint["url"], endpoint["model"], Others(endpoint["pid"]), options)
    asking = asyncio.create_task(visitors.run())
    try:
        for number in range(options.rounds):
            await asyncio.sleep(options.without_s)
            done = await run_shadow(options, visitors, say)
            verdict = done.get("verdict", {}).get("answer", "no verdict")
            say(
                f"round {number + 1}: {verdict}, {done.get('turns')} rounds, interrupted {done.get('pauses')} times; "
                f"{len(visitors.timed)} requests so far, {len(visitors.failed)} failed"
            )
        await asyncio.sleep(options.without_s)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return visitors


def estimate_slowdown(mine: Sequence[float], usual: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The relative change of the median, and its 95 % confidence interval by resampling."""
    dice = random.Random(seed)
    found = sorted(
        statistics.median(dice.choices(mine, k=len(mine))) / statistics.median(dice.choices(usual, k=len(usual))) - 1
        for _ in range(RESAMPLES)
    )
    middle = statistics.median(mine) / statistics.median(usual) - 1
    return middle, found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES)]


def table(timed: Sequence[Timed]) -> tuple[str, bool]:
    """The table, and whether requests were slowed."""
    lines = [
        "| requests | number | TTFT ms, p50 | p95 | change at p50 | TPOT ms, p50 | p95 | change at p50 "
        "| shadow's CPU time, of the requests' time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    slowed = False
    usual = [one for one in timed if one.phase == "without"]
    for phase in PHASES:
        own = [one for one in timed if one.phase == phase]
        if len(own) < 2 or len(usual) < 2:
            continue
        cells = [phase, str(len(own))]
        for values, theirs in (
            ([one.ttft_ms for one in own], [one.ttft_ms for one in usual]),
            ([one.tpot_ms for one in own], [one.tpot_ms for one in usual]),
        ):
            cells += [f"{compute_quantile(sorted(values), 0.5):,.1f}", f"{compute_quantile(sorted(values), 0.95):,.1f}"]
            if phase == "without":
                cells.append("")
                continue
            middle, low, high = estimate_slowdown(values, theirs)
            slowed = slowed or low > MORE
            cells.append(f"{middle:+.0%} ({low:+.0%} to {high:+.0%})")
        taken = sum(one.shadow_ms for one in own) / sum(one.took_ms for one in own)
        slowed = slowed or taken > MOST_TAKEN
        lines.append(f"| {' | '.join([*cells, f'{taken:.2%}'])} |")
    return "\n".join(lines), slowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="pytorch", help="the challenger")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap-s", type=float, default=4.0, help="between two requests, on average")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--without-s", type=float, default=90.0, help="without a shadow, before each of them")
    parser.add_argument("--for-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = run_bedplate("serve", "-d", "--name", NAME, "--port", "0", "--engine", "llama.cpp", "--concurrency", "4",
                       "--context", "1024", "--no-check", "--json")  # fmt: skip
    if started.returncode:
        print(started.stderr, file=sys.stderr)
        return 3
    endpoint = json.loads(started.stdout)
    try:
        visitors = asyncio.run(measure(endpoint, options, lambda text: print(text, file=sys.stderr, flush=True)))
    finally:
        run_bedplate("stop", NAME)
    text, slowed = table(visitors.timed)
    print(text)
    for one in visitors.failed[:10]:
        print(f"failed: {one}", file=sys.stderr)
    return 1 if slowed or visitors.failed else 0


if __name__ == "__main__":
    sys.exit(main())
