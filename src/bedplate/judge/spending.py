"""Attribute the time of a request to limits, from the bytes and operations of a step."""

from __future__ import annotations

from bedplate.decide.estimate.physics import (
    count_all_reduce_bytes,
    count_attention_ops,
    count_kv_bytes,
    count_linear_ops,
    count_weight_bytes,
)
from bedplate.judge.observed import RequestBreakdown, is_cache_full, list_disturbances
from bedplate.judge.roofline import Roofline
from bedplate.measure.summary import list_invalid_reasons
from bedplate.values.diagnosis import Limit, LoadDiagnosis, SpentOn, TimeShare
from bedplate.values.run import Cell

CLEAR = 1.3
"""The bottleneck is clear if its time is at least this multiple of the second largest."""
ALL_REDUCE_S = 12e-6
"""Assumed latency of one all-reduce within a node."""


def attribute_time(
    cell: Cell, breakdown: RequestBreakdown | None, roofline: Roofline, named: Limit | None = None
) -> LoadDiagnosis:
    """`named`: the bottleneck that was named before. It stays until another one is clear."""
    if breakdown is None:
        return LoadDiagnosis(cell=cell.id, load=cell.load, limit=None, why=_explain_unusable(cell))
    spent = sorted(_list_time_parts(cell, breakdown, roofline), key=lambda one: one.ms, reverse=True)
    totals: dict[Limit, float] = {}
    for one in spent:
        totals[one.limit] = totals.get(one.limit, 0.0) + one.ms
    order = sorted(totals, key=lambda limit: totals[limit], reverse=True)
    if named in totals and totals[order[0]] < CLEAR * totals[named]:
        order = [named, *(limit for limit in order if limit != named)]
    why = _explain_unclear_overhead(roofline) if order[0] == "runtime overhead" else None
    return LoadDiagnosis(
        cell=cell.id,
        load=cell.load,
        limit=order[0] if why is None else None,
        clear=len(order) < 2 or totals[order[0]] >= CLEAR * totals[order[1]],
        request_ms=breakdown.request_ms,
        spent=tuple(spent),
        step_ms=breakdown.step_ms,
        floor_ms=_compute_floor_ms(breakdown, roofline, cell),
        batch=breakdown.batch,
        bandwidth_share=_compute_bandwidth_share(breakdown, roofline, cell),
        operations_share=_compute_operations_share(breakdown, roofline),
        why=why,
    )


def _explain_unusable(cell: Cell) -> str:
    if disturbances := list_disturbances(cell):
        return f"other processes used the machine ({'; '.join(disturbances)})"
    too_few = "too few requests ended, or the endpoint reports no token counts; measure for longer"
    return "; ".join(list_invalid_reasons(cell)) or too_few


def _explain_unclear_overhead(roofline: Roofline) -> str | None:
    """Why runtime overhead may include the time for reading the weights: their size or the bandwidth is unknown."""
    if roofline.bandwidth is None:
        missing = "the memory bandwidth of this machine is unknown (bedplate probe --measure)"
    elif roofline.shape is None:
        missing = "the model's size is unknown"
    else:
        return None
    return f"the time for reading the weights cannot be separated from runtime overhead, because {missing}"


def _list_time_parts(cell: Cell, breakdown: RequestBreakdown, roofline: Roofline) -> list[TimeShare]:
    steps = max(0.0, breakdown.tokens - 1)
    # TTFT includes the step of the first token.
    first = min(breakdown.step_ms, breakdown.behind_ms)
    behind = breakdown.behind_ms - first
    step = _split_step(cell, breakdown, roofline)
    scale = (steps * breakdown.step_ms + first) / breakdown.step_ms if breakdown.step_ms > 0 else 0.0
    found: list[tuple[Limit, SpentOn, str, float]] = [
        (choose_queue_limit(cell), "queue", "waiting in the queue", breakdown.queue_ms),
        ("compute", "prompt", "prefill of its own prompt", breakdown.prefill_ms),
        ("compute", "other prompts", "waiting for the prefill of other prompts", behind + breakdown.stalled_ms)
        if (cell.load.concurrency or 2) > 1
        else ("runtime overhead", "stalls", "stalls", behind + breakdown.stalled_ms),
        *((limit, on, what, ms * scale) for limit, on, what, ms in step),
    ]
    return [
        TimeShare(limit=limit, on=on, what=what, ms=ms, share=ms / breakdown.request_ms)
        for limit, on, what, ms in found
        if ms > 0.001 * breakdown.request_ms
    ]


def choose_queue_limit(cell: Cell) -> Limit:
    return "KV cache" if is_cache_full(cell) else "scheduler"


def _split_step(cell: Cell, breakdown: RequestBreakdown, roofline: Roofline) -> list[tuple[Limit, SpentOn, str, float]]:
    """The parts of a step. If reading and computing overlap, the parts are scaled down to the step time."""
    weights, cache = _compute_read_ms(breakdown, roofline, cell)
    compute = breakdown.batch * breakdown.stream_ms
    links = compute_links_ms(breakdown, roofline, cell)
    floor = weights + cache + compute + links
    shrink = min(1.0, breakdown.step_ms / floor) if floor > 0 else 1.0
    return [
        ("memory bandwidth", "weights", "reading the weights", weights * shrink),
        ("KV cache", "cache", "reading the KV cache", cache * shrink),
        ("compute", "tokens", "computing one token for each stream", compute * shrink),
        ("interconnect", "links", "all-reduce over the links", links * shrink),
        ("runtime overhead", "runtime", "runtime overhead", max(0.0, breakdown.step_ms - floor)),
    ]


def _get_kv_bits(cell: Cell) -> float:
    settings = cell.subject.settings
    return 8.0 if settings is not None and settings.kv_type == "fp8" else 16.0


def compute_step_bytes(breakdown: RequestBreakdown, roofline: Roofline, cell: Cell) -> tuple[float, float] | None:
    """Bytes of weights and of KV cache that one step reads."""
    if roofline.shape is None:
        return None
    each = max(1, cell.subject.parallelism.data)
    batch = breakdown.batch / each
    return (
        each * count_weight_bytes(roofline.shape, batch),
        breakdown.batch * count_kv_bytes(roofline.shape, breakdown.context, _get_kv_bits(cell)),
    )


def _compute_read_ms(breakdown: RequestBreakdown, roofline: Roofline, cell: Cell) -> tuple[float, float]:
    found = compute_step_bytes(breakdown, roofline, cell)
    if found is None or roofline.bandwidth is None or roofline.bandwidth.value <= 0:
        return 0.0, 0.0
    rate = roofline.bandwidth.value * max(1, cell.subject.parallelism.data) / 1000
    return found[0] / rate, found[1] / rate


def compute_links_ms(breakdown: RequestBreakdown, roofline: Roofline, cell: Cell) -> float:
    ranks = cell.subject.parallelism.tensor
    if ranks <= 1 or roofline.shape is None:
        return 0.0
    sent = count_all_reduce_bytes(breakdown.batch, roofline.shape, ranks)
    over = sent / roofline.link_bytes_s if roofline.link_bytes_s else 0.0
    return 2 * roofline.shape.layers * (ALL_REDUCE_S + over) * 1000


def _compute_floor_ms(breakdown: RequestBreakdown, roofline: Roofline, cell: Cell) -> float | None:
    found = compute_step_bytes(breakdown, roofline, cell)
    if found is None or roofline.shape is None or roofline.bandwidth is None or roofline.bandwidth.value <= 0:
        return None
    reading = sum(_compute_read_ms(breakdown, roofline, cell))
    if roofline.operations is None or roofline.operations.value <= 0:
        return reading
    computed = count_linear_ops(roofline.shape, breakdown.batch) + breakdown.batch * count_attention_ops(
        roofline.shape, 1, breakdown.context
    )
    return max(reading, computed / roofline.operations.value * 1000)


def _compute_bandwidth_share(breakdown: RequestBreakdown, roofline: Roofline, cell: Cell) -> float | None:
    if roofline.bandwidth is None or compute_step_bytes(breakdown, roofline, cell) is None or breakdown.step_ms <= 0:
        return None
    return sum(_compute_read_ms(breakdown, roofline, cell)) / breakdown.step_ms


def compute_prompt_ops_s(breakdown: RequestBreakdown, roofline: Roofline) -> float | None:
    """`None` for a prefill shorter than a step, most of which overlaps with that step."""
    if roofline.shape is None or breakdown.prefill_ms <= 0 or breakdown.prefill_ms < breakdown.step_ms:
        return None
    return (
        (count_linear_ops(roofline.shape, breakdown.prompt, 1) + count_attention_ops(roofline.shape, breakdown.prompt))
        / breakdown.prefill_ms
        * 1000
    )


def _compute_operations_share(breakdown: RequestBreakdown, roofline: Roofline) -> float | None:
    rate = compute_prompt_ops_s(breakdown, roofline)
    return None if rate is None or roofline.operations is None else rate / roofline.operations.value


def find_excess_threads(cell: Cell, roofline: Roofline) -> int | None:
    settings = cell.subject.settings
    threads = settings.threads if settings is not None else None
    if threads is None or roofline.cores is None or roofline.device != "cpu" or threads <= roofline.cores:
        return None
    return threads
