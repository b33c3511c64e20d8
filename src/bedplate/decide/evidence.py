"""What was measured on this machine, as decisions use it: it corrects estimates, and it can overturn a rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bedplate.engines.base import DEVICES
from bedplate.facts.known_models import lookup, with_label
from bedplate.values import Hardware, Model, Settings, Workload, replaced
from bedplate.values.agreement import Agreement
from bedplate.values.decision import Device
from bedplate.values.result import Result

MOST_RESULTS = 200
PROVEN_GAIN = 1.10
"""Tenths of a gain are within what a machine varies by from day to day; a move costs more than they bring."""
LEAST_QUALITY = 0.95
Measured = tuple[str, Device]
"""An engine, and what it computes on: a build for the CPU says nothing of the same engine's speed on a card."""


@dataclass(frozen=True)
class Evidence:
    results: tuple[Result, ...] = ()
    factors: Mapping[Measured, float] = field(default_factory=dict)
    """How the measured speed compares with what was estimated for the same."""
    agreements: tuple[Agreement, ...] = ()
    """Whose answers with this model were checked here, the newest first."""

    def factor(self, engine: str, device: Device) -> float:
        return self.factors.get((engine, device), 1.0)

    def measured(self, engine: str) -> int:
        return sum(result.engine == engine for result in self.results)

    def broken(self, engine: str, version: str, weights: str, settings: Settings) -> Agreement | None:
        """The check that found wrong answers in this very setting; a later one that found none clears it."""
        checked = (
            one
            for one in self.agreements
            if one.verdict != "unchecked" and one.same_setting(engine, version, weights, settings)
        )
        newest = next(checked, None)
        return newest if newest is not None and newest.verdict == "broken" else None

    def beats(self, engine: str) -> tuple[Result, Result] | None:
        """The measured pair in which another engine is clearly better than this one, if there is one."""
        newest = _newest(self.results)
        own = [result for result in newest if result.engine == engine]
        others = [result for result in newest if result.engine != engine]
        pairs = [(other, mine) for mine in own for other in others if other.comparable(mine) and _better(other, mine)]
        return max(pairs, key=lambda pair: (pair[0].output_tok_s or 0) / (pair[1].output_tok_s or 1), default=None)


def _newest(results: Sequence[Result]) -> list[Result]:
    """Of the same engine in the same setting, the last word: the best of many tries would be luck."""
    found: dict[tuple[object, ...], Result] = {}
    for result in results:
        key = (
            result.machine, result.engine, result.model, result.quantization, result.device, result.parallelism,
            result.concurrency, result.prompt_tokens, result.output_tokens,
        )  # fmt: skip
        if result.output_tok_s:
            found.setdefault(key, result)
    return list(found.values())


def _better(one: Result, other: Result) -> bool:
    """Faster by more than noise, no slower to the first token, and not wrong."""
    if one.quality is not None and one.quality < LEAST_QUALITY:
        return False
    if (one.output_tok_s or 0) < PROVEN_GAIN * (other.output_tok_s or 0):
        return False
    if (one.output_tok_s_low or one.output_tok_s or 0) <= (other.output_tok_s_high or other.output_tok_s or 0):
        return False  # the one may be as fast as the other
    return one.ttft_ms is None or other.ttft_ms is None or one.ttft_ms <= other.ttft_ms * PROVEN_GAIN


def factor_of(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Measured over estimated, the middle of all pairs."""
    ratios = [measured / estimated for measured, estimated in pairs if measured > 0 and estimated > 0]
    return statistics.median(ratios) if ratios else None


def gathered(
    hardware: Hardware, model: Model, results: Sequence[Result], agreements: Sequence[Agreement] = ()
) -> Evidence:
    """The results as evidence: for this model they may overturn a rule, and all of them correct the estimates."""
    from bedplate.decide.estimate import expectation_for

    pairs: dict[Measured, list[tuple[float, float]]] = {}
    for result in results[:MOST_RESULTS]:
        measured_model = _model_of(result, model)
        if measured_model is None or not result.output_tok_s:
            continue
        work = Workload(
            concurrency=result.concurrency, prompt_tokens=result.prompt_tokens, output_tokens=result.output_tokens
        )
        device = result.device or _usual_device(hardware)
        machine = hardware if device != "cpu" else replaced(hardware, accelerators=(), links=())
        slots = -(-result.concurrency // result.parallelism.data)
        expected = expectation_for(machine, measured_model, result.engine, result.parallelism, work, slots=slots)
        if expected is not None:
            pairs.setdefault((result.engine, device), []).append((result.output_tok_s, expected.output_tok_s))
    factors = {measured: factor for measured, found in pairs.items() if (factor := factor_of(found)) is not None}
    return Evidence(
        tuple(result for result in results if result.model == model.name),
        factors,
        tuple(one for one in agreements if one.model == model.name),
    )


def _usual_device(hardware: Hardware) -> Device:
    return DEVICES.get(hardware.accelerators[0].vendor, "cpu") if hardware.accelerators else "cpu"


def _model_of(result: Result, model: Model) -> Model | None:
    """The measured model in the measured weights: the one at hand, or one that is known by name."""
    found = model if result.model == model.name else lookup(result.model)
    if found is None or not result.quantization or result.quantization == found.quantization:
        return found
    label = result.quantization.upper().replace(" ", "")
    stored = with_label(found, label)
    # Weights of a kind that nobody knows are no ground to correct anything on.
    return stored if (stored.quantization or "").upper().replace(" ", "") == label else None
