"""Statistics compared with numpy and with published tables."""

from __future__ import annotations

import math
import statistics

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.measure.statistics import (
    compute_half_width,
    compute_percentiles,
    compute_pseudo_median,
    compute_serial_correlation,
    compute_shift,
    compute_student_t,
)
from bedplate.values.statistics import compute_quantile

figures = st.floats(min_value=0, max_value=1e6, allow_nan=False)


@given(st.lists(figures, min_size=1, max_size=200), st.floats(min_value=0, max_value=1))
def test_quantile_equals_numpys(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = compute_quantile(ordered, share)
    assert ordered[0] <= found <= ordered[-1]
    assert found == pytest.approx(float(numpy.quantile(values, share)), rel=1e-9, abs=1e-9)


@given(st.lists(figures, min_size=1, max_size=300))
def test_percentiles_are_ordered_and_none_for_too_few_samples(values: list[float]) -> None:
    found = compute_percentiles(values)
    assert found is not None and found.count == len(values)
    shown = [one for one in (found.p50, found.p90, found.p95, found.p99, found.max) if one is not None]
    assert shown == sorted(shown)
    assert (found.p90 is None, found.p95 is None, found.p99 is None) == tuple(len(values) < n for n in (10, 20, 100))


def test_no_values_have_no_percentiles() -> None:
    assert compute_percentiles([]) is None


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.95, 7, 2.365), (0.95, 30, 2.042), (0.99, 3, 5.841),
     (0.9875, 4, 4.315), (0.95, 1000, 1.960)],
)  # fmt: skip
def test_students_t_matches_published_tables(confidence: float, degrees: int, expected: float) -> None:
    assert compute_student_t(confidence, degrees) == pytest.approx(expected, rel=2e-3)


def test_one_value_has_no_half_width() -> None:
    assert compute_half_width([3.0]) is None and compute_half_width([]) is None
    assert compute_student_t(0.95, 0) == math.inf


def test_half_width_is_that_of_the_t_interval() -> None:
    values = [98.0, 101.0, 103.0]
    assert compute_half_width(values) == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3), rel=1e-3)


@given(st.lists(st.floats(min_value=-10, max_value=10), min_size=1, max_size=12), st.floats(min_value=-5, max_value=5))
def test_pseudo_median_shifts_with_its_values(values: list[float], by: float) -> None:
    assert compute_pseudo_median([value + by for value in values]) == pytest.approx(
        compute_pseudo_median(values) + by, abs=1e-9
    )
    assert min(values) <= compute_pseudo_median(values) <= max(values)
    assert compute_shift(values, [value + by for value in values]) == pytest.approx(by, abs=20)


def test_pseudo_median_is_robust_against_an_outlier() -> None:
    assert abs(compute_pseudo_median([0.0, 0.01, -0.01, 0.02, 9.0])) < 0.03


def test_serial_correlation_of_rising_and_alternating_values() -> None:
    assert compute_serial_correlation([float(number) for number in range(20)]) > 0.7
    assert compute_serial_correlation([(-1.0) ** number for number in range(20)]) < -0.7
    assert compute_serial_correlation([1.0, 2.0]) == 0.0 and compute_serial_correlation([5.0] * 10) == 0.0
