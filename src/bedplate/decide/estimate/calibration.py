"""What was fitted: a few named efficiencies and the bands of what is left over, each with where it comes from."""

from __future__ import annotations

import importlib.resources
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

Limit = Literal["memory bandwidth", "compute", "interconnect", "KV cache", "runtime overhead", "host memory"]


class Band(NamedTuple):
    """How far the truth lies off, as factors on the value: eight of ten published rows are between them."""

    low: float
    high: float

    def around(self, value: float) -> tuple[float, float]:
        return value * self.low, value * self.high

    def inverse(self) -> Band:
        """The band of a time, where this is that of a rate."""
        return Band(1 / self.high, 1 / self.low)


class Expectation(NamedTuple):
    """One way to run, as times: what an Estimate is made from, with what each part of a step costs."""

    ttft_s: float
    tpot_s: float
    """Between two tokens of one stream."""
    output_tok_s: float
    """Over all streams."""
    limit: Limit
    """What the largest part of making a token is spent on."""
    parts_s: dict[Limit, float]
    """Of one step, by what it is spent on."""
    ttft_band: Band
    tpot_band: Band
    output_band: Band
    source: str
    """In a few words, what the figures rest on."""


WIDE = Band(0.5, 2.0)
"""Where nothing was left over to learn from."""


def limit_of_parts(parts: dict[Limit, float]) -> Limit:
    return max(parts, key=lambda name: parts[name])


@lru_cache(maxsize=8)
def table(name: str) -> dict[str, Any]:
    """A data file of this package: `local` or `serving`."""
    shipped = importlib.resources.files("bedplate.decide.estimate") / "data" / f"{name}.json"
    found: dict[str, Any] = msgspec.json.decode(shipped.read_bytes())
    return found
