"""Estimates under load: time to first token, time per token and throughput of many concurrent requests."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.batching import (
    NO_WAITS,
    PASS_TOKENS,
    Efficiencies,
    Layout,
    Waits,
    Work,
    apart,
    decode_parts,
    efficiencies,
    layout_on,
    least,
    one_wave,
    prefill_s,
    resident,
    saturated_tok_s,
    steady,
    streamed_tok_s,
    usual_kv_bits,
    weight_type,
    work_of,
)
from bedplate.decide.estimate.calibration import Band, Expectation, Limit, limit_of_parts, table
from bedplate.decide.estimate.engines import traits_of
from bedplate.decide.estimate.machine import Machine
from bedplate.decide.estimate.physics import Shape, decode_floor_s, prefill_floor_s
from bedplate.values import Parallelism

Way = Literal["steady", "wave", "apart", "saturated", "offline", "server", "interactive"]

NO_LIMIT = 1e6


class Question(NamedTuple):
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


class Answer(NamedTuple):
    first_s: Any
    token_s: Any
    tok_s: Any
    """Throughput of one replica."""
    batch: Any
    """Sequences in one step of a replica, or of a decode worker."""


def answer(question: Question, e: Any) -> Answer:
    """Times and throughput of a load, or of columns of loads of the same way."""
    way, w, streams = question.way, question.work, question.streams
    if way == "apart":
        first, token, batch = apart(question, e)
        return Answer(first, token, streamed_tok_s(w, first, token, streams), batch)
    room = least(resident(w, e, question.complete), question.slots * w.pipeline / w.groups)
    if way == "steady":
        first, token, batch = steady(w, e, streams, room, question.waits, question.guessing)
        return Answer(first, token, streamed_tok_s(w, first, token, streams), least(batch * w.groups, streams))
    if way == "wave":
        first, token, prompts = one_wave(w, e, streams, room)
        return Answer(first, token, streams * w.output / (prompts + w.output * token), least(streams, room * w.groups))
    tok_s = saturated_tok_s(w, e, room)
    if way != "saturated":
        tok_s = tok_s * e.tuned
    if way == "server":
        tok_s = tok_s * e.tuned_server
    if way == "interactive":
        tok_s = tok_s * e.tuned_interactive
    first, token, batch = steady(w, e, room * w.groups, room)
    return Answer(first, token, tok_s, batch * w.groups)


def usual_waits(engine: str, family: str) -> Waits:
    """The scheduler settings of the engine defaults."""
    traits = traits_of(engine)
    return Waits(pass_tokens=traits.chip_pass_tokens.get(family, PASS_TOKENS), ahead=float(traits.prompts_first))


def under_load(
    machine: Machine,
    shape: Shape,
    engine: str,
    layout: Layout,
    *,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    slots: float = NO_LIMIT,
    cached_tokens: int = 0,
    kv_bits: float | None = None,
) -> tuple[Answer, Work, Efficiencies]:
    """Estimate a closed loop with `concurrency` requests over all replicas; requests that do not fit queue."""
    bits = usual_kv_bits(shape) if kv_bits is None else kv_bits
    layout = layout_on(layout, shape)
    work = work_of(machine, shape, layout, prompt_tokens, output_tokens, bits, cached_tokens)
    e = efficiencies(engine, machine.family, weight_type(shape))
    streams = max(1.0, concurrency / layout.replicas)
    complete, waits = float(traits_of(engine).reserves_answer), usual_waits(engine, machine.family)
    found = answer(Question("steady", work, work, work, streams, slots, complete, layout.tensor, waits), e)
    token_s = max(
        found.token_s, token_floor_s(machine, shape, layout, found.batch, prompt_tokens + output_tokens / 2, bits)
    )
    first_s = max(found.first_s, prefill_floor_s(shape, machine, work.prompt, layout.ranks * layout.pipeline))
    tok_s = streamed_tok_s(work, first_s, token_s, streams) * min(layout.replicas, concurrency)
    return Answer(first_s, token_s, tok_s, found.batch), work, e


def expect(
    machine: Machine,
    shape: Shape,
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
) -> Expectation:
    """The expected times of a plan. `factor` is this machine's measured speed relative to the fitted one."""
    divided = divided_as(layout)
    found, work, e = under_load(
        machine, shape, engine, divided, concurrency=concurrency, prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, slots=max(1, slots), cached_tokens=cached_tokens,
        kv_bits=kv_bits,
    )  # fmt: skip
    slower_s = max(0.0, least_token_s - found.token_s)
    token_s = found.token_s + slower_s
    streams = max(1.0, concurrency / divided.replicas)
    tok_s = streamed_tok_s(work, found.first_s, token_s, streams) * min(divided.replicas, concurrency)
    batch = max(1.0, min(concurrency / divided.replicas, slots) / work.groups)
    reading, computing, links, fixed = decode_parts(work, e, batch)
    cache = batch / work.pipeline * work.cache_s / e.cache_read
    prompts = batch / work.pipeline / work.output * prefill_s(work, e) * e.prompt_share
    parts: dict[Limit, float] = {
        "memory bandwidth": (reading - cache) / factor,
        "KV cache": cache / factor,
        "compute": (computing + prompts) / factor,
        "interconnect": links / factor,
        "runtime overhead": (fixed + slower_s) / factor,
    }
    return Expectation(
        ttft_s=found.first_s / factor,
        tpot_s=token_s / factor,
        output_tok_s=tok_s * factor,
        limit=limit_of_parts(parts),
        parts_s=parts,
        ttft_band=band("steady", "ttft_ms"),
        tpot_band=band("steady", "tpot_ms"),
        output_band=band("steady", "output_tok_s_total"),
        source="a model of continuous batching, fitted on published measurements",
    )


def divided_as(layout: Parallelism) -> Layout:
    """Convert a plan's layout: attention groups divide the tensor ranks, or replace them if there are none."""
    groups = max(1, layout.attention_data)
    if groups > 1 and layout.tensor % groups == 0:
        return Layout(layout.tensor // groups, groups, max(1, layout.expert), layout.pipeline, max(1, layout.data))
    replicas = max(1, layout.data // groups) if layout.data % groups == 0 else max(1, layout.data)
    return Layout(max(1, layout.tensor), groups, max(1, layout.expert), max(1, layout.pipeline), replicas)


def band(way: Way, metric: str) -> Band:
    """The error band: eight of ten rows that were held out of the fit are within these factors."""
    bands = table("serving")["bands"]
    timed = metric in ("ttft_ms", "tpot_ms", "latency_ms")
    if not timed and way in ("steady", "apart"):
        # In a closed loop, tokens per second are streams over time per token; few tables have both.
        low, high = bands[f"{way} tpot_ms"]
        return Band(1 / high, 1 / low)
    name = metric if metric in ("ttft_ms", "tpot_ms") else "tpot_ms" if timed else "output_tok_s_total"
    found = bands.get(f"{way} {name}") or bands[f"steady {name}"]
    return Band(found[0], found[1])


def token_floor_s(
    machine: Machine, shape: Shape, layout: Layout, batch: float, context: float, kv_bits: float
) -> float:
    """The lower bound of a step's time at the data sheet's rates; each pipeline stage processes a part of the batch."""
    # Stages process different requests; with fewer requests than stages, each still reads the weights for one.
    return decode_floor_s(shape, machine, max(1.0, batch / layout.pipeline), context, layout.ranks, kv_bits)
