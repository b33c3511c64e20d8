"""Predicts one row, or gives the reason why it cannot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bedplate.decide.estimate.engines import get_traits
from bedplate.errors import BedplateError, ExternalFailure
from bedplate.published import one_stream, under_load
from bedplate.published.rows import (
    SERVING_METRICS,
    PredictionRefusal,
    PublishedCase,
    RowPrediction,
    explain_impossible,
    resolve,
)


def predict(row: Mapping[str, str | None]) -> RowPrediction | PredictionRefusal:
    """The row's metric with its error band, or why there is none. No row raises an error, but a damaged file does."""
    try:
        case = resolve(row)
    except (BedplateError, ArithmeticError, ValueError, LookupError) as error:
        return PredictionRefusal(f"cannot read the row: {error}")
    if isinstance(case, PredictionRefusal):
        return case
    if (why := explain_impossible(case)) is not None:
        return PredictionRefusal(why)
    try:
        return predict_case(case)
    except ExternalFailure:
        raise
    except (BedplateError, ArithmeticError) as error:
        return PredictionRefusal(f"cannot compute the prediction: {error}")
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ExternalFailure(
            "cannot read the fitted efficiencies of the estimator",
            cause=f"{type(error).__name__}: {error}",
            hint="a data file of bedplate is damaged; reinstall bedplate",
        ) from error


def predict_case(case: PublishedCase) -> RowPrediction | PredictionRefusal:
    return under_load.predict(case) if is_under_load(case) else one_stream.predict(case)


def is_under_load(case: PublishedCase) -> bool:
    """Whether the model of continuous batching predicts the case, not that of one or a few streams."""
    if case.metric == "output_tok_s_total" and case.machine.kind == "cpu":
        return False
    return case.metric in SERVING_METRICS and (
        get_traits(case.engine).kernels == "serving" or not one_stream.can_predict(case)
    )
