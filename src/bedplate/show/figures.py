"""Measured figures as tables write them."""

from __future__ import annotations

from bedplate.values import units
from bedplate.values.summary import Percentiles

TBD = "TBD"


def figure(value: float | None) -> str:
    return TBD if value is None else units.figure(value)


def slowest(found: Percentiles | None) -> str:
    """Of fewer than a hundred requests nobody knows the slowest hundredth; it is no more than the slowest of all."""
    if found is None:
        return TBD
    return figure(found.p99) if found.p99 is not None else f"<{figure(found.max)}"
