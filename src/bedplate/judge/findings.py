"""The evidence for a bottleneck, as text; and what could not be determined, with the command that measures it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bedplate.decide.estimate.physics import count_all_reduce_bytes
from bedplate.judge.observed import (
    FULL_CACHE,
    RequestBreakdown,
    SingleRequestTimes,
    compute_mean,
    count_slots,
    find_maximum,
)
from bedplate.judge.roofline import Roofline
from bedplate.judge.spending import (
    choose_queue_limit,
    compute_links_ms,
    compute_prompt_ops_s,
    compute_step_bytes,
    find_excess_threads,
)
from bedplate.judge.words import describe_load
from bedplate.measure.session_summary import summarize_sessions
from bedplate.values.diagnosis import Limit, LoadDiagnosis, Observation
from bedplate.values.record import Figure
from bedplate.values.run import Cell
from bedplate.values.units import format_figure, format_size

FAR_MORE = 3.0
"""A stream that adds more than this multiple of a prompt token's time to a step adds runtime overhead, not compute."""
BUSY_CORES = 0.9
"""Host cores kept busy by an engine on an accelerator. From this on, the host delays the accelerator."""
LOST_PREFIXES = 0.1
"""Share of the prompt tokens that could have been in the prefix cache and were not."""
WAITING = 0.1
"""Mean number of waiting requests from which on there is a queue."""


def write_sentence(attribution: LoadDiagnosis) -> str:
    where = describe_load(attribution.load)
    if attribution.limit is None:
        return f"The bottleneck with {where} cannot be determined: {attribution.why}."
    share = sum(one.share for one in attribution.spent if one.limit == attribution.limit)
    name = attribution.limit[0].upper() + attribution.limit[1:]
    text = f"{name} is the bottleneck with {where}: {share:.0%} of the request time."
    if not attribution.clear:
        second = next(one.limit for one in attribution.spent if one.limit != attribution.limit)
        is_less = sum(one.share for one in attribution.spent if one.limit == second) <= share
        text += f" The margin is small: {second} {'is a close second' if is_less else 'takes about as long'}."
    return text


def collect_evidence(
    cell: Cell,
    breakdown: RequestBreakdown,
    attribution: LoadDiagnosis,
    breakdowns: Sequence[tuple[Cell, RequestBreakdown | None]],
    roofline: Roofline,
) -> Iterator[Observation]:
    yield from _describe_bandwidth(cell, breakdown, attribution, roofline)
    yield from _describe_floor(breakdown, attribution)
    yield from _describe_growth(breakdowns)
    yield from _describe_prompt(breakdown, roofline)
    yield from _describe_queue(cell, breakdown, breakdowns)
    yield from _describe_cache(cell)
    yield from _describe_prefix_cache(cell, breakdown)
    yield from _describe_links(cell, breakdown, roofline)
    yield from _describe_host(cell, attribution, roofline)
    if (threads := find_excess_threads(cell, roofline)) is not None:
        yield Observation(
            kind="threads",
            text=f"{threads} threads on {roofline.cores} cores slow each other down",
            limit="runtime overhead",
        )
    clients = [repeat.client.cpu_share for repeat in cell.repeats]
    if clients:
        yield Observation(
            kind="client", text=f"the client used {max(clients):.0%} of one core and was not the bottleneck"
        )


def _describe_bandwidth(
    cell: Cell, breakdown: RequestBreakdown, attribution: LoadDiagnosis, roofline: Roofline
) -> Iterator[Observation]:
    found = compute_step_bytes(breakdown, roofline, cell)
    if found is None or attribution.bandwidth_share is None or roofline.bandwidth is None:
        return
    achieved = sum(found) / breakdown.step_ms * 1000
    yield Observation(
        kind="bandwidth",
        text=f"a step of {format_figure(breakdown.step_ms)} ms reads {format_size(found[0])} of weights and "
        f"{format_size(found[1])} of "
        f"KV cache: {format_size(achieved)}/s, {attribution.bandwidth_share:.0%} of the "
        f"{format_size(roofline.bandwidth.value)}/s "
        f"{_describe_basis(roofline.bandwidth)}",
        limit="memory bandwidth" if attribution.bandwidth_share >= 0.5 else None,
    )


def _describe_basis(rate: Figure) -> str:
    return "measured here" if rate.basis == "measured" else f"({rate.basis})"


def _describe_floor(breakdown: RequestBreakdown, attribution: LoadDiagnosis) -> Iterator[Observation]:
    if attribution.floor_ms:
        times = breakdown.step_ms / attribution.floor_ms
        yield Observation(
            kind="step floor",
            text=f"a step takes {times:.1f} times its lower bound of {format_figure(attribution.floor_ms)} ms",
            limit="runtime overhead" if times >= 3 and attribution.limit == "runtime overhead" else None,
        )


def _describe_growth(breakdowns: Sequence[tuple[Cell, RequestBreakdown | None]]) -> Iterator[Observation]:
    seen = {round(breakdown.batch, 1): breakdown for _, breakdown in breakdowns if breakdown is not None}
    if len(seen) < 2:
        return
    low, high = seen[min(seen)], seen[max(seen)]
    each = (high.step_ms - low.step_ms) / (high.batch - low.batch)
    limit: Limit | None = None
    if high.step_ms >= 1.3 * low.step_ms:
        limit = "compute" if each <= FAR_MORE * low.token_ms else "runtime overhead"
    yield Observation(
        kind="step growth",
        text=f"a step grows from {format_figure(low.step_ms)} ms with {format_figure(low.batch, 2)} to "
        f"{format_figure(high.step_ms)} ms "
        f"with {format_figure(high.batch, 2)} streams: {format_figure(max(0.0, each), 2)} ms for each added stream; "
        f"a prompt token takes {format_figure(low.token_ms, 2)} ms",
        limit=limit,
    )


def _describe_prompt(breakdown: RequestBreakdown, roofline: Roofline) -> Iterator[Observation]:
    if breakdown.prefill_ms <= 0:
        return
    rate = compute_prompt_ops_s(breakdown, roofline)
    verb = "takes" if breakdown.prefill_ms >= breakdown.step_ms else "adds"
    text = f"the prefill of {breakdown.prompt:.0f} tokens {verb} {format_figure(breakdown.prefill_ms)} ms"
    if rate is not None:
        text += f": {format_flops(rate)}"
        if roofline.operations is not None:
            peak = f"{format_flops(roofline.operations.value)} {_describe_basis(roofline.operations)}"
            text += f", {rate / roofline.operations.value:.0%} of the {peak}"
    yield Observation(
        kind="prompt", text=text, limit="compute" if breakdown.prefill_ms > 0.35 * breakdown.request_ms else None
    )


def format_flops(rate: float) -> str:
    """Operations per second, in the unit that keeps the figure short."""
    return f"{format_figure(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{format_figure(rate / 1e9)} GFLOP/s"


def _describe_queue(
    cell: Cell, breakdown: RequestBreakdown, breakdowns: Sequence[tuple[Cell, RequestBreakdown | None]]
) -> Iterator[Observation]:
    alone = next((one for other, one in breakdowns if one is not None and other.load.concurrency == 1), None)
    if alone is not None and alone is not breakdown:
        yield Observation(
            kind="queue",
            text=f"TTFT is {format_figure(breakdown.ttft_ms)} ms, and {format_figure(alone.ttft_ms)} ms with 1 "
            f"request at a time",
            limit=choose_queue_limit(cell) if breakdown.queue_ms > 0.5 * breakdown.ttft_ms else None,
        )
    waiting = compute_mean(repeat.engine.waiting_mean for repeat in cell.repeats)
    running = compute_mean(repeat.engine.running_mean for repeat in cell.repeats)
    slots, in_flight = count_slots(cell), cell.load.concurrency
    if waiting is not None:
        text = f"{waiting:.1f} requests wait in the engine on average"
        text += f" while {running:.1f} run" if running is not None else ""
        yield Observation(
            kind="queue",
            text=text,
            limit=choose_queue_limit(cell) if waiting > WAITING and breakdown.queue_ms > 0 else None,
        )
    if slots is not None and in_flight is not None and slots < in_flight:
        yield Observation(kind="queue", text=f"{slots} slots for {in_flight} requests in flight", limit="scheduler")


def _describe_cache(cell: Cell) -> Iterator[Observation]:
    used = find_maximum(repeat.engine.kv_use_max for repeat in cell.repeats)
    preempted = compute_mean(repeat.engine.preemptions for repeat in cell.repeats)
    if used is not None:
        yield Observation(
            kind="cache",
            text=f"the KV cache was at most {used:.0%} full",
            limit="KV cache" if used >= FULL_CACHE else None,
        )
    if preempted is not None:
        total = sum(repeat.engine.preemptions or 0.0 for repeat in cell.repeats)
        yield Observation(kind="cache", text=f"{total:.0f} preemptions", limit="KV cache" if total > 0 else None)


def _describe_prefix_cache(cell: Cell, breakdown: RequestBreakdown) -> Iterator[Observation]:
    """Whether the engine reused the repeated prefixes of sessions, which the rules choose some engines for."""
    found = summarize_sessions(cell)
    if found is None or found.repeated_share is None:
        return
    cached = found.metrics_share if found.metrics_share is not None else found.cached_share
    text = f"{found.repeated_share:.0%} of the prompt tokens repeat earlier requests"
    if cached is None:
        yield Observation(kind="cache", text=f"{text}; the engine does not report how many it found in its cache")
        return
    lost = found.repeated_share - cached > LOST_PREFIXES
    yield Observation(
        kind="cache",
        text=f"{text}, and {cached:.0%} were found in the prefix cache" + ("; the others were computed again" * lost),
        limit="compute" if lost and breakdown.prefill_ms > 0.35 * breakdown.request_ms else None,
    )


def _describe_links(cell: Cell, breakdown: RequestBreakdown, roofline: Roofline) -> Iterator[Observation]:
    ranks = cell.subject.parallelism.tensor
    if ranks > 1 and roofline.shape is not None:
        sent = 2 * roofline.shape.layers * count_all_reduce_bytes(breakdown.batch, roofline.shape, ranks)
        over = f" over links of {format_size(roofline.link_bytes_s)}/s" if roofline.link_bytes_s else ""
        links = compute_links_ms(breakdown, roofline, cell)
        yield Observation(
            kind="links",
            text=f"each of {ranks} devices sends {format_size(sent)} per step{over}: "
            f"about {format_figure(links, 2)} of {format_figure(breakdown.step_ms)} ms",
            limit="interconnect" if links > 0.3 * breakdown.step_ms else None,
        )


def _describe_host(cell: Cell, attribution: LoadDiagnosis, roofline: Roofline) -> Iterator[Observation]:
    """An accelerator waits for the host processes that launch its work."""
    times = [(repeat.use.engine_cpu_s, repeat.seconds) for repeat in cell.repeats]
    busy_s, known_s = sum(busy or 0.0 for busy, _ in times), sum(seconds for busy, seconds in times if busy is not None)
    if roofline.device == "cpu" or known_s <= 0:
        return
    cores = busy_s / known_s
    delays = cores >= BUSY_CORES and attribution.limit == "runtime overhead"
    yield Observation(
        kind="host",
        text=f"the engine's processes kept {cores:.1f} of the host's cores busy",
        limit="runtime overhead" if delays else None,
    )


def list_unknowns(
    cell: Cell, breakdown: RequestBreakdown | None, alone: SingleRequestTimes | None, roofline: Roofline
) -> Iterator[str]:
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
