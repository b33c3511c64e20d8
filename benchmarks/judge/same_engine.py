"""How often does `compare` raise a false alarm between two processes of one engine, and does it find gains and losses?

Runs two processes of the real engine with the built-in model in interleaved rounds, and draws comparisons from blocks
of neighbouring rounds. Simulates a gain by shortening the times of one side. With --slower, a third process with a
slower setting takes part in each round: a real loss.

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
from dataclasses import replace
from pathlib import Path

import msgspec

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
BLOCK = 4
COUNTS = (8, 12, 16, 20)
LOST = 0.9
"""The speed that remains with the loss that a gate must find."""


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

    def measure(self, file: RoundsFile, wanted: int, *, most_s: float, quiet_only: bool = True) -> None:
        """Until `wanted` rounds are kept, or no further one fits into `most_s`; at least one is measured.

        Rounds during which other processes used the CPU are measured again.
        """
        if file.header is None:
            file.add(self.header)
        elif (file.header.settings, file.header.load) != (self.settings, self.load):
            raise SystemExit(f"{file.path} has rounds of another load or setting; move it away")
        began, longest_s = time.monotonic(), 0.0
        while self.count(file, quiet_only) < wanted:
            at_s = time.monotonic()
            if longest_s and at_s - began + longest_s > most_s:
                break
            number = len(file.rounds)
            file.add(Round(number=number, repeats=self._measure_round(number)))
            longest_s = max(longest_s, time.monotonic() - at_s)
            self._report(file, wanted, quiet_only, time.monotonic() - began)

    def _measure_round(self, number: int) -> tuple[Repeat, ...]:
        """Each process is started for its repeat, as `gate` does: two starts of one build differ by up to a tenth."""
        found: dict[int, Repeat] = {}
        for side in range(len(self.starts)) if number % 2 == 0 else reversed(range(len(self.starts))):
            with run_engine(self.starts[side], SilentProgress()) as started:
                found[side] = self._measure_repeat(number, started)
        return tuple(found[side] for side in range(len(self.starts)))

    def _measure_repeat(self, number: int, started: RunningEngine) -> Repeat:
        target, moments = LoadTarget.from_url(started.url, key=started.key, model=self.name), dict[str, str]()
        with Watcher(make_meters(started)) as watcher:

            def mark(moment: str) -> None:
                moments[moment] = format_now(milliseconds=True)
                watcher.mark(moment)

            repeat = measure_apart(
                target, self.load, seconds=self.seconds, warmup_s=WARMUP_S, round=number, check=False, watch=mark
            )
        use, engine = watcher.summarize_readings()
        at = repeat.at or moments.get("begin")
        return _shorten(replace_fields(repeat, at=at, use=use, engine=engine))

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


def choose_rounds(total: int, count: int, dice: random.Random) -> list[int]:
    """Rounds of one comparison, in blocks of four neighbours so that drift within minutes is preserved; none twice.

    Sequences of neighbouring rounds would overlap: 200 of them would be only a few independent comparisons.
    """
    first = dice.randrange(total % BLOCK + 1)
    blocks = dice.sample(range(first, total - BLOCK + 1, BLOCK), math.ceil(count / BLOCK))
    return sorted(start + place for start in blocks for place in range(BLOCK))[:count]


def codes(
    a: Cell, b: Cell, rounds: int, times: int, seed: int = 1, *, swap: bool = True, gain: float = 1.0
) -> collections.Counter[int]:
    """Exit codes of comparisons of resampled rounds. `swap`: which one is the baseline is random. `gain`: a simulated
    gain of the challenger."""
    dice = random.Random(seed)
    found: collections.Counter[int] = collections.Counter()
    for _ in range(times):
        chosen = choose_rounds(len(a.repeats), rounds, dice)
        one, other = (b, a) if swap and dice.random() < 0.5 else (a, b)
        baseline = [_limit_to_speed(one.repeats[number]) for number in chosen]
        challenger = [faster(_limit_to_speed(other.repeats[number]), gain) for number in chosen]
        sides = (
            [replace_fields(one, id="A", quality=GOOD, repeats=tuple(baseline))],
            [replace_fields(other, id="B", quality=GOOD, repeats=tuple(challenger))],
        )
        found[compare(*sides).exit_code] += 1
    return found


def _limit_to_speed(repeat: Repeat) -> Repeat:
    """Without the times of first tokens: they do not decide here, and their intervals take most of the time."""
    return replace_fields(repeat, samples=tuple(replace_fields(sample, ttft_ms=None) for sample in repeat.samples))


def print_figures(run: Run) -> None:
    """What the rounds show."""
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
    for rounds in COUNTS:
        if rounds > len(a.repeats) - BLOCK:
            break
        print(f"comparisons of {rounds} rounds:")
        print(f"  200 of equal builds: {describe_codes(codes(a, b, rounds, 200))}")
        print(f"  50 with a simulated gain of 15 %: {describe_codes(codes(a, b, rounds, 50, gain=1.15))}")
        for slower in others:
            loss = estimate_effect(a, slower, "output_tok_s", 0.95)
            speed = f"{loss.gain.value:.3f}" if loss else "an unknown share"
            lost = describe_codes(codes(a, slower, rounds, 50, swap=False))
            print(f"  50 with {slower.notes}, {speed} of the speed: {lost}")
            if loss is not None:
                scaled = codes(a, slower, rounds, 50, swap=False, gain=LOST / loss.gain.value)
                print(f"  50 of the same, scaled to {LOST:g} of the speed: {describe_codes(scaled)}")


def describe_codes(found: collections.Counter[int]) -> str:
    names = {30: "worse", 10: "migrate", 20: "not proven", 0: "stay"}
    return ", ".join(f"{found[code]} {name}" for code, name in names.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llama.cpp")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
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
    print_figures(read_rounds(asked.kept or asked.rounds))


if __name__ == "__main__":
    main()
