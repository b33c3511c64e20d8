"""Predictions for rows of one machine with one or a few streams."""

from __future__ import annotations

import math
from typing import NamedTuple

from bedplate.decide.estimate.engines import traits_of
from bedplate.decide.estimate.local import Part, Question, ask, band_of
from bedplate.engines import all_engines
from bedplate.published.rows import Case, Prediction, Refused
from bedplate.values import Parallelism

TYPICAL_CONTEXT = 256
"""Used if a row has no lengths: speed tables are measured with short prompts and outputs."""


def question_of(case: Case) -> Question:
    devices = case.devices or 1
    if traits_of(case.engine).one_stream:
        tensor, pipeline = 1, devices
    else:
        tensor, pipeline = max(case.layout.tensor, devices // max(1, case.layout.pipeline * case.layout.data)), 1
    current, engine = is_current(case), all_engines().get(case.engine)
    return ask(
        case.engine, case.backend, case.machine, case.shape, tensor=tensor, pipeline=pipeline,
        chunk=engine.noted_chunk(case.notes, case.scenario) if engine is not None else None,
        fused=engine is None or engine.noted_fusion(case.notes, current), current=current,
    )  # fmt: skip


def is_current(case: Case) -> bool:
    """Whether the engine's version is one of its main profile, not an older one."""
    engine = all_engines().get(case.engine)
    return engine is None or engine.is_current(case.version, case.backend)


def predict(case: Case) -> Prediction | Refused:
    """The case's metric with its band."""
    if case.metric == "peak_memory_gb":
        return _peak_memory(case)
    if case.machine.bandwidth_bytes_s <= 0:
        return Refused(f"the memory bandwidth of {case.machine.name} is unknown")
    question = question_of(case)
    value = computed(question, case)
    if isinstance(value, Refused):
        return value
    if not math.isfinite(value) or value <= 0:
        return Refused("the prediction from the row's values is not a finite positive number")
    band = band_of(RESIDUALS_OF.get(case.metric, case.metric), question.key)
    return Prediction(value, *(band.inverse() if case.metric.endswith("_ms") else band).around(value))


RESIDUALS_OF = {
    "tpot_ms": "decode_tok_s_single", "ttft_ms": "prefill_tok_s", "output_tok_s_per_gpu": "output_tok_s_total",
}  # fmt: skip
"""Metrics without residuals, and the metrics whose residuals they use."""


def _peak_memory(case: Case) -> Prediction | Refused:
    from bedplate.decide.memory import fit
    from bedplate.facts.simulated import simulated
    from bedplate.values import Workload

    if case.prompt_tokens is None or case.output_tokens is None:
        return Refused("prompt and output lengths are not stated")
    if not traits_of(case.engine).memory_known:
        return Refused(f"the memory overhead of {case.texts['engine']} is unknown")
    devices = case.devices or 1
    described: dict[str, object] = {"accelerator": case.chip.name, "count": devices, "ram_gb": 1024}
    if case.chip.unified:
        sizes = case.chip.memory_options_gib
        described = {"accelerator": case.chip.name, "ram_gb": max(sizes, default=case.chip.memory_gib or 128)}
    if case.chip.kind == "cpu":
        described = {"cpu": case.chip.name, "ram_gb": 1024}
    layout = Parallelism(pipeline=devices) if traits_of(case.engine).one_stream else Parallelism(tensor=devices)
    workload = Workload(
        concurrency=case.concurrency or 1,
        prompt_tokens=max(1, case.prompt_tokens),
        output_tokens=max(1, case.output_tokens),
    )
    found = fit(simulated(described), case.model, workload, case.engine, parallelism=layout)
    total = sum(need.count * need.total_bytes for need in found.devices)
    high = sum(need.count * need.high_bytes for need in found.devices)
    band = band_of("peak_memory_gb", case.engine)
    value = total / 1e9
    return Prediction(value, value * band.low, max(value * band.high, high / 1e9))


def predicts(case: Case) -> bool:
    """Whether this path computes the case's metric for its engine."""
    return case.metric != "ttft_ms" or case.concurrency in (None, 1)


class Asked(NamedTuple):
    """A metric as the parts of its time: `tokens` over the sum of the parts, or the sum in milliseconds."""

    tokens: float
    parts: tuple[Part, ...]
    is_time: bool = False

    def value(self, seconds: float) -> float:
        return seconds * 1000 if self.is_time else self.tokens / seconds


def computed(question: Question, case: Case) -> float | Refused:
    """The case's metric, without a band."""
    found = asked(question, case)
    return found if isinstance(found, Refused) else found.value(sum(question.seconds(part) for part in found.parts))


def asked(question: Question, case: Case) -> Asked | Refused:
    prompt, output = case.prompt_tokens, case.output_tokens
    batch = case.concurrency or 1
    if case.metric == "prefill_tok_s":
        tokens = prompt or 512
        return Asked(tokens * batch, (question.prefill_part(tokens, batch, case.depth or 0),))
    if case.metric == "total_tok_s_incl_prompt":
        if prompt is None or output is None:
            return Refused("prompt and output lengths are not stated")
        return Asked(prompt + output, question.request_parts(prompt, output))
    if case.metric == "decode_tok_s_single":
        if _whole_request(case) and prompt is not None and output:
            return Asked(output, question.request_parts(prompt, output))
        return Asked(1, (question.step_part(1, _context(case)),))
    step = question.step_part(batch, _context(case))
    if case.metric in ("output_tok_s_total", "output_tok_s_per_gpu"):
        return Asked(batch / ((case.devices or 1) if case.metric == "output_tok_s_per_gpu" else 1), (step,))
    if case.metric == "tpot_ms":
        return Asked(1, (step,), is_time=True)
    if case.metric == "ttft_ms":
        return Asked(1, (question.prefill_part(prompt or 512), step), is_time=True)
    return Refused(f"{case.metric} is not predicted for {case.engine}")


def _context(case: Case) -> float:
    """Mean number of tokens in the cache during decoding."""
    if case.prompt_tokens is None and case.output_tokens is None and case.depth is None:
        return TYPICAL_CONTEXT
    return max(case.depth or 0, case.prompt_tokens or 0) + (case.output_tokens or 0) / 2


def _whole_request(case: Case) -> bool:
    """Whether the speed includes the prompt's time: tables that include it state no context depth."""
    if not case.prompt_tokens or case.depth is not None:
        return False
    return "decode phase" not in case.scenario and "llama-bench" not in case.scenario
