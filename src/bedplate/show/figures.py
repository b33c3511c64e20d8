"""Measured figures as table cells."""

from __future__ import annotations

from bedplate.values import units
from bedplate.values.summary import Percentiles

TBD = "TBD"
"""An empty cell of the benchmark matrix."""
NOT_MEASURED = "not measured"
"""An unknown figure anywhere else."""


def format_figure_or_missing(value: float | None, missing: str = TBD) -> str:
    return missing if value is None else units.format_figure(value)


def format_slowest(found: Percentiles | None) -> str:
    """The 99th percentile; with fewer than 100 requests its upper bound, the maximum."""
    if found is None:
        return TBD
    return format_figure_or_missing(found.p99) if found.p99 is not None else f"<{format_figure_or_missing(found.max)}"
