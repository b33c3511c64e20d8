"""Performance estimates: physics and a few fitted efficiencies, with an error band and the bottleneck."""

from __future__ import annotations

from bedplate.decide.estimate.calibration import Band, Expectation, Limit
from bedplate.decide.estimate.expectation import estimate_for, estimate_of, expectation_for, limit_of

__all__ = ["Band", "Expectation", "Limit", "estimate_for", "estimate_of", "expectation_for", "limit_of"]
