"""Measure a burst: a fixed number of requests at a fixed concurrency, from the first byte sent to the last received.

A time window of a closed loop cuts requests at both ends. If a request takes as long as the window, the part inside is
random, and the same settings measure 1.3 times as fast the next time. A burst counts all tokens over the time that they
took. At its end fewer requests are in flight; that is the same for every setting.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Iterator
from time import monotonic_ns

from bedplate.errors import ExternalFailure
from bedplate.measure.load.client_error import ClientErrorFigures, measure_client_error
from bedplate.measure.load.driver import LoadRecord, Watch
from bedplate.measure.load.generator import make_repeat
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.separate_process import run_process, serve_call
from bedplate.measure.load.target import LoadTarget
from bedplate.measure.load.wire import ask
from bedplate.values.record import Record
from bedplate.values.run import Load, Repeat

APART_S, ALL_WITHIN_S = 0.02, 0.2
"""Delay between the starts of requests. If all started at the same time, the number of prompts in the engine's first
batch would be random, and the TTFT of the same settings would take one of two values that differ by half."""
WARM_TOKENS = 4
WARM_PROMPT = 24
TICK_S = 0.05


async def send_burst(
    target: LoadTarget,
    load: Load,
    prepared: PreparedEndpoint,
    number: int,
    limit_s: float,
    *,
    rounds: int = 1,
    own: ClientErrorFigures | None = None,
) -> Repeat | None:
    """Sends a burst: each stream sends `rounds` requests, one after the other. `number` determines the prompts.

    Returns `None` if it takes longer than `limit_s`. With `own`, the client's own error, the lag of the client's event
    loop is recorded too. Raises OSError if the endpoint fails.
    """
    streams = load.concurrency or 1
    prompts = prepared.make_prompts(load, number)
    requests = iter(
        [
            prepared.request(target, prompts.make_text(one, load.prompt_tokens), load.output_tokens)
            for one in range(streams * rounds)
        ]
    )
    driven = LoadRecord()
    driven.at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    driven.begin_ns, driven.in_flight_max, cpu_s = monotonic_ns(), streams, time.process_time()
    apart_s = min(APART_S, ALL_WITHIN_S / streams)
    ticking = [asyncio.create_task(_record_lag(driven))] if own is not None else []
    tasks = [
        asyncio.create_task(_send_in_sequence(place * apart_s, target, requests, limit_s, driven))
        for place in range(streams)
    ]
    try:
        async with asyncio.timeout(limit_s + ALL_WITHIN_S):
            await asyncio.gather(*tasks)
    except TimeoutError:
        return None
    finally:
        for task in (*tasks, *ticking):
            task.cancel()
        await asyncio.gather(*tasks, *ticking, return_exceptions=True)
    driven.cpu_s = time.process_time() - cpu_s if own is not None else 0.0
    driven.end_ns = max(exchange.end_ns for exchange in driven.exchanges) + 1  # the last token counts
    for exchange in driven.exchanges:
        exchange.measured = True
        exchange.prompt_tokens, exchange.output_tokens = load.prompt_tokens, load.output_tokens
    return make_repeat(driven, target, prepared, own)


async def _send_in_sequence(
    after_s: float, target: LoadTarget, requests: Iterator[bytes], limit_s: float, driven: LoadRecord
) -> None:
    await asyncio.sleep(after_s)
    for request in requests:
        driven.exchanges.append(await ask(target, request, limit_s))


async def _record_lag(driven: LoadRecord) -> None:
    """Records the lag of the client's event loop, which would otherwise count as engine time."""
    while True:
        due_ns = monotonic_ns() + int(TICK_S * 1e9)
        await asyncio.sleep(TICK_S)
        driven.loop_lag_ns.append(max(0, monotonic_ns() - due_ns))


async def send_warm_up(target: LoadTarget, load: Load, prepared: PreparedEndpoint, limit_s: float) -> None:
    """Sends one small request, so that weights are loaded and threads are started."""
    text = prepared.make_prompts(load, -2).make_text(0, min(WARM_PROMPT, load.prompt_tokens))
    await ask(target, prepared.request(target, text, WARM_TOKENS), limit_s)


class BurstCall(Record, frozen=True, kw_only=True):
    """The arguments of a burst in a separate process."""

    target: LoadTarget
    load: Load
    prepared: PreparedEndpoint
    number: int
    limit_s: float
    rounds: int = 1
    check: bool | ClientErrorFigures = False
    """Whether to measure the client's own error first, or its known value."""


def send_burst_apart(work: BurstCall, watch: Watch) -> Repeat | None:
    """Sends a burst from a separate process, so that the caller does not delay it. Raises OutsideFailed on failure."""
    return run_process("bedplate.measure.burst", work, watch)


async def _run_burst(work: BurstCall, watch: Watch) -> Repeat | None:
    own = work.check if isinstance(work.check, ClientErrorFigures) else None
    if work.check is True:
        own = await measure_client_error(work.load.concurrency or 1)
    watch("begin")
    try:
        found = await send_burst(
            work.target, work.load, work.prepared, work.number, work.limit_s, rounds=work.rounds, own=own
        )
    except OSError as error:
        raise ExternalFailure(
            f"no response from {work.target.url}", cause=str(error) or type(error).__name__
        ) from error
    watch("end")
    return found


if __name__ == "__main__":
    serve_call(BurstCall, _run_burst)
