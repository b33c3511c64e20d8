"""One row of a table to its prediction: by the model of one stream, or by that of a serving engine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bedplate.decide.estimate.rows import (
    SERVING_ENGINES,
    SERVING_METRICS,
    Case,
    Prediction,
    Refused,
    resolve,
    why_impossible,
)
from bedplate.errors import BedplateError, OutsideFailed


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
        return _predict_case(case)
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


def _predict_case(case: Case) -> Prediction | Refused:
    from bedplate.decide.estimate import local

    if case.metric in SERVING_METRICS and (case.engine in SERVING_ENGINES or not local.predicts(case)):
        from bedplate.decide.estimate import serving

        return serving.predict(case)
    return local.predict(case)
