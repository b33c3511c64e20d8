"""How often does `compare` raise a false alarm between two processes of one engine, and does it find gains and losses?

Runs two processes of the real engine with the built-in model in interleaved rounds. Samples sequences of neighbouring
rounds from the measurements, so that drift and disturbances are preserved. Simulates a gain by shortening the times of
one side. With --slower, a third process with a slower setting takes part in each round: a real loss.

    python benchmarks/judge/same_engine.py --turns 40 --keep noise.json
    python benchmarks/judge/same_engine.py --from noise.json

tests/judge/test_false_alarms.py reads benchmarks/judge/rounds.json.xz. Collect it on a machine that does nothing else,
with a setting whose printed loss is about 10 %:

    python benchmarks/judge/same_engine.py --turns 64 --slower slots=3 --keep benchmarks/judge/rounds.json.xz
"""

from __future__ import annotations

import argparse
import collections
import lzma
import random
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from bedplate._version import __version__
from bedplate.changing.gate import ROUNDS as GATE_ROUNDS
from bedplate.facts.hardware import probe
from bedplate.judge.compare import compare
from bedplate.judge.effect import estimate_effect
from bedplate.measure.load import LoadTarget, measure_apart
from bedplate.progress import SilentProgress
from bedplate.run.ready import fetch_facts, plan_engine, prepare_model
from bedplate.run.starting import run_engine
from bedplate.store import compute_fingerprint
from bedplate.values import Plan, Settings, Workload, from_json, replace_fields, to_json
from bedplate.values.run import Cell, Load, Quality, Repeat, Run, RunEnvironment, Sample, Subject
from bedplate.values.service import ModelOrder

GOOD = Quality(asked=100, agreement=1.0, verdict="ok", note="assumed here")


def measured(engine: str, load: Load, turns: int, seconds: float, slower: str | None = None) -> Run:
    """The processes in the order A B (C) (C) B A …; each repeat has new prompts, the same for all of them."""
    hardware = probe()
    work = Workload(concurrency=load.concurrency, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens)
    wanted = ModelOrder(workload=work, engine=engine, untuned=True)
    chosen = plan_engine(wanted, fetch_facts(None, hardware, SilentProgress()), hardware, SilentProgress())
    ready = prepare_model(chosen, SilentProgress(), to_measure=True)
    starts = [ready.build_start() for _ in range(2)]
    if slower is not None:
        starts.append(replace(starts[0], plan=apply_setting(starts[0].plan, slower)))
    found: tuple[list[Repeat], ...] = tuple([] for _ in starts)
    with ExitStack() as stack:
        started = [stack.enter_context(run_engine(start, SilentProgress())) for start in starts]
        name = ready.plan.model.served_name
        targets = [LoadTarget.from_url(one.url, key=one.key, model=name) for one in started]
        for turn in range(turns):
            for side in range(len(found)) if turn % 2 == 0 else reversed(range(len(found))):
                repeat = measure_apart(targets[side], load, seconds=seconds, warmup_s=1.0, round=turn, check=False)
                found[side].append(repeat)
                print(f"turn {turn + 1} of {turns}, {'ABC'[side]}: {rate(repeat):.1f} tok/s", flush=True)
    machine = compute_fingerprint(hardware)
    cells = tuple(
        Cell(
            id=f"{engine}-{'ABC'[side]}", run="same", at=repeats[0].at or "", machine=machine, load=load, quality=GOOD,
            subject=Subject(engine=engine, engine_version=ready.plan.engine_version, model=ready.plan.model.name),
            repeats=tuple(repeats),
        )
        for side, repeats in enumerate(found)
    )  # fmt: skip
    environment = RunEnvironment(
        bedplate=__version__, python="", system="", hardware=hardware.cpu.name, machine=machine
    )
    return Run(id="same", at=cells[0].at, environment=environment, cells=cells, finished=True)


def apply_setting(plan: Plan, given: str) -> Plan:
    """`given` is NAME=VALUE of a field of `Settings`."""
    name, _, value = given.partition("=")
    changed = msgspec.structs.asdict(plan.settings) | {name: int(value)}
    return replace_fields(plan, settings=msgspec.convert(changed, Settings))


def read_rounds(path: Path) -> Run:
    data = path.read_bytes()
    return from_json(Run, lzma.decompress(data) if path.suffix == ".xz" else data, origin=str(path))


def keep_rounds(run: Run, path: Path) -> None:
    """Without the gaps between events, which no comparison uses; times are rounded to 0.01 ms."""
    short = replace_fields(run, cells=tuple(replace_fields(cell, repeats=tuple(map(_shorten, cell.repeats)))
                                            for cell in run.cells))  # fmt: skip
    data = (to_json(short, indent=0) + "\n").encode()
    path.write_bytes(lzma.compress(data, preset=9) if path.suffix == ".xz" else data)


def _shorten(repeat: Repeat) -> Repeat:
    samples = tuple(
        replace_fields(
            one, gaps_ms=(), at_s=round(one.at_s, 4), duration_ms=round(one.duration_ms, 2),
            ttft_ms=None if one.ttft_ms is None else round(one.ttft_ms, 2),
        )
        for one in repeat.samples
    )  # fmt: skip
    return replace_fields(repeat, samples=samples)


def rate(repeat: Repeat) -> float:
    return (repeat.delivered_tokens or 0.0) / repeat.seconds


def faster(repeat: Repeat, gain: float) -> Repeat:
    """Scale the times as if the side had been faster by this factor."""
    if gain == 1.0:
        return repeat
    samples = tuple(_faster(sample, gain) for sample in repeat.samples)
    made = repeat.delivered_tokens
    return replace_fields(repeat, samples=samples, delivered_tokens=None if made is None else made * gain)


def _faster(sample: Sample, gain: float) -> Sample:
    return replace_fields(
        sample,
        ttft_ms=None if sample.ttft_ms is None else sample.ttft_ms / gain,
        duration_ms=sample.duration_ms / gain,
        gaps_ms=tuple(gap / gain for gap in sample.gaps_ms),
    )


def drawn(a: Cell, b: Cell, repeats: int, gain: float, dice: random.Random) -> tuple[Cell, Cell]:
    """Some neighbouring rounds; which process is A is random, so that a difference between them is no gain."""
    first = dice.randrange(len(a.repeats) - repeats + 1)
    one, other = (a, b) if dice.random() < 0.5 else (b, a)
    chosen = slice(first, first + repeats)
    quicker = tuple(faster(repeat, gain) for repeat in other.repeats[chosen])
    return (
        replace_fields(one, id="A", quality=GOOD, repeats=one.repeats[chosen]),
        replace_fields(other, id="B", quality=GOOD, repeats=quicker),
    )


def answers(a: Cell, b: Cell, repeats: int, gain: float, times: int, seed: int = 1) -> collections.Counter[str]:
    dice = random.Random(seed)
    return collections.Counter(
        compare([one], [other]).answer for one, other in (drawn(a, b, repeats, gain, dice) for _ in range(times))
    )


def codes(a: Cell, b: Cell, repeats: int, times: int, seed: int = 1, *, swap: bool = True) -> collections.Counter[int]:
    """Exit codes of many comparisons of neighbouring rounds. `swap`: which one is the baseline is random."""
    dice = random.Random(seed)
    found: collections.Counter[int] = collections.Counter()
    for _ in range(times):
        first = dice.randrange(len(a.repeats) - repeats + 1)
        sides = [
            replace_fields(cell, id=name, quality=GOOD, repeats=cell.repeats[first : first + repeats])
            for name, cell in (("A", a), ("B", b))
        ]
        found[compare(*([one] for one in (reversed(sides) if swap and dice.random() < 0.5 else sides))).exit_code] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llama.cpp")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="repeats per side in one comparison")
    parser.add_argument("--slower", metavar="NAME=VALUE", help="a third process with this setting, such as slots=3")
    parser.add_argument("--keep", type=Path, help="write the measurements to this file")
    parser.add_argument("--from", dest="kept", type=Path, help="measure nothing; read this file instead")
    asked = parser.parse_args()
    load = Load(concurrency=asked.concurrency, prompt_tokens=asked.prompt_tokens, output_tokens=asked.output_tokens)
    if asked.kept is not None:
        run = read_rounds(asked.kept)
    else:
        run = measured(asked.engine, load, asked.turns, asked.seconds, asked.slower)
    if asked.keep is not None:
        keep_rounds(run, asked.keep)
    a, b, *others = run.cells
    whole = estimate_effect(a, b, "output_tok_s", 0.95)
    rates = [rate(repeat) for cell in (a, b) for repeat in cell.repeats]
    print(
        f"{statistics.fmean(rates):.1f} tok/s; repeats vary by {statistics.stdev(rates) / statistics.fmean(rates):.1%}"
    )
    if whole is not None:
        found = whole.gain
        print(f"B over A {found.value:.3f} ({found.low:.3f} to {found.high:.3f}); pairs vary by {whole.noise or 0:.1%}")
    rounds = min(GATE_ROUNDS, len(a.repeats))
    print(f"exit codes of 200 comparisons of {rounds} rounds: {dict(codes(a, b, rounds, 200))}")
    for slower in others:
        loss = estimate_effect(a, slower, "output_tok_s", 0.95)
        print(f"slower setting: {loss.gain.value if loss else 0:.3f} of the speed; exit codes of 50 comparisons: "
              f"{dict(codes(a, slower, rounds, 50, swap=False))}")  # fmt: skip
    for gain, times in ((1.0, 200), (1.15, 100)):
        print(f"true gain {gain:g}, {asked.repeats} repeats: {dict(answers(a, b, asked.repeats, gain, times))}")


if __name__ == "__main__":
    main()
