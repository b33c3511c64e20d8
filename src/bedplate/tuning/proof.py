"""The proof of a tuning: compares the best settings with the plan and the engine defaults in interleaved rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bedplate.errors import ExternalFailure, NotPossible
from bedplate.measure.burst import BurstCall, send_burst_apart
from bedplate.measure.flags import TOO_BUSY, flag_cell
from bedplate.measure.load import ClientErrorFigures
from bedplate.measure.watch import Watcher
from bedplate.tuning.answers import AnswerChecker
from bedplate.tuning.budget import Budget
from bedplate.tuning.comparison import is_settled, make_proof, make_side, summarize_round
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN, describe_point, make_changes
from bedplate.tuning.rounds import LATE_SHARE, LEAST_TURNS, choose_shape, run_rounds
from bedplate.tuning.search import Point, SearchResult, make_gain_figure
from bedplate.tuning.state import TuningState
from bedplate.tuning.trials import list_cause_and_hint
from bedplate.values import replace_fields
from bedplate.values.evidence import find_exclusions
from bedplate.values.run import Cell, Repeat
from bedplate.values.tuning import ComparedSettings, RefusedKind, SettingChange, SideName, TuningStep

ROUND_PROOF = 100_000
"""First round number of the proof: its prompts differ from those of the search, which may be cached."""


class Prover:
    def __init__(self, state: TuningState, budget: Budget, engines: Engines, answers: AnswerChecker) -> None:
        self.state, self.budget, self.engines, self.answers = state, budget, engines, answers
        self._own: ClientErrorFigures | bool = True
        """The measurement error of the load generator, once it is known."""

    def prove(self, found: SearchResult) -> None:
        self.state.best = found.best
        steps = tuple(
            TuningStep(
                turn=SettingChange(knob=one.move.lever.name, value=one.move.value),
                before=one.before,
                gain=make_gain_figure(one.gains),
            )
            for one in found.kept
        )
        if not found.whole:
            self.state.note("the budget was used up before all settings were tried")
        self.state.keep(steps=steps)
        for step in steps:
            self.state.teller.report_step(step)
        if self.state.best and self.state.best not in self.state.qualities:
            self.answers.check(self.state.best)
        repeats = self.measure_sides()
        cells = {point: self._make_cell(point, taken) for point, taken in repeats.items() if taken}
        order = [point for point in dict.fromkeys((OWN, (), self.state.best)) if point in cells]
        sides = tuple(self._make_side(point, cells[point]) for point in order)
        others = [point for point in (OWN, ()) if self.state.best in cells and point in cells and self.state.best]
        proofs = tuple(
            make_proof(self.state.kept, "own defaults" if one == OWN else "plan", cells[one], cells[self.state.best])
            for one in others
        )
        used = [cells[point] for point in ((), self.state.best) if point in cells] if self.state.best else []
        exclusions = tuple(dict.fromkeys(one for cell in used for one in find_exclusions(cell)))
        if exclusions:
            self.state.note(f"plans do not use this tuning: {'; '.join(one.text for one in exclusions)}")
        self.state.change(sides=sides, proofs=proofs, exclusions=exclusions)

    def _make_side(self, point: Point, cell: Cell) -> ComparedSettings:
        plan = self.state.make_plan_at(point)
        return make_side(name_side(point), make_changes(point), plan, self.state.chosen.engine.launch(plan, 8080), cell)

    def measure_sides(self) -> dict[Point, list[Repeat]]:
        """Measure the sides in as many rounds as the proof needs or the budget allows; return their repeats."""
        if OWN in self.budget.list_proof_sides() and OWN not in self.state.trials:
            self._try_defaults()
        against = [one for one in self.budget.list_proof_sides() if one != self.state.best]
        self.engines.pool.most = self.budget.count_proof_engines([self.state.best, *against])
        for point in list(self.engines.pool.running):
            if point not in (self.state.best, *against):
                self.engines.pool.end(point)
        times = self.budget.estimate_proof_times()
        waiting = [one for one in (self.state.best, *against) if one not in self.engines.pool.running]
        starts = math.fsum(self.budget.estimate_start_s(one) for one in waiting)
        late_s = LATE_SHARE * self.state.kept.budget_s
        shape = choose_shape(times, self.state.best, against, self.state.left_s + late_s - starts)
        repeats: dict[Point, dict[int, Repeat]] = {point: {} for point in shape.sides}
        disturbed: set[int] = set()
        on_cpu = self.state.chosen.plan.settings.device == "cpu"

        def select_undisturbed() -> dict[Point, list[Repeat]]:
            """Leave out, for every side, the rounds in which other processes used the engine's device."""
            return {
                side: [one for turn, one in taken.items() if turn not in disturbed] for side, taken in repeats.items()
            }  # fmt: skip

        def measure(side: Point, turn: int) -> float | None:
            self.state.say(f"proof, round {turn + 1}: {describe_point(side)}")
            began, limit_s, failed = self.state.clock(), self.state.left_s + 2 * late_s, len(self.state.kept.refused)
            if side == OWN:
                limit_s = self.budget.get_defaults_limit_s(shape.rounds, limit_s)
            repeat = self.measure_side(side, turn, shape.rounds, limit_s)
            if repeat is None:
                del repeats[side]
                if side == OWN and len(self.state.kept.refused) == failed:
                    usual_s = shape.rounds * (self.budget.get_wave_s(()) or 0.0)
                    words = f"the engine defaults took over {limit_s:.0f} s for a round; the plan takes {usual_s:.0f} s"
                    self.state.note(words)
                return None
            repeats[side][turn] = repeat
            if is_disturbed(repeat, on_cpu=on_cpu):
                disturbed.add(turn)
            self.state.teller.report_round(
                name_side(side), turn, summarize_round(repeat, self.state.kept.load), self.state.kept
            )
            return self.state.clock() - began

        def find_settled() -> set[Point]:
            taken = select_undisturbed()
            if min(map(len, taken.values())) < LEAST_TURNS:
                return set()
            if not self.state.best:
                return set(against)
            best = self._make_cell(self.state.best, taken[self.state.best])
            return {
                one for one in against
                if one in taken and is_settled(self.state.kept, self._make_cell(one, taken[one]), best)
            }  # fmt: skip

        found = run_rounds(shape, self.state.best, times, measure, find_settled, lambda: self.state.left_s, late_s)
        notes = [
            f"there was no time to compare with {describe_point(one)}" for one in against if one not in shape.sides
        ]
        if found.cut and self.state.best:
            notes.append(f"the budget was used up after {found.turns} rounds of the proof")
        if disturbed:
            device = "CPU" if on_cpu else "GPU"
            notes.append(f"{len(disturbed)} of {found.turns} rounds do not count: other processes used the {device}")
        self.state.note(*notes)
        return select_undisturbed()

    def _try_defaults(self) -> None:
        """Start the engine defaults late, with a short budget; if that fails, the proof against the plan continues."""
        try:
            self.engines.get(OWN)
        except (ExternalFailure, NotPossible, OSError) as error:
            self.engines.drop(OWN)
            self.state.refuse(OWN, "start", str(error), ())

    def _make_cell(self, point: Point, repeats: Sequence[Repeat]) -> Cell:
        cell = self.state.make_cell(point, self.state.kept.load, tuple(repeats), name_side(point))
        return replace_fields(cell, flags=flag_cell(cell))

    def measure_side(self, point: Point, turn: int, rounds: int, limit_s: float) -> Repeat | None:
        """Measure one side in one round; all sides of a round get the same prompts."""
        load = self.state.kept.load
        try:
            alive = self.engines.get(point)
            work = BurstCall(
                target=alive.target, load=load, prepared=self.engines.prepare_target(alive), number=ROUND_PROOF + turn,
                limit_s=limit_s, rounds=rounds, check=self._own,
            )  # fmt: skip
            self.engines.wait_until_idle(point)
            with Watcher(alive.meters) as watcher:
                repeat = send_burst_apart(work, watcher.mark)
        except (ExternalFailure, NotPossible) as error:
            kind: RefusedKind = "died" if self.engines.drop(point) else "errors"
            self.state.refuse(point, kind, error.summary, list_cause_and_hint(error))
            return None
        if repeat is None:
            return None
        client = repeat.client
        if client.error_p50_ms is not None and client.error_p99_ms is not None:
            self._own = ClientErrorFigures(
                p50_ms=client.error_p50_ms, p99_ms=client.error_p99_ms, streams=load.concurrency or 1, samples=0
            )
        use, engine = watcher.summarize_readings()
        return replace_fields(repeat, use=use, engine=engine)


def name_side(point: Point) -> SideName:
    return "own defaults" if point == OWN else "tuned" if point else "plan"


def is_disturbed(repeat: Repeat, *, on_cpu: bool) -> bool:
    """Whether other processes used too much of the device that the engine runs on."""
    use = repeat.use
    return bool(use.other_measurements) or ((use.other_cpu_share if on_cpu else use.other_gpu_share) or 0.0) > TOO_BUSY
