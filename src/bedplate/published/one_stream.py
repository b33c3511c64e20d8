"""Predictions for rows of one machine with one or a few streams."""

from __future__ import annotations

import math
from typing import NamedTuple

from bedplate.decide.estimate.bands import BandMetric, BandSet, find_bands
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.local import LocalEstimator, PassPart, make_local_estimator
from bedplate.engines import load_engines
from bedplate.published.rows import PredictionRefusal, PublishedCase, RowPrediction
from bedplate.values import Parallelism
from bedplate.values.fit import Fit

TYPICAL_CONTEXT = 256
"""Used if a row has no lengths: speed tables are measured with short prompts and outputs."""


UNDATED_YEAR = 2024
"""Assumed for a version that is not current if neither build nor date is stated."""
UNMENTIONED = 0.15
"""Probability that a setting that no text mentions differs from the engine's default."""


class SettingsChoice(NamedTuple):
    """One combination of the settings that a row leaves open."""

    probability: float
    backend: str
    fused: bool


def list_choices(case: PublishedCase) -> list[SettingsChoice]:
    """The combinations of unknown settings with their probabilities, the most probable first."""
    engine, settings = load_engines().get(case.engine), case.run
    usual = engine is None or engine.uses_flash_attention(settings.build, get_year(case), case.scenario)
    fused = usual if settings.flash_attention is None else settings.flash_attention
    choices = [SettingsChoice(1.0, case.backend, fused)]
    if get_traits(case.engine).kernels != "gguf" or case.machine.kind == "cpu":
        return choices
    if settings.flash_attention is None:
        choices = [
            choice._replace(probability=share, fused=value)
            for choice in choices
            for share, value in ((1 - UNMENTIONED, fused), (UNMENTIONED, not fused))
        ]
    if settings.hipblaslt is None and case.backend.startswith("rocm"):
        choices = [
            choice._replace(probability=choice.probability * share, backend=choice.backend + build)
            for choice in choices
            for share, build in ((1 - UNMENTIONED, ""), (UNMENTIONED, "-lt"))
        ]
    return choices


def make_case_estimators(case: PublishedCase) -> list[tuple[float, LocalEstimator]]:
    """Estimators for the possible settings with their probabilities, the most probable first."""
    devices = case.devices or 1
    if get_traits(case.engine).one_stream:
        tensor, pipeline = 1, devices
    else:
        tensor, pipeline = max(case.layout.tensor, devices // max(1, case.layout.pipeline * case.layout.data)), 1
    engine, settings, current = load_engines().get(case.engine), case.run, is_current(case)
    chunk = None
    if engine is not None:
        chunk = engine.get_chunk_size(settings.micro_batch, settings.batch, case.scenario)
    return [
        (
            choice.probability,
            make_local_estimator(
                case.engine, choice.backend, case.machine, case.shape, tensor=tensor, pipeline=pipeline, chunk=chunk,
                fused=choice.fused, current=current, build=settings.build, year=get_year(case),
                served="closed loop" in case.scenario,
            ),
        )
        for choice in list_choices(case)
    ]  # fmt: skip


def make_case_estimator(case: PublishedCase) -> LocalEstimator:
    """The estimator of the most probable settings."""
    return make_case_estimators(case)[0][1]


def get_year(case: PublishedCase) -> int | None:
    """The year of the build; `None`: a current build."""
    return case.run.year or (None if is_current(case) else UNDATED_YEAR)


def is_current(case: PublishedCase) -> bool:
    """Whether the engine's version is one of its main profile, not an older one."""
    engine = load_engines().get(case.engine)
    return engine is None or engine.is_current(case.version, case.backend)


def predict(case: PublishedCase) -> RowPrediction | PredictionRefusal:
    """The case's metric with its band."""
    if case.metric == "peak_memory_gb":
        return _predict_peak_memory(case)
    if case.machine.bandwidth_bytes_s <= 0:
        return PredictionRefusal(f"the memory bandwidth of {case.machine.name} is unknown")
    estimators = make_case_estimators(case)
    value = compute_expected_metric(estimators, case)
    if isinstance(value, PredictionRefusal):
        return value
    if not math.isfinite(value) or value <= 0:
        return PredictionRefusal("the prediction from the row's values is not a finite positive number")
    return RowPrediction(value, *find_case_bands(case).eighty.get_bounds(value))


def find_case_bands(case: PublishedCase) -> BandSet:
    """The bands of the case's metric."""
    metric: BandMetric = {"prefill_tok_s": "prefill", "ttft_ms": "prefill", "total_tok_s_incl_prompt": "whole request",
                          "peak_memory_gb": "memory"}.get(case.metric, "decode")  # type: ignore[assignment]  # fmt: skip
    if metric == "decode" and (case.concurrency or 1) > 1 and case.metric != "decode_tok_s_single":
        metric = "batched decode"
    found = find_bands(metric, case.engine, case.machine, case.shape)
    return found.invert() if case.metric.endswith("_ms") else found


def _predict_peak_memory(case: PublishedCase) -> RowPrediction | PredictionRefusal:
    found = fit_memory(case)
    if isinstance(found, PredictionRefusal):
        return found
    value = sum(need.count * need.total_bytes for need in found.devices) / 1e9
    return RowPrediction(value, *find_case_bands(case).eighty.get_bounds(value))


def fit_memory(case: PublishedCase) -> Fit | PredictionRefusal:
    """The memory of the case by device."""
    from bedplate.decide.memory import fit
    from bedplate.facts.hypothetical import make_simulated_hardware
    from bedplate.values import Workload

    if case.prompt_tokens is None or case.output_tokens is None:
        return PredictionRefusal("prompt and output lengths are not stated")
    if not get_traits(case.engine).memory_known:
        return PredictionRefusal(f"the memory overhead of {case.texts['engine']} is unknown")
    devices = case.devices or 1
    described: dict[str, object] = {"accelerator": case.chip.name, "count": devices, "ram_gb": 1024}
    if case.chip.unified:
        sizes = case.chip.memory_options_gib
        described = {"accelerator": case.chip.name, "ram_gb": max(sizes, default=case.chip.memory_gib or 128)}
    if case.chip.kind == "cpu":
        described = {"cpu": case.chip.name, "ram_gb": 1024}
    layout = Parallelism(pipeline=devices) if get_traits(case.engine).one_stream else Parallelism(tensor=devices)
    workload = Workload(
        concurrency=case.concurrency or 1,
        prompt_tokens=max(1, case.prompt_tokens),
        output_tokens=max(1, case.output_tokens),
    )
    return fit(make_simulated_hardware(described), case.model, workload, case.engine, parallelism=layout)


def can_predict(case: PublishedCase) -> bool:
    """Whether this path computes the case's metric for its engine."""
    return case.metric != "ttft_ms" or case.concurrency in (None, 1)


class StreamMetric(NamedTuple):
    """A metric as the parts of its time: `tokens` over the sum of the parts, or the sum in milliseconds."""

    tokens: float
    parts: tuple[PassPart, ...]
    is_time: bool = False

    def compute_value(self, seconds: float) -> float:
        return seconds * 1000 if self.is_time else self.tokens / seconds


def compute_metric(question: LocalEstimator, case: PublishedCase) -> float | PredictionRefusal:
    """The case's metric, without a band."""
    found = find_metric(question, case)
    return (
        found
        if isinstance(found, PredictionRefusal)
        else found.compute_value(sum(question.compute_seconds(part) for part in found.parts))
    )


def compute_expected_metric(
    estimators: list[tuple[float, LocalEstimator]], case: PublishedCase
) -> float | PredictionRefusal:
    """The geometric mean over the possible settings, weighted by their probabilities."""
    total = 0.0
    for probability, estimator in estimators:
        value = compute_metric(estimator, case)
        if isinstance(value, PredictionRefusal):
            return value
        total += probability * math.log(max(value, 1e-12))
    return math.exp(total)


def find_metric(question: LocalEstimator, case: PublishedCase) -> StreamMetric | PredictionRefusal:
    prompt, output = case.prompt_tokens, case.output_tokens
    batch = case.concurrency or 1
    if case.metric == "prefill_tok_s":
        tokens = prompt or 512
        return StreamMetric(tokens * batch, (question.make_prefill_part(tokens, batch, case.depth or 0),))
    if case.metric == "total_tok_s_incl_prompt":
        if prompt is None or output is None:
            return PredictionRefusal("prompt and output lengths are not stated")
        return StreamMetric(prompt + output, question.make_request_parts(prompt, output))
    if case.metric == "decode_tok_s_single":
        if _covers_whole_request(case) and prompt is not None and output:
            return StreamMetric(output, question.make_request_parts(prompt, output))
        return StreamMetric(1, (question.make_step_part(1, _estimate_context(case)),))
    if case.metric == "output_tok_s_total" and "closed loop" in case.scenario and prompt and output:
        return StreamMetric(batch * output, question.make_request_parts(prompt, output, batch))
    step = question.make_step_part(batch, _estimate_context(case))
    if case.metric in ("output_tok_s_total", "output_tok_s_per_gpu"):
        return StreamMetric(batch / ((case.devices or 1) if case.metric == "output_tok_s_per_gpu" else 1), (step,))
    if case.metric == "tpot_ms":
        return StreamMetric(1, (step,), is_time=True)
    if case.metric == "ttft_ms":
        return StreamMetric(1, (question.make_prefill_part(prompt or 512), step), is_time=True)
    return PredictionRefusal(f"{case.metric} is not predicted for {case.engine}")


def _estimate_context(case: PublishedCase) -> float:
    """Mean number of tokens in the cache during decoding."""
    if case.prompt_tokens is None and case.output_tokens is None and case.depth is None:
        return TYPICAL_CONTEXT
    return max(case.depth or 0, case.prompt_tokens or 0) + (case.output_tokens or 0) / 2


def _covers_whole_request(case: PublishedCase) -> bool:
    """Whether the speed includes the prompt's time: tables that include it state no context depth."""
    if not case.prompt_tokens or case.depth is not None:
        return False
    return "decode phase" not in case.scenario and "llama-bench" not in case.scenario
