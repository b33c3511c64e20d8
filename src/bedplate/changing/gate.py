"""Gate: measures a challenger and a baseline in interleaved rounds within a budget, and compares them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from bedplate import store
from bedplate.engines import get_engine, load_engines
from bedplate.engines.names import find_engine_id
from bedplate.errors import ExternalFailure, UsageError
from bedplate.facts.hardware import probe
from bedplate.judge.compare import compare
from bedplate.measure.bench import BenchListener, bench
from bedplate.measure.gpu_reservation import WAIT_S
from bedplate.measure.results import read_result
from bedplate.measure.summary import summarize_cell
from bedplate.progress import Progress, SilentProgress
from bedplate.run.environments import require_release, resolve_version
from bedplate.values.gate import GateEngine, GateResult, StoredFigure
from bedplate.values.run import Cell, GateSide, Load, Role, Run, Subject
from bedplate.values.verdict import TOLERANCE, MetricName
from bedplate.values.workload import LatencyTarget

ROUNDS = 20
"""A loss of 10 % is found with these in more than 8 of 10 comparisons on a noisy machine (docs/compare.md)."""
BUDGET_S = 600.0
SECONDS = 5.0
LOADS = (Load(concurrency=4),)


@dataclass(frozen=True)
class GateRequest:
    baseline: str
    """An engine as ID[@VERSION], a run as RUN[:ENGINE], or a file with a run."""
    challenger: str | None = None
    """`None`: the engine of the baseline, in the version that bedplate installs."""
    model: str | None = None
    """`None`: that of the stored baseline, else the built-in model."""
    loads: tuple[Load, ...] = ()
    """Empty: those of the stored baseline, else `LOADS`."""
    metrics: tuple[MetricName, ...] = ()
    tolerance: float = TOLERANCE
    target: LatencyTarget | None = None
    allow: Collection[str] = ()
    rounds: int = ROUNDS
    seconds: float = SECONDS
    budget_s: float = BUDGET_S
    check_quality: bool = True
    check_structured: bool = False
    """The metric `schema` implies it."""
    wait_for_gpu_s: float = WAIT_S
    allow_busy_gpu: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class GateBaseline:
    """What is measured again as the baseline."""

    engine: str
    model: str | None = None
    loads: tuple[Load, ...] = LOADS
    side: GateSide = field(default_factory=lambda: GateSide(role="baseline", engine=""))
    stored: tuple[StoredFigure, ...] = ()
    notes: tuple[str, ...] = ()


def run_gate(
    asked: GateRequest, progress: Progress | None = None, teller: BenchListener | None = None, path: Path | None = None
) -> GateResult:
    """Raises UsageError for a baseline that cannot be measured again, and BenchStopped on Ctrl-C."""
    began = time.monotonic()
    progress = progress or SilentProgress()
    machine = store.compute_fingerprint(probe())
    known = find_baseline(asked.baseline, machine, own_loads=not asked.loads, path=path)
    for note in known.notes:
        progress.note(note)
    challenger = asked.challenger or known.engine.partition("@")[0]
    run = bench(
        asked.model or known.model,
        sides=(known.side, GateSide(role="challenger", engine=challenger)),
        loads=asked.loads or known.loads,
        seconds=asked.seconds,
        repeats=asked.rounds,
        turns=asked.rounds,
        budget_s=asked.budget_s,
        check_quality=asked.check_quality,
        check_structured=asked.check_structured or "schema" in asked.metrics,
        wait_for_gpu_s=asked.wait_for_gpu_s,
        allow_busy_gpu=asked.allow_busy_gpu,
        progress=progress,
        teller=teller,
        command=asked.command,
        path=path,
    )
    return judge_run(run, asked, known, time.monotonic() - began)


def judge_run(run: Run, asked: GateRequest, known: GateBaseline, took_s: float) -> GateResult:
    """Compares the two sides of a measured run. Pure."""
    sides = {role: tuple(cell for cell in run.cells if cell.subject.role == role) for role in get_args(Role)}
    for role, cells in sides.items():
        if not cells:
            why = next((one.why for one in run.left_out if one.engine == role), "it was not measured")
            raise ExternalFailure(f"the {role} could not be measured", cause=why, hint="give a larger --budget")
    baseline, challenger = sides["baseline"], sides["challenger"]
    notes = (*known.notes, *(f"{one.engine}: {one.why}" for one in run.left_out))
    try:
        verdict = compare(
            baseline,
            challenger,
            target=asked.target,
            allow=asked.allow,
            metrics=asked.metrics,
            tolerance=asked.tolerance,
        )
        text = verdict.text
        shown = compare(baseline, challenger, allow=asked.allow, metrics=get_args(MetricName)).effects
    except UsageError as error:
        verdict, text, shown = None, f"The two sides cannot be compared: {error.cause or error.message}.", ()
    return GateResult(
        at=run.at,
        run=run.id,
        model=baseline[0].subject.model,
        hardware=run.environment.hardware,
        baseline=_describe_engine(baseline[-1].subject),
        challenger=_describe_engine(challenger[-1].subject),
        rounds=min(len(cell.repeats) for cell in (*baseline, *challenger)),
        verdict=verdict,
        text=text,
        effects=shown,
        stored=known.stored,
        notes=notes,
        took_s=round(took_s, 3),
    )


def _describe_engine(subject: Subject) -> GateEngine:
    return GateEngine(engine=subject.engine, engine_version=subject.engine_version, quantization=subject.quantization)


# the baseline


def find_baseline(named: str, machine: str, *, own_loads: bool = True, path: Path | None = None) -> GateBaseline:
    """`machine`: the fingerprint of this one. `own_loads`: the stored loads are measured again."""
    name, at, version = named.partition("@")
    if not Path(named).is_file() and not named.endswith(".json") and (engine := find_engine_id(name)) is not None:
        full = resolve_version(engine, version) if at else engine
        return GateBaseline(full, side=GateSide(role="baseline", engine=full))
    run, cells = _select_stored_cells(named, path)
    subject = cells[-1].subject
    if subject.engine not in load_engines() or subject.url is not None or not subject.engine_version:
        raise UsageError(
            f"the baseline {named} cannot be measured again",
            cause="it is not a version of an engine that bedplate starts",
            hint="name an engine as ID@VERSION, or a file from `bedplate bench --json`",
        )
    if any(cell.load.trace is not None for cell in cells):
        raise UsageError(f"the baseline {named} replays a trace, which is not in the file", hint="pass --concurrency")
    notes = []
    is_local = run.environment.machine == machine
    if not is_local:
        notes.append("the stored baseline is from another machine: its settings are not used")
    full = f"{subject.engine}@{subject.engine_version}"
    if subject.build == "native" and not get_engine(full).is_native:
        notes.append("the stored baseline is another native build; the packaged engine is measured")
        full = subject.engine
    elif subject.build != "native":
        full = require_release(subject.engine, subject.engine_version)
    settings = subject.settings if is_local and own_loads and full != subject.engine else None
    return GateBaseline(
        engine=full,
        model=run.matrix.model if run.matrix is not None else None,
        loads=tuple(dict.fromkeys(cell.load for cell in cells)),
        side=GateSide(role="baseline", engine=full, settings=settings),
        stored=tuple(StoredFigure(load=cell.load, output_tok_s=summarize_cell(cell).output_tok_s) for cell in cells),
        notes=tuple(notes),
    )


def _select_stored_cells(named: str, path: Path | None) -> tuple[Run, tuple[Cell, ...]]:
    """The run and its cells of one engine; of a gate's own run, those of the challenger, which is the newer one."""
    if named.endswith(".json") or Path(named).is_file():
        run, part = read_result(Path(named), require_valid=True).run, ""
    else:
        id_, _, part = named.partition(":")
        run = store.find_run(id_, path)
    cells = [cell for cell in run.cells if cell.repeats and cell.subject.role != "baseline"]
    if part:
        cells = [cell for cell in cells if cell.subject.engine == (find_engine_id(part) or part)]
    engines = dict.fromkeys(cell.subject.engine for cell in cells)
    if len(engines) != 1:
        found = f"it has {', '.join(engines)}" if engines else "it has no measured cells"
        raise UsageError(
            f"the baseline {named} does not name one engine", cause=found, hint="name one, as in RUN:ENGINE"
        )
    return run, tuple(cells)
