"""Time of a complete decision: every engine, format and layout for a few machines, up to 128 GPUs.

    python benchmarks/plan/search.py

Prints the best of several runs in one process that has already loaded its tables, its CPU time and function calls,
with and without all alternatives, and the best of several cold starts of `bedplate plan`. Function calls do not depend
on what else the machine does.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bedplate.decide import decide
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Workload
from bedplate.values.intent import Operations

BUDGET_MS = 300.0
COLD_BUDGET_MS = 500.0
CASES: tuple[tuple[str, int, str, int], ...] = (
    ("RTX 4090", 1, "Qwen/Qwen3-32B", 1),
    ("H100 SXM", 8, "meta-llama/Meta-Llama-3.1-70B", 64),
    ("H200 SXM", 8, "deepseek-ai/DeepSeek-V3", 128),
    ("H100 SXM", 128, "meta-llama/Meta-Llama-3.1-70B", 4096),
    ("H100 SXM", 128, "meta-llama/Meta-Llama-3.1-405B", 4096),
    ("H200 SXM", 128, "deepseek-ai/DeepSeek-V3", 4096),
)


def make_decider(chip: str, count: int, model: str, concurrency: int) -> Callable[[bool], object]:
    machine = make_simulated_hardware({"accelerator": chip, "count": count, "ram_gb": 2048})
    work = Workload(concurrency=concurrency, prompt_tokens=2048, output_tokens=512)
    facts, operations = find_model(model), Operations(machinery="cluster")
    return lambda all_scored: decide(machine, facts, work, operations=operations, with_alternatives=all_scored)


def measure_ms(run: Callable[[], object], clock: Callable[[], float], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = clock()
        run()
        times.append((clock() - started) * 1000)
    return times


def count_calls(run: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(run)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def process_ms(*argv: str, repeats: int) -> float:
    """The best of several starts."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, *argv], stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - started) * 1000)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(
        f"{'machine':<16} {'model':<34} {'in flight':>9} {'best ms':>8} {'median':>8} {'CPU ms':>8} {'calls':>9} "
        f"{'all: CPU':>9} {'calls':>9}"
    )
    slowest = 0.0
    for chip, count, model, concurrency in CASES:
        run = make_decider(chip, count, model, concurrency)
        one, every = functools.partial(run, False), functools.partial(run, True)
        times = measure_ms(one, time.perf_counter, repeats)
        slowest = max(slowest, min(times))
        cpu = [min(measure_ms(each, time.process_time, repeats)) for each in (one, every)]
        machine = f"{count} x {chip}"
        print(
            f"{machine:<16} {model:<34} {concurrency:>9,} {min(times):>8.0f} {statistics.median(times):>8.0f} "
            f"{cpu[0]:>8.0f} {count_calls(one):>9,} {cpu[1]:>9.0f} {count_calls(every):>9,}"
        )
    print(f"slowest: {slowest:.0f} ms of {BUDGET_MS:.0f}")
    bare = process_ms("-c", "pass", repeats=repeats)
    chip, count, model, _ = CASES[1]
    whole = process_ms("-m", "bedplate", "plan", model, "--hardware", f"{count}x {chip}", "--json", repeats=repeats)
    print(f"bedplate plan, cold: {whole - bare:.0f} ms of {COLD_BUDGET_MS:.0f} beyond Python's start of {bare:.0f} ms")
    sys.exit(0 if slowest <= BUDGET_MS and whole - bare <= COLD_BUDGET_MS else 1)


if __name__ == "__main__":
    main()
