"""How fast it should be: physics first, then a few fitted efficiencies, with a band and with what limits it."""

from __future__ import annotations

from bedplate.decide.estimate.calibration import Band, Expectation, Limit
from bedplate.decide.estimate.expectation import estimate_for, estimate_of, expectation_for, limit_of
from bedplate.decide.estimate.prediction import predict
from bedplate.decide.estimate.rows import OUTPUT_COLUMNS, Prediction, Refused

__all__ = [
    "OUTPUT_COLUMNS", "Band", "Expectation", "Limit", "Prediction", "Refused", "estimate_for", "estimate_of",
    "expectation_for", "limit_of", "predict",
]  # fmt: skip
