"""Measure a matrix of engines and loads: repeat each cell until its confidence interval is narrow, and store it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from bedplate import store
from bedplate._version import __version__
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.roles import FIRST
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.facts.scenarios import compute_means, fit_context
from bedplate.measure import quality as quality_of
from bedplate.measure import structured as structured_output
from bedplate.measure.bench_budget import LEAST_WINDOW_S, WARMUP_S, RepeatTimes, WallBudget, estimate_need
from bedplate.measure.flags import flag_cell
from bedplate.measure.gpu_reservation import (
    WAIT_S,
    GpuPolicy,
    GpuReservation,
    assume_free,
    find_endpoint_gpus,
    list_planned_gpus,
    reserve_gpus,
)
from bedplate.measure.knee import choose_next_load
from bedplate.measure.load import (
    ClientErrorFigures,
    LoadTarget,
    PreparedEndpoint,
    RepeatRule,
    compute_delivered_tok_s,
    measure_apart,
    prepare,
)
from bedplate.measure.load import run as run_loop
from bedplate.measure.load.preparing import find_context
from bedplate.measure.load.repeating import find_halt_reason
from bedplate.measure.load.trace_sessions import has_sessions
from bedplate.measure.moments import format_now, make_run_id
from bedplate.measure.references import provide_affordable_reference
from bedplate.measure.summary import list_durations, list_samples, make_result
from bedplate.measure.watch import EngineMeters, Watcher, find_listening_pid, make_meters, measure_idle_share
from bedplate.progress import Progress, SilentProgress
from bedplate.run.prepare import hash_model_content
from bedplate.run.ready import (
    ModelDecision,
    PreparedModel,
    fetch_facts,
    list_installable_engines,
    list_installed_engines,
    plan_engine,
    prepare_model,
)
from bedplate.run.starting import RunningEngine, run_engine
from bedplate.store import compute_fingerprint
from bedplate.values import Hardware, Model, Refusal, Workload, replace_fields
from bedplate.values.capabilities import Capabilities
from bedplate.values.cost import Price
from bedplate.values.run import (
    BenchMatrix,
    Cell,
    GateSide,
    Load,
    MeasuredEndpoint,
    Quality,
    Repeat,
    Role,
    Run,
    RunEnvironment,
    Subject,
)
from bedplate.values.service import Build, ModelOrder
from bedplate.values.structured import StructuredOutput
from bedplate.values.units import format_memory, format_seconds
from bedplate.values.workload import LatencyTarget, RequestShape

CONCURRENCIES = (1, 4, 8, 16)
HALF_WIDTH = 0.05
ENGINE_BUDGET_S = 240.0
"""Default measuring time for each engine."""
LEAST_REPEATS = 3
USUAL_TURNS = 2
CONTEXT_SPARE = 128
"""Tokens for the chat template."""
LEAST_CONTEXT = 1024
ROUNDS_PER_LOAD = 1000
"""Prompts are numbered by round; each load has this many round numbers."""
REQUEST_LIMIT_S = 300.0
UNKNOWN_GROWTH = 4
"""A request under load is assumed to take at most this multiple of its time alone, before a load was measured."""
MOST_EXTENSION = 6.0
"""Largest ratio of a measurement window to the requested time, if too few requests have ended."""


class BenchListener:
    """Receives the events of a run, to show them. A subclass overrides what it needs."""

    def report_start(self, run: Run, subjects: Sequence[Subject], idle: float) -> None: ...

    def report_refusal(self, refusal: Refusal) -> None: ...

    def report_engine_start(self, engine: str) -> None: ...

    def report_quality(self, subject: Subject, quality: Quality) -> None: ...

    def report_structured(self, subject: Subject, found: StructuredOutput) -> None: ...

    def report_phase(self, cell: Cell, moment: str) -> None: ...

    def report_cell(self, cell: Cell) -> None: ...


@dataclass
class EndpointSubject:
    """An endpoint elsewhere that is measured in the same rounds as engines."""

    subject: Subject
    target: LoadTarget
    prepared: PreparedEndpoint
    meters: EngineMeters


@dataclass
class BenchRun:
    """A run in progress."""

    run: Run
    hardware: Hardware
    progress: Progress
    teller: BenchListener
    path: Path | None = None
    facts: Model | None = None
    shapes: tuple[RequestShape, ...] = ()
    subjects: list[ModelDecision] = field(default_factory=list)
    endpoints: list[EndpointSubject] = field(default_factory=list)
    quantizations: list[tuple[str, str | None]] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)
    qualities: dict[str, Quality] = field(default_factory=dict)
    structured: dict[str, StructuredOutput] = field(default_factory=dict)
    own: dict[int, ClientErrorFigures] = field(default_factory=dict)
    spent_s: float = 0.0
    wall: WallBudget = field(default_factory=lambda: WallBudget(None))
    gpu_policy: GpuPolicy = field(default_factory=lambda: GpuPolicy("bench"))
    reservation: GpuReservation | None = None

    @property
    def matrix(self) -> BenchMatrix:
        if self.run.matrix is None:
            raise UsageError(f"run {self.run.id} was imported from a file and cannot be resumed")
        return self.run.matrix

    @property
    def subject_count(self) -> int:
        return max(1, len(self.subjects) + len(self.endpoints))

    def keep_run(self, **changes: Any) -> None:
        self.run = replace_fields(self.run, **changes)
        store.add_run(self.run, self.path)

    def keep(self, cell: Cell) -> Cell:
        """Stores the cell with updated flags."""
        cell = replace_fields(cell, flags=flag_cell(cell, self.quantizations))
        self.cells[cell.id] = cell
        store.add_cell(cell, self.path)
        return cell

    def leave_out(self, label: str, why: str, hint: str | None = None) -> None:
        refusal = Refusal(engine=label, kind="impossible", why=why, hint=hint)
        self.keep_run(left_out=(*self.run.left_out, refusal))
        self.teller.report_refusal(refusal)

    def assemble_run(self) -> Run:
        return replace_fields(self.run, cells=tuple(self.cells.values()))


def bench(
    model: str | None = None,
    *,
    engines: Sequence[str] | str = "installed",
    endpoints: Sequence[MeasuredEndpoint] = (),
    loads: Sequence[Load] | None = None,
    url: str | None = None,
    key_env: str | None = None,
    served_model: str | None = None,
    seconds: float = 10.0,
    repeats: int = 5,
    turns: int | None = None,
    budget_s: float | None = None,
    target: LatencyTarget | None = None,
    price: Price | None = None,
    trace: Path | None = None,
    through_gateway: bool = False,
    check_quality: bool = True,
    check_structured: bool = False,
    native: bool = False,
    sides: Sequence[GateSide] = (),
    resume: str | None = None,
    wait_for_gpu_s: float = WAIT_S,
    allow_busy_gpu: bool = False,
    progress: Progress | None = None,
    teller: BenchListener | None = None,
    command: Sequence[str] = (),
    path: Path | None = None,
) -> Run:
    """Measures each engine under each load, stores the cells, and returns the run.

    `engines`: ids, or "installed", or "all" for all installable engines. `endpoints` are measured in the same
    rounds. With `url` an endpoint is measured instead.
    `sides`: those of a gate, instead of `engines`.
    `turns`: interleaved rounds; the default is two for several engines and one for a single engine.
    `check_structured`: also ask for structured output, which takes minutes on a CPU.
    `budget_s` limits the whole run, with starts and checks; the default limits only the measurements of each engine.
    Ctrl-C stops the run and keeps the measured cells; `resume` continues a stopped run.
    `wait_for_gpu_s`: how long to wait for a GPU that another process uses; then an error is raised. With
    `allow_busy_gpu` it is measured anyway, and flagged.
    """
    wall = WallBudget(budget_s)
    progress, teller = progress or SilentProgress(), teller or BenchListener()
    hardware = probe()
    policy = GpuPolicy("bench", wait_for_gpu_s, allow_busy_gpu)
    if resume is not None:
        found = store.find_run(resume or None, path)
        if found.finished:
            return found
        one = _resume_run(found, hardware, progress, teller, path)
        one.gpu_policy = policy
        return _measure_run(one)
    if os.name != "posix" and url is None and engines:
        raise ExternalFailure(
            "engines can be started only on Linux and macOS", hint="on Windows use WSL, or pass --url"
        )
    requested = tuple(loads) if loads is not None else make_closed_loads()
    if sides:
        engines = tuple(side.engine for side in sides)
    if url is None and isinstance(engines, str):
        engines = _resolve_engines(engines, hardware)
    for engine_id in engines if url is None else ():
        engine_by_id(engine_id)  # report an unknown engine before downloading anything
    for endpoint in endpoints:
        _make_target(endpoint)  # and a missing key
    matrix = BenchMatrix(
        model=model,
        engines=() if url is not None else tuple(engines),
        endpoints=tuple(endpoints),
        loads=requested,
        url=url,
        key_env=key_env,
        served_model=served_model,
        trace_path=None if trace is None else str(trace.absolute()),
        seconds=seconds,
        repeats=repeats,
        turns=turns or _choose_turns(1 if url is not None else len(engines) + len(endpoints), repeats),
        budget_s=budget_s or ENGINE_BUDGET_S * max(1, len(engines) + len(endpoints) if url is None else 1),
        target=target,
        through_gateway=through_gateway,
        check_quality=check_quality,
        check_structured=check_structured,
        native=native,
        sides=tuple(sides),
    )
    environment = replace_fields(
        describe_environment(hardware, command), price=price if price is not None and price.is_given else None
    )
    run = Run(id=make_run_id(), at=format_now(), environment=environment, matrix=matrix)
    one = BenchRun(run, hardware, progress, teller, path, wall=wall, gpu_policy=policy)
    one.shapes = _read_trace_shapes(matrix)
    return _measure_run(one)


def _choose_turns(subjects: int, repeats: int) -> int:
    """Several engines are measured in interleaved rounds, A B B A, so that drift affects all of them equally."""
    return min(USUAL_TURNS, repeats) if subjects > 1 else 1


def make_closed_loads(
    concurrencies: Sequence[int] = CONCURRENCIES,
    *,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    shared_prefix_tokens: int = 0,
    seed: int = 0,
) -> tuple[Load, ...]:
    return tuple(
        Load(
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix_tokens,
            seed=seed,
        )
        for concurrency in concurrencies
    )


def _resolve_engines(engines: str, hardware: Hardware) -> tuple[str, ...]:
    """`installed`: the installed engines, or the one that `serve` would install if there is none."""
    if engines == "all":
        return list_installable_engines()
    return list_installed_engines(hardware) or (FIRST.id,)


def _resume_run(run: Run, hardware: Hardware, progress: Progress, teller: BenchListener, path: Path | None) -> BenchRun:
    if run.matrix is None:
        raise UsageError(f"run {run.id} was imported from {run.source or 'a file'} and cannot be resumed")
    if run.environment.machine != compute_fingerprint(hardware):
        raise UsageError(
            f"run {run.id} was started on another machine", hint="a run can be resumed only on the same machine"
        )
    one = BenchRun(replace_fields(run, cells=()), hardware, progress, teller, path)
    one.cells = {cell.id: cell for cell in run.cells}
    one.qualities = {
        label_subject(run.matrix, cell.subject): cell.quality
        for cell in run.cells
        if cell.quality is not None and cell.quality.verdict != "unchecked"
    }
    one.structured = {
        label_subject(run.matrix, cell.subject): cell.quality.structured
        for cell in run.cells
        if cell.quality is not None and cell.quality.structured is not None
    }
    one.shapes = _read_trace_shapes(run.matrix)
    return one


def _read_trace_shapes(matrix: BenchMatrix) -> tuple[RequestShape, ...]:
    if matrix.trace_path is None:
        return ()
    from bedplate.measure.replays import read_shapes

    replayed = any(load.arrivals == "replay" for load in matrix.loads)
    return read_shapes(Path(matrix.trace_path), matrix.seconds if replayed else None)


# the run


def _measure_run(one: BenchRun) -> Run:
    """Measures all missing cells. Stored cells are kept, also if the run fails or is stopped."""
    with handle_sigterm():
        try:
            if one.matrix.url is not None:
                _measure_endpoint(one)
            else:
                _measure_engines(one)
            one.keep_run(finished=True)
        except KeyboardInterrupt:
            one.keep_run()
            raise BenchStopped(one.assemble_run()) from None
    return one.assemble_run()


class BenchStopped(KeyboardInterrupt):
    """The run was stopped by a signal; `run` has the cells measured so far."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"stopped; continue with: bedplate bench --resume {run.id}")
        self.run = run


@contextlib.contextmanager
def handle_sigterm() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C: stops the engines and keeps the measured cells."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure_engines(one: BenchRun) -> None:
    """Measures engines that it starts, once no other process uses their GPU."""
    if one.matrix.engines or one.matrix.model is not None:
        one.facts = fetch_facts(one.matrix.model, one.hardware, one.progress)
        _fit_scenarios(one, one.facts.max_context)
    with reserve_gpus(_list_wanted_gpus(one), one.gpu_policy, one.progress) as one.reservation:
        if one.reservation is not None and one.reservation.waited:
            one.hardware = probe()  # memory on the GPU has been freed
        _measure_planned_engines(one, one.facts)


def _fit_scenarios(one: BenchRun, max_context: int | None) -> None:
    """Limits the sessions of scenarios to the model's context."""
    fitted = []
    for load in one.matrix.loads:
        if load.scenario is None or max_context is None or load.scenario.context_tokens <= max_context:
            fitted.append(load)
            continue
        scenario = fit_context(load.scenario, max_context)
        means = compute_means(scenario)
        if means.turns < compute_means(load.scenario).turns:
            one.progress.note(
                f"the model's context of {max_context:,} tokens shortens the sessions of the scenario {scenario.name} "
                f"to {means.turns:.1f} turns on average, with prompts of {means.prompt_tokens:,.0f} tokens"
            )
        lengths = {"prompt_tokens": round(means.prompt_tokens), "output_tokens": max(1, round(means.output_tokens))}
        fitted.append(replace_fields(load, scenario=scenario, **lengths))
    if tuple(fitted) != one.matrix.loads:
        one.keep_run(matrix=replace_fields(one.matrix, loads=tuple(fitted)))


def _list_wanted_gpus(one: BenchRun) -> tuple[str, ...]:
    """The GPUs that the engines would use if no other process used them."""
    if not one.hardware.has_vendor("nvidia"):
        return ()
    free, found = assume_free(one.hardware), []
    for engine_id in one.matrix.engines:
        with contextlib.suppress(NotPossible):
            found.append(_plan_subject(one, engine_id, free))
    return list_planned_gpus(found)


def _measure_planned_engines(one: BenchRun, facts: Model | None) -> None:
    matrix = one.matrix
    refused: list[Refusal] = []
    sides = matrix.sides or (None,) * len(matrix.engines)
    for engine_id, side in zip(matrix.engines, sides, strict=True):
        try:
            one.subjects.append(_assign_side(_plan_subject(one, engine_id), side))
        except NotPossible as error:
            if side is not None:
                raise  # one side alone is worth nothing
            refused.append(Refusal(engine=engine_id, kind="impossible", why=error.summary, hint=error.hint))
    refused += _find_endpoints(one)
    if not one.subjects and not one.endpoints:
        first = refused[0]
        asked = ", ".join([*matrix.engines, *(_make_target(endpoint).name for endpoint in matrix.endpoints)])
        raise NotPossible(
            f"none of {asked} can run {facts.name if facts is not None else 'the model'}",
            cause=f"{first.engine}: {first.why}",
            hint=first.hint,
        )
    one.quantizations = [(subject.engine.id, subject.decision.quantization) for subject in one.subjects]
    one.keep_run(left_out=tuple(refused), models=() if facts is None else _strip_model(facts))
    _compare_need_with_budget(one)
    named = [*(_make_subject(one, subject) for subject in one.subjects), *(each.subject for each in one.endpoints)]
    one.teller.report_start(one.assemble_run(), named, measure_idle_share())
    for refusal in refused:
        one.teller.report_refusal(refusal)
    if facts is not None:
        _provide_reference(one, facts)
    _measure_rounds(one)
    _end_cells(one)
    if not one.cells and one.run.left_out:
        first = one.run.left_out[-1]
        raise ExternalFailure("nothing could be measured", cause=f"{first.engine}: {first.why}", hint=first.hint)


def _measure_rounds(one: BenchRun) -> None:
    matrix, ended = one.matrix, set[str]()
    subjects: list[ModelDecision | EndpointSubject] = [*one.subjects, *one.endpoints]
    for turn in range(matrix.turns):
        # Reverse the order in every second round, so that drift affects all engines equally.
        for subject in subjects if turn % 2 == 0 else subjects[::-1]:
            label = _label(one, subject)
            if label in ended or not _needs_measuring(one, label, turn):
                continue
            start_s = 0.0 if isinstance(subject, EndpointSubject) else _estimate_start_s(one, subject)
            if not one.wall.has_time_for(start_s):
                why = f"not started in round {turn + 1}: {one.wall.describe_spent(start_s)}"
                one.leave_out(label, why, "give a larger --budget")
                ended.add(label)  # the next rounds have less time
                continue
            try:
                if isinstance(subject, EndpointSubject):
                    _measure_elsewhere(one, subject, turn)
                else:
                    _measure_engine(one, subject, turn)
            except (ExternalFailure, NotPossible) as error:
                if matrix.sides:
                    raise
                ended.add(label)
                one.leave_out(label, error.summary, error.hint)


def _label(one: BenchRun, subject: ModelDecision | EndpointSubject) -> str:
    return subject.subject.engine if isinstance(subject, EndpointSubject) else label_decision(one.matrix, subject)


def _compare_need_with_budget(one: BenchRun) -> None:
    """Say beforehand what the whole matrix needs, if that is more than the budget."""
    matrix = one.matrix
    steps = (step for subject in one.subjects if (launch := subject.decision.launch) for step in launch.prepare)
    need = estimate_need(
        one.subject_count * len(matrix.loads),
        matrix.turns,
        matrix.seconds,
        starts_s=sum(_estimate_start_s(one, subject) for subject in one.subjects),
        installs_s=sum(step.seconds.value for step in steps if step.seconds is not None),
        checks=one.subject_count if matrix.check_quality else 0,
        structured=one.subject_count if matrix.check_structured else 0,
    )
    if one.wall.limit_s is not None and need.total_s > one.wall.limit_s:
        total, given = format_seconds(need.total_s), format_seconds(one.wall.limit_s)
        one.progress.note(
            f"all of it needs about {total} ({need.describe()}), and the budget is {given}: windows are shortened, and "
            "cells without time are left out"
        )


def _provide_reference(one: BenchRun, facts: Model) -> None:
    """Compute a missing reference before the first engine starts, so that it takes no CPU time from a measurement."""
    if one.matrix.check_quality:
        left_s = one.wall.left_s
        provide_affordable_reference(facts, one.hardware, one.progress, left_s=left_s, name=one.matrix.model)


def _estimate_start_s(one: BenchRun, subject: ModelDecision) -> float:
    """The last start of this engine here; else the usual time of the engine."""
    if one.wall.limit_s is None:
        return 0.0
    machine, name = one.run.environment.machine, subject.facts.name
    for head in reversed(store.read_cell_heads(one.path)):
        known = head.subject
        if (head.machine, known.engine, known.model) == (machine, subject.engine.id, name) and known.start_s:
            return known.start_s
    return subject.engine.container.start_s


def _end_cells(one: BenchRun) -> None:
    """End cells that had no time in the last round."""
    for cell in list(one.cells.values()):
        if cell.halt is None and cell.repeats and one.wall.limit_s is not None:
            _keep_ended(one, replace_fields(cell, halt="time"))


def _keep_ended(one: BenchRun, cell: Cell) -> Cell:
    """Store an ended cell, and its result for later plans."""
    cell = one.keep(cell)
    if cell.halt is not None and (result := make_result(cell)) is not None:
        store.add_result(result, one.path)
    return cell


def _plan_subject(one: BenchRun, engine_id: str, hardware: Hardware | None = None) -> ModelDecision:
    """`hardware`: another state of the machine than that of the run."""
    loads = one.matrix.loads
    if one.facts is None:
        raise RuntimeError("no model")
    longest = max(_find_longest(load) for load in loads)
    if one.shapes:
        longest = max((shape.prompt_tokens or 0) + (shape.output_tokens or 0) for shape in one.shapes)
        if has_sessions(one.shapes) and one.facts.max_context is not None:
            longest = min(longest, one.facts.max_context)  # a session ends before it exceeds the context
    context = max(LEAST_CONTEXT, longest + CONTEXT_SPARE)
    most = one.facts.max_context
    workload = Workload(
        concurrency=max(_estimate_in_flight(load) for load in loads),
        prompt_tokens=loads[0].prompt_tokens,
        output_tokens=loads[0].output_tokens,
        shared_prefix_tokens=loads[0].shared_prefix_tokens,
        context_tokens=min(context, most) if most is not None and most >= longest else context,
    )
    wanted = ModelOrder(model=one.matrix.model, workload=workload, engine=engine_id)
    build: Build = "native" if one.matrix.native else "packages"
    progress = one.progress if hardware is None else SilentProgress()
    return plan_engine(wanted, one.facts, hardware or one.hardware, progress, build=build, path=one.path)


def _find_longest(load: Load) -> int:
    return load.scenario.context_tokens if load.scenario is not None else load.prompt_tokens + load.output_tokens


def _assign_side(decided: ModelDecision, side: GateSide | None) -> ModelDecision:
    """The decision as one side of a gate, with the settings of the stored baseline if there are any."""
    if side is None:
        return decided
    plan = decided.plan if side.settings is None else replace_fields(decided.plan, settings=side.settings)
    return replace(decided, plan=plan, role=side.role)


def _estimate_in_flight(load: Load) -> int:
    """Expected requests in flight. For an open loop they are unknown: the requests of a few seconds."""
    if load.concurrency is not None or load.sessions is not None:
        return load.concurrency or load.sessions or 1
    turns = 1.0 if load.scenario is None else compute_means(load.scenario).turns
    return min(64, max(load.burst or 1, round(8 * turns * (load.requests_per_s or 1))))


def _needs_measuring(one: BenchRun, label: str, turn: int) -> bool:
    """Whether a cell of this engine or endpoint has to be measured in this round."""
    made = [one.cells.get(_make_cell_id(one, label, load)) for load in one.matrix.loads]
    return any(cell is None or not _has_enough_repeats(one, cell, turn) for cell in made)


def _has_enough_repeats(one: BenchRun, cell: Cell, turn: int) -> bool:
    if cell.halt not in (None, "stopped"):
        return True
    return turn < one.matrix.turns - 1 and len(cell.repeats) >= _compute_most_repeats(one, turn)


def _compute_most_repeats(one: BenchRun, turn: int) -> int:
    """Repeats that a cell has after this round."""
    return -(-one.matrix.repeats * (turn + 1) // one.matrix.turns)


def _measure_engine(one: BenchRun, subject: ModelDecision, turn: int) -> None:
    from bedplate.measure.builds import BuildExaminer

    ready = prepare_model(subject, one.progress, examiner=BuildExaminer(), to_measure=True)
    one.teller.report_engine_start(subject.engine.id)
    with run_engine(ready.build_start(), one.progress, through_gateway=one.matrix.through_gateway) as started:
        quality = _add_structured(one, ready, started, _check_answers(one, ready, started))
        name = ready.plan.model.served_name
        place = "through the gateway" if one.matrix.through_gateway else "directly at the engine's port"
        measuring = SubjectMeasurement(
            one,
            _make_started_subject(one, ready, started),
            LoadTarget.from_url(started.url, key=started.key, model=name),
            make_meters(started, one.reservation),
            quality,
            turn,
            notes=place,
            alive=lambda: not started.has_died,
        )
        measuring.measure_all()


def _check_answers(one: BenchRun, ready: PreparedModel, started: RunningEngine) -> Quality:
    """Checks the answers of each engine once per run, since they do not depend on the load."""
    engine = label_decision(one.matrix, ready.decided)
    if engine not in one.qualities:
        unchecked = one.subject_count - len(one.qualities)
        limit_s = one.wall.get_answers_limit_s(unchecked)
        if not one.matrix.check_quality:
            found = Quality(note="not requested")
        elif limit_s is None:
            found = Quality(note="not checked: the budget has no time for it")
        else:
            one.progress.note(f"comparing the answers of {ready.decided.engine.name} with the reference")
            name = ready.plan.model.served_name
            found = run_loop(quality_of.check(started.url, name, started.key, plan=ready.plan, limit_s=limit_s))
        one.qualities[engine] = found
        one.teller.report_quality(_make_subject(one, ready.decided), found)
    return one.qualities[engine]


def _add_structured(one: BenchRun, ready: PreparedModel, started: RunningEngine, quality: Quality) -> Quality:
    """Adds the result for structured output, which is measured once per engine and run."""
    label, name = label_decision(one.matrix, ready.decided), ready.plan.model.served_name
    subject, known = _make_subject(one, ready.decided), started.backend.capabilities
    return _check_structured(one, label, subject, (started.url, name, started.key), known, quality)


def _check_structured(
    one: BenchRun,
    label: str,
    subject: Subject,
    endpoint: tuple[str, str, str | None],
    capabilities: Capabilities | None,
    quality: Quality,
) -> Quality:
    limit_s = one.wall.get_answers_limit_s(one.subject_count - len(one.structured), structured_output.LIMIT_S)
    if one.matrix.check_structured and label not in one.structured:
        if limit_s is None:
            one.progress.note(f"structured output of {label} is not measured: the budget has no time for it")
            return quality
        one.progress.note(f"asking {label} for structured output")
        found = run_loop(structured_output.check(*endpoint, capabilities=capabilities, limit_s=limit_s))
        one.structured[label] = found
        one.teller.report_structured(subject, found)
    return replace_fields(quality, structured=one.structured.get(label))


def _measure_endpoint(one: BenchRun) -> None:
    """Measures an endpoint that is known only by its URL, once no other process uses its GPU, if it is a local one."""
    matrix = one.matrix
    target = _make_target(
        MeasuredEndpoint(url=str(matrix.url), key_env=matrix.key_env, served_model=matrix.served_model)
    )
    meters = _make_endpoint_meters(target)
    gpus = find_endpoint_gpus(meters.pid)
    with reserve_gpus(gpus, one.gpu_policy, one.progress, engine_pid=meters.pid) as meters.reservation:
        _measure_target(one, target, meters)


def _make_target(endpoint: MeasuredEndpoint) -> LoadTarget:
    return LoadTarget.from_url(endpoint.url, key=read_key(endpoint.key_env), model=endpoint.served_model)


def _make_endpoint_meters(target: LoadTarget) -> EngineMeters:
    meters = EngineMeters()
    if target.host in ("127.0.0.1", "localhost", "::1"):
        meters.pid = find_listening_pid(target.port)
    return meters


def _find_endpoints(one: BenchRun) -> list[Refusal]:
    """Sends a few small requests to each endpoint elsewhere; those that cannot be used are refused."""
    refused = []
    for asked in one.matrix.endpoints:
        target = _make_target(asked)
        try:
            prepared = _prepare_endpoint(one, target)
        except BedplateError as error:
            refused.append(Refusal(engine=target.name, kind="impossible", why=error.summary, hint=error.hint))
            continue
        # The user says that it is the same model, whatever it is called there.
        model = one.facts.name if one.facts is not None else prepared.model
        subject = Subject(engine=target.name, model=model, url=target.url)
        one.endpoints.append(EndpointSubject(subject, target, prepared, _make_endpoint_meters(target)))
    return refused


def _prepare_endpoint(one: BenchRun, target: LoadTarget) -> PreparedEndpoint:
    _fit_scenarios(one, run_loop(find_context(target)))
    prepared = run_loop(prepare_in_time(target, one.matrix.loads[0], None, one.shapes, one.wall.hard_left_s))
    if prepared is None:
        raise ExternalFailure(f"{target.url} did not answer within the budget", hint="give a larger --budget")
    return prepared


def _measure_elsewhere(one: BenchRun, endpoint: EndpointSubject, turn: int) -> None:
    subject = endpoint.subject
    one.teller.report_engine_start(subject.engine)
    quality = _check_endpoint(one, endpoint)
    SubjectMeasurement(
        one, subject, endpoint.target, endpoint.meters, quality, turn, prepared=endpoint.prepared
    ).measure_all()


def _check_endpoint(one: BenchRun, endpoint: EndpointSubject) -> Quality:
    """Checks the answers of an endpoint once per run."""
    subject, where = endpoint.subject, (endpoint.target.url, endpoint.prepared.model, endpoint.target.key)
    label = subject.engine
    if label not in one.qualities:
        found, limit_s = Quality(note="not requested"), one.wall.get_answers_limit_s(1)
        if one.matrix.check_quality and limit_s is None:
            found = Quality(note="not checked: the budget has no time for it")
        elif one.matrix.check_quality and limit_s is not None:
            one.progress.note(f"comparing the answers of {label} with the reference")
            found = run_loop(quality_of.check(*where, model=one.facts, limit_s=limit_s))
            one.teller.report_quality(subject, found)
        one.qualities[label] = found
    return _check_structured(one, label, subject, where, None, one.qualities[label])


def _measure_target(one: BenchRun, target: LoadTarget, meters: EngineMeters) -> None:
    matrix = one.matrix
    prepared = _prepare_endpoint(one, target)
    one.facts = fetch_facts(matrix.model, one.hardware, one.progress) if matrix.model is not None else None
    subject = Subject(
        engine="endpoint",
        model=prepared.model,
        url=target.url,
        quantization=one.facts.quantization if one.facts is not None else None,
        weights_id=_get_weights_id(one.facts),
    )
    one.keep_run(models=() if one.facts is None else _strip_model(replace_fields(one.facts, name=prepared.model)))
    one.teller.report_start(one.assemble_run(), [subject], measure_idle_share())
    _compare_need_with_budget(one)
    if one.facts is not None:
        _provide_reference(one, one.facts)
    endpoint = EndpointSubject(subject, target, prepared, meters)
    for turn in range(matrix.turns):
        _measure_elsewhere(one, endpoint, turn)
    _end_cells(one)


def read_key(variable: str | None) -> str | None:
    """Reads the key from an environment variable, since other users can see command-line options."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise UsageError(
            f"the environment variable {variable} is not set", hint="--key-env takes the name of a variable"
        )
    return value


# one subject


@dataclass
class SubjectMeasurement:
    """Measures one running endpoint under one load after the other."""

    one: BenchRun
    subject: Subject
    target: LoadTarget
    meters: EngineMeters
    quality: Quality
    turn: int
    notes: str = ""
    prepared: PreparedEndpoint | None = None
    alive: Callable[[], bool] = lambda: True

    @property
    def label(self) -> str:
        return label_subject(self.one.matrix, self.subject)

    def is_mine(self, cell: Cell) -> bool:
        return label_subject(self.one.matrix, cell.subject) == self.label

    def measure_all(self) -> None:
        for number, load in enumerate(self.one.matrix.loads):
            self.measure_cell(load, number)
        if self.one.matrix.target is not None and self.turn == self.one.matrix.turns - 1:
            self.measure_knee(self.one.matrix.target)

    def measure_knee(self, target: LatencyTarget) -> None:
        """Measures further loads until the highest one that meets the target is known."""
        number = len(self.one.matrix.loads)
        while True:
            mine = [cell for cell in self.one.cells.values() if self.is_mine(cell)]
            wanted = choose_next_load(mine, target)
            # A load whose cell is invalid would be requested forever.
            if wanted is None or wanted in [cell.load for cell in mine]:
                return
            if not self.measure_cell(wanted, number, searching=True):
                return
            number += 1

    def measure_cell(self, load: Load, number: int, *, searching: bool = False) -> bool:
        """Whether it was measured; False: the budget has no time for it."""
        one = self.one
        cell_id = _make_cell_id(one, self.label, load)
        kept = one.cells.get(cell_id)
        if kept is not None and _has_enough_repeats(one, kept, self.turn):
            return True
        cell = kept or Cell(
            id=cell_id,
            run=one.run.id,
            at=format_now(),
            machine=one.run.environment.machine,
            subject=self.subject,
            load=load,
        )
        cell = replace_fields(cell, subject=self.subject, quality=self.quality, notes=self.notes)
        if not one.wall.has_time_for(WARMUP_S + LEAST_WINDOW_S):
            return self._leave_out(cell)
        began = time.monotonic()
        one.teller.report_phase(cell, "preparing")
        prepared = run_loop(prepare_in_time(self.target, load, self.prepared, one.shapes, one.wall.hard_left_s))
        if prepared is None:
            return self._leave_out(cell)
        self.prepared = prepared
        allowed_s = self._compute_allowed_s(searching)
        last = self.turn == one.matrix.turns - 1
        rule = RepeatRule(
            half_width=HALF_WIDTH if last else 0.0,
            least=min(LEAST_REPEATS, one.matrix.repeats),
            most=1 if searching else _compute_most_repeats(one, self.turn),
            seconds=allowed_s,
        )
        reason = None
        while reason is None:
            index = len(cell.repeats)
            times = self._choose_times(cell, allowed_s)
            if times is None:
                return self._leave_out(cell)
            repeat = self._measure_repeat(cell, number * ROUNDS_PER_LOAD + index, times)
            cell = replace_fields(
                cell,
                repeats=(*cell.repeats, repeat),
                warmup=cell.warmup + repeat.warmup,
                exact_output=bool(repeat.exact_output) and (cell.exact_output or index == 0),
            )
            if not self.alive():
                one.keep(replace_fields(cell, halt="stopped"))
                raise ExternalFailure(f"{self.subject.engine} exited {describe_load_text(load)}")
            reason = find_halt_reason(
                [compute_delivered_tok_s(each) for each in cell.repeats], time.monotonic() - began, rule
            )
            final = reason if last or reason == "unknown" else None
            cell = one.keep(replace_fields(cell, halt=final))
        one.spent_s += time.monotonic() - began
        one.teller.report_cell(_keep_ended(one, cell))
        return True

    def _leave_out(self, cell: Cell) -> bool:
        """The budget has no time for another repeat. A cell with repeats is kept as it is."""
        if cell.repeats:
            self.one.teller.report_cell(cell)
            return True
        why = f"not measured {describe_load_text(cell.load)}: {self.one.wall.describe_spent()}"
        self.one.leave_out(self.label, why)
        return False

    def _compute_allowed_s(self, searching: bool) -> float:
        """An equal share of the remaining budget for each unfinished cell."""
        one, matrix = self.one, self.one.matrix
        wall_s = one.wall.left_s
        left_s = max(0.0, matrix.budget_s - one.spent_s if wall_s is None else wall_s)
        if searching:
            return max(matrix.seconds, left_s / 4)
        return left_s / self._count_cells_to_come()

    def _count_cells_to_come(self) -> int:
        one, matrix = self.one, self.one.matrix
        to_come = one.subject_count * len(matrix.loads) * (matrix.turns - self.turn)
        done = sum(cell.halt is not None for cell in one.cells.values())
        return max(1, to_come - (done if matrix.turns == 1 else 0))

    def _choose_times(self, cell: Cell, allowed_s: float) -> RepeatTimes | None:
        """`None`: the time that is left is too short for another repeat."""
        streams, seconds = cell.load.concurrency or cell.load.sessions or 0, self.one.matrix.seconds
        alone_s = (self.prepared.request_s if self.prepared is not None else None) or 0.0
        # A session takes long, and no single repeat may spend the time of all.
        allowed_s = allowed_s / min(LEAST_REPEATS, self.one.matrix.repeats) if cell.load.has_sessions else allowed_s
        most_s = compute_longest_s(seconds, allowed_s, alone_s, streams)
        times = RepeatTimes(seconds, most_s, REQUEST_LIMIT_S)
        return self.one.wall.fit_repeat(times, self._estimate_request_s(cell, alone_s), self._count_cells_to_come())

    def _estimate_request_s(self, cell: Cell, alone_s: float) -> float:
        """The time of a request under this load: at most in proportion to that under the nearest measured load."""
        streams = cell.load.concurrency or 1
        known = {
            other.load.concurrency: statistics.fmean(durations) / 1000
            for other in self.one.cells.values()
            if self.is_mine(other) and other.load.concurrency and (durations := list_durations(list_samples(other)))
        }
        lower = [count for count in known if count <= streams]
        return known[max(lower)] * streams / max(lower) if lower else alone_s * min(streams, UNKNOWN_GROWTH)

    def _measure_repeat(self, cell: Cell, round_number: int, times: RepeatTimes) -> Repeat:
        one, load = self.one, cell.load
        streams = load.concurrency or load.sessions or 0
        moments: dict[str, str] = {}
        with Watcher(self.meters) as watcher:

            def mark_phase(moment: str) -> None:
                moments[moment] = format_now(milliseconds=True)
                watcher.mark(moment)
                one.teller.report_phase(cell, moment)

            repeat = measure_apart(
                self.target,
                load,
                prepared=self.prepared,
                seconds=times.seconds,
                warmup_s=WARMUP_S,
                most_seconds=times.most_s,
                timeout_s=times.timeout_s,
                round=round_number,
                shapes=one.shapes,
                check=one.own.get(streams, True),
                watch=mark_phase,
            )
        client = repeat.client
        if client.error_p50_ms is not None and client.error_p99_ms is not None:
            one.own.setdefault(
                streams,
                ClientErrorFigures(p50_ms=client.error_p50_ms, p99_ms=client.error_p99_ms, streams=streams, samples=0),
            )
        use, engine = watcher.summarize_readings()
        return replace_fields(repeat, at=repeat.at or moments.get("begin"), use=use, engine=engine)


async def prepare_in_time(
    target: LoadTarget,
    load: Load,
    known: PreparedEndpoint | None,
    shapes: tuple[RequestShape, ...],
    limit_s: float | None,
) -> PreparedEndpoint | None:
    """`None`: the endpoint did not answer within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await prepare(target, load, known=known, shapes=shapes)
    except TimeoutError:
        return None


def describe_load_text(load: Load) -> str:
    if load.sessions is not None:
        return f"with {load.sessions} sessions"
    return "under this load" if load.concurrency is None else f"with {load.concurrency} in flight"


def compute_longest_s(seconds: float, allowed_s: float, alone_s: float, streams: int) -> float:
    """Maximum duration of a measurement window in which enough requests have to end.

    An engine that processes requests one after the other needs the time of one request for each stream.
    """
    return max(seconds, 3 * alone_s, min(allowed_s, max(MOST_EXTENSION * seconds, (streams + 2) * alone_s)))


def _make_subject(one: BenchRun, subject: ModelDecision) -> Subject:
    """The subject as planned, before the engine is installed and started."""
    return Subject(
        engine=subject.engine.id,
        engine_version=subject.decision.engine_version,
        model=subject.facts.name,
        quantization=subject.decision.quantization,
        weights_id=_get_weights_id(subject.facts),
        device=subject.plan.settings.device,
        parallelism=subject.plan.parallelism,
        settings=subject.plan.settings,
        role=subject.role,
    )


def _make_started_subject(one: BenchRun, ready: PreparedModel, started: RunningEngine) -> Subject:
    return replace_fields(
        _make_subject(one, ready.decided),
        engine_version=ready.plan.engine_version,
        build=ready.build,
        through_gateway=one.matrix.through_gateway,
        argv=started.argv,
        start_s=started.start_s,
        install_bytes=ready.environment.disk_bytes or None,
    )


def _strip_model(model: Model) -> tuple[Model, ...]:
    """The model without its local paths and its chat template."""
    return (replace_fields(model, files=(), chat_template=None),)


def _get_weights_id(model: Model | None) -> str | None:
    return hash_model_content(model)[:12] if model is not None and model.files else None


def label_subject(matrix: BenchMatrix, subject: Subject) -> str:
    return label_engine(matrix, subject.engine, subject.engine_version, subject.role)


def label_decision(matrix: BenchMatrix, decided: ModelDecision) -> str:
    return label_engine(matrix, decided.engine.id, decided.decision.engine_version, decided.role)


def label_engine(matrix: BenchMatrix, engine: str, version: str | None, role: Role | None = None) -> str:
    """The name of an engine in its run: its id, with the version if several are measured; in a gate, its role."""
    if role is not None:
        return role
    named = [name.partition("@")[0] for name in matrix.engines]
    return f"{engine}@{version}" if named.count(engine) > 1 else engine


def _make_cell_id(one: BenchRun, engine: str, load: Load) -> str:
    """A stable id, so that a resumed run finds its cells."""
    fields = msgspec.to_builtins(load)
    for name in ("sessions", "scenario"):  # runs of versions without sessions keep their ids
        if fields[name] is None:
            del fields[name]
    what = f"{one.run.id}\n{engine}\n".encode() + msgspec.json.encode(fields)
    return hashlib.sha256(what).hexdigest()[:12]


# environment


def describe_environment(hardware: Hardware, command: Sequence[str] = ()) -> RunEnvironment:
    cards = hardware.accelerators
    bandwidth = cards[0].bandwidth_bytes_s if cards else hardware.memory.bandwidth_bytes_s
    measured = bandwidth is not None and bandwidth.basis == "measured"
    return RunEnvironment(
        bedplate=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        command=tuple(command),
        hardware=describe_hardware(hardware),
        machine=compute_fingerprint(hardware),
        bandwidth_bytes_s=bandwidth.value if measured and bandwidth is not None else None,
        operations_s=_find_matrix_rate(hardware),
    )


def _find_matrix_rate(hardware: Hardware) -> float | None:
    """The measured rate of the first data type that was measured, on the first accelerator if there is one."""
    where = "0" if hardware.accelerators else "cpu"
    rates = {one.data_type: one.operations_s.value for one in (hardware.measured.matrix if hardware.measured else ())
             if one.device == where}  # fmt: skip
    return next((rates[name] for name in ("bf16", "fp16", "fp32", "int8") if name in rates), None)


def describe_hardware(hardware: Hardware) -> str:
    cpu = hardware.cpu
    names = [card.name for card in hardware.accelerators]
    cards = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    cores = f"{cpu.allowed_cores:g} core{'' if cpu.allowed_cores == 1 else 's'}"
    return f"{cpu.name}, {cores}, {format_memory(hardware.memory.total_bytes)} RAM, {cards}"


__all__ = ["BenchListener", "BenchRun", "BenchStopped", "bench", "make_closed_loads"]
