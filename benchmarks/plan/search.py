"""Time of a complete decision: every engine, format and layout for a few machines, up to 128 GPUs.

    python benchmarks/plan/search.py

Prints the best of several runs in one process that has already loaded its tables, and the best of several cold starts
of `bedplate plan`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

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


def decided_ms(chip: str, count: int, model: str, concurrency: int, repeats: int) -> list[float]:
    machine = make_simulated_hardware({"accelerator": chip, "count": count, "ram_gb": 2048})
    work = Workload(concurrency=concurrency, prompt_tokens=2048, output_tokens=512)
    facts, operations = find_model(model), Operations(machinery="cluster")
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        decide(machine, facts, work, operations=operations)
        times.append((time.perf_counter() - started) * 1000)
    return times


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
    print(f"{'machine':<16} {'model':<34} {'in flight':>9} {'best ms':>8} {'median':>8}")
    slowest = 0.0
    for chip, count, model, concurrency in CASES:
        times = decided_ms(chip, count, model, concurrency, repeats)
        slowest = max(slowest, min(times))
        machine = f"{count} x {chip}"
        print(f"{machine:<16} {model:<34} {concurrency:>9,} {min(times):>8.0f} {statistics.median(times):>8.0f}")
    print(f"slowest: {slowest:.0f} ms of {BUDGET_MS:.0f}")
    bare = process_ms("-c", "pass", repeats=repeats)
    chip, count, model, _ = CASES[1]
    whole = process_ms("-m", "bedplate", "plan", model, "--hardware", f"{count}x {chip}", "--json", repeats=repeats)
    print(f"bedplate plan, cold: {whole - bare:.0f} ms of {COLD_BUDGET_MS:.0f} beyond Python's start of {bare:.0f} ms")
    sys.exit(0 if slowest <= BUDGET_MS and whole - bare <= COLD_BUDGET_MS else 1)


if __name__ == "__main__":
    main()
