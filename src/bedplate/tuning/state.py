"""The state of a running tuning: its inputs, its results so far, and its record in the store."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

from bedplate import store
from bedplate.engines.knobs import apply_values, find_choice, is_native, with_engine_defaults
from bedplate.errors import ExternalFailure
from bedplate.measure.moments import format_now
from bedplate.progress import Progress
from bedplate.run.environments import EngineEnvironment
from bedplate.run.native import find_usable_build
from bedplate.run.ready import ModelDecision, PreparedModel
from bedplate.tuning.points import OWN, OWN_KNOB, describe_point, make_changes, make_point
from bedplate.tuning.search import Move, Point, TuningListener, find_front
from bedplate.values import Hardware, Model, Plan, Preparation, replace_fields
from bedplate.values.run import Cell, Load, Quality, Repeat, Subject
from bedplate.values.tuning import (
    RefusedKind,
    RefusedSetting,
    SettingChange,
    Trial,
    TunableSetting,
    TuningRun,
    describe_changes,
)


class TuningState:
    """State that the budget, the trials and the proof of one tuning share."""

    def __init__(
        self,
        hardware: Hardware,
        facts: Model,
        chosen: ModelDecision,
        knobs: tuple[TunableSetting, ...],
        kept: TuningRun,
        progress: Progress,
        teller: TuningListener,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hardware, self.facts, self.chosen, self.knobs = hardware, facts, chosen, knobs
        self.kept, self.progress, self.teller, self.path, self.clock = kept, progress, teller, path, clock
        self.ready: PreparedModel | None = None
        self.best: Point = ()
        self.trials: dict[Point, Trial] = {make_point(one): one for one in kept.trials}
        self.qualities: dict[Point, Quality] = {}
        self._spent_before = kept.spent_s
        self._began = clock()

    # time

    def start_clock(self) -> None:
        """Start the budget now: installation and conversion before it do not count."""
        self._began = self.clock()

    @property
    def spent_s(self) -> float:
        return self._spent_before + self.clock() - self._began

    @property
    def left_s(self) -> float:
        return self.kept.budget_s - self.spent_s

    # records

    def change(self, **changes: object) -> None:
        self.kept = replace_fields(self.kept, **changes)

    def note(self, *texts: str) -> None:
        self.change(notes=(*self.kept.notes, *texts))

    def keep(self, **changes: object) -> None:
        trials = tuple(self.trials.values())
        count = sum(len(one.taken) for one in trials)
        wrong = {one.turned for one in self.kept.refused}
        sound = [one for one in trials if one.own_defaults or not one.turned or one.turned not in wrong]
        front = find_front(sound, lambda one: "own defaults" if one.own_defaults else describe_changes(one.turned))
        self.kept = replace_fields(
            self.kept, trials=trials, measurements=count, spent_s=round(self.spent_s, 1), front=front, **changes
        )
        store.add_tuning(self.kept, self.path)

    def say(self, what: str) -> None:
        own, best = self.trials.get(OWN), self.trials.get(self.best)
        ahead = ""
        if own is not None and best is not None and own.best is not None and best.best is not None:
            ahead = f"best so far {math.exp(best.best.score - own.best.score):.2f} × the engine defaults"
            ahead += f" ({describe_point(self.best)})"
        self.teller.report_activity(what, ahead, max(0.0, self.left_s))

    # plans

    @property
    def plan(self) -> Plan:
        return self.ready.plan if self.ready is not None else self.chosen.plan

    def make_plan_at(self, point: Point) -> Plan:
        if point == OWN:
            return with_engine_defaults(self.plan)
        found = apply_values(self.plan, self.knobs, dict(point))
        return (
            replace_fields(found, engine_version=self.native_environment.version)
            if is_native(found.settings)
            else found
        )

    @functools.cached_property
    def native_environment(self) -> EngineEnvironment:
        """The environment of the native build."""
        there = find_usable_build(self.chosen.engine, self.hardware, self.chosen.plan.settings.device)
        if there is None:
            raise ExternalFailure(f"the native build of {self.chosen.engine.name} no longer exists")
        return there

    def list_conversions(self, plan: Plan) -> tuple[Preparation, ...]:
        """List a plan's preparation steps, after those of the decision, such as dequantizing the requested file."""
        engine, decided = self.chosen.engine, self.chosen.decision.launch
        planned = engine.launch(self.chosen.plan, 0).prepare
        first = [step for step in (decided.prepare if decided is not None else ()) if step not in planned]
        made = {("download", step.where) for step in first}
        left_out = engine.list_build_steps(plan)
        steps = engine.launch(plan, 0).prepare
        return (*first, *(one for one in steps if one not in left_out and (one.kind, one.where) not in made))

    def get_setting(self, name: str) -> TunableSetting:
        return next(one for one in self.knobs if one.name == name)

    def is_restless(self, point: Point) -> bool:
        return point != OWN and any(find_choice(self.get_setting(name), value).restless for name, value in point)

    # refused settings, which are not tried again

    def refuse(
        self, point: Point, kind: RefusedKind, why: str, evidence: tuple[str, ...], move: Move | None = None
    ) -> None:
        turned = make_changes(point)
        changed = [one for one in turned if (one.knob, one.value) not in self.best]
        turn = (
            SettingChange(knob=move.lever.name, value=move.value)
            if move is not None
            else (changed or list(turned)[-1:] or [SettingChange(knob="plan", value="as planned")])[0]
        )
        if point == OWN:
            turn = SettingChange(knob=OWN_KNOB, value="on")
        found = RefusedSetting(
            at=format_now(milliseconds=True),
            machine=self.kept.machine, engine=self.kept.engine, engine_version=self.kept.engine_version,
            model=self.kept.model, turn=turn, turned=turned, kind=kind, why=why, evidence=evidence,
        )  # fmt: skip
        self.kept = replace_fields(self.kept, refused=(*self.kept.refused, found))
        if point not in ((), OWN):
            store.add_refused(found, self.path)
        self.teller.report_refusal(found)

    def get_last_refusal(self) -> str | None:
        return self.kept.refused[-1].why if self.kept.refused else None

    def make_cell(self, point: Point, load: Load, repeats: tuple[Repeat, ...], name: str) -> Cell:
        plan = self.make_plan_at(point)
        subject = Subject(
            engine=plan.engine, engine_version=plan.engine_version, model=self.facts.name,
            quantization=plan.weights.label, weights_id=self.kept.weights_id, device=plan.settings.device,
            parallelism=plan.parallelism, settings=plan.settings,
            build="native" if is_native(plan.settings) else self.kept.build,
            start_s=self.trials[point].start_s if point in self.trials else None,
        )  # fmt: skip
        return Cell(
            id=f"{self.kept.id}:{name}:{load.concurrency}", run=self.kept.id,
            at=repeats[0].at or format_now(milliseconds=True),
            machine=self.kept.machine, subject=subject, load=load, repeats=repeats,
            # Each engine has answered at least one small request before.
            warmup=1, exact_output=all(one.exact_output for one in repeats),
            quality=self.qualities.get(point), notes=name, halt="most",
        )  # fmt: skip
