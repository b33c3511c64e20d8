"""Verdict: stay, migrate or not proven, with the gain, its confidence, what decided it and what would prove it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.cost import CostPerMillion
from bedplate.values.record import Figure, Record
from bedplate.values.run import Load, Quality

Answer = Literal["stay", "migrate", "not proven"]
Metric = Literal[
    "output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms", "ttft_p95_ms", "tpot_p95_ms", "peak_memory_bytes", "agreement",
    "schema_match",
]  # fmt: skip
"""agreement, schema_match: shares of prompts, from 0 to 1."""
MetricName = Literal["ttft_p95", "tpot_p95", "tok_s", "peak_memory", "quality", "schema"]
"""The metrics that a comparison can be restricted to. schema: structured output."""
Constraint = Literal["throughput", "latency", "quality", "errors", "moving costs", "noise", "load", "memory"]
"""What decided the answer. noise: too few or too unsteady measurements. load: the winner depends on the load."""
SAME_SOURCE = "made of the same weights"
"""The note on differing quantizations if both are known to come from the same weights."""
EXIT_CODES: dict[Answer, int] = {"stay": 0, "migrate": 10, "not proven": 20}
WORSE_EXIT_CODE = 30
TOLERANCE = 0.05
"""Default: the largest loss against the baseline that does not count as worse."""


class Difference(Record, frozen=True, kw_only=True):
    """Something that differs between the two sides."""

    what: str
    a: str
    b: str
    note: str | None = None


class Differences(Record, frozen=True, kw_only=True):
    meaningless: tuple[Difference, ...] = ()
    """Differences that make a comparison meaningless."""
    printed: tuple[Difference, ...] = ()
    """Differences that a reader must know beside the result."""


class Effect(Record, frozen=True, kw_only=True):
    """One metric under one load, on both sides."""

    metric: Metric
    load: Load
    a: float
    b: float
    gain: Figure
    """Factor by which b is better than a, with its 95 % interval. For times it is the inverse ratio: more is better."""
    sure_low: float
    """Low end of the interval that holds for all loads at once."""
    sure_high: float
    repeats: tuple[int, int]
    """Of agreement and schema_match: the prompts."""
    paired: bool
    """Whether the repeats were interleaved, so that drift affects both sides equally."""
    noise: float | None
    """Standard deviation of the logarithm of the gain between repeats."""


QualityMetric = Literal["agreement", "perplexity"]
QualityOutcome = Literal["equivalent", "better", "worse", "not proven"]


class QualityEffect(Record, frozen=True, kw_only=True):
    """One measure of the answers on both sides, each compared with the reference."""

    metric: QualityMetric
    a: float
    """agreement: the share of the prefixes. perplexity: relative to that of the reference."""
    b: float
    change: Figure
    """How much better b is, with its 95 % interval: the difference of the shares, or the relative difference."""
    margin: float
    """b is equivalent if the interval does not go below minus this margin."""
    outcome: QualityOutcome


class CostComparison(Record, frozen=True, kw_only=True):
    """Cost of a million output tokens on both sides under one load, at the given prices."""

    load: Load
    a: CostPerMillion
    b: CostPerMillion


class TargetShare(Record, frozen=True, kw_only=True):
    """Share of requests that met the latency target under one load, with 95 % intervals."""

    load: Load
    a: Figure
    b: Figure


class OperatingCost(Record, frozen=True, kw_only=True):
    """Cost of operating one side besides its speed; `None`: unknown."""

    engine: str
    install_bytes: int | None = None
    start_s: float | None = None
    peak_memory_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    effort: int | None = None
    """Operational complexity, from 1 (one program) to 5."""
    steps: tuple[str, ...] = ()
    """What must be compiled or converted before it can start."""


class ComparedEngine(Record, frozen=True, kw_only=True):
    engine: str
    engine_version: str | None = None
    quantization: str | None = None
    cells: tuple[str, ...]
    runs: tuple[str, ...]
    quality: Quality | None = None
    cost: OperatingCost


def name_sides(a: ComparedEngine, b: ComparedEngine) -> tuple[str, str]:
    """The names of both sides: the engines, and ID@VERSION for two versions of one engine."""
    if a.engine != b.engine or a.engine_version == b.engine_version or not (a.engine_version and b.engine_version):
        return a.engine, b.engine
    return f"{a.engine}@{a.engine_version}", f"{b.engine}@{b.engine_version}"


class Verdict(Record, frozen=True, kw_only=True):
    schema: Literal["verdict/1"] = "verdict/1"
    answer: Answer
    constraint: Constraint
    text: str
    """The reason for the answer in one or two sentences."""
    would_prove: str | None = None
    """What must be measured for another answer."""
    model: str
    machine: str
    a: ComparedEngine
    """The engine in service, or the first one named."""
    b: ComparedEngine
    effects: tuple[Effect, ...]
    answers: tuple[QualityEffect, ...] = ()
    """The comparison of the answers. Empty if one side was not compared with a reference."""
    on_target: tuple[TargetShare, ...] = ()
    spent: tuple[CostComparison, ...] = ()
    """Empty if no price was given and no energy was measured."""
    least_gain: float
    """The smallest gain that is worth a migration."""
    metrics: tuple[MetricName, ...] = ()
    """The metrics that decided. Empty: answers, errors, the latency target, then speed."""
    tolerance: float = TOLERANCE
    """The largest loss that does not count as worse: 0.05 is 5 %."""
    worse: str | None = None
    """Why b is worse than a by more than the tolerance; `None`: it is not, as far as the measurements show."""
    differences: tuple[Difference, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cells that were not compared, and why."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer] if self.worse is None else WORSE_EXIT_CODE
