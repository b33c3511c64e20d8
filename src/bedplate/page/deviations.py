"""Figures of the last minute that are worse than the plan or the latency target, as sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.values.live import Deviation, LiveFigure, LiveModel, RecentLatency
from bedplate.values.record import Figure
from bedplate.values.units import format_memory
from bedplate.values.workload import LatencyTarget

LEAST_REQUESTS = 3
"""Requests in the last minute below which latency and throughput are not compared."""
FULL_KV = 0.95


def list_deviations(model: LiveModel, mean_in_flight: float) -> tuple[Deviation, ...]:
    """What is worse than planned. A figure that is better than planned is not listed."""
    return (*_compare_requests(model), *_compare_latency(model, mean_in_flight), *_compare_memory(model))


def _compare_requests(model: LiveModel) -> Iterator[Deviation]:
    if model.failed and model.ended:
        yield Deviation(figure="requests", text=f"{model.failed} of {model.ended} requests failed in the last minute.")
    if model.waiting and model.slots is not None:
        are = "request waits" if model.waiting == 1 else "requests wait"
        yield Deviation(figure="load", text=f"{model.waiting} {are} for one of the {model.slots} slots.")


def _compare_latency(model: LiveModel, mean_in_flight: float) -> Iterator[Deviation]:
    if (model.ended or 0) < LEAST_REQUESTS:
        return
    planned = model.expected_in_flight or 1
    more = f" with {planned} in flight; {mean_in_flight:.0f} were in flight" if mean_in_flight > 1.5 * planned else ""
    target = model.target or LatencyTarget()
    times: tuple[tuple[LiveFigure, str, RecentLatency, float | None, Figure | None], ...] = (
        ("ttft", "Time to first token", model.ttft, target.ttft_ms, model.expected.ttft_ms),
        ("tpot", "Time per output token", model.tpot, target.tpot_ms, model.expected.tpot_ms),
    )
    for figure, name, seen, limit, planned_ms in times:
        if seen.p50_ms is None or seen.p95_ms is None:
            continue
        if limit is not None:
            if seen.p95_ms > limit:
                text = f"95th percentile {_format_ms(seen.p95_ms)}, target {_format_ms(limit)}."
                yield Deviation(figure=figure, text=f"{name} misses the target: {text}")
        elif planned_ms is not None and seen.p50_ms > planned_ms.high:
            text = f"median {_format_ms(seen.p50_ms)}, planned at most {_format_ms(planned_ms.high)}{more}."
            yield Deviation(figure=figure, text=f"{name} is above the plan: {text}")
    rate, expected = model.output_tok_s, model.expected.output_tok_s
    # With fewer requests than planned, less output is what to expect.
    if rate is not None and expected is not None and rate < expected.low and mean_in_flight >= planned:
        text = f"Output is below the plan: {rate:,.0f} tokens/s, planned at least {expected.low:,.0f}."
        yield Deviation(figure="output", text=text)


def _compare_memory(model: LiveModel) -> Iterator[Deviation]:
    for engine in model.engines:
        used = engine.gpu_bytes if engine.gpu_bytes is not None else engine.memory_bytes
        if used is not None and engine.planned_bytes and used > engine.planned_bytes:
            text = f"{engine.id} uses {format_memory(used)}, planned at most {format_memory(engine.planned_bytes)}."
            yield Deviation(figure="memory", text=text)
        if engine.kv_use is not None and engine.kv_use >= FULL_KV:
            text = f"The KV cache of {engine.id} is {engine.kv_use:.0%} full: further requests wait or are preempted."
            yield Deviation(figure="kv", text=text)


def _format_ms(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.3g} ms"
