"""The goodput knee: the highest load that still meets a latency target, bracketed and then halved. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bedplate.measure.summary import all_samples, is_valid, meets
from bedplate.values.record import Record
from bedplate.values.run import Cell
from bedplate.values.workload import LatencyTarget

MET = 0.95
"""The share of requests that must meet the target."""
NEAR = 1.1
"""Loads that differ by less are the same for anybody who plans with them."""


class Knee(Record, frozen=True, kw_only=True):
    """Between which loads a target ceases to be met."""

    holds: Cell | None = None
    """The highest load that meets it; `None`: not even the lowest that was tried."""
    breaks: Cell | None = None
    """The next one that was tried and does not."""


def met_share(cell: Cell, target: LatencyTarget) -> float | None:
    """Of its requests, those that ended well and in time; `None` of a cell that says nothing."""
    samples = all_samples(cell)
    if not samples or not is_valid(cell):
        return None
    return sum(meets(sample, target) for sample in samples) / len(samples)


def knee(cells: Iterable[Cell], target: LatencyTarget) -> Knee:
    """Of the cells of one subject. What fails at a load is not believed at a higher one, whatever luck it had there."""
    judged = sorted(
        ((cell.load.concurrency, cell, share) for cell in cells
         if cell.load.concurrency is not None and (share := met_share(cell, target)) is not None),
        key=lambda one: one[0],
    )  # fmt: skip
    holds = None
    for _, cell, share in judged:
        if share < MET:
            return Knee(holds=holds, breaks=cell)
        holds = cell
    return Knee(holds=holds)


def next_concurrency(cells: Iterable[Cell], target: LatencyTarget, most: int) -> int | None:
    """The load that tells most about where the knee is; `None` where it is known well enough."""
    found = knee(cells, target)
    low = found.holds.load.concurrency if found.holds is not None else None
    high = found.breaks.load.concurrency if found.breaks is not None else None
    if high is None:
        return min(most, 2 * low) if low is not None and low < most else None
    if low is None:
        return max(1, high // 2) if high > 1 else None
    if high - low <= 1 or high / low <= NEAR:
        return None
    return (low + high) // 2
