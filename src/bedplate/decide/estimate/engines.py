"""The estimator's traits of an engine, by its id."""

from __future__ import annotations

from bedplate.engines import EstimateTraits, load_engines

OTHER = "other"
"""In published tables, an engine that bedplate does not know."""
_OF_OTHERS = EstimateTraits(one_stream=True, plain_products=True, memory_known=False)


def get_traits(engine: str) -> EstimateTraits:
    known = load_engines().get(engine)
    return known.estimate if known is not None else _OF_OTHERS


def divides_by_memory(engine: str) -> bool:
    """Whether the cards of a pipeline get layers in proportion to their memory."""
    known = load_engines().get(engine)
    return known is not None and known.loading.divides == "by memory"


def get_timed_engine(engine: str) -> str:
    """The engine whose efficiencies apply: some engines are wrappers around another one."""
    known = load_engines().get(engine)
    return (known.runs_engine if known is not None else None) or engine
