"""Predicts one row, or gives the reason why it cannot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bedplate.decide.estimate.engines import traits_of
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.published import one_stream, under_load
from bedplate.published.rows import SERVING_METRICS, Case, Prediction, Refused, resolve, why_impossible


def predict(row: Mapping[str, str | None]) -> Prediction | Refused:
    """The row's metric with its error band, or why there is none. No row raises an error, but a damaged file does."""
    try:
        case = resolve(row)
    except (BedplateError, ArithmeticError, ValueError, LookupError) as error:
        return Refused(f"cannot read the row: {error}")
    if isinstance(case, Refused):
        return case
    if (why := why_impossible(case)) is not None:
        return Refused(why)
    try:
        return predicted(case)
    except OutsideFailed:
        raise
    except (BedplateError, ArithmeticError) as error:
        return Refused(f"cannot compute the prediction: {error}")
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise OutsideFailed(
            "cannot read the fitted efficiencies of the estimator",
            cause=f"{type(error).__name__}: {error}",
            hint="a data file of bedplate is damaged; reinstall bedplate",
        ) from error


def predicted(case: Case) -> Prediction | Refused:
    if case.metric in SERVING_METRICS and (
        traits_of(case.engine).kernels == "serving" or not one_stream.predicts(case)
    ):
        return under_load.predict(case)
    return one_stream.predict(case)
