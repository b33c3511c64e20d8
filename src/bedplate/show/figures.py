"""Measured figures as tables write them."""

from __future__ import annotations

from bedplate.values.summary import Percentiles

TBD = "TBD"


def figure(value: float | None) -> str:
    if value is None:
        return TBD
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def slowest(found: Percentiles | None) -> str:
    """Of fewer than a hundred requests nobody knows the slowest hundredth; it is no more than the slowest of all."""
    if found is None:
        return TBD
    return figure(found.p99) if found.p99 is not None else f"<{figure(found.max)}"
