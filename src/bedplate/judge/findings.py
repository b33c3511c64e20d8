"""The evidence for a bottleneck, as text; and what could not be determined, with the command that measures it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bedplate.decide.estimate.physics import all_reduce_bytes
from bedplate.judge.ground import Ground
from bedplate.judge.observed import FULL_CACHE, Alone, View, mean_of, most_of, slots_of
from bedplate.judge.spending import links_ms, prompt_ops_s, queue_limit, step_bytes, threads_too_many
from bedplate.judge.words import load_words
from bedplate.values.diagnosis import AtLoad, Evidence, Limit
from bedplate.values.record import Figure
from bedplate.values.run import Cell
from bedplate.values.units import figure, size

FAR_MORE = 3.0
"""A stream that adds more than this multiple of a prompt token's time to a step adds runtime overhead, not compute."""
BUSY_CORES = 0.9
"""Host cores kept busy by an engine on an accelerator. From this on, the host delays the accelerator."""
WAITING = 0.1
"""Mean number of waiting requests from which on there is a queue."""


def text_of(attribution: AtLoad) -> str:
    where = load_words(attribution.load)
    if attribution.limit is None:
        return f"The bottleneck with {where} cannot be determined: {attribution.why}."
    share = sum(one.share for one in attribution.spent if one.limit == attribution.limit)
    name = attribution.limit[0].upper() + attribution.limit[1:]
    text = f"{name} is the bottleneck with {where}: {share:.0%} of the request time."
    if not attribution.clear:
        second = next(one.limit for one in attribution.spent if one.limit != attribution.limit)
        text += f" The margin is small: {second} is a close second."
    return text


def evidence_of(
    cell: Cell, breakdown: View, attribution: AtLoad, breakdowns: Sequence[tuple[Cell, View | None]], roofline: Ground
) -> Iterator[Evidence]:
    yield from _bandwidth_evidence(cell, breakdown, attribution, roofline)
    yield from _floor_evidence(breakdown, attribution)
    yield from _growth_evidence(breakdowns)
    yield from _prompt_evidence(breakdown, roofline)
    yield from _queue_evidence(cell, breakdown, breakdowns)
    yield from _cache_evidence(cell)
    yield from _links_evidence(cell, breakdown, roofline)
    yield from _host_evidence(cell, attribution, roofline)
    if (threads := threads_too_many(cell, roofline)) is not None:
        yield Evidence(
            kind="threads",
            text=f"{threads} threads on {roofline.cores} cores slow each other down",
            limit="runtime overhead",
        )
    clients = [repeat.client.cpu_share for repeat in cell.repeats]
    if clients:
        yield Evidence(kind="client", text=f"the client used {max(clients):.0%} of one core and was not the bottleneck")


def _bandwidth_evidence(cell: Cell, breakdown: View, attribution: AtLoad, roofline: Ground) -> Iterator[Evidence]:
    found = step_bytes(breakdown, roofline, cell)
    if found is None or attribution.bandwidth_share is None or roofline.bandwidth is None:
        return
    achieved = sum(found) / breakdown.step_ms * 1000
    yield Evidence(
        kind="bandwidth",
        text=f"a step of {figure(breakdown.step_ms)} ms reads {size(found[0])} of weights and {size(found[1])} of "
        f"KV cache: {size(achieved)}/s, {attribution.bandwidth_share:.0%} of the {size(roofline.bandwidth.value)}/s "
        f"{_describe_basis(roofline.bandwidth)}",
        limit="memory bandwidth" if attribution.bandwidth_share >= 0.5 else None,
    )


def _describe_basis(rate: Figure) -> str:
    return "measured here" if rate.basis == "measured" else f"({rate.basis})"


def _floor_evidence(breakdown: View, attribution: AtLoad) -> Iterator[Evidence]:
    if attribution.floor_ms:
        times = breakdown.step_ms / attribution.floor_ms
        yield Evidence(
            kind="step floor",
            text=f"a step takes {times:.1f} times its lower bound of {figure(attribution.floor_ms)} ms",
            limit="runtime overhead" if times >= 3 and attribution.limit == "runtime overhead" else None,
        )


def _growth_evidence(breakdowns: Sequence[tuple[Cell, View | None]]) -> Iterator[Evidence]:
    seen = {round(breakdown.batch, 1): breakdown for _, breakdown in breakdowns if breakdown is not None}
    if len(seen) < 2:
        return
    low, high = seen[min(seen)], seen[max(seen)]
    each = (high.step_ms - low.step_ms) / (high.batch - low.batch)
    limit: Limit | None = None
    if high.step_ms >= 1.3 * low.step_ms:
        limit = "compute" if each <= FAR_MORE * low.token_ms else "runtime overhead"
    yield Evidence(
        kind="step growth",
        text=f"a step grows from {figure(low.step_ms)} ms with {figure(low.batch, 2)} to {figure(high.step_ms)} ms "
        f"with {figure(high.batch, 2)} streams: {figure(max(0.0, each), 2)} ms for each added stream; "
        f"a prompt token takes {figure(low.token_ms, 2)} ms",
        limit=limit,
    )


def _prompt_evidence(breakdown: View, roofline: Ground) -> Iterator[Evidence]:
    if breakdown.prefill_ms <= 0:
        return
    rate = prompt_ops_s(breakdown, roofline)
    verb = "takes" if breakdown.prefill_ms >= breakdown.step_ms else "adds"
    text = f"the prefill of {breakdown.prompt:.0f} tokens {verb} {figure(breakdown.prefill_ms)} ms"
    if rate is not None:
        text += f": {flops(rate)}"
        if roofline.operations is not None:
            peak = f"{flops(roofline.operations.value)} {_describe_basis(roofline.operations)}"
            text += f", {rate / roofline.operations.value:.0%} of the {peak}"
    yield Evidence(
        kind="prompt", text=text, limit="compute" if breakdown.prefill_ms > 0.35 * breakdown.request_ms else None
    )


def flops(rate: float) -> str:
    """Operations per second, in the unit that keeps the figure short."""
    return f"{figure(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{figure(rate / 1e9)} GFLOP/s"


def _queue_evidence(cell: Cell, breakdown: View, breakdowns: Sequence[tuple[Cell, View | None]]) -> Iterator[Evidence]:
    alone = next((one for other, one in breakdowns if one is not None and other.load.concurrency == 1), None)
    if alone is not None and alone is not breakdown:
        yield Evidence(
            kind="queue",
            text=f"TTFT is {figure(breakdown.ttft_ms)} ms, and {figure(alone.ttft_ms)} ms with 1 request at a time",
            limit=queue_limit(cell) if breakdown.queue_ms > 0.5 * breakdown.ttft_ms else None,
        )
    waiting = mean_of(repeat.engine.waiting_mean for repeat in cell.repeats)
    running = mean_of(repeat.engine.running_mean for repeat in cell.repeats)
    slots, in_flight = slots_of(cell), cell.load.concurrency
    if waiting is not None:
        text = f"{waiting:.1f} requests wait in the engine on average"
        text += f" while {running:.1f} run" if running is not None else ""
        yield Evidence(
            kind="queue", text=text, limit=queue_limit(cell) if waiting > WAITING and breakdown.queue_ms > 0 else None
        )
    if slots is not None and in_flight is not None and slots < in_flight:
        yield Evidence(kind="queue", text=f"{slots} slots for {in_flight} requests in flight", limit="scheduler")


def _cache_evidence(cell: Cell) -> Iterator[Evidence]:
    used = most_of(repeat.engine.kv_use_max for repeat in cell.repeats)
    preempted = mean_of(repeat.engine.preemptions for repeat in cell.repeats)
    if used is not None:
        yield Evidence(
            kind="cache",
            text=f"the KV cache was at most {used:.0%} full",
            limit="KV cache" if used >= FULL_CACHE else None,
        )
    if preempted is not None:
        total = sum(repeat.engine.preemptions or 0.0 for repeat in cell.repeats)
        yield Evidence(kind="cache", text=f"{total:.0f} preemptions", limit="KV cache" if total > 0 else None)


def _links_evidence(cell: Cell, breakdown: View, roofline: Ground) -> Iterator[Evidence]:
    ranks = cell.subject.parallelism.tensor
    if ranks > 1 and roofline.shape is not None:
        sent = 2 * roofline.shape.layers * all_reduce_bytes(breakdown.batch, roofline.shape, ranks)
        over = f" over links of {size(roofline.link_bytes_s)}/s" if roofline.link_bytes_s else ""
        links = links_ms(breakdown, roofline, cell)
        yield Evidence(
            kind="links",
            text=f"each of {ranks} devices sends {size(sent)} per step{over}: "
            f"about {figure(links, 2)} of {figure(breakdown.step_ms)} ms",
            limit="interconnect" if links > 0.3 * breakdown.step_ms else None,
        )


def _host_evidence(cell: Cell, attribution: AtLoad, roofline: Ground) -> Iterator[Evidence]:
    """An accelerator waits for the host processes that launch its work."""
    times = [(repeat.use.engine_cpu_s, repeat.seconds) for repeat in cell.repeats]
    busy_s, known_s = sum(busy or 0.0 for busy, _ in times), sum(seconds for busy, seconds in times if busy is not None)
    if roofline.device == "cpu" or known_s <= 0:
        return
    cores = busy_s / known_s
    delays = cores >= BUSY_CORES and attribution.limit == "runtime overhead"
    yield Evidence(
        kind="host",
        text=f"the engine's processes kept {cores:.1f} of the host's cores busy",
        limit="runtime overhead" if delays else None,
    )


def unknowns(cell: Cell, breakdown: View | None, alone: Alone | None, roofline: Ground) -> Iterator[str]:
    if roofline.shape is None:
        yield f"the size of {cell.subject.model} is unknown, so bytes and operations cannot be counted"
    if roofline.bandwidth is None:
        yield "the memory bandwidth of this machine is unknown: bedplate probe --measure"
    elif roofline.bandwidth.basis != "measured":
        yield "the memory bandwidth is the vendor's figure: bedplate probe --measure"
    if breakdown is not None and alone is None:
        yield "the prefill time is inferred, because no single request was measured: bedplate bench --concurrency 1"
    if breakdown is not None and not breakdown.queue_known:
        yield "neither the engine nor its settings report waiting requests; the queue time is inferred"
    if cell.subject.parallelism.tensor > 1 and roofline.link_bytes_s is None:
        yield "the bandwidth of the links between the devices is unknown: bedplate probe --measure"
