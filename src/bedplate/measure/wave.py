"""A fixed piece of work: so many requests, so many of them in flight, from the first byte sent to the last received.

A stretch of so many seconds of a closed loop cuts requests at both its ends. Where one takes as long as the stretch,
how much of them falls within is chance, and the same setting is 1.3 times as fast the next time. A piece of work has no
such ends: all its tokens count, over the time that they took. Its last requests have the engine to themselves, on every
side alike.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Iterator
from time import monotonic_ns

from bedplate.errors import OutsideFailed
from bedplate.measure.load.apart import answered, heard
from bedplate.measure.load.driver import Driven, Watch
from bedplate.measure.load.generator import told
from bedplate.measure.load.own import OwnError, self_check
from bedplate.measure.load.preparing import Prepared
from bedplate.measure.load.target import Target
from bedplate.measure.load.wire import ask
from bedplate.values.record import Record
from bedplate.values.run import Load, Repeat

APART_S, ALL_WITHIN_S = 0.02, 0.2
"""How far requests begin apart. Did they come at once, chance would decide how many of their prompts an engine computes
in its first pass, and the time to first token of the same setting would be one of two that differ by half."""
WARM_TOKENS = 4
WARM_PROMPT = 24
TICK_S = 0.05


async def wave(
    target: Target,
    load: Load,
    prepared: Prepared,
    number: int,
    limit_s: float,
    *,
    rounds: int = 1,
    own: OwnError | None = None,
) -> Repeat | None:
    """Each stream asks `rounds` times, as soon as it has its answer; all prompts are its own, by `number`.

    `None`: it took longer than it may. `own` is what is known of the client's own error; with it, how late the client
    comes round is looked at, too. Raises OSError where the endpoint fails.
    """
    streams = load.concurrency or 1
    prompts = prepared.prompts(load, number)
    requests = iter(
        [
            prepared.request(target, prompts.text(one, load.prompt_tokens), load.output_tokens)
            for one in range(streams * rounds)
        ]
    )
    driven = Driven()
    driven.at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    driven.begin_ns, driven.in_flight_max, cpu_s = monotonic_ns(), streams, time.process_time()
    apart_s = min(APART_S, ALL_WITHIN_S / streams)
    ticking = [asyncio.create_task(_ticked(driven))] if own is not None else []
    tasks = [
        asyncio.create_task(_stream(place * apart_s, target, requests, limit_s, driven)) for place in range(streams)
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
    return told(driven, target, prepared, own)


async def _stream(after_s: float, target: Target, requests: Iterator[bytes], limit_s: float, driven: Driven) -> None:
    await asyncio.sleep(after_s)
    for request in requests:
        driven.exchanges.append(await ask(target, request, limit_s))


async def _ticked(driven: Driven) -> None:
    """How late the client itself comes round, which would be booked on the engine."""
    while True:
        due_ns = monotonic_ns() + int(TICK_S * 1e9)
        await asyncio.sleep(TICK_S)
        driven.loop_lag_ns.append(max(0, monotonic_ns() - due_ns))


async def warmed(target: Target, load: Load, prepared: Prepared, limit_s: float) -> None:
    """One small request, after which weights are in memory and threads are there."""
    text = prepared.prompts(load, -2).text(0, min(WARM_PROMPT, load.prompt_tokens))
    await ask(target, prepared.request(target, text, WARM_TOKENS), limit_s)


class Work(Record, frozen=True, kw_only=True):
    """What `wave` takes, for a process of its own."""

    target: Target
    load: Load
    prepared: Prepared
    number: int
    limit_s: float
    rounds: int = 1
    check: bool | OwnError = False
    """Whether the client's own error is found out first, or what is known of it."""


def wave_apart(work: Work, watch: Watch) -> Repeat | None:
    """`wave` in a process of its own, which nothing of its caller delays; raises OutsideFailed where it fails."""
    return heard("bedplate.measure.wave", work, watch)


async def _worked(work: Work, watch: Watch) -> Repeat | None:
    own = work.check if isinstance(work.check, OwnError) else None
    if work.check is True:
        own = await self_check(work.load.concurrency or 1)
    watch("begin")
    try:
        found = await wave(
            work.target, work.load, work.prepared, work.number, work.limit_s, rounds=work.rounds, own=own
        )
    except OSError as error:
        raise OutsideFailed(f"{work.target.url} does not answer", cause=str(error) or type(error).__name__) from error
    watch("end")
    return found


if __name__ == "__main__":
    answered(Work, _worked)
