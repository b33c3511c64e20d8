"""Engines under several settings that stay loaded side by side, so that they can be measured in turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bedplate.measure.answers import Where
from bedplate.measure.load import Target
from bedplate.measure.starting import Ready, Started, running
from bedplate.measure.watch import Meters, Metrics
from bedplate.run.progress import Silent
from bedplate.tuning.search import Point


@dataclass
class Alive:
    """An engine that answers, and what is read of it."""

    ready: Ready
    started: Started
    target: Target
    meters: Meters
    stack: ExitStack

    @property
    def where(self) -> Where:
        return Where(self.started.url, self.started.key, self.ready.plan.model.served_name)


@dataclass
class Pool:
    """Engines that stay loaded between their turns, the one that was used longest ago given up first."""

    most: int
    running: dict[Point, Alive] = field(default_factory=dict)

    def get(self, point: Point, make: Callable[[], Ready]) -> Alive:
        if (one := self.running.pop(point, None)) is not None:
            if not one.started.died:
                self.running[point] = one  # used last
                return one
            one.stack.close()
        while len(self.running) >= self.most:
            self.end(next(iter(self.running)))
        ready = make()
        stack = ExitStack()
        try:
            started = stack.enter_context(running(ready, Silent()))
        except BaseException:
            stack.close()
            raise
        meters = Meters()
        meters.pid = started.pid
        meters.on_card = ready.plan.settings.device not in ("cpu", "metal")
        host, port = started.backend.address or ("127.0.0.1", 0)
        meters.metrics = Metrics(f"http://{host}:{port}", started.backend.engine_key, ready.planned.engine.read)
        target = Target.of(started.url, key=started.key, model=ready.plan.model.served_name)
        self.running[point] = Alive(ready, started, target, meters, stack)
        return self.running[point]

    def end(self, point: Point) -> None:
        if (one := self.running.pop(point, None)) is not None:
            one.stack.close()

    def close(self) -> None:
        for point in list(self.running):
            self.end(point)
