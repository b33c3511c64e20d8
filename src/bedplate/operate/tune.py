"""The best settings of one engine for one kind of work on this machine, found by measuring.

Engines that are compared stay loaded side by side where memory allows, and are measured in turns with short waves of
requests. What wins is proven at the end by larger pieces of the same work, as `compare` weighs any two engines. All of
it has to fit into one budget: a search ends early enough for its proof.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bedplate import store
from bedplate._version import __version__
from bedplate.engines.knobs import build_knob, choice_of, draft_knob, is_native, turned_plan, with_own_defaults
from bedplate.errors import AnswerIsNo, BadQuestion, BedplateError, OutsideFailed
from bedplate.facts.hardware import probe
from bedplate.judge.diagnose import bottleneck, ground_for
from bedplate.judge.proving import LATE_SHARE, LEAST_TURNS, Times, reserve_s, shaped, take_turns
from bedplate.judge.tuning import (
    NOISE,
    Climbed,
    Move,
    Point,
    Teller,
    climb,
    front_of,
    gain_figure,
    levers_of,
    score_of,
)
from bedplate.measure.agreement import Comparison, Pairs, ask, floor_for, quick_ones, verdict_of
from bedplate.measure.agreement import compare as compare_answers
from bedplate.measure.bench import (
    CONTEXT_SPARE,
    LEAST_CONTEXT,
    environment_of,
    hardware_words,
    stoppable,
)
from bedplate.measure.flags import BUSY, SWAPPED_BYTES, TOO_BUSY, flags_of
from bedplate.measure.load import OwnError, Prepared, prepare
from bedplate.measure.load import run as run_loop
from bedplate.measure.moments import new_run_id, now_text
from bedplate.measure.reference import reference_for
from bedplate.measure.starting import Planned, Ready, facts_of, made_ready, planned, why
from bedplate.measure.summary import meets, output_tok_s, tpots, ttfts
from bedplate.measure.watch import Watcher
from bedplate.measure.wave import Work, warmed, wave, wave_apart
from bedplate.operate.answers import basis_of
from bedplate.operate.loaded import Alive, Pool
from bedplate.operate.tune_proof import LOST, SPEED_KEPT, is_settled, middle, proof_of, side_of, turn_of
from bedplate.run.environments import Environment, find_adopted, registered_versions
from bedplate.run.native import usable_build
from bedplate.run.prepare import content_id
from bedplate.run.prepare import prepare as prepare_weights
from bedplate.run.progress import Progress, Silent
from bedplate.store import fingerprint
from bedplate.values import Hardware, Model, Plan, Preparation, Settings, Workload, replaced
from bedplate.values.run import Cell, Load, Quality, Repeat, Subject
from bedplate.values.tuning import (
    Knob,
    Objective,
    Refused,
    RefusedKind,
    Side,
    SideName,
    Step,
    Taken,
    Trial,
    Tuned,
    Turn,
    words_of,
)
from bedplate.values.workload import LatencyTarget

if TYPE_CHECKING:
    from bedplate.measure.builds import BuildExaminer

BUDGET_S = 600.0
REQUEST_LIMIT_S, LEAST_LIMIT_S = 300.0, 30.0
MOST_WAITED = {"throughput": 1.45, "cost": 1.45}
"""Times the best's own wave that a contender is waited for; other objectives may be worth a slower one."""
WAITED_ELSE = 2.5
MANY_WAVES = 30
"""Where the whole time holds fewer of the plan's waves, there is haste."""
SLOW, HASTY_SLOW = 6.0, 2.5
"""Times the plan's own wave that the engine's own defaults are waited for: in the first look, and in haste."""
MEMORY_SHARE = 0.6
"""Of the free memory, what engines that wait for their turn may hold together."""
MOST_ALIVE = 5
PROOF_MEMORY_SHARE = 0.85
"""Likewise, for the sides of the proof, whose memory is known."""
ROUND_PROOF = 100_000
"""Prompts of the proof are others than those of the search, which no cache may know."""
LEAST_SEEN, FEW_TOKENS = 3, 16
"""Requests that a diagnosis needs of a load; alone, their prompt and a few tokens say enough."""
ASKED, ASK_AT_ONCE = 48, 4
"""Next tokens that are compared, and how many of them at a time."""
CHECK_SHARE, LEAST_ASKED = 0.2, 12
"""Of the time, what one comparison may take; an engine that reads slowly is asked for fewer."""
MOST_REST_S, REST_LOOK_S, AT_REST_PERCENT = 2.0, 0.1, 20.0
LAST_LINES = 3
OWN_KNOB = "own defaults"
OWN: Point = (("", OWN_KNOB),)
"""What stands for the engine's own defaults where a setting is expected."""


class Stopped(KeyboardInterrupt):
    """Somebody stopped it; `tuned` has what was measured until then."""

    def __init__(self, tuned: Tuned) -> None:
        super().__init__(f"stopped; go on with: bedplate tune --resume {tuned.id}")
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
    """Measures until the best settings are proven or time is up, and keeps what it finds in the store.

    `knobs` restricts what is turned; `more_knobs` adds to it, and so does `draft`, a small model that may guess ahead.
    `lossy` allows weights that answer less faithfully than the plan's, within what their bits explain. `resume` goes on
    with one that was ended; "" is the newest.
    """
    progress, teller = progress or Silent(), teller or Teller()
    hardware = probe()
    before = _unfinished(resume, hardware, path) if resume is not None else None
    if before is not None:
        model, engine, load, objective = before.asked_model, before.engine, before.load, before.objective
        target, knobs, lossy, native = before.target, before.knobs, before.lossy, before.build == "native"
        price_per_hour, workload, draft = before.price_per_hour, before.workload, before.draft
    load = load or Load(concurrency=4)
    facts = facts_of(model, hardware, progress)
    chosen = chosen_plan(engine, hardware, facts, load, workload, native=native)
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
    return Tuner(hardware, facts, chosen, found, kept, progress, teller, path).run()


def chosen_plan(
    engine: str | None, hardware: Hardware, facts: Model, load: Load, workload: Workload | None, *, native: bool = False
) -> Planned:
    """What `serve` would start for this load without any tuning: the engine that was asked for, or decided."""
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
            raise AnswerIsNo(f"{facts.name} cannot be served here", hint="bedplate plan says why")
    return planned(engine, hardware, facts, work, native=native)


def all_knobs(chosen: Planned) -> tuple[Knob, ...]:
    """The engine's own, and whether it is the build for this machine, where there is one beside the ready-made."""
    found = chosen.engine.knobs(chosen.hardware, chosen.plan)
    if not found or chosen.native or find_adopted(chosen.engine) is not None:
        return found
    there = usable_build(chosen.engine, chosen.hardware, chosen.plan.settings.device)
    return (build_knob(), *found) if there is not None else found


def _drafting(chosen: Planned, draft: str | None) -> tuple[Knob, ...]:
    if draft is None:
        return ()
    path = Path(draft).expanduser().absolute()
    options = chosen.engine.drafting(str(path))
    if not options:
        raise BadQuestion(f"{chosen.engine.name} takes no draft model here", hint="llama.cpp, vllm and mlx do")
    if not path.exists():
        raise BadQuestion(f"there is no {draft}", hint="--draft is a file or a folder on this machine")
    return (draft_knob(options, str(path)),)


def checked_knobs(found: Sequence[Knob], asked: Sequence[str], chosen: Planned) -> None:
    if not found:
        raise AnswerIsNo(
            f"bedplate does not know what to turn of {chosen.engine.name}", hint="bedplate plan names engines that fit"
        )
    known = [knob.name for knob in found]
    for name in asked:
        if name not in known:
            raise BadQuestion(f"{chosen.engine.name} has no knob {name!r} here", hint=f"there are {', '.join(known)}")


def _unfinished(resume: str, hardware: Hardware, path: Path | None) -> Tuned:
    kept = store.tunings(fingerprint(hardware), path=path)
    found = [one for one in kept if (one.id.startswith(resume) if resume else not one.finished) and one.source is None]
    if not found:
        raise BadQuestion(
            f"no tuning is called {resume}" if resume else "no tuning was ended before its time",
            hint=f"there are {', '.join(one.id for one in kept[:5])}" if kept else "bedplate tune begins one",
        )
    if found[0].finished:
        raise BadQuestion(f"tuning {found[0].id} has come to its end", hint="bedplate tune begins another")
    return found[0]


class Tuner:
    """One tuning under way."""

    def __init__(
        self,
        hardware: Hardware,
        facts: Model,
        chosen: Planned,
        knobs: Sequence[Knob],
        kept: Tuned,
        progress: Progress,
        teller: Teller,
        path: Path | None,
    ) -> None:
        self.hardware, self.facts, self.chosen, self.knobs = hardware, facts, chosen, tuple(knobs)
        self.kept, self.progress, self.teller, self.path = kept, progress, teller, path
        self.pool = Pool(1)
        self.ready: Ready | None = None
        self.prepared: Prepared | None = None
        self.pairs: Pairs = ()
        self.qualities: dict[Point, Quality] = {}
        self.best: Point = ()
        self.answers_of: dict[Point, tuple[bool, Quality]] = {}
        self.trials: dict[Point, Trial] = {point_of(one): one for one in kept.trials}
        self._replay = {point: list(one.taken) for point, one in self.trials.items()}
        self._start_s: dict[Point, float] = {}
        self._convert_s: dict[str, float] = {}
        self._check_s = 0.0
        self._number = sum(len(one.taken) for one in kept.trials)
        self._own: OwnError | bool = True
        self._spent_before = kept.spent_s
        self._began = self.clock()

    clock = staticmethod(time.monotonic)

    # the whole

    def run(self) -> Tuned:
        self.ready = made_ready(self.chosen, self.progress, _examiner(self.chosen))
        self.kept = replaced(self.kept, engine_version=self.ready.plan.engine_version, build=self.ready.build)
        self.pool.most = self._room(None)
        self.teller.begun(self.kept, self.knobs)
        self._began = self.clock()
        with stoppable():
            try:
                found = self._searched()
                self._prove(found)
                self._keep(finished=True)
            except KeyboardInterrupt:
                self._keep()
                raise Stopped(self.kept) from None
            except BedplateError:
                self._keep()
                raise
            finally:
                self.pool.close()
        return self.kept

    @property
    def spent_s(self) -> float:
        return self._spent_before + self.clock() - self._began

    @property
    def left_s(self) -> float:
        return self.kept.budget_s - self.spent_s

    def _keep(self, **changes: object) -> None:
        trials = tuple(self.trials.values())
        count = sum(len(one.taken) for one in trials)
        wrong = {one.turned for one in self.kept.refused}
        sound = [one for one in trials if one.own_defaults or not one.turned or one.turned not in wrong]
        front = front_of(sound, lambda one: "own defaults" if one.own_defaults else words_of(one.turned))
        self.kept = replaced(
            self.kept, trials=trials, measurements=count, spent_s=round(self.spent_s, 1), front=front, **changes
        )
        store.add_tuning(self.kept, self.path)

    # the search

    def _searched(self) -> Climbed:
        seen = self._first_look()
        levers = levers_of(
            self.knobs, self.kept.limit, self.kept.knobs, hints=self._hints(), as_own=self._own_is_better(),
            lossy=self.kept.lossy,
        )  # fmt: skip
        return climb(
            levers,
            self._measure,
            accept=self._accept,
            more=self._more,
            refused=self._refused(),
            seen=seen,
            hasty=self._hasty,
            width=max(1, self.pool.most - 1) if self.pool.most > 1 else 3,
        )

    def _first_look(self) -> float:
        """The plan as it is, and the engine's own defaults: what everything is held against, and what binds.

        In haste the latter are measured in the proof alone.
        """
        self.kept = replaced(self.kept, steps=(), proofs=(), sides=())
        planned = self._measure((), None)
        if planned is None:
            raise OutsideFailed(
                f"{self.chosen.engine.name} could not be measured as planned", cause=self._last_refusal(),
                hint=f"bedplate bench --engines {self.chosen.engine.id}",
            )  # fmt: skip
        self.pool.most = self._room(self.trials[()])
        plan_quality = self._quality(())
        if plan_quality.verdict == "broken":
            raise AnswerIsNo(
                f"{self.chosen.engine.name} gives wrong answers here as planned", cause=plan_quality.note,
                hint="nothing that is faster would help; bedplate plan --why-not says more",
            )  # fmt: skip
        self._diagnose()
        if not self._hasty:
            self._measure(OWN, None)
        return planned

    @property
    def _hasty(self) -> bool:
        """Whether there is time for few waves only."""
        wave_s = self._wave_s(())
        return wave_s is not None and self.kept.budget_s < MANY_WAVES * wave_s

    def _own_is_better(self) -> bool:
        """Whether the engine by itself does something that the plan should do as well."""
        own, plan = (one.best if (one := self.trials.get(point)) is not None else None for point in (OWN, ()))
        return own is not None and plan is not None and own.score - plan.score > NOISE

    def _diagnose(self) -> None:
        """What binds, from the plan's wave and from a request alone; what is known of it stays."""
        if self.kept.diagnosis is not None:
            return
        load = self.kept.load
        alone = replaced(load, concurrency=1, output_tokens=min(load.output_tokens, FEW_TOKENS))
        cells = []
        for one in [alone, load] if load.concurrency != 1 and not self._hasty else [load]:
            self._say(f"the plan with {one.concurrency} in flight, to see what binds")
            repeats = [self._planned] if one is load and self._planned is not None else []
            while sum(len(repeat.samples) for repeat in repeats) < LEAST_SEEN:
                repeat, _ = self._watched(self._alive(()), one, REQUEST_LIMIT_S)
                if repeat is None:
                    return
                repeats.append(repeat)
            cells.append(self._cell((), one, tuple(repeats), "plan"))
        ground = ground_for(cells[-1].subject, self.facts, self.hardware, environment_of(self.hardware))
        found = bottleneck(cells, ground)
        self.kept = replaced(self.kept, limit=found.limit, diagnosis=found.text)
        self.teller.diagnosed(found)

    def _measure(self, point: Point, bar: float | None) -> float | None:
        """One wave; what was measured before this run was ended is not measured again."""
        if replay := self._replay.get(point):
            return replay.pop(0).score
        try:
            alive = self._alive(point)
            self._say(words_at(point))
            limit_s = self._limit_s(bar)
            self._rest(point)
            repeat, used = self._watched(alive, self.kept.load, limit_s)
        except (OutsideFailed, AnswerIsNo) as error:
            self.pool.end(point)
            self._refuse(point, "start", why(error), _tail(error))
            return None
        except OSError as error:
            died = point in self.pool.running and self.pool.running[point].started.died
            self.pool.end(point)
            self._refuse(point, "died" if died else "errors", str(error) or type(error).__name__, ())
            return None
        if used.swapped_bytes is not None and used.swapped_bytes > SWAPPED_BYTES:
            self._refuse(point, "swapped", f"{used.swapped_bytes / 1e6:.0f} MB went to swap while it was measured", ())
            return None
        taken = self._taken(repeat, used, limit_s, bar)
        if taken is not None and bar is None and taken.cut:
            # Slow is not dangerous: it has lost, and nothing speaks against trying it another time.
            self._add(point, alive, taken)
            return None
        if taken is None:
            failed = [one.error or one.outcome for one in repeat.samples if one.outcome != "ok"] if repeat else []
            self._refuse(point, "errors", failed[0] if failed else "no figures for this objective", tuple(failed[:3]))
            return None
        if not point and self._planned is None:
            self._planned = repeat
        self._add(point, alive, taken)
        return taken.score

    def _add(self, point: Point, alive: Alive, taken: Taken) -> None:
        before = self.trials.get(point) or Trial(
            turned=turns_of(point), own_defaults=point == OWN, start_s=round(alive.started.start_s, 2)
        )
        self.trials[point] = replaced(before, taken=(*before.taken, taken))
        self._keep()
        self.teller.taken(turns_of(point), taken, self.kept)

    def _limit_s(self, bar: float | None) -> float:
        usual = self._wave_s(self.best)
        if usual is not None and bar is not None:
            return usual * MOST_WAITED.get(self.kept.objective, WAITED_ELSE) + 0.5
        longest = min(REQUEST_LIMIT_S, max(self.left_s, LEAST_LIMIT_S))
        return longest if usual is None else min(longest, max(SLOW * usual, LEAST_LIMIT_S))

    def _watched(self, alive: Alive, load: Load, limit_s: float) -> tuple[Repeat | None, _Used]:
        with Watcher(alive.meters) as watcher:
            watcher.mark("begin")
            self._number += 1
            repeat = run_loop(wave(alive.target, load, self._known(alive), self._number, limit_s))
            watcher.mark("end")
        use, engine = watcher.seen()
        if use.other_cpu_share is not None and use.other_cpu_share > BUSY and not self._busy_told:
            self._busy_told = True
            share = f"{use.other_cpu_share:.0%}"
            note = (
                f"other programs took {share} of the processors while this was measured: the figures are worse for it"
            )
            self.kept = replaced(self.kept, notes=(*self.kept.notes, note))
            self.progress.note(note)
        energy = use.energy_j
        made = sum(one.output_tokens or 0 for one in repeat.samples) if repeat is not None else 0
        peak = use.peak_gpu_bytes if alive.meters.on_card and use.peak_gpu_bytes else use.peak_memory_bytes
        used = _Used(peak, energy / made if energy is not None and made else None, use.swapped_bytes)
        return (replaced(repeat, use=use, engine=engine) if repeat is not None else None), used

    def _rest(self, point: Point) -> None:
        """Waits until the one that was measured before has come to rest: some go on looking for work for a second."""
        last, self._last = self._last, point
        if last == point or len(self.pool.running) < 2:
            return
        import psutil

        until = self.clock() + MOST_REST_S
        while self.clock() < until and psutil.cpu_percent(interval=REST_LOOK_S) > AT_REST_PERCENT:
            pass

    _last: Point | None = None
    _busy_told = False
    _planned: Repeat | None = None
    """The plan's own first wave."""

    def _known(self, alive: Alive) -> Prepared:
        """What the load generator has to know of the endpoint; all settings of one engine cut text alike."""
        if self.prepared is None:
            self.prepared = run_loop(prepare(alive.target, self.kept.load))
        return self.prepared

    def _taken(self, repeat: Repeat | None, used: _Used, limit_s: float, bar: float | None) -> Taken | None:
        tuned = self.kept
        if repeat is None:
            # Who is slower than the bar by so much is out of the race; by how much nobody needs to know.
            return Taken(
                at=now_text(milliseconds=True), seconds=round(limit_s, 3), score=LOST if bar is None else bar, cut=True
            )
        if any(one.outcome != "ok" for one in repeat.samples):
            return None
        speed = output_tok_s(repeat, tuned.load)
        first, each = middle(ttfts(repeat.samples)), middle(tpots(repeat.samples))
        share = None
        if tuned.target is not None:
            share = statistics.fmean(meets(one, tuned.target) for one in repeat.samples)
        plan = self.trials.get(())
        floor = plan.best.output_tok_s if plan is not None and plan.best is not None else None
        score = score_of(
            tuned.objective, output_tok_s=speed, ttft_ms=first, tpot_ms=each, peak_memory_bytes=used.memory_bytes,
            energy_j_per_token=used.energy_j, on_target=share, floor_tok_s=SPEED_KEPT * floor if floor else None,
        )  # fmt: skip
        if score is None:
            if tuned.objective == "energy":
                raise AnswerIsNo("nothing here tells how much energy is used", hint="NVIDIA cards and Intel's RAPL do")
            return None
        return Taken(
            at=repeat.at or now_text(milliseconds=True),
            seconds=round(repeat.seconds, 3), score=score, output_tok_s=speed, ttft_ms=first,
            tpot_ms=each, peak_memory_bytes=used.memory_bytes, energy_j_per_token=used.energy_j,
        )  # fmt: skip

    # time

    def _wave_s(self, point: Point) -> float | None:
        trial = self.trials.get(point)
        return trial.best.seconds if trial is not None and trial.best is not None else None

    def _more(self, point: Point) -> bool:
        return self.left_s - self._expected_s(point) >= self._reserve_s()

    def _expected_s(self, point: Point) -> float:
        """What it takes to measure a setting once: weights and a start where it is not loaded, and a wave."""
        waves = self._wave_s(point) or self._wave_s(self.best) or 0.0
        return waves if point in self.pool.running else waves + self._conversion_s(point) + self._starting_s(point)

    def _starting_s(self, point: Point) -> float:
        """As it was seen; else as the plan's, with what each turned knob adds to it."""
        if point in self._start_s:
            return self._start_s[point]
        if point == OWN:
            return max(self._start_s.values(), default=0.0)
        return self._start_s.get((), 0.0) + math.fsum(self._added_s(knob, value) for knob, value in point)

    def _added_s(self, name: str, value: str) -> float:
        knob, usual = self._knob(name), self._start_s.get((), 0.0)
        planned_s = choice_of(knob, value).start_s
        seen = [took_s for point, took_s in self._start_s.items() if (name, value) in point]
        if not seen and planned_s and value == knob.own_choice and OWN in self._start_s:
            seen = [self._start_s[OWN]]
        return max(0.0, min(seen) - usual) if seen else planned_s

    def _knob(self, name: str) -> Knob:
        return next(one for one in self.knobs if one.name == name)

    def _is_restless(self, point: Point) -> bool:
        return point != OWN and any(choice_of(self._knob(name), value).restless for name, value in point)

    def _conversion_s(self, point: Point) -> float:
        plan, base = self._plan_at(point), self._plan_at(())
        if plan.weights == base.weights or plan.weights.label in self._convert_s:
            return 0.0
        steps = [step for step in self._conversions(plan) if step.kind == "convert" and step.seconds is not None]
        planned_s = math.fsum(step.seconds.value for step in steps if step.seconds is not None)
        return max(planned_s, max(self._convert_s.values(), default=0.0))

    def _reserve_s(self) -> float:
        """What the proof will take, by what the waves took."""
        checked = self._check_s if self.best not in self.qualities else 0.0
        sides, against = self._sides(), [one for one in (OWN, ()) if one != self.best]
        starts = math.fsum(self._starting_s(one) for one in sides if one not in self.pool.running)
        # One more look at answers: who wins last may have to be looked at.
        other_s = checked + self._check_s + starts
        return reserve_s(self._times(), self.best, against, budget_s=self.kept.budget_s, other_s=other_s)

    def _times(self) -> Times:
        """Of the sides of a proof; those that cannot stay loaded beside others start before each piece of work."""
        sides = self._sides()
        waves = {one: found for one in sides if (found := self._wave_s(one)) is not None}
        if OWN in sides and OWN not in self.trials and () in waves:
            waves[OWN] = waves[()]  # until it is seen
        alone = self._proof_room(sides) < len(sides)
        return Times(waves, {one: self._starting_s(one) for one in sides if alone or self._is_restless(one)})

    def _sides(self) -> list[Point]:
        """Of a proof, in their order."""
        failed = any(one.turn.knob == OWN_KNOB for one in self.kept.refused)
        known = {*self.trials, *([OWN] if self._hasty and not failed else [])}
        return [one for one in dict.fromkeys((OWN, self.best, ())) if one in known]

    def _say(self, what: str) -> None:
        own, best = self.trials.get(OWN), self.trials.get(self.best)
        ahead = ""
        if own is not None and best is not None and own.best is not None and best.best is not None:
            ahead = f"best so far {math.exp(best.best.score - own.best.score):.2f} × the engine's own defaults"
            ahead += f" ({words_at(self.best)})"
        self.teller.doing(what, ahead, max(0.0, self.left_s))

    # engines

    def _alive(self, point: Point) -> Alive:
        fresh = point not in self.pool.running
        for other in [one for one in self.pool.running if one != point and self._is_restless(one)]:
            self.pool.end(other)
        if fresh:
            self._say(f"starting {words_at(point)}")
        began, converting = self.clock(), math.fsum(self._convert_s.values())
        alive = self.pool.get(point, lambda: self._readied(point))
        if fresh:
            self._warm(alive, self._own_limit_s(1, REQUEST_LIMIT_S) if point == OWN else REQUEST_LIMIT_S)
            converted = math.fsum(self._convert_s.values()) - converting
            self._start_s[point] = self.clock() - began - converted
        return alive

    def _warm(self, alive: Alive, limit_s: float) -> None:
        run_loop(warmed(alive.target, self.kept.load, self._known(alive), limit_s))

    def _own_limit_s(self, rounds: int, most_s: float) -> float:
        """How long the engine's own defaults are waited for where they are seen in the proof alone."""
        if OWN in self.trials or (usual := self._wave_s(())) is None or not self._hasty:
            return most_s
        return min(most_s, max(HASTY_SLOW * rounds * usual, LEAST_LIMIT_S))

    def _plan_at(self, point: Point) -> Plan:
        plan = self.ready.plan if self.ready is not None else self.chosen.plan
        if point == OWN:
            return with_own_defaults(plan)
        found = turned_plan(plan, self.knobs, dict(point))
        return replaced(found, engine_version=self._built.version) if is_native(found.settings) else found

    def _readied(self, point: Point) -> Ready:
        if self.ready is None:
            raise RuntimeError("nothing is installed yet")
        plan, base = self._plan_at(point), self.ready
        folder = base.folder
        if plan.weights != base.plan.weights:
            began = self.clock()
            steps = self._conversions(plan)
            folder = prepare_weights(plan, steps, base.environment, self.progress, self.chosen.hardware)
            self._convert_s.setdefault(plan.weights.label, self.clock() - began)
        environment = self._built if is_native(plan.settings) else base.environment
        return Ready(replace(self.chosen, plan=plan), plan, environment, folder)

    @functools.cached_property
    def _built(self) -> Environment:
        """Beside the ready-made engine."""
        there = usable_build(self.chosen.engine, self.hardware, self.chosen.plan.settings.device)
        if there is None:
            raise OutsideFailed(f"the build of {self.chosen.engine.name} for this machine is not there any more")
        return there

    def _conversions(self, plan: Plan) -> tuple[Preparation, ...]:
        """With what the decision does first, such as to unpack the file that was asked for; it is not fetched then."""
        engine, decided = self.chosen.engine, self.chosen.decision.launch
        planned = engine.launch(self.chosen.plan, 0).prepare
        first = [step for step in (decided.prepare if decided is not None else ()) if step not in planned]
        made = {("download", step.where) for step in first}
        left_out = engine.by_hand(plan)
        steps = engine.launch(plan, 0).prepare
        return (*first, *(one for one in steps if one not in left_out and (one.kind, one.where) not in made))

    def _room(self, trial: Trial | None) -> int:
        """How many engines may be loaded at once; those that take a card's memory in advance come one by one."""
        settings: Settings = self.chosen.plan.settings
        if settings.memory_share is not None or settings.device not in ("cpu", "cuda"):
            return 1
        least = 2 if settings.device == "cpu" else 1
        each = trial.best.peak_memory_bytes if trial is not None and trial.best is not None else None
        if each is None:
            return least
        free = self._free_bytes() + each * len(self.pool.running)
        return max(least, min(MOST_ALIVE, int(MEMORY_SHARE * free / (1.5 * each))))

    def _free_bytes(self) -> int:
        """Of the memory that engines compute in; of several cards, what each has."""
        if self.chosen.plan.settings.device == "cpu":
            import psutil

            return int(psutil.virtual_memory().available)
        cards = [card.free_bytes for card in probe(recall=False).accelerators if card.vendor == "nvidia"]
        return min((one for one in cards if one is not None), default=0)

    def _proof_room(self, sides: Sequence[Point]) -> int:
        """How many engines may be loaded while it is proven: all sides, where their memory is known to fit."""
        if self.pool.most in (1, MOST_ALIVE):
            return self.pool.most
        peaks = {point: found.peak_memory_bytes for point, one in self.trials.items() if (found := one.best)}
        needed = [peaks.get(side) for side in sides]
        if None in needed:
            return self.pool.most
        free = self._free_bytes() + sum(peaks.get(one) or 0 for one in self.pool.running)
        fits = sum(one or 0 for one in needed) <= PROOF_MEMORY_SHARE * free
        return max(self.pool.most, len(sides)) if fits else self.pool.most

    # answers

    def _accept(self, point: Point, move: Move) -> bool:
        """A winner is kept only if it answers as the plan does, where it may answer otherwise."""
        if "answers" in self._knob(move.lever.name).risk:
            found = self._quality(point)
            if found.verdict != "ok":
                kind: RefusedKind = "answers"
                self._refuse(point, kind, found.note or "its answers could not be checked", self._evidence, move)
                return False
        self.best = point
        return True

    def _quality(self, point: Point) -> Quality:
        """Next tokens beside the reference's, or beside the plan's own where there is none."""
        alive, began = self._alive(point), self.clock()
        self._say(f"comparing answers of {words_at(point)}")
        plan = self.ready.plan if self.ready is not None else self.chosen.plan
        if not self.pairs:
            reference = reference_for(plan.source or plan.model)
            if reference is not None:
                self.pairs = self._affordable(reference.known())
            else:
                self.pairs = run_loop(basis_of(plan, plan, alive.where, most=ASKED)).pairs
                self.kept = replaced(
                    self.kept,
                    notes=(
                        *self.kept.notes,
                        "there is no reference for these weights: answers are held against the plan's own",
                    ),
                )
        said = run_loop(
            ask(alive.where.url, self.pairs, model=alive.where.name, key=alive.where.key, in_flight=ASK_AT_ONCE)
        )
        found = compare_answers(self.pairs, said)
        floor = floor_for(plan) if not self.kept.lossy else min(floor_for(plan), floor_for(alive.ready.plan))
        verdict, note = verdict_of(found, floor)
        self._evidence = evidence_words(found)
        quality = Quality(
            asked=found.asked,
            agreement=found.agreed / found.answered if found.answered else None,
            verdict=verdict,
            note=note,
        )
        self.qualities[point] = quality
        self._check_s = max(self._check_s, self.clock() - began)
        return quality

    def _affordable(self, known: Pairs) -> Pairs:
        """As many as are read in a part of the time; a few are asked in any case."""
        wanted, seen = quick_ones(known, ASKED), self.trials.get(())
        first = seen.best.ttft_ms if seen is not None and seen.best is not None else None
        if not first or not wanted:
            return wanted
        load = self.kept.load
        # As if one were read after the other: of those that are read together, each takes less.
        tokens_s = load.prompt_tokens * ((load.concurrency or 1) + 1) / 2 / (first / 1000)
        each_s = sum(one.tokens for _, one in wanted) / len(wanted) / tokens_s
        count = int(CHECK_SHARE * self.kept.budget_s / each_s)
        return wanted if count >= ASKED else quick_ones(known, max(LEAST_ASKED, count))

    _evidence: tuple[str, ...] = ()

    # what is never proposed again

    def _refused(self) -> set[tuple[str, str]]:
        known = store.refused_settings(self.kept.machine, self.kept.engine, path=self.path)
        same = [one for one in known if (one.engine_version, one.model) == (self.kept.engine_version, self.kept.model)]
        # What answers too loosely for one may be what another asks for.
        same = [one for one in same if one.kind != "answers" or not self.kept.lossy]
        self.kept = replaced(self.kept, refused=tuple(dict.fromkeys((*self.kept.refused, *same))))
        return {(one.turn.knob, one.turn.value) for one in same}

    def _refuse(
        self, point: Point, kind: RefusedKind, why_: str, evidence: tuple[str, ...], move: Move | None = None
    ) -> None:
        turned = turns_of(point)
        changed = [one for one in turned if (one.knob, one.value) not in self.best]
        turn = (
            Turn(knob=move.lever.name, value=move.value)
            if move is not None
            else (changed or list(turned)[-1:] or [Turn(knob="plan", value="as planned")])[0]
        )
        if point == OWN:
            turn = Turn(knob=OWN_KNOB, value="on")
        found = Refused(
            at=now_text(milliseconds=True),
            machine=self.kept.machine, engine=self.kept.engine, engine_version=self.kept.engine_version,
            model=self.kept.model, turn=turn, turned=turned, kind=kind, why=why_, evidence=evidence,
        )  # fmt: skip
        self.kept = replaced(self.kept, refused=(*self.kept.refused, found))
        if point not in ((), OWN):
            store.add_refused(found, self.path)
        self.teller.refused(found)

    def _last_refusal(self) -> str | None:
        return self.kept.refused[-1].why if self.kept.refused else None

    def _hints(self) -> set[str]:
        """Knobs that helped the same engine with this model elsewhere."""
        others = store.tunings(None, path=self.path)
        found = [one for one in others if one.engine == self.kept.engine and one.model == self.kept.model]
        return {step.turn.knob for one in found if one.id != self.kept.id for step in one.steps}

    # the proof

    def _prove(self, found: Climbed) -> None:
        self.best = found.best
        steps = tuple(
            Step(
                turn=Turn(knob=one.move.lever.name, value=one.move.value),
                before=one.before,
                gain=gain_figure(one.gains),
            )
            for one in found.kept
        )
        notes = self.kept.notes if found.whole else (*self.kept.notes, "time was up before everything was tried")
        self._keep(steps=steps, notes=notes)
        for step in steps:
            self.teller.kept(step)
        if self.best and self.best not in self.qualities:
            self._quality(self.best)
        repeats = self._turns()
        cells = {point: self._proof_cell(point, taken) for point, taken in repeats.items() if taken}
        order = [point for point in dict.fromkeys((OWN, (), self.best)) if point in cells]
        sides = tuple(self._side(point, cells[point]) for point in order)
        others = [point for point in (OWN, ()) if self.best in cells and point in cells and self.best]
        proofs = tuple(
            proof_of(self.kept, "own defaults" if one == OWN else "plan", cells[one], cells[self.best])
            for one in others
        )
        self.kept = replaced(self.kept, sides=sides, proofs=proofs)

    def _side(self, point: Point, cell: Cell) -> Side:
        plan = self._plan_at(point)
        return side_of(self._name(point), turns_of(point), plan, self.chosen.engine.launch(plan, 8080), cell)

    def _name(self, point: Point) -> SideName:
        return "own defaults" if point == OWN else "tuned" if point else "plan"

    def _turns(self) -> dict[Point, list[Repeat]]:
        """The sides' repeats: as many turns as it takes, or as there is time for."""
        if OWN in self._sides() and OWN not in self.trials:
            self._try_own()
        against = [one for one in self._sides() if one != self.best]
        self.pool.most = self._proof_room([self.best, *against])
        for point in list(self.pool.running):
            if point not in (self.best, *against):
                self.pool.end(point)
        times = self._times()
        starts = math.fsum(self._starting_s(one) for one in (self.best, *against) if one not in self.pool.running)
        late_s = LATE_SHARE * self.kept.budget_s
        shape = shaped(times, self.best, against, self.left_s + late_s - starts)
        repeats: dict[Point, dict[int, Repeat]] = {point: {} for point in shape.sides}
        torn: set[int] = set()

        def sound() -> dict[Point, list[Repeat]]:
            """Without the turns in which others had the processors, on every side alike."""
            return {
                side: [one for turn, one in taken.items() if turn not in torn] for side, taken in repeats.items()
            }  # fmt: skip

        def measure(side: Point, turn: int) -> float | None:
            self._say(f"proof, turn {turn + 1}: {self._name(side)}")
            began, limit_s, failed = self.clock(), self.left_s + 2 * late_s, len(self.kept.refused)
            if side == OWN:
                limit_s = self._own_limit_s(shape.rounds, limit_s)
            repeat = self._worked(side, turn, shape.rounds, limit_s)
            if repeat is None:
                del repeats[side]
                if side == OWN and len(self.kept.refused) == failed:
                    usual_s = shape.rounds * (self._wave_s(()) or 0.0)
                    words = f"own defaults had not done in {limit_s:.0f} s what takes the plan {usual_s:.0f}"
                    self.kept = replaced(self.kept, notes=(*self.kept.notes, words))
                return None
            repeats[side][turn] = repeat
            if self.chosen.plan.settings.device == "cpu" and (repeat.use.other_cpu_share or 0) > TOO_BUSY:
                torn.add(turn)
            self.teller.worked(self._name(side), turn, turn_of(repeat, self.kept.load), self.kept)
            return self.clock() - began

        def settled() -> set[Point]:
            taken = sound()
            if min(map(len, taken.values())) < LEAST_TURNS:
                return set()
            if not self.best:
                return set(against)
            best = self._proof_cell(self.best, taken[self.best])
            return {
                one for one in against
                if one in taken and is_settled(self.kept, self._proof_cell(one, taken[one]), best)
            }  # fmt: skip

        found = take_turns(shape, self.best, times, measure, settled, lambda: self.left_s, late_s)
        notes = [f"there was no time to hold it against {self._name(one)}" for one in against if one not in shape.sides]
        if found.cut and self.best:
            notes.append(f"time was up after {found.turns} turns of the proof")
        if torn:
            notes.append(f"of {found.turns} turns {len(torn)} do not count: others had the processors")
        self.kept = replaced(self.kept, notes=(*self.kept.notes, *notes))
        return sound()

    def _try_own(self) -> None:
        """In haste they come last; if they do not even start, that must not end the proof against the plan."""
        try:
            self._alive(OWN)
        except (OutsideFailed, AnswerIsNo, OSError) as error:
            self.pool.end(OWN)
            self._refuse(OWN, "start", str(error), ())

    def _proof_cell(self, point: Point, repeats: Sequence[Repeat]) -> Cell:
        cell = self._cell(point, self.kept.load, tuple(repeats), self._name(point))
        return replaced(cell, flags=flags_of(cell))

    def _worked(self, point: Point, turn: int, rounds: int, limit_s: float) -> Repeat | None:
        """One piece of work; the same prompts for each side of a turn."""
        load = self.kept.load
        try:
            alive = self._alive(point)
            work = Work(
                target=alive.target, load=load, prepared=self._known(alive), number=ROUND_PROOF + turn,
                limit_s=limit_s, rounds=rounds, check=self._own,
            )  # fmt: skip
            self._rest(point)
            with Watcher(alive.meters) as watcher:
                repeat = wave_apart(work, watcher.mark)
        except (OutsideFailed, AnswerIsNo) as error:
            died = point in self.pool.running and self.pool.running[point].started.died
            self.pool.end(point)
            self._refuse(point, "died" if died else "errors", why(error), _tail(error))
            return None
        if repeat is None:
            return None
        client = repeat.client
        if client.error_p50_ms is not None and client.error_p99_ms is not None:
            self._own = OwnError(
                p50_ms=client.error_p50_ms, p99_ms=client.error_p99_ms, streams=load.concurrency or 1, samples=0
            )
        use, engine = watcher.seen()
        return replaced(repeat, use=use, engine=engine)

    def _cell(self, point: Point, load: Load, repeats: tuple[Repeat, ...], name: str) -> Cell:
        plan = self._plan_at(point)
        subject = Subject(
            engine=plan.engine, engine_version=plan.engine_version, model=self.facts.name,
            quantization=plan.weights.label, weights_id=self.kept.weights_id, device=plan.settings.device,
            parallelism=plan.parallelism, settings=plan.settings,
            build="native" if is_native(plan.settings) else self.kept.build,
            start_s=self.trials[point].start_s if point in self.trials else None,
        )  # fmt: skip
        return Cell(
            id=f"{self.kept.id}:{name}:{load.concurrency}", run=self.kept.id,
            at=repeats[0].at or now_text(milliseconds=True),
            machine=self.kept.machine, subject=subject, load=load, repeats=repeats,
            # Each engine has answered before: a small request at the least.
            warmup=1, exact_output=all(one.exact_output for one in repeats),
            quality=self.qualities.get(point), notes=name, halt="most",
        )  # fmt: skip


@dataclass(frozen=True)
class _Used:
    memory_bytes: int | None
    energy_j: float | None
    """For each token."""
    swapped_bytes: int | None


def point_of(trial: Trial) -> Point:
    return OWN if trial.own_defaults else tuple(sorted((one.knob, one.value) for one in trial.turned))


def turns_of(point: Point) -> tuple[Turn, ...]:
    return () if point == OWN else tuple(Turn(knob=knob, value=value) for knob, value in point)


def words_at(point: Point) -> str:
    return "the engine's own defaults" if point == OWN else "the plan" if not point else words_of(turns_of(point))


def evidence_words(found: Comparison) -> tuple[str, ...]:
    return tuple(
        f"after …{one.prefix[-40:]!r} it says {one.got!r}, and not {one.expected!r}"
        for one in found.evidence[:LAST_LINES]
    )


def _tail(error: BedplateError) -> tuple[str, ...]:
    return tuple(part for part in (error.cause, error.hint) if part)


def _examiner(chosen: Planned) -> BuildExaminer | None:
    if not chosen.native:
        return None
    from bedplate.measure.builds import BuildExaminer

    return BuildExaminer()
