"""Portfolio: a platform plan, with one standard engine for as many services as possible, and the exceptions."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Decision
from bedplate.values.record import Record


class Placement(Record, frozen=True, kw_only=True):
    """One service: its pool, its engine, and whether that is the platform's standard engine."""

    service: str
    pool: str | None
    """`None`: no pool can hold it."""
    accelerators: int
    """Accelerators that it uses; in a pool of CPUs, nodes."""
    exception: str | None = None
    """Why it does not use the standard engine; `None`: it does."""
    decision: Decision


class Portfolio(Record, frozen=True, kw_only=True):
    schema: Literal["portfolio/1"] = "portfolio/1"
    engine: str | None
    """The standard engine."""
    text: str
    """Why it is the standard."""
    placements: tuple[Placement, ...]
    free: dict[str, int]
    """Free accelerators or nodes of each pool."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(placement.pool is not None for placement in self.placements)
