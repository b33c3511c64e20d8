"""Keeps engines with different settings loaded, so that they can be measured in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bedplate.measure.answers import EngineAddress
from bedplate.measure.gpu_reservation import GpuReservation
from bedplate.measure.load import LoadTarget
from bedplate.measure.watch import EngineMeters, make_meters
from bedplate.progress import SilentProgress
from bedplate.run.starting import EngineStart, RunningEngine, run_engine
from bedplate.tuning.search import Point


@dataclass
class TrialEngine:
    """A running engine with its load target and meters."""

    started: RunningEngine
    target: LoadTarget
    meters: EngineMeters
    stack: ExitStack

    @property
    def where(self) -> EngineAddress:
        return EngineAddress(self.started.url, self.started.key, self.started.start.plan.model.served_name)


@dataclass
class TuningPool:
    """Engines that stay loaded between measurements; the least recently used one is stopped first."""

    most: int
    reservation: GpuReservation | None = None
    running: dict[Point, TrialEngine] = field(default_factory=dict)

    def get(self, point: Point, make: Callable[[], EngineStart]) -> TrialEngine:
        if (one := self.running.pop(point, None)) is not None:
            if not one.started.has_died:
                self.running[point] = one  # now the most recently used
                return one
            one.stack.close()
        while len(self.running) >= self.most:
            self.end(next(iter(self.running)))
        start = make()
        stack = ExitStack()
        started = stack.enter_context(run_engine(start, SilentProgress()))
        target = LoadTarget.from_url(started.url, key=started.key, model=start.plan.model.served_name)
        self.running[point] = TrialEngine(started, target, make_meters(started, self.reservation), stack)
        return self.running[point]

    def end(self, point: Point) -> None:
        if (one := self.running.pop(point, None)) is not None:
            one.stack.close()

    def close(self) -> None:
        for point in list(self.running):
            self.end(point)
