"""Schedules the proof: which sides, how many requests per round and how many rounds fit into the time left. Pure.

The sides stay loaded and process the same requests in alternating order (engine defaults, tuned, plan, and back), so
that drift of the machine cancels. `compare` decides whether the result is proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from bedplate.tuning.search import Point

LEAST_TURNS, WANTED_TURNS, MOST_TURNS = 3, 5, 12
"""`compare` needs at least the first; rounds get longer only if there is time for the second."""
LEFT_TURNS = 4
"""Rounds that the search leaves time for: with three, the interval is twice as wide as with five."""
LEAST_WORK_S = 6.0
"""Minimum duration of the fastest side in a round, so that a short stall does not decide the result."""
MOST_ROUNDS = 64
WORK_SHARE = 0.1
"""Minimum duration of a measurement, as a share of the engine start that it needs: a shorter one saves no time."""
PROOF_SHARE = 0.45
"""Maximum share of the budget that the search leaves for the proof."""
WHOLE_SHARE = 0.75
"""The same, if the shortest proof against all sides needs it."""
SPARE = 1.1
"""Expected durations are the measured ones times this factor."""
LATE_SHARE = 0.03
"""Share of the budget by which a measurement that started in time may overrun."""
SURELY = 0.01
"""Significance level for stopping a proof early. Testing after each round at the usual 0.05 would find a difference
sooner or later."""


class RoundShape(NamedTuple):
    """One round of a proof."""

    sides: tuple[Point, ...]
    """In order: the tuned side is next to all others."""
    rounds: int
    """Requests of each stream per measurement."""
    seconds: float
    """Expected duration of a round."""


class ProofOutcome(NamedTuple):
    """How the proof ended."""

    turns: int
    cut: bool
    """Whether the time was up before the result was settled."""


class SideTimes(NamedTuple):
    """Known durations of each side, in seconds."""

    waves: Mapping[Point, float]
    """Duration of one request of each stream."""
    starts: Mapping[Point, float] = {}
    """Start-up time before each measurement, for sides that cannot stay loaded."""

    def estimate_work_s(self, side: Point, rounds: int) -> float:
        return SPARE * (rounds * self.waves[side] + self.starts.get(side, 0.0))

    def count_least_rounds(self, sides: Iterable[Point]) -> int:
        return min(count_rounds_after_start(self.waves[side], self.starts.get(side, 0.0)) for side in sides)

    def estimate_round_s(self, sides: Iterable[Point], rounds: int) -> float:
        return math.fsum(self.estimate_work_s(side, rounds) for side in sides)


def count_rounds_after_start(wave_s: float, start_s: float) -> int:
    """Requests of each stream that take a fair share of the time that was spent on starting the engine."""
    return min(MOST_ROUNDS, max(1, math.ceil(WORK_SHARE * start_s / max(wave_s, 1e-3))))


def choose_shape(times: SideTimes, tuned: Point, against: Sequence[Point], seconds: float) -> RoundShape:
    """Choose the best proof that there is time for: against all sides or one, with as many requests as fit.

    If there is time for only one of two, it is the plan, which comes last: settings that are not better than the plan
    are not used. If there is not even time for the shortest proof, return the shortest.
    """
    known = [one for one in against if one in times.waves]
    single = [[one] for one in reversed(known)] if len(known) > 1 else []
    fields = [_order_sides(tuned, field) for field in [known, *single]]
    for sides in fields:
        shortest = min(times.waves[one] for one in sides)
        rounds = min(MOST_ROUNDS, max(2, math.ceil(LEAST_WORK_S / max(shortest, 1e-3))))
        least = min(rounds, times.count_least_rounds(sides))
        while rounds > least and WANTED_TURNS * times.estimate_round_s(sides, rounds) > seconds:
            rounds = max(least, rounds // 2)
        if LEAST_TURNS * times.estimate_round_s(sides, rounds) <= seconds:
            return RoundShape(sides, rounds, times.estimate_round_s(sides, rounds))
    shortest_field = min(fields, key=lambda sides: times.estimate_round_s(sides, 1))
    rounds = times.count_least_rounds(shortest_field)
    return RoundShape(shortest_field, rounds, times.estimate_round_s(shortest_field, rounds))


def _order_sides(tuned: Point, against: Sequence[Point]) -> tuple[Point, ...]:
    return (*against[:1], tuned, *against[1:])


def compute_reserve_s(
    times: SideTimes, tuned: Point, against: Sequence[Point], *, budget_s: float, other_s: float = 0.0
) -> float:
    """Return the time that the search must leave: the proof, engine starts and the check of answers."""
    most_s = PROOF_SHARE * budget_s
    if tuned not in times.waves:
        return most_s
    found = choose_shape(times, tuned, against, most_s - other_s)
    all_sides = [tuned, *(one for one in against if one in times.waves)]
    whole_s = LEAST_TURNS * times.estimate_round_s(all_sides, 1) + other_s
    if len(found.sides) < len(all_sides) and whole_s <= WHOLE_SHARE * budget_s:
        return whole_s
    return min(LEFT_TURNS * found.seconds + other_s, most_s)


def run_rounds(
    shape: RoundShape,
    tuned: Point,
    times: SideTimes,
    measure: Callable[[Point, int], float | None],
    settled: Callable[[], Collection[Point]],
    left_s: Callable[[], float],
    late_s: float,
) -> ProofOutcome:
    """Measure until the result is settled or the time is up.

    `measure` measures one side in one round and returns its duration; `None` means that it failed, and the proof
    continues against the other side. `settled` returns the sides whose result is settled; they are not measured again.
    `late_s` is how far a measurement may overrun.
    """
    expected = {side: times.estimate_work_s(side, shape.rounds) for side in shape.sides}
    sides = list(shape.sides)
    for turn in range(MOST_TURNS):
        if math.fsum(expected[side] for side in sides) > left_s() + late_s:
            return ProofOutcome(turn, cut=True)
        for side in sides if turn % 2 == 0 else sides[::-1]:
            if expected[side] > left_s() + late_s:
                return ProofOutcome(turn, cut=True)
            took_s = measure(side, turn)
            if took_s is None:
                sides = [one for one in sides if one != side]
                if side == tuned or sides == [tuned]:
                    return ProofOutcome(turn, cut=True)
                continue
            expected[side] = max(took_s, (expected[side] + took_s) / 2)
        if turn + 1 >= LEAST_TURNS:
            done = settled()
            sides = [side for side in sides if side not in done]
            if not [side for side in sides if side != tuned]:
                return ProofOutcome(turn + 1, cut=False)
    return ProofOutcome(MOST_TURNS, cut=False)
