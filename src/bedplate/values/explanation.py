"""The explanation of one prediction: its terms, its assumptions and its bands."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


class ExplainedTerm(Record, frozen=True, kw_only=True):
    """One term of the sum."""

    name: str
    value: float
    """The elementary amount: a time at the data sheet's rates, a fixed cost, or gigabytes."""
    unit: str
    efficiency_name: str = ""
    efficiency: float | None = None
    """The fitted value that applies to it; `None` if the term has none."""
    seconds: float | None = None
    """`None` for memory, whose terms are amounts."""
    share: float


class ExplainedFactor(Record, frozen=True, kw_only=True):
    """A fitted number that scales several terms."""

    name: str
    value: float
    share: float
    """Relative change of the total for a relative change of this number."""


class ExplainedBand(Record, frozen=True, kw_only=True):
    level: int
    low: float
    high: float


class Explanation(Record, frozen=True, kw_only=True):
    """The terms of one prediction; their seconds add up to `total_s`, or their gigabytes to the prediction."""

    schema: Literal["explanation/1"] = "explanation/1"
    row_id: str
    metric: str
    predicted: float
    total_s: float | None
    """The time from which the prediction is computed; `None` for memory."""
    total_is: str
    """What `total_s` is the time of."""
    terms: tuple[ExplainedTerm, ...]
    factors: tuple[ExplainedFactor, ...]
    assumed: dict[str, str]
    """Settings that the row does not state, or that its kind of benchmark implies."""
    bands: tuple[ExplainedBand, ...]
    band_group: str
    band_campaigns: int
    band_rows: int
    far: str
    """Why no published measurement is near; empty if some are."""
