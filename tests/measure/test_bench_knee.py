"""The knee is found with few loads, whatever the true limit of the engine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs import make_cell

from bedplate.measure.knee import MOST_IN_FLIGHT, choose_next_load, compute_met_share, find_knee
from bedplate.values import replace_fields
from bedplate.values.run import Cell, Flag, Load
from bedplate.values.workload import LatencyTarget

TARGET = LatencyTarget(ttft_ms=1000)


def make_cell_at(concurrency: int, limit: int) -> Cell:
    """A cell of an engine that meets the TTFT target up to a limit."""
    return make_cell("vllm", concurrency, 100.0, ttft_ms=100 if concurrency <= limit else 5000)


@given(limit=st.integers(0, 1500), first=st.lists(st.sampled_from([1, 2, 4, 8, 16, 64]), min_size=1, unique=True))
def test_bisection_finds_the_knee(limit: int, first: list[int]) -> None:
    cells = [make_cell_at(one, limit) for one in first]
    tried = 0
    while (wanted := choose_next_load(cells, TARGET)) is not None:
        assert wanted not in [cell.load for cell in cells] and wanted.concurrency is not None
        cells.append(make_cell_at(wanted.concurrency, limit))
        tried += 1
        assert tried < 30
    found = find_knee(cells, TARGET)
    if found.holds is None:
        assert limit < 1
        return
    low = found.holds.load.concurrency or 0
    assert low <= limit
    if found.breaks is None:
        assert low == MOST_IN_FLIGHT
    else:
        high = found.breaks.load.concurrency or 0
        assert limit < high and (high - low <= 1 or high / low <= 1.1)
    assert tried <= 2 + 2 * math.log2(1024)


def test_ignores_a_higher_load_that_passes() -> None:
    found = find_knee([make_cell_at(1, 1), make_cell_at(4, 1), make_cell_at(8, 100)], TARGET)
    assert found.holds is not None and found.holds.load.concurrency == 1
    assert found.breaks is not None and found.breaks.load.concurrency == 4


def test_ignores_invalid_cells() -> None:
    bad = replace_fields(make_cell_at(4, 100), flags=(Flag(kind="client", text="x", invalid=True),))
    assert compute_met_share(bad, TARGET) is None and find_knee([bad], TARGET).holds is None
    assert choose_next_load([bad], TARGET) is None


@given(limit=st.floats(0.02, 900))
def test_an_open_loop_has_a_rate_as_knee(limit: float) -> None:
    def at(rate: float) -> Cell:
        load = Load(arrivals="poisson", requests_per_s=rate)
        return replace_fields(make_cell_at(1 if rate <= limit else 2, 1), load=load)

    cells = [at(1.0)]
    while (wanted := choose_next_load(cells, TARGET)) is not None:
        assert wanted.requests_per_s is not None and len(cells) < 40
        cells.append(at(wanted.requests_per_s))
    found = find_knee(cells, TARGET)
    assert found.holds is not None and found.breaks is not None
    low, high = found.holds.load.requests_per_s or 0, found.breaks.load.requests_per_s or 0
    assert low <= limit < high and high / low <= 1.1


@pytest.mark.parametrize(("target", "met"), [(LatencyTarget(tpot_ms=200), 1.0), (LatencyTarget(tpot_ms=1), 0.0)])
def test_tpot_targets_count(target: LatencyTarget, met: float) -> None:
    assert compute_met_share(make_cell("vllm", 4, 100.0), target) == met
