"""The measurements of `compare`, `gate` and `bench --budget` that need a machine that does nothing else.

    python benchmarks/judge/quiet.py             # about 50 minutes; run it again to continue after an interruption
    python benchmarks/judge/quiet.py --figures   # measures nothing: prints the figures of the stored rounds

1. 64 interleaved rounds of two equal processes of llama.cpp and two with slower settings, with the built-in model. Each
   process is started anew in each round. Rounds during which other processes used more than a tenth of the CPU are
   measured again. Of the slower settings the one whose loss is nearest to 10 % is kept. From these rounds
   tests/judge/test_false_alarms.py draws comparisons: at most 10 of 200 of equal builds may say worse or migrate, and
   the loss must be found in 8 of 10.
2. `bedplate bench --budget 60s`, three times: it must end within 75 s. The third one has a model without a reference,
   which is computed within the budget if PyTorch is installed (bedplate engines install pytorch).

Writes rounds.json.xz and budget.json beside this file; what is not finished yet is under --folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same_engine import Collection, RoundsFile, keep_rounds, print_figures, read_rounds

from bedplate.judge.effect import estimate_effect
from bedplate.measure.moments import format_now
from bedplate.measure.references import find_pytorch
from bedplate.measure.watch import measure_idle_share
from bedplate.values.record import replace_fields
from bedplate.values.run import Load, Run
from bedplate.values.units import format_seconds

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "tests" / "models" / "llama"
ENGINE = "llama.cpp"
LOAD = Load(concurrency=4, prompt_tokens=32, output_tokens=16)
SLOWER = ("slots=3", "batch_tokens=12")
LOSS, MOST_OFF = 0.9, 0.03
ROUNDS, LEAST_ROUNDS, ROUNDS_S = 64, 60, 2580.0
BUDGET_S, LIMIT_S = 60, 75.0


def choose_setting(run: Run) -> Run:
    """Two equal processes and the slower setting whose loss is nearest to 10 %."""
    usual, equal, *others = run.cells
    found = {
        cell.notes: effect.gain.value
        for cell in others
        if (effect := estimate_effect(usual, cell, "output_tok_s", 0.95)) is not None
    }
    print("speed with slower settings: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    nearest = min(found, key=lambda name: abs(found[name] - LOSS))
    if abs(found[nearest] - LOSS) > MOST_OFF:
        raise SystemExit(f"no setting costs {1 - LOSS:.0%} within {MOST_OFF:.0%}: change SLOWER and measure again")
    return replace_fields(run, cells=(usual, equal, *(cell for cell in others if cell.notes == nearest)))


@contextlib.contextmanager
def make_unknown_model() -> Iterator[Path]:
    """A copy of a small model for which no reference is cached: references are cached by the content of all files."""
    with tempfile.TemporaryDirectory() as holder:
        folder = Path(holder) / MODEL.name
        shutil.copytree(MODEL, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"copied_at": format_now(milliseconds=True)}))
        yield folder


def time_budget(number: int, seconds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        model = [str(stack.enter_context(make_unknown_model()))] if number == 2 else []
        command = ["bench", *model, "--budget", f"{seconds}s", "--json"]
        idle, began = measure_idle_share(), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "bedplate", *command],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "120"},
        )
        took_s = time.monotonic() - began
    run = json.loads(done.stdout) if done.returncode == 0 else {}
    cells = [
        f"{one['subject']['engine']} {one['load']['concurrency']}: {len(one.get('repeats', ()))} repeats"
        for one in run.get("cells", ())
    ]
    notes = [line for line in done.stderr.splitlines() if "needs about" in line or "reference" in line]
    return {
        "command": " ".join(["bedplate", *(Path(one).name if one in model else one for one in command)]),
        "at": format_now(), "idle_before": round(idle, 3), "exit_code": done.returncode, "took_s": round(took_s, 1),
        "cells": cells, "notes": notes, "errors": done.stderr.splitlines()[-3:] if done.returncode else [],
    }  # fmt: skip


def read_budget(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def print_budget(found: list[dict[str, Any]]) -> None:
    for one in found:
        print(f"{one['command']}: exit code {one['exit_code']} after {one['took_s']} s; {len(one['cells'])} cells")
        for line in (*one["notes"], *one["errors"]):
            print(f"  {line}")
    late = sum(one["took_s"] > LIMIT_S or one["exit_code"] != 0 for one in found)
    print(f"{len(found) - late} of {len(found)} ended within {LIMIT_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--figures", action="store_true", help="measure nothing; print the figures of the stored rounds"
    )
    parser.add_argument("--folder", type=Path, default=HERE.parents[1] / "build" / "judge", help="for unfinished work")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for rounds.json.xz and budget.json")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=4.0, help="measurement window of one repeat")
    parser.add_argument("--budget", type=int, default=BUDGET_S)
    parser.add_argument("--times", type=int, default=3, help="runs with a budget")
    parser.add_argument("--busy", action="store_true", help="keep rounds during which other processes used the CPU")
    asked = parser.parse_args()
    kept, budget = asked.output / "rounds.json.xz", asked.output / "budget.json"
    if not asked.figures:
        began = time.monotonic()
        print(f"the CPU is {measure_idle_share(3.0):.0%} idle; PyTorch is {'' if find_pytorch() else 'not '}installed")
        if not kept.exists():
            file = RoundsFile(asked.folder / "rounds.jsonl")
            print(f"{asked.rounds} interleaved rounds: two equal processes, and {' and '.join(SLOWER)}")
            collection = Collection(ENGINE, LOAD, asked.seconds, ("", "", *SLOWER))
            collection.measure(file, asked.rounds, most_s=ROUNDS_S, quiet_only=not asked.busy)
            measured = Collection.count(file, not asked.busy)
            if measured < min(asked.rounds, LEAST_ROUNDS):
                print(f"{measured} of {asked.rounds} rounds; run it again to continue")
            else:
                keep_rounds(choose_setting(file.make_run(quiet_only=not asked.busy)), kept)
                print(f"wrote {kept}")
        timed = read_budget(budget)
        while len(timed) < asked.times:
            print(f"bedplate bench --budget {asked.budget}s, {len(timed) + 1} of {asked.times}", flush=True)
            timed.append(time_budget(len(timed), asked.budget))
            budget.write_text(json.dumps(timed, indent=1) + "\n")
        print(f"took {format_seconds(time.monotonic() - began)}")
    if kept.exists():
        print_figures(read_rounds(kept))
    print_budget(read_budget(budget))


if __name__ == "__main__":
    main()
