"""Sentences made from a shortage of memory and its remedies."""

from __future__ import annotations

from collections.abc import Iterable

from bedplate.values import Remedy, Shortage
from bedplate.values.units import format_memory


def describe_shortage(shortage: Shortage, *, breakdown: bool = True) -> str:
    """How much memory is needed and how much is usable; `breakdown` adds weights, cache and overhead."""
    where = ""
    if shortage.device != "host":
        where = f" on each of {shortage.count} GPUs" if shortage.count > 1 else " on the GPU"
    usable = (
        f"{format_memory(shortage.usable_bytes)} is" if shortage.usable_bytes is not None else "an unknown amount is"
    )
    parts = (
        f" (weights {format_memory(shortage.weights_bytes)}, cache {format_memory(shortage.cache_bytes)}, "
        f"overhead {format_memory(shortage.overhead_bytes)})"
    )
    return (
        f"needs {format_memory(shortage.needed_bytes)}{where} in {shortage.weights_label}{parts if breakdown else ''}, "
        f"but only {usable} usable"
    )


def describe_remedy(remedy: Remedy) -> str:
    if remedy.kind == "quantization":
        return (
            f"a quantization of at most {remedy.most_bits_per_weight:.1f} bits per weight "
            f"(this one has {remedy.bits_per_weight:.1f})"
        )
    if remedy.kind == "memory":
        return f"{format_memory(remedy.memory_bytes or 0)} more free memory{' on the GPUs' if remedy.on_cards else ''}"
    return f"{remedy.cards} GPUs of this model"


def join_alternatives(texts: Iterable[str]) -> str | None:
    """One hint from several alternatives, any of which is sufficient; `None` if there are none."""
    return "; or ".join(texts) or None
