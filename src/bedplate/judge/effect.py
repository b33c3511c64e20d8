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

from bedplate.judge.structured import PairedShares, pair_structured
from bedplate.measure.statistics import (
    compute_pseudo_median,
    compute_shift,
    compute_student_t,
    compute_wilson_interval,
)
from bedplate.measure.summary import compute_output_tok_s, list_durations, list_tpots, list_ttfts, meets
from bedplate.values.record import Figure
from bedplate.values.run import Cell, Load, Quality, Repeat, Sample
from bedplate.values.statistics import compute_quantile
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

TAIL = 0.95
LEAST_IN_TAIL = 20
"""Requests of each side for a 95th percentile: fewer than one of them is expected beyond it otherwise."""
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
    if metric in TAILS:
        return _estimate_tail_effect(a, b, metric, confidence, rng)
    one, other = (_make_repeat_logs(cell, metric, rng) for cell in (a, b))
    if same_work:
        one, other = one.drop_resamples(), other.drop_resamples()
    if not one.logs or not other.logs:
        return None
    turns = pair_rounds(one.moments, other.moments) if a.run == b.run else []
    if turns:
        one, other = one.merge_groups(first for first, _ in turns), other.merge_groups(second for _, second in turns)
    found = _estimate_paired(one, other, rng) if turns else _estimate_unpaired(one, other, rng)
    mean_a, mean_b = (math.exp(statistics.fmean(side.logs) * _get_sign(metric)) for side in (one, other))
    return _make_effect(
        a, b, metric, confidence, found, (mean_a, mean_b), (len(one.logs), len(other.logs)), bool(turns)
    )


def _make_effect(
    a: Cell,
    b: Cell,
    metric: Metric,
    confidence: float,
    found: GainEstimate,
    values: tuple[float, float],
    repeats: tuple[int, int],
    paired: bool,
) -> Effect:
    # The memory that an engine uses does not drift with the speed of the machine.
    steady = paired or metric == "peak_memory_bytes"
    drift = 0.0 if steady else DRIFT_IN_A_RUN if a.run == b.run else DRIFT_BETWEEN_RUNS
    low, high = _compute_interval(found, drift, CONFIDENCE)
    sure_low, sure_high = _compute_interval(found, drift, confidence)
    words = f"{repeats[0]} and {repeats[1]} {'interleaved ' if paired else ''}repeats"
    return Effect(
        metric=metric,
        load=a.load,
        a=values[0],
        b=values[1],
        gain=Figure(value=math.exp(found.value), low=low, high=high, basis="measured", source=words),
        sure_low=sure_low,
        sure_high=sure_high,
        repeats=repeats,
        paired=paired,
        noise=found.noise,
    )


# shares of prompts


def estimate_share_effect(
    a: Quality | None, b: Quality | None, load: Load, metric: Metric, confidence: float
) -> Effect | None:
    """The ratio of two shares of correct answers; `None` if one side lacks them. `load` is any of the compared ones."""
    found = _read_shares(a, b, metric)
    if found is None or not found.a[0]:
        return None
    one, other = found.a, found.b
    low, high = _compute_ratio_interval(found, CONFIDENCE)
    sure_low, sure_high = _compute_ratio_interval(found, confidence)
    words = f"{one[1]} and {other[1]} prompts"
    return Effect(
        metric=metric,
        load=load,
        a=one[0],
        b=other[0],
        gain=Figure(value=other[0] / one[0], low=low, high=high, basis="measured", source=words),
        sure_low=sure_low,
        sure_high=sure_high,
        repeats=(one[1], other[1]),
        paired=False,
        noise=None,
    )


def _read_shares(a: Quality | None, b: Quality | None, metric: Metric) -> PairedShares | None:
    if a is None or b is None:
        return None
    if metric == "schema_match":
        return pair_structured(a.structured, b.structured)
    one, other = _read_agreement(a), _read_agreement(b)
    return None if one is None or other is None else PairedShares(one, other)


def _read_agreement(quality: Quality) -> tuple[float, int] | None:
    checked = quality.verdict != "unchecked" and quality.agreement is not None and quality.asked > 0
    return (quality.agreement or 0.0, quality.asked) if checked else None


def compute_share_difference(
    a: tuple[float, int], b: tuple[float, int], confidence: float, correlation: float = 0.0
) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares, which has a width also at shares of 0 and 1."""
    (a_low, a_high), (b_low, b_high) = (compute_wilson_interval(*one, confidence) for one in (a, b))
    gap = b[0] - a[0]
    below = _combine(b[0] - b_low, a_high - a[0], correlation)
    return gap - below, gap + _combine(b_high - b[0], a[0] - a_low, correlation)


def _compute_ratio_interval(found: PairedShares, confidence: float) -> tuple[float, float]:
    a = found.a
    low, high = compute_share_difference(a, found.b, confidence, found.correlation)
    return max(0.0, 1 + low / a[0]), 1 + high / a[0]


def _combine(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))


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


# one side


def _get_sign(metric: Metric) -> float:
    return 1.0 if metric == "output_tok_s" else -1.0


def _make_repeat_logs(cell: Cell, metric: Metric, rng: random.Random) -> RepeatLogs:
    sign = _get_sign(metric)
    found = RepeatLogs([], [], [])
    for repeat in cell.repeats:
        value, again = _resample_repeat(cell, repeat, metric, rng)
        if value is None or value <= 0:
            continue
        found.logs.append(sign * math.log(value))
        found.within.append([sign * math.log(one) for one in again if one > 0] or [sign * math.log(value)])
        found.moments.append(repeat.at)
    return found


def _resample_repeat(
    cell: Cell, repeat: Repeat, metric: Metric, rng: random.Random
) -> tuple[float | None, list[float]]:
    if metric == "output_tok_s":
        return _resample_speeds(repeat, cell.load, rng)
    if metric == "peak_memory_bytes":
        on_card = cell.subject.device not in (None, "cpu")
        peak = repeat.use.peak_gpu_bytes if on_card else repeat.use.peak_memory_bytes
        return (None if peak is None else float(peak)), []
    return _resample_times(repeat, metric, rng)


def _resample_speeds(repeat: Repeat, load: Load, rng: random.Random) -> tuple[float | None, list[float]]:
    """Tokens per second, and their values for resampled requests."""
    value = compute_output_tok_s(repeat, load)
    took = [sample.duration_ms for sample in repeat.samples]
    made = [float(sample.output_tokens or 0) if sample.outcome == "ok" else 0.0 for sample in repeat.samples]
    if value is None or len(took) < LEAST_RESAMPLED or not sum(made) or not sum(took):
        return value, []
    usual, count, draw = sum(made) / sum(took), len(took), rng.random
    found = []
    for _ in range(WITHIN):
        # The same draws as those of `rng.choices`, which takes longer.
        chosen = [int(draw() * count) for _ in took]
        found.append(value * sum([made[one] for one in chosen]) / max(sum([took[one] for one in chosen]), 1e-9) / usual)
    return value, found


def _resample_times(repeat: Repeat, metric: Metric, rng: random.Random) -> tuple[float | None, list[float]]:
    """The median over requests, and its values for resampled requests."""
    found = sorted(TIMES[metric](repeat.samples))
    if not found:
        return None, []
    value = statistics.median(found)
    if len(found) < LEAST_RESAMPLED:
        return value, []
    count, draw = len(found), rng.random
    return value, [statistics.median([found[int(draw() * count)] for _ in found]) for _ in range(WITHIN)]


TIMES: dict[Metric, Callable[[Iterable[Sample]], list[float]]] = {
    "ttft_ms": list_ttfts, "tpot_ms": list_tpots, "e2e_ms": list_durations,
}  # fmt: skip


# 95th percentiles

TAILS: dict[Metric, Callable[[Iterable[Sample]], list[float]]] = {"ttft_p95_ms": list_ttfts, "tpot_p95_ms": list_tpots}


def _estimate_tail_effect(a: Cell, b: Cell, metric: Metric, confidence: float, rng: random.Random) -> Effect | None:
    """The ratio of the 95th percentiles over all requests of each side.

    One repeat has too few requests for a percentile of its own. The bootstrap draws whole rounds, and within them the
    requests; rounds of both sides that belong together are drawn together.
    """
    sides = [
        [(times, repeat.at) for repeat in cell.repeats if (times := TAILS[metric](repeat.samples))] for cell in (a, b)
    ]
    if min(sum(len(times) for times, _ in side) for side in sides) < LEAST_IN_TAIL:
        return None
    turns = pair_rounds(*([at for _, at in side] for side in sides)) if a.run == b.run else []
    one, other = (
        [[value for number in turn[place] for value in side[number][0]] for turn in turns] if turns
        else [times for times, _ in side]
        for place, side in enumerate(sides)
    )  # fmt: skip
    choices = [[[rng.choices(times, k=len(times)) for _ in range(WITHIN)] for times in side] for side in (one, other)]
    again = []
    for _ in range(RESAMPLES):
        first = rng.choices(range(len(one)), k=len(one))
        second = first if turns else rng.choices(range(len(other)), k=len(other))
        drawn = (
            [value for number in numbers for value in rng.choice(choices[place][number])]
            for place, numbers in enumerate((first, second))
        )
        before, after = (_compute_log_tail(values) for values in drawn)
        again.append(before - after)
    values = [_compute_log_tail([value for times in side for value in times]) for side in (one, other)]
    count = min(len(one), len(other))
    spread = _compute_standard_error(again, count) if count > 1 else statistics.stdev(again)
    degrees, noise = (count - 1, spread * math.sqrt(count)) if count > 1 else (FEW_DEGREES, None)
    found = GainEstimate(values[0] - values[1], spread, degrees, noise)
    limits = (math.exp(values[0]), math.exp(values[1]))
    return _make_effect(a, b, metric, confidence, found, limits, (len(one), len(other)), bool(turns))


def _compute_log_tail(values: list[float]) -> float:
    return math.log(max(compute_quantile(sorted(values), TAIL), 1e-6))


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
    count, draw = len(gains), rng.random
    choices = [
        [b - a for a, b in zip(rng.choices(mine, k=WITHIN), rng.choices(theirs, k=WITHIN), strict=True)]
        for mine, theirs in zip(one.within, other.within, strict=True)
    ]
    again = []
    for _ in range(RESAMPLES):
        drawn = [choices[int(draw() * count)] for _ in gains]
        again.append(compute_pseudo_median([found[int(draw() * WITHIN)] for found in drawn]))
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
    # `statistics.stdev` computes with exact fractions, which takes ten times as long.
    mean = math.fsum(resampled) / len(resampled)
    variance = math.fsum([(one - mean) ** 2 for one in resampled]) / (len(resampled) - 1)
    return math.sqrt(variance * count / (count - 1))


def _compute_interval(found: GainEstimate, drift: float, confidence: float) -> tuple[float, float]:
    """Combines the spread of the repeats (Student's t, since they are few) with the drift (normal distribution)."""
    from_repeats = compute_student_t(confidence, found.degrees) * found.spread
    from_drift = statistics.NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(2) * drift
    half_width = min(math.hypot(from_repeats, from_drift), MOST_REACH)
    return math.exp(found.value - half_width), math.exp(found.value + half_width)
