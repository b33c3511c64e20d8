"""The fitted data: a few named efficiencies and the error bands of the fit, each with its source."""

from __future__ import annotations

import importlib.resources
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

Limit = Literal["memory bandwidth", "compute", "interconnect", "KV cache", "runtime overhead", "host memory"]


class Band(NamedTuple):
    """The error band as factors of the estimate: eight of ten published rows are within it."""

    low: float
    high: float

    def get_bounds(self, value: float) -> tuple[float, float]:
        return value * self.low, value * self.high

    def invert(self) -> Band:
        """The band of a time, if this is the band of a rate."""
        return Band(1 / self.high, 1 / self.low)


class Expectation(NamedTuple):
    """The expected times of one configuration, and the cost of each part of a step; the basis of an Estimate."""

    ttft_s: float
    tpot_s: float
    """Time between two tokens of one stream."""
    output_tok_s: float
    """Over all streams."""
    limit: Limit
    """The bottleneck: where the largest part of a token's time is spent."""
    parts_s: dict[Limit, float]
    """The time of one step by limit."""
    ttft_band: Band
    tpot_band: Band
    output_band: Band
    source: str
    """What the figures are based on, in short."""
    accept_s: float = 0.0
    """The part of `ttft_s` in which a single request is accepted, and nothing is computed; 0 for several requests."""


WIDE = Band(0.5, 2.0)
"""Used if there is no data to compute a band from."""


def find_limit(parts: dict[Limit, float]) -> Limit:
    return max(parts, key=lambda name: parts[name])


@lru_cache(maxsize=8)
def load_table(name: str) -> dict[str, Any]:
    """A data file of this package: `local` or `serving`."""
    shipped = importlib.resources.files("bedplate.decide.estimate") / "data" / f"{name}.json"
    found: dict[str, Any] = msgspec.json.decode(shipped.read_bytes())
    return found
