"""The estimator's traits of an engine, by its id."""

from __future__ import annotations

from bedplate.engines import EstimateTraits, all_engines

OTHER = "other"
"""In published tables, an engine that bedplate does not know."""
_OF_OTHERS = EstimateTraits(one_stream=True, plain_products=True, memory_known=False)


def traits_of(engine: str) -> EstimateTraits:
    known = all_engines().get(engine)
    return known.estimate if known is not None else _OF_OTHERS


def timed_as(engine: str) -> str:
    """The engine whose efficiencies apply: some engines are wrappers around another one."""
    known = all_engines().get(engine)
    return (known.runs_engine if known is not None else None) or engine
