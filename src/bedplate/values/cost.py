"""Cost and energy of a million tokens. Every command uses these names, units and sums."""

from __future__ import annotations

from bedplate.values.record import Record
from bedplate.values.workload import Positive

HOUR_S = 3600.0
MILLION = 1e6
JOULES_PER_KWH = 3.6e6


class Price(Record, frozen=True, kw_only=True):
    """A machine's price as the user stated it; `None`: not stated."""

    price_per_hour: Positive | None = None
    """Price of one accelerator, or of the machine if it has none."""
    watts: Positive | None = None
    """Power of one accelerator, or of the machine if it has none. Used where energy is not measured."""
    electricity_price: Positive | None = None
    """Price of one kWh, in the currency of `price_per_hour`."""

    @property
    def is_given(self) -> bool:
        return self.price_per_hour is not None or self.electricity_price is not None or self.watts is not None

    @property
    def description(self) -> str:
        parts = [
            None if self.price_per_hour is None else f"{self.price_per_hour:g} an hour",
            None if self.watts is None else f"{self.watts:g} W",
            None if self.electricity_price is None else f"{self.electricity_price:g} a kWh",
        ]
        return " and ".join(part for part in parts if part)


class CostPerMillion(Record, frozen=True, kw_only=True):
    """Cost and energy of a million output tokens. If one part of the cost is unknown, the cost is `None`."""

    cost_per_million_tokens: float | None = None
    kwh_per_million_tokens: float | None = None


def compute_cost_per_million(
    price: Price | None, cards: int, output_tok_s: float | None, energy_j_per_token: float | None = None
) -> CostPerMillion:
    """Cost and energy at this throughput on `cards` cards. Uses the measured energy, else the stated watts."""
    price = price or Price()
    hours = MILLION / output_tok_s / HOUR_S if output_tok_s else None
    kwh = None
    if energy_j_per_token is not None:
        kwh = energy_j_per_token * MILLION / JOULES_PER_KWH
    elif price.watts is not None and hours is not None:
        kwh = price.watts * cards / 1000 * hours
    return CostPerMillion(cost_per_million_tokens=_compute_cost(price, cards, hours, kwh), kwh_per_million_tokens=kwh)


def _compute_cost(price: Price, cards: int, hours: float | None, kwh: float | None) -> float | None:
    cost = 0.0
    if price.price_per_hour is not None:
        if hours is None:
            return None
        cost += price.price_per_hour * cards * hours
    if price.electricity_price is not None:
        if kwh is None:
            return None
        cost += price.electricity_price * kwh
    return cost if price.price_per_hour is not None or price.electricity_price is not None else None
