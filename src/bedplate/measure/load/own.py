"""What the load generator knows of its own error, by a server with known timing, and when it is too much."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence

from bedplate.measure.load.driver import Driver, Requests, Stretch, requests_needed
from bedplate.measure.load.null_server import MODEL, serve_null
from bedplate.measure.load.preparing import Prepared
from bedplate.measure.load.target import Target
from bedplate.measure.load.wire import Exchange
from bedplate.values.record import Record
from bedplate.values.run import Client, Load
from bedplate.values.statistics import quantile

FIRST_MS = 50.0
INTERVAL_MS = 20.0
TOKENS = 16
"""An answer of 350 ms: a second has some of each stream."""
HELD = re.compile(rb'"id": ?"[a-z]+-([0-9a-f]{32})"')
MOST_CPU = 0.85
LEAST_LAG_MS = 10.0
LAG_SHARE = 0.05
"""Of the median time to first token: lag that is less than both changes no conclusion."""


class OwnError(Record, frozen=True, kw_only=True):
    """By how much the client booked the first token later than it was sent."""

    p50_ms: float
    p99_ms: float
    streams: int
    samples: int


async def self_check(streams: int, *, seconds: float = 1.0) -> OwnError:
    """As many streams as the run will have, against the null server, for about a second."""
    server = serve_null(first_ms=FIRST_MS, interval_ms=INTERVAL_MS, tokens=TOKENS)
    null = await asyncio.to_thread(server.__enter__)
    try:
        errors = await errors_ms(Target.of(null.url, model=MODEL), streams, seconds)
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
    return OwnError(p50_ms=quantile(errors, 0.5), p99_ms=quantile(errors, 0.99), streams=streams, samples=len(errors))


async def errors_ms(target: Target, streams: int, seconds: float, tokens: int = TOKENS) -> list[float]:
    """Sorted. What the server's own timer was late is not the client's: it says how long it held each request."""
    load = Load(concurrency=streams, prompt_tokens=64, output_tokens=tokens)
    prepared = Prepared(model=MODEL, api="completions", fields=("usage",))
    request_s = (FIRST_MS + INTERVAL_MS * (tokens - 1)) / 1000
    # Twice a request: the first half is for spreading the starts over one.
    stretch = Stretch(seconds=seconds, warmup_s=2 * request_s, least_requests=0, most_seconds=seconds, timeout_s=10)
    requests = Requests(target, load, prepared, 0)
    requests.build(requests_needed(load, stretch, request_s))
    driver = Driver(target, load, requests, stretch, schedule=None, request_s=request_s)
    driven = await driver.run()
    found = (error_ms(each) for each in driven.exchanges if each.measured)
    return sorted(each for each in found if each is not None) or [0.0]


def error_ms(exchange: Exchange) -> float | None:
    """Between the first token's way through the server's hands and what the client booked."""
    held = HELD.search(exchange.pieces[0]) if exchange.pieces else None
    if held is None:
        return None
    return (exchange.stamps[0] - exchange.sent_ns - int(held[1], 16)) / 1e6


def limits(client: Client, ttft_ms: Sequence[float]) -> tuple[str, ...]:
    """Why the client was the limit, if it was."""
    allowed = max(LEAST_LAG_MS, LAG_SHARE * statistics.median(ttft_ms)) if ttft_ms else LEAST_LAG_MS
    found = []
    if client.cpu_share > MOST_CPU:
        found.append(f"the client used {client.cpu_share:.0%} of a core")
    for name, lag in (
        ("its event loop came round late", client.loop_lag_p99_ms),
        ("requests were sent late", client.send_lag_p99_ms),
    ):
        if lag > allowed:
            found.append(f"{name}: {lag:.1f} ms at p99, where {allowed:.1f} ms would not matter")
    # Its p99 is that of one second, in which a machine may stand still once; the lags above are those of the run.
    if client.error_p50_ms is not None and client.error_p50_ms > allowed:
        found.append(f"its error against a null server is {client.error_p50_ms:.1f} ms at the median")
    return tuple(found)
