"""Repeated timings are summarized in one figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts.measured.statistics import compute_rates, compute_window_rates, make_figure


def test_a_figure_is_the_median_with_the_extremes_as_range() -> None:
    figure = make_figure([30.0, 10.0, 20.0], "a copy, 2026-11-15")
    assert (figure.value, figure.low, figure.high, figure.basis) == (20.0, 10.0, 30.0, "measured")
    assert figure.source == "a copy, 2026-11-15, 3 repeats"


@given(st.lists(st.floats(1e-6, 1e15), min_size=1))
def test_the_value_is_within_its_range(found: list[float]) -> None:
    figure = make_figure(found, "x")
    assert figure.low <= figure.value <= figure.high


def test_a_duration_of_zero_gives_no_rate() -> None:
    assert compute_rates(100, [2.0, 0.0, 4.0]) == [50.0, 25.0]


def test_blocks_of_several_readers_are_rated_by_the_time_that_passed() -> None:
    """Two readers finish 10 bytes each per second, so the rate is 20 bytes per second."""
    ends = [(1.0, 10), (1.0, 10), (2.0, 10), (2.0, 10), (3.0, 10), (3.0, 10)]
    assert compute_window_rates(ends, began=0.0, count=3) == pytest.approx([20.0, 20.0, 20.0])


def test_fewer_blocks_than_windows_give_fewer_rates() -> None:
    assert compute_window_rates([(2.0, 10)], began=0.0, count=8) == [5.0]
    assert compute_window_rates([], began=0.0, count=8) == []
