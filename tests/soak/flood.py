"""Two tenants of the same weight share one real engine: one has a few streams, the other floods.

    python tests/soak/flood.py --seconds 60 --rounds 2

Serves the built-in model with llama.cpp of BEDPLATE_HOME. The first tenant is measured alone and during the flood, in
alternating order. Prints a table. Exits with 1 when its p95 TTFT during the flood is more than twice the one alone, or
its share of the tokens is outside 45 to 55 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fleet.serving import serving
from tests.soak.streams import Counts, Streams

QUIET, FLOOD = "soak-quiet", "soak-flood"
SLOTS = 8
MOST_TIMES, SHARES = 2.0, (0.45, 0.55)
SETTLING_S = 10.0
"""The time until each tenant has its slots; not measured."""


@dataclass
class Seen:
    ttft_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    whole: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, counts: Counts, before: Counts) -> None:
        self.ttft_ms += [1000 * one for one in counts.ttft_s[len(before.ttft_s) :]]
        self.whole += counts.whole - before.whole
        self.tokens += counts.tokens - before.tokens
        self.wrong += [*counts.failed, *counts.truncated, *counts.duplicated]

    @property
    def p95_ms(self) -> float:
        ordered = sorted(self.ttft_ms)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--flood", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the service as Ctrl-C does
    sys.exit(asyncio.run(run(parser.parse_args())))


async def run(options: argparse.Namespace) -> int:
    alone, beside, flood = Seen(), Seen(), Seen()
    with create_keys() as (quiet_key, flood_key), serving("--engine", "llama.cpp", "--concurrency", str(SLOTS)) as one:
        one.wait_ready()

        def streams(count: int, key: str) -> Streams:
            return Streams(one.endpoint["url"], one.endpoint["model"], count, options.tokens, key=key)

        for round_ in range(options.rounds):
            for flooded in (False, True) if round_ % 2 == 0 else (True, False):
                quiet, other = streams(options.streams, quiet_key), streams(options.flood if flooded else 0, flood_key)
                async with quiet, other:
                    await asyncio.sleep(SETTLING_S)
                    before = copy.deepcopy((quiet.counts, other.counts))
                    await asyncio.sleep(options.seconds)
                    (beside if flooded else alone).add(quiet.counts, before[0])
                    flood.add(other.counts, before[1])
                now = beside if flooded else alone
                print(
                    f"{'during the flood' if flooded else 'alone'}: p95 {now.p95_ms:.0f} ms",
                    file=sys.stderr,
                    flush=True,
                )
        one.stop()
    return report(options, alone, beside, flood)


@contextlib.contextmanager
def create_keys() -> Iterator[tuple[str, str]]:
    def bedplate(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "bedplate", "keys", *words],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ,
        ).stdout.strip()

    made = bedplate("add", QUIET), bedplate("add", FLOOD)
    try:
        yield made
    finally:
        for name in (QUIET, FLOOD):
            bedplate("revoke", name)


def report(options: argparse.Namespace, alone: Seen, beside: Seen, flood: Seen) -> int:
    share = beside.tokens / max(1, beside.tokens + flood.tokens)
    times = beside.p95_ms / alone.p95_ms
    wrong = [*alone.wrong, *beside.wrong, *flood.wrong]
    rows = [
        ("the tenant with few streams", "alone", "during the flood", "goal"),
        ("---", "---:", "---:", "---"),
        ("TTFT p95", f"{alone.p95_ms:.0f} ms", f"{beside.p95_ms:.0f} ms: {times:.2f} times", f"at most {MOST_TIMES:g}"),
        ("share of the tokens of both tenants", "", f"{share:.1%}", f"{SHARES[0]:.0%} to {SHARES[1]:.0%}"),
        ("complete answers", str(alone.whole), f"{beside.whole}, and {flood.whole} of the flood", ""),
        ("failed, truncated or duplicated", str(len(alone.wrong)), str(len(beside.wrong) + len(flood.wrong)), "0"),
    ]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    for one in wrong[:5]:
        print(one, file=sys.stderr)
    return 0 if times <= MOST_TIMES and SHARES[0] <= share <= SHARES[1] and not wrong else 1


if __name__ == "__main__":
    main()
