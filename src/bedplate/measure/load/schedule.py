"""When requests are due. Pure: seconds from the start of the load, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bedplate.errors import BadQuestion
from bedplate.values.run import Load
from bedplate.values.workload import RequestShape

MOST_IN_FLIGHT = 4096


def checked(load: Load, shapes: Sequence[RequestShape] = ()) -> None:
    """Raises `BadQuestion` where a load does not say what its arrivals need."""
    if load.arrivals == "closed" and load.concurrency is None:
        raise BadQuestion("a closed loop needs a concurrency", hint="how many requests are to be in flight?")
    if load.arrivals in ("poisson", "constant", "burst") and load.requests_per_s is None:
        raise BadQuestion(f"{load.arrivals} arrivals need a rate", hint="how many requests each second?")
    if load.arrivals == "burst" and load.burst is None:
        raise BadQuestion("bursts need a size", hint="how many requests come at once?")
    if load.arrivals == "replay" and not shapes:
        raise BadQuestion("a replay needs the requests of a trace")
    if load.arrivals == "replay" and any(shape.started_s is None for shape in shapes):
        raise BadQuestion("the trace does not say when its requests came", hint="give a rate instead of a replay")
    if load.concurrency is not None and load.concurrency > MOST_IN_FLIGHT:
        raise BadQuestion(f"one client keeps at most {MOST_IN_FLIGHT} requests in flight")
    if load.shared_prefix_tokens >= load.prompt_tokens and load.shared_prefix_tokens:
        raise BadQuestion(
            f"a prompt of {load.prompt_tokens} tokens cannot share {load.shared_prefix_tokens} of them with all others",
            hint="leave some tokens that are its own",
        )


def arrivals(load: Load, round_number: int = 0, shapes: Sequence[RequestShape] = ()) -> Iterator[float]:
    """The moments of an open loop; without end, but for a replay."""
    rate = load.requests_per_s or 0.0
    if load.arrivals == "poisson":
        return _poisson(rate, random.Random(f"{load.seed}/{round_number}/arrivals"))  # noqa: S311
    if load.arrivals == "constant":
        return (number / rate for number in _forever())
    if load.arrivals == "burst":
        size = load.burst or 1
        return (number // size * size / rate for number in _forever())
    if load.arrivals == "replay":
        return iter(_relative([shape.started_s or 0.0 for shape in shapes]))
    raise ValueError("a closed loop has no schedule")


def stagger_s(concurrency: int, warmup_s: float, request_s: float | None) -> float:
    """Over how long the first requests of a closed loop are spread: about one request, within the warm-up."""
    if concurrency == 1:
        return 0.0
    return min(warmup_s / 2, request_s) if request_s is not None else warmup_s / 2


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _poisson(rate: float, chance: random.Random) -> Iterator[float]:
    moment = 0.0
    while True:
        moment += chance.expovariate(rate)
        yield moment


def _relative(moments: Sequence[float]) -> list[float]:
    first = min(moments)
    return sorted(moment - first for moment in moments)
