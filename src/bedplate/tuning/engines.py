"""The engines of a tuning: starts them with the settings of a point, warms them up and keeps them loaded."""

from __future__ import annotations

import math

from bedplate.engines.knobs import is_native
from bedplate.measure.burst import send_warm_up
from bedplate.measure.load import PreparedEndpoint, prepare
from bedplate.measure.load import run as run_loop
from bedplate.run.prepare import prepare as prepare_weights
from bedplate.run.starting import EngineStart
from bedplate.tuning.budget import REQUEST_LIMIT_S, Budget
from bedplate.tuning.points import OWN, describe_point
from bedplate.tuning.pool import TrialEngine, TuningPool
from bedplate.tuning.search import Point
from bedplate.tuning.state import TuningState

MOST_REST_S, REST_LOOK_S, AT_REST_PERCENT = 2.0, 0.1, 20.0


class Engines:
    """Engines by the point whose settings they run with."""

    def __init__(self, state: TuningState, budget: Budget, pool: TuningPool) -> None:
        self.state, self.budget, self.pool = state, budget, pool
        self.prepared: PreparedEndpoint | None = None
        self._last: Point | None = None

    def get(self, point: Point) -> TrialEngine:
        """Return a running, warmed-up engine; record its start-up time in the budget."""
        fresh = point not in self.pool.running
        for other in [one for one in self.pool.running if one != point and self.state.is_restless(one)]:
            self.pool.end(other)
        if fresh:
            self.state.say(f"starting {describe_point(point)}")
        began, converting = self.state.clock(), math.fsum(self.budget.convert_s.values())
        alive = self.pool.get(point, lambda: self.start_at(point))
        if fresh:
            self.warm(alive, self.budget.get_defaults_limit_s(1, REQUEST_LIMIT_S) if point == OWN else REQUEST_LIMIT_S)
            converted = math.fsum(self.budget.convert_s.values()) - converting
            self.budget.start_s[point] = self.state.clock() - began - converted
        return alive

    def warm(self, alive: TrialEngine, limit_s: float) -> None:
        run_loop(send_warm_up(alive.target, self.state.kept.load, self.prepare_target(alive), limit_s))

    def start_at(self, point: Point) -> EngineStart:
        if self.state.ready is None:
            raise RuntimeError("nothing is installed yet")
        plan, base = self.state.make_plan_at(point), self.state.ready
        folder = base.folder
        if plan.weights != base.plan.weights:
            began = self.state.clock()
            steps = self.state.list_conversions(plan)
            folder = prepare_weights(plan, steps, base.environment, self.state.progress, self.state.chosen.hardware)
            self.budget.convert_s.setdefault(plan.weights.label, self.state.clock() - began)
        environment = self.state.native_environment if is_native(plan.settings) else base.environment
        return EngineStart(plan, environment, folder)

    def prepare_target(self, alive: TrialEngine) -> PreparedEndpoint:
        """Prepare the load generator for the endpoint once: all settings of one engine tokenize alike."""
        if self.prepared is None:
            self.prepared = run_loop(prepare(alive.target, self.state.kept.load))
        return self.prepared

    def wait_until_idle(self, point: Point) -> None:
        """Wait until the engine that was measured before is idle: some spin for a second after the last request."""
        last, self._last = self._last, point
        if last == point or len(self.pool.running) < 2:
            return
        import psutil

        until = self.state.clock() + MOST_REST_S
        while self.state.clock() < until and psutil.cpu_percent(interval=REST_LOOK_S) > AT_REST_PERCENT:
            pass

    def drop(self, point: Point) -> bool:
        """Stop an engine; return whether it had already exited."""
        died = point in self.pool.running and self.pool.running[point].started.has_died
        self.pool.end(point)
        return died
