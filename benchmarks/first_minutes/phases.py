"""Where the time goes between a fresh clone and the first answer: the phases of `make serve`, cold and warm.

    python benchmarks/first_minutes/phases.py [--cold-cache] [--rounds 1]

Clones this repository into a temporary folder and runs what `make serve` runs, one phase after the other, with an empty
BEDPLATE_HOME. `--cold-cache` also gives uv an empty cache, so that all packages are downloaded. Wall-clock time depends
on what else the machine does; CPU time hardly does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
Rows = list[tuple[str, float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold-cache", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="first-minutes-") as folder:
            print_rows(measure(Path(folder), cold_cache=given.cold_cache))


def measure(folder: Path, *, cold_cache: bool) -> Rows:
    clone = folder / "bedplate"
    env = {**os.environ, "BEDPLATE_HOME": str(folder / "home")}
    # `make serve` writes bytecode too, also where the environment forbids it.
    for name in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    if cold_cache:
        env["UV_CACHE_DIR"] = str(folder / "cache")
    rows: Rows = []

    def run(label: str, *command: str, where: Path = clone) -> None:
        with count_time(rows, label, lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])):
            subprocess.run(command, check=True, env=env, cwd=where, stdout=subprocess.DEVNULL)

    run("git clone", "git", "clone", "--quiet", str(ROOT), str(clone), where=folder)
    run("make: environment with uv", "make", "--silent", ".venv/bin/uv")
    run("make: bedplate's dependencies", "make", "--silent", ".venv/.ready")
    run("bedplate --help", ".venv/bin/bedplate", "--help")
    rows += serve("first serve", clone, env)
    rows += serve("warm serve", clone, env)
    return rows


@contextmanager
def count_time(rows: Rows, label: str, read_cpu_s: Callable[[], float]) -> Iterator[None]:
    began, cpu_s = time.monotonic(), read_cpu_s()
    yield
    rows.append((label, time.monotonic() - began, read_cpu_s() - cpu_s))


def serve(label: str, clone: Path, env: dict[str, str]) -> Rows:
    """The notes of one start with their times, the time until it is ready, and the time of the first answer."""
    began = time.monotonic()
    process = subprocess.Popen(
        [str(clone / ".venv/bin/bedplate"), "serve", "--port", "0", "--json"],
        cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    rows: Rows = []

    def note(lines: Any) -> None:
        # Notes are indented by one space; the lines of the decision below its first one are not.
        for line in lines:
            if not re.match(r" \S", line):
                continue
            rows.append((f"  {label}: {line.strip()[:60]}", time.monotonic() - began, count_cpu_s(process.pid)))

    reader = threading.Thread(target=note, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        url = json.loads(process.stdout.readline())["url"]
        rows.append((f"{label}: ready", time.monotonic() - began, count_cpu_s(process.pid)))
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(QUESTION).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            json.load(answer)
        rows.append((f"{label}: first answer", time.monotonic() - began, count_cpu_s(process.pid)))
    finally:
        process.terminate()
        process.wait()
    return rows


def count_cpu_s(pid: int) -> float:
    """CPU time of a process, of its children that ended, and of those that run."""
    total = 0.0
    try:
        top = psutil.Process(pid)
        for one in (top, *top.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    except psutil.Error:
        return float("nan")
    return total


def print_rows(rows: Rows) -> None:
    print(f"{'phase':<78}{'wall s':>8}{'CPU s':>8}")
    for label, wall_s, cpu_s in rows:
        print(f"{label:<78}{wall_s:>8.2f}{cpu_s:>8.2f}")


if __name__ == "__main__":
    main()
