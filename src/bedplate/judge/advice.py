"""What to change first, with the engine's own option, and the predicted gain from removing the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from bedplate.decide.estimate.physics import count_attention_ops, count_linear_ops
from bedplate.engines import load_engines
from bedplate.judge.observed import RequestBreakdown, SingleRequestTimes, count_slots
from bedplate.judge.roofline import Roofline
from bedplate.judge.spending import find_excess_threads
from bedplate.values import Figure
from bedplate.values.diagnosis import GainPrediction, Limit, LoadDiagnosis, SpentOn, SuggestedChange
from bedplate.values.run import Cell
from bedplate.values.verdict import Metric

NARROWER = ((12.0, "8-bit weights", 8.5), (6.5, "4-bit weights", 4.5))
"""Minimum bits per weight, the next narrower weights, and their bits per weight including scales."""
MODEL_SPREAD = 0.25
"""Relative error of predictions from measured steps and prefills."""
OVERHEAD_REMOVED = (0.35, 0.7, 1.0)
"""Share of the runtime overhead that other settings or another engine remove: at least, likely, at most."""
GRAPHS_REMOVE = (0.8, 0.93, 0.98)
"""The same for captured CUDA graphs. vLLM on an H200: 0.94 with one request, 0.97 with 64."""
MOST_PROMPT = 2.0
"""Largest ratio of a prefill's time in a batch to its time alone. vLLM on two cores had 1.6 to 1.9."""
FEW_STREAMS = 8
"""Below this concurrency, further concurrent requests still share much of a step."""

Setting = Literal["slots", "threads", "cache_memory", "cache_type", "batch_tokens", "no_graphs"]
"""A field of `AdviceFlags`."""


class DiagnosedCell(NamedTuple):
    """One cell with the parts of its request time and its bottleneck."""

    cell: Cell
    breakdown: RequestBreakdown
    attribution: LoadDiagnosis
    roofline: Roofline
    alone: SingleRequestTimes | None

    @property
    def engine(self) -> str:
        return self.cell.subject.engine

    @property
    def in_flight(self) -> float:
        return float(self.cell.load.concurrency or self.breakdown.batch)

    def sum_share(self, limit: Limit) -> float:
        return sum(one.share for one in self.attribution.spent if one.limit == limit)

    def sum_share_spent_on(self, *parts: SpentOn) -> float:
        return sum(one.share for one in self.attribution.spent if one.on in parts)

    def find_flag(self, setting: Setting, value: object = None) -> str | None:
        engine = load_engines().get(self.engine)
        name = getattr(engine.get_advice_flags(self.roofline.device), setting) if engine is not None else None
        if name is None or value is None:
            return name
        return f"{name}={value}" if name.isupper() else f"{name} {value}"

    @property
    def lacks_graphs(self) -> bool:
        """Whether CUDA graphs were turned off."""
        return self.roofline.device == "cuda" and self.find_flag("no_graphs") in self.cell.subject.argv


# predicted gains


def predict_gains(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    if diagnosed.attribution.limit is not None:
        yield from PREDICTIONS[diagnosed.attribution.limit](diagnosed)


def _predict_one_batch(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    breakdown, in_flight = diagnosed.breakdown, diagnosed.in_flight
    if breakdown.queue_ms <= 0.05 * breakdown.request_ms:
        return
    least_ms = _compute_least_prompt_ms(diagnosed, breakdown.prompt)
    now = estimate_cycle_ms(breakdown, breakdown.batch, least_ms)
    then = estimate_cycle_ms(breakdown, in_flight, least_ms)
    change = f"all {in_flight:.0f} requests in one batch"
    yield _make_prediction(change, "output_tok_s", in_flight / then / (breakdown.batch / now))
    soonest, latest = _estimate_ttft_ms(breakdown, in_flight, then)
    usual, spread = math.sqrt(soonest * latest), math.sqrt(latest / soonest) * (1 + MODEL_SPREAD) - 1
    yield _make_prediction(change, "ttft_ms", breakdown.ttft_ms / usual, spread)


def _predict_larger_cache(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    yield from _predict_one_batch(diagnosed)
    reading = diagnosed.sum_share_spent_on("cache")
    if reading > 0.1:
        yield _make_prediction("an 8-bit KV cache", "output_tok_s", 1 / (1 - reading / 2))


def _predict_narrower_weights(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    if (narrower := _find_narrower_weights(diagnosed.roofline)) is not None:
        words, left = narrower
        yield _make_prediction(words, "output_tok_s", 1 / (1 - diagnosed.sum_share("memory bandwidth") * (1 - left)))


def _predict_cached_prompts(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    prompts, breakdown = diagnosed.sum_share_spent_on("prompt", "other prompts"), diagnosed.breakdown
    if prompts > 0.1:
        left = (
            1 - prompts + min(prompts, breakdown.batch * _estimate_cached_prompt_ms(diagnosed) / breakdown.request_ms)
        )
        yield _make_prediction("prompts found in the prefix cache", "output_tok_s", 1 / max(left, 0.02))


def _predict_free_links(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    yield _make_prediction(
        "infinitely fast links", "output_tok_s", 1 / (1 - min(diagnosed.sum_share("interconnect"), 0.95))
    )


def _predict_less_overhead(diagnosed: DiagnosedCell) -> Iterator[GainPrediction]:
    own = diagnosed.sum_share("runtime overhead")
    removed, change = OVERHEAD_REMOVED, "a runtime with less overhead"
    if diagnosed.lacks_graphs:
        removed, change = GRAPHS_REMOVE, "captured CUDA graphs"
    elif find_excess_threads(diagnosed.cell, diagnosed.roofline) is not None:
        change = "as many threads as cores"
    least, likely, most = (1 / (1 - min(0.97, own * part)) for part in removed)
    yield GainPrediction(
        change=change,
        metric="output_tok_s",
        gain=Figure(value=likely, low=least, high=most, basis="estimate", source="step time above its lower bound"),
    )


PREDICTIONS: dict[Limit, Callable[[DiagnosedCell], Iterator[GainPrediction]]] = {
    "scheduler": _predict_one_batch, "KV cache": _predict_larger_cache, "memory bandwidth": _predict_narrower_weights,
    "compute": _predict_cached_prompts, "interconnect": _predict_free_links, "runtime overhead": _predict_less_overhead,
}  # fmt: skip


def _make_prediction(change: str, metric: Metric, gain: float, spread: float = MODEL_SPREAD) -> GainPrediction:
    source = "steps and prefills measured here"
    low, high = gain / (1 + spread), gain * (1 + spread)
    figure = Figure(value=gain, low=low, high=high, basis="estimate", source=source)
    return GainPrediction(change=change, metric=metric, gain=figure)


def estimate_cycle_ms(breakdown: RequestBreakdown, batch: float, least_prompt_ms: float | None = None) -> float:
    """The time of a request in a batch of `batch`: one prefill for each request, and one step for each token.

    During one request each of the others ends once, and its successor brings a new prompt.
    """
    prompt_ms = _estimate_prompt_ms(breakdown, least_prompt_ms)
    return batch * prompt_ms + breakdown.tokens * _estimate_step_ms(breakdown, batch)


def _estimate_cached_prompt_ms(diagnosed: DiagnosedCell) -> float:
    """The time of a prompt that is in the prefix cache: a step, or what its time alone has beyond computing it.

    That is tokenizing, hashing and launching, which the other requests wait for as well.
    """
    alone, step_ms = diagnosed.alone, diagnosed.breakdown.step_ms
    computed_ms = _compute_least_prompt_ms(diagnosed, alone.prompt) if alone is not None else None
    if alone is None or computed_ms is None:
        return step_ms
    return max(step_ms, alone.ttft_ms - alone.step_ms - computed_ms)


def _compute_least_prompt_ms(diagnosed: DiagnosedCell, prompt: float) -> float | None:
    """The time to compute a prompt at the measured rate of a GPU, where the prompts of one pass share its launch."""
    roofline = diagnosed.roofline
    if roofline.device != "cuda" or roofline.shape is None or roofline.operations is None:
        return None
    computed = count_linear_ops(roofline.shape, prompt, 1) + count_attention_ops(roofline.shape, prompt)
    return computed / roofline.operations.value * 1000


def _estimate_prompt_ms(breakdown: RequestBreakdown, least_ms: float | None) -> float:
    """The time of a prefill in a batch: at most `MOST_PROMPT` times its time alone. A longer time has another cause.

    At least `least_ms`, or its time alone if that is not known.
    """
    in_batch = (breakdown.prefill_ms + breakdown.behind_ms + breakdown.stalled_ms - breakdown.step_ms) / breakdown.batch
    least_ms = breakdown.prefill_ms if least_ms is None else min(least_ms, breakdown.prefill_ms)
    return min(max(least_ms, in_batch), MOST_PROMPT * breakdown.prefill_ms)


def _estimate_step_ms(breakdown: RequestBreakdown, batch: float) -> float:
    """The constant part of a step, plus one token for each stream."""
    return max(0.0, breakdown.step_ms - breakdown.batch * breakdown.stream_ms) + batch * breakdown.stream_ms


def _estimate_ttft_ms(breakdown: RequestBreakdown, batch: float, cycle: float) -> tuple[float, float]:
    """The shortest and the longest TTFT.

    Shortest, if requests arrive one by one: the own prefill and the rest of another one. Longest, if they arrive
    together: all prefills. A closed loop with answers of equal length synchronizes; real traffic does not.
    """
    busy = min(0.95, batch * breakdown.prefill_ms / cycle) if cycle > 0 else 0.0
    step = max(_estimate_step_ms(breakdown, batch), 1e-6)
    alone = breakdown.prefill_ms * (1 + busy / 2 / (1 - busy / 2)) + step
    return alone, max(alone, breakdown.prefill_ms * batch + step)


def _find_narrower_weights(roofline: Roofline) -> tuple[str, float] | None:
    """The next narrower weights, and their size as a share of the current one."""
    if roofline.shape is None:
        return None
    bits = roofline.shape.bits
    return next(((words, narrow / bits) for least, words, narrow in NARROWER if bits >= least), None)


# what to change


def advise_changes(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    if diagnosed.attribution.limit is None:
        how = "run bedplate probe --measure, then bedplate bench with 1, 4, 8 and 16 requests in flight"
        yield SuggestedChange(kind="measure", text=how)
    else:
        yield from CHANGES[diagnosed.attribution.limit](diagnosed)


def _advise_slots(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    slots, in_flight = count_slots(diagnosed.cell), round(diagnosed.in_flight)
    if slots is None or slots < in_flight:
        text = f"use as many slots as requests in flight: {in_flight}"
        yield SuggestedChange(kind="flag", text=text, flag=diagnosed.find_flag("slots", in_flight))
    else:
        text = "use a smaller prefill chunk size"
        yield SuggestedChange(kind="flag", text=text, flag=diagnosed.find_flag("batch_tokens"))
    yield SuggestedChange(kind="work", text="send fewer concurrent requests, or add a replica")


def _advise_cache(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    yield SuggestedChange(kind="flag", text="give the KV cache more memory", flag=diagnosed.find_flag("cache_memory"))
    settings = diagnosed.cell.subject.settings
    if settings is None or settings.kv_type == "16-bit":
        yield SuggestedChange(kind="flag", text="use an 8-bit KV cache", flag=diagnosed.find_flag("cache_type"))
    yield SuggestedChange(kind="hardware", text="use a device with more memory, or more devices")


def _advise_bandwidth(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    if (narrower := _find_narrower_weights(diagnosed.roofline)) is not None:
        yield SuggestedChange(kind="quantization", text=f"use {narrower[0]}: {narrower[1]:.0%} of the bytes")
    if diagnosed.in_flight < FEW_STREAMS:
        yield SuggestedChange(
            kind="work", text="send more concurrent requests: a batch reads the weights once per step"
        )
    yield SuggestedChange(kind="hardware", text="use a device with more memory bandwidth")


def _advise_overhead(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    threads, cores = find_excess_threads(diagnosed.cell, diagnosed.roofline), diagnosed.roofline.cores
    if threads is not None:
        text = f"use {cores} threads instead of {threads}"
        yield SuggestedChange(kind="flag", text=text, flag=diagnosed.find_flag("threads", cores))
    if diagnosed.lacks_graphs:
        option = diagnosed.find_flag("no_graphs")
        yield SuggestedChange(kind="flag", text=f"remove {option}: captured CUDA graphs take one launch for each step")
    text = f"use an engine with less overhead per step than {diagnosed.engine}: bedplate plan"
    yield SuggestedChange(kind="engine", text=text)
    if diagnosed.in_flight < FEW_STREAMS:
        yield SuggestedChange(kind="work", text="send more concurrent requests: a batch shares the overhead of a step")


def _advise_compute(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    if diagnosed.sum_share_spent_on("prompt", "other prompts") > 0.5:
        yield SuggestedChange(
            kind="work", text="send shorter prompts, or prompts with a shared prefix that the engine caches"
        )
    reached = diagnosed.attribution.operations_share
    if reached is not None and reached < 0.3:
        text = f"use an engine whose kernels reach more than {reached:.0%} of this machine's rate: bedplate plan"
        yield SuggestedChange(kind="engine", text=text)
    yield SuggestedChange(kind="hardware", text="use a device with more compute")


def _advise_links(diagnosed: DiagnosedCell) -> Iterator[SuggestedChange]:
    ranks = diagnosed.cell.subject.parallelism.tensor
    yield SuggestedChange(kind="flag", text=f"use a tensor parallelism below {ranks}, and more replicas")
    yield SuggestedChange(kind="hardware", text="use devices with faster links")


CHANGES: dict[Limit, Callable[[DiagnosedCell], Iterator[SuggestedChange]]] = {
    "scheduler": _advise_slots, "KV cache": _advise_cache, "memory bandwidth": _advise_bandwidth,
    "runtime overhead": _advise_overhead, "compute": _advise_compute, "interconnect": _advise_links,
}  # fmt: skip
