"""The schedule of a proof: sides, rounds and their order, within the time left."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.judge.effect import pair_rounds
from bedplate.tuning.rounds import (
    LEAST_TURNS,
    MOST_TURNS,
    PROOF_SHARE,
    WHOLE_SHARE,
    SideTimes,
    choose_shape,
    compute_reserve_s,
    run_rounds,
)
from bedplate.tuning.search import Point

OWN: Point = (("", "own defaults"),)
PLAN: Point = ()
TUNED: Point = (("weights", "Q8_0"),)
TIMES = SideTimes({OWN: 19.0, PLAN: 17.0, TUNED: 12.0})
SECONDS = st.floats(0.05, 120)


def test_more_time_allows_all_sides_and_longer_rounds() -> None:
    found = choose_shape(TIMES, TUNED, (OWN, PLAN), 2000)
    assert found.sides == (OWN, TUNED, PLAN) and found.rounds == 2
    assert choose_shape(TIMES, TUNED, (OWN, PLAN), 300).rounds == 1
    assert choose_shape(SideTimes({OWN: 0.5, TUNED: 0.3}), TUNED, (OWN,), 2000).rounds == 20


def test_little_time_allows_one_opponent_preferably_the_plan() -> None:
    assert choose_shape(TIMES, TUNED, (OWN, PLAN), 110).sides == (PLAN, TUNED)
    quick = SideTimes({OWN: 10.0, PLAN: 17.0, TUNED: 12.0})
    assert choose_shape(quick, TUNED, (OWN, PLAN), 90).sides == (OWN, TUNED)
    assert choose_shape(TIMES, TUNED, (OWN, PLAN), 0).sides == (PLAN, TUNED)


def test_rounds_include_start_up_of_sides_that_cannot_stay_loaded() -> None:
    started = SideTimes(TIMES.waves, {OWN: 60.0, PLAN: 60.0, TUNED: 60.0})
    assert choose_shape(started, TUNED, (OWN, PLAN), 2000).seconds > 180
    assert choose_shape(started, TUNED, (OWN, PLAN), 520).sides == (PLAN, TUNED)


def test_rounds_are_not_shortened_where_starts_take_the_time() -> None:
    short = SideTimes({PLAN: 1.2, TUNED: 1.2}, {PLAN: 45.0, TUNED: 45.0})
    assert choose_shape(short, TUNED, (PLAN,), 330).rounds == 4
    assert choose_shape(short, TUNED, (PLAN,), 0).rounds == 4
    assert choose_shape(SideTimes(short.waves), TUNED, (PLAN,), 8).rounds == 1


@given(SECONDS, SECONDS, SECONDS, st.floats(60, 3600), st.floats(0, 60))
def test_reserved_time_fits_the_proof_and_stays_within_its_share(
    own: float, plan: float, tuned: float, budget_s: float, other_s: float
) -> None:
    times = SideTimes({OWN: own, PLAN: plan, TUNED: tuned})
    left = compute_reserve_s(times, TUNED, (OWN, PLAN), budget_s=budget_s, other_s=other_s)
    shape = choose_shape(times, TUNED, (OWN, PLAN), left - other_s + 1e-6)
    whole_s = LEAST_TURNS * times.estimate_round_s((OWN, TUNED, PLAN), 1) + other_s
    if left > PROOF_SHARE * budget_s:
        assert left == pytest.approx(whole_s) and left <= WHOLE_SHARE * budget_s and len(shape.sides) == 3
    assert left >= PROOF_SHARE * budget_s or LEAST_TURNS * shape.seconds + other_s <= left * (1 + 1e-9)


def test_reserved_time_grows_if_that_allows_a_proof_against_both() -> None:
    slow = SideTimes({OWN: 42.0, PLAN: 41.0, TUNED: 25.0})
    left = compute_reserve_s(slow, TUNED, (OWN, PLAN), budget_s=600)
    assert PROOF_SHARE * 600 < left <= WHOLE_SHARE * 600
    assert choose_shape(slow, TUNED, (OWN, PLAN), left + 1e-6).sides == (OWN, TUNED, PLAN)
    assert compute_reserve_s(slow, TUNED, (OWN, PLAN), budget_s=450) <= PROOF_SHARE * 450


class Sides:
    """Sides with given durations, on a simulated clock."""

    def __init__(self, waves: dict[Point, float], left_s: float, slower: float = 1.0) -> None:
        self.waves, self.left_s, self.slower = waves, left_s, slower
        self.order: list[tuple[Point, int]] = []
        self.now = 0.0

    def measure(self, side: Point, turn: int) -> float | None:
        self.order.append((side, turn))
        took_s = self.waves[side] * self.slower
        self.now += took_s
        return took_s

    def get_left_s(self) -> float:
        return self.left_s - self.now

    def list_moments(self, side: Point) -> list[str | None]:
        return [f"{number:06d}" for number, (one, _) in enumerate(self.order) if one == side]


def test_sides_alternate_so_that_measurements_form_pairs() -> None:
    sides = Sides({OWN: 19.0, PLAN: 17.0, TUNED: 12.0}, 260)
    shape = choose_shape(TIMES, TUNED, (OWN, PLAN), 260)
    found = run_rounds(shape, TUNED, TIMES, sides.measure, set, sides.get_left_s, 0.0)
    assert found.cut and found.turns == 5
    assert [one for one, _ in sides.order[:6]] == [OWN, TUNED, PLAN, PLAN, TUNED, OWN]
    for other in (OWN, PLAN):
        assert len(pair_rounds(sides.list_moments(other), sides.list_moments(TUNED))) == 5


def test_settled_side_is_not_measured_again() -> None:
    sides = Sides({OWN: 19.0, PLAN: 17.0, TUNED: 12.0}, 2000)
    shape = choose_shape(TIMES, TUNED, (OWN, PLAN), 300)

    def settled() -> set[Point]:
        return {OWN, PLAN} if len(sides.order) >= 17 else {OWN}

    found = run_rounds(shape, TUNED, TIMES, sides.measure, settled, sides.get_left_s, 0.0)
    count = Counter(one for one, _ in sides.order)
    assert not found.cut and count[OWN] == LEAST_TURNS and count[PLAN] == count[TUNED] == found.turns == 7
    assert len(pair_rounds(sides.list_moments(PLAN), sides.list_moments(TUNED))) == 7


def test_number_of_rounds_is_limited() -> None:
    sides = Sides({OWN: 1.0, PLAN: 1.0, TUNED: 1.0}, 1e9)
    shape = choose_shape(TIMES, TUNED, (OWN, PLAN), 1e9)
    assert run_rounds(shape, TUNED, TIMES, sides.measure, set, sides.get_left_s, 0.0).turns == MOST_TURNS


@given(SECONDS, SECONDS, SECONDS, st.floats(1, 2000), st.floats(0.5, 2.5))
def test_overrun_is_at_most_one_measurement(
    own: float, plan: float, tuned: float, left_s: float, slower: float
) -> None:
    times = SideTimes({OWN: own, PLAN: plan, TUNED: tuned})
    shape = choose_shape(times, TUNED, (OWN, PLAN), left_s)
    work = {side: shape.rounds * seconds for side, seconds in times.waves.items()}
    sides, late_s = Sides(work, left_s, slower), 0.03 * left_s
    run_rounds(shape, TUNED, times, sides.measure, set, sides.get_left_s, late_s)
    assert sides.now <= left_s + late_s + max(0.0, slower - 1) * max(work.values()) + 1e-6


def test_proof_continues_if_one_opponent_fails() -> None:
    sides = Sides({PLAN: 17.0, TUNED: 12.0}, 2000)

    def measure(side: Point, turn: int) -> float | None:
        return None if side == OWN else sides.measure(side, turn)

    shape = choose_shape(TIMES, TUNED, (OWN, PLAN), 300)
    done = lambda: {PLAN} if len(sides.order) >= 6 else set()  # noqa: E731
    found = run_rounds(shape, TUNED, TIMES, measure, done, sides.get_left_s, 0.0)
    assert not found.cut and found.turns == 3 and {side for side, _ in sides.order} == {PLAN, TUNED}
    assert len(pair_rounds(sides.list_moments(PLAN), sides.list_moments(TUNED))) == 3


def test_proof_ends_if_all_sides_fail() -> None:
    shape = choose_shape(TIMES, TUNED, (OWN, PLAN), 300)
    found = run_rounds(shape, TUNED, TIMES, lambda side, turn: None, set, lambda: 300.0, 0.0)
    assert found.cut and found.turns == 0
