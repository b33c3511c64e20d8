"""Explains one prediction: the terms that it is the sum of, the settings that were assumed, and the group of its band.

The time of a prediction is proportional to all of its elementary times together: the seconds that reading or computing
takes at the data sheet's rates, and the fixed costs. By Euler's theorem for such functions, it is the sum of each
elementary time multiplied by the prediction's slope in it, wherever times overlap or wait for one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bedplate.decide.estimate.bands import BandSet
from bedplate.decide.estimate.batching import Efficiencies, RankWork, classify_weights, get_efficiencies
from bedplate.decide.estimate.local import PassPart, PassWork, Profile, forward
from bedplate.decide.estimate.serving import ServingLoad
from bedplate.errors import UsageError
from bedplate.published import one_stream, under_load
from bedplate.published.assumptions import list_averaged
from bedplate.published.predict import is_under_load, predict
from bedplate.published.rows import COLUMNS, PredictionRefusal, PublishedCase, RowPrediction, resolve
from bedplate.values.explanation import ExplainedBand, ExplainedFactor, ExplainedTerm, Explanation

STEP = 1e-4
"""Relative change of an elementary time for its slope."""
LEAST_SHARE = 5e-4
"""Terms with a smaller share of the total are left out."""
# For each elementary time: what takes it, and the efficiency that applies to it.
LOCAL_TERMS = {
    "read_s": ("read weights", "slack"), "expert_read_s": ("read packed experts", "moe_4"),
    "weights_hz": ("dequantize weights", "unpack"), "experts_hz": ("dequantize experts", "unpack"),
    "body_s": ("matrix products", "gemm"), "logits_s": ("output projection", "gemm"),
    "expert_s": ("matrix products of experts", "gemm_moe"), "moved_s": ("move activations", "activation"),
    "kv_s": ("read the KV cache", "kv_read"), "pairs_s": ("attention in the prompt", "attend"),
    "pairs_hz": ("attention to the KV cache", "pair"), "links_s": ("send between devices", ""),
    "host_s": ("weights in host memory", ""),
    "served_s": ("sample and send tokens on the host", ""), "layer_s": ("start the kernels of all layers", ""),
    "kernel_s": ("start further norms and scales", ""), "packed_s": ("start the kernels of packed weights", ""),
    "moe_s": ("route tokens to experts", ""),
    "state_s": ("update recurrent states", ""), "step_s": ("fixed cost of each pass", ""),
    "launch_s": ("wait for the host to launch kernels", ""), "eager_s": ("launch the kernels of a prompt", ""),
    "copied_s": ("copy weights to 16 bits", "copy"), "scores_s": ("store attention scores", "scores"),
    "states_s": ("move recurrent states", "state"), "moe_tile_s": ("start empty tiles of experts", ""),
    "call_s": ("start library products of experts", ""),
    "device_s": ("hand over to the next device", ""), "reduce_s": ("latency of all-reduces", ""),
}  # fmt: skip
SERVING_TERMS = {
    "dense_s": ("read weights", "dense_read"), "experts_s": ("read experts", "expert_read"),
    "dense_unpacked_s": ("dequantize weights", "unpacking"), "experts_unpacked_s": ("dequantize experts", "unpacking"),
    "cache_s": ("read the KV cache", "cache_read"), "dense_ops_s": ("matrix products", "matrix"),
    "expert_ops_s": ("matrix products of experts", "expert_matrix"), "logits_s": ("output projection", "matrix"),
    "attending_s": ("attention to the KV cache", "attention"),
    "prompt_attending_s": ("attention in the prompt", "attention"), "activation_s": ("move activations", "activations"),
    "expert_activation_s": ("move activations of experts", "expert_activations"),
    "reduce_s": ("all-reduces", "reduce_rate"), "exchange_s": ("send tokens to experts", "exchange_rate"),
    "layer_s": ("fixed cost of all layers", ""), "expert_layer_s": ("fixed cost of expert layers", ""),
    "latent_layer_s": ("fixed cost of latent attention", ""), "state_layer_s": ("fixed cost of recurrent layers", ""),
    "sparse_layer_s": ("fixed cost of sparse attention", ""), "quantizing_s": ("quantize activations", ""),
    "unpacking_layer_s": ("fixed cost of dequantizing", ""), "pass_s": ("fixed cost of each pass", ""),
    "sequence_s": ("sample and schedule each sequence", ""), "reduce_latency_s": ("latency of all-reduces", ""),
    "exchange_latency_s": ("latency of sending tokens to experts", ""),
    "forward_s": ("forward tokens to clients", ""), "eager_layer_s": ("launch layers without graphs", ""),
    "request_s": ("accept the request and send its first token", ""),
    "first_layer_s": ("launch the first pass: all layers", ""),
    "first_expert_layer_s": ("launch the first pass: expert layers", ""),
    "first_latent_layer_s": ("launch the first pass: latent attention", ""),
    "first_state_layer_s": ("launch the first pass: recurrent layers", ""),
    "apart_first_s": ("hand over to a decode worker", ""), "apart_far_s": ("messages between nodes", ""),
}  # fmt: skip
BOUND = "lower bound at the data sheet's rates"


class Split(NamedTuple):
    """A total, and how much of it each elementary time is responsible for."""

    total: float
    parts: Mapping[str, float]
    values: Mapping[str, float]


def parse_question(text: str) -> dict[str, str | None]:
    """Parse `hardware=RTX 4090; engine=llama.cpp; …` into a row."""
    row: dict[str, str | None] = {}
    for piece in text.split(";"):
        name, separator, value = piece.partition("=")
        if not separator and not piece.strip():
            continue
        if name.strip().lower() not in COLUMNS and row.get("notes"):
            row["notes"] = f"{row['notes']}; {piece.strip()}"
            continue
        if name.strip().lower() not in COLUMNS:
            raise UsageError(f"unknown column {name.strip()!r} in the question", hint=f"columns: {', '.join(COLUMNS)}")
        row[name.strip().lower()] = value.strip()
    return row


def explain(row: Mapping[str, str | None]) -> Explanation | PredictionRefusal:
    """The terms of a row's prediction, or why it is refused."""
    predicted = predict(row)
    if isinstance(predicted, PredictionRefusal):
        return predicted
    case = resolve(row)
    if isinstance(case, PredictionRefusal):
        return case
    if case.metric == "peak_memory_gb":
        return _explain_memory(case, predicted)
    return _explain_load(case, predicted) if is_under_load(case) else _explain_stream(case, predicted)


def split_total(compute: Callable[[Mapping[str, float]], float], values: Mapping[str, float]) -> Split:
    """Divide a total among the elementary times by its slopes. `compute` has the total if some of them are scaled."""
    total = compute({})
    parts = {
        name: (compute({name: 1 + STEP}) - compute({name: 1 - STEP})) / (2 * STEP)
        for name, value in values.items()
        if value
    }
    return Split(total, parts, values)


def _is_time(name: str) -> bool:
    return name.endswith(("_s", "_hz"))


def _explain_stream(case: PublishedCase, predicted: RowPrediction) -> Explanation | PredictionRefusal:
    estimators = one_stream.make_case_estimators(case)
    asked = [(weight, one, one_stream.find_metric(one, case)) for weight, one in estimators]
    question, metric = asked[0][1:]
    if isinstance(metric, PredictionRefusal):
        return metric

    def compute(scaled: Mapping[str, float]) -> float:
        total = 0.0
        for weight, one, found in asked:
            if not isinstance(found, PredictionRefusal):
                total += weight * math.log(_sum_parts(_scale(one.profile, scaled), found.parts, scaled))
        return math.exp(total)

    values = {name: getattr(question.profile, name) for name in Profile._fields if _is_time(name)}
    for name in filter(_is_time, PassWork._fields):
        values[name] = sum(getattr(part.work, name) * part.times for part in metric.parts)
    split = split_total(compute, values)
    work = metric.parts[0].work
    unpack = "unpack_16" if work.half else "unpack_8" if work.eight else "unpack_4"
    terms = _make_terms(split, LOCAL_TERMS, question.profile, {"unpack": unpack})
    tokens = f"{metric.tokens:g} token{'' if metric.tokens == 1 else 's'}"
    assumed = {
        "prefill chunk size": f"{question.chunk:,} tokens",
        "flash attention": list_averaged((weight, "yes" if one.fused else "no") for weight, one in estimators),
        "engine build": "current" if one_stream.is_current(case) else "older, or not stated",
        "efficiencies": list_averaged((weight, one.key) for weight, one in estimators),
    }
    if case.metric == "prefill_tok_s" and case.prompt_tokens is None:
        assumed["prompt"] = tokens
    elif case.prompt_tokens is None and case.output_tokens is None and case.depth is None:
        assumed["context"] = f"{one_stream.TYPICAL_CONTEXT} tokens"
    return _make_explanation(
        case, predicted, one_stream.find_case_bands(case), terms, (), assumed, split.total, f"the time of {tokens}"
    )


def _sum_parts(profile: Profile, parts: Sequence[PassPart], scaled: Mapping[str, float]) -> float:
    return sum(max(forward(profile, _scale(part.work, scaled)).total_s * part.times, part.floor_s) for part in parts)


def _explain_load(case: PublishedCase, predicted: RowPrediction) -> Explanation | PredictionRefusal:
    found = under_load.find_load(case)
    if isinstance(found, PredictionRefusal):
        return found
    e = get_efficiencies(case.engine, found.machine.family, classify_weights(case.shape))
    timed = case.metric.endswith("_ms")
    _, variance = under_load.average_values(case, found, e)

    def compute(scaled: Mapping[str, float]) -> float:
        loads = tuple((weight, _scale_load(load, scaled)) for weight, load in found.alternatives)
        value, _ = under_load.average_values(case, found._replace(alternatives=loads), _scale(e, scaled))
        return value / 1e3 if timed else 1 / value

    work = found.question.prompts if case.metric == "ttft_ms" else found.question.work
    values = {name: getattr(work, name) for name in RankWork._fields if _is_time(name)}
    values |= {name: getattr(e, name) for name in Efficiencies._fields if _is_time(name)}
    split = split_total(compute, values)
    terms = _make_terms(split, SERVING_TERMS, e, {})
    used = {efficiency for _, efficiency in SERVING_TERMS.values()}
    others = {name: getattr(e, name) for name in Efficiencies._fields if not _is_time(name) and name not in used}
    scales = split_total(compute, others)
    factors = tuple(
        ExplainedFactor(name=name.replace("_", " "), value=others[name], share=part / scales.total)
        for name, part in sorted(scales.parts.items(), key=lambda one: -abs(one[1]))
        if abs(part) > 10 * LEAST_SHARE * scales.total
    )
    what = {"ttft_ms": "the time to the first token", "tpot_ms": "the time per output token"}.get(
        case.metric, "the time of one request" if timed else "the time of one unit of the metric, all replicas together"
    )
    return _make_explanation(
        case, predicted, under_load.find_case_bands(case, found.question.way, variance), terms, factors,
        under_load.list_assumptions(case, found), split.total, what,
    )  # fmt: skip


def _scale_load(load: ServingLoad, scaled: Mapping[str, float]) -> ServingLoad:
    return load._replace(**{name: _scale(getattr(load, name), scaled) for name in ("work", "spread", "prompts")})


def _scale(record: Any, scaled: Mapping[str, float]) -> Any:
    """A named tuple with some of its fields multiplied."""
    own = {name: getattr(record, name) * factor for name, factor in scaled.items() if name in record._fields}
    return record._replace(**own) if own else record


def _make_terms(
    split: Split, words: Mapping[str, tuple[str, str]], efficiencies: Any, names: Mapping[str, str]
) -> tuple[ExplainedTerm, ...]:
    terms = []
    for name, seconds in split.parts.items():
        if abs(seconds) <= LEAST_SHARE * split.total:
            continue
        said, efficiency = words.get(name, (name.removesuffix("_s").replace("_", " "), ""))
        efficiency = names.get(efficiency, efficiency)
        cycles = name.endswith("_hz")
        terms.append(
            ExplainedTerm(
                name=said, value=split.values[name], unit="s per cycle" if cycles else "s", efficiency_name=efficiency,
                efficiency=getattr(efficiencies, efficiency) if efficiency else None,
                seconds=seconds, share=seconds / split.total,
            )
        )  # fmt: skip
    rest = split.total - sum(split.parts.values())
    if abs(rest) > LEAST_SHARE * split.total:
        terms.append(ExplainedTerm(name=BOUND, value=rest, unit="s", seconds=rest, share=rest / split.total))
    return tuple(sorted(terms, key=lambda term: -abs(term.share)))


def _explain_memory(case: PublishedCase, predicted: RowPrediction) -> Explanation | PredictionRefusal:
    fit = one_stream.fit_memory(case)
    if isinstance(fit, PredictionRefusal):
        return fit
    amounts = {
        "weights": sum(need.count * need.weights_bytes for need in fit.devices),
        "KV cache": sum(need.count * need.kv_bytes for need in fit.devices),
        "activations": sum(need.count * need.activation_bytes.value for need in fit.devices),
        "context, graphs and workspaces": sum(need.count * need.overhead_bytes.value for need in fit.devices),
    }
    terms = tuple(
        ExplainedTerm(name=name, value=amount / 1e9, unit="GB", share=amount / 1e9 / predicted.value)
        for name, amount in sorted(amounts.items(), key=lambda one: -one[1])
        if amount
    )
    return _make_explanation(case, predicted, one_stream.find_case_bands(case), terms, (), {}, None, "")


def _make_explanation(
    case: PublishedCase,
    predicted: RowPrediction,
    bands: BandSet,
    terms: tuple[ExplainedTerm, ...],
    factors: tuple[ExplainedFactor, ...],
    assumed: dict[str, str],
    total_s: float | None,
    total_is: str,
) -> Explanation:
    levels = ((50, bands.half), (80, bands.eighty), (95, bands.most))
    bounds = ((level, *band.get_bounds(predicted.value)) for level, band in levels)
    return Explanation(
        row_id=case.row_id,
        metric=case.metric,
        predicted=predicted.value,
        total_s=total_s,
        total_is=total_is,
        terms=terms,
        factors=factors,
        assumed=assumed,
        bands=tuple(ExplainedBand(level=level, low=low, high=high) for level, low, high in bounds),
        band_group=bands.group,
        band_campaigns=bands.campaigns,
        band_rows=bands.rows,
        far=bands.far,
    )
