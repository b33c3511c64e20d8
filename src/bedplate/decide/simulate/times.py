"""Tables of the estimated time of a pass by its sequences, their contexts and its prompt tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bedplate.decide.estimate import local
from bedplate.decide.estimate.bands import find_bands
from bedplate.decide.estimate.batching import (
    SLOW_LINK_BYTES_S,
    Efficiencies,
    Layout,
    classify_weights,
    compute_decode_s,
    compute_first_host_s,
    compute_pass_s,
    compute_prefill_s,
    count_rank_work,
    get_efficiencies,
    limit_layout,
    overlap_times,
)
from bedplate.decide.estimate.calibration import Band
from bedplate.decide.estimate.engines import get_timed_engine, get_traits
from bedplate.decide.estimate.expectation import get_backend, get_host_weights
from bedplate.decide.estimate.machine import MachineRates, get_machine_rates
from bedplate.decide.estimate.physics import ModelShape, compute_decode_floor_s, compute_prefill_floor_s, get_shape
from bedplate.decide.estimate.serving import convert_layout
from bedplate.decide.simulate.fleet import Transfer
from bedplate.decide.simulate.replica import Steps
from bedplate.values import Hardware, Model, Parallelism
from bedplate.values.fit import Offload

GRID = 64
"""Prompt tokens between two computed entries of a table; the entries between are interpolated."""
LEAST_S = 1e-7


class MeanLengths(NamedTuple):
    """Mean lengths of the requests; tables are exact there and linear elsewhere."""

    prompt: float
    output: float

    @property
    def contexts(self) -> tuple[float, float]:
        """Contexts at the start and the end of the output, far enough apart for a precise slope."""
        return self.prompt, max(self.prompt + self.output, 1.25 * self.prompt + 16.0)


class ReplicaTimes(NamedTuple):
    steps: Steps
    transfer: Transfer
    """The transfer to another worker of the same kind."""
    spread: Band
    """The error band of a pass's time."""
    source: str


def make_replica_times(
    hardware: Hardware,
    model: Model,
    engine: str,
    layout: Parallelism,
    lengths: MeanLengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float = 16.0,
    offload: Offload | None = None,
    factor: float = 1.0,
) -> ReplicaTimes | None:
    """The times of one replica, regardless of `layout.data`; `None` if the machine's rates are unknown."""
    machine, shape = get_machine_rates(hardware), get_shape(model)
    if machine.bandwidth_bytes_s <= 0 or model.task != "generate":
        return None
    engine = get_timed_engine(engine)
    batched = slots > 1 and get_traits(engine).kernels == "serving" and machine.kind != "cpu"
    if batched:
        found = make_served_steps(
            machine, shape, engine, layout, lengths, slots=slots, batch_tokens=batch_tokens, kv_bits=kv_bits
        )
        spread = find_bands("TPOT", engine, machine, shape).eighty
        source = "a model of continuous batching, fitted on published measurements"
        fixed_s = get_efficiencies(engine, machine.family, classify_weights(shape)).apart_first_s
    else:
        question = local.make_local_estimator(
            engine, get_backend(engine, machine), machine, shape, tensor=layout.tensor, pipeline=layout.pipeline,
            host=get_host_weights(hardware, shape, offload) if offload is not None and offload.host_bytes else None,
            served=True,
        )  # fmt: skip
        found = make_unbatched_steps(question, lengths, slots=slots, batch_tokens=batch_tokens)
        spread = find_bands("batched decode", engine, machine, shape).eighty.invert()
        source = f"bytes and operations at the efficiencies of {question.key}, fitted on published measurements"
        fixed_s = 0.0
    if factor != 1.0:
        found = speed_up(found, factor)
        source += f", times {factor:.2f} as measured on this machine"
    return ReplicaTimes(
        found, Transfer(fixed_s, _compute_send_s(machine, model, layout, lengths, kv_bits)), spread, source
    )


def speed_up(steps: Steps, factor: float) -> Steps:
    """The times of passes that are `factor` times as fast."""
    return steps._replace(
        decode_s=tuple(one / factor for one in steps.decode_s),
        context_s=tuple(one / factor for one in steps.context_s),
        prompt_s=tuple(one / factor for one in steps.prompt_s),
        pair_s=steps.pair_s / factor,
        once_s=steps.once_s / factor,
    )


def make_served_steps(
    machine: MachineRates,
    shape: ModelShape,
    engine: str,
    layout: Parallelism,
    lengths: MeanLengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float,
) -> Steps:
    """The times of an engine that batches on accelerators."""
    return make_batched_steps(
        machine, shape, get_efficiencies(engine, machine.family, classify_weights(shape)),
        limit_layout(convert_layout(layout), shape)._replace(replicas=1), lengths, slots=slots,
        batch_tokens=batch_tokens,
        kv_bits=kv_bits,
    )  # fmt: skip


def make_batched_steps(
    machine: MachineRates,
    shape: ModelShape,
    e: Efficiencies,
    layout: Layout,
    lengths: MeanLengths,
    *,
    slots: int,
    batch_tokens: int,
    kv_bits: float,
) -> Steps:
    early, late = lengths.contexts
    works = [(context, count_rank_work(machine, shape, layout, context, 0.0, kv_bits)) for context in (early, late)]

    def compute_step_s(sequences: int, context: float) -> float:
        work = works[0][1] if context == early else works[1][1]
        own = sequences / work.groups
        own = max(1.0, own + work.uneven * e.unevenness * own**0.5)
        floor = compute_decode_floor_s(shape, machine, sequences / layout.pipeline, context, layout.ranks, kv_bits)
        return max(float(overlap_times(compute_decode_s(work, e, own), sequences * e.forward_s)), floor)

    asked = count_rank_work(machine, shape, layout, max(1.0, lengths.prompt), lengths.output, kv_bits)
    rates = (e.reduce_rate_prompt, e.exchange_rate_prompt)

    def compute_prompt_s(tokens: int) -> float:
        alone_s = float(
            compute_pass_s(asked, e, tokens / asked.groups, 0.0, 0.0, max(1.0, tokens / asked.prompt), rates)
        )
        return max(alone_s, compute_prefill_floor_s(shape, machine, tokens, layout.ranks * layout.pipeline))

    whole = float(compute_prefill_s(asked, e)) - float(compute_pass_s(asked, e, asked.prompt, 0.0, 0.0, 1.0, rates))
    decode, context = make_decode_table(compute_step_s, lengths, slots)
    return Steps(
        decode_s=decode,
        context_s=context,
        prompt_s=make_prompt_table(compute_prompt_s, batch_tokens),
        pair_s=max(0.0, whole) / _count_pairs(asked.prompt) / asked.groups,
        # Pipeline stages compute different prompts at the same time.
        share=e.prompt_share / asked.pipeline,
        hidden=max(0.0, 1.0 - e.prompt_share),
        # A request waits for half a pass on average, and for its own pass.
        lag=max(0.0, e.steps_waited - 1.5),
        accept_s=e.request_s + float(compute_first_host_s(asked, e)),
    )


def make_unbatched_steps(
    question: local.LocalEstimator, lengths: MeanLengths, *, slots: int, batch_tokens: int
) -> Steps:
    """The times of other engines, and of all engines on a CPU."""
    prompt = max(1, round(lengths.prompt))
    deep = question.estimate_prefill_s(prompt, 1, float(prompt))
    pair_s = max(0.0, deep - question.estimate_prefill_s(prompt)) / (prompt * prompt)
    decode, context = make_decode_table(question.step_s, lengths, slots)

    def compute_prompt_s(tokens: int) -> float:
        return question.estimate_prefill_s(tokens) - pair_s * _count_pairs(tokens)

    return Steps(
        decode_s=decode, context_s=context, prompt_s=make_prompt_table(compute_prompt_s, batch_tokens), pair_s=pair_s
    )  # fmt: skip


def make_decode_table(
    step_s: Callable[[int, float], float], lengths: MeanLengths, slots: int
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


def make_prompt_table(prompt_s: Callable[[int], float], batch_tokens: int) -> tuple[float, ...]:
    """By the prompt tokens of a pass: computed on a grid that is finer for short passes."""
    knots = sorted({0, 1, 2, 4, 8, 16, 32, *range(GRID, batch_tokens, GRID), batch_tokens})
    at = [max(LEAST_S, prompt_s(max(1, knot))) for knot in knots]
    found: list[float] = []
    for low, high, low_s, high_s in zip(knots, knots[1:], at, at[1:], strict=False):
        rise = (high_s - low_s) / (high - low)
        found += [low_s + rise * (tokens - low) for tokens in range(low, high)]
    return (*found, at[-1])


def _count_pairs(tokens: float) -> float:
    return tokens * (tokens + 1.0) / 2.0


def _compute_send_s(
    machine: MachineRates, model: Model, layout: Parallelism, lengths: MeanLengths, kv_bits: float
) -> float:
    """Time to transfer one token's cache to another worker: each card sends its part over its own link."""
    from bedplate.decide.memory import get_kv_bytes_on_device

    tokens = max(1, round(lengths.prompt))
    each = get_kv_bytes_on_device(model, tokens, layout) * kv_bits / 16.0 / tokens
    return each / (machine.network_bytes_s or machine.peer_bytes_s or SLOW_LINK_BYTES_S)
