"""All requests in flight at once, to their last byte: the shortest measurement that still has a load's own shape.

A stretch of a closed loop waits for those that it began last, and takes two rounds of requests at the least. A wave
takes one. What it says is close to that but not the same, since its last requests have the engine to themselves: good
for ordering settings, while `compare` rests on closed loops.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from time import monotonic_ns

from bedplate.measure.load.driver import Driven
from bedplate.measure.load.generator import told
from bedplate.measure.load.preparing import Prepared
from bedplate.measure.load.target import Target
from bedplate.measure.load.wire import Exchange, ask
from bedplate.values.run import Load, Repeat

APART_S, ALL_WITHIN_S = 0.02, 0.2
"""How far requests begin apart. Did they come at once, chance would decide how many of their prompts an engine computes
in its first pass, and the time to first token of the same setting would be one of two that differ by half."""
WARM_TOKENS = 4
WARM_PROMPT = 24


async def wave(target: Target, load: Load, prepared: Prepared, number: int, limit_s: float) -> Repeat | None:
    """One wave with prompts of its own; `None`: it took longer than it may. Raises OSError where the endpoint fails."""
    streams = load.concurrency or 1
    prompts = prepared.prompts(load, number)
    requests = [
        prepared.request(target, prompts.text(one, load.prompt_tokens), load.output_tokens) for one in range(streams)
    ]
    driven = Driven()
    driven.at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    driven.begin_ns = monotonic_ns()
    apart_s = min(APART_S, ALL_WITHIN_S / streams)
    tasks = [
        asyncio.create_task(_begun_after(place * apart_s, target, request, limit_s))
        for place, request in enumerate(requests)
    ]
    try:
        exchanges: list[Exchange] = list(await asyncio.gather(*tasks))
    except TimeoutError:
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    driven.end_ns = max(exchange.end_ns for exchange in exchanges)
    driven.in_flight_max = streams
    for exchange in exchanges:
        exchange.measured = True
        exchange.prompt_tokens, exchange.output_tokens = load.prompt_tokens, load.output_tokens
    driven.exchanges = exchanges
    return told(driven, target, prepared, None)


async def _begun_after(seconds: float, target: Target, request: bytes, limit_s: float) -> Exchange:
    await asyncio.sleep(seconds)
    return await ask(target, request, limit_s)


async def warmed(target: Target, load: Load, prepared: Prepared, limit_s: float) -> None:
    """One small request, after which weights are in memory and threads are there."""
    text = prepared.prompts(load, -2).text(0, min(WARM_PROMPT, load.prompt_tokens))
    await ask(target, prepared.request(target, text, WARM_TOKENS), limit_s)
