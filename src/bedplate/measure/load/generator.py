"""Measure one window on any OpenAI-compatible endpoint."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from bedplate.measure.load.answers import StreamedAnswer, read
from bedplate.measure.load.client_error import ClientErrorFigures, list_client_limits, measure_client_error
from bedplate.measure.load.driver import (
    LoadDriver,
    LoadRecord,
    MeasurementWindow,
    RequestFactory,
    Watch,
    estimate_requests,
)
from bedplate.measure.load.preparing import PreparedEndpoint, prepare
from bedplate.measure.load.schedule import check_load, schedule_arrivals
from bedplate.measure.load.sessions import SessionFactory
from bedplate.measure.load.target import LoadTarget
from bedplate.measure.load.trace_sessions import has_sessions
from bedplate.measure.load.wire import HttpExchange
from bedplate.values.record import replace_fields
from bedplate.values.run import ClientAccuracy, Load, Repeat, Sample
from bedplate.values.statistics import compute_quantile
from bedplate.values.workload import RequestShape


async def measure(
    target: LoadTarget,
    load: Load,
    *,
    prepared: PreparedEndpoint | None = None,
    seconds: float = 10.0,
    warmup_s: float = 2.0,
    least_requests: int | None = None,
    most_seconds: float = 60.0,
    timeout_s: float = 120.0,
    round: int = 0,
    shapes: Sequence[RequestShape] = (),
    check: bool | ClientErrorFigures = True,
    watch: Watch | None = None,
) -> Repeat:
    """Measures one window under a load."""
    check_load(load, shapes)
    if prepared is None:
        prepared = await prepare(target, load, shapes=shapes)
    window = MeasurementWindow(
        seconds=seconds,
        warmup_s=warmup_s,
        least_requests=least_requests,
        most_seconds=max(seconds, most_seconds),
        timeout_s=timeout_s,
    )
    own = check if isinstance(check, ClientErrorFigures) else None
    if check is True:
        own = await measure_client_error(estimate_in_flight(load, prepared.request_s))
    in_sessions = load.has_sessions or has_sessions(shapes)
    requests = (SessionFactory if in_sessions else RequestFactory)(target, load, prepared, round, shapes)
    requests.build(estimate_requests(load, window, prepared.request_s, len(shapes)))
    schedule: Iterator[float] | None = None
    if isinstance(requests, SessionFactory) and load.arrivals == "replay":
        schedule = iter(requests.list_starts_s())
    elif load.arrivals not in ("closed", "sessions"):
        schedule = schedule_arrivals(load, round, shapes)
    driver = LoadDriver(target, load, requests, window, schedule=schedule, request_s=prepared.request_s, watch=watch)
    repeat = make_repeat(await driver.run(), target, prepared, own)
    if not isinstance(requests, SessionFactory):
        return repeat
    known = {sample.session for sample in repeat.samples}
    sessions = tuple(one.make_result() for one in requests.conversations if one.number in known)
    notes = (*repeat.notes, *requests.notes)
    return replace_fields(repeat, sessions=sessions, exact_prompt=None, exact_output=None, notes=notes)


def estimate_in_flight(load: Load, request_s: float | None) -> int:
    """The number of streams for the self-check."""
    if load.concurrency is not None or load.sessions is not None:
        return load.concurrency or load.sessions or 1
    return min(1024, max(load.burst or 1, math.ceil((load.requests_per_s or 1.0) * (request_s or 1.0))))


def make_repeat(
    driven: LoadRecord, target: LoadTarget, prepared: PreparedEndpoint, own: ClientErrorFigures | None
) -> Repeat:
    """Parses the responses after the measurement."""
    window = [each for each in driven.exchanges if each.measured]
    answers = {id(each): each.answer or read(each) for each in driven.exchanges if each.end_ns >= driven.begin_ns}
    samples = tuple(sorted((make_sample(each, answers[id(each)], driven, target) for each in window), key=_get_start))
    good = [each for each in window if answers[id(each)].outcome == "ok"]
    # The endpoint's time to accept a new connection is not the client's delay.
    lags = [((each.tried_ns if each.fresh else each.sent_ns) - each.due_ns) / 1e6 for each in window if each.sent_ns]
    client = ClientAccuracy(
        error_p50_ms=own.p50_ms if own else None,
        error_p99_ms=own.p99_ms if own else None,
        send_lag_p99_ms=_compute_p99(lags),
        loop_lag_p99_ms=_compute_p99([lag / 1e6 for lag in driven.loop_lag_ns]),
        cpu_share=driven.cpu_s / driven.seconds,
    )
    reasons = list_client_limits(client, [sample.ttft_ms for sample in samples if sample.ttft_ms is not None])
    return Repeat(
        at=driven.at,
        seconds=driven.seconds,
        samples=samples,
        delivered_tokens=count_delivered_tokens(driven, answers),
        warmup=sum(each.sent_ns < driven.begin_ns for each in driven.exchanges),
        exact_prompt=_are_as_requested((answers[id(each)].prompt_tokens, each.prompt_tokens) for each in good),
        exact_output=_are_as_requested((answers[id(each)].output_tokens, each.output_tokens) for each in good),
        in_flight_max=driven.in_flight_max,
        reopened=driven.reopened,
        notes=prepared.notes,
        client=replace_fields(client, limit=bool(reasons), reasons=reasons),
    )


def make_sample(exchange: HttpExchange, answer: StreamedAnswer, driven: LoadRecord, target: LoadTarget) -> Sample:
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
        error=None if answer.error is None else target.hide_key(answer.error),
        session=None if exchange.session is None else exchange.session.number,
        turn=None if exchange.session is None else exchange.turn + 1,
    )


def count_delivered_tokens(driven: LoadRecord, answers: dict[int, StreamedAnswer]) -> float | None:
    """Output tokens within the measurement window: the token count of each answer times its share of events inside."""
    total, counted = 0.0, False
    for answer in answers.values():
        if not answer.text_ns or answer.output_tokens is None:
            continue
        counted = True
        within = bisect_left(answer.text_ns, driven.end_ns) - bisect_left(answer.text_ns, driven.begin_ns)
        total += answer.output_tokens * within / len(answer.text_ns)
    return total if counted else None


def _are_as_requested(pairs: Iterator[tuple[int | None, int]]) -> bool | None:
    """Whether all counts are as requested; `None` if there are no counts."""
    known = [(found, asked) for found, asked in pairs if found is not None]
    return all(found == asked for found, asked in known) if known else None


def _compute_p99(values: Sequence[float]) -> float:
    return max(0.0, compute_quantile(sorted(values), 0.99)) if values else 0.0


def _get_start(sample: Sample) -> float:
    return sample.at_s
