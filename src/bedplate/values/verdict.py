"""Verdict: stay, migrate or not proven; by how much, how surely, what drove it, and what would prove it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.cost import PerMillion
from bedplate.values.record import Figure, Record
from bedplate.values.run import Load, Quality

Answer = Literal["stay", "migrate", "not proven"]
Metric = Literal["output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms"]
Constraint = Literal["throughput", "latency", "quality", "errors", "moving costs", "noise", "load"]
"""What drove the answer. noise: the measurements are too few or too unsteady; load: who wins depends on it."""
SAME_SOURCE = "made of the same weights"
"""The note beside quantizations that differ, where it is recorded what both were made of."""
EXIT_CODES: dict[Answer, int] = {"stay": 0, "migrate": 10, "not proven": 20}


class Difference(Record, frozen=True, kw_only=True):
    """Something that is not the same on both sides."""

    what: str
    a: str
    b: str
    note: str | None = None


class Differences(Record, frozen=True, kw_only=True):
    meaningless: tuple[Difference, ...] = ()
    """What leaves nothing to compare."""
    printed: tuple[Difference, ...] = ()
    """What a reader has to know beside the result."""


class Effect(Record, frozen=True, kw_only=True):
    """One metric under one load, on both sides."""

    metric: Metric
    load: Load
    a: float
    b: float
    gain: Figure
    """How many times better b is than a, with its 95 % interval: of times the inverse ratio, so that more is better."""
    sure_low: float
    """The interval's low end when it has to hold for all loads at once."""
    sure_high: float
    repeats: tuple[int, int]
    paired: bool
    """Whether the repeats took turns, so that what drifts is the same on both sides."""
    noise: float | None
    """Standard deviation of the (logarithm of the) gain from repeat to repeat."""


class Spent(Record, frozen=True, kw_only=True):
    """What a million output tokens cost on both sides under one load, at the prices that were given."""

    load: Load
    a: PerMillion
    b: PerMillion


class OnTarget(Record, frozen=True, kw_only=True):
    """The share of requests that met the latency target under one load, with 95 % intervals."""

    load: Load
    a: Figure
    b: Figure


class Cost(Record, frozen=True, kw_only=True):
    """What one side costs to run beside its speed; `None`: not known."""

    engine: str
    install_bytes: int | None = None
    start_s: float | None = None
    peak_memory_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    effort: int | None = None
    """How much machinery it brings, from 1 (one program) to 5."""
    steps: tuple[str, ...] = ()
    """What has to be compiled or converted before it can start."""


class Side(Record, frozen=True, kw_only=True):
    engine: str
    engine_version: str | None = None
    quantization: str | None = None
    cells: tuple[str, ...]
    runs: tuple[str, ...]
    quality: Quality | None = None
    cost: Cost


class Verdict(Record, frozen=True, kw_only=True):
    schema: Literal["verdict/1"] = "verdict/1"
    answer: Answer
    constraint: Constraint
    text: str
    """The answer's ground in one or two sentences."""
    would_prove: str | None = None
    """What has to be measured for another answer."""
    model: str
    machine: str
    a: Side
    """What is in service, or stands first."""
    b: Side
    effects: tuple[Effect, ...]
    on_target: tuple[OnTarget, ...] = ()
    spent: tuple[Spent, ...] = ()
    """Nothing where nobody said a price and no energy was measured."""
    least_gain: float
    """The gain below which moving costs more than it brings."""
    differences: tuple[Difference, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cells that were not compared, and why."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]
