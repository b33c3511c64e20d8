"""Tables of the estimated time of a pass by its sequences, their contexts and its prompt tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bedplate.decide.estimate import local
from bedplate.decide.estimate.batching import (
    SLOW_LINK_BYTES_S,
    Efficiencies,
    Layout,
    decode_s,
    efficiencies,
    first_host_s,
    layout_on,
    pass_s,
    prefill_s,
    weight_type,
    work_of,
)
from bedplate.decide.estimate.calibration import Band
from bedplate.decide.estimate.engines import timed_as, traits_of
from bedplate.decide.estimate.expectation import backend_of, host_of
from bedplate.decide.estimate.machine import Machine, machine_of
from bedplate.decide.estimate.physics import Shape, decode_floor_s, prefill_floor_s, shape_of
from bedplate.decide.estimate.serving import band, divided_as
from bedplate.decide.simulate.fleet import Transfer
from bedplate.decide.simulate.replica import Steps
from bedplate.values import Hardware, Model, Parallelism
from bedplate.values.fit import Offload

GRID = 64
"""Prompt tokens between two computed entries of a table; the entries between are interpolated."""
LEAST_S = 1e-7


class Lengths(NamedTuple):
    """Mean lengths of the requests; tables are exact there and linear elsewhere."""

    prompt: float
    output: float

    @property
    def contexts(self) -> tuple[float, float]:
        """Contexts at the start and the end of the output, far enough apart for a precise slope."""
        return self.prompt, max(self.prompt + self.output, 1.25 * self.prompt + 16.0)


class Timed(NamedTuple):
    steps: Steps
    transfer: Transfer
    """The transfer to another worker of the same kind."""
    spread: Band
    """The error band of a pass's time."""
    source: str


def timed(
    hardware: Hardware,
    model: Model,
    engine: str,
    layout: Parallelism,
    lengths: Lengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float = 16.0,
    offload: Offload | None = None,
    factor: float = 1.0,
) -> Timed | None:
    """The times of one replica, regardless of `layout.data`; `None` if the machine's rates are unknown."""
    machine, shape = machine_of(hardware), shape_of(model)
    if machine.bandwidth_bytes_s <= 0 or model.task != "generate":
        return None
    engine = timed_as(engine)
    batched = slots > 1 and traits_of(engine).kernels == "serving" and machine.kind != "cpu"
    if batched:
        found = served(machine, shape, engine, layout, lengths, slots=slots, batch_tokens=batch_tokens, kv_bits=kv_bits)
        spread, source = band("steady", "tpot_ms"), "a model of continuous batching, fitted on published measurements"
        fixed_s = efficiencies(engine, machine.family, weight_type(shape)).apart_first_s
    else:
        question = local.ask(
            engine, backend_of(engine, machine), machine, shape, tensor=layout.tensor, pipeline=layout.pipeline,
            host=host_of(hardware, shape, offload) if offload is not None and offload.host_bytes else None,
        )  # fmt: skip
        found = alone(question, lengths, slots=slots, batch_tokens=batch_tokens)
        spread = local.band_of("output_tok_s_total", question.key).inverse()
        source = f"bytes and operations at the efficiencies of {question.key}, fitted on published measurements"
        fixed_s = 0.0
    if factor != 1.0:
        found = faster(found, factor)
        source += f", times {factor:.2f} as measured on this machine"
    return Timed(found, Transfer(fixed_s, _sent_s(machine, model, layout, lengths, kv_bits)), spread, source)


def faster(steps: Steps, factor: float) -> Steps:
    """The times of passes that are `factor` times as fast."""
    return steps._replace(
        decode_s=tuple(one / factor for one in steps.decode_s),
        context_s=tuple(one / factor for one in steps.context_s),
        prompt_s=tuple(one / factor for one in steps.prompt_s),
        pair_s=steps.pair_s / factor,
        once_s=steps.once_s / factor,
    )


def served(
    machine: Machine,
    shape: Shape,
    engine: str,
    layout: Parallelism,
    lengths: Lengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float,
) -> Steps:
    """The times of an engine that batches on accelerators."""
    return batched(
        machine, shape, efficiencies(engine, machine.family, weight_type(shape)),
        layout_on(divided_as(layout), shape)._replace(replicas=1), lengths, slots=slots, batch_tokens=batch_tokens,
        kv_bits=kv_bits,
    )  # fmt: skip


def batched(
    machine: Machine,
    shape: Shape,
    e: Efficiencies,
    layout: Layout,
    lengths: Lengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float,
) -> Steps:
    early, late = lengths.contexts
    works = [(context, work_of(machine, shape, layout, context, 0.0, kv_bits)) for context in (early, late)]

    def step_s(sequences: int, context: float) -> float:
        work = works[0][1] if context == early else works[1][1]
        own = sequences / work.groups
        own = max(1.0, own + work.uneven * e.unevenness * own**0.5)
        floor = decode_floor_s(shape, machine, sequences / layout.pipeline, context, layout.ranks, kv_bits)
        return max(float(decode_s(work, e, own)), floor)

    asked = work_of(machine, shape, layout, max(1.0, lengths.prompt), lengths.output, kv_bits)
    rates = (e.reduce_rate_prompt, e.exchange_rate_prompt)

    def prompt_s(tokens: int) -> float:
        alone_s = float(pass_s(asked, e, tokens / asked.groups, 0.0, 0.0, max(1.0, tokens / asked.prompt), rates))
        return max(alone_s, prefill_floor_s(shape, machine, tokens, layout.ranks * layout.pipeline))

    whole = float(prefill_s(asked, e)) - float(pass_s(asked, e, asked.prompt, 0.0, 0.0, 1.0, rates))
    decode, context = decode_table(step_s, lengths, slots)
    return Steps(
        decode_s=decode,
        context_s=context,
        prompt_s=prompt_table(prompt_s, batch_tokens),
        pair_s=max(0.0, whole) / _pairs(asked.prompt) / asked.groups,
        # Pipeline stages compute different prompts at the same time.
        share=e.prompt_share / asked.pipeline,
        hidden=max(0.0, 1.0 - e.prompt_share),
        # A request waits for half a pass on average, and for its own pass.
        lag=max(0.0, e.steps_waited - 1.5),
        accept_s=e.request_s + float(first_host_s(asked, e)),
    )


def alone(question: local.Question, lengths: Lengths, *, slots: int, batch_tokens: int) -> Steps:
    """The times of other engines, and of all engines on a CPU."""
    prompt = max(1, round(lengths.prompt))
    deep = question.prefill_s(prompt, 1, float(prompt))
    pair_s = max(0.0, deep - question.prefill_s(prompt)) / (prompt * prompt)
    decode, context = decode_table(question.step_s, lengths, slots)

    def prompt_s(tokens: int) -> float:
        return question.prefill_s(tokens) - pair_s * _pairs(tokens)

    return Steps(
        decode_s=decode, context_s=context, prompt_s=prompt_table(prompt_s, batch_tokens), pair_s=pair_s
    )  # fmt: skip


def decode_table(
    step_s: Callable[[int, float], float], lengths: Lengths, slots: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By sequences: the time of a pass without context, and the time per token of context, from two contexts."""
    early, late = lengths.contexts
    fixed, each = [0.0], [0.0]
    for count in range(1, slots + 1):
        soon, later = step_s(count, early), step_s(count, late)
        slope = max(0.0, (later - soon) / (count * (late - early)))
        slope = min(slope, soon / (count * early))
        fixed.append(max(LEAST_S, soon - slope * count * early))
        each.append(slope)
    return tuple(fixed), tuple(each)


def prompt_table(prompt_s: Callable[[int], float], batch_tokens: int) -> tuple[float, ...]:
    """By the prompt tokens of a pass: computed on a grid that is finer for short passes."""
    knots = sorted({0, 1, 2, 4, 8, 16, 32, *range(GRID, batch_tokens, GRID), batch_tokens})
    at = [max(LEAST_S, prompt_s(max(1, knot))) for knot in knots]
    found: list[float] = []
    for low, high, low_s, high_s in zip(knots, knots[1:], at, at[1:], strict=False):
        rise = (high_s - low_s) / (high - low)
        found += [low_s + rise * (tokens - low) for tokens in range(low, high)]
    return (*found, at[-1])


def _pairs(tokens: float) -> float:
    return tokens * (tokens + 1.0) / 2.0


def _sent_s(machine: Machine, model: Model, layout: Parallelism, lengths: Lengths, kv_bits: float) -> float:
    """Time to transfer one token's cache to another worker: each card sends its part over its own link."""
    from bedplate.decide.memory import kv_bytes_on_device

    tokens = max(1, round(lengths.prompt))
    each = kv_bytes_on_device(model, tokens, layout) * kv_bits / 16.0 / tokens
    return each / (machine.network_bytes_s or machine.peer_bytes_s or SLOW_LINK_BYTES_S)
