"""Measure a real engine with chosen settings under real loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bedplate.facts.hardware import probe
from bedplate.measure.load import LoadTarget, measure_apart
from bedplate.measure.watch import EngineMeters, Watcher, make_meters
from bedplate.progress import SilentProgress
from bedplate.run.ready import PreparedModel, fetch_facts, plan_engine, prepare_model
from bedplate.run.starting import run_engine
from bedplate.store import compute_fingerprint
from bedplate.values import Workload, replace_fields
from bedplate.values.run import Cell, Load, Quality, Repeat, Subject
from bedplate.values.service import ModelOrder


def ready_engine(engine: str, workload: Workload, **settings: object) -> PreparedModel:
    """Plans and installs an engine as `bench` does, with settings that a plan would not choose."""
    hardware = probe()
    facts = fetch_facts(None, hardware, SilentProgress())
    chosen = plan_engine(ModelOrder(workload=workload, engine=engine, untuned=True), facts, hardware, SilentProgress())
    return with_settings(prepare_model(chosen, SilentProgress(), to_measure=True), **settings)


def with_settings(ready: PreparedModel, **settings: object) -> PreparedModel:
    plan = replace_fields(ready.plan, settings=replace_fields(ready.plan.settings, **settings))
    return replace(ready, plan=plan)


def measure_cells(ready: PreparedModel, loads: Iterable[Load], *, seconds: float = 3.0, repeats: int = 1) -> list[Cell]:
    cells = []
    with run_engine(ready.build_start(), SilentProgress()) as started:
        meters = make_meters(started)
        target = LoadTarget.from_url(started.url, key=started.key, model=ready.plan.model.served_name)
        subject = Subject(
            engine=ready.plan.engine, engine_version=ready.plan.engine_version, model=ready.plan.model.name,
            quantization=ready.plan.weights.label, device=ready.plan.settings.device, settings=ready.plan.settings,
        )  # fmt: skip
        for number, load in enumerate(loads):
            found = [_measure_repeat(target, load, meters, 100 * number + place, seconds) for place in range(repeats)]
            cells.append(_make_cell(ready, load, subject, found))
    return cells


def _make_cell(ready: PreparedModel, load: Load, subject: Subject, repeats: Sequence[Repeat]) -> Cell:
    return Cell(
        id=f"{ready.plan.engine}-{load.concurrency}",
        run="real",
        at=repeats[0].at or "",
        machine=compute_fingerprint(ready.decided.hardware),
        subject=subject,
        load=load,
        repeats=tuple(repeats),
        quality=Quality(note="not requested"),
    )


def _measure_repeat(target: LoadTarget, load: Load, meters: EngineMeters, round: int, seconds: float) -> Repeat:
    with Watcher(meters) as watcher:
        found = measure_apart(
            target, load, seconds=seconds, warmup_s=1.0, least_requests=2 * (load.concurrency or 1) + 2,
            most_seconds=90.0, timeout_s=240.0, round=round, check=False, watch=watcher.mark,
        )  # fmt: skip
    use, series = watcher.summarize_readings()
    return replace_fields(found, use=use, engine=series)
