"""Decide how often a measurement is repeated: until its confidence interval is narrow, or the time is over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bedplate.measure.statistics import compute_half_width
from bedplate.values.record import Record
from bedplate.values.run import Halt, Repeat

Figure = Callable[[Repeat], float | None]


class RepeatRule(Record, frozen=True, kw_only=True):
    half_width: float = 0.05
    """Largest half-width of the 95 % confidence interval over the repeats, as a share of the mean."""
    least: int = 3
    most: int = 8
    seconds: float = 180.0
    """Time limit of all repeats; a repeat that would exceed it is not started."""


def compute_delivered_tok_s(repeat: Repeat) -> float | None:
    """Output tokens per second within the measurement window."""
    return None if repeat.delivered_tokens is None else repeat.delivered_tokens / repeat.seconds


def find_halt_reason(values: Sequence[float | None], spent_s: float, rule: RepeatRule) -> Halt | None:
    """Why no further repeat is needed; `None`: another one is. Pure."""
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
    width = compute_half_width(values)
    return width is not None and width <= share * abs(statistics.fmean(values))
