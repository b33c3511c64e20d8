"""Estimates under load: time to first token, time per token and throughput of many concurrent requests."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.arrivals import USERS, ArrivalTerms, RequestArrivals
from bedplate.decide.estimate.bands import find_bands
from bedplate.decide.estimate.batching import (
    CLOSED_LOOP,
    NO_WAITS,
    PASS_TOKENS,
    Efficiencies,
    Layout,
    RankWork,
    Waits,
    choose_kv_bits,
    classify_weights,
    compute_burst,
    compute_decode_parts,
    compute_disaggregated,
    compute_prefill_s,
    compute_saturated_tok_s,
    compute_steady,
    compute_streamed_tok_s,
    count_rank_work,
    count_resident,
    get_efficiencies,
    limit_layout,
    take_min,
)
from bedplate.decide.estimate.calibration import Expectation, Limit, find_limit
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.machine import MachineRates
from bedplate.decide.estimate.physics import ModelShape, compute_decode_floor_s, compute_prefill_floor_s
from bedplate.values import Parallelism

Way = Literal["steady", "wave", "apart", "saturated", "offline", "server", "interactive"]

NO_LIMIT = 1e6


class ServingLoad(NamedTuple):
    """A load as the input of the batching model; in a fit, each field is a column."""

    way: Way
    work: Any
    spread: Any
    """The decode worker's work if its ranks have different sequences; only for disaggregated deployments."""
    prompts: Any
    """The prefill worker's work; only for disaggregated deployments."""
    streams: Any
    """Requests in flight on one replica."""
    slots: Any
    """The maximum number of requests that an engine runs concurrently on a replica."""
    complete: Any
    """1 if an engine reserves cache for the whole output."""
    ranks: Any
    waits: Waits = NO_WAITS
    prefills: Any = 0.0
    """Prefill workers of a disaggregated deployment; 0 if unknown."""
    decodes: Any = 0.0
    """Decode workers of a disaggregated deployment; 0 if unknown."""
    dealt: Any = 0.0
    """1 if the ranks of a decode worker have different sequences, 0 if they divide each sequence."""
    guessing: Any = 0.0
    """Drafted tokens per sequence."""
    arrival: ArrivalTerms = CLOSED_LOOP
    eager: Any = 0.0
    """1 if passes are not captured graphs."""


class ServingTimes(NamedTuple):
    first_s: Any
    token_s: Any
    tok_s: Any
    """Throughput of one replica."""
    batch: Any
    """Sequences in one step of a replica, or of a decode worker."""


def compute_times(question: ServingLoad, e: Any) -> ServingTimes:
    """Times and throughput of a load, or of columns of loads of the same way."""
    way, w, streams = question.way, question.work, question.streams
    if way == "apart":
        first, token, batch = compute_disaggregated(question, e)
        return ServingTimes(first, token, compute_streamed_tok_s(w, first, token, streams), batch)
    room = take_min(count_resident(w, e, question.complete), question.slots * w.pipeline / w.groups)
    if way == "steady":
        first, token, batch = compute_steady(
            w, e, streams, room, question.waits, question.guessing, question.arrival, question.eager
        )
        return ServingTimes(
            first, token, compute_streamed_tok_s(w, first, token, streams), take_min(batch * w.groups, streams)
        )
    if way == "wave":
        first, token, prompts = compute_burst(w, e, streams, room)
        return ServingTimes(
            first, token, streams * w.output / (prompts + w.output * token), take_min(streams, room * w.groups)
        )
    tok_s = compute_saturated_tok_s(w, e, room)
    if way != "saturated":
        tok_s = tok_s * e.tuned
    if way == "server":
        tok_s = tok_s * e.tuned_server
    if way == "interactive":
        tok_s = tok_s * e.tuned_interactive
    first, token, batch = compute_steady(w, e, room * w.groups, room)
    return ServingTimes(first, token, tok_s, batch * w.groups)


def get_default_waits(engine: str, family: str) -> Waits:
    """The scheduler settings of the engine defaults."""
    traits = get_traits(engine)
    return Waits(pass_tokens=traits.chip_pass_tokens.get(family, PASS_TOKENS), ahead=float(traits.prompts_first))


def get_prefill_waits(engine: str, pass_tokens: float = PASS_TOKENS) -> Waits:
    """How a prefill worker of a disaggregated deployment forms its passes."""
    traits = get_traits(engine)
    return Waits(
        pass_tokens=pass_tokens, ahead=float(traits.prompts_first), unbalanced=float(not traits.balances_groups)
    )


def estimate_under_load(
    machine: MachineRates,
    shape: ModelShape,
    engine: str,
    layout: Layout,
    *,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    slots: float = NO_LIMIT,
    cached_tokens: int = 0,
    kv_bits: float | None = None,
    arrivals: RequestArrivals = USERS,
) -> tuple[ServingTimes, RankWork, Efficiencies]:
    """Estimate `concurrency` requests in flight over all replicas; requests that do not fit queue."""
    bits = choose_kv_bits(shape) if kv_bits is None else kv_bits
    layout = limit_layout(layout, shape)
    work = count_rank_work(machine, shape, layout, prompt_tokens, output_tokens, bits, cached_tokens)
    e = get_efficiencies(engine, machine.family, classify_weights(shape))
    streams = max(1.0, concurrency / layout.replicas)
    complete, waits = float(get_traits(engine).reserves_answer), get_default_waits(engine, machine.family)
    load = ServingLoad(
        "steady", work, work, work, streams, slots, complete, layout.tensor, waits, arrival=arrivals.terms
    )
    found = compute_times(load, e)
    token_s = max(
        found.token_s,
        compute_token_floor_s(machine, shape, layout, found.batch, prompt_tokens + output_tokens / 2, bits),
    )
    first_s = max(found.first_s, compute_prefill_floor_s(shape, machine, work.prompt, layout.ranks * layout.pipeline))
    tok_s = compute_streamed_tok_s(work, first_s, token_s, streams) * min(layout.replicas, concurrency)
    return ServingTimes(first_s, token_s, tok_s, found.batch), work, e


def expect(
    machine: MachineRates,
    shape: ModelShape,
    engine: str,
    layout: Parallelism,
    *,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    slots: int,
    cached_tokens: int = 0,
    kv_bits: float = 16.0,
    factor: float = 1.0,
    least_token_s: float = 0.0,
    arrivals: RequestArrivals = USERS,
) -> Expectation:
    """The expected times of a plan. `factor` is this machine's measured speed relative to the fitted one."""
    divided = convert_layout(layout)
    found, work, e = estimate_under_load(
        machine, shape, engine, divided, concurrency=concurrency, prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, slots=max(1, slots), cached_tokens=cached_tokens,
        kv_bits=kv_bits, arrivals=arrivals,
    )  # fmt: skip
    slower_s = max(0.0, least_token_s - found.token_s)
    token_s = found.token_s + slower_s
    streams = max(1.0, concurrency / divided.replicas)
    tok_s = compute_streamed_tok_s(work, found.first_s, token_s, streams) * min(divided.replicas, concurrency)
    batch = max(1.0, min(concurrency / divided.replicas, slots) / work.groups)
    reading, computing, links, fixed = compute_decode_parts(work, e, batch)
    cache = batch / work.pipeline * work.cache_s / e.cache_read
    prompts = batch / work.pipeline / work.output * compute_prefill_s(work, e) * e.prompt_share
    parts: dict[Limit, float] = {
        "memory bandwidth": (reading - cache) / factor,
        "KV cache": cache / factor,
        "compute": (computing + prompts) / factor,
        "interconnect": links / factor,
        "runtime overhead": (fixed + slower_s) / factor,
    }
    tokens = find_bands("TPOT", engine, machine, shape)
    return Expectation(
        ttft_s=found.first_s / factor,
        tpot_s=token_s / factor,
        output_tok_s=tok_s * factor,
        limit=find_limit(parts),
        parts_s=parts,
        ttft_band=find_bands("TTFT", engine, machine, shape).eighty,
        tpot_band=tokens.eighty,
        # In a closed loop, tokens per second are streams over time per token.
        output_band=tokens.eighty.invert(),
        source=f"a model of continuous batching, fitted on published measurements, for {arrivals.describe()}"
        + tokens.describe_distance(),
    )


def convert_layout(layout: Parallelism) -> Layout:
    """Convert a plan's layout: attention groups divide the tensor ranks, or replace them if there are none."""
    groups = max(1, layout.attention_data)
    if groups > 1 and layout.tensor % groups == 0:
        return Layout(layout.tensor // groups, groups, max(1, layout.expert), layout.pipeline, max(1, layout.data))
    replicas = max(1, layout.data // groups) if layout.data % groups == 0 else max(1, layout.data)
    return Layout(max(1, layout.tensor), groups, max(1, layout.expert), max(1, layout.pipeline), replicas)


def compute_token_floor_s(
    machine: MachineRates, shape: ModelShape, layout: Layout, batch: float, context: float, kv_bits: float
) -> float:
    """The lower bound of a step's time at the data sheet's rates; each pipeline stage processes a part of the batch."""
    # Stages process different requests; with fewer requests than stages, each still reads the weights for one.
    return compute_decode_floor_s(shape, machine, max(1.0, batch / layout.pipeline), context, layout.ranks, kv_bits)
