"""The load generator's own error: measure it against the null server, and decide whether it is too large."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence

from bedplate.measure.load.driver import LoadDriver, MeasurementWindow, RequestFactory, estimate_requests
from bedplate.measure.load.null_server import MODEL, serve_null
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.target import LoadTarget
from bedplate.measure.load.wire import HttpExchange
from bedplate.values.record import Record
from bedplate.values.run import ClientAccuracy, Load
from bedplate.values.statistics import compute_quantile

FIRST_MS = 50.0
INTERVAL_MS = 20.0
TOKENS = 16
"""An answer takes 350 ms, so that each stream has several in one second."""
HELD = re.compile(rb'"id": ?"[a-z]+-([0-9a-f]{32})"')
MOST_CPU = 0.85
LEAST_LAG_MS = 10.0
LAG_SHARE = 0.05
"""Share of the median TTFT. A lag below the larger of the two limits does not affect results."""


class ClientErrorFigures(Record, frozen=True, kw_only=True):
    """How much later than sent the client recorded the first token."""

    p50_ms: float
    p99_ms: float
    streams: int
    samples: int


async def measure_client_error(streams: int, *, seconds: float = 1.0) -> ClientErrorFigures:
    """Measures the client's error for about a second against the null server, with the streams of the run."""
    server = serve_null(first_ms=FIRST_MS, interval_ms=INTERVAL_MS, tokens=TOKENS)
    null = await asyncio.to_thread(server.__enter__)
    try:
        errors = await measure_errors_ms(LoadTarget.from_url(null.url, model=MODEL), streams, seconds)
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
    return ClientErrorFigures(
        p50_ms=compute_quantile(errors, 0.5),
        p99_ms=compute_quantile(errors, 0.99),
        streams=streams,
        samples=len(errors),
    )


async def measure_errors_ms(target: LoadTarget, streams: int, seconds: float, tokens: int = TOKENS) -> list[float]:
    """Sorted errors, without the delay of the server's timer, which the server reports for each request."""
    load = Load(concurrency=streams, prompt_tokens=64, output_tokens=tokens)
    prepared = PreparedEndpoint(model=MODEL, api="completions", fields=("usage",))
    request_s = (FIRST_MS + INTERVAL_MS * (tokens - 1)) / 1000
    # Two requests long: the starts are spread over the first half.
    window = MeasurementWindow(
        seconds=seconds, warmup_s=2 * request_s, least_requests=0, most_seconds=seconds, timeout_s=10
    )
    requests = RequestFactory(target, load, prepared, 0)
    requests.build(estimate_requests(load, window, request_s))
    driver = LoadDriver(target, load, requests, window, schedule=None, request_s=request_s)
    driven = await driver.run()
    found = (compute_error_ms(each) for each in driven.exchanges if each.measured)
    return sorted(each for each in found if each is not None) or [0.0]


def compute_error_ms(exchange: HttpExchange) -> float | None:
    """The difference between the recorded TTFT and the delay that the server reports."""
    held = HELD.search(exchange.pieces[0]) if exchange.pieces else None
    if held is None:
        return None
    return (exchange.stamps[0] - exchange.sent_ns - int(held[1], 16)) / 1e6


def list_client_limits(client: ClientAccuracy, ttft_ms: Sequence[float]) -> tuple[str, ...]:
    """The reasons why the client was the bottleneck; empty if it was not."""
    allowed = max(LEAST_LAG_MS, LAG_SHARE * statistics.median(ttft_ms)) if ttft_ms else LEAST_LAG_MS
    found = []
    if client.cpu_share > MOST_CPU:
        found.append(f"the client used {client.cpu_share:.0%} of a core")
    for name, lag in (
        ("the client's event loop was late", client.loop_lag_p99_ms),
        ("requests were sent late", client.send_lag_p99_ms),
    ):
        if lag > allowed:
            found.append(f"{name}: {lag:.1f} ms at p99, more than the allowed {allowed:.1f} ms")
    # Not the p99: the self-check takes one second, in which a single pause would decide.
    if client.error_p50_ms is not None and client.error_p50_ms > allowed:
        found.append(f"the client's median error against the null server is {client.error_p50_ms:.1f} ms")
    return tuple(found)
