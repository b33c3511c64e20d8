"""The goodput knee: the highest load that meets a latency target, found by bisection. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bedplate.measure.summary import is_valid, list_samples, meets
from bedplate.values.record import Record, replace_fields
from bedplate.values.run import Cell, Load
from bedplate.values.workload import LatencyTarget

MET = 0.95
"""The share of requests that must meet the target."""
NEAR = 1.1
"""The search ends when the loads above and below the knee differ by at most this factor."""
MOST_IN_FLIGHT = 1024
LEAST_PER_S, MOST_PER_S = 0.01, 1000.0


class Knee(Record, frozen=True, kw_only=True):
    """The two measured loads around the knee."""

    holds: Cell | None = None
    """The highest load that meets the target; `None`: no measured load does."""
    breaks: Cell | None = None
    """The lowest load that does not meet the target."""


def compute_met_share(cell: Cell, target: LatencyTarget) -> float | None:
    """The share of requests that met the target; `None` for an invalid cell."""
    samples = list_samples(cell)
    if not samples or not is_valid(cell):
        return None
    return sum(meets(sample, target) for sample in samples) / len(samples)


def get_level(load: Load) -> float | None:
    """The size of a load: requests in flight or sessions for a closed loop, requests per second for an open one."""
    if load.arrivals == "sessions":
        return load.sessions
    return load.concurrency if load.arrivals == "closed" else load.requests_per_s


def find_knee(cells: Iterable[Cell], target: LatencyTarget) -> Knee:
    """The knee of the cells of one subject. Loads above the first one that fails do not count, even if they pass."""
    by_level = sorted(
        ((size, cell, share) for cell in cells
         if (size := get_level(cell.load)) is not None and (share := compute_met_share(cell, target)) is not None),
        key=lambda one: one[0],
    )  # fmt: skip
    holds = None
    for _, cell, share in by_level:
        if share < MET:
            return Knee(holds=holds, breaks=cell)
        holds = cell
    return Knee(holds=holds)


def choose_next_load(cells: Sequence[Cell], target: LatencyTarget) -> Load | None:
    """The next load of the bisection; `None` if the knee is known precisely enough."""
    found = find_knee(cells, target)
    near = found.holds or found.breaks
    if near is None:
        return None
    low = get_level(found.holds.load) if found.holds is not None else None
    high = get_level(found.breaks.load) if found.breaks is not None else None
    if near.load.arrivals in ("closed", "sessions"):
        flight = _choose_next_concurrency(None if low is None else int(low), None if high is None else int(high))
        name = "concurrency" if near.load.arrivals == "closed" else "sessions"
        return None if flight is None else replace_fields(near.load, **{name: flight})
    rate = _choose_next_rate(low, high)
    return None if rate is None else replace_fields(near.load, requests_per_s=rate)


def _choose_next_concurrency(low: int | None, high: int | None) -> int | None:
    if high is None:
        return min(MOST_IN_FLIGHT, 2 * low) if low is not None and low < MOST_IN_FLIGHT else None
    if low is None:
        return max(1, high // 2) if high > 1 else None
    return None if high - low <= 1 or high / low <= NEAR else (low + high) // 2


def _choose_next_rate(low: float | None, high: float | None) -> float | None:
    if high is None:
        return 2 * low if low is not None and low < MOST_PER_S else None
    if low is None:
        return high / 2 if high > LEAST_PER_S else None
    return None if high / low <= NEAR else (low + high) / 2
