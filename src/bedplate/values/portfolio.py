"""Portfolio: a platform's answer; one standard engine for as many services as it serves well, and the exceptions."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Decision
from bedplate.values.record import Record


class Placement(Record, frozen=True, kw_only=True):
    """One service: where it runs, with what, and whether that is the platform's standard."""

    service: str
    pool: str | None
    """`None`: no pool holds it."""
    accelerators: int
    """Of the pool, what it takes; of a pool of CPUs, nodes."""
    exception: str | None = None
    """Why it is not on the standard engine; `None`: it is."""
    decision: Decision


class Portfolio(Record, frozen=True, kw_only=True):
    schema: Literal["portfolio/1"] = "portfolio/1"
    engine: str | None
    """The standard."""
    text: str
    """Why it is."""
    placements: tuple[Placement, ...]
    free: dict[str, int]
    """What each pool has left."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(placement.pool is not None for placement in self.placements)
