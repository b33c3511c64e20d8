"""Searches the best settings with short measurements, interleaved with the best so far. Pure: the caller measures.

The search changes one setting at a time, starting with those that the diagnosis favors. The candidates of a race are
measured between two measurements of the best settings, in interleaved rounds, so that drift of the machine cancels.
After each round the slower half, and all candidates without a gain, are dropped. Only a significant gain is kept; the
noise is estimated from all repeated measurements. A setting whose values form a scale is followed in the direction that
helped. Candidates that showed a gain but lost to the winner are tried again on top of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.statistics import compute_student_t
from bedplate.values.diagnosis import Bottleneck, Limit
from bedplate.values.record import Figure
from bedplate.values.tuning import (
    Objective,
    ParetoPoint,
    RefusedSetting,
    SettingChange,
    Trial,
    TrialMeasurement,
    TunableSetting,
    TuningRun,
    TuningStep,
)
from bedplate.values.workload import LatencyTarget

LEAST = 0.02
"""Minimum gain, as a logarithm; a candidate below it is dropped."""
NOISE = 0.03
"""Standard deviation of the difference of two interleaved short measurements that is assumed until it can be estimated
(docs/compare.md has the variation of real engines)."""
ENOUGH = 3
"""Repeats, of all candidates together, from which the noise is estimated instead of assumed."""
SURE = 1.64
"""A gain is significant if it is this many standard errors above zero: p < 0.05 per change, one-sided."""
MOST_TURNS = 7
WIDTH = 4
TRIES = 2
CUT = math.log(1.4)
"""A candidate that is slower than the best by more than this is stopped early."""
CLOSE = 0.1
"""If no candidate comes this close to the best in a round, the best is not measured again in that round."""
GREAT = math.log(1.4)
"""A gain of at least this is kept even if there was no time to repeat its measurement."""
SOONER = 0.25
"""Weight of TTFT relative to throughput: half the TTFT is worth a fifth more tokens."""
SPOKEN_FOR, SPOKEN_AGAINST = 2.0, 0.6
"""Factors on the prior of a setting that may relieve the bottleneck, and of one that relieves another limit."""

Point = tuple[tuple[str, str], ...]
"""Settings that differ from the plan: (name, value), sorted by name."""
Measure = Callable[[Point, float | None], float | None]
"""Returns the score of a point as a logarithm; higher is better, `None` means failed. A measurement may stop early once
the score is certain to be below the second argument."""


class TuningListener:
    """Receives the events of a tuning, to display them. Every method is optional."""

    def report_start(self, tuned: TuningRun, knobs: Sequence[TunableSetting]) -> None: ...

    def report_activity(self, what: str, best: str, left_s: float) -> None: ...

    def report_measurement(
        self, turned: tuple[SettingChange, ...], taken: TrialMeasurement, tuned: TuningRun
    ) -> None: ...

    def report_bottleneck(self, found: Bottleneck) -> None: ...

    def report_step(self, step: TuningStep) -> None: ...

    def report_round(self, name: str, turn: int, taken: TrialMeasurement, tuned: TuningRun) -> None: ...

    def report_refusal(self, refused: RefusedSetting) -> None: ...


class SearchSetting(NamedTuple):
    """A tunable setting as the search sees it."""

    name: str
    values: tuple[str, ...]
    now: str
    ordered: bool = False
    alone: bool = False
    first: tuple[str, ...] = ()
    """The values to try first; empty: the neighbors of the current value."""


class Move(NamedTuple):
    lever: SearchSetting
    value: str


class KeptMove(NamedTuple):
    """A change that was kept, with its gains per round, as logarithms."""

    move: Move
    before: str
    gains: tuple[float, ...]


class SearchResult(NamedTuple):
    best: Point
    kept: tuple[KeptMove, ...]
    whole: bool
    """Whether the search finished; otherwise the time was up."""


def order_settings(
    knobs: Iterable[TunableSetting],
    limit: Limit | None,
    only: Collection[str] = (),
    *,
    hints: Collection[str] = (),
    as_own: bool = False,
    lossy: bool = True,
) -> tuple[SearchSetting, ...]:
    """Order the settings to try, by their prior and by the bottleneck.

    `hints`: settings that helped in other tunings come first, except for those that must be tried alone. `as_own`: the
    engine defaults were better than the plan, so settings where they differ come first of all. `lossy`: also try values
    with lower accuracy than the plan.
    """

    def compute_worth(knob: TunableSetting) -> float:
        if limit is None or not knob.limits:
            return knob.prior
        return knob.prior * (SPOKEN_FOR if limit in knob.limits else SPOKEN_AGAINST)

    def choose_first(knob: TunableSetting) -> tuple[str, ...]:
        return (knob.own_choice,) if as_own and knob.own_choice not in (None, knob.now) else ()

    def list_values(knob: TunableSetting) -> tuple[str, ...]:
        return tuple(one.value for one in knob.choices if lossy or not one.lossy or one.value == knob.now)

    wanted = [knob for knob in knobs if not only or knob.name in only]
    ranked = sorted(
        wanted, key=lambda knob: (not choose_first(knob), not knob.alone, knob.name not in hints, -compute_worth(knob))
    )
    return tuple(
        SearchSetting(
            knob.name, list_values(knob), knob.now, knob.ordered, knob.alone, choose_first(knob) or knob.first
        )
        for knob in ranked
    )


def with_value(point: Point, lever: SearchSetting, value: str) -> Point:
    """Return the point with this value; a setting with the plan's value is not part of a point."""
    rest = {name: one for name, one in point if name != lever.name}
    if value != lever.now:
        rest[lever.name] = value
    return tuple(sorted(rest.items()))


def climb(
    levers: Sequence[SearchSetting],
    measure: Measure,
    *,
    accept: Callable[[Point, Move], bool] = lambda point, move: True,
    has_time: Callable[[Point], bool] = lambda point: True,
    refused: Collection[tuple[str, str]] = (),
    start: Point = (),
    start_score: float | None = None,
    width: int = WIDTH,
    short_budget: bool = False,
) -> SearchResult:
    """Search the best point. `accept` may reject a winner; `has_time` says whether there is time to measure a point.

    `start_score`: the score of `start` if it was just measured. `short_budget`: there is time for only a few
    measurements, so a gain need not be repeated.
    """
    best, kept, whole = start, list[KeptMove](), True
    meter, noise = _Meter(measure, width), _NoiseEstimate(short_budget)
    if start_score is not None:
        meter.remember(best, start_score)
    queue = deque(move for lever in levers for move in _list_first_moves(lever, best))
    tried: dict[tuple[str, str], int] = {}
    while queue and has_time(best):
        moves = _take_candidates(queue, best, width, refused)
        in_time = [move for move in moves if has_time(with_value(best, move.lever, move.value))]
        whole = whole and in_time == moves
        if not in_time:
            continue
        for move in in_time:
            tried[_make_key(move)] = tried.get(_make_key(move), 0) + 1
        ranked, late = _race_candidates(best, in_time, meter, noise, has_time)
        whole = whole and not late
        sure = [(move, gains) for move, gains in ranked if noise.is_significant(gains)]
        if late and not sure:
            sure = [(move, gains) for move, gains in ranked if statistics.fmean(gains) >= GREAT]
        winner = next((one for one in sure if accept(with_value(best, one[0].lever, one[0].value), one[0])), None)
        again: list[Move] = []
        if winner is not None:
            move, gains = winner
            before = _get_value(best, move.lever)
            best = with_value(best, move.lever, move.value)
            kept.append(KeptMove(move, before, tuple(gains)))
            again += _extend_move(move, before)
        if sure:
            # Candidates that lost to the winner, or to one that was rejected, are tried again. Another value of the
            # winner's setting is not: it would replace the winner, and was slower.
            lost = {_make_key(one) for one, _ in sure}
            won = winner[0].lever.name if winner is not None else None
            left = [one for one, found in ranked if found[0] >= LEAST and _make_key(one) not in lost]
            again += [one for one in left if one.lever.name != won]
        queue.extendleft(reversed([one for one in again if tried.get(_make_key(one), 0) < TRIES and one not in queue]))
    return SearchResult(best, tuple(kept), whole and not queue)


def _list_first_moves(lever: SearchSetting, best: Point) -> list[Move]:
    """On a scale, try the preferred first values or the neighbors; otherwise all values, preferred ones first."""
    here = _get_value(best, lever)
    others = [value for value in lever.values if value != here]
    begin = [value for value in lever.first if value in others]
    if begin:
        others = begin if lever.ordered else [*begin, *(value for value in others if value not in begin)]
    elif lever.ordered and here in lever.values:
        at = lever.values.index(here)
        others = [*lever.values[at + 1 : at + 2], *lever.values[max(0, at - 1) : at]]
    return [Move(lever, value) for value in others]


def _extend_move(move: Move, before: str) -> list[Move]:
    """Go one step further in the direction that helped."""
    values = move.lever.values
    if not move.lever.ordered or before not in values:
        return []
    at, was = values.index(move.value), values.index(before)
    nearby = at + (1 if at > was else -1)
    return [Move(move.lever, values[nearby])] if 0 <= nearby < len(values) else []


def _take_candidates(queue: deque[Move], best: Point, width: int, refused: Collection[tuple[str, str]]) -> list[Move]:
    """Take the next candidates; a setting that must be tried alone is not mixed with others."""
    chosen: list[Move] = []
    for move in list(queue):
        if len(chosen) >= width or (chosen and (chosen[0].lever.alone or move.lever.alone)
                                    and move.lever != chosen[0].lever):  # fmt: skip
            break
        queue.remove(move)
        if _make_key(move) not in refused and _get_value(best, move.lever) != move.value and move not in chosen:
            chosen.append(move)
    return chosen


class _Meter:
    """Counts measurements and remembers which are recent enough to compare with."""

    def __init__(self, measure: Measure, fresh: int) -> None:
        self._measure, self._fresh = measure, fresh
        self._count = 0
        self._last: dict[Point, tuple[int, float]] = {}

    def __call__(self, point: Point, bar: float | None) -> float | None:
        self._count += 1
        score = self._measure(point, bar)
        if score is not None:
            self.remember(point, score)
        return score

    def remember(self, point: Point, score: float) -> None:
        self._last[point] = (self._count, score)

    def get_recent(self, point: Point) -> float | None:
        at, score = self._last.get(point, (-math.inf, 0.0))
        return score if self._count - at <= self._fresh else None


class _NoiseEstimate:
    """Estimates the noise of the difference of two short measurements.

    It pools the rounds of all candidates: two or three rounds of one candidate are too few.
    """

    def __init__(self, short_budget: bool) -> None:
        self.short_budget = short_budget
        self._seen: list[list[float]] = []

    def watch(self, gains: Iterable[list[float]]) -> None:
        """Add lists of gains that grow with each round."""
        self._seen.extend(gains)

    def estimate_spread(self, gains: Sequence[float]) -> float:
        repeated = [one for one in self._seen if len(one) > 1]
        count = sum(len(one) - 1 for one in repeated)
        if count < ENOUGH:
            return max(NOISE, statistics.stdev(gains) if len(gains) > 1 else 0.0)
        return math.sqrt(sum(statistics.variance(one) * (len(one) - 1) for one in repeated) / count)

    def is_significant(self, gains: Sequence[float]) -> bool:
        """Whether the gain is significant; one round is enough only if `short_budget`."""
        return (self.short_budget or len(gains) > 1) and statistics.fmean(gains) > self._compute_bar(gains, len(gains))

    def can_become_significant(self, gains: Sequence[float]) -> bool:
        """Whether the gain would be significant after the last round if its mean stays the same."""
        return statistics.fmean(gains) > self._compute_bar(gains, MOST_TURNS)

    def _compute_bar(self, gains: Sequence[float], turns: int) -> float:
        return max(LEAST, SURE * self.estimate_spread(gains) / math.sqrt(turns))


def _race_candidates(
    best: Point, moves: Sequence[Move], measure: _Meter, noise: _NoiseEstimate, has_time: Callable[[Point], bool]
) -> tuple[list[tuple[Move, list[float]]], bool]:
    """Return the candidates with their gains over the best per round, best first, and whether time ran out.

    In each round the best is measured before and after the candidates; the second measurement is also the first of the
    next round, so that a single candidate alternates with the best.
    """
    gains: dict[Move, list[float]] = {move: [] for move in moves}
    noise.watch(gains.values())
    alive, late = list(moves), False
    before = measure.get_recent(best)
    if before is None and (before := measure(best, None)) is None:
        return [], late  # the best itself failed, so nothing can be compared with it
    for turn in range(MOST_TURNS):
        scores: dict[Move, float] = {}
        for move in alive if turn % 2 == 0 else alive[::-1]:
            point = with_value(best, move.lever, move.value)
            if not has_time(point):
                late = True
            elif (score := measure(point, before - CUT)) is not None:
                scores[move] = score
        over, after = not has_time(best), before
        lead = max(scores.values(), default=-math.inf) - before
        if not over and lead > -CLOSE and not noise.is_significant([lead]):
            if (again := measure(best, None)) is None:
                return [], late
            after = again
        for move, score in scores.items():
            gains[move].append(score - (before + after) / 2)
        alive = [move for move in alive if move in scores and statistics.fmean(gains[move]) >= LEAST]
        alive.sort(key=lambda one: -statistics.fmean(gains[one]))
        alive = alive[: max(1, math.ceil(len(alive) / 2))]
        if over or not alive:
            late = late or over
            break
        first, single = gains[alive[0]], len(alive) == 1
        settled = (single or noise.short_budget) and noise.is_significant(first)
        if settled or (turn and single and not noise.can_become_significant(first)):
            break
        before = after
    found = [(move, gains[move]) for move in moves if gains[move]]
    return sorted(found, key=lambda one: (one[0] not in alive, -statistics.fmean(one[1]))), late


def _get_value(point: Point, lever: SearchSetting) -> str:
    return dict(point).get(lever.name, lever.now)


def _make_key(move: Move) -> tuple[str, str]:
    return move.lever.name, move.value


def make_gain_figure(gains: Sequence[float]) -> Figure:
    """Return the factor of improvement with its interval, from the gains of a few rounds."""
    middle, count = statistics.fmean(gains), len(gains)
    spread = max(NOISE, statistics.stdev(gains) if count > 1 else 0.0)
    reach = compute_student_t(0.95, max(2, count - 1)) * spread / math.sqrt(count)
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    words = f"{count} short interleaved runs" if count > 1 else "one short run"
    return Figure(value=math.exp(middle), low=low, high=high, basis="measured", source=words)


# the objective


def compute_score(
    objective: Objective,
    *,
    output_tok_s: float | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    peak_memory_bytes: int | None = None,
    energy_j_per_token: float | None = None,
    on_target: float | None = None,
    floor_tok_s: float | None = None,
) -> float | None:
    """Return the score as a logarithm, higher is better; `None` if a figure that it needs is unknown.

    `on_target`: the share of requests within the latency target, which scales the score. `floor_tok_s`: throughput
    below which the memory objective is penalized.
    """
    if objective in ("throughput", "cost"):
        # On one machine an hour costs the same for all settings.
        found, first = _compute_log(output_tok_s), _compute_log(ttft_ms)
        found = None if found is None else found - SOONER * (first or 0.0)
    elif objective == "latency":
        first, each = _compute_log(ttft_ms), _compute_log(tpot_ms)
        found = None if first is None or each is None else -(first + each) / 2
    elif objective == "energy":
        each = _compute_log(energy_j_per_token)
        found = None if each is None else -each
    else:
        taken = _compute_log(None if peak_memory_bytes is None else float(peak_memory_bytes))
        found = None if taken is None else -taken
        if found is not None and floor_tok_s and output_tok_s and output_tok_s < floor_tok_s:
            found -= 4 * math.log(floor_tok_s / output_tok_s)
    if found is None or on_target is None:
        return found
    return found + math.log(max(on_target, 0.01))


def _compute_log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


def describe_target(target: LatencyTarget | None) -> str:
    if target is None:
        return ""
    parts = [f"first token within {target.ttft_ms:g} ms"] if target.ttft_ms is not None else []
    parts += [f"each further token within {target.tpot_ms:g} ms"] if target.tpot_ms is not None else []
    return " and ".join(parts)


# the Pareto front


def find_front(trials: Iterable[Trial], name: Callable[[Trial], str]) -> tuple[ParetoPoint, ...]:
    """Return the Pareto front of throughput, time to first token and memory; the fastest first."""
    found = [(trial, one) for trial in trials if (one := trial.best) is not None]
    known = [(trial, one) for trial, one in found if one.output_tok_s is not None and one.ttft_ms is not None]
    best = [(trial, one) for trial, one in known if not any(_dominates(other, one) for _, other in known)]
    rows = [
        ParetoPoint(
            name=name(trial),
            turned=trial.turned,
            output_tok_s=one.output_tok_s or 0.0,
            ttft_ms=one.ttft_ms or 0.0,
            peak_memory_bytes=one.peak_memory_bytes,
        )
        for trial, one in best
    ]
    return tuple(sorted(rows, key=lambda row: -row.output_tok_s))


def _dominates(one: TrialMeasurement, other: TrialMeasurement) -> bool:
    """Whether `one` is at least as good in every figure and better in one."""
    mine, theirs = _list_figures(one), _list_figures(other)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _list_figures(one: TrialMeasurement) -> tuple[float, float, float]:
    memory = -float(one.peak_memory_bytes) if one.peak_memory_bytes is not None else 0.0
    return one.output_tok_s or 0.0, -(one.ttft_ms or math.inf), memory
