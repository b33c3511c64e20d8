"""Variations of a decision: `plan --what-if`, and which hardware would serve the workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bedplate.decide.choose import decide, too_slow
from bedplate.errors import BadQuestion
from bedplate.facts.chips import Chip, chips
from bedplate.facts.simulated import simulated
from bedplate.values import Decision, Hardware, Model, Workload, units
from bedplate.values.intent import Operations
from bedplate.values.record import Record

OLDEST_YEAR = 2020
COUNTS = (1, 2, 4, 8)
LAPTOP = " Laptop"
"""The suffix of laptop chips, of which a machine has only one."""
PAID = (
    ("cost per M tokens", "cost_per_million_tokens", ""),
    ("energy per M tokens", "kwh_per_million_tokens", "kWh"),
)
"""Cost has no unit: it is in the currency of the given price."""
IN_TIME = "latency.target"
"""The rule whose reason says whether the latency targets are met."""
KINDS = ("datacenter", "workstation", "consumer", "apple", "edge")


class Change(Record, frozen=True, kw_only=True):
    """One thing that differs between two decisions."""

    what: str
    before: str
    after: str


class WhatIf(Record, frozen=True, kw_only=True):
    """What `bedplate plan --what-if --json` prints."""

    what_if: str
    """The changed fields, as they were given."""
    changes: tuple[Change, ...]
    before: Decision
    after: Decision


def changes(before: Decision, after: Decision) -> tuple[Change, ...]:
    """The differences, the most important first."""
    rows = [
        ("engine", before.engine or "nothing fits", after.engine or "nothing fits"),
        ("orchestrator", before.orchestrator or "none", after.orchestrator or "none"),
        ("weights", before.quantization or "", after.quantization or ""),
        ("layout", layout_words(before), layout_words(after)),
        ("concurrent requests", f"{before.max_concurrency:,}", f"{after.max_concurrency:,}"),
        ("rule", before.reasons[0].rule if before.reasons else "", after.reasons[0].rule if after.reasons else ""),
    ]
    for name, unit in (("ttft_ms", "ms"), ("tpot_ms", "ms"), ("output_tok_s", "tok/s"), ("memory_gb", "GB")):
        one, other = getattr(before.estimate, name), getattr(after.estimate, name)
        rows.append((name, _figure(one, unit), _figure(other, unit)))
    for what, name, unit in PAID:
        one, other = getattr(before.estimate, name), getattr(after.estimate, name)
        rows.append((what, _figure(one, unit, "unknown"), _figure(other, unit, "unknown")))
    rows.append(("latency targets", _in_time(before), _in_time(after)))
    return tuple(Change(what=what, before=one, after=other) for what, one, other in rows if one != other)


def _figure(figure: object, unit: str, unknown: str = "not predicted") -> str:
    value = getattr(figure, "value", None)
    return unknown if value is None else f"{units.figure(value)} {unit}".strip()


def _in_time(decision: Decision) -> str:
    return next((reason.text for reason in decision.reasons if reason.rule == IN_TIME), "none")


def layout_words(decision: Decision) -> str:
    layout = decision.parallelism
    names = (
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
        ("data", layout.data),
        ("expert", layout.expert),
        ("attention data", layout.attention_data),
    )
    return " × ".join(f"{name} parallel {size}" for name, size in names if size > 1) or "one device"


class Offer(Record, frozen=True, kw_only=True):
    """A machine that would serve the workload, with the decision for it."""

    accelerator: str
    count: int
    watts: float | None
    decision: Decision


def procure(
    model: Model, workload: Workload, operations: Operations, only: Iterable[Chip] | None = None
) -> Iterator[tuple[Chip, Offer | None]]:
    """For each known chip, the smallest count that serves all requests within the targets; `None` if eight do not."""
    for chip in only if only is not None else purchasable():
        yield chip, _offer(chip, model, workload, operations)


def purchasable() -> tuple[Chip, ...]:
    """Chips that are still sold or offered by cloud providers."""
    return tuple(
        chip
        for chip in chips().values()
        if chip.kind in KINDS and chip.year >= OLDEST_YEAR and chip.vendor in ("nvidia", "amd", "apple", "intel")
    )


def _offer(chip: Chip, model: Model, workload: Workload, operations: Operations) -> Offer | None:
    for count in (1,) if chip.unified or chip.name.endswith(LAPTOP) else COUNTS:
        try:
            machine = _machine(chip, count)
        except BadQuestion:
            return None
        decision = decide(machine, model, workload, operations=operations)
        if serves(decision, workload):
            watts = chip.watts * count * chip.devices_per_card if chip.watts is not None else None
            return Offer(accelerator=chip.name, count=count, watts=watts, decision=decision)
    return None


def serves(decision: Decision, workload: Workload) -> bool:
    """Whether it fits without offload, holds all requests, and by the estimate meets the rate and the targets."""
    if not decision.fits or decision.max_concurrency < decision.in_flight or too_slow(decision, workload):
        return False
    if decision.memory is not None and decision.memory.offload is not None:
        return False
    target, expected = workload.latency, decision.estimate
    if target is None:
        return True
    first, each = (figure.value if figure is not None else None for figure in (expected.ttft_ms, expected.tpot_ms))
    return target.overrun(first, each) <= 1


def _machine(chip: Chip, count: int) -> Hardware:
    described: dict[str, object] = {"accelerator": chip.name, "count": count}
    if chip.unified:
        described["ram_gb"] = max(chip.memory_options_gib) if chip.memory_options_gib else chip.memory_gib
    if chip.vendor == "apple":
        described["os"] = "macos"
    return simulated(described)
