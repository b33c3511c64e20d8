"""Stored runs and tunings as `bedplate runs` shows them: whether they are clean, and which plans they change."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Device
from bedplate.values.record import Record
from bedplate.values.run import Exclusion, Flag, Load

RunKind = Literal["bench", "shadow", "tune", "import"]


class PlanEffect(Record, frozen=True, kw_only=True):
    """How a run changes plans on this machine."""

    kind: Literal["estimates", "engine", "settings"]
    engine: str
    device: Device | None = None
    factor: float | None = None
    """Estimates: the factor that they are scaled by, with all runs."""
    factor_without: float | None = None
    """The same without this run; 1 if no other run measured this engine on this device."""
    text: str


class StoredRun(Record, frozen=True, kw_only=True):
    id: str
    at: str
    kind: RunKind
    is_local: bool
    """Whether it was measured on this machine. Runs of other machines never change plans here."""
    engines: tuple[str, ...]
    """As ENGINE@VERSION."""
    models: tuple[str, ...]
    cells: int
    """Of a tuning: the compared settings."""
    clean: int
    """How many of the cells are evidence."""
    exclusions: tuple[Exclusion, ...] = ()
    """Why the other cells are not."""
    effects: tuple[PlanEffect, ...] = ()
    finished: bool = True


class RunList(Record, frozen=True, kw_only=True):
    schema: Literal["runs/1"] = "runs/1"
    runs: tuple[StoredRun, ...]
    """Newest first."""


class StoredCell(Record, frozen=True, kw_only=True):
    id: str
    engine: str
    engine_version: str | None = None
    load: Load
    output_tok_s: float | None = None
    flags: tuple[Flag, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    """Why it does not change plans; empty: it is clean."""


class RunDetails(Record, frozen=True, kw_only=True):
    schema: Literal["run-details/1"] = "run-details/1"
    run: StoredRun
    cells: tuple[StoredCell, ...] = ()


class DiscardedRun(Record, frozen=True, kw_only=True):
    schema: Literal["discarded-run/1"] = "discarded-run/1"
    run: StoredRun
    """As it was before."""
    cells: int
    results: int
    verdicts: int
    """How many records of each kind were removed with it."""
