"""Find the bottleneck: divide the time of a request into parts, and predict the gain from removing the largest part.

The limits are those of the source article "cheat-sheet" (docs/rules.md): "memory bandwidth (the real limiter)", "KV
cache (explodes with long context)",
"interconnect (PCIe vs NVLink vs RDMA)", "scheduler quality (batching + engine design)" and "runtime overhead"; and
compute, for long prompts. "At batch 1, launch overhead, sampling, and memory bandwidth matter. At high concurrency,
scheduler quality and KV memory management dominate" (engines-compared).

A request waits in the queue, its prompt is prefilled, and then each step generates one token of it. Steps wait while
other prompts are prefilled. A step reads the weights once and the KV cache of each stream, and computes one token for
each stream, which costs about as much as one prompt token. The rest of a step is runtime overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bedplate.judge.advice import DiagnosedCell, advise_changes, predict_gains
from bedplate.judge.findings import collect_evidence, list_unknowns, write_sentence
from bedplate.judge.observed import break_down_cells, find_single_request, list_disturbances
from bedplate.judge.roofline import Roofline, build_roofline
from bedplate.judge.spending import attribute_time
from bedplate.values.diagnosis import Bottleneck, Diagnosis, Limit, SuggestedChange
from bedplate.values.run import Cell

__all__ = ["Roofline", "build_roofline", "diagnose", "diagnose_subject", "group_by_subject"]


def diagnose(groups: Iterable[tuple[Sequence[Cell], Roofline]]) -> Diagnosis:
    """Each group: the cells of one subject, and the limits of its model and machine."""
    measured = [(cells, roofline) for cells, roofline in groups if cells]
    cells = [cell for group, _ in measured for cell in group]
    return Diagnosis(
        machine=cells[0].machine if cells else "",
        runs=tuple(dict.fromkeys(cell.run for cell in cells)),
        bottlenecks=tuple(diagnose_subject(group, roofline) for group, roofline in measured),
    )


def group_by_subject(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups of cells of the same engine with the same settings, each sorted by load."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        one = cell.subject
        key = (cell.machine, one.engine, one.engine_version, one.model, one.quantization, one.build, one.url,
               one.parallelism, one.settings)  # fmt: skip
        found.setdefault(key, []).append(cell)
    return [sorted(group, key=lambda cell: (cell.load.concurrency or 0, cell.at)) for group in found.values()]


def _advise_idle_machine(cells: Sequence[Cell]) -> tuple[SuggestedChange, ...]:
    if not any(list_disturbances(cell) for cell in cells):
        return ()
    text = "run bedplate bench again while no other process uses the machine"
    return (SuggestedChange(kind="measure", text=text),)


def diagnose_subject(cells: Sequence[Cell], roofline: Roofline, named: Limit | None = None) -> Bottleneck:
    """The bottleneck of one subject; its cells have different loads.

    `named`: the bottleneck that was named a moment ago. It stays until another one is clear.
    """
    alone = find_single_request(cells)
    breakdowns = list(zip(cells, break_down_cells(cells, alone), strict=True))
    loads = tuple(attribute_time(cell, breakdown, roofline, named) for cell, breakdown in breakdowns)
    heaviest = max(
        (number for number, one in enumerate(loads) if one.limit is not None),
        key=lambda number: cells[number].load.concurrency or 0,
        default=None,
    )
    subject = cells[-1].subject
    attribution = loads[heaviest] if heaviest is not None else loads[-1]
    cell, breakdown = breakdowns[heaviest] if heaviest is not None else breakdowns[-1]
    diagnosed = DiagnosedCell(cell, breakdown, attribution, roofline, alone) if breakdown is not None else None
    return Bottleneck(
        engine=subject.engine,
        engine_version=subject.engine_version,
        model=subject.model,
        quantization=subject.quantization,
        limit=attribution.limit,
        text=write_sentence(attribution),
        loads=loads,
        evidence=tuple(collect_evidence(cell, breakdown, attribution, breakdowns, roofline))
        if breakdown is not None
        else (),
        predictions=tuple(predict_gains(diagnosed)) if diagnosed is not None else (),
        changes=tuple(advise_changes(diagnosed)) if diagnosed is not None else _advise_idle_machine(cells),
        unknown=tuple(list_unknowns(cell, breakdown, alone, roofline)),
    )
