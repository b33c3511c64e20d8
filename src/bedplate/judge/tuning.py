"""Which setting is best: a race of short measurements, in turns with the best so far. Pure: somebody else measures.

One change at a time from the best so far, those first that the diagnosis speaks for. All contenders of a round are
measured in turns with the best, so that what drifts drops out of their differences; after each turn the slower half and
all that show no gain are left behind, and only a gain that is no chance is kept. A knob whose values are a scale is
followed in the direction that helped. What looked good beside a winner is tried again on top of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.statistics import student_t
from bedplate.values.diagnosis import Bottleneck, Limit
from bedplate.values.record import Figure
from bedplate.values.tuning import Knob, Objective, OnFront, Refused, Step, Taken, Trial, Tuned, Turn
from bedplate.values.workload import LatencyTarget

LEAST = 0.02
"""In logarithms: what shows less of a gain in its first turn is not looked at again."""
NOISE = 0.03
"""Standard deviation of the difference of two short measurements in turns that is taken for granted; two or three of
them say too little about their own (docs/compare.md: what real engines vary by)."""
SURE = 1.64
"""A gain is kept when it lies so many standard errors above nothing: one chance in twenty for each change."""
TURNS = 4
WIDTH = 4
TRIES = 2
CUT = math.log(1.4)
"""A contender that is slower than the best by more is not waited for."""
SOONER = 0.15
"""What a sooner first token counts for beside throughput: of settings that are about as fast, the one that answers
first."""
SPOKEN_FOR, SPOKEN_AGAINST = 2.0, 0.6
"""What a diagnosis adds to a knob that may move the limit that binds, and takes from one that moves another."""

Point = tuple[tuple[str, str], ...]
"""Knobs that are turned away from the plan, by name."""
Measure = Callable[[Point, float | None], float | None]
"""The score of a setting, in logarithms and more is better; `None` where it failed. Below the second argument it need
not be exact: nobody waits for what has lost already."""


class Teller:
    """What happens while somebody tunes, for those who show it. All of it may be left out."""

    def begun(self, tuned: Tuned, knobs: Sequence[Knob]) -> None: ...

    def doing(self, what: str, best: str, left_s: float) -> None: ...

    def taken(self, turned: tuple[Turn, ...], taken: Taken, tuned: Tuned) -> None: ...

    def diagnosed(self, found: Bottleneck) -> None: ...

    def kept(self, step: Step) -> None: ...

    def worked(self, name: str, turn: int, taken: Taken, tuned: Tuned) -> None: ...

    def refused(self, refused: Refused) -> None: ...


class Lever(NamedTuple):
    """A knob as the search sees it."""

    name: str
    values: tuple[str, ...]
    now: str
    ordered: bool = False
    alone: bool = False
    first: tuple[str, ...] = ()
    """Where to begin on a scale, instead of beside where it stands."""


class Move(NamedTuple):
    lever: Lever
    value: str


class Kept(NamedTuple):
    """A change that was adopted; the gains are those of its turns, in logarithms."""

    move: Move
    before: str
    gains: tuple[float, ...]


class Climbed(NamedTuple):
    best: Point
    kept: tuple[Kept, ...]
    whole: bool
    """Whether everything was tried that was worth it; else time was up."""


def levers_of(knobs: Iterable[Knob], limit: Limit | None, only: Collection[str] = ()) -> tuple[Lever, ...]:
    """In the order in which they are tried: by what is known of them, and by what binds."""

    def worth(knob: Knob) -> float:
        if limit is None or not knob.limits:
            return knob.prior
        return knob.prior * (SPOKEN_FOR if limit in knob.limits else SPOKEN_AGAINST)

    wanted = [knob for knob in knobs if not only or knob.name in only]
    ranked = sorted(wanted, key=lambda knob: (not knob.alone, -worth(knob)))
    return tuple(
        Lever(knob.name, tuple(choice.value for choice in knob.choices), knob.now, knob.ordered, knob.alone, knob.first)
        for knob in ranked
    )


def turned(point: Point, lever: Lever, value: str) -> Point:
    """A knob that is turned back to where it stood is not in the point any more."""
    rest = {name: one for name, one in point if name != lever.name}
    if value != lever.now:
        rest[lever.name] = value
    return tuple(sorted(rest.items()))


def climb(
    levers: Sequence[Lever],
    measure: Measure,
    *,
    accept: Callable[[Point, Move], bool] = lambda point, move: True,
    more: Callable[[Point], bool] = lambda point: True,
    refused: Collection[tuple[str, str]] = (),
    start: Point = (),
    width: int = WIDTH,
) -> Climbed:
    """The best setting that was found. `accept` has the last word on a winner; `more`: is there time to measure it?"""
    best, kept, whole = start, list[Kept](), True
    meter = _Meter(measure, width)
    queue = deque(move for lever in levers for move in _first_moves(lever, best))
    tried: dict[tuple[str, str], int] = {}
    while queue and more(best):
        moves = _round(queue, best, width, refused)
        in_time = [move for move in moves if more(turned(best, move.lever, move.value))]
        whole = whole and in_time == moves
        if not in_time:
            continue
        for move in in_time:
            tried[_key(move)] = tried.get(_key(move), 0) + 1
        ranked, over = _race(best, in_time, meter, more)
        whole = whole and not over
        sure = [(move, gains) for move, gains in ranked if _is_sure(gains)]
        winner = next((one for one in sure if accept(turned(best, one[0].lever, one[0].value), one[0])), None)
        again: list[Move] = []
        if winner is not None:
            move, gains = winner
            before = _value(best, move.lever)
            best = turned(best, move.lever, move.value)
            kept.append(Kept(move, before, tuple(gains)))
            again += _further(move, before)
        if sure:
            # Left behind by one that was kept, or by one that turned out wrong. Another value of the knob that won
            # would take the winner's place, and was slower than it.
            lost = {_key(one) for one, _ in sure}
            won = winner[0].lever.name if winner is not None else None
            left = [one for one, found in ranked if found[0] >= LEAST and _key(one) not in lost]
            again += [one for one in left if one.lever.name != won]
        queue.extendleft(reversed([one for one in again if tried.get(_key(one), 0) < TRIES and one not in queue]))
    return Climbed(best, tuple(kept), whole and not queue)


def _first_moves(lever: Lever, best: Point) -> list[Move]:
    """Of a scale its beginning or the neighbours; of others all values."""
    here = _value(best, lever)
    others = [value for value in lever.values if value != here]
    if lever.ordered and lever.first:
        others = [value for value in lever.first if value in others]
    elif lever.ordered and here in lever.values:
        at = lever.values.index(here)
        others = [*lever.values[at + 1 : at + 2], *lever.values[max(0, at - 1) : at]]
    return [Move(lever, value) for value in others]


def _further(move: Move, before: str) -> list[Move]:
    """One more step in the direction that helped."""
    values = move.lever.values
    if not move.lever.ordered or before not in values:
        return []
    at, was = values.index(move.value), values.index(before)
    nearby = at + (1 if at > was else -1)
    return [Move(move.lever, values[nearby])] if 0 <= nearby < len(values) else []


def _round(queue: deque[Move], best: Point, width: int, refused: Collection[tuple[str, str]]) -> list[Move]:
    """The next contenders: those of one knob that changes everything, else of several at a time."""
    chosen: list[Move] = []
    for move in list(queue):
        if len(chosen) >= width or (chosen and (chosen[0].lever.alone or move.lever.alone)
                                    and move.lever != chosen[0].lever):  # fmt: skip
            break
        queue.remove(move)
        if _key(move) not in refused and _value(best, move.lever) != move.value and move not in chosen:
            chosen.append(move)
    return chosen


class _Meter:
    """Counts measurements, and knows which are so fresh that they need not be taken again to be held against."""

    def __init__(self, measure: Measure, fresh: int) -> None:
        self._measure, self._fresh = measure, fresh
        self._count = 0
        self._last: dict[Point, tuple[int, float]] = {}

    def __call__(self, point: Point, bar: float | None) -> float | None:
        self._count += 1
        score = self._measure(point, bar)
        if score is not None:
            self._last[point] = (self._count, score)
        return score

    def recent(self, point: Point) -> float | None:
        at, score = self._last.get(point, (-math.inf, 0.0))
        return score if self._count - at <= self._fresh else None


def _race(
    best: Point, moves: Sequence[Move], measure: _Meter, more: Callable[[Point], bool]
) -> tuple[list[tuple[Move, list[float]]], bool]:
    """The contenders with their gains over the best, turn by turn, the most promising first; and was time up?"""
    gains: dict[Move, list[float]] = {move: [] for move in moves}
    alive, base, over = list(moves), None, False
    for turn in range(TURNS):
        order: list[Move | None] = [None, *alive] if turn % 2 == 0 else [*reversed(alive), None]
        scores: dict[Move | None, float | None] = {}
        if not turn and (base := measure.recent(best)) is not None:
            # Whoever lost against it was measured just now; only a gain that repeats itself counts.
            order, scores[None] = order[1:], base
        for one in order:
            point = best if one is None else turned(best, one.lever, one.value)
            if over := not more(point):
                break
            scores[one] = measure(point, None if one is None or base is None else base - CUT)
            if one is None:
                base = scores[None]
        if None in scores and base is None:
            return [], over  # the best itself has failed: nothing can be told beside it
        if None not in scores:
            break  # time was up before what they are held against had its turn
        for move in alive:
            if (score := scores.get(move)) is not None and base is not None:
                gains[move].append(score - base)
        alive = [one for one in alive if scores.get(one) is not None and statistics.fmean(gains[one]) >= LEAST]
        alive.sort(key=lambda one: -statistics.fmean(gains[one]))
        alive = alive[: max(1, math.ceil(len(alive) / 2))]
        if over or not alive or (turn and len(alive) == 1 and _is_sure(gains[alive[0]])):
            break
    found = [(move, gains[move]) for move in moves if gains[move]]
    return sorted(found, key=lambda one: (one[0] not in alive, -statistics.fmean(one[1]))), over


def _is_sure(gains: Sequence[float]) -> bool:
    if len(gains) < 2:
        return False
    spread = max(NOISE, statistics.stdev(gains))
    return statistics.fmean(gains) > SURE * spread / math.sqrt(len(gains))


def _value(point: Point, lever: Lever) -> str:
    return dict(point).get(lever.name, lever.now)


def _key(move: Move) -> tuple[str, str]:
    return move.lever.name, move.value


def gain_figure(gains: Sequence[float]) -> Figure:
    """How many times better, from the differences of a few turns."""
    middle, count = statistics.fmean(gains), len(gains)
    spread = max(NOISE, statistics.stdev(gains) if count > 1 else 0.0)
    reach = student_t(0.95, max(2, count - 1)) * spread / math.sqrt(count)
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    words = f"{count} short runs in turns"
    return Figure(value=math.exp(middle), low=low, high=high, basis="measured", source=words)


# the objective


def score_of(
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
    """In logarithms, more is better; `None` where what it rests on is not known.

    `on_target`: the share of requests within the latency target, which tokens that came too late do not count for.
    `floor_tok_s`: the speed that less memory must not cost.
    """
    if objective in ("throughput", "cost"):
        # On one machine an hour costs the same for all settings.
        found, first = _log(output_tok_s), _log(ttft_ms)
        found = None if found is None else found - SOONER * (first or 0.0)
    elif objective == "latency":
        first, each = _log(ttft_ms), _log(tpot_ms)
        found = None if first is None or each is None else -(first + each) / 2
    elif objective == "energy":
        each = _log(energy_j_per_token)
        found = None if each is None else -each
    else:
        taken = _log(None if peak_memory_bytes is None else float(peak_memory_bytes))
        found = None if taken is None else -taken
        if found is not None and floor_tok_s and output_tok_s and output_tok_s < floor_tok_s:
            found -= 4 * math.log(floor_tok_s / output_tok_s)
    if found is None or on_target is None:
        return found
    return found + math.log(max(on_target, 0.01))


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


def target_words(target: LatencyTarget | None) -> str:
    if target is None:
        return ""
    parts = [f"first token within {target.ttft_ms:g} ms"] if target.ttft_ms is not None else []
    parts += [f"each further one within {target.tpot_ms:g} ms"] if target.tpot_ms is not None else []
    return " and ".join(parts)


# the front


def front_of(trials: Iterable[Trial], name: Callable[[Trial], str]) -> tuple[OnFront, ...]:
    """Settings that no other beats in throughput, time to first token and memory at once; the fastest first."""
    found = [(trial, one) for trial in trials if (one := trial.best) is not None]
    known = [(trial, one) for trial, one in found if one.output_tok_s is not None and one.ttft_ms is not None]
    best = [(trial, one) for trial, one in known if not any(_beats(other, one) for _, other in known)]
    rows = [
        OnFront(
            name=name(trial),
            turned=trial.turned,
            output_tok_s=one.output_tok_s or 0.0,
            ttft_ms=one.ttft_ms or 0.0,
            peak_memory_bytes=one.peak_memory_bytes,
        )
        for trial, one in best
    ]
    return tuple(sorted(rows, key=lambda row: -row.output_tok_s))


def _beats(one: Taken, other: Taken) -> bool:
    """At least as good in everything, and better in something."""
    mine, theirs = _figures(one), _figures(other)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _figures(one: Taken) -> tuple[float, float, float]:
    memory = -float(one.peak_memory_bytes) if one.peak_memory_bytes is not None else 0.0
    return one.output_tok_s or 0.0, -(one.ttft_ms or math.inf), memory
