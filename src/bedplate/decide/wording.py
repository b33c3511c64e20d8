"""Sentences made from a shortage of memory and its remedies."""

from __future__ import annotations

from collections.abc import Iterable

from bedplate.values import Remedy, Shortage
from bedplate.values.units import memory


def describe_shortage(shortage: Shortage, *, breakdown: bool = True) -> str:
    """How much memory is needed and how much there is; `breakdown`: what the need consists of."""
    where = ""
    if shortage.device != "host":
        where = f" on each of {shortage.count} cards" if shortage.count > 1 else " on the card"
    free = memory(shortage.usable_bytes) if shortage.usable_bytes is not None else "an unknown part"
    parts = (
        f" (weights {memory(shortage.weights_bytes)}, cache {memory(shortage.cache_bytes)}, "
        f"its own {memory(shortage.overhead_bytes)})"
    )
    return (
        f"needs {memory(shortage.needed_bytes)}{where} in {shortage.weights_label}{parts if breakdown else ''}, "
        f"and may take {free}"
    )


def describe_remedy(remedy: Remedy) -> str:
    if remedy.kind == "quantization":
        return (
            f"a quantization of at most {remedy.most_bits_per_weight:.1f} bits per weight "
            f"(this one has {remedy.bits_per_weight:.1f})"
        )
    if remedy.kind == "memory":
        return f"{memory(remedy.memory_bytes or 0)} more free memory{' on the cards' if remedy.on_cards else ''}"
    return f"{remedy.cards} cards like these"


def join_alternatives(texts: Iterable[str]) -> str | None:
    """The hint that names any of these as sufficient; `None` without one."""
    return "; or ".join(texts) or None
