"""A row in, a prediction or the reason for none out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bedplate.decide.estimate.engines import traits_of
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.published import one_stream, under_load
from bedplate.published.rows import SERVING_METRICS, Case, Prediction, Refused, resolve, why_impossible


def predict(row: Mapping[str, str | None]) -> Prediction | Refused:
    """The row's metric with its band, or why there is none. No row makes it raise; a damaged data file does."""
    try:
        case = resolve(row)
    except (BedplateError, ArithmeticError, ValueError, LookupError) as error:
        return Refused(f"cannot be understood: {error}")
    if isinstance(case, Refused):
        return case
    if (why := why_impossible(case)) is not None:
        return Refused(why)
    try:
        return predicted(case)
    except OutsideFailed:
        raise
    except (BedplateError, ArithmeticError) as error:
        return Refused(f"cannot be computed: {error}")
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise OutsideFailed(
            "the fitted figures that estimates rest on cannot be read",
            cause=f"{type(error).__name__}: {error}",
            hint="a file of bedplate itself is damaged: install it again",
        ) from error


def predicted(case: Case) -> Prediction | Refused:
    if case.metric in SERVING_METRICS and (
        traits_of(case.engine).kernels == "serving" or not one_stream.predicts(case)
    ):
        return under_load.predict(case)
    return one_stream.predict(case)
