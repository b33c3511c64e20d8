"""Which measurements count as evidence for estimates, plans and `models`, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bedplate.values.agreement import Agreement
from bedplate.values.result import Result
from bedplate.values.run import Cell, Exclusion, FlagKind
from bedplate.values.tuning import TuningRun
from bedplate.values.verdict import Verdict

NO_SAMPLES = "the file has no samples of single requests"
ABOUT_OTHERS: tuple[FlagKind, ...] = ("mixed",)
"""Flags that describe the other engines of the run. The measurement itself is as good as without them."""


class StoredEvidence(NamedTuple):
    """The measurements of one machine that may change a plan, newest first. All of them can be discarded."""

    results: tuple[Result, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    tunings: tuple[TuningRun, ...] = ()


def find_exclusions(cell: Cell) -> tuple[Exclusion, ...]:
    """Why a cell is not evidence. Empty: it is clean, and may change estimates and plans.

    Every flag excludes a cell, also one that leaves it valid for a comparison: both sides of a comparison share the
    disturbance, and an estimate does not.
    """
    return tuple(dict.fromkeys(_list_exclusions(cell)))


def _list_exclusions(cell: Cell) -> Iterator[Exclusion]:
    kinds = {flag.kind for flag in cell.flags}
    yield from (Exclusion(kind=flag.kind, text=flag.text) for flag in cell.flags if flag.kind not in ABOUT_OTHERS)
    # Cells from files may lack the flags that `bench` computes.
    if "client" not in kinds and any(repeat.client.limit for repeat in cell.repeats):
        yield Exclusion(kind="client", text="the client was the bottleneck")
    has_answers = any(sample.outcome == "ok" for repeat in cell.repeats for sample in repeat.samples)
    if not has_answers and "gaps" not in kinds:
        yield Exclusion(kind="short", text=NO_SAMPLES if cell.stated is not None else "no request succeeded")
    if "broken" not in kinds and cell.quality is not None and cell.quality.verdict == "broken":
        yield Exclusion(kind="broken", text="its answers disagree with the reference")
