"""Statistics: percentiles, Student's t, Wilson's interval, and estimates that are robust against outliers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

from bedplate.values.statistics import compute_quantile
from bedplate.values.summary import Percentiles

PERCENTILES = (0.90, 0.95, 0.99)


def compute_percentiles(values: Sequence[float]) -> Percentiles | None:
    """`None` for no values. A percentile beyond which less than one sample is expected is `None`."""
    if not values:
        return None
    ordered = sorted(values)
    shown = [compute_quantile(ordered, share) if is_shown(len(ordered), share) else None for share in PERCENTILES]
    return Percentiles(
        count=len(ordered), mean=math.fsum(ordered) / len(ordered), p50=compute_quantile(ordered, 0.5), p90=shown[0],
        p95=shown[1], p99=shown[2], max=ordered[-1],
    )  # fmt: skip


def is_shown(count: int, share: float) -> bool:
    return count * (1 - share) >= 1 - 1e-9


def compute_student_cdf(value: float, degrees: int) -> float:
    """Student's t distribution for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, 0.0
        for number in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * number) / (2 * number + 1)
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 0.0
        for number in range(1, degrees // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * number - 1) / (2 * number)
        inside = sine * total
    return 0.5 + inside / 2


@lru_cache(maxsize=512)
def compute_student_t(confidence: float, degrees: int) -> float:
    """The half-width of the confidence interval of a mean, in standard errors."""
    if degrees < 1:
        return math.inf
    wanted = 0.5 + confidence / 2
    if degrees > 200:
        return statistics.NormalDist().inv_cdf(wanted)
    low, high = 0.0, 1.0
    while compute_student_cdf(high, degrees) < wanted and high < 1e9:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_student_cdf(middle, degrees) < wanted else (low, middle)
    return (low + high) / 2


def compute_half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half-width of the confidence interval of the mean; `None` for a single value."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return compute_student_t(confidence, len(values) - 1) * error


def compute_serial_correlation(values: Sequence[float]) -> float:
    """Correlation of each value with the next one; 0 for fewer than four values."""
    if len(values) < 4:
        return 0.0
    mean = math.fsum(values) / len(values)
    off = [value - mean for value in values]
    spread = math.fsum(one * one for one in off)
    return math.fsum(a * b for a, b in itertools.pairwise(off)) / spread if spread > 0 else 0.0


def compute_pseudo_median(values: Sequence[float]) -> float:
    """The Hodges-Lehmann estimate: the median of the means of all pairs, including each value with itself.

    It is nearly as precise as the mean for normally distributed values, and robust against outliers.
    """
    means = sorted([one + other for place, one in enumerate(values) for other in values[place:]])
    middle = len(means) // 2
    return (means[middle] if len(means) % 2 else (means[middle - 1] + means[middle]) / 2) / 2


def compute_shift(values: Sequence[float], others: Sequence[float]) -> float:
    """The Hodges-Lehmann shift from `values` to `others`: the median of all differences."""
    return statistics.median(other - value for value in values for other in others)


def compute_wilson_interval(share: float, count: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share. It stays between 0 and 1 and has a width also at shares of 0 and 1."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    wide = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - wide), min(1.0, middle + wide)
