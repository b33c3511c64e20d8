"""Cost and energy of a million tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.values.cost import CostPerMillion, Price, compute_cost_per_million

amounts = st.floats(0.001, 1000)


def test_cost_is_price_per_hour_over_tokens_per_hour() -> None:
    found = compute_cost_per_million(Price(price_per_hour=3.6, watts=500, electricity_price=0.25), 2, 1000.0)
    assert found.cost_per_million_tokens is not None
    # A million tokens take 1,000 s: two cards at 3.6 an hour, and 2 x 0.5 kW for that time.
    assert found.kwh_per_million_tokens == pytest.approx(1000 / 3600)
    assert found.cost_per_million_tokens == pytest.approx(2 * 3.6 * 1000 / 3600 + 0.25 * 1000 / 3600)


def test_measured_energy_takes_precedence_over_stated_watts() -> None:
    found = compute_cost_per_million(Price(watts=500), 1, 1000.0, energy_j_per_token=3.6)
    assert found.kwh_per_million_tokens == pytest.approx(1.0) and found.cost_per_million_tokens is None


@pytest.mark.parametrize(
    ("price", "rate", "cost", "kwh"),
    [
        (None, 100.0, False, False),
        (Price(), 100.0, False, False),
        (Price(price_per_hour=1), None, False, False),
        (Price(price_per_hour=1), 0.0, False, False),
        (Price(price_per_hour=1), 100.0, True, False),
        (Price(watts=1), 100.0, False, True),
        (Price(electricity_price=1), 100.0, False, False),
        (Price(price_per_hour=1, electricity_price=1), 100.0, False, False),
        (Price(electricity_price=1, watts=1), 100.0, True, True),
    ],
)
def test_missing_inputs_give_no_cost(price: Price | None, rate: float | None, cost: bool, kwh: bool) -> None:
    found = compute_cost_per_million(price, 1, rate)
    assert (found.cost_per_million_tokens is not None, found.kwh_per_million_tokens is not None) == (cost, kwh)
    assert found != CostPerMillion() or not (cost or kwh)


@given(amounts, amounts, amounts, amounts, st.integers(1, 64))
def test_twice_the_throughput_is_half_the_cost(
    price: float, watts: float, electricity: float, rate: float, cards: int
) -> None:
    paid = Price(price_per_hour=price, watts=watts, electricity_price=electricity)
    one, two = compute_cost_per_million(paid, cards, rate), compute_cost_per_million(paid, cards, 2 * rate)
    for name in ("cost_per_million_tokens", "kwh_per_million_tokens"):
        assert math.isclose(getattr(one, name), 2 * getattr(two, name), rel_tol=1e-9)
