"""Measure one window on any OpenAI-compatible endpoint."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from bedplate.measure.load.answers import Answer, read
from bedplate.measure.load.driver import Driven, Driver, Requests, Stretch, Watch, requests_needed
from bedplate.measure.load.own import OwnError, limits, self_check
from bedplate.measure.load.preparing import Prepared, prepare
from bedplate.measure.load.schedule import arrivals, checked
from bedplate.measure.load.target import Target
from bedplate.measure.load.wire import Exchange
from bedplate.values.record import replaced
from bedplate.values.run import Client, Load, Repeat, Sample
from bedplate.values.statistics import quantile
from bedplate.values.workload import RequestShape


async def measure(
    target: Target,
    load: Load,
    *,
    prepared: Prepared | None = None,
    seconds: float = 10.0,
    warmup_s: float = 2.0,
    least_requests: int | None = None,
    most_seconds: float = 60.0,
    timeout_s: float = 120.0,
    round: int = 0,
    shapes: Sequence[RequestShape] = (),
    check: bool | OwnError = True,
    watch: Watch | None = None,
) -> Repeat:
    """Measures one window under a load."""
    checked(load, shapes)
    if prepared is None:
        prepared = await prepare(target, load, shapes=shapes)
    window = Stretch(
        seconds=seconds,
        warmup_s=warmup_s,
        least_requests=least_requests,
        most_seconds=max(seconds, most_seconds),
        timeout_s=timeout_s,
    )
    own = check if isinstance(check, OwnError) else None
    if check is True:
        own = await self_check(expected_in_flight(load, prepared.request_s))
    requests = Requests(target, load, prepared, round, shapes)
    requests.build(requests_needed(load, window, prepared.request_s, len(shapes)))
    schedule = None if load.arrivals == "closed" else arrivals(load, round, shapes)
    driver = Driver(target, load, requests, window, schedule=schedule, request_s=prepared.request_s, watch=watch)
    return told(await driver.run(), target, prepared, own)


def expected_in_flight(load: Load, request_s: float | None) -> int:
    """The number of streams for the self-check."""
    if load.concurrency is not None:
        return load.concurrency
    return min(1024, max(load.burst or 1, math.ceil((load.requests_per_s or 1.0) * (request_s or 1.0))))


def told(driven: Driven, target: Target, prepared: Prepared, own: OwnError | None) -> Repeat:
    """Parses the responses after the measurement."""
    window = [each for each in driven.exchanges if each.measured]
    answers = {id(each): read(each) for each in driven.exchanges if each.end_ns >= driven.begin_ns}
    samples = tuple(sorted((sample_of(each, answers[id(each)], driven, target) for each in window), key=_at))
    good = [each for each in window if answers[id(each)].outcome == "ok"]
    lags = [(each.sent_ns - each.due_ns) / 1e6 for each in window if not each.fresh and each.sent_ns]
    client = Client(
        error_p50_ms=own.p50_ms if own else None,
        error_p99_ms=own.p99_ms if own else None,
        send_lag_p99_ms=_p99(lags),
        loop_lag_p99_ms=_p99([lag / 1e6 for lag in driven.loop_lag_ns]),
        cpu_share=driven.cpu_s / driven.seconds,
    )
    reasons = limits(client, [sample.ttft_ms for sample in samples if sample.ttft_ms is not None])
    return Repeat(
        at=driven.at,
        seconds=driven.seconds,
        samples=samples,
        delivered_tokens=delivered(driven, answers),
        warmup=sum(each.sent_ns < driven.begin_ns for each in driven.exchanges),
        exact_prompt=_all_as_asked((answers[id(each)].prompt_tokens, each.prompt_tokens) for each in good),
        exact_output=_all_as_asked((answers[id(each)].output_tokens, each.output_tokens) for each in good),
        in_flight_max=driven.in_flight_max,
        reopened=driven.reopened,
        notes=prepared.notes,
        client=replaced(client, limit=bool(reasons), reasons=reasons),
    )


def sample_of(exchange: Exchange, answer: Answer, driven: Driven, target: Target) -> Sample:
    stamps = answer.text_ns
    last_ns = answer.last_ns if answer.outcome == "ok" and answer.last_ns is not None else exchange.end_ns
    return Sample(
        at_s=max(0, exchange.sent_ns - driven.begin_ns) / 1e9,
        late_ms=max(0, exchange.sent_ns - exchange.due_ns) / 1e6,
        ttft_ms=(stamps[0] - exchange.sent_ns) / 1e6 if stamps else None,
        duration_ms=(last_ns - exchange.sent_ns) / 1e6,
        gaps_ms=tuple((after - before) / 1e6 for before, after in itertools.pairwise(stamps)),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        finish=answer.finish,
        outcome=answer.outcome,
        error=None if answer.error is None else target.without_key(answer.error),
    )


def delivered(driven: Driven, answers: dict[int, Answer]) -> float | None:
    """Output tokens within the measurement window: the token count of each answer times its share of events inside."""
    total, counted = 0.0, False
    for answer in answers.values():
        if not answer.text_ns or answer.output_tokens is None:
            continue
        counted = True
        within = bisect_left(answer.text_ns, driven.end_ns) - bisect_left(answer.text_ns, driven.begin_ns)
        total += answer.output_tokens * within / len(answer.text_ns)
    return total if counted else None


def _all_as_asked(pairs: Iterator[tuple[int | None, int]]) -> bool | None:
    """Whether all counts are as requested; `None` if there are no counts."""
    known = [(found, asked) for found, asked in pairs if found is not None]
    return all(found == asked for found, asked in known) if known else None


def _p99(values: Sequence[float]) -> float:
    return max(0.0, quantile(sorted(values), 0.99)) if values else 0.0


def _at(sample: Sample) -> float:
    return sample.at_s
