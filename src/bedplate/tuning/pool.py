"""Keeps engines with different settings loaded, so that they can be measured in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bedplate.measure.answers import Where
from bedplate.measure.load import Target
from bedplate.measure.watch import Meters, meters_of
from bedplate.progress import Silent
from bedplate.run.starting import EngineStart, Started, running
from bedplate.tuning.search import Point


@dataclass
class Alive:
    """A running engine with its load target and meters."""

    started: Started
    target: Target
    meters: Meters
    stack: ExitStack

    @property
    def where(self) -> Where:
        return Where(self.started.url, self.started.key, self.started.start.plan.model.served_name)


@dataclass
class Pool:
    """Engines that stay loaded between measurements; the least recently used one is stopped first."""

    most: int
    running: dict[Point, Alive] = field(default_factory=dict)

    def get(self, point: Point, make: Callable[[], EngineStart]) -> Alive:
        if (one := self.running.pop(point, None)) is not None:
            if not one.started.died:
                self.running[point] = one  # now the most recently used
                return one
            one.stack.close()
        while len(self.running) >= self.most:
            self.end(next(iter(self.running)))
        start = make()
        stack = ExitStack()
        started = stack.enter_context(running(start, Silent()))
        target = Target.of(started.url, key=started.key, model=start.plan.model.served_name)
        self.running[point] = Alive(started, target, meters_of(started), stack)
        return self.running[point]

    def end(self, point: Point) -> None:
        if (one := self.running.pop(point, None)) is not None:
            one.stack.close()

    def close(self) -> None:
        for point in list(self.running):
            self.end(point)
