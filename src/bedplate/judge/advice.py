"""What to change first, with the engine's own option, and the predicted gain from removing the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from bedplate.engines import all_engines
from bedplate.judge.ground import Ground
from bedplate.judge.observed import View, slots_of
from bedplate.judge.spending import threads_too_many
from bedplate.values import Figure
from bedplate.values.diagnosis import AtLoad, Change, Limit, Prediction, SpentOn
from bedplate.values.run import Cell
from bedplate.values.verdict import Metric

NARROWER = ((12.0, "8-bit weights", 8.5), (6.5, "4-bit weights", 4.5))
"""Minimum bits per weight, the next narrower weights, and their bits per weight including scales."""
MODEL_SPREAD = 0.25
"""Relative error of predictions from measured steps and prefills."""
OVERHEAD_REMOVED = (0.35, 0.7, 1.0)
"""Share of the runtime overhead that other settings or another engine remove: at least, likely, at most."""
MOST_PROMPT = 2.0
"""Largest ratio of a prefill's time in a batch to its time alone. vLLM on two cores had 1.6 to 1.9."""
FEW_STREAMS = 8
"""Below this concurrency, further concurrent requests still share much of a step."""

Setting = Literal["slots", "threads", "cache_memory", "cache_type", "batch_tokens"]
"""A field of `AdviceFlags`."""


class Patient(NamedTuple):
    """One cell with the parts of its request time and its bottleneck."""

    cell: Cell
    breakdown: View
    attribution: AtLoad
    roofline: Ground

    @property
    def engine(self) -> str:
        return self.cell.subject.engine

    @property
    def in_flight(self) -> float:
        return float(self.cell.load.concurrency or self.breakdown.batch)

    def share(self, limit: Limit) -> float:
        return sum(one.share for one in self.attribution.spent if one.limit == limit)

    def share_spent_on(self, *parts: SpentOn) -> float:
        return sum(one.share for one in self.attribution.spent if one.on in parts)

    def flag(self, setting: Setting, value: object = None) -> str | None:
        engine = all_engines().get(self.engine)
        name = getattr(engine.advice_flags(self.roofline.device), setting) if engine is not None else None
        if name is None or value is None:
            return name
        return f"{name}={value}" if name.isupper() else f"{name} {value}"


# predicted gains


def predictions_for(diagnosed: Patient) -> Iterator[Prediction]:
    if diagnosed.attribution.limit is not None:
        yield from PREDICTIONS[diagnosed.attribution.limit](diagnosed)


def _all_at_once(diagnosed: Patient) -> Iterator[Prediction]:
    breakdown, in_flight = diagnosed.breakdown, diagnosed.in_flight
    if breakdown.queue_ms <= 0.05 * breakdown.request_ms:
        return
    now, then = cycle_ms(breakdown, breakdown.batch), cycle_ms(breakdown, in_flight)
    change = f"all {in_flight:.0f} requests in one batch"
    yield _predicted(change, "output_tok_s", in_flight / then / (breakdown.batch / now))
    soonest, latest = _first_token_ms(breakdown, in_flight, then)
    usual, spread = math.sqrt(soonest * latest), math.sqrt(latest / soonest) * (1 + MODEL_SPREAD) - 1
    yield _predicted(change, "ttft_ms", breakdown.ttft_ms / usual, spread)


def _roomier_cache(diagnosed: Patient) -> Iterator[Prediction]:
    yield from _all_at_once(diagnosed)
    reading = diagnosed.share_spent_on("cache")
    if reading > 0.1:
        yield _predicted("an 8-bit KV cache", "output_tok_s", 1 / (1 - reading / 2))


def _fewer_bytes(diagnosed: Patient) -> Iterator[Prediction]:
    if (narrower := _narrower(diagnosed.roofline)) is not None:
        words, left = narrower
        yield _predicted(words, "output_tok_s", 1 / (1 - diagnosed.share("memory bandwidth") * (1 - left)))


def _cached_prompts(diagnosed: Patient) -> Iterator[Prediction]:
    prompts = diagnosed.share_spent_on("prompt", "other prompts")
    if prompts > 0.1:
        yield _predicted("prompts found in the prefix cache", "output_tok_s", 1 / (1 - min(prompts, 0.98)))


def _free_links(diagnosed: Patient) -> Iterator[Prediction]:
    yield _predicted("infinitely fast links", "output_tok_s", 1 / (1 - min(diagnosed.share("interconnect"), 0.95)))


def _leaner_runtime(diagnosed: Patient) -> Iterator[Prediction]:
    own = diagnosed.share("runtime overhead")
    least, likely, most = (1 / (1 - min(0.97, own * part)) for part in OVERHEAD_REMOVED)
    too_many = threads_too_many(diagnosed.cell, diagnosed.roofline) is not None
    yield Prediction(
        change="as many threads as cores" if too_many else "a runtime with less overhead",
        metric="output_tok_s",
        gain=Figure(value=likely, low=least, high=most, basis="estimate", source="step time above its lower bound"),
    )


PREDICTIONS: dict[Limit, Callable[[Patient], Iterator[Prediction]]] = {
    "scheduler": _all_at_once, "KV cache": _roomier_cache, "memory bandwidth": _fewer_bytes,
    "compute": _cached_prompts, "interconnect": _free_links, "runtime overhead": _leaner_runtime,
}  # fmt: skip


def _predicted(change: str, metric: Metric, gain: float, spread: float = MODEL_SPREAD) -> Prediction:
    source = "steps and prefills measured here"
    low, high = gain / (1 + spread), gain * (1 + spread)
    figure = Figure(value=gain, low=low, high=high, basis="estimate", source=source)
    return Prediction(change=change, metric=metric, gain=figure)


def cycle_ms(breakdown: View, batch: float) -> float:
    """The time of a request in a batch of `batch`: one prefill for each request, and one step for each token.

    During one request each of the others ends once, and its successor brings a new prompt.
    """
    return batch * _prompt_ms(breakdown) + breakdown.tokens * _step_ms(breakdown, batch)


def _prompt_ms(breakdown: View) -> float:
    """The time of a prefill in a batch: at least its time alone, and at most `MOST_PROMPT` times that.

    A longer time has another cause.
    """
    in_batch = (breakdown.prefill_ms + breakdown.behind_ms + breakdown.stalled_ms - breakdown.step_ms) / breakdown.batch
    return min(max(breakdown.prefill_ms, in_batch), MOST_PROMPT * breakdown.prefill_ms)


def _step_ms(breakdown: View, batch: float) -> float:
    """The constant part of a step, plus one token for each stream."""
    return max(0.0, breakdown.step_ms - breakdown.batch * breakdown.stream_ms) + batch * breakdown.stream_ms


def _first_token_ms(breakdown: View, batch: float, cycle: float) -> tuple[float, float]:
    """The shortest and the longest TTFT.

    Shortest, if requests arrive one by one: the own prefill and the rest of another one. Longest, if they arrive
    together: all prefills. A closed loop with answers of equal length synchronizes; real traffic does not.
    """
    busy = min(0.95, batch * breakdown.prefill_ms / cycle) if cycle > 0 else 0.0
    step = max(_step_ms(breakdown, batch), 1e-6)
    alone = breakdown.prefill_ms * (1 + busy / 2 / (1 - busy / 2)) + step
    return alone, max(alone, breakdown.prefill_ms * batch + step)


def _narrower(roofline: Ground) -> tuple[str, float] | None:
    """The next narrower weights, and their size as a share of the current one."""
    if roofline.shape is None:
        return None
    bits = roofline.shape.bits
    return next(((words, narrow / bits) for least, words, narrow in NARROWER if bits >= least), None)


# what to change


def changes_for(diagnosed: Patient) -> Iterator[Change]:
    if diagnosed.attribution.limit is None:
        how = "run bedplate probe --measure, then bedplate bench with 1, 4, 8 and 16 requests in flight"
        yield Change(kind="measure", text=how)
    else:
        yield from CHANGES[diagnosed.attribution.limit](diagnosed)


def _more_slots(diagnosed: Patient) -> Iterator[Change]:
    slots, in_flight = slots_of(diagnosed.cell), round(diagnosed.in_flight)
    if slots is None or slots < in_flight:
        text = f"use as many slots as requests in flight: {in_flight}"
        yield Change(kind="flag", text=text, flag=diagnosed.flag("slots", in_flight))
    else:
        text = "use a smaller prefill chunk size"
        yield Change(kind="flag", text=text, flag=diagnosed.flag("batch_tokens"))
    yield Change(kind="work", text="send fewer concurrent requests, or add a replica")


def _more_cache(diagnosed: Patient) -> Iterator[Change]:
    yield Change(kind="flag", text="give the KV cache more memory", flag=diagnosed.flag("cache_memory"))
    settings = diagnosed.cell.subject.settings
    if settings is None or settings.kv_type == "16-bit":
        yield Change(kind="flag", text="use an 8-bit KV cache", flag=diagnosed.flag("cache_type"))
    yield Change(kind="hardware", text="use a device with more memory, or more devices")


def _less_to_read(diagnosed: Patient) -> Iterator[Change]:
    if (narrower := _narrower(diagnosed.roofline)) is not None:
        yield Change(kind="quantization", text=f"use {narrower[0]}: {narrower[1]:.0%} of the bytes")
    if diagnosed.in_flight < FEW_STREAMS:
        yield Change(kind="work", text="send more concurrent requests: a batch reads the weights once per step")
    yield Change(kind="hardware", text="use a device with more memory bandwidth")


def _less_overhead(diagnosed: Patient) -> Iterator[Change]:
    threads, cores = threads_too_many(diagnosed.cell, diagnosed.roofline), diagnosed.roofline.cores
    if threads is not None:
        text = f"use {cores} threads instead of {threads}"
        yield Change(kind="flag", text=text, flag=diagnosed.flag("threads", cores))
    text = f"use an engine with less overhead per step than {diagnosed.engine}: bedplate plan"
    yield Change(kind="engine", text=text)
    if diagnosed.in_flight < FEW_STREAMS:
        yield Change(kind="work", text="send more concurrent requests: a batch shares the overhead of a step")


def _less_to_compute(diagnosed: Patient) -> Iterator[Change]:
    if diagnosed.share_spent_on("prompt", "other prompts") > 0.5:
        yield Change(kind="work", text="send shorter prompts, or prompts with a shared prefix that the engine caches")
    reached = diagnosed.attribution.operations_share
    if reached is not None and reached < 0.3:
        text = f"use an engine whose kernels reach more than {reached:.0%} of this machine's rate: bedplate plan"
        yield Change(kind="engine", text=text)
    yield Change(kind="hardware", text="use a device with more compute")


def _less_to_send(diagnosed: Patient) -> Iterator[Change]:
    ranks = diagnosed.cell.subject.parallelism.tensor
    yield Change(kind="flag", text=f"use a tensor parallelism below {ranks}, and more replicas")
    yield Change(kind="hardware", text="use devices with faster links")


CHANGES: dict[Limit, Callable[[Patient], Iterator[Change]]] = {
    "scheduler": _more_slots, "KV cache": _more_cache, "memory bandwidth": _less_to_read,
    "runtime overhead": _less_overhead, "compute": _less_to_compute, "interconnect": _less_to_send,
}  # fmt: skip
