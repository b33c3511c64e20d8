"""The gain of one side over the other with its confidence interval: a bootstrap over repeats and their requests.

All calculations use logarithms, so that half and double are equally far from equal. A few repeats underestimate their
own spread: the bootstrap's standard error is corrected for the number of repeats, and Student's t is used.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.statistics import compute_pseudo_median, compute_shift, compute_student_t
from bedplate.measure.summary import compute_output_tok_s, list_durations, list_tpots, list_ttfts, meets
from bedplate.values.record import Figure
from bedplate.values.run import Cell, Load, Repeat, Sample
from bedplate.values.verdict import Effect, Metric, TargetShare
from bedplate.values.workload import LatencyTarget

RESAMPLES = 400
WITHIN = 24
"""Resamples of the requests of each repeat. Each resample of the repeats picks one of them."""
SEED = 20261115
CONFIDENCE = 0.95
DRIFT_IN_A_RUN = 0.03
DRIFT_BETWEEN_RUNS = 0.05
"""Standard deviation of the logarithm of the speed between measurement windows. Repeats that were not interleaved do
not show it (docs/compare.md)."""

LEAST_TURNS = 3
MOST_REPEATS = 200
LEAST_RESAMPLED = 3
FEW_DEGREES = 2
MOST_REACH = 20.0
"""Largest half-width of an interval, in logarithms. It keeps the ends of a meaningless interval finite for JSON."""


class RepeatLogs(NamedTuple):
    """The repeats of one side as logarithms (more is better), each with the values of its resampled requests."""

    logs: list[float]
    within: list[list[float]]
    moments: list[str | None]

    def drop_resamples(self) -> RepeatLogs:
        """Without resampled requests."""
        return RepeatLogs(self.logs, [[value] for value in self.logs], self.moments)

    def merge_groups(self, groups: Iterable[Sequence[int]]) -> RepeatLogs:
        """Each group of repeats merged into one by its mean."""
        found = RepeatLogs([], [], [])
        for group in groups:
            found.logs.append(statistics.fmean(self.logs[number] for number in group))
            found.moments.append(self.moments[group[0]])
            many = max(len(self.within[number]) for number in group)
            found.within.append(
                [
                    statistics.fmean(self.within[number][place % len(self.within[number])] for number in group)
                    for place in range(many)
                ]
            )
        return found


def estimate_effect(a: Cell, b: Cell, metric: Metric, confidence: float, *, same_work: bool = False) -> Effect | None:
    """`None` if one side lacks the metric. `confidence` is that of the interval for all loads together.

    `same_work`: both sides got the same requests in each round. The choice of requests is then not random, so that only
    the variation between rounds counts.
    """
    rng = random.Random(SEED)  # noqa: S311
    one, other = (_make_repeat_logs(cell, metric, rng) for cell in (a, b))
    if same_work:
        one, other = one.drop_resamples(), other.drop_resamples()
    if not one.logs or not other.logs:
        return None
    turns = pair_rounds(one.moments, other.moments) if a.run == b.run else []
    if turns:
        one, other = one.merge_groups(first for first, _ in turns), other.merge_groups(second for _, second in turns)
    found = _estimate_paired(one, other, rng) if turns else _estimate_unpaired(one, other, rng)
    drift = 0.0 if turns else DRIFT_IN_A_RUN if a.run == b.run else DRIFT_BETWEEN_RUNS
    low, high = _compute_interval(found, drift, CONFIDENCE)
    sure_low, sure_high = _compute_interval(found, drift, confidence)
    mean_a, mean_b = (math.exp(statistics.fmean(side.logs) * _get_sign(metric)) for side in (one, other))
    words = f"{len(one.logs)} and {len(other.logs)} {'interleaved ' if turns else ''}repeats"
    return Effect(
        metric=metric,
        load=a.load,
        a=mean_a,
        b=mean_b,
        gain=Figure(value=math.exp(found.value), low=low, high=high, basis="measured", source=words),
        sure_low=sure_low,
        sure_high=sure_high,
        repeats=(len(one.logs), len(other.logs)),
        paired=bool(turns),
        noise=found.noise,
    )


Turn = tuple[tuple[int, ...], tuple[int, ...]]


def pair_rounds(a: Sequence[str | None], b: Sequence[str | None]) -> list[Turn]:
    """The pairs of repeats of two sides that ran one directly after the other; empty if they were not interleaved.

    Either side may be first in a pair: A B B A is fairer than A B A B. Consecutive repeats of one side form one round.
    Surplus repeats of one side are not paired.
    """
    if None in (*a, *b):
        return []
    moments = [(at, 0, number) for number, at in enumerate(a)] + [(at, 1, number) for number, at in enumerate(b)]
    single = [(side, (number,)) for _, side, number in sorted(moments, key=lambda moment: moment[0] or "")]
    pairs = _pair_neighbours(single)
    if len(pairs) < min(len(a), len(b)):
        pairs = _pair_neighbours([
            (side, tuple(number for _, numbers in group for number in numbers))
            for side, group in itertools.groupby(single, key=lambda repeat: repeat[0])
        ])  # fmt: skip
    return pairs if len(pairs) >= LEAST_TURNS else []


def _pair_neighbours(order: Iterable[tuple[int, tuple[int, ...]]]) -> list[Turn]:
    """Neighbours of different sides, in order; each is in at most one pair."""
    pairs: list[Turn] = []
    left: tuple[int, tuple[int, ...]] | None = None
    for side, numbers in order:
        if left is None or left[0] == side:
            left = (side, numbers)
        else:
            pairs.append((left[1], numbers) if left[0] == 0 else (numbers, left[1]))
            left = None
    return pairs


def compute_repeats_needed(noise: float, distance: float, confidence: float) -> int | None:
    """The number of repeats of each side for an interval with a half-width of at most `distance`, in logarithms."""
    if distance <= 0:
        return None
    for count in range(3, MOST_REPEATS + 1):
        if compute_student_t(confidence, count - 1) * noise / math.sqrt(count) <= distance:
            return count
    return None


def compare_target_shares(a: Cell, b: Cell, target: LatencyTarget, confidence: float) -> TargetShare:
    return TargetShare(
        load=a.load, a=_compute_met_share(a, target, confidence), b=_compute_met_share(b, target, confidence)
    )


def _compute_met_share(cell: Cell, target: LatencyTarget, confidence: float) -> Figure:
    """The share of requests that met the target; its interval accounts for correlation within a repeat."""
    hits = [[meets(sample, target) for sample in repeat.samples] for repeat in cell.repeats if repeat.samples]
    count = sum(len(one) for one in hits)
    if not count:
        return Figure(value=0.0, low=0.0, high=1.0, basis="measured", source="no requests")
    share = sum(map(sum, hits)) / count
    independent = count / _compute_design_effect(hits, share)
    low, high = compute_wilson_interval(share, independent, confidence)
    return Figure(value=share, low=low, high=high, basis="measured", source=f"{count} requests")


def _compute_design_effect(hits: Sequence[Sequence[bool]], share: float) -> float:
    """The design effect: how many requests of the same repeat count as one independent request; at least 1."""
    if len(hits) < 2 or not 0 < share < 1:
        return 1.0
    sizes = [len(one) for one in hits]
    between = sum((sum(one) - share * len(one)) ** 2 for one in hits) / (len(hits) - 1) * len(hits)
    expected = share * (1 - share) * sum(sizes)
    return max(1.0, between / expected)


def compute_wilson_interval(share: float, count: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share. It stays between 0 and 1 and has a width also at shares of 0 and 1."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    wide = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - wide), min(1.0, middle + wide)


# one side


def _get_sign(metric: Metric) -> float:
    return 1.0 if metric == "output_tok_s" else -1.0


def _make_repeat_logs(cell: Cell, metric: Metric, rng: random.Random) -> RepeatLogs:
    sign = _get_sign(metric)
    found = RepeatLogs([], [], [])
    for repeat in cell.repeats:
        value, again = (
            _resample_speeds(repeat, cell.load, rng)
            if metric == "output_tok_s"
            else _resample_times(repeat, metric, rng)
        )
        if value is None or value <= 0:
            continue
        found.logs.append(sign * math.log(value))
        found.within.append([sign * math.log(one) for one in again if one > 0] or [sign * math.log(value)])
        found.moments.append(repeat.at)
    return found


def _resample_speeds(repeat: Repeat, load: Load, rng: random.Random) -> tuple[float | None, list[float]]:
    """Tokens per second, and their values for resampled requests."""
    value = compute_output_tok_s(repeat, load)
    took = [sample.duration_ms for sample in repeat.samples]
    made = [float(sample.output_tokens or 0) if sample.outcome == "ok" else 0.0 for sample in repeat.samples]
    if value is None or len(took) < LEAST_RESAMPLED or not sum(made) or not sum(took):
        return value, []
    usual, places = sum(made) / sum(took), range(len(took))
    found = []
    for _ in range(WITHIN):
        chosen = rng.choices(places, k=len(took))
        found.append(value * sum(made[one] for one in chosen) / max(sum(took[one] for one in chosen), 1e-9) / usual)
    return value, found


def _resample_times(repeat: Repeat, metric: Metric, rng: random.Random) -> tuple[float | None, list[float]]:
    """The median over requests, and its values for resampled requests."""
    found = sorted(TIMES[metric](repeat.samples))
    if not found:
        return None, []
    value = statistics.median(found)
    if len(found) < LEAST_RESAMPLED:
        return value, []
    return value, [statistics.median(rng.choices(found, k=len(found))) for _ in range(WITHIN)]


TIMES: dict[Metric, Callable[[Iterable[Sample]], list[float]]] = {
    "ttft_ms": list_ttfts, "tpot_ms": list_tpots, "e2e_ms": list_durations,
}  # fmt: skip


# both


class GainEstimate(NamedTuple):
    value: float
    spread: float
    """Standard error."""
    degrees: int
    noise: float | None
    """Standard deviation between repeats."""


def _estimate_paired(one: RepeatLogs, other: RepeatLogs, rng: random.Random) -> GainEstimate:
    gains = [b - a for a, b in zip(one.logs, other.logs, strict=True)]
    count = len(gains)
    choices = [
        [b - a for a, b in zip(rng.choices(mine, k=WITHIN), rng.choices(theirs, k=WITHIN), strict=True)]
        for mine, theirs in zip(one.within, other.within, strict=True)
    ]
    again = [compute_pseudo_median([found[int(rng.random() * WITHIN)] for found in rng.choices(choices, k=count)])
             for _ in range(RESAMPLES)]  # fmt: skip
    return GainEstimate(
        compute_pseudo_median(gains), _compute_standard_error(again, count), count - 1, statistics.stdev(gains)
    )


def _estimate_unpaired(one: RepeatLogs, other: RepeatLogs, rng: random.Random) -> GainEstimate:
    count = min(len(one.logs), len(other.logs))
    again = [
        compute_shift(
            *([rng.choice(found) for found in rng.choices(side.within, k=len(side.within))] for side in (one, other))
        )
        for _ in range(RESAMPLES)
    ]
    value = compute_shift(one.logs, other.logs)
    if count < 2:
        # A single repeat shows only the variation between requests, so no verdict is based on it.
        return GainEstimate(value, statistics.stdev(again), FEW_DEGREES, None)
    noise = math.hypot(statistics.stdev(one.logs), statistics.stdev(other.logs))
    return GainEstimate(value, _compute_standard_error(again, count), count - 1, noise)


def _compute_standard_error(resampled: Sequence[float], count: int) -> float:
    """The bootstrap underestimates the variance of n values by the factor (n - 1) / n."""
    return statistics.stdev(resampled) * math.sqrt(count / (count - 1))


def _compute_interval(found: GainEstimate, drift: float, confidence: float) -> tuple[float, float]:
    """Combines the spread of the repeats (Student's t, since they are few) with the drift (normal distribution)."""
    from_repeats = compute_student_t(confidence, found.degrees) * found.spread
    from_drift = statistics.NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(2) * drift
    half_width = min(math.hypot(from_repeats, from_drift), MOST_REACH)
    return math.exp(found.value - half_width), math.exp(found.value + half_width)
