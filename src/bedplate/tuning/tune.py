"""Finds the best settings of one engine for one workload on this machine by measurement.

If memory allows, the engines that are compared stay loaded, and short bursts of requests measure them in interleaved
rounds. At the end, longer measurements of the same workload prove the winner by the rules of `compare`. Everything has
to fit into one time budget: the search ends early enough for the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bedplate import store
from bedplate._version import __version__
from bedplate.engines import load_engines
from bedplate.engines.knobs import make_build_knob, make_draft_knob
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.measure.bench import CONTEXT_SPARE, LEAST_CONTEXT, describe_hardware, handle_sigterm
from bedplate.measure.gpu_reservation import (
    WAIT_S,
    GpuPolicy,
    GpuReservation,
    assume_free,
    list_planned_gpus,
    reserve_gpus,
)
from bedplate.measure.moments import format_now, make_run_id
from bedplate.progress import Progress, SilentProgress
from bedplate.run.environments import find_adopted, read_registered_engines
from bedplate.run.native import find_usable_build
from bedplate.run.prepare import hash_model_content
from bedplate.run.ready import ModelDecision, fetch_facts, plan_engine, prepare_model
from bedplate.store import compute_fingerprint
from bedplate.tuning.answers import AnswerChecker
from bedplate.tuning.budget import Budget
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN
from bedplate.tuning.pool import TuningPool
from bedplate.tuning.proof import Prover
from bedplate.tuning.search import NOISE, Move, Point, SearchResult, TuningListener, climb, order_settings
from bedplate.tuning.state import TuningState
from bedplate.tuning.trials import Trials
from bedplate.values import Hardware, Model, Workload, replace_fields
from bedplate.values.run import Load
from bedplate.values.service import ModelOrder
from bedplate.values.tuning import Objective, TunableSetting, TuningRun
from bedplate.values.workload import LatencyTarget

if TYPE_CHECKING:
    from bedplate.measure.builds import BuildExaminer

BUDGET_S = 600.0


class TuningStopped(KeyboardInterrupt):
    """The user stopped the tuning; `tuned` has the measurements so far."""

    def __init__(self, tuned: TuningRun) -> None:
        super().__init__(f"stopped; continue with: bedplate tune --resume {tuned.id}")
        self.tuned = tuned


def tune(
    model: str | None = None,
    *,
    engine: str | None = None,
    load: Load | None = None,
    objective: Objective = "throughput",
    target: LatencyTarget | None = None,
    budget_s: float | None = None,
    knobs: Sequence[str] = (),
    more_knobs: Sequence[TunableSetting] = (),
    lossy: bool = False,
    draft: str | None = None,
    native: bool = False,
    price_per_hour: float | None = None,
    workload: Workload | None = None,
    resume: str | None = None,
    wait_for_gpu_s: float = WAIT_S,
    allow_busy_gpu: bool = False,
    progress: Progress | None = None,
    teller: TuningListener | None = None,
    path: Path | None = None,
) -> TuningRun:
    """Measure until the best settings are proven or the budget is used up, and store the result.

    `knobs` restricts the settings to change; `more_knobs` adds settings, and so does `draft`, a draft model for
    speculative decoding. `lossy` allows weights with lower accuracy than the plan's, within what their bits explain.
    `resume` continues an interrupted tuning by its id; "" is the newest. `wait_for_gpu_s`: how long to wait for a GPU
    that another process uses; then an error is raised. With `allow_busy_gpu` it is measured anyway.
    """
    progress, teller = progress or SilentProgress(), teller or TuningListener()
    hardware = probe()
    before = _find_unfinished(resume, hardware, path) if resume is not None else None
    if before is not None:
        model, engine, load, objective = before.asked_model, before.engine, before.load, before.objective
        target, knobs, lossy, native = before.target, before.knobs, before.lossy, before.build == "native"
        price_per_hour, workload, draft = before.price_per_hour, before.workload, before.draft
    load = load or Load(concurrency=4)
    facts = fetch_facts(model, hardware, progress)
    gpus: tuple[str, ...] = ()
    if hardware.has_vendor("nvidia"):
        planned = choose_plan(engine, assume_free(hardware), facts, load, workload, native=native, path=path)
        gpus = list_planned_gpus([planned])
    policy = GpuPolicy("tune", wait_for_gpu_s, allow_busy_gpu)
    with reserve_gpus(gpus, policy, progress) as reservation:
        if reservation is not None and reservation.waited:
            hardware = probe()  # memory on the GPU has been freed
        chosen = choose_plan(engine, hardware, facts, load, workload, native=native, path=path)
        found = (*list_settings(chosen), *more_knobs, *_make_draft_settings(chosen, draft))
        check_settings(found, knobs, chosen)
        kept = before or TuningRun(
            id=make_run_id(),
            at=format_now(milliseconds=True),
            machine=compute_fingerprint(hardware),
            hardware=describe_hardware(hardware),
            bedplate=__version__,
            engine=chosen.engine.id,
            engine_version=chosen.plan.engine_version,
            build="native" if native else "wheel",
            model=facts.name,
            asked_model=model,
            weights_id=hash_model_content(facts)[:12] if facts.files else None,
            load=load,
            workload=chosen.plan.workload,
            parallelism=chosen.plan.parallelism,
            objective=objective,
            target=target,
            price_per_hour=price_per_hour,
            lossy=lossy,
            knobs=tuple(knobs),
            draft=draft,
            budget_s=budget_s or BUDGET_S,
        )
        if before is not None and budget_s is not None:
            kept = replace_fields(kept, budget_s=kept.spent_s + budget_s)
        state = TuningState(hardware, facts, chosen, found, kept, progress, teller, path)
        return Tuner(state, reservation).run()


def choose_plan(
    engine: str | None,
    hardware: Hardware,
    facts: Model,
    load: Load,
    workload: Workload | None,
    *,
    native: bool = False,
    path: Path | None = None,
) -> ModelDecision:
    """Plan what `serve` would start for this load without tuning, with the requested or the decided engine."""
    from bedplate.decide import decide

    longest = load.prompt_tokens + load.output_tokens
    context = max(LEAST_CONTEXT, longest + CONTEXT_SPARE)
    work = replace_fields(
        workload or Workload(),
        concurrency=load.concurrency,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        shared_prefix_tokens=load.shared_prefix_tokens,
        context_tokens=min(context, facts.max_context or context),
    )
    if engine is None:
        registered = read_registered_engines()
        engine = decide(hardware, facts, work, installable=True, registered=registered).engine
        if engine is None:
            raise NotPossible(f"{facts.name} cannot be served on this machine", hint="bedplate plan gives the reasons")
    wanted = ModelOrder(model=facts.name, workload=work, engine=engine, untuned=True)
    return plan_engine(wanted, facts, hardware, SilentProgress(), build="native" if native else "packages", path=path)


def list_settings(chosen: ModelDecision) -> tuple[TunableSetting, ...]:
    """List the tunable settings of the engine, and the choice of the native build if there is one."""
    found = chosen.engine.list_settings(chosen.hardware, chosen.plan)
    if not found or chosen.build == "native" or find_adopted(chosen.engine) is not None:
        return found
    native = find_usable_build(chosen.engine, chosen.hardware, chosen.plan.settings.device)
    return (make_build_knob(), *found) if native is not None else found


def _make_draft_settings(chosen: ModelDecision, draft: str | None) -> tuple[TunableSetting, ...]:
    if draft is None:
        return ()
    path = Path(draft).expanduser().absolute()
    options = chosen.engine.get_draft_options(str(path))
    if not options:
        drafts = [one.id for one in load_engines().values() if one.get_draft_options(str(path))]
        raise UsageError(
            f"{chosen.engine.name} does not support a draft model here",
            hint=f"engines that do: {', '.join(drafts)}",
        )
    if not path.exists():
        raise UsageError(f"{draft} does not exist", hint="--draft names a file or a folder on this machine")
    return (make_draft_knob(options, str(path)),)


def check_settings(found: Sequence[TunableSetting], asked: Sequence[str], chosen: ModelDecision) -> None:
    if not found:
        raise NotPossible(
            f"bedplate knows no tunable settings of {chosen.engine.name}",
            hint="bedplate plan lists the engines that fit",
        )
    known = [knob.name for knob in found]
    for name in asked:
        if name not in known:
            raise UsageError(
                f"{chosen.engine.name} has no tunable setting {name!r} here", hint=f"choose from {', '.join(known)}"
            )


def _find_unfinished(resume: str, hardware: Hardware, path: Path | None) -> TuningRun:
    kept = store.read_tunings(compute_fingerprint(hardware), path=path)
    found = [one for one in kept if (one.id.startswith(resume) if resume else not one.finished) and one.source is None]
    if not found:
        raise UsageError(
            f"there is no tuning {resume}" if resume else "there is no unfinished tuning",
            hint=f"stored tunings: {', '.join(one.id for one in kept[:5])}" if kept else "bedplate tune starts one",
        )
    if found[0].finished:
        raise UsageError(f"tuning {found[0].id} is already finished", hint="bedplate tune starts a new one")
    return found[0]


class Tuner:
    """One tuning: a search with trials within a budget, and the proof of the result."""

    def __init__(self, state: TuningState, reservation: GpuReservation | None = None) -> None:
        self.state = state
        self.pool = TuningPool(1, reservation)
        self.budget = Budget(state, self.pool)
        self.engines = Engines(state, self.budget, self.pool)
        self.answers = AnswerChecker(state, self.budget, self.engines)
        self.trials = Trials(state, self.budget, self.engines)
        self.prover = Prover(state, self.budget, self.engines, self.answers)

    def run(self) -> TuningRun:
        chosen = self.state.chosen
        self.state.ready = prepare_model(chosen, self.state.progress, examiner=_make_examiner(chosen), to_measure=True)
        self.state.change(engine_version=self.state.ready.plan.engine_version, build=self.state.ready.build)
        self.pool.most = self.budget.count_loaded_engines(None)
        self.state.teller.report_start(self.state.kept, self.state.knobs)
        self.state.start_clock()
        with handle_sigterm():
            try:
                found = self.search()
                self.prover.prove(found)
                self.state.keep(finished=True)
            except KeyboardInterrupt:
                self.state.keep()
                raise TuningStopped(self.state.kept) from None
            except BedplateError:
                self.state.keep()
                raise
            finally:
                self.pool.close()
        return self.state.kept

    def search(self) -> SearchResult:
        start_score = self._measure_baselines()
        levers = order_settings(
            self.state.knobs, self.state.kept.limit, self.state.kept.knobs, hints=self._find_hints(),
            as_own=self._are_defaults_better(), lossy=self.state.kept.lossy,
        )  # fmt: skip
        return climb(
            levers,
            self.trials.measure,
            accept=self._accept,
            has_time=self.budget.has_time_for,
            refused=self._find_refused(),
            start_score=start_score,
            short_budget=self.budget.is_short,
            width=max(1, self.pool.most - 1) if self.pool.most > 1 else 3,
        )

    def _measure_baselines(self) -> float:
        """Measure the plan and the engine defaults, to compare with, and find the bottleneck.

        With a short budget, the engine defaults are measured only in the proof.
        """
        self.state.change(steps=(), proofs=(), sides=(), exclusions=())
        planned = self.trials.measure((), None)
        if planned is not None and self.budget.rounds > 1:
            # The first burst only showed how short it is.
            planned = self.trials.measure((), None)
        if planned is None:
            raise ExternalFailure(
                f"{self.state.chosen.engine.name} could not be measured with the plan's settings",
                cause=self.state.get_last_refusal(),
                hint=f"run bedplate bench --engines {self.state.chosen.engine.id}",
            )
        self.pool.most = self.budget.count_loaded_engines(self.state.trials[()])
        plan_quality = self.answers.check(())
        if plan_quality.verdict == "broken":
            raise NotPossible(
                f"{self.state.chosen.engine.name} gives wrong answers with the plan's settings",
                cause=plan_quality.note,
                hint="choose another engine; bedplate plan --why-not gives the reasons",
            )
        self.trials.diagnose()
        if not self.budget.is_short:
            self.trials.measure(OWN, None)
        return planned

    def _are_defaults_better(self) -> bool:
        """Whether the engine defaults are better than the plan."""
        own, plan = (one.best if (one := self.state.trials.get(point)) is not None else None for point in (OWN, ()))
        return own is not None and plan is not None and own.score - plan.score > NOISE

    def _accept(self, point: Point, move: Move) -> bool:
        """Keep a winner; if its settings can change answers, only if it answers like the plan."""
        if "answers" in self.state.get_setting(move.lever.name).risk:
            found = self.answers.check(point)
            if found.verdict != "ok":
                words = found.note or "the answers could not be checked"
                self.state.refuse(point, "answers", words, self.answers.evidence, move)
                return False
        self.state.best = point
        return True

    def _find_refused(self) -> set[tuple[str, str]]:
        kept = self.state.kept
        known = store.read_refused_settings(kept.machine, kept.engine, path=self.state.path)
        same = [one for one in known if (one.engine_version, one.model) == (kept.engine_version, kept.model)]
        # Weights that were refused for their accuracy are allowed with --lossy.
        same = [one for one in same if one.kind != "answers" or not kept.lossy]
        self.state.change(refused=tuple(dict.fromkeys((*kept.refused, *same))))
        return {(one.turn.knob, one.turn.value) for one in same}

    def _find_hints(self) -> set[str]:
        """Return the settings that helped the same engine with this model in other tunings."""
        kept = self.state.kept
        others = store.read_tunings(None, path=self.state.path)
        found = [one for one in others if one.engine == kept.engine and one.model == kept.model]
        return {step.turn.knob for one in found if one.id != kept.id for step in one.steps}


def _make_examiner(chosen: ModelDecision) -> BuildExaminer | None:
    if chosen.build != "native":
        return None
    from bedplate.measure.builds import BuildExaminer

    return BuildExaminer()
