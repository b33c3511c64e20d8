"""Constructed cells: requests with known times, and repeats with known noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bedplate.values import replace_fields
from bedplate.values.decision import Settings
from bedplate.values.run import Cell, EngineSeries, Load, Quality, Repeat, Sample, Subject

GOOD = Quality(asked=200, agreement=0.98, verdict="ok")
MODEL = "SmolLM2-135M-Instruct"


def make_sample(
    at_s: float = 0.0, ttft_ms: float = 100.0, step_ms: float = 10.0, tokens: int = 32, **other: object
) -> Sample:
    gaps = tuple(step_ms for _ in range(tokens - 1))
    base = Sample(
        at_s=at_s, ttft_ms=ttft_ms, duration_ms=ttft_ms + step_ms * (tokens - 1), gaps_ms=gaps, prompt_tokens=64,
        output_tokens=tokens, finish="length",
    )  # fmt: skip
    return replace_fields(base, **other)


def moment(second: float) -> str:
    minutes, seconds = divmod(second, 60)
    return f"2026-11-15T09:{int(minutes) % 60:02d}:{seconds:06.3f}Z"


def make_repeat(
    samples: Sequence[Sample], second: float | None = None, seconds: float = 3.0, **other: object
) -> Repeat:
    at = None if second is None else moment(second)
    return replace_fields(Repeat(at=at, seconds=seconds, samples=tuple(samples), warmup=4), **other)


def make_cell(engine: str, repeats: Sequence[Repeat], concurrency: int = 4, **other: object) -> Cell:
    subject = Subject(engine=engine, engine_version="1", model=MODEL, quantization="Q4_1", device="cpu")
    base = Cell(
        id=f"{engine}-{concurrency}", run="made", at="2026-11-15T09:00:00Z", machine="made-up", subject=subject,
        load=Load(concurrency=concurrency, prompt_tokens=64, output_tokens=32), repeats=tuple(repeats), quality=GOOD,
    )  # fmt: skip
    return replace_fields(base, **other)


def with_settings(cell: Cell, **settings: object) -> Cell:
    base = Settings(slots=16, context_tokens=1024, threads=2)
    return replace_fields(cell, subject=replace_fields(cell.subject, settings=replace_fields(base, **settings)))


def with_engine(cell: Cell, **series: object) -> Cell:
    told = replace_fields(EngineSeries(scrapes=10), **series)
    return replace_fields(cell, repeats=tuple(replace_fields(repeat, engine=told) for repeat in cell.repeats))


class Noise:
    """Simulated variation of a machine: between requests, between repeats with heavy tails, and slow drift."""

    def __init__(self, seed: int, request: float = 0.06, repeat: float = 0.02, drift: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.request, self.repeat, self.drift = request, repeat, drift
        self.slow = 0.0

    def draw_heavy_tailed(self) -> float:
        """Student's t with three degrees of freedom."""
        spread = math.sqrt(sum(self.rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        return self.rng.gauss(0, 1) / spread

    def next_repeat(self, speed: float, second: float, concurrency: int, requests: int = 12) -> Repeat:
        self.slow = 0.9 * self.slow + self.rng.gauss(0, self.drift)
        slower = math.exp(-self.slow - self.repeat * self.draw_heavy_tailed()) / speed
        samples = []
        for number in range(requests):
            took = 400.0 * slower * math.exp(self.rng.gauss(0, self.request) + (0.3 if self.rng.random() < 0.03 else 0))
            samples.append(
                Sample(at_s=number * 0.1, ttft_ms=0.25 * took, duration_ms=took, prompt_tokens=64, output_tokens=32)
            )
        made = concurrency * 32 * requests / sum(one.duration_ms for one in samples) * 1000
        return make_repeat(samples, second, delivered_tokens=made * 3.0)


def make_pair(
    noise: Noise, gain: float, repeats: int = 5, loads: Sequence[int] = (4,)
) -> tuple[list[Cell], list[Cell]]:
    """Two engines in interleaved rounds, A B B A …; the second is `gain` times as fast."""
    sides: tuple[list[Cell], list[Cell]] = ([], [])
    second = 0.0
    for load in loads:
        found: tuple[list[Repeat], list[Repeat]] = ([], [])
        for number in range(repeats):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                found[side].append(noise.next_repeat(gain if side else 1.0, second, load))
                second += 4
        for side, name in enumerate(("one", "other")):
            sides[side].append(make_cell(name, found[side], load))
    return sides
