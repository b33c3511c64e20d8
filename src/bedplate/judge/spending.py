"""Where the time of a request went, limit by limit, held against the bytes and operations of a step."""

from __future__ import annotations

from bedplate.decide.estimate.physics import (
    all_reduce_bytes,
    attention_ops,
    kv_read_bytes,
    linear_ops,
    weights_read_bytes,
)
from bedplate.judge.ground import Ground
from bedplate.judge.observed import View, cache_is_full
from bedplate.measure.summary import why_invalid
from bedplate.values.diagnosis import AtLoad, Limit, Spent, SpentOn
from bedplate.values.run import Cell

CLEAR = 1.3
"""How far ahead of the next one the largest part is when there is no doubt."""
ALL_REDUCE_S = 12e-6
"""Latency of one all-reduce within a node, where nobody measured it."""


def at_load(cell: Cell, view: View | None, ground: Ground) -> AtLoad:
    if view is None:
        wrong = "; ".join(why_invalid(cell)) or "too few requests, or the endpoint counts no tokens; measure for longer"
        return AtLoad(cell=cell.id, load=cell.load, limit=None, why=wrong)
    spent = sorted(_spent(cell, view, ground), key=lambda one: one.ms, reverse=True)
    totals: dict[Limit, float] = {}
    for one in spent:
        totals[one.limit] = totals.get(one.limit, 0.0) + one.ms
    order = sorted(totals, key=lambda limit: totals[limit], reverse=True)
    why = _mixed_up(ground) if order[0] == "runtime overhead" else None
    return AtLoad(
        cell=cell.id,
        load=cell.load,
        limit=order[0] if why is None else None,
        clear=len(order) < 2 or totals[order[0]] >= CLEAR * totals[order[1]],
        request_ms=view.request_ms,
        spent=tuple(spent),
        step_ms=view.step_ms,
        floor_ms=_floor_ms(view, ground, cell),
        batch=view.batch,
        bandwidth_share=_bandwidth_share(view, ground, cell),
        operations_share=_operations_share(view, ground),
        why=why,
    )


def _mixed_up(ground: Ground) -> str | None:
    """Without bytes and bandwidth, what reading the weights takes is in the runtime's part as well."""
    if ground.bandwidth is None:
        missing = "the machine's memory bandwidth is not known (bedplate probe --measure)"
    elif ground.shape is None:
        missing = "the model's size is not known here"
    else:
        return None
    return f"reading the weights cannot be told from the runtime's own time, since {missing}"


def _spent(cell: Cell, view: View, ground: Ground) -> list[Spent]:
    steps = max(0.0, view.tokens - 1)
    # The first token's own step is part of the time to it.
    first = min(view.step_ms, view.behind_ms)
    behind = view.behind_ms - first
    step = _step_parts(cell, view, ground)
    scale = (steps * view.step_ms + first) / view.step_ms if view.step_ms > 0 else 0.0
    found: list[tuple[Limit, SpentOn, str, float]] = [
        (queue_limit(cell), "queue", "waiting for a turn", view.queue_ms),
        ("compute", "prompt", "its own prompt", view.prefill_ms),
        ("compute", "other prompts", "waiting while other prompts are computed", behind + view.stalled_ms)
        if (cell.load.concurrency or 2) > 1
        else ("runtime overhead", "stalls", "stalls", behind + view.stalled_ms),
        *((limit, on, what, ms * scale) for limit, on, what, ms in step),
    ]
    return [
        Spent(limit=limit, on=on, what=what, ms=ms, share=ms / view.request_ms)
        for limit, on, what, ms in found
        if ms > 0.001 * view.request_ms
    ]


def queue_limit(cell: Cell) -> Limit:
    return "KV cache" if cache_is_full(cell) else "scheduler"


def _step_parts(cell: Cell, view: View, ground: Ground) -> list[tuple[Limit, SpentOn, str, float]]:
    """One step by what it is spent on. Reading and computing overlap where a device can; then their parts shrink."""
    weights, cache = _read_ms(view, ground, cell)
    compute = view.batch * view.stream_ms
    links = links_ms(view, ground, cell)
    floor = weights + cache + compute + links
    shrink = min(1.0, view.step_ms / floor) if floor > 0 else 1.0
    return [
        ("memory bandwidth", "weights", "reading the weights", weights * shrink),
        ("KV cache", "cache", "reading the cache", cache * shrink),
        ("compute", "tokens", "computing a token for each stream", compute * shrink),
        ("interconnect", "links", "adding up over the links", links * shrink),
        ("runtime overhead", "runtime", "neither read, computed nor sent", max(0.0, view.step_ms - floor)),
    ]


def _kv_bits(cell: Cell) -> float:
    settings = cell.subject.settings
    return 8.0 if settings is not None and settings.kv_type == "fp8" else 16.0


def step_bytes(view: View, ground: Ground, cell: Cell) -> tuple[float, float] | None:
    """Weights and cache that one step reads."""
    if ground.shape is None:
        return None
    each = max(1, cell.subject.parallelism.data)
    batch = view.batch / each
    return (
        each * weights_read_bytes(ground.shape, batch),
        view.batch * kv_read_bytes(ground.shape, view.context, _kv_bits(cell)),
    )


def _read_ms(view: View, ground: Ground, cell: Cell) -> tuple[float, float]:
    found = step_bytes(view, ground, cell)
    if found is None or ground.bandwidth is None or ground.bandwidth.value <= 0:
        return 0.0, 0.0
    rate = ground.bandwidth.value * max(1, cell.subject.parallelism.data) / 1000
    return found[0] / rate, found[1] / rate


def links_ms(view: View, ground: Ground, cell: Cell) -> float:
    ranks = cell.subject.parallelism.tensor
    if ranks <= 1 or ground.shape is None:
        return 0.0
    sent = all_reduce_bytes(view.batch, ground.shape, ranks)
    over = sent / ground.link_bytes_s if ground.link_bytes_s else 0.0
    return 2 * ground.shape.layers * (ALL_REDUCE_S + over) * 1000


def _floor_ms(view: View, ground: Ground, cell: Cell) -> float | None:
    found = step_bytes(view, ground, cell)
    if found is None or ground.shape is None or ground.bandwidth is None or ground.bandwidth.value <= 0:
        return None
    reading = sum(_read_ms(view, ground, cell))
    if ground.operations is None or ground.operations.value <= 0:
        return reading
    computed = linear_ops(ground.shape, view.batch) + view.batch * attention_ops(ground.shape, 1, view.context)
    return max(reading, computed / ground.operations.value * 1000)


def _bandwidth_share(view: View, ground: Ground, cell: Cell) -> float | None:
    if ground.bandwidth is None or step_bytes(view, ground, cell) is None or view.step_ms <= 0:
        return None
    return sum(_read_ms(view, ground, cell)) / view.step_ms


def prompt_ops_s(view: View, ground: Ground) -> float | None:
    """Of a prompt that adds less than a step to the first token nothing is known: most of it is hidden in that step."""
    if ground.shape is None or view.prefill_ms <= 0 or view.prefill_ms < view.step_ms:
        return None
    return (
        (linear_ops(ground.shape, view.prompt, 1) + attention_ops(ground.shape, view.prompt)) / view.prefill_ms * 1000
    )


def _operations_share(view: View, ground: Ground) -> float | None:
    rate = prompt_ops_s(view, ground)
    return None if rate is None or ground.operations is None else rate / ground.operations.value


def threads_too_many(cell: Cell, ground: Ground) -> int | None:
    settings = cell.subject.settings
    threads = settings.threads if settings is not None else None
    if threads is None or ground.cores is None or ground.device != "cpu" or threads <= ground.cores:
        return None
    return threads
