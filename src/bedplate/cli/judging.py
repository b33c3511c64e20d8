"""What judging needs of this machine and of models: gathered here, since judging itself is pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bedplate.values import Hardware, Model
    from bedplate.values.diagnosis import Diagnosis
    from bedplate.values.run import Cell, Environment


def diagnosis_of(
    cells: Iterable[Cell],
    environments: Mapping[str, Environment],
    hardware: Hardware | None = None,
    models: Sequence[Model] = (),
    every_model: Model | None = None,
) -> Diagnosis:
    """`hardware`: this machine; it counts for those cells that were measured on it. `models`: that the runs speak of.

    `every_model`: what somebody says that it was, whatever the runs call it.
    """
    from bedplate.judge.diagnose import by_subject, diagnose, ground_for
    from bedplate.store import fingerprint

    own = fingerprint(hardware) if hardware is not None else None
    groups = []
    for group in by_subject(cells):
        last = group[-1]
        here = hardware if last.machine == own else None
        model = every_model or model_named(last.subject.model, models)
        ground = ground_for(last.subject, model, here, environments.get(last.run))
        groups.append((group, ground))
    return diagnose(groups)


def limits_of(diagnosis: Diagnosis) -> dict[str, str]:
    """For a table: what binds in each cell, by its id."""
    return {load.cell: load.limit for one in diagnosis.bottlenecks for load in one.loads if load.limit is not None}


def model_named(name: str, told: Sequence[Model] = ()) -> Model | None:
    """Its facts: as a run told them, else where they are known without asking anybody elsewhere."""
    from bedplate.errors import BedplateError
    from bedplate.run.models import known_model

    if (one := next((model for model in told if model.name == name), None)) is not None:
        return one
    try:
        return known_model(name)
    except BedplateError:
        return None
