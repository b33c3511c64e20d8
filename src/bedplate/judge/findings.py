"""The figures that show which limit binds, in words; and what could not be told, with how to measure it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bedplate.decide.estimate.physics import all_reduce_bytes
from bedplate.judge.ground import Ground
from bedplate.judge.observed import FULL_CACHE, Alone, View, mean_of, most_of, slots_of
from bedplate.judge.spending import links_ms, prompt_ops_s, queue_limit, step_bytes, threads_too_many
from bedplate.judge.words import load_words
from bedplate.values.diagnosis import AtLoad, Evidence, Limit
from bedplate.values.run import Cell
from bedplate.values.units import figure, size

FAR_MORE = 3.0
"""Times what a token of a prompt takes; a further stream that costs more than that is not what computing costs."""
BUSY_CORES = 0.9
"""Cores that an engine keeps busy beside its card; one that is never idle is in the way of its card."""
WAITING = 0.1
"""Requests that wait on average, from which on a queue is one."""


def text_of(told: AtLoad) -> str:
    where = load_words(told.load)
    if told.limit is None:
        return f"Cannot tell what binds with {where}: {told.why}."
    share = sum(one.share for one in told.spent if one.limit == told.limit)
    text = f"{told.limit[0].upper()}{told.limit[1:]} binds with {where}: {share:.0%} of a request's time."
    if not told.clear:
        second = next(one.limit for one in told.spent if one.limit != told.limit)
        text += f" Not by far: {second} is close."
    return text


def evidence_of(
    cell: Cell, view: View, told: AtLoad, views: Sequence[tuple[Cell, View | None]], ground: Ground
) -> Iterator[Evidence]:
    yield from _bandwidth_evidence(cell, view, told, ground)
    yield from _floor_evidence(view, told)
    yield from _growth_evidence(views)
    yield from _prompt_evidence(view, ground)
    yield from _queue_evidence(cell, view, views)
    yield from _cache_evidence(cell)
    yield from _links_evidence(cell, view, ground)
    yield from _host_evidence(cell, told, ground)
    if (threads := threads_too_many(cell, ground)) is not None:
        yield Evidence(
            kind="threads",
            text=f"{threads} threads on {ground.cores} cores: they hold each other up",
            limit="runtime overhead",
        )
    clients = [repeat.client.cpu_share for repeat in cell.repeats]
    if clients:
        yield Evidence(kind="client", text=f"the client took {max(clients):.0%} of one core and was not the limit")


def _bandwidth_evidence(cell: Cell, view: View, told: AtLoad, ground: Ground) -> Iterator[Evidence]:
    found = step_bytes(view, ground, cell)
    if found is None or told.bandwidth_share is None or ground.bandwidth is None:
        return
    achieved = sum(found) / view.step_ms * 1000
    basis = "as measured" if ground.bandwidth.basis == "measured" else f"that {ground.bandwidth.basis} says"
    yield Evidence(
        kind="bandwidth",
        text=f"a step of {figure(view.step_ms)} ms reads {size(found[0])} of weights and {size(found[1])} of cache: "
        f"{size(achieved)}/s, {told.bandwidth_share:.0%} of the {size(ground.bandwidth.value)}/s {basis}",
        limit="memory bandwidth" if told.bandwidth_share >= 0.5 else None,
    )


def _floor_evidence(view: View, told: AtLoad) -> Iterator[Evidence]:
    if told.floor_ms:
        times = view.step_ms / told.floor_ms
        yield Evidence(
            kind="step floor",
            text=f"a step takes {times:.1f} times its floor of {figure(told.floor_ms)} ms",
            limit="runtime overhead" if times >= 3 and told.limit == "runtime overhead" else None,
        )


def _growth_evidence(views: Sequence[tuple[Cell, View | None]]) -> Iterator[Evidence]:
    seen = {round(view.batch, 1): view for _, view in views if view is not None}
    if len(seen) < 2:
        return
    low, high = seen[min(seen)], seen[max(seen)]
    each = (high.step_ms - low.step_ms) / (high.batch - low.batch)
    limit: Limit | None = None
    if high.step_ms >= 1.3 * low.step_ms:
        limit = "compute" if each <= FAR_MORE * low.token_ms else "runtime overhead"
    yield Evidence(
        kind="step growth",
        text=f"a step grows from {figure(low.step_ms)} ms for {figure(low.batch, 2)} to {figure(high.step_ms)} ms for "
        f"{figure(high.batch, 2)} streams: {figure(max(0.0, each), 2)} ms for each further one, "
        f"where a token of a prompt takes {figure(low.token_ms, 2)} ms",
        limit=limit,
    )


def _prompt_evidence(view: View, ground: Ground) -> Iterator[Evidence]:
    if view.prefill_ms <= 0:
        return
    rate = prompt_ops_s(view, ground)
    verb = "takes" if view.prefill_ms >= view.step_ms else "adds"
    text = f"a prompt of {view.prompt:.0f} tokens {verb} {figure(view.prefill_ms)} ms by itself"
    if rate is not None:
        text += f": {flops(rate)}"
        if ground.operations is not None:
            basis = "as measured" if ground.operations.basis == "measured" else f"that {ground.operations.basis} says"
            text += f", {rate / ground.operations.value:.0%} of the {flops(ground.operations.value)} {basis}"
    yield Evidence(kind="prompt", text=text, limit="compute" if view.prefill_ms > 0.35 * view.request_ms else None)


def flops(rate: float) -> str:
    """Operations per second, in the unit that keeps the figure short."""
    return f"{figure(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{figure(rate / 1e9)} GFLOP/s"


def _queue_evidence(cell: Cell, view: View, views: Sequence[tuple[Cell, View | None]]) -> Iterator[Evidence]:
    alone = next((one for other, one in views if one is not None and other.load.concurrency == 1), None)
    if alone is not None and alone is not view:
        yield Evidence(
            kind="queue",
            text=f"the first token comes after {figure(view.ttft_ms)} ms, alone after {figure(alone.ttft_ms)} ms",
            limit=queue_limit(cell) if view.queue_ms > 0.5 * view.ttft_ms else None,
        )
    waiting = mean_of(repeat.engine.waiting_mean for repeat in cell.repeats)
    running = mean_of(repeat.engine.running_mean for repeat in cell.repeats)
    slots, in_flight = slots_of(cell), cell.load.concurrency
    if waiting is not None:
        text = f"{waiting:.1f} requests wait in the engine on average"
        text += f" while {running:.1f} are computed" if running is not None else ""
        yield Evidence(
            kind="queue", text=text, limit=queue_limit(cell) if waiting > WAITING and view.queue_ms > 0 else None
        )
    if slots is not None and in_flight is not None and slots < in_flight:
        yield Evidence(kind="queue", text=f"{slots} slots for {in_flight} requests in flight", limit="scheduler")


def _cache_evidence(cell: Cell) -> Iterator[Evidence]:
    used = most_of(repeat.engine.kv_use_max for repeat in cell.repeats)
    preempted = mean_of(repeat.engine.preemptions for repeat in cell.repeats)
    if used is not None:
        yield Evidence(
            kind="cache",
            text=f"the KV cache was {used:.0%} full at the most",
            limit="KV cache" if used >= FULL_CACHE else None,
        )
    if preempted is not None:
        total = sum(repeat.engine.preemptions or 0.0 for repeat in cell.repeats)
        yield Evidence(kind="cache", text=f"{total:.0f} preemptions", limit="KV cache" if total > 0 else None)


def _links_evidence(cell: Cell, view: View, ground: Ground) -> Iterator[Evidence]:
    ranks = cell.subject.parallelism.tensor
    if ranks > 1 and ground.shape is not None:
        sent = 2 * ground.shape.layers * all_reduce_bytes(view.batch, ground.shape, ranks)
        over = f" over links of {size(ground.link_bytes_s)}/s" if ground.link_bytes_s else ""
        links = links_ms(view, ground, cell)
        yield Evidence(
            kind="links",
            text=f"each of {ranks} devices sends {size(sent)} in a step{over}: "
            f"about {figure(links, 2)} of {figure(view.step_ms)} ms",
            limit="interconnect" if links > 0.3 * view.step_ms else None,
        )


def _host_evidence(cell: Cell, told: AtLoad, ground: Ground) -> Iterator[Evidence]:
    """A card waits for the processes that feed it."""
    spent = [(repeat.use.engine_cpu_s, repeat.seconds) for repeat in cell.repeats]
    busy_s, known_s = sum(busy or 0.0 for busy, _ in spent), sum(seconds for busy, seconds in spent if busy is not None)
    if ground.device == "cpu" or known_s <= 0:
        return
    cores = busy_s / known_s
    binds = cores >= BUSY_CORES and told.limit == "runtime overhead"
    yield Evidence(
        kind="host",
        text=f"the engine's processes kept {cores:.1f} of the host's cores busy",
        limit="runtime overhead" if binds else None,
    )


def unknowns(cell: Cell, view: View | None, alone: Alone | None, ground: Ground) -> Iterator[str]:
    if ground.shape is None:
        yield f"the sizes of {cell.subject.model} are not known here, so that bytes and operations cannot be counted"
    if ground.bandwidth is None:
        yield "the memory bandwidth of this machine is not known: bedplate probe --measure"
    elif ground.bandwidth.basis != "measured":
        yield "the memory bandwidth is the vendor's figure: bedplate probe --measure"
    if view is not None and alone is None:
        yield "a prompt's own time is a guess, since nothing was measured alone: bedplate bench --concurrency 1"
    if view is not None and not view.queue_known:
        yield "neither the engine nor its settings tell how many wait; a queue is only what prompts cannot explain"
    if cell.subject.parallelism.tensor > 1 and ground.link_bytes_s is None:
        yield "the links between the devices are not known: bedplate probe --measure"
