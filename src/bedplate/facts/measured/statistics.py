"""From repeated timings to one figure with its band."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bedplate.values import Figure


def measured(rates: Sequence[float], source: str) -> Figure:
    """The median of repeats; the band is from the slowest to the fastest of them."""
    return Figure(
        value=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        basis="measured",
        source=f"{source}, {len(rates)} repeats",
    )


def rates(moved_bytes: float, durations_s: Sequence[float]) -> list[float]:
    """A clock that did not move says nothing, so such repeats are left out."""
    return [moved_bytes / duration for duration in durations_s if duration > 0]


def windows(ends: Sequence[tuple[float, int]], began: float, count: int) -> list[float]:
    """Rates over `count` stretches of time, from when each block was done and how many bytes it had.

    Blocks that several readers finish overlap, so a block's own duration is not what it cost.
    """
    done = sorted(ends)
    step = max(1, len(done) // max(1, count))
    found = []
    for first in range(0, len(done) - step + 1, step):
        stretch = done[first : first + step]
        took_s = stretch[-1][0] - began
        began = stretch[-1][0]
        found += rates(sum(size for _, size in stretch), [took_s])
    return found
