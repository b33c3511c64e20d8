"""What was measured on this machine, as decisions use it: it corrects estimates, and it can overturn a rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bedplate.facts.known_models import lookup, with_label
from bedplate.values import Hardware, Model, Parallelism, Workload
from bedplate.values.result import Result

MOST_RESULTS = 200
PROVEN_GAIN = 1.10
"""Tenths of a gain are within what a machine varies by from day to day; a move costs more than they bring."""
LEAST_QUALITY = 0.95


@dataclass(frozen=True)
class Evidence:
    results: tuple[Result, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    """For each engine that was measured here, how its measured speed compares with what was estimated for it."""

    def factor(self, engine: str) -> float:
        return self.factors.get(engine, 1.0)

    def measured(self, engine: str) -> int:
        return sum(result.engine == engine for result in self.results)

    def beats(self, engine: str) -> tuple[Result, Result] | None:
        """The measured pair in which another engine is clearly better than this one, if there is one."""
        own = [result for result in self.results if result.engine == engine and result.output_tok_s]
        others = [result for result in self.results if result.engine != engine and result.output_tok_s]
        pairs = [(other, mine) for mine in own for other in others if other.comparable(mine) and _better(other, mine)]
        return max(pairs, key=lambda pair: (pair[0].output_tok_s or 0) / (pair[1].output_tok_s or 1), default=None)


def _better(one: Result, other: Result) -> bool:
    """Faster by more than noise, no slower to the first token, and not wrong."""
    if one.quality is not None and one.quality < LEAST_QUALITY:
        return False
    if (one.output_tok_s or 0) < PROVEN_GAIN * (other.output_tok_s or 0):
        return False
    return one.ttft_ms is None or other.ttft_ms is None or one.ttft_ms <= other.ttft_ms * PROVEN_GAIN


def factor_of(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Measured over estimated, the middle of all pairs."""
    ratios = [measured / estimated for measured, estimated in pairs if measured > 0 and estimated > 0]
    return statistics.median(ratios) if ratios else None


def gathered(hardware: Hardware, model: Model, results: Sequence[Result]) -> Evidence:
    """The results as evidence: for this model they may overturn a rule, and all of them correct the estimates."""
    from bedplate.decide.estimate import expectation_for

    pairs: dict[str, list[tuple[float, float]]] = {}
    for result in results[:MOST_RESULTS]:
        measured_model = _model_of(result, model)
        if measured_model is None or not result.output_tok_s:
            continue
        work = Workload(
            concurrency=result.concurrency, prompt_tokens=result.prompt_tokens, output_tokens=result.output_tokens
        )
        expected = expectation_for(
            hardware, measured_model, result.engine, Parallelism(), work, slots=result.concurrency
        )
        if expected is not None:
            pairs.setdefault(result.engine, []).append((result.output_tok_s, expected.output_tok_s))
    factors = {engine: factor for engine, found in pairs.items() if (factor := factor_of(found)) is not None}
    return Evidence(tuple(result for result in results if result.model == model.name), factors)


def _model_of(result: Result, model: Model) -> Model | None:
    """The measured model in the measured weights: the one at hand, or one that is known by name."""
    found = model if result.model == model.name else lookup(result.model)
    if found is None or not result.quantization or result.quantization == found.quantization:
        return found
    return with_label(found, result.quantization.upper())
