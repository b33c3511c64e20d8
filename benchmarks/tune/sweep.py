"""Compare the tuner with an exhaustive sweep over a restricted set of settings, each measured once.

    python benchmarks/tune/sweep.py [--out sweep.json] [--only tune|sweep]

For each setting, the real engine is restarted and measured with one burst of requests, as in the tuner. A setting that
takes nearly half as long again as the best so far is stopped. The best few of the sweep and the tuner's result are then
measured in interleaved rounds, because the best of many single measurements is partly luck. With --out, measurements
are saved, and a later run continues with them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from bedplate.cli.terminal import make_console
from bedplate.facts.hardware import probe
from bedplate.progress import SilentProgress
from bedplate.run.ready import fetch_facts, prepare_model
from bedplate.show.tune import make_view
from bedplate.store import compute_fingerprint
from bedplate.tuning.points import describe_point
from bedplate.tuning.search import Point, TuningListener
from bedplate.tuning.state import TuningState
from bedplate.tuning.tune import Tuner, choose_plan
from bedplate.values import replace_fields
from bedplate.values.run import Load
from bedplate.values.tuning import TunableSetting, TuningRun

SPACE = {
    "weights": ("Q4_1", "Q8_0", "F16"),
    "ubatch": ("64", "128", "256", "512"),
    "threads": ("1", "2", "3"),
    "threads-batch": ("1", "2", "3"),
    "flash-attn": ("auto", "off"),
}
"""216 settings of llama.cpp, without weights that agree less with the reference than the file: a sweep by speed
alone would select them."""
LOAD = Load(concurrency=4, prompt_tokens=64, output_tokens=16)
CONTENDERS = 5
SLOW = "slow"
ENDLESS_S = 1e9
TURNS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sweep.json"))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for the tuner")
    parser.add_argument("--only", choices=("tune", "sweep", "final"))
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"sweep": {}, "tuned": None}
    knobs = space()
    if options.only in (None, "tune") and kept["tuned"] is None:
        kept["tuned"] = tuned(knobs, options.budget)
        options.out.write_text(json.dumps(kept, indent=1))
    if options.only in (None, "sweep"):
        sweep(knobs, kept, options.out)
    if options.only in (None, "final") and kept["sweep"] and kept["tuned"]:
        print("\n".join(report(knobs, kept)))


def space() -> tuple[TunableSetting, ...]:
    hardware = probe()
    chosen = choose_plan("llama.cpp", hardware, fetch_facts(None, hardware, SilentProgress()), LOAD, None)
    found = []
    for knob in chosen.engine.list_settings(hardware, chosen.plan):
        if knob.name in SPACE:
            choices = tuple(one for one in knob.choices if one.value in SPACE[knob.name])
            found.append(replace_fields(knob, choices=choices))
    return tuple(found)


def tuner(knobs: tuple[TunableSetting, ...], budget_s: float, teller: TuningListener) -> Tuner:
    hardware = probe()
    facts = fetch_facts(None, hardware, SilentProgress())
    chosen = choose_plan("llama.cpp", hardware, facts, LOAD, None)
    kept = TuningRun(
        id=f"sweep-{time.time_ns()}", at=f"{time.time():.0f}", machine=compute_fingerprint(hardware), hardware="",
        bedplate="",
        engine="llama.cpp", engine_version=chosen.plan.engine_version, build="wheel", model=facts.name, load=LOAD,
        workload=chosen.plan.workload, budget_s=budget_s,
    )  # fmt: skip
    # A separate store: earlier tunings have no influence, and later ones are not influenced.
    path = Path(tempfile.mkdtemp()) / "store.sqlite"
    return Tuner(TuningState(hardware, facts, chosen, knobs, kept, SilentProgress(), teller, path))


def tuned(knobs: tuple[TunableSetting, ...], budget_s: float) -> dict[str, object]:
    teller = make_view(make_console(sys.stderr))
    with teller:
        found = tuner(knobs, budget_s, teller).run()
    best = found.find_side("tuned")
    point = [[one.knob, one.value] for one in best.turned] if best is not None else []
    own = sum(len(trial.taken) for trial in found.trials if trial.own_defaults)
    return {"point": point, "measurements": found.measurements - own, "seconds": found.spent_s,
            "record": msgspec.to_builtins(found)}  # fmt: skip


def points(knobs: tuple[TunableSetting, ...]) -> list[Point]:
    """All combinations; settings that keep their present value are left out."""
    every = itertools.product(*([(knob.name, one.value) for one in knob.choices] for knob in knobs))
    now = {knob.name: knob.now for knob in knobs}
    return [tuple(sorted((name, value) for name, value in one if now[name] != value)) for one in every]


def sweep(knobs: tuple[TunableSetting, ...], kept: dict[str, Any], out: Path) -> None:
    one = tuner(knobs, ENDLESS_S, TuningListener())
    state = one.state
    state.ready = prepare_model(state.chosen, SilentProgress(), to_measure=True)
    every, began = points(knobs), time.monotonic()
    try:
        for number, point in enumerate(every, 1):
            name = describe_point(point)
            if name in kept["sweep"]:
                continue
            one.pool.close()  # each setting is started afresh, with no other engine loaded
            leader = state.trials[state.best].best if state.best in state.trials else None
            score = one.trials.measure(point, leader.score if leader is not None else None)
            taken = state.trials[point].taken[-1] if score is not None else None
            if taken is None or taken.cut:
                kept["sweep"][name], told = None if taken is None else SLOW, "failed" if taken is None else SLOW
            else:
                kept["sweep"][name] = [taken.score, taken.output_tok_s, taken.ttft_ms]
                told = f"{taken.output_tok_s:.1f} tok/s"
                state.best = point if leader is None or taken.score > leader.score else state.best
            out.write_text(json.dumps(kept, indent=1))
            spent = time.monotonic() - began
            print(f"{number:4d} of {len(every)}  {name}: {told}   {spent / 60:.1f} min", file=sys.stderr)
    finally:
        one.pool.close()


def report(knobs: tuple[TunableSetting, ...], kept: dict[str, Any]) -> list[str]:
    by_name = {describe_point(point): point for point in points(knobs)}
    swept = {name: found for name, found in kept["sweep"].items() if found not in (None, SLOW)}
    slow = sum(found == SLOW for found in kept["sweep"].values())
    pick = tuple(sorted((knob, value) for knob, value in kept["tuned"]["point"]))
    top = sorted(swept, key=lambda name: -swept[name][0])[:CONTENDERS]
    names = list(dict.fromkeys([*top, describe_point(pick), describe_point(())]))
    one = tuner(knobs, ENDLESS_S, TuningListener())
    state = one.state
    state.ready = prepare_model(state.chosen, SilentProgress(), to_measure=True)
    one.pool.most = len(names)
    try:
        for turn in range(TURNS):
            for name in names if turn % 2 == 0 else names[::-1]:
                one.trials.measure(by_name.get(name, pick), None)
    finally:
        one.pool.close()
    taken = {name: state.trials[by_name.get(name, pick)].taken for name in names}
    middle = {name: statistics.median(each.score for each in found) for name, found in taken.items()}
    best, mine = max(middle, key=lambda name: middle[name]), describe_point(pick)
    behind = [b.score - a.score for a, b in zip(taken[best], taken[mine], strict=True)]
    spread = statistics.stdev(behind) / math.sqrt(len(behind)) if best != mine else 0.0
    lines = [
        "| setting | sweep: tok/s | TTFT ms | interleaved: tok/s | TTFT ms |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in sorted(middle, key=lambda name: -middle[name]):
        speed = statistics.median(each.output_tok_s or 0 for each in taken[name])
        first = statistics.median(each.ttft_ms or 0 for each in taken[name])
        mark = " (**found by tune**)" if name == mine else ""
        lines.append(
            f"| {name}{mark} | {swept[name][1]:.1f} | {swept[name][2]:.0f} | {speed:.1f} | {first:.0f} |"
            if name in swept
            else f"| {name}{mark} | | | {speed:.1f} | {first:.0f} |"
        )
    used, every = kept["tuned"]["measurements"], len(kept["sweep"])
    spent = kept["tuned"]["seconds"]
    ratio = math.exp(middle[mine] - middle[best])
    return [
        *lines, "",
        f"- {every} settings in the sweep; {slow} were stopped as too slow, {every - len(swept) - slow} failed.",
        f"- The tuner needed {used} measurements, {used / every:.1%} of the sweep's, and {spent:.0f} s with its proof.",
        f"- By the objective, its setting reaches {ratio:.1%} of the best (± {1.96 * spread:.1%}), in {TURNS} rounds.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
