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
from bedplate.engines import all_engines
from bedplate.engines.knobs import build_knob, draft_knob
from bedplate.errors import AnswerIsNo, BadQuestion, BedplateError, OutsideFailed
from bedplate.facts.hardware import probe
from bedplate.measure.bench import CONTEXT_SPARE, LEAST_CONTEXT, hardware_words, stoppable
from bedplate.measure.moments import new_run_id, now_text
from bedplate.progress import Progress, Silent
from bedplate.run.environments import find_adopted, registered_versions
from bedplate.run.native import usable_build
from bedplate.run.prepare import content_id
from bedplate.run.ready import Decided, fetch_facts, plan_engine, readied
from bedplate.store import fingerprint
from bedplate.tuning.answers import Answers
from bedplate.tuning.budget import Budget
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN
from bedplate.tuning.pool import Pool
from bedplate.tuning.proof import Prover
from bedplate.tuning.search import NOISE, Climbed, Move, Point, Teller, climb, levers_of
from bedplate.tuning.state import TuningState
from bedplate.tuning.trials import Trials
from bedplate.values import Hardware, Model, Workload, replaced
from bedplate.values.run import Load
from bedplate.values.service import Wanted
from bedplate.values.tuning import Knob, Objective, Tuned
from bedplate.values.workload import LatencyTarget

if TYPE_CHECKING:
    from bedplate.measure.builds import BuildExaminer

BUDGET_S = 600.0


class Stopped(KeyboardInterrupt):
    """The user stopped the tuning; `tuned` has the measurements so far."""

    def __init__(self, tuned: Tuned) -> None:
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
    more_knobs: Sequence[Knob] = (),
    lossy: bool = False,
    draft: str | None = None,
    native: bool = False,
    price_per_hour: float | None = None,
    workload: Workload | None = None,
    resume: str | None = None,
    progress: Progress | None = None,
    teller: Teller | None = None,
    path: Path | None = None,
) -> Tuned:
    """Measure until the best settings are proven or the budget is used up, and store the result.

    `knobs` restricts the settings to change; `more_knobs` adds settings, and so does `draft`, a draft model for
    speculative decoding. `lossy` allows weights with lower accuracy than the plan's, within what their bits explain.
    `resume` continues an interrupted tuning by its id; "" is the newest.
    """
    progress, teller = progress or Silent(), teller or Teller()
    hardware = probe()
    before = _unfinished(resume, hardware, path) if resume is not None else None
    if before is not None:
        model, engine, load, objective = before.asked_model, before.engine, before.load, before.objective
        target, knobs, lossy, native = before.target, before.knobs, before.lossy, before.build == "native"
        price_per_hour, workload, draft = before.price_per_hour, before.workload, before.draft
    load = load or Load(concurrency=4)
    facts = fetch_facts(model, hardware, progress)
    chosen = chosen_plan(engine, hardware, facts, load, workload, native=native, path=path)
    found = (*all_knobs(chosen), *more_knobs, *_drafting(chosen, draft))
    checked_knobs(found, knobs, chosen)
    kept = before or Tuned(
        id=new_run_id(),
        at=now_text(milliseconds=True),
        machine=fingerprint(hardware),
        hardware=hardware_words(hardware),
        bedplate=__version__,
        engine=chosen.engine.id,
        engine_version=chosen.plan.engine_version,
        build="native" if native else "wheel",
        model=facts.name,
        asked_model=model,
        weights_id=content_id(facts)[:12] if facts.files else None,
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
        kept = replaced(kept, budget_s=kept.spent_s + budget_s)
    return Tuner(TuningState(hardware, facts, chosen, found, kept, progress, teller, path)).run()


def chosen_plan(
    engine: str | None,
    hardware: Hardware,
    facts: Model,
    load: Load,
    workload: Workload | None,
    *,
    native: bool = False,
    path: Path | None = None,
) -> Decided:
    """Plan what `serve` would start for this load without tuning, with the requested or the decided engine."""
    from bedplate.decide import decide

    longest = load.prompt_tokens + load.output_tokens
    context = max(LEAST_CONTEXT, longest + CONTEXT_SPARE)
    work = replaced(
        workload or Workload(),
        concurrency=load.concurrency,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        shared_prefix_tokens=load.shared_prefix_tokens,
        context_tokens=min(context, facts.max_context or context),
    )
    if engine is None:
        engine = decide(hardware, facts, work, installable=True, versions=registered_versions()).engine
        if engine is None:
            raise AnswerIsNo(f"{facts.name} cannot be served on this machine", hint="bedplate plan gives the reasons")
    wanted = Wanted(model=facts.name, workload=work, engine=engine, untuned=True)
    return plan_engine(wanted, facts, hardware, Silent(), build="native" if native else "packages", path=path)


def all_knobs(chosen: Decided) -> tuple[Knob, ...]:
    """List the tunable settings of the engine, and the choice of the native build if there is one."""
    found = chosen.engine.knobs(chosen.hardware, chosen.plan)
    if not found or chosen.build == "native" or find_adopted(chosen.engine) is not None:
        return found
    native = usable_build(chosen.engine, chosen.hardware, chosen.plan.settings.device)
    return (build_knob(), *found) if native is not None else found


def _drafting(chosen: Decided, draft: str | None) -> tuple[Knob, ...]:
    if draft is None:
        return ()
    path = Path(draft).expanduser().absolute()
    options = chosen.engine.drafting(str(path))
    if not options:
        drafts = [one.id for one in all_engines().values() if one.drafting(str(path))]
        raise BadQuestion(
            f"{chosen.engine.name} does not support a draft model here",
            hint=f"engines that do: {', '.join(drafts)}",
        )
    if not path.exists():
        raise BadQuestion(f"{draft} does not exist", hint="--draft names a file or a folder on this machine")
    return (draft_knob(options, str(path)),)


def checked_knobs(found: Sequence[Knob], asked: Sequence[str], chosen: Decided) -> None:
    if not found:
        raise AnswerIsNo(
            f"bedplate knows no tunable settings of {chosen.engine.name}",
            hint="bedplate plan lists the engines that fit",
        )
    known = [knob.name for knob in found]
    for name in asked:
        if name not in known:
            raise BadQuestion(
                f"{chosen.engine.name} has no tunable setting {name!r} here", hint=f"choose from {', '.join(known)}"
            )


def _unfinished(resume: str, hardware: Hardware, path: Path | None) -> Tuned:
    kept = store.tunings(fingerprint(hardware), path=path)
    found = [one for one in kept if (one.id.startswith(resume) if resume else not one.finished) and one.source is None]
    if not found:
        raise BadQuestion(
            f"there is no tuning {resume}" if resume else "there is no unfinished tuning",
            hint=f"stored tunings: {', '.join(one.id for one in kept[:5])}" if kept else "bedplate tune starts one",
        )
    if found[0].finished:
        raise BadQuestion(f"tuning {found[0].id} is already finished", hint="bedplate tune starts a new one")
    return found[0]


class Tuner:
    """One tuning: a search with trials within a budget, and the proof of the result."""

    def __init__(self, state: TuningState) -> None:
        self.state = state
        self.pool = Pool(1)
        self.budget = Budget(state, self.pool)
        self.engines = Engines(state, self.budget, self.pool)
        self.answers = Answers(state, self.budget, self.engines)
        self.trials = Trials(state, self.budget, self.engines)
        self.prover = Prover(state, self.budget, self.engines, self.answers)

    def run(self) -> Tuned:
        chosen = self.state.chosen
        self.state.ready = readied(chosen, self.state.progress, examiner=_examiner(chosen), to_measure=True)
        self.state.change(engine_version=self.state.ready.plan.engine_version, build=self.state.ready.build)
        self.pool.most = self.budget.engines_at_once(None)
        self.state.teller.begun(self.state.kept, self.state.knobs)
        self.state.start_clock()
        with stoppable():
            try:
                found = self.search()
                self.prover.prove(found)
                self.state.keep(finished=True)
            except KeyboardInterrupt:
                self.state.keep()
                raise Stopped(self.state.kept) from None
            except BedplateError:
                self.state.keep()
                raise
            finally:
                self.pool.close()
        return self.state.kept

    def search(self) -> Climbed:
        start_score = self._first_look()
        levers = levers_of(
            self.state.knobs, self.state.kept.limit, self.state.kept.knobs, hints=self._hints(),
            as_own=self._own_is_better(), lossy=self.state.kept.lossy,
        )  # fmt: skip
        return climb(
            levers,
            self.trials.measure,
            accept=self._accept,
            has_time=self.budget.has_time_for,
            refused=self._refused_before(),
            start_score=start_score,
            short_budget=self.budget.is_hasty,
            width=max(1, self.pool.most - 1) if self.pool.most > 1 else 3,
        )

    def _first_look(self) -> float:
        """Measure the plan and the engine defaults, to compare with, and find the bottleneck.

        With a short budget, the engine defaults are measured only in the proof.
        """
        self.state.change(steps=(), proofs=(), sides=())
        planned = self.trials.measure((), None)
        if planned is None:
            raise OutsideFailed(
                f"{self.state.chosen.engine.name} could not be measured with the plan's settings",
                cause=self.state.last_refusal(),
                hint=f"run bedplate bench --engines {self.state.chosen.engine.id}",
            )
        self.pool.most = self.budget.engines_at_once(self.state.trials[()])
        plan_quality = self.answers.check(())
        if plan_quality.verdict == "broken":
            raise AnswerIsNo(
                f"{self.state.chosen.engine.name} gives wrong answers with the plan's settings",
                cause=plan_quality.note,
                hint="choose another engine; bedplate plan --why-not gives the reasons",
            )
        self.trials.diagnose()
        if not self.budget.is_hasty:
            self.trials.measure(OWN, None)
        return planned

    def _own_is_better(self) -> bool:
        """Whether the engine defaults are better than the plan."""
        own, plan = (one.best if (one := self.state.trials.get(point)) is not None else None for point in (OWN, ()))
        return own is not None and plan is not None and own.score - plan.score > NOISE

    def _accept(self, point: Point, move: Move) -> bool:
        """Keep a winner; if its settings can change answers, only if it answers like the plan."""
        if "answers" in self.state.knob(move.lever.name).risk:
            found = self.answers.check(point)
            if found.verdict != "ok":
                words = found.note or "the answers could not be checked"
                self.state.refuse(point, "answers", words, self.answers.evidence, move)
                return False
        self.state.best = point
        return True

    def _refused_before(self) -> set[tuple[str, str]]:
        kept = self.state.kept
        known = store.refused_settings(kept.machine, kept.engine, path=self.state.path)
        same = [one for one in known if (one.engine_version, one.model) == (kept.engine_version, kept.model)]
        # Weights that were refused for their accuracy are allowed with --lossy.
        same = [one for one in same if one.kind != "answers" or not kept.lossy]
        self.state.change(refused=tuple(dict.fromkeys((*kept.refused, *same))))
        return {(one.turn.knob, one.turn.value) for one in same}

    def _hints(self) -> set[str]:
        """Return the settings that helped the same engine with this model in other tunings."""
        kept = self.state.kept
        others = store.tunings(None, path=self.state.path)
        found = [one for one in others if one.engine == kept.engine and one.model == kept.model]
        return {step.turn.knob for one in found if one.id != kept.id for step in one.steps}


def _examiner(chosen: Decided) -> BuildExaminer | None:
    if chosen.build != "native":
        return None
    from bedplate.measure.builds import BuildExaminer

    return BuildExaminer()
