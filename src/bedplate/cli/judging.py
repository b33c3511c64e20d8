"""Collects what `judge` needs to know about this machine and about models; `judge` itself reads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bedplate.values import Hardware, Model
    from bedplate.values.diagnosis import Diagnosis
    from bedplate.values.run import Cell, RunEnvironment


def diagnose_cells(
    cells: Iterable[Cell],
    environments: Mapping[str, RunEnvironment],
    hardware: Hardware | None = None,
    models: Sequence[Model] = (),
    every_model: Model | None = None,
) -> Diagnosis:
    """`hardware` is this machine, used for the cells that were measured on it. `models` are those that the runs name.

    `every_model` replaces the model of every run.
    """
    from bedplate.judge.diagnose import build_roofline, diagnose, group_by_subject
    from bedplate.store import compute_fingerprint

    own = compute_fingerprint(hardware) if hardware is not None else None
    groups = []
    for group in group_by_subject(cells):
        last = group[-1]
        here = hardware if last.machine == own else None
        model = every_model or find_named_model(last.subject.model, models)
        ground = build_roofline(last.subject, model, here, environments.get(last.run))
        groups.append((group, ground))
    return diagnose(groups)


def list_bottlenecks(diagnosis: Diagnosis) -> dict[str, str]:
    """The bottleneck of each cell, by the id of the cell, for a table."""
    return {load.cell: load.limit for one in diagnosis.bottlenecks for load in one.loads if load.limit is not None}


def find_named_model(name: str, models: Sequence[Model] = ()) -> Model | None:
    """The model as a run describes it, else as it is known without network access."""
    from bedplate.errors import BedplateError
    from bedplate.run.models import find_known_model

    if (one := next((model for model in models if model.name == name), None)) is not None:
        return one
    try:
        return find_known_model(name)
    except BedplateError:
        return None
