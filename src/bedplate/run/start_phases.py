"""How long each phase of an engine's start takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from bedplate.values.endpoint import StartPhase, StartPhaseTime
from bedplate.values.units import format_seconds

LEAST_TOLD_S = 1.0
WORDS: dict[StartPhase, str] = {
    "start": "starting its processes",
    "load": "loading weights",
    "compile": "compiling",
    "capture": "capturing CUDA graphs",
    "warm-up": "warming up",
}


class StartPhases:
    """The phases of the current start, or of the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[StartPhase, float] = {}
        self._since = 0.0
        self.current: StartPhase | None = None
        """`None` before a start and after it, and for an engine whose log does not show its phases."""

    def begin(self, known: bool) -> None:
        """`known`: whether the engine's log shows its phases."""
        self._seconds, self._since = {}, self._clock()
        self.current = "start" if known else None

    def enter(self, phase: StartPhase) -> None:
        if self.current is not None and phase != self.current:
            self._add_time()
            self.current = phase

    def end(self) -> None:
        if self.current is not None:
            self._add_time()
            self.current = None

    def _add_time(self) -> None:
        now = self._clock()
        if self.current is not None:
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self._since = now

    @property
    def current_s(self) -> float:
        """Time in the current phase."""
        return self._clock() - self._since

    def list_times(self) -> tuple[StartPhaseTime, ...]:
        """The phases that have ended, in the order in which they began."""
        return tuple(StartPhaseTime(phase=phase, seconds=round(took, 2)) for phase, took in self._seconds.items())

    def describe_current(self) -> str | None:
        return f"{WORDS[self.current]} for {format_seconds(self.current_s)}" if self.current is not None else None


class PhaseTeller:
    """Reports how long a phase took when it ends."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._current: StartPhase | None = None
        self._before: dict[StartPhase, float] = {}

    def update(self, phases: StartPhases) -> None:
        if phases.current == self._current:
            return
        times = {one.phase: one.seconds for one in phases.list_times()}
        if self._current is not None:
            # A phase may come back, such as the warm-up before and after the capture of graphs.
            took_s = times.get(self._current, 0.0) - self._before.get(self._current, 0.0)
            if took_s >= LEAST_TOLD_S:
                self._tell(f"{self._name}: {WORDS[self._current]} took {format_seconds(took_s)}")
        self._before, self._current = times, phases.current
