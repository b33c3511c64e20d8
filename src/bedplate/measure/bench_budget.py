"""The time budget of `bench`: what a matrix needs, and what still fits into the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from bedplate.measure.quality import LIMIT_S as ANSWERS_S
from bedplate.measure.structured import USUAL_S as STRUCTURED_S
from bedplate.values.units import format_seconds

WARMUP_S = 2.0
LEAST_WINDOW_S = 1.0
OVERRUN = 1.1
"""How far the last requests may exceed the budget, as a factor. They are then cut off."""
ANSWERS_SHARE = 0.25
"""Share of the remaining time that the check of the answers may take."""
LEAST_ANSWERS_S = 10.0
PREPARE_S = 2.0
"""Requests before the first repeat of a cell, which find the exact prompt length."""
LEAST_TIMEOUT_S = 1.0


class TimeNeed(NamedTuple):
    """The time that a whole matrix needs, as far as it is known beforehand."""

    installs_s: float = 0.0
    starts_s: float = 0.0
    answers_s: float = 0.0
    cells_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)

    def describe(self) -> str:
        parts = zip(("installing and converting", "starts", "checks of answers", "cells"), self, strict=True)
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds >= 1)


def estimate_need(
    cells: int,
    turns: int,
    seconds: float,
    *,
    starts_s: float = 0.0,
    installs_s: float = 0.0,
    checks: int = 0,
    structured: int = 0,
) -> TimeNeed:
    """One repeat of every cell in every round. `starts_s`: all starts of one round.

    `checks`, `structured`: engines whose answers, and whose structured output, are checked.
    """
    each_s = PREPARE_S + WARMUP_S + seconds
    return TimeNeed(
        installs_s, turns * starts_s, checks * ANSWERS_S / 2 + structured * STRUCTURED_S, cells * turns * each_s
    )


class RepeatTimes(NamedTuple):
    seconds: float
    """Length of the measurement window."""
    most_s: float
    """Its longest extension."""
    timeout_s: float
    """Time limit of one request."""


class WallBudget:
    """A time limit for the whole run, with starts and checks. `limit_s` is None if the user gave none."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._began = clock()

    @property
    def left_s(self) -> float | None:
        return None if self.limit_s is None else self.limit_s - (self._clock() - self._began)

    @property
    def hard_left_s(self) -> float | None:
        """Time until requests are cut off."""
        left_s = self.left_s
        return None if left_s is None or self.limit_s is None else max(0.0, left_s + (OVERRUN - 1) * self.limit_s)

    def has_time_for(self, needed_s: float) -> bool:
        left_s = self.left_s
        return left_s is None or left_s >= needed_s

    def get_answers_limit_s(self, unchecked: int, most_s: float = ANSWERS_S) -> float | None:
        """The time limit for the check of one engine's answers; `None`: there is no time for it."""
        left_s = self.left_s
        if left_s is None:
            return most_s
        allowed_s = min(most_s, ANSWERS_SHARE * left_s / max(1, unchecked))
        return allowed_s if allowed_s >= LEAST_ANSWERS_S else None

    def fit_repeat(self, times: RepeatTimes, request_s: float, cells: int) -> RepeatTimes | None:
        """The repeat, shortened to an equal share of the time for the `cells` to come; `None`: it does not fit.

        `request_s` is the time of one request under this load: the last ones end that long after the window.
        """
        left_s, hard_left_s = self.left_s, self.hard_left_s
        if left_s is None or hard_left_s is None:
            return times
        around_s = WARMUP_S + request_s
        if left_s < around_s + LEAST_WINDOW_S:
            return None
        seconds = max(LEAST_WINDOW_S, min(times.seconds, left_s / max(1, cells) - around_s))
        most_s = max(seconds, min(times.most_s, left_s - around_s))
        timeout_s = max(LEAST_TIMEOUT_S, min(times.timeout_s, hard_left_s - WARMUP_S - most_s))
        return RepeatTimes(seconds, most_s, timeout_s)

    def describe_spent(self, needed_s: float = 0.0) -> str:
        """Why there is no time; `needed_s` is what was to be done."""
        budget = f"the budget of {format_seconds(self.limit_s or 0.0)}"
        left_s = self.left_s or 0.0
        if needed_s <= 0 or left_s < 1:
            return f"{budget} is used up"
        return f"it takes about {format_seconds(needed_s)}, and {format_seconds(left_s)} of {budget} are left"
