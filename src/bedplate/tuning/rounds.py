"""The proof of what a search has found: how much work, which sides, how many turns, within the time that is left. Pure.

The sides stay loaded beside each other and do the same pieces of work in alternating order, own defaults, tuned, plan
and back again, so that what drifts with the machine drops out of their differences. Whether it is proven is for
`compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from bedplate.tuning.search import Point

LEAST_TURNS, WANTED_TURNS, MOST_TURNS = 3, 5, 12
"""Fewer than the first prove nothing (`compare`); more work in each turn only where there is time for the second."""
LEFT_TURNS = 4
"""What a search leaves time for: of three turns the interval is twice as wide as of five."""
LEAST_WORK_S = 6.0
"""What the fastest side's piece of work should take, so that a short standstill of the machine does not decide it."""
MOST_ROUNDS = 64
PROOF_SHARE = 0.45
"""Of the whole time, what a search leaves to the proof at the most."""
WHOLE_SHARE = 0.75
"""Likewise, where it takes that for the least proof against all that it has to be held against."""
SPARE = 1.1
"""Work takes longer than it took: by so much is it expected to."""
LATE_SHARE = 0.03
"""Of the whole time, by how much a piece of work that was begun in time may end late."""
SURELY = 0.01
"""Chance at which a proof is settled before its time. Looking after each turn at the usual one in twenty would find
something sooner or later."""


class Shape(NamedTuple):
    """One turn of a proof."""

    sides: tuple[Point, ...]
    """In their order: who is proven stands next to all others."""
    rounds: int
    """Of a piece of work: requests of each stream."""
    seconds: float
    """That a turn is expected to take."""


class Proven(NamedTuple):
    """What the sides did, turn by turn."""

    turns: int
    cut: bool
    """Whether time was up before it was settled."""


class Times(NamedTuple):
    """Seconds of each side, as far as they are known."""

    waves: Mapping[Point, float]
    """Of one round."""
    starts: Mapping[Point, float] = {}
    """Before each piece of work, where there is no room to stay loaded."""

    def work_s(self, side: Point, rounds: int) -> float:
        return SPARE * (rounds * self.waves[side] + self.starts.get(side, 0.0))

    def turn_s(self, sides: Iterable[Point], rounds: int) -> float:
        return math.fsum(self.work_s(side, rounds) for side in sides)


def shaped(times: Times, tuned: Point, against: Sequence[Point], seconds: float) -> Shape:
    """The best proof that there is time for: against all, else against one; with more work a turn where it fits.

    Of two it is the plan, which comes last: what is not better than that is not used. Where there is not even time for
    the least, the least it is.
    """
    known = [one for one in against if one in times.waves]
    single = [[one] for one in reversed(known)] if len(known) > 1 else []
    fields = [_ordered(tuned, field) for field in [known, *single]]
    for sides in fields:
        shortest = min(times.waves[one] for one in sides)
        rounds = min(MOST_ROUNDS, max(2, math.ceil(LEAST_WORK_S / max(shortest, 1e-3))))
        while rounds > 1 and WANTED_TURNS * times.turn_s(sides, rounds) > seconds:
            rounds //= 2
        if LEAST_TURNS * times.turn_s(sides, rounds) <= seconds:
            return Shape(sides, rounds, times.turn_s(sides, rounds))
    least = min(fields, key=lambda sides: times.turn_s(sides, 1))
    return Shape(least, 1, times.turn_s(least, 1))


def _ordered(tuned: Point, against: Sequence[Point]) -> tuple[Point, ...]:
    return (*against[:1], tuned, *against[1:])


def reserve_s(times: Times, tuned: Point, against: Sequence[Point], *, budget_s: float, other_s: float = 0.0) -> float:
    """What a search has to leave over: the proof, and what comes before it (starts, a look at the answers)."""
    most_s = PROOF_SHARE * budget_s
    if tuned not in times.waves:
        return most_s
    found = shaped(times, tuned, against, most_s - other_s)
    all_sides = [tuned, *(one for one in against if one in times.waves)]
    whole_s = LEAST_TURNS * times.turn_s(all_sides, 1) + other_s
    if len(found.sides) < len(all_sides) and whole_s <= WHOLE_SHARE * budget_s:
        return whole_s
    return min(LEFT_TURNS * found.seconds + other_s, most_s)


def take_turns(
    shape: Shape,
    tuned: Point,
    times: Times,
    measure: Callable[[Point, int], float | None],
    settled: Callable[[], Collection[Point]],
    left_s: Callable[[], float],
    late_s: float,
) -> Proven:
    """Measures until it is settled or time is up.

    `measure` does one side's piece of work of a turn, and says how long that took; `None`: it did not, and the proof
    goes on against the other one. `settled`: the sides against which nothing more has to be shown, which are left out
    from then on. `late_s`: how far beyond its time a piece of work may reach.
    """
    expected = {side: times.work_s(side, shape.rounds) for side in shape.sides}
    sides = list(shape.sides)
    for turn in range(MOST_TURNS):
        if math.fsum(expected[side] for side in sides) > left_s() + late_s:
            return Proven(turn, cut=True)
        for side in sides if turn % 2 == 0 else sides[::-1]:
            if expected[side] > left_s() + late_s:
                return Proven(turn, cut=True)
            took_s = measure(side, turn)
            if took_s is None:
                sides = [one for one in sides if one != side]
                if side == tuned or sides == [tuned]:
                    return Proven(turn, cut=True)
                continue
            expected[side] = max(took_s, (expected[side] + took_s) / 2)
        if turn + 1 >= LEAST_TURNS:
            done = settled()
            sides = [side for side in sides if side not in done]
            if not [side for side in sides if side != tuned]:
                return Proven(turn + 1, cut=False)
    return Proven(MOST_TURNS, cut=False)
