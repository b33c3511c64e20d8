"""Arrival times of requests, in seconds from the start of the load. Pure and deterministic for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bedplate.errors import UsageError
from bedplate.values.run import Load
from bedplate.values.workload import RequestShape

MOST_IN_FLIGHT = 4096


def check_load(load: Load, shapes: Sequence[RequestShape] = ()) -> None:
    """Raises `UsageError` if a load lacks a field that its kind of arrivals needs."""
    if load.arrivals == "closed" and load.concurrency is None:
        raise UsageError("a closed loop needs a concurrency", hint="specify the number of requests in flight")
    if load.arrivals == "sessions" and load.sessions is None:
        raise UsageError("a load of sessions needs their number", hint="specify the sessions at the same time")
    if load.arrivals == "sessions" and load.scenario is None and not shapes:
        raise UsageError("a load of sessions needs a scenario or a trace")
    if load.arrivals in ("poisson", "constant", "burst") and load.requests_per_s is None:
        raise UsageError(f"{load.arrivals} arrivals need a rate", hint="specify the requests per second")
    if load.arrivals == "burst" and load.burst is None:
        raise UsageError("bursts need a size", hint="specify the number of requests in a burst")
    if load.arrivals == "replay" and not shapes:
        raise UsageError("a replay needs the requests of a trace")
    if load.arrivals == "replay" and any(_lacks_time(shape) for shape in shapes):
        hint = "specify a rate instead of a replay"
        if any(shape.session is not None for shape in shapes):
            hint = "specify the sessions at the same time (--concurrency) or per second (--rate)"
        raise UsageError("the trace has no arrival times", hint=hint)
    streams = load.concurrency or load.sessions
    if streams is not None and streams > MOST_IN_FLIGHT:
        raise UsageError(f"a concurrency of {streams} is more than the maximum of {MOST_IN_FLIGHT}")
    if load.shared_prefix_tokens >= load.prompt_tokens and load.shared_prefix_tokens:
        raise UsageError(
            f"a shared prefix of {load.shared_prefix_tokens} tokens is not shorter than a prompt of "
            f"{load.prompt_tokens} tokens",
            hint="specify a shorter shared prefix",
        )


def _lacks_time(shape: RequestShape) -> bool:
    """A later turn of a session may follow the answer before it instead."""
    return shape.started_s is None and (shape.session is None or shape.wait_s is None)


def schedule_arrivals(load: Load, round_number: int = 0, shapes: Sequence[RequestShape] = ()) -> Iterator[float]:
    """The arrival times of an open loop; endless, except for a replay."""
    rate = load.requests_per_s or 0.0
    if load.arrivals == "poisson":
        return _draw_poisson(rate, random.Random(f"{load.seed}/{round_number}/arrivals"))  # noqa: S311
    if load.arrivals == "constant":
        return (number / rate for number in _count_up())
    if load.arrivals == "burst":
        size = load.burst or 1
        return (number // size * size / rate for number in _count_up())
    if load.arrivals == "replay":
        return iter(_subtract_first([shape.started_s or 0.0 for shape in shapes]))
    raise ValueError("a closed loop has no schedule")


def compute_stagger_s(concurrency: int, warmup_s: float, request_s: float | None) -> float:
    """The time over which the first requests of a closed loop are spread: about one request, within the warm-up."""
    if concurrency == 1:
        return 0.0
    return min(warmup_s / 2, request_s) if request_s is not None else warmup_s / 2


def _count_up() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _draw_poisson(rate: float, rng: random.Random) -> Iterator[float]:
    moment = 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment


def _subtract_first(moments: Sequence[float]) -> list[float]:
    first = min(moments)
    return sorted(moment - first for moment in moments)
