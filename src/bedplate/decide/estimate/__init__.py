"""Performance estimates: physics and a few fitted efficiencies, with an error band and the bottleneck."""

from __future__ import annotations

from bedplate.decide.estimate.calibration import Band, Expectation, Limit
from bedplate.decide.estimate.expectation import compute_expectation, estimate_for, get_limit, to_estimate

__all__ = ["Band", "Expectation", "Limit", "compute_expectation", "estimate_for", "get_limit", "to_estimate"]
