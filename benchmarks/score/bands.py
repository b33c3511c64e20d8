"""Compute error bands from the errors of left-out rows: conformal quantiles by group, with whole campaigns as units.

A campaign is a series of measurements by the same people in the same way. Its rows share an error, so a band for
campaigns that nobody has seen must count campaigns, not rows:

1. A group's distribution is the mean of the distributions of its campaigns. A parent group adds as much as a few
   campaigns, so that a group with few campaigns is close to its parent.
2. A band is that distribution's quantiles, with a finite-sample correction for the number of campaigns.
3. For each campaign in turn, the band is computed without it, and each of its rows gets a score: by how much the band
   must be stretched to contain it. The quantile of all scores is the factor that stretches the final bands.
4. The reported coverage repeats all of this without the campaign on which it is measured.

A metric with very few campaigns is divided into series (one engine and model on one machine) instead, and its bands are
stretched further, because the mean of so few campaigns is uncertain.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bedplate.decide.estimate.bands import DISTANCES, LEVELS, Distance, list_groups
from bedplate.decide.estimate.calibration import load_table

PARENT_CAMPAIGNS = 3.0
"""Campaigns that a parent group counts for in the distribution of a group."""
FEWEST_CAMPAIGNS = 3
"""A group with fewer campaigns has no band of its own; its parent's is used."""
MOST_POINTS = 12
"""Quantiles that stand for the rows of one campaign in one group."""
FEW_CAMPAIGNS = 5
"""A metric with fewer campaigns is divided into series."""
FULL_ROWS = 10
"""Rows from which a campaign has its full weight; fewer count by the square root."""
ROWS_EXPONENT = 0.25
"""A campaign weighs by its rows to this power when factors are chosen: between all equal (0) and all rows equal (1)."""
SMALL_CAMPAIGN = 7
SMALL_FOLDS = 3
"""Campaigns with fewer rows are left out together, in this many parts."""
BEYOND = 0.015
"""Share of all rows of a metric on each side beyond which no band reaches."""
NARROWEST = math.log(1.03)
"""Least distance of an 80 % band's ends from the estimate: two machines of the same kind differ by as much."""
FAR_FACTOR = 1.5
"""A band of questions that are far from all data is at least this many times as wide as that of the next group."""

MEMORY_UNITS = (1.0, 1e3, 1e3 / 1.048576, 1 / 1.073741824)
"""Tables use GB, MB, MiB or GiB under `peak_memory_gb`: the number of each unit in 10⁹ bytes."""


class LeftOutRow(NamedTuple):
    """The error of a row that its fit did not see."""

    metric: str
    kernels: str | None
    device: str
    distance: Distance
    campaign: str
    series: str
    """A part of the campaign, one engine and model on one machine, if it counts on its own; else empty."""
    split: str
    """What was left out: the row's campaign, chip, model or engine."""
    log: float
    """Logarithm of measured over predicted."""

    @property
    def unit(self) -> str:
        return f"{self.campaign} {self.series}".strip()

    @property
    def groups(self) -> tuple[str, ...]:
        return list_groups(self.metric, self.kernels, self.device, self.distance)


class Spread(NamedTuple):
    """Low, middle and high quantile of a distribution of logarithms."""

    low: float
    middle: float
    high: float

    def score(self, value: float) -> float:
        """The factor by which the band must be stretched from its middle to contain `value`."""
        side = self.high - self.middle if value >= self.middle else self.middle - self.low
        return abs(value - self.middle) / max(side, 1e-6)

    def stretch(self, factor: float) -> Spread:
        return Spread(
            self.middle - (self.middle - self.low) * factor,
            self.middle,
            self.middle + (self.high - self.middle) * factor,
        )

    def clip(self, low: float, high: float) -> Spread:
        return Spread(max(self.low, low), self.middle, min(self.high, high))


def take_quantile(points: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted quantile of (value, weight) pairs that are sorted by value."""
    total = sum(weight for _, weight in points)
    reached = 0.0
    for value, weight in points:
        reached += weight
        if reached >= share * total - 1e-12:
            return value
    return points[-1][0]


def correct_tail(tail: float, campaigns: float) -> float:
    """The share of `campaigns` beyond a bound that leaves out `tail` of what comes next: one more may lie anywhere."""
    return tail * campaigns / (campaigns + 1.0)


def summarize_rows(values: Iterable[float]) -> list[float]:
    """At most `MOST_POINTS` evenly spaced quantiles."""
    ordered = sorted(values)
    count = min(len(ordered), MOST_POINTS)
    return [ordered[int((i + 0.5) / count * len(ordered))] for i in range(count)]


class Pool:
    """The left-out rows of one metric, by group and by unit: campaign, or series."""

    def __init__(self, rows: Sequence[LeftOutRow]) -> None:
        self.rows = rows
        self.metric = rows[0].metric
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.parents: dict[str, str | None] = {}
        self.campaigns: dict[str, set[str]] = defaultdict(set)
        self.rows_by_split: dict[str, Counter[str]] = defaultdict(Counter)
        for row in rows:
            names = row.groups
            for name, parent in zip(names, (*names[1:], None), strict=True):
                values[name][row.unit].append(row.log)
                self.campaigns[name].add(row.campaign)
                self.rows_by_split[name][row.split] += 1
                self.parents[name] = parent
        self.counts = {name: {one: len(logs) for one, logs in by.items()} for name, by in values.items()}
        self.points = {name: {one: summarize_rows(logs) for one, logs in by.items()} for name, by in values.items()}

        ordered = sorted(row.log for row in rows)
        outside = int(BEYOND * len(ordered))
        self.ends = ordered[outside], ordered[-1 - outside]

    def count_units(self, name: str, without: frozenset[str] = frozenset()) -> float:
        return sum(_weigh(count) for one, count in self.counts.get(name, {}).items() if one not in without)

    def mix(self, name: str, without: frozenset[str] = frozenset()) -> list[tuple[float, float]]:
        """The distribution of a group as weighted values: its campaigns, and its parent as further campaigns."""
        found = []
        for one, points in self.points.get(name, {}).items():
            if one not in without:
                weight = _weigh(self.counts[name][one]) / len(points)
                found += [(point, weight) for point in points]
        if (parent := self.parents.get(name)) is not None and (above := self.mix(parent, without)):
            total = sum(weight for _, weight in above)
            found += [(value, weight * PARENT_CAMPAIGNS / total) for value, weight in above]
        return found

    def find_spread(self, name: str, level: int, without: frozenset[str] = frozenset()) -> Spread:
        points = sorted(self.mix(name, without))
        tail = correct_tail((1.0 - level / 100.0) / 2.0, self.count_units(name, without))
        return Spread(take_quantile(points, tail), take_quantile(points, 0.5), take_quantile(points, 1.0 - tail))

    def repeats_parent(self, name: str) -> bool:
        """Whether a group has the same rows as its parent."""
        parent = self.parents[name]
        return parent is not None and self.counts[parent] == self.counts[name]

    def choose_group(self, names: Sequence[str], without: frozenset[str] = frozenset()) -> str:
        """The most specific group with enough campaigns."""
        for name in names[:-1]:
            if sum(one not in without for one in self.counts.get(name, {})) >= FEWEST_CAMPAIGNS:
                return name
        return names[-1]


def _weigh(rows: int) -> float:
    return math.sqrt(min(1.0, rows / FULL_ROWS))


def make_folds(rows: Iterable[LeftOutRow]) -> list[frozenset[str]]:
    """Units that are left out together: large ones alone, small ones in a few parts."""
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.unit] += 1
    small = sorted(one for one, count in counts.items() if count < SMALL_CAMPAIGN)
    parts = [frozenset(small[i::SMALL_FOLDS]) for i in range(SMALL_FOLDS)]
    return [frozenset({one}) for one in sorted(counts.keys() - set(small))] + [part for part in parts if part]


class Calibrated(NamedTuple):
    """The factor of each level, and the shares of left-out rows inside the bands."""

    unit: str
    """What was left out: whole campaigns, or series if there are too few."""
    campaigns: int
    rows: int
    factors: dict[int, float]
    coverage: dict[int, float]
    """By rows."""
    campaign_coverage: dict[int, float]
    """The mean over campaigns."""


def compute_bands(rows: Sequence[LeftOutRow]) -> tuple[dict[str, Any], Calibrated]:
    """The bands of all groups of one metric, and their coverage."""
    campaigns = len({row.campaign for row in rows})
    few = campaigns < FEW_CAMPAIGNS
    pool = Pool(rows if few else [row._replace(series="") for row in rows])
    # The mean of few campaigns is uncertain itself, as in the prediction interval of a mean.
    found = calibrate(pool, (1.0 + 1.0 / campaigns) ** 0.5 if few else 1.0)
    groups = make_groups(pool, found.factors)
    return groups, found._replace(unit="series" if few else "campaign")


def calibrate(pool: Pool, further: float = 1.0) -> Calibrated:
    """The factors for the bands of a metric, and their coverage of campaigns on which they do not depend."""
    tested = [row for row in pool.rows if row.split == "campaign"]
    folds = make_folds(tested)
    scores = _Scores(pool, tested, folds)
    inside: dict[int, dict[str, list[bool]]] = {level: defaultdict(list) for level in LEVELS}
    for fold in folds:
        for level in LEVELS:
            factor = _choose_factor(scores, level, fold) * further
            for row, score in scores.find(fold, fold, level):
                inside[level][row.unit].append(score <= factor)
    return Calibrated(
        "campaign",
        len(pool.campaigns[pool.metric]),
        len(tested),
        {level: _choose_factor(scores, level, None) * further for level in LEVELS},
        {level: _mean([one for by in inside[level].values() for one in by]) for level in LEVELS},
        {level: _mean([_mean(by) for by in inside[level].values()]) for level in LEVELS},
    )


class _Scores:
    """Scores of the rows of one fold by bands that were computed without it, and without one further fold."""

    def __init__(self, pool: Pool, rows: Sequence[LeftOutRow], folds: Sequence[frozenset[str]]) -> None:
        self.pool, self.folds = pool, folds
        self.rows = {fold: [row for row in rows if row.unit in fold] for fold in folds}
        self._spreads: dict[tuple[str, int, frozenset[str]], Spread] = {}

    def find(self, fold: frozenset[str], other: frozenset[str], level: int) -> list[tuple[LeftOutRow, float]]:
        without = fold | other
        chosen: dict[tuple[str, ...], Spread] = {}
        found = []
        for row in self.rows[fold]:
            names = row.groups
            if names not in chosen:
                chosen[names] = self._find_spread(self.pool.choose_group(names, without), level, without)
            found.append((row, chosen[names].score(row.log)))
        return found

    def _find_spread(self, name: str, level: int, without: frozenset[str]) -> Spread:
        key = (name, level, without)
        if key not in self._spreads:
            self._spreads[key] = limit_spread(self.pool.find_spread(name, level, without), level)
        return self._spreads[key]


def _choose_factor(scores: _Scores, level: int, without: frozenset[str] | None) -> float:
    """The quantile of the scores."""
    points: list[tuple[float, float]] = []
    for fold in scores.folds:
        if fold != without:
            found = sorted(score for _, score in scores.find(fold, without or fold, level))
            points += [(score, len(found) ** (ROWS_EXPONENT - 1.0)) for score in found]
    return take_quantile(sorted(points), level / 100.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def limit_spread(spread: Spread, level: int) -> Spread:
    """The spread with the estimate inside of it, and not narrower than machines of one kind differ."""
    least = NARROWEST * (0.4 if level == 50 else 1.0)
    return Spread(min(spread.low, -least), spread.middle, max(spread.high, least))


def make_groups(pool: Pool, factors: Mapping[int, float]) -> dict[str, Any]:
    """The bands of all groups with enough campaigns, of each distance, and of the metric."""
    names = {name for name, by in pool.counts.items() if len(by) >= FEWEST_CAMPAIGNS and not pool.repeats_parent(name)}
    names.add(pool.metric)
    # Every distance has a band, whether rows of it exist or not.
    names |= {list_groups(pool.metric, None, "", distance)[-2] for distance in DISTANCES}
    found: dict[str, Any] = {}
    for name in sorted(names):
        origin = name if name in pool.counts else pool.metric
        spreads = [
            limit_spread(
                limit_spread(pool.find_spread(origin, level), level).stretch(factors[level]).clip(*pool.ends), level
            )
            for level in LEVELS
        ]
        found[name] = {
            "campaigns": len(pool.campaigns[origin]), "rows": max(pool.rows_by_split[origin].values()),
            "spreads": _nest(spreads),
        }  # fmt: skip
    _widen_with_distance(found)
    return {
        name: {
            "campaigns": one["campaigns"], "rows": one["rows"],
            **{
                str(level): [round(math.exp(spread.low), 3), round(math.exp(spread.high), 3)]
                for level, spread in zip(LEVELS, one["spreads"], strict=True)
            },
        }
        for name, one in found.items()
    }  # fmt: skip


def _nest(spreads: Sequence[Spread]) -> list[Spread]:
    """The spreads of rising levels, each at least as wide as the one before."""
    found: list[Spread] = []
    for spread in spreads:
        if found:
            spread = Spread(min(spread.low, found[-1].low), spread.middle, max(spread.high, found[-1].high))
        found.append(spread)
    return found


def _widen_with_distance(groups: dict[str, Any]) -> None:
    """Make a farther group at least as wide as the nearer one beside it, and the farthest wider."""
    for name in sorted(groups, key=lambda one: DISTANCES.index(_find_distance(one)) if _find_distance(one) else -1):
        distance = _find_distance(name)
        if distance is None or distance == DISTANCES[0]:
            continue
        nearer = [
            groups[other]["spreads"]
            for place in range(DISTANCES.index(distance))
            if (other := name.removesuffix(distance) + DISTANCES[place]) in groups
        ]
        factor = FAR_FACTOR if distance == DISTANCES[-1] else 1.0
        groups[name]["spreads"] = [
            Spread(
                min(own.low, *(near[i].low * factor for near in nearer)) if nearer else own.low,
                own.middle,
                max(own.high, *(near[i].high * factor for near in nearer)) if nearer else own.high,
            )
            for i, own in enumerate(groups[name]["spreads"])
        ]


def _find_distance(name: str) -> Distance | None:
    return next((one for one in DISTANCES if name.endswith(f" / {one}")), None)


def find_memory_unit(pairs: Sequence[tuple[float, float]]) -> float:
    """The unit in which predictions are nearest to a table's values."""
    return min(
        MEMORY_UNITS,
        key=lambda unit: statistics.median(abs(predicted * unit / value - 1) for predicted, value in pairs),
    )


def compute_fingerprint() -> str:
    """The fit that bands belong to: another fit has other errors."""
    fitted = [load_table("local")["effects"], load_table("serving")["efficiencies"]]
    return hashlib.sha256(json.dumps(fitted, sort_keys=True).encode()).hexdigest()[:16]
