"""Compare the answers of two engines, each with its reference: worse, equivalent within a margin, or not proven."""

from __future__ import annotations

import math
import statistics

from bedplate.judge.effect import compute_share_difference
from bedplate.measure.statistics import compute_wilson_interval
from bedplate.values.record import Figure
from bedplate.values.run import Quality
from bedplate.values.verdict import QualityEffect, QualityMetric, QualityOutcome

CONFIDENCE = 0.95
WORSE: dict[QualityMetric, float] = {"agreement": 0.05, "perplexity": 0.05}
"""Differences in quality larger than another order of floating-point additions explains."""
MARGINS: dict[QualityMetric, float] = {"agreement": 0.10, "perplexity": 0.05}
"""Answers are equivalent if the interval stays above minus this. 6-bit weights lose less than 10 points of agreement,
and 5-bit weights more (docs/agreement.md)."""


def compare_answers(mine: Quality | None, theirs: Quality | None) -> tuple[QualityEffect, ...]:
    """How much better the second quality is; empty if one side was not compared with a reference."""
    if mine is None or theirs is None or "unchecked" in (mine.verdict, theirs.verdict):
        return ()
    found = (_compare_agreement(mine, theirs), _compare_perplexity(mine, theirs))
    return tuple(one for one in found if one is not None)


def explain_worse_answers(mine: Quality, theirs: Quality) -> str | None:
    """Why the second quality is significantly worse; `None` if it is not."""
    found = (one for one in compare_answers(mine, theirs) if one.outcome == "worse")
    return next((describe_values(one) for one in found), None)


def describe_values(one: QualityEffect) -> str:
    if one.metric == "agreement":
        return f"greedy-token agreement {one.b:.0%} instead of {one.a:.0%}"
    return f"perplexity {one.b:.2f} times that of the reference instead of {one.a:.2f} times"


def describe_interval(one: QualityEffect) -> str:
    """Such as "−6 … +1 points (95 % interval), margin 10 points"."""
    unit = "points" if one.metric == "agreement" else "%"
    ends = " … ".join(f"{100 * end:+.0f}".replace("-", "−") for end in (one.change.low, one.change.high))
    return f"{ends} {unit} (95 % interval), margin {100 * one.margin:.0f} {unit}"


def _compare_agreement(mine: Quality, theirs: Quality) -> QualityEffect | None:
    if mine.agreement is None or theirs.agreement is None or not mine.asked or not theirs.asked:
        return None
    a, b = (mine.agreement, mine.asked), (theirs.agreement, theirs.asked)
    low, high = compute_share_difference(a, b, CONFIDENCE)
    apart = compute_wilson_interval(*b, CONFIDENCE)[1] < compute_wilson_interval(*a, CONFIDENCE)[0]
    words = f"{mine.asked} and {theirs.asked} prefixes"
    return _make_effect("agreement", (a[0], b[0]), (b[0] - a[0], low, high), apart, words)


def _compare_perplexity(mine: Quality, theirs: Quality) -> QualityEffect | None:
    """Relative to the reference's perplexity on the same part of the text, because endpoints report different parts."""
    own, other = _compute_relative_perplexity(mine), _compute_relative_perplexity(theirs)
    if own is None or other is None:
        return None
    errors = (mine.perplexity_error, theirs.perplexity_error)
    value = math.log(own / other)
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    # Runs of earlier versions have no standard error. Their values decide alone, as they did then.
    reach = 0.0 if None in errors else z * math.hypot(*(error or 0.0 for error in errors))
    change = tuple(math.expm1(end) for end in (value, value - reach, value + reach))
    words = "the same places of the text" if reach else "no standard error"
    return _make_effect("perplexity", (own, other), change, change[2] < 0, words)  # type: ignore[arg-type]


def _compute_relative_perplexity(quality: Quality) -> float | None:
    if quality.perplexity is None or quality.reference_perplexity is None:
        return None
    return quality.perplexity / quality.reference_perplexity


def _make_effect(
    metric: QualityMetric,
    values: tuple[float, float],
    change: tuple[float, float, float],
    is_significant: bool,
    source: str,
) -> QualityEffect:
    value, low, high = change
    margin, worse = MARGINS[metric], -WORSE[metric] if metric == "agreement" else 1 / (1 + WORSE[metric]) - 1
    outcome: QualityOutcome = "equivalent"
    if value < worse and is_significant:
        outcome = "worse"
    elif low > 0:
        outcome = "better"
    elif low < -margin:
        outcome = "not proven"
    figure = Figure(value=value, low=low, high=high, basis="measured", source=source)
    return QualityEffect(
        metric=metric, a=values[0], b=values[1], change=figure, margin=margin, outcome=outcome
    )  # fmt: skip
