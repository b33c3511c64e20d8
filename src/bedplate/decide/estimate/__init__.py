"""How fast it should be: physics first, then a few fitted efficiencies, with a band and with what limits it."""

from __future__ import annotations

from bedplate.decide.estimate.calibration import Band, Expectation, Limit
from bedplate.decide.estimate.expectation import estimate_for, estimate_of, expectation_for, limit_of

__all__ = ["Band", "Expectation", "Limit", "estimate_for", "estimate_of", "expectation_for", "limit_of"]
