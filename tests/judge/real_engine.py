"""Measure a real engine with chosen settings under real loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bedplate.facts.hardware import probe
from bedplate.measure.load import Target, measure_apart
from bedplate.measure.watch import Meters, Watcher, meters_of
from bedplate.progress import Silent
from bedplate.run.ready import Readied, fetch_facts, plan_engine, readied
from bedplate.run.starting import running
from bedplate.store import fingerprint
from bedplate.values import Workload, replaced
from bedplate.values.run import Cell, Load, Quality, Repeat, Subject
from bedplate.values.service import Wanted


def ready_engine(engine: str, workload: Workload, **settings: object) -> Readied:
    """Plans and installs an engine as `bench` does, with settings that a plan would not choose."""
    hardware = probe()
    facts = fetch_facts(None, hardware, Silent())
    chosen = plan_engine(Wanted(workload=workload, engine=engine, untuned=True), facts, hardware, Silent())
    return with_settings(readied(chosen, Silent(), to_measure=True), **settings)


def with_settings(ready: Readied, **settings: object) -> Readied:
    plan = replaced(ready.plan, settings=replaced(ready.plan.settings, **settings))
    return replace(ready, plan=plan)


def measure_cells(ready: Readied, loads: Iterable[Load], *, seconds: float = 3.0, repeats: int = 1) -> list[Cell]:
    cells = []
    with running(ready.start(), Silent()) as started:
        meters = meters_of(started)
        target = Target.of(started.url, key=started.key, model=ready.plan.model.served_name)
        subject = Subject(
            engine=ready.plan.engine, engine_version=ready.plan.engine_version, model=ready.plan.model.name,
            quantization=ready.plan.weights.label, device=ready.plan.settings.device, settings=ready.plan.settings,
        )  # fmt: skip
        for number, load in enumerate(loads):
            found = [_measure_repeat(target, load, meters, 100 * number + place, seconds) for place in range(repeats)]
            cells.append(_make_cell(ready, load, subject, found))
    return cells


def _make_cell(ready: Readied, load: Load, subject: Subject, repeats: Sequence[Repeat]) -> Cell:
    return Cell(
        id=f"{ready.plan.engine}-{load.concurrency}",
        run="real",
        at=repeats[0].at or "",
        machine=fingerprint(ready.decided.hardware),
        subject=subject,
        load=load,
        repeats=tuple(repeats),
        quality=Quality(note="not requested"),
    )


def _measure_repeat(target: Target, load: Load, meters: Meters, round: int, seconds: float) -> Repeat:
    with Watcher(meters) as watcher:
        found = measure_apart(
            target, load, seconds=seconds, warmup_s=1.0, least_requests=2 * (load.concurrency or 1) + 2,
            most_seconds=90.0, timeout_s=240.0, round=round, check=False, watch=watcher.mark,
        )  # fmt: skip
    use, series = watcher.seen()
    return replaced(found, use=use, engine=series)
