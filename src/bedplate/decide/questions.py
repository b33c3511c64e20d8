"""Variations of a decision: `plan --what-if`, and which hardware would serve the workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bedplate.decide.choose import decide
from bedplate.decide.hints import find_growing_queue
from bedplate.decide.targets import get_slack, get_target
from bedplate.errors import UsageError
from bedplate.facts.chips import Chip, load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
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


class DecisionChange(Record, frozen=True, kw_only=True):
    """One thing that differs between two decisions."""

    what: str
    before: str
    after: str


class WhatIf(Record, frozen=True, kw_only=True):
    """What `bedplate plan --what-if --json` prints."""

    what_if: str
    """The changed fields, as they were given."""
    changes: tuple[DecisionChange, ...]
    before: Decision
    after: Decision


def list_changes(before: Decision, after: Decision) -> tuple[DecisionChange, ...]:
    """The differences, the most important first."""
    rows = [
        ("engine", before.engine or "nothing fits", after.engine or "nothing fits"),
        ("orchestrator", before.orchestrator or "none", after.orchestrator or "none"),
        ("weights", before.quantization or "", after.quantization or ""),
        ("layout", describe_layout(before), describe_layout(after)),
        ("load", _describe_load(before), _describe_load(after)),
        ("concurrent requests", f"{before.max_concurrency:,}", f"{after.max_concurrency:,}"),
        ("rule", before.reasons[0].rule if before.reasons else "", after.reasons[0].rule if after.reasons else ""),
    ]
    for name, unit in (("ttft_ms", "ms"), ("tpot_ms", "ms"), ("output_tok_s", "tok/s"), ("memory_gb", "GB")):
        one, other = getattr(before.estimate, name), getattr(after.estimate, name)
        rows.append((name, _format_figure(one, unit), _format_figure(other, unit)))
    for what, name, unit in PAID:
        one, other = getattr(before.estimate, name), getattr(after.estimate, name)
        rows.append((what, _format_figure(one, unit, "unknown"), _format_figure(other, unit, "unknown")))
    rows.append(("latency targets", _get_latency_reason(before), _get_latency_reason(after)))
    return tuple(DecisionChange(what=what, before=one, after=other) for what, one, other in rows if one != other)


def _format_figure(figure: object, unit: str, unknown: str = "not predicted") -> str:
    value = getattr(figure, "value", None)
    return unknown if value is None else f"{units.format_figure(value)} {unit}".strip()


def _describe_load(decision: Decision) -> str:
    return decision.load.description if decision.load is not None else f"{decision.in_flight:,} in flight"


def _get_latency_reason(decision: Decision) -> str:
    return next((reason.text for reason in decision.reasons if reason.rule == IN_TIME), "none")


def describe_layout(decision: Decision) -> str:
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
    for chip in only if only is not None else list_purchasable():
        yield chip, _make_offer(chip, model, workload, operations)


def list_purchasable() -> tuple[Chip, ...]:
    """Chips that are still sold or offered by cloud providers."""
    return tuple(
        chip
        for chip in load_chips().values()
        if chip.kind in KINDS and chip.year >= OLDEST_YEAR and chip.vendor in ("nvidia", "amd", "apple", "intel")
    )


def is_laptop(chip: str) -> bool:
    return chip.endswith(LAPTOP)


def _make_offer(chip: Chip, model: Model, workload: Workload, operations: Operations) -> Offer | None:
    for count in (1,) if chip.unified or is_laptop(chip.name) else COUNTS:
        try:
            machine = _make_machine(chip, count)
        except UsageError:
            return None
        decision = decide(machine, model, workload, operations=operations)
        if serves(decision, workload):
            watts = chip.watts * count * chip.devices_per_card if chip.watts is not None else None
            return Offer(accelerator=chip.name, count=count, watts=watts, decision=decision)
    return None


def serves(decision: Decision, workload: Workload) -> bool:
    """Whether it fits without offload, holds all requests, and by the estimate meets the rate and the targets."""
    if not decision.fits or decision.max_concurrency < decision.in_flight or find_growing_queue(decision, workload):
        return False
    if decision.memory is not None and decision.memory.offload is not None:
        return False
    target, expected = get_target(workload), decision.estimate
    if target is None:
        return True
    first, each = (figure.value if figure is not None else None for figure in (expected.ttft_ms, expected.tpot_ms))
    if workload.latency is None and (first is None or each is None):
        return True  # nobody asked for these targets: a speed that is not predicted does not count against a chip
    return target.compute_overrun(first, each) <= get_slack(workload)


def _make_machine(chip: Chip, count: int) -> Hardware:
    described: dict[str, object] = {"accelerator": chip.name, "count": count}
    if chip.unified:
        described["ram_gb"] = max(chip.memory_options_gib) if chip.memory_options_gib else chip.memory_gib
    if chip.vendor == "apple":
        described["os"] = "macos"
    return make_simulated_hardware(described)
