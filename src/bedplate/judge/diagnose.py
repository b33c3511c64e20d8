"""Which limit binds: where the time of a request goes, part by part, and what removing the largest part should bring.

The limits are those of the source article "cheat-sheet" (docs/rules.md): "memory bandwidth (the real limiter)", "KV
cache (explodes with long context)",
"interconnect (PCIe vs NVLink vs RDMA)", "scheduler quality (batching + engine design)" and "runtime overhead"; and
compute, for long prompts. "At batch 1, launch overhead, sampling, and memory bandwidth matter. At high concurrency,
scheduler quality and KV memory management dominate" (engines-compared).

A request waits for its turn, its prompt is computed, and then it gets a token with each step; steps wait while other
prompts are computed. A step reads the weights once and each stream's cache, and computes one token for each stream,
which costs about what a token of a prompt costs. What is left of a step after that is nobody's but the runtime's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bedplate.judge.advice import Patient, changes_for, predictions_for
from bedplate.judge.findings import evidence_of, text_of, unknowns
from bedplate.judge.ground import Ground, ground_for
from bedplate.judge.observed import alone_of, views_of
from bedplate.judge.spending import at_load
from bedplate.values.diagnosis import Bottleneck, Diagnosis
from bedplate.values.run import Cell

__all__ = ["Ground", "bottleneck", "by_subject", "diagnose", "ground_for"]


def diagnose(groups: Iterable[tuple[Sequence[Cell], Ground]]) -> Diagnosis:
    """The cells of each subject with what they are held against."""
    held = [(cells, ground) for cells, ground in groups if cells]
    cells = [cell for group, _ in held for cell in group]
    return Diagnosis(
        machine=cells[0].machine if cells else "",
        runs=tuple(dict.fromkeys(cell.run for cell in cells)),
        bottlenecks=tuple(bottleneck(group, ground) for group, ground in held),
    )


def by_subject(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells of the same engine in the same setting, by load."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        one = cell.subject
        key = (cell.machine, one.engine, one.engine_version, one.model, one.quantization, one.build, one.url,
               one.parallelism, one.settings)  # fmt: skip
        found.setdefault(key, []).append(cell)
    return [sorted(group, key=lambda cell: (cell.load.concurrency or 0, cell.at)) for group in found.values()]


def bottleneck(cells: Sequence[Cell], ground: Ground) -> Bottleneck:
    """What limits one subject; the cells are of different loads."""
    alone = alone_of(cells)
    views = list(zip(cells, views_of(cells, alone), strict=True))
    loads = tuple(at_load(cell, view, ground) for cell, view in views)
    heaviest = max(
        (number for number, one in enumerate(loads) if one.limit is not None),
        key=lambda number: cells[number].load.concurrency or 0,
        default=None,
    )
    subject = cells[-1].subject
    told = loads[heaviest] if heaviest is not None else loads[-1]
    cell, view = views[heaviest] if heaviest is not None else views[-1]
    patient = Patient(cell, view, told, ground) if view is not None else None
    return Bottleneck(
        engine=subject.engine,
        engine_version=subject.engine_version,
        model=subject.model,
        quantization=subject.quantization,
        limit=told.limit,
        text=text_of(told),
        loads=loads,
        evidence=tuple(evidence_of(cell, view, told, views, ground)) if view is not None else (),
        predictions=tuple(predictions_for(patient)) if patient is not None else (),
        changes=tuple(changes_for(patient)) if patient is not None else (),
        unknown=tuple(unknowns(cell, view, alone, ground)),
    )
