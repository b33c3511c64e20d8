"""The one way in which quantiles are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def compute_quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, interpolated linearly between the two nearest."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    # Written so that it stays between its neighbours whatever rounding does.
    return min(max(ordered[below] + (ordered[above] - ordered[below]) * (position - below), ordered[below]),
               ordered[above])  # fmt: skip
