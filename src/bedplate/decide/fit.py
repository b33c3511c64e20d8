"""Does it fit, and if not, what would? Settings shrink in the order that costs a user least."""

from __future__ import annotations

import math
from collections.abc import Callable

from bedplate.engines import Engine
from bedplate.values import Hardware, MemoryNeed, Model, Settings, Workload, replaced
from bedplate.values.units import memory as as_memory

MOST_SLOTS = 65536
"""Where counting stops for an engine that sets no limit of its own."""


def fitted(engine: Engine, hardware: Hardware, model: Model, workload: Workload) -> tuple[Settings, MemoryNeed]:
    """The largest settings that fit: slots beyond the asked work go first, then context beyond it, then slots below it.

    When nothing fits, the smallest that would serve one request, with its need, so that the refusal has figures.
    """
    wanted = engine.settle(hardware, model, workload)
    for settings in _smaller_and_smaller(wanted, workload):
        need = engine.memory(hardware, model, settings)
        if need.fits:
            return settings, need
    return settings, need


def most_requests(engine: Engine, hardware: Hardware, model: Model, context_tokens: int) -> int:
    """How many requests of this length fit at once; 0 when not even one does."""

    def fits(slots: int) -> bool:
        settings = Settings(slots=slots, context_tokens=context_tokens)
        return engine.memory(hardware, model, settings).fits

    return most_that(fits, engine.max_slots or MOST_SLOTS)


def most_that(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest count up to `ceiling` that fits, where fewer always fit if more do; 0 when not even one does."""
    if not fits(1):
        return 0
    if fits(ceiling):
        return ceiling
    low, high = 1, ceiling
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_would_fit(need: MemoryNeed, model: Model) -> tuple[str, ...]:
    """The nearest things that would fit, nearest first."""
    hints = [f"a machine with {as_memory(more_memory(need))} more free memory"]
    room = need.available_bytes - need.reserved_bytes - need.kv_bytes - round(need.overhead_bytes.high)
    if room > 0 and model.parameters:
        bits = room * 8 / model.parameters
        if bits >= 2:
            hints.insert(0, f"a quantization of at most {bits:.1f} bits per weight (this one has {_bits(model):.1f})")
    return tuple(hints)


def more_memory(need: MemoryNeed) -> int:
    """How much more would have to be free; of more memory, more is left to the system too."""
    share = need.reserved_bytes / need.available_bytes if need.available_bytes else 0.0
    return math.ceil(need.high_bytes / (1 - share)) - need.available_bytes


def _bits(model: Model) -> float:
    return model.weight_bytes * 8 / model.parameters


def _smaller_and_smaller(settings: Settings, workload: Workload) -> list[Settings]:
    asked_slots = min(workload.in_flight(), settings.slots)
    asked_context = min(workload.request_tokens, settings.context_tokens)
    steps = [settings]
    slots, context = settings.slots, settings.context_tokens
    while slots > asked_slots:
        slots = max(slots // 2, asked_slots)
        steps.append(replaced(settings, slots=slots))
    while context > asked_context:
        context = max(context // 2, asked_context)
        steps.append(replaced(settings, slots=slots, context_tokens=context))
    while slots > 1:
        slots //= 2
        steps.append(replaced(settings, slots=slots, context_tokens=context))
    return steps
