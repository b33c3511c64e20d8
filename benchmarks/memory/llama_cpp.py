"""Predicted and measured memory of llama.cpp on this machine, at several contexts and slot counts.

Runs the real engine with the built-in model. Measures the resident memory of the process after one prompt in every
slot, because buffers become resident only when they are used.
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

import psutil

from bedplate.decide import decide, plan
from bedplate.decide.memory import fit
from bedplate.engines import get_engine
from bedplate.facts.hardware import probe
from bedplate.run.builtin import fetch_builtin, read_builtin_facts
from bedplate.run.environments import add_library_path, build_command, make_environment
from bedplate.run.supervisor import find_free_port
from bedplate.values import Settings, Workload, replace_fields

CASES = [(512, 1), (2048, 1), (8192, 1), (2048, 4), (8192, 4), (8192, 8), (1024, 32), (4096, 16)]


def ask(port: int, body: dict[str, object]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=600).close()


def measure(argv: list[str], env: dict[str, str], port: int, slots: int, context: int) -> int:
    process = subprocess.Popen(
        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        prompt = "The sea is wide. " * (min(context, 600) // 8)
        with concurrent.futures.ThreadPoolExecutor(slots) as pool:
            list(pool.map(lambda n: ask(port, {"prompt": f"{n} {prompt}", "n_predict": 4, "id_slot": n}), range(slots)))
        return int(psutil.Process(process.pid).memory_info().rss)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hardware, llama = probe(), get_engine("llama.cpp")
    fetch_builtin()
    model, workload = read_builtin_facts(), Workload()
    base = plan(decide(hardware, model, workload, installable=True), model, workload)
    environment = make_environment(llama)
    env = add_library_path(Path(environment.path), os.environ)
    rows = []
    for context, slots in CASES:
        print(f"{slots} slots of {context} tokens", file=sys.stderr)
        settings = Settings(slots=slots, context_tokens=context, threads=base.settings.threads, gpu_layers=0)
        port = find_free_port()
        argv = build_command(environment, llama.launch(replace_fields(base, settings=settings), port))
        (need,) = fit(hardware, model, replace_fields(workload, concurrency=slots), llama, settings=settings).devices
        rows.append((context, slots, need, measure(argv, env, port, slots, context)))
    errors = [abs(need.total_bytes - seen) / seen for _, _, need, seen in rows]
    if options.json:
        print(
            json.dumps([{"context": c, "slots": s, "predicted": n.total_bytes, "measured": m} for c, s, n, m in rows])
        )
        return
    print("| context | slots | predicted MB | band | measured MB | error |\n| ---: | ---: | ---: | --- | ---: | ---: |")
    for (context, slots, need, seen), error in zip(rows, errors, strict=True):
        low = (need.weights_bytes + need.kv_bytes + need.overhead_bytes.low) / 1e6
        print(
            f"| {context:,} | {slots} | {need.total_bytes / 1e6:,.0f} | {low:,.0f} to {need.high_bytes / 1e6:,.0f} "
            f"| {seen / 1e6:,.0f} | {error:.1%} |"
        )
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
