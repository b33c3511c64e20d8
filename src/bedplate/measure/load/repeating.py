"""How often a stretch is repeated: until its figure is known well enough, or time is up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bedplate.measure.statistics import half_width
from bedplate.values.record import Record
from bedplate.values.run import Halt, Repeat

Figure = Callable[[Repeat], float | None]


class Rule(Record, frozen=True, kw_only=True):
    half_width: float = 0.05
    """Of the mean: how far the 95 % confidence interval over the repeats may reach to each side."""
    least: int = 3
    most: int = 8
    seconds: float = 180.0
    """For all repeats; one that would not end within it is not begun, once there are enough."""


def output_tok_s(repeat: Repeat) -> float | None:
    """Output tokens that came within the measured time, for each second of it."""
    return None if repeat.delivered_tokens is None else repeat.delivered_tokens / repeat.seconds


def halt(values: Sequence[float | None], spent_s: float, rule: Rule) -> Halt | None:
    """Why there should be no further repeat; `None`: there should be one. Pure."""
    done = len(values)
    if not done:
        return None
    if done >= rule.most:
        return "most"
    known = [value for value in values if value is not None]
    if done >= rule.least and is_narrow(known, rule.half_width):
        return "narrow"
    if spent_s + spent_s / done > rule.seconds:
        return "time"
    if done >= rule.least and len(known) < done:
        return "unknown"
    return None


def is_narrow(values: Sequence[float], share: float) -> bool:
    width = half_width(values)
    return width is not None and width <= share * abs(statistics.fmean(values))
