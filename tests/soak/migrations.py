"""Runs ten migrations under steady streams, three of them to defective challengers.

    python tests/soak/migrations.py --third mistral.rs

Uses the engines in BEDPLATE_HOME, and installs missing ones first. Prints a table. Exits with 1 when a request failed,
was truncated or answered twice, or when a migration did not have the expected outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.soak.challengers import installed
from tests.soak.streams import Counts, Streams

NAME = "soak-migrations"
INTENT = """\
workload: {{users: 8, concurrency: 12, prompt_tokens: 64, output_tokens: {tokens}, context_tokens: 1024,
           latency: {{ttft_ms: {ttft_ms}, tpot_ms: {tpot_ms}}}}}
operations: {{machinery: none}}
"""


def run_bedplate(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bedplate", *words], capture_output=True, text=True, env=env)


def list_migrations(third: str) -> list[tuple[str, str]]:
    """The engines to migrate to, and the expected outcome of each migration."""
    return [
        ("pytorch", "migrated"),
        ("llama.cpp", "migrated"),
        ("wrong", "rolled back"),
        (third, "migrated"),
        ("slow", "rolled back"),
        ("llama.cpp", "migrated"),
        ("dying", "rolled back"),
        ("pytorch", "migrated"),
        (third, "migrated"),
        ("llama.cpp", "migrated"),
    ]


async def migrate(engine: str, env: dict[str, str], *more: str) -> tuple[int, dict[str, Any], str]:
    done = await asyncio.to_thread(lambda: run_bedplate("migrate", engine, NAME, "--json", *more, env=env))
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr


async def run_under_load(
    url: str, model: str, options: argparse.Namespace, env: dict[str, str]
) -> tuple[Counts, list[Any], bool]:
    rows, good = [], True
    async with Streams(url, model, options.streams, options.tokens) as streams:
        await asyncio.sleep(options.before_s)
        for engine, expected in list_migrations(options.third):
            before, began = streams.counts.whole, time.monotonic()
            code, done, said = await migrate(engine, env, "--step-limit", f"{options.step_limit:g}")
            as_expected = done.get("outcome") == expected and code == (0 if expected == "migrated" else 1)
            good = good and as_expected
            rows.append((engine, done, streams.counts.whole - before, time.monotonic() - began, as_expected))
            print(format_row(*rows[-1]), flush=True)
            if not done:
                print(said, file=sys.stderr)
    return streams.counts, rows, good


def format_row(engine: str, done: dict[str, Any], answers: int, took_s: float, as_expected: bool) -> str:
    how = done.get("reason") or ("side by side" if done.get("side_by_side") else "one after the other")
    mark = "" if as_expected else " **not as expected**"
    return f"| {engine} | {done.get('outcome', 'failed')}{mark} | {how} | {took_s:.0f} | {answers} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--third", default="mistral.rs")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ttft-ms", type=float, default=20_000)
    parser.add_argument("--tpot-ms", type=float, default=2_000)
    parser.add_argument("--pause-s", type=float, default=3.0, help="the delay of `slow` before each event")
    parser.add_argument("--before-s", type=float, default=10.0)
    parser.add_argument("--step-limit", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = installed(Path(folder) / "site", pause_s=options.pause_s)
        intent = Path(folder) / "bedplate.yaml"
        intent.write_text(INTENT.format(tokens=options.tokens, ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms))
        env = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
        started = run_bedplate("serve", "-d", "--name", NAME, "--port", "0", "-f", str(intent), "--engine", "llama.cpp",
                           "--no-check", "--json", env=env)  # fmt: skip
        if started.returncode:
            print(started.stderr, file=sys.stderr)
            return 3
        endpoint = json.loads(started.stdout)
        print("| to | outcome | mode, or reason | s | answers meanwhile |\n| --- | --- | --- | --- | --- |", flush=True)
        try:
            counts, _, good = asyncio.run(run_under_load(endpoint["url"], endpoint["model"], options, env))
        finally:
            run_bedplate("stop", NAME, env=env)
    print(summarize(counts, options.streams))
    bad = [*counts.failed, *counts.truncated, *counts.duplicated]
    for one in bad[:10]:
        print(one, file=sys.stderr)
    return 0 if good and not bad else 1


def summarize(counts: Counts, streams: int) -> str:
    first = sorted(counts.ttft_s)
    asked = counts.whole + sum(map(len, (counts.failed, counts.truncated, counts.duplicated)))
    return (
        f"\n{streams} streams, {asked} requests: "
        f"{len(counts.failed)} failed, {len(counts.truncated)} truncated, {len(counts.duplicated)} duplicated, "
        f"{counts.turned_away} rejected; TTFT median {statistics.median(first):.2f} s, "
        f"longest {first[-1]:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
