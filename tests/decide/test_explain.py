"""`explain`: the terms of a prediction add up to it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bedplate.errors import UsageError
from bedplate.published.explain import BOUND, explain, parse_question, split_total
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, RowPrediction
from bedplate.values.explanation import Explanation

LLAMA = "hardware=RTX 4090; engine=llama.cpp; engine_version=b7340; model=Llama 3.1 8B Q4_K_M; prompt_tokens=512"
SERVED = (
    "hardware=NVIDIA H200 SXM 141GB; engine=vLLM; model=openai/gpt-oss-120b; concurrency=64; prompt_tokens=1024; "
    "output_tokens=1024; scenario=agg; count=4; parallelism=tp4 pp1 attn_dp1 moe_tp4 moe_ep1"
)
APART = (
    "hardware=NVIDIA GB200; engine=TensorRT-LLM; model=deepseek-ai/DeepSeek-R1; quantization=fp8; concurrency=256; "
    "prompt_tokens=8192; output_tokens=1024; scenario=disagg; "
    "parallelism=disagg prefill 2x(tp8 dp1 ep8 bs) decode 3x(tp8 dp1 ep8 bs)"
)
PEAK = "hardware=A100 80GB; engine=HF Transformers; model=Qwen2.5-7B-Instruct; quantization=BF16; prompt_tokens=6144"
QUESTIONS = [
    f"{LLAMA}; output_tokens=128; metric=decode_tok_s_single", f"{LLAMA}; metric=prefill_tok_s",
    f"{LLAMA}; output_tokens=128; concurrency=8; metric=output_tok_s_total", f"{SERVED}; metric=ttft_ms",
    f"{SERVED}; metric=tpot_ms", f"{SERVED}; metric=output_tok_s_total", f"{APART}; metric=ttft_ms",
    f"{APART}; metric=tpot_ms",
    "hardware=H100 SXM; engine=TensorRT-LLM; model=Llama 3.1 8B FP8; metric=output_tok_s_total; prompt_tokens=128; "
    "output_tokens=128; concurrency=max load; tensor_parallel=1",
]  # fmt: skip


def explain_question(text: str) -> Explanation:
    found = explain(parse_question(text))
    assert isinstance(found, Explanation), found
    return found


@pytest.mark.parametrize("text", QUESTIONS)
def test_terms_add_up_to_the_prediction(text: str) -> None:
    found = explain_question(text)
    predicted = predict(parse_question(text))
    assert isinstance(predicted, RowPrediction) and found.total_s is not None
    assert found.predicted == predicted.value
    assert sum(term.seconds or 0.0 for term in found.terms) == pytest.approx(found.total_s, rel=0.01)
    assert sum(term.share for term in found.terms) == pytest.approx(1, abs=0.01)
    assert [(one.low, one.high) for one in found.bands if one.level == 80] == [(predicted.low, predicted.high)]
    # Nothing is left over: every elementary time is one of the terms.
    assert BOUND not in [term.name for term in found.terms]
    # Only between workers can a time hide another: requests that decode longer wait less for a prefill worker.
    assert all(term.seconds and (term.seconds > 0 or "disagg" in text) for term in found.terms)
    assert found.assumed and found.band_campaigns > 0 and found.band_rows > 0


@pytest.mark.parametrize("text", [QUESTIONS[0], QUESTIONS[4], QUESTIONS[6]])
def test_prediction_follows_from_the_total(text: str) -> None:
    found = explain_question(text)
    assert found.total_s is not None
    expected = {"decode_tok_s_single": 128 / found.total_s}.get(found.metric, found.total_s * 1e3)
    assert found.predicted == pytest.approx(expected, rel=1e-6)


def test_memory_is_explained_in_gigabytes() -> None:
    found = explain_question(f"{PEAK}; output_tokens=2048; metric=peak_memory_gb")
    assert found.total_s is None
    assert sum(term.value for term in found.terms) == pytest.approx(found.predicted, rel=1e-3)
    assert found.terms[0].name == "weights" and {term.unit for term in found.terms} == {"GB"}


def test_more_specific_questions_change_the_largest_term() -> None:
    decode, prefill = (explain_question(text) for text in QUESTIONS[:2])
    assert decode.terms[0].name == "read weights" and decode.terms[0].efficiency_name == "slack"
    assert prefill.terms[0].name == "matrix products"


def test_total_is_divided_by_slopes_where_times_overlap() -> None:
    def compute(scaled: Mapping[str, float]) -> float:
        read, work = 3.0 * scaled.get("read", 1.0), 4.0 * scaled.get("work", 1.0)
        return float((read**2 + work**2) ** 0.5)

    found = split_total(compute, {"read": 3.0, "work": 4.0, "none": 0.0})
    assert found.total == pytest.approx(5) and found.parts == pytest.approx({"read": 1.8, "work": 3.2}, rel=1e-6)


def test_refused_row_has_its_reason() -> None:
    found = explain(parse_question("hardware=Quantum 9000; engine=llama.cpp; model=Llama 3.1 8B; metric=prefill_tok_s"))
    assert isinstance(found, PredictionRefusal) and "chip" in found.why


def test_question_keeps_notes_with_semicolons() -> None:
    assert parse_question("metric=ttft_ms; notes=fa=1; n_ubatch=512") == {
        "metric": "ttft_ms",
        "notes": "fa=1; n_ubatch=512",
    }
    with pytest.raises(UsageError, match="colour"):
        parse_question("metric=ttft_ms; colour=red")
