"""How often does `compare` raise a false alarm between two processes of one engine, and does it find gains and losses?

Runs two processes of the real engine with the built-in model in interleaved rounds. Samples sequences of neighbouring
rounds from the measurements, so that drift and disturbances are preserved. Simulates a gain by shortening the times of
one side. With --slower, a third process with a slower setting takes part in each round: a real loss.

    python benchmarks/judge/same_engine.py --turns 40 --rounds noise.jsonl
    python benchmarks/judge/same_engine.py --from noise.jsonl

benchmarks/judge/quiet.py collects the rounds that tests/judge/test_false_alarms.py reads.
"""

from __future__ import annotations

import argparse
import collections
import lzma
import math
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from bedplate.changing.gate import ROUNDS as GATE_ROUNDS
from bedplate.facts.hardware import probe
from bedplate.judge.compare import compare
from bedplate.judge.effect import estimate_effect
from bedplate.measure.bench import describe_environment
from bedplate.measure.flags import BUSY
from bedplate.measure.load import LoadTarget, measure_apart
from bedplate.measure.moments import format_now
from bedplate.measure.watch import Watcher, make_meters
from bedplate.progress import SilentProgress
from bedplate.run.ready import fetch_facts, plan_engine, prepare_model
from bedplate.run.starting import RunningEngine, run_engine
from bedplate.values import Plan, Settings, Workload, from_json, replace_fields, to_json
from bedplate.values.record import Record
from bedplate.values.run import Cell, Load, Quality, Repeat, Run, RunEnvironment, Sample, Subject
from bedplate.values.service import ModelOrder
from bedplate.values.units import format_seconds

GOOD = Quality(asked=100, agreement=1.0, verdict="ok", note="assumed here")
WARMUP_S = 1.0


class RoundsHeader(Record, frozen=True, kw_only=True):
    """The first line of a file of rounds."""

    environment: RunEnvironment
    engine: str
    engine_version: str | None
    model: str
    load: Load
    seconds: float
    settings: tuple[str, ...]
    """One for each process, as NAME=VALUE; empty: that of the plan."""


class Round(Record, frozen=True, kw_only=True):
    """One repeat of each process, in the order of `settings`."""

    number: int
    repeats: tuple[Repeat, ...]

    @property
    def is_quiet(self) -> bool:
        return max(repeat.use.other_cpu_share or 0.0 for repeat in self.repeats) <= BUSY


class RoundsFile:
    """Rounds as JSON lines, each written when it ends, so that an interrupted collection continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: RoundsHeader | None = None
        self.rounds: list[Round] = []
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last newline is cut off
        for line in lines:
            if self.header is None:
                self.header = from_json(RoundsHeader, line, origin=str(path))
            else:
                self.rounds.append(from_json(Round, line, origin=str(path)))

    def add(self, line: RoundsHeader | Round) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [self.header, *self.rounds] if self.header is not None else []
        if isinstance(line, RoundsHeader):
            self.header = line
        else:
            self.rounds.append(line)
        # The whole file, so that a line that was cut off does not stay.
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(f"{to_json(one, indent=-1)}\n" for one in (*kept, line)), encoding="utf-8")
        partial.replace(self.path)

    def make_run(self, *, quiet_only: bool) -> Run:
        header = self.header
        rounds = [one for one in self.rounds if one.is_quiet or not quiet_only]
        if header is None or not rounds:
            raise SystemExit(f"{self.path} has no{' quiet' if quiet_only else ''} rounds yet; run it again")
        cells = tuple(
            Cell(
                id=f"{header.engine}-{'ABCDEFGH'[side]}", run="same", at=rounds[0].repeats[side].at or "",
                machine=header.environment.machine, load=header.load, quality=GOOD, notes=setting,
                subject=Subject(engine=header.engine, engine_version=header.engine_version, model=header.model),
                repeats=tuple(one.repeats[side] for one in rounds),
            )
            for side, setting in enumerate(header.settings)
        )  # fmt: skip
        return Run(id="same", at=cells[0].at, environment=header.environment, cells=cells, finished=True)


class Collection:
    """Measures processes of one engine in the order A B C C B A …; each round has new prompts, the same for all."""

    def __init__(self, engine: str, load: Load, seconds: float, settings: tuple[str, ...]) -> None:
        self.load, self.seconds, self.settings = load, seconds, settings
        hardware = probe()
        work = Workload(
            concurrency=load.concurrency, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens
        )
        wanted = ModelOrder(workload=work, engine=engine, untuned=True)
        chosen = plan_engine(wanted, fetch_facts(None, hardware, SilentProgress()), hardware, SilentProgress())
        ready = prepare_model(chosen, SilentProgress(), to_measure=True)
        start = ready.build_start()
        self.starts = [replace(start, plan=apply_setting(start.plan, one)) if one else start for one in settings]
        self.name = ready.plan.model.served_name
        self.header = RoundsHeader(
            environment=describe_environment(hardware), engine=engine, engine_version=ready.plan.engine_version,
            model=ready.plan.model.name, load=load, seconds=seconds, settings=settings,
        )  # fmt: skip

    def measure(self, file: RoundsFile, wanted: int, *, most_s: float, each: int = 8, quiet_only: bool = True) -> None:
        """Until `wanted` rounds are kept, or no further one fits into `most_s`; at least one is measured.

        Rounds during which other processes used the CPU are measured again. The processes are started anew every `each`
        rounds, so that a difference between two starts does not look like one between two builds.
        """
        if file.header is None:
            file.add(self.header)
        elif (file.header.settings, file.header.load) != (self.settings, self.load):
            raise SystemExit(f"{file.path} has rounds of another load or setting; move it away")
        began: float | None = None
        longest_s = 0.0
        while (left := wanted - self.count(file, quiet_only)) > 0:
            if began is not None and time.monotonic() - began + longest_s > most_s:
                break
            with ExitStack() as stack:
                started = [stack.enter_context(run_engine(one, SilentProgress())) for one in self.starts]
                began = time.monotonic() if began is None else began  # however long the first start takes
                for _ in range(min(each, left)):
                    at_s = time.monotonic()
                    if at_s - began + longest_s > most_s:
                        break
                    number = len(file.rounds)
                    file.add(Round(number=number, repeats=self._measure_round(number, started)))
                    longest_s = max(longest_s, time.monotonic() - at_s)
                    self._report(file, wanted, quiet_only, time.monotonic() - began)

    def _measure_round(self, number: int, started: list[RunningEngine]) -> tuple[Repeat, ...]:
        found: dict[int, Repeat] = {}
        for side in range(len(started)) if number % 2 == 0 else reversed(range(len(started))):
            one, moments = started[side], dict[str, str]()
            target = LoadTarget.from_url(one.url, key=one.key, model=self.name)
            with Watcher(make_meters(one)) as watcher:

                def mark(moment: str, moments: dict[str, str] = moments, watcher: Watcher = watcher) -> None:
                    moments[moment] = format_now(milliseconds=True)
                    watcher.mark(moment)

                repeat = measure_apart(
                    target, self.load, seconds=self.seconds, warmup_s=WARMUP_S, round=number, check=False, watch=mark
                )
            use, engine = watcher.summarize_readings()
            at = repeat.at or moments.get("begin")
            found[side] = _shorten(replace_fields(repeat, at=at, use=use, engine=engine))
        return tuple(found[side] for side in range(len(started)))

    @staticmethod
    def count(file: RoundsFile, quiet_only: bool) -> int:
        return sum(one.is_quiet or not quiet_only for one in file.rounds)

    def _report(self, file: RoundsFile, wanted: int, quiet_only: bool, took_s: float) -> None:
        last = file.rounds[-1]
        rates = ", ".join(f"{'ABCDEFGH'[side]} {rate(repeat):.1f}" for side, repeat in enumerate(last.repeats))
        others = max(repeat.use.other_cpu_share or 0.0 for repeat in last.repeats)
        state = "" if last.is_quiet else "; measured again" if quiet_only else "; not quiet"
        print(
            f"round {self.count(file, quiet_only)} of {wanted} after {format_seconds(took_s)}: {rates} tok/s; other "
            f"processes used {others:.0%} of the CPU{state}",
            flush=True,
        )


def apply_setting(plan: Plan, given: str) -> Plan:
    """`given` is NAME=VALUE of a field of `Settings`."""
    name, _, value = given.partition("=")
    changed = msgspec.structs.asdict(plan.settings) | {name: int(value)}
    return replace_fields(plan, settings=msgspec.convert(changed, Settings))


def read_rounds(path: Path) -> Run:
    if path.suffix == ".jsonl":
        return RoundsFile(path).make_run(quiet_only=False)
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


def separate(a: Cell, b: Cell, repeats: int) -> collections.Counter[int]:
    """Exit codes of comparisons that share no round; A is the baseline."""
    found: collections.Counter[int] = collections.Counter()
    for first in range(0, len(a.repeats) - repeats + 1, repeats):
        sides = [
            [replace_fields(cell, id=name, quality=GOOD, repeats=cell.repeats[first : first + repeats])]
            for name, cell in (("A", a), ("B", b))
        ]
        found[compare(*sides).exit_code] += 1
    return found


def print_figures(run: Run, repeats: int) -> None:
    """What the rounds show. `repeats`: of each side in one comparison with a simulated gain."""
    a, b, *others = run.cells
    whole = estimate_effect(a, b, "output_tok_s", 0.95)
    rates = [rate(repeat) for cell in (a, b) for repeat in cell.repeats]
    print(
        f"{statistics.fmean(rates):.1f} tok/s in {len(a.repeats)} rounds; repeats vary by "
        f"{statistics.stdev(rates) / statistics.fmean(rates):.1%}"
    )
    if whole is not None:
        found = whole.gain
        print(f"B over A {found.value:.3f} ({found.low:.3f} to {found.high:.3f}); pairs vary by {whole.noise or 0:.1%}")
    rounds = min(GATE_ROUNDS, len(a.repeats))
    print(f"equal builds: {describe_codes(codes(a, b, rounds, 200))} of 200 comparisons of {rounds} rounds")
    for slower in others:
        loss = estimate_effect(a, slower, "output_tok_s", 0.95)
        blocks = separate(a, slower, rounds)
        print(f"{slower.notes}: {loss.gain.value if loss else 0:.3f} of the speed; "
              f"{describe_codes(codes(a, slower, rounds, 50, swap=False))} of 50 comparisons of {rounds} rounds; "
              f"{describe_codes(blocks)} of {blocks.total()} comparisons that share no round")  # fmt: skip
    repeats = min(repeats, len(a.repeats))
    for gain, times in ((1.0, 200), (1.15, 100)):
        print(f"simulated gain {gain:g}, {repeats} repeats: {dict(answers(a, b, repeats, gain, times))} of {times}")


def describe_codes(found: collections.Counter[int]) -> str:
    names = {30: "worse", 10: "migrate", 20: "not proven", 0: "no loss"}
    return ", ".join(f"{found[code]} {name}" for code, name in names.items())


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
    parser.add_argument(
        "--rounds", type=Path, default=Path("rounds.jsonl"), help="file for the rounds; it is continued"
    )
    parser.add_argument("--from", dest="kept", type=Path, help="measure nothing; read this file instead")
    asked = parser.parse_args()
    if asked.kept is None:
        load = Load(concurrency=asked.concurrency, prompt_tokens=asked.prompt_tokens, output_tokens=asked.output_tokens)
        settings = ("", "") if asked.slower is None else ("", "", asked.slower)
        collection = Collection(asked.engine, load, asked.seconds, settings)
        collection.measure(RoundsFile(asked.rounds), asked.turns, most_s=math.inf, quiet_only=False)
    print_figures(read_rounds(asked.kept or asked.rounds), asked.repeats)


if __name__ == "__main__":
    main()
