"""Find the best thread count for llama.cpp on this machine, and compare it with the plan's.

Runs the real engine with the built-in model. Every setting is restarted in every repeat, in rotated order, so that
drift and temporary load on the machine affect all settings equally.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from bedplate.decide import decide, plan
from bedplate.engines import get_engine
from bedplate.facts.hardware import probe
from bedplate.run.builtin import fetch_builtin, read_builtin_facts
from bedplate.run.environments import EngineEnvironment, add_library_path, build_command, make_environment
from bedplate.run.supervisor import find_free_port
from bedplate.values import Plan, Workload, replace_fields

PROMPT = "The sea is wide and the wind is cold. " * 50
"""About 500 tokens."""


def post(port: int, body: dict[str, object]) -> dict[str, float]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as answer:
        timings: dict[str, float] = json.load(answer)["timings"]
        return timings


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    sys.exit("the engine did not start")


def measure(base: Plan, environment: EngineEnvironment, threads: int, tokens: int) -> dict[str, float]:
    """Prompt and generation speed of one request, and generation speed of four concurrent requests."""
    chosen = replace_fields(base, settings=replace_fields(base.settings, threads=threads))
    port = find_free_port()
    argv = build_command(environment, get_engine(base.engine).launch(chosen, port))
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.PIPE,
        env=add_library_path(Path(environment.path), os.environ),
    )
    try:
        wait_until_ready(port, process)
        body = {"n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        post(port, {**body, "prompt": "warm up", "n_predict": 8})
        alone = post(port, {**body, "prompt": PROMPT})
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: post(port, {**body, "prompt": f"Story number {n}:"}), range(4)))
        four_s = time.monotonic() - began
        return {
            "prompt tok/s": alone["prompt_per_second"],
            "tok/s, one stream": alone["predicted_per_second"],
            "tok/s, four streams": 4 * tokens / four_s,
        }
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", help="thread counts, such as 1,2,4; default: 1 to twice the physical cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each request")
    options = parser.parse_args()
    hardware = probe()
    fetch_builtin()
    model, workload = read_builtin_facts(), Workload()
    base = plan(decide(hardware, model, workload), model, workload)
    environment = make_environment(get_engine(base.engine))
    default = base.settings.threads or 1
    counts = [int(n) for n in options.threads.split(",")] if options.threads else list(range(1, 2 * default + 1))
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for repeat in range(options.repeats):
        for count in counts[repeat % len(counts) :] + counts[: repeat % len(counts)]:
            print(f"repeat {repeat + 1}/{options.repeats}: {count} threads", file=sys.stderr)
            rows[count].append(measure(base, environment, count, options.tokens))
    names = list(rows[counts[0]][0])
    print(f"| threads | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    for count in counts:
        cells = []
        for name in names:
            values = [row[name] for row in rows[count]]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        print(f"| {count}{' (the plan)' if count == default else ''} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
