"""Turn repeated timings into one figure with a range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bedplate.values import Figure


def make_figure(rates: Sequence[float], source: str) -> Figure:
    """The median of the repeats, with the slowest and the fastest as range."""
    return Figure(
        value=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        basis="measured",
        source=f"{source}, {len(rates)} repeats",
    )


def compute_rates(moved_bytes: float, durations_s: Sequence[float]) -> list[float]:
    """Bytes per second of each repeat. Repeats with a duration of zero are left out."""
    return [moved_bytes / duration for duration in durations_s if duration > 0]


def compute_window_rates(ends: Sequence[tuple[float, int]], began: float, count: int) -> list[float]:
    """Rates over `count` time windows, from the end time and size of each block.

    Blocks of several readers overlap, so the duration of one block does not give a rate.
    """
    done = sorted(ends)
    step = max(1, len(done) // max(1, count))
    found = []
    for first in range(0, len(done) - step + 1, step):
        stretch = done[first : first + step]
        took_s = stretch[-1][0] - began
        began = stretch[-1][0]
        found += compute_rates(sum(size for _, size in stretch), [took_s])
    return found
