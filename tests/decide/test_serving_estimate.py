"""Estimates under load: monotonicity, lower bounds, and the layouts of published tables."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide.estimate import batching, serving
from bedplate.decide.estimate.batching import (
    Efficiencies,
    Layout,
    Waits,
    classify_weights,
    compute_efficiency,
    count_rank_work,
    get_efficiencies,
)
from bedplate.decide.estimate.calibration import Expectation, load_table
from bedplate.decide.estimate.machine import MachineRates, make_chip_rates
from bedplate.decide.estimate.physics import (
    ModelShape,
    compute_decode_floor_s,
    compute_prefill_floor_s,
    count_linear_ops,
    get_shape,
)
from bedplate.decide.estimate.serving import ServingTimes, estimate_under_load, expect
from bedplate.facts.chips import find_chip
from bedplate.facts.known_models import find_model
from bedplate.published import recipes
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, PublishedCase, RowPrediction, resolve
from bedplate.published.under_load import RowLoad, Workers, find_load, parse_arrangement
from bedplate.values import Parallelism

TRUTH = Path(__file__).parents[2].parent / "shared" / "truth"
ROW = {
    "row_id": "a", "hardware": "NVIDIA H200 SXM 141GB", "count": "8", "engine": "vLLM", "quantization": "fp8",
    "model": "meta-llama/Llama-3.1-70B", "tensor_parallel": "8", "parallelism": "tp8 pp1 attn_dp1 moe_tp8 moe_ep1",
    "concurrency": "32", "prompt_tokens": "1024", "output_tokens": "1024", "metric": "tpot_ms", "scenario": "agg",
}  # fmt: skip
HOPPER = "NVIDIA H200 SXM 141GB"
CHIPS = ("NVIDIA H100 SXM 80GB", "NVIDIA B200 SXM 180GB", "AMD Instinct MI300X", "NVIDIA L40S", "NVIDIA A100 SXM 80GB")
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "nvidia/Llama-3.1-70B-Instruct-FP8", "deepseek-ai/DeepSeek-R1",
    "openai/gpt-oss-120b", "Qwen/Qwen3.5-397B-A17B", "zhipuai/GLM-5",
)  # fmt: skip


def make_machine(chip: str = "NVIDIA H200 SXM 141GB", devices: int = 8) -> MachineRates:
    return make_chip_rates(find_chip(chip, guess=True).chip, devices)


def make_shape(model: str = "nvidia/Llama-3.1-70B-Instruct-FP8") -> ModelShape:
    return get_shape(find_model(model))


def estimate_load(
    concurrency: int = 32,
    prompt: int = 1024,
    output: int = 512,
    layout: Layout | None = None,
    engine: str = "vllm",
    slots: float = 1e6,
    cached: int = 0,
    chip: str = "NVIDIA H200 SXM 141GB",
    model: str = "nvidia/Llama-3.1-70B-Instruct-FP8",
) -> ServingTimes:
    divided = layout or Layout(tensor=8)
    found, _, _ = estimate_under_load(
        make_machine(chip, divided.devices), make_shape(model), engine, divided, concurrency=concurrency,
        prompt_tokens=prompt, output_tokens=output, slots=slots, cached_tokens=cached,
    )  # fmt: skip
    return found


def make_case(**changes: str) -> PublishedCase:
    found = resolve({**ROW, **changes})
    assert isinstance(found, PublishedCase), found
    return found


def predict_value(**changes: str) -> float:
    found = predict({**ROW, **changes})
    assert isinstance(found, RowPrediction), found
    assert 0 < found.low < found.value < found.high
    return found.value


@pytest.mark.parametrize(
    ("written", "layout"),
    [
        ("tp8 pp1 attn_dp1 moe_tp8 moe_ep1", Layout(8, 1, 1)), ("tp8 pp1 attn_dp1 moe_tp1 moe_ep8", Layout(8, 1, 8)),
        ("tp1 pp1 attn_dp8 moe_tp1 moe_ep8", Layout(1, 8, 8)), ("TEP8", Layout(8, 1, 8)), ("DEP8", Layout(1, 8, 8)),
        ("tp64 pp1 attn_dp1 moe_tp8 moe_ep8", Layout(8, 1, 8)), ("tp1 pp1 attn_dp64 moe_tp8 moe_ep8", Layout(1, 8, 8)),
        ("tp4 pp1 attn_dp4 moe_tp1 moe_ep16", Layout(1, 4, 4)), ("tp1 pp1 attn_dp moe_tp4 moe_ep1", Layout(1, 4, 1)),
    ],
)  # fmt: skip
def test_layouts_of_tables_are_parsed(written: str, layout: Layout) -> None:
    assert parse_arrangement(make_case(parallelism=written, model="deepseek-ai/DeepSeek-R1")) == layout


def test_pipeline_and_replicas_are_parsed() -> None:
    found = parse_arrangement(make_case(parallelism="TP2,PP2", scenario="trtllm-bench throughput", count="8"))
    assert found == Layout(2, 1, 1, 2, 2)


def test_missing_attention_groups_follow_from_the_batch_of_a_rank() -> None:
    blank = {"parallelism": "tp8 pp1 attn_dp moe_tp1 moe_ep8", "model": "deepseek-ai/DeepSeek-R1", "concurrency": "80"}
    assert parse_arrangement(make_case(**blank, notes="batch_size=10")) == Layout(1, 8, 8)
    assert parse_arrangement(make_case(**blank, notes="batch_size=80")) == Layout(8, 1, 8)


def test_disaggregated_workers_are_parsed_with_their_batches() -> None:
    text = "disagg prefill 1x(tp1 dp4 ep0 bs1) decode 3x(tp4 dp1 ep0 bs24)"
    found = parse_arrangement(make_case(parallelism=text, scenario="disagg", concurrency=""))
    assert isinstance(found, Workers)
    assert (found.prefill.ranks, found.decode.ranks, found.streams) == (4, 4, 72)
    assert predict_value(parallelism=text, scenario="disagg", concurrency="", count="16") > 0


@pytest.mark.parametrize(
    ("written", "layout"),
    [("DEP8 PP2", Layout(1, 8, 8, 2)), ("tep4 pp2", Layout(4, 1, 4, 2)),
     ("tp1 pp2 attn_dp8 moe_tp1 moe_ep8", Layout(1, 8, 8, 2))],
)  # fmt: skip
def test_pipeline_stages_are_kept_beside_attention_data_parallelism(written: str, layout: Layout) -> None:
    case = make_case(parallelism=written, model="deepseek-ai/DeepSeek-R1", count="")
    assert parse_arrangement(case) == layout
    assert case.layout.pipeline == 2


def test_pipeline_stages_of_workers_hold_a_part_of_the_weights() -> None:
    text = "disagg prefill 1x(tp4 pp2 dp1 ep4 bs1) decode 1x(tp8 dp1 ep8 bs24)"
    found = parse_arrangement(make_case(parallelism=text, scenario="disagg", concurrency=""))
    assert isinstance(found, Workers)
    assert (found.prefill.pipeline, found.prefill.devices, found.decode.pipeline) == (2, 8, 1)


def test_too_many_tensor_ranks_are_those_of_all_workers() -> None:
    written = "tp72 pp1 attn_dp1 moe_tp72 moe_ep1"
    assert isinstance(
        parse_arrangement(make_case(parallelism=written, model="deepseek-ai/DeepSeek-R1", count="72")), Workers
    )


APART = {"scenario": "disagg", "count": "", "tensor_parallel": "", "model": "deepseek-ai/DeepSeek-R1",
         "prompt_tokens": "8192", "output_tokens": "128"}  # fmt: skip
DIVIDED = "disagg prefill x(tp8 dp1 ep8 bs) decode x(tp8 dp1 ep8 bs)"


@pytest.mark.parametrize(
    ("parallelism", "concurrency", "metric", "words"),
    [
        (DIVIDED.replace("tp8", "tp1"), "64", "tpot_ms", "do not fit in 1 × NVIDIA H200"),
        (DIVIDED.replace("tp8", "tp20"), "64", "tpot_ms", "20 ranks are those of all workers"),
        ("tp72 pp1 attn_dp1 moe_tp72 moe_ep1", "64", "ttft_ms", "72 ranks are those of all workers"),
        (DIVIDED, "100000", "tpot_ms", "cannot hold 100000 streams"),
    ],
)
def test_unknown_number_of_workers_is_refused(parallelism: str, concurrency: str, metric: str, words: str) -> None:
    found = predict({**ROW, **APART, "parallelism": parallelism, "concurrency": concurrency, "metric": metric})
    assert isinstance(found, PredictionRefusal)
    assert words in found.why


def test_known_or_single_workers_are_predicted() -> None:
    assert predict_value(**APART, parallelism=DIVIDED, concurrency="4", metric="ttft_ms") > 0
    # The number of prefill workers does not change the time per token.
    assert predict_value(**APART, parallelism=DIVIDED, concurrency="512", metric="tpot_ms") > 0
    counted = DIVIDED.replace("prefill x", "prefill 40x").replace("decode x", "decode 4x")
    assert predict_value(**APART, parallelism=counted, concurrency="512", metric="ttft_ms") > 0


RESULT = "batch_size=; gemm=fp8; moe=fp8; measured=2026-02-05; wip=False"
"""The notes of a published InferenceX result."""
HELD = {**APART, "hardware": "NVIDIA GB200", "engine": "TensorRT-LLM", "prompt_tokens": "1024", "output_tokens": "1024",
        "parallelism": DIVIDED, "metric": "ttft_ms"}  # fmt: skip


def test_inferencex_result_uses_the_workers_of_its_recipe() -> None:
    found = find_load(make_case(**HELD, concurrency="27", notes=RESULT))
    assert isinstance(found, RowLoad)
    question = found.question
    assert (question.prefills, question.decodes, question.slots) == pytest.approx((1, 3, 24))
    assert question.prompts.groups == 8
    # What was measured selects the recipe, not the table that a row is from.
    other = find_load(make_case(**HELD, concurrency="27", notes="another table"))
    assert isinstance(other, RowLoad)
    assert other.question.decodes == pytest.approx(question.decodes)
    unknown = find_load(make_case(**{**HELD, "output_tokens": "1000"}, concurrency="27"))
    assert isinstance(unknown, RowLoad)
    assert unknown.question.decodes == 0


def test_streams_beyond_the_slots_of_a_recipe_wait() -> None:
    crowded = predict_value(**HELD, concurrency="27", notes=RESULT)
    # The published recipe for 27 streams has 24 slots: a stream waits for an eighth of an output.
    answer_s = 0.9 * 1024 * predict_value(**{**HELD, "metric": "tpot_ms"}, concurrency="27", notes=RESULT) / 1e3
    assert crowded / 1e3 > answer_s / 8
    assert crowded > 2 * predict_value(**{**HELD, "output_tokens": "1000"}, concurrency="27")


def test_missing_recipe_is_not_invented() -> None:
    question = make_case(**{**HELD, "prompt_tokens": "3000"}, concurrency="27", notes=RESULT)
    assert recipes.find_setups(question, Layout(8, 1, 8), Layout(8, 1, 8)) == []
    far = make_case(**HELD, concurrency="100000", notes=RESULT)
    assert recipes.find_setups(far, Layout(8, 1, 8), Layout(8, 1, 8)) == []


def test_total_ranks_are_divided_as_in_the_recipe() -> None:
    together = {**HELD, "quantization": "fp4", "parallelism": DIVIDED.replace("tp8", "tp36").replace("ep8", "ep1")}
    other = {**ROW, **together, "concurrency": "256", "output_tokens": "1000"}
    assert isinstance(predict(other), PredictionRefusal)
    assert predict_value(**together, concurrency="256", notes=RESULT) > 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": "TensorRT-LLM", "parallelism": "tp4 pp1 attn_dp1 moe_tp4 moe_ep1"},
         Waits(gathered=20, pass_tokens=16384)),
        ({"engine": "TensorRT-LLM"}, Waits(pass_tokens=16384)), ({"engine": "vLLM"}, Waits()),
        ({"engine": "TensorRT-LLM", "model": "openai/gpt-oss-120b"}, Waits(pass_tokens=20000)),
        ({"engine": "TensorRT-LLM", "model": "deepseek-ai/DeepSeek-R1",
          "parallelism": "tp1 pp1 attn_dp8 moe_tp1 moe_ep8"}, Waits(balanced=60)),
        ({"engine": "TensorRT-LLM", "model": "deepseek-ai/DeepSeek-R1", "hardware": CHIPS[1], "concurrency": "64"},
         Waits(gathered=40)),
        ({"engine": "SGLang", "hardware": CHIPS[1]}, Waits(polled=30, pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang", "hardware": CHIPS[1], "concurrency": "8"}, Waits(polled=10, pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang", "hardware": CHIPS[1], "model": "zhipuai/GLM-5"}, Waits(pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang", "hardware": CHIPS[1], "model": "Qwen/Qwen3.5-397B-A17B", "tensor_parallel": "4",
          "parallelism": "tp4 pp1 attn_dp1 moe_tp1 moe_ep4"}, Waits(polled=30, pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang", "hardware": CHIPS[1], "model": "deepseek-ai/DeepSeek-R1", "tensor_parallel": "4",
          "parallelism": "tp4 pp1 attn_dp1 moe_tp4 moe_ep1"}, Waits(polled=10, pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang", "hardware": CHIPS[1], "model": "deepseek-ai/DeepSeek-R1",
          "parallelism": "tp1 pp1 attn_dp8 moe_tp1 moe_ep8"}, Waits(pass_tokens=32768, ahead=1)),
        ({"engine": "SGLang"}, Waits(ahead=1)),
    ],
)  # fmt: skip
def test_scheduler_settings_come_from_the_recipe(changes: dict[str, str], expected: Waits) -> None:
    result = make_case(**{**changes, "notes": RESULT})
    layout = parse_arrangement(result)
    assert isinstance(layout, Layout)
    assert recipes.get_waits(result, layout, 0.0) == expected
    sglang = changes["engine"] == "SGLang"
    usual = Waits(pass_tokens=16384 if sglang and "hardware" in changes else 8192, ahead=float(sglang))
    assert recipes.get_waits(make_case(**changes), layout, 0.0) == expected
    assert recipes.get_waits(make_case(**changes, prompt_tokens="1000"), layout, 0.0) == usual
    stated = make_case(**changes, notes="max_num_batched_tokens=4096")
    assert recipes.get_waits(stated, layout, 0.0).pass_tokens == 4096


def test_older_scripts_use_one_prompt_per_pass() -> None:
    changes = {"engine": "TensorRT-LLM", "model": "deepseek-ai/DeepSeek-R1", "hardware": CHIPS[1], "concurrency": "64"}
    before = make_case(**changes, notes=RESULT.replace("2026-02-05", "2025-12-01"))
    assert recipes.get_waits(before, Layout(8), 0.0) == Waits(pass_tokens=64 + 1024 + 64)


@pytest.mark.parametrize(("day", "tokens"), [("2026-03-28", 8192), ("2026-04-03", 2048)])
def test_newer_scripts_use_two_prompts_per_pass(day: str, tokens: int) -> None:
    changes = {"engine": "vLLM", "model": "MiniMaxAI/MiniMax-M2.5", "hardware": CHIPS[1]}
    result = make_case(**changes, notes=RESULT.replace("2026-02-05", day))
    assert recipes.get_waits(result, Layout(4), 0.0).pass_tokens == tokens


@pytest.mark.parametrize("notes", [RESULT, "gemm=fp8; source_file=gap-analysis.csv", "batch_size=4; gemm=fp8", ""])
def test_recipes_apply_to_what_was_measured_whatever_the_notes(notes: str) -> None:
    assert recipes.is_recipe_point(make_case(notes=notes))
    assert not recipes.is_recipe_point(make_case(notes=notes, prompt_tokens="1000"))


SGLANG_APART = {**APART, "engine": "SGLang", "prompt_tokens": "1024", "output_tokens": "1024"}
DAY = "wip=False; measured="


@pytest.mark.parametrize(
    ("hardware", "quantization", "parallelism", "concurrency", "notes", "guessing"),
    [
        (CHIPS[0], "fp8", "prefill x(tp16 dp1 ep1 bs) decode x(tp16 dp1 ep1 bs)", "4", DAY + "2026-02-10", 0),
        (CHIPS[0], "fp8", "prefill x(tp16 dp1 ep1 bs) decode x(tp16 dp1 ep1 bs)", "4", DAY + "2026-03-01T01:00:00Z", 2),
        (CHIPS[1], "fp4", "prefill x(tp4 dp1 ep4 bs) decode x(tp8 dp1 ep4 bs)", "16",
         DAY + "2026-02-11; image=lmsysorg/sglang:v0.5.8.post1-cu130-runtime", 0),
        (CHIPS[1], "fp4", "prefill x(tp4 dp1 ep4 bs) decode x(tp8 dp1 ep4 bs)", "16",
         DAY + "2026-02-11; image=lmsysorg/sglang:v0.5.8.post1-cu130", 2),
    ],
)  # fmt: skip
def test_recipes_are_selected_by_day_and_image(
    hardware: str, quantization: str, parallelism: str, concurrency: str, notes: str, guessing: int
) -> None:
    row = {**SGLANG_APART, "hardware": hardware, "quantization": quantization, "parallelism": f"disagg {parallelism}"}
    found = find_load(make_case(**row, concurrency=concurrency, notes=notes))
    assert isinstance(found, RowLoad)
    assert (found.question.guessing, found.question.decodes > 0) == (guessing, True)


QWEN = {"engine": "SGLang", "hardware": CHIPS[1], "model": "Qwen/Qwen3.5-397B-A17B", "count": "4"}
R1 = {"engine": "TensorRT-LLM", "model": "deepseek-ai/DeepSeek-R1"}
DEALT = "tp1 pp1 attn_dp8 moe_tp1 moe_ep8"


@pytest.mark.parametrize(
    ("changes", "notes", "guesses"),
    [
        # The recipe for these ranks uses speculation; the one without has other ranks and another image.
        ({**QWEN, "parallelism": "tp4 pp1 attn_dp1 moe_tp4 moe_ep1"}, DAY + "2026-03-20T22:08:23Z", 3),
        ({**QWEN, "parallelism": "tp4 pp1 attn_dp1 moe_tp1 moe_ep4"},
         DAY + "2026-03-24; image=lmsysorg/sglang:v0.5.9-cu130-amd64", 0),
        # Before the first recipe with speculation, with other lengths, and as stated.
        ({**R1, "parallelism": "tp8 pp1 attn_dp1 moe_tp1 moe_ep8"}, DAY + "2025-11-20", 0),
        ({**R1, "parallelism": "tp8 pp1 attn_dp1 moe_tp1 moe_ep8", "output_tokens": "1000"}, DAY + "2026-01-20", 0),
        ({**R1, "parallelism": "tp8 pp1 attn_dp1 moe_tp1 moe_ep8"}, DAY + "2026-01-20; MTP: off", 0),
        ({**R1, "parallelism": "tp8 pp1 attn_dp1 moe_tp1 moe_ep8"}, DAY + "2025-11-20; mtp=2", 2),
        # On the day of the change both recipes were valid: the new one was measured.
        ({**R1, "parallelism": "tp8 pp1 attn_dp1 moe_tp1 moe_ep8"}, DAY + "2026-01-14T22:26:21Z", 3),
        ({**R1, "parallelism": DEALT, "concurrency": "128"}, DAY + "2026-01-14T22:26:21Z", 1),
        # Both were changed on the same day and have the same image.
        ({**R1, "engine": "SGLang", "hardware": CHIPS[1], "parallelism": "tp8 pp1 attn_dp1 moe_tp8 moe_ep1"},
         DAY + "2026-03-25; image=lmsysorg/sglang:v0.5.9-cu130", 1),
    ],
)  # fmt: skip
def test_drafted_tokens_come_from_the_recipe(changes: dict[str, str], notes: str, guesses: float) -> None:
    result = make_case(**{**changes, "notes": notes})
    layout = parse_arrangement(result)
    assert isinstance(layout, Layout)
    listed = recipes.list_drafted_tokens(result, layout)
    assert sum(weight for weight, _ in listed) == pytest.approx(1.0)
    assert sum(weight * tokens for weight, tokens in listed) == pytest.approx(guesses)
    found = find_load(result)
    assert isinstance(found, RowLoad)
    assert [(weight, load.guessing) for weight, load in found.alternatives] == listed


def test_passes_with_speculation_include_drafted_tokens() -> None:
    result = make_case(**R1, concurrency="128", notes=DAY + "2026-01-25")
    assert recipes.get_waits(result, Layout(8), 0.0).pass_tokens == 8192
    assert recipes.get_waits(result, Layout(8), 3.0).pass_tokens == 4 * 128 + 1024 + 64
    assert recipes.get_waits(result, Layout(1, 8, 8), 1.0).pass_tokens == 2 * 128 / 8 + 1024 + 64


@pytest.mark.parametrize("guessing", [1.0, 2.0, 3.0])
def test_speculation_lengthens_passes_and_shortens_tpot(guessing: float) -> None:
    e = get_efficiencies("sglang", "blackwell-dc", "fp8")
    slower, accepted = batching.compute_speculation(e, guessing)
    assert slower > 1.0
    assert 1.0 < accepted < 1.0 + guessing
    assert batching.compute_speculation(e, 0.0) == (1.0, pytest.approx(1.0))
    work = count_rank_work(make_machine(CHIPS[1]), make_shape(MODELS[2]), Layout(8), 1024, 1024, 8)
    polled = Waits(polled=30.0)
    plain, guessed = (batching.compute_steady(work, e, 64.0, 1e6, polled, count) for count in (0.0, guessing))
    assert guessed[1] < plain[1]
    # With a polling interval of thirty passes, longer passes delay the poll.
    assert guessed[0] > plain[0]


def test_requests_between_two_polls_share_a_pass() -> None:
    work, e = (
        count_rank_work(make_machine(), make_shape(MODELS[2]), Layout(8), 8192, 1024, 8),
        get_efficiencies("sglang", "hopper", "fp8"),
    )
    streams, every = 128.0, 32.0
    at_once, often = (
        batching.compute_steady(work, e, streams, 1e6, Waits(polled=polled))[:2] for polled in (0.0, every)
    )
    # An interval is an eighth of an output: four more prompts, and half of the interval.
    beside = often[0] - at_once[0] - e.polled * every * often[1]
    assert beside == pytest.approx(streams * every / 1024 * batching.compute_prefill_s(work, e) / 2, rel=0.15)


def test_requests_collected_later_wait_less() -> None:
    # Prompts of one token, so that their computation does not matter.
    work, e = (
        count_rank_work(make_machine(), make_shape(), Layout(8), 1, 1024, 8),
        get_efficiencies("tensorrt-llm", "hopper", "fp8"),
    )

    def passes(streams: float) -> float:
        without, waiting = (
            batching.compute_steady(work, e, streams, 1e6, Waits(gathered=count)) for count in (0.0, 40.0)
        )
        return float((waiting[0] - without[0]) / waiting[1] / e.gathered)

    assert passes(1.0) == pytest.approx(40.0, rel=0.05)
    assert passes(64.0) == pytest.approx((40 + 2.5 * 20) / 3.5, rel=0.05)


SGLANG_WORKERS = {**SGLANG_APART, "hardware": CHIPS[0], "prompt_tokens": "8192", "concurrency": "4",
                  "parallelism": "disagg prefill x(tp16 dp1 ep1 bs) decode x(tp16 dp1 ep1 bs)",
                  "notes": DAY + "2026-02-10"}  # fmt: skip


def test_workers_use_the_configured_tokens_per_pass() -> None:
    found = find_load(make_case(**SGLANG_WORKERS))
    assert isinstance(found, RowLoad)
    assert found.question.waits.pass_tokens == pytest.approx(2048)
    assert found.question.slots < 1e6
    e = get_efficiencies("sglang", "hopper", "fp8")
    small, whole = (
        serving.compute_times(found.question._replace(waits=Waits(pass_tokens=tokens)), e).first_s
        for tokens in (2048, 8192)
    )
    # The host launches each pass of a prompt.
    passes = found.question.prompts.prompt / 2048 - 1
    assert small - whole >= 0.9 * passes * batching.compute_first_host_s(found.question.prompts, e)


def test_prompts_of_a_pass_leave_a_prefill_worker_together() -> None:
    found = find_load(make_case(**SGLANG_WORKERS))
    assert isinstance(found, RowLoad)
    assert (found.question.waits.ahead, found.question.waits.unbalanced) == (1, 1)
    e, waits = get_efficiencies("sglang", "hopper", "fp8"), Waits(pass_tokens=32768)
    alone, together = (
        serving.compute_times(found.question._replace(waits=waits._replace(ahead=ahead), streams=8.0), e)
        for ahead in (0.0, 1.0)
    )
    assert together.first_s > 1.05 * alone.first_s
    assert together.token_s == alone.token_s


@pytest.mark.parametrize(("groups", "slower"), [(1, False), (8, True)])
def test_a_prefill_pass_lasts_as_long_as_that_of_its_fullest_group(groups: int, slower: bool) -> None:
    found = find_load(make_case(**HELD, concurrency="27", notes=RESULT))
    assert isinstance(found, RowLoad)
    assert found.question.waits.unbalanced == 0, "TensorRT-LLM balances the groups"
    machine, e = make_machine(CHIPS[1]), get_efficiencies("sglang", "blackwell-dc", "fp8")
    prompts = batching.count_rank_work(
        machine, make_shape("deepseek-ai/DeepSeek-R1"), Layout(8 // groups, groups, 8), 8192, 1024, 8.0
    )
    balanced, unbalanced = (
        serving.compute_times(
            found.question._replace(prompts=prompts, waits=Waits(unbalanced=share), streams=512.0, slots=1e6), e
        ).first_s
        for share in (0.0, 1.0)
    )
    assert (unbalanced > 1.1 * balanced) is slower
    assert slower or unbalanced == balanced


def test_random_imbalance_makes_some_streams_wait() -> None:
    found = find_load(make_case(**HELD, concurrency="27", notes=RESULT))
    assert isinstance(found, RowLoad)
    e = get_efficiencies("tensorrt-llm", "blackwell-dc", "fp8")
    exact, ample, one = (
        serving.compute_times(found.question._replace(streams=24.0, slots=slots, decodes=decodes, dealt=0.0), e)
        for slots, decodes in ((24.0, 3.0), (1e6, 3.0), (24.0, 1.0))
    )
    assert exact.first_s > 1.5 * ample.first_s
    assert one.first_s == pytest.approx(
        serving.compute_times(found.question._replace(streams=24.0, slots=1e6, decodes=1.0, dealt=0.0), e).first_s,
        rel=0.05,
    )


def test_scheduler_wait_adds_passes_to_ttft() -> None:
    gathering = {"engine": "TensorRT-LLM", "parallelism": "tp4 pp1 attn_dp1 moe_tp4 moe_ep1", "count": "4",
                 "notes": RESULT}  # fmt: skip
    token_ms = predict_value(**gathering)
    extra = predict_value(**gathering, metric="ttft_ms") - predict_value(
        **gathering, metric="ttft_ms", output_tokens="1025"
    )
    assert 10 * token_ms < extra < 25 * token_ms


def test_lengths_of_inferencex_results_are_the_mean() -> None:
    found, plain = find_load(make_case(notes=RESULT)), find_load(make_case(prompt_tokens="1000"))
    assert isinstance(found, RowLoad)
    assert isinstance(plain, RowLoad)
    assert (found.question.work.prompt, found.question.work.output) == (922, 922)
    assert (plain.question.work.prompt, plain.question.work.output) == (1000, 1024)


def test_several_short_prompts_share_a_pass() -> None:
    e = get_efficiencies("vllm", "hopper", "fp8")
    short, long = (count_rank_work(make_machine(), make_shape(), Layout(8), prompt, 1, 8) for prompt in (512, 20_000))
    assert batching.compute_prefill_each_s(short, e, 16) < 0.8 * batching.compute_prefill_s(short, e)
    assert batching.compute_prefill_each_s(long, e, 1) == batching.compute_prefill_s(long, e)


def test_initial_burst_finishes_sooner_with_more_tokens_per_pass() -> None:
    work, e = (
        count_rank_work(make_machine(), make_shape(MODELS[2]), Layout(8), 1024, 1024, 8),
        get_efficiencies("sglang", "hopper", "fp8"),
    )
    few, many = (batching.compute_steady(work, e, 64.0, 1e6, Waits(pass_tokens=tokens)) for tokens in (1024.0, 32768.0))
    assert many[0] < few[0]
    # The prompts of a burst then delay fewer tokens, too.
    assert many[1] < few[1]
    # In a pass with prompts only, all of them get their first token at its end.
    ahead = batching.compute_steady(work, e, 64.0, 1e6, Waits(pass_tokens=32768.0, ahead=1.0))
    assert ahead[0] > many[0]


def test_fused_expert_kernels_launch_faster() -> None:
    hopper, blackwell = (
        count_rank_work(make_machine(chip), make_shape(MODELS[2]), Layout(8), 1, 1, 8) for chip in (HOPPER, CHIPS[1])
    )
    assert (hopper.fused_layers, blackwell.fused_layers) == (0, blackwell.expert_layers)
    e = get_efficiencies("vllm", "hopper", "fp8")
    assert batching.compute_first_host_s(blackwell, e) < batching.compute_first_host_s(hopper, e)


def test_messages_between_nodes_take_longer() -> None:
    near, far = (
        count_rank_work(make_machine(devices=count), make_shape(MODELS[2]), Layout(count), 1, 1, 8) for count in (8, 16)
    )
    assert (near.far, far.far) == (0, far.reduces)
    e = get_efficiencies("vllm", "hopper", "fp8")
    assert batching.compute_decode_s(far, e, 1.0) - batching.compute_decode_s(
        far._replace(far=0.0), e, 1.0
    ) == pytest.approx(far.far * e.apart_far_s)


def test_four_bit_weights_without_units_are_dequantized() -> None:
    oss = make_shape("openai/gpt-oss-120b")
    hopper, blackwell = (
        count_rank_work(make_machine(chip), oss, Layout(8), 1024, 1024, 8) for chip in (HOPPER, CHIPS[1])
    )
    assert hopper.experts_unpacked_s == hopper.experts_s
    assert hopper.unpacking_layers == oss.moe_layers
    assert blackwell.experts_unpacked_s == blackwell.unpacking_layers == 0
    assert count_rank_work(make_machine(), make_shape(), Layout(8), 1024, 1024, 8).dense_unpacked_s == 0


def test_the_first_pass_of_layers_with_experts_takes_the_host_longer() -> None:
    e = get_efficiencies("vllm", "hopper", "fp8")
    dense, experts = (
        count_rank_work(make_machine(), make_shape(name), Layout(8), 1, 1, 8) for name in (MODELS[1], MODELS[2])
    )
    assert (
        batching.compute_first_host_s(experts, e) / experts.layers
        > 2 * batching.compute_first_host_s(dense, e) / dense.layers
    )


def test_tensor_ranks_divide_products_but_not_hidden_states() -> None:
    what = make_shape("deepseek-ai/DeepSeek-R1")
    one, eight = (count_rank_work(make_machine(), what, Layout(count), 1024, 1024, 8) for count in (1, 8))
    assert eight.dense_ops_s == pytest.approx(one.dense_ops_s / 8)
    assert eight.activation_s == one.activation_s
    assert count_rank_work(make_machine(), what, Layout(8, 1, 8), 1024, 1024, 8).expert_activation_s == pytest.approx(
        eight.expert_activation_s / 8
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "tgi", "lmdeploy"])
@pytest.mark.parametrize("model", MODELS)
def test_more_streams_raise_tpot_and_throughput(engine: str, model: str) -> None:
    counts = [1, 4, 16, 64, 256]
    layout = Layout(8, 1, 8)
    found = [
        estimate_load(count, engine=engine, model=model, layout=layout, chip="NVIDIA B200 SXM 180GB")
        for count in counts
    ]
    tokens = [answer.token_s for answer in found]
    assert tokens == sorted(tokens)
    sums = [answer.tok_s for answer in found]
    assert sums == sorted(sums)


def test_longer_prompts_and_outputs_cost_more() -> None:
    assert estimate_load(prompt=8192).first_s > 3 * estimate_load(prompt=1024).first_s
    assert estimate_load(prompt=8192).token_s > estimate_load(prompt=1024).token_s
    assert estimate_load(output=4096, concurrency=8).token_s < estimate_load(output=64, concurrency=8).token_s


def test_prompts_in_the_cache_are_not_computed_again() -> None:
    assert estimate_load(prompt=8192, cached=8000).first_s < estimate_load(prompt=8192).first_s / 3
    assert estimate_load(prompt=8192, cached=8000).token_s < estimate_load(prompt=8192).token_s


def test_requests_that_do_not_fit_queue() -> None:
    one = Layout(tensor=1)
    few, many = estimate_load(16, 8192, 1024, one), estimate_load(512, 8192, 1024, one)
    assert many.first_s > 100 * few.first_s
    assert many.batch < 100
    assert many.tok_s < 1.3 * estimate_load(64, 8192, 1024, one).tok_s


def test_slots_limit_the_batch_and_other_requests_wait() -> None:
    bounded = estimate_load(64, slots=8)
    assert bounded.batch <= 8
    assert bounded.first_s > 5 * estimate_load(64).first_s
    assert bounded.token_s < estimate_load(64).token_s


def test_replicas_share_the_streams() -> None:
    assert estimate_load(64, layout=Layout(tensor=4, replicas=2)).token_s == pytest.approx(
        estimate_load(32, layout=Layout(tensor=4)).token_s
    )
    assert estimate_load(64, layout=Layout(tensor=4, replicas=2)).tok_s == pytest.approx(
        2 * estimate_load(32, layout=Layout(tensor=4)).tok_s
    )


def test_latent_cache_is_divided_by_groups_but_not_by_tensor_ranks() -> None:
    deepseek = make_shape("deepseek-ai/DeepSeek-R1")
    divided = count_rank_work(make_machine(), deepseek, Layout(8, 1, 8), 4096, 1024, 8)
    dealt = count_rank_work(make_machine(), deepseek, Layout(1, 8, 8), 4096, 1024, 8)
    assert divided.held_bytes == dealt.held_bytes
    plain = make_shape()
    assert count_rank_work(make_machine(), plain, Layout(8), 4096, 1024, 8).held_bytes * 8 == pytest.approx(
        count_rank_work(make_machine(), plain, Layout(1, 8), 4096, 1024, 8).held_bytes
    )


@settings(deadline=None)
@given(
    chip=st.sampled_from(CHIPS),
    model=st.sampled_from(MODELS),
    engine=st.sampled_from(["vllm", "sglang", "tensorrt-llm", "nobody's"]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    groups=st.sampled_from([1, 2, 8]),
    stages=st.sampled_from([1, 2]),
    concurrency=st.integers(1, 4096),
    prompt=st.integers(1, 100_000),
    output=st.integers(1, 20_000),
    cached=st.integers(0, 100_000),
)
def test_no_estimate_is_below_the_lower_bound(
    chip: str, model: str, engine: str, tensor: int, groups: int, stages: int, concurrency: int, prompt: int,
    output: int, cached: int,
) -> None:  # fmt: skip
    layout = Layout(tensor, groups, tensor * groups, stages)
    one, what = make_machine(chip, layout.devices), make_shape(model)
    found, work, _ = estimate_under_load(
        one, what, engine, layout, concurrency=concurrency, prompt_tokens=prompt, output_tokens=output,
        cached_tokens=cached,
    )  # fmt: skip
    assert all(math.isfinite(number) and number > 0 for number in found)
    bits = batching.choose_kv_bits(what)
    floor = compute_decode_floor_s(what, one, found.batch / stages, prompt + output / 2, layout.ranks, bits)
    assert found.token_s >= floor * 0.999
    prompt_floor = compute_prefill_floor_s(what, one, work.prompt, layout.ranks * stages)
    assert found.first_s >= prompt_floor * 0.999
    assert found.tok_s <= concurrency / found.token_s
    assert found.tok_s / output * count_linear_ops(what, work.prompt, 1) <= max(one.ops_s.values()) * layout.devices


def test_efficiencies_are_shares_with_common_defaults() -> None:
    fitted = load_table("serving")["efficiencies"]
    assert set(fitted) == set(Efficiencies._fields)
    for engine in ("vllm", "sglang", "tensorrt-llm", "tgi"):
        found = get_efficiencies(engine, "hopper", "fp8")
        for name, number in found._asdict().items():
            assert number > 0
            assert fitted[name]["scale"] != "share" or number < 1
    common = get_efficiencies("nobody's", "no family", "fp8")
    entry = {name: one for name, one in fitted["layer_s"].items() if name in ("scale", "base")}
    assert common.layer_s == pytest.approx(compute_efficiency(entry, "", "", ""))


def test_functions_accept_columns() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed: columns are only used for fitting")
    what = make_shape("deepseek-ai/DeepSeek-R1")
    works = [count_rank_work(make_machine(), what, Layout(8, 1, 8), prompt, 512, 8) for prompt in (128, 2048, 8192)]
    e = get_efficiencies("sglang", "hopper", classify_weights(what))
    columns = batching.RankWork(*(numpy.array(column) for column in zip(*works, strict=True)))
    together = batching.compute_steady(
        columns, e, numpy.array([1.0, 64.0, 9000.0]), batching.count_resident(columns, e, 0.0)
    )
    for place, (work, streams) in enumerate(zip(works, (1.0, 64.0, 9000.0), strict=True)):
        alone = batching.compute_steady(work, e, streams, batching.count_resident(work, e, 0.0))
        assert [figure[place] for figure in together] == pytest.approx(list(alone))


def test_plan_gets_times_bands_and_bottleneck() -> None:
    def plan(factor: float = 1.0, **changes: int) -> Expectation:
        load: dict[str, Any] = {"concurrency": 64, "prompt_tokens": 512, "output_tokens": 512, "slots": 256} | changes
        return expect(make_machine(), make_shape(), "vllm", Parallelism(tensor=8), factor=factor, **load)

    found = plan()
    assert found.parts_s[found.limit] == max(found.parts_s.values())
    assert plan(concurrency=256, prompt_tokens=8192, output_tokens=64).limit == "compute"
    assert found.tpot_band.low < 1 < found.tpot_band.high
    assert plan(factor=2.0).tpot_s == pytest.approx(found.tpot_s / 2)
    assert plan(factor=2.0).output_tok_s == pytest.approx(found.output_tok_s * 2)


@pytest.mark.parametrize(
    ("layout", "divided"),
    [
        (Parallelism(tensor=8), Layout(8, 1, 1)), (Parallelism(tensor=8, expert=8, attention_data=8), Layout(1, 8, 8)),
        (Parallelism(tensor=1, data=8, expert=8, attention_data=8), Layout(1, 8, 8)),
        (Parallelism(tensor=2, pipeline=2, data=2), Layout(2, 1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_layout_of_a_plan_is_converted(layout: Parallelism, divided: Layout) -> None:
    assert serving.convert_layout(layout) == divided


def test_rows_of_each_kind_are_predicted() -> None:
    assert 5 < predict_value() < 20
    total = predict_value(metric="output_tok_s_total")
    assert predict_value(metric="output_tok_s_per_gpu") == pytest.approx(total / 8)
    bench = {"parallelism": "TP1", "count": "1", "tensor_parallel": "1", "engine": "TensorRT-LLM",
             "concurrency": "max load (infinite request rate)", "metric": "output_tok_s_total",
             "scenario": "trtllm-bench throughput"}  # fmt: skip
    assert predict_value(**bench) > total / 8
    assert predict_value(**bench, hardware="NVIDIA B200 SXM 180GB") > 1.3 * predict_value(**bench)
    mlperf = {"parallelism": "", "concurrency": "", "prompt_tokens": "", "output_tokens": "", "tensor_parallel": "",
              "metric": "output_tok_s_total", "model": "llama2-70b-99", "engine": "TensorRT"}  # fmt: skip
    offline = predict_value(**mlperf, scenario="MLPerf datacenter closed Offline")
    assert offline > predict_value(**mlperf, scenario="MLPerf datacenter closed Server")
    assert predict_value(**mlperf, scenario="MLPerf datacenter closed Offline", notes="nodes=2") == pytest.approx(
        2 * offline
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": ""}, "in flight"), ({"prompt_tokens": "", "output_tokens": ""}, "lengths"),
        ({"hardware": "AMD EPYC 9654", "engine": "vLLM"}, "accelerators"),
        ({"scenario": "MLPerf datacenter closed MultiStream"}, "multistream"),
    ],
)  # fmt: skip
def test_row_with_missing_values_is_refused(changes: dict[str, str], words: str) -> None:
    found = predict({**ROW, **changes})
    assert isinstance(found, PredictionRefusal)
    assert words in found.why


@pytest.mark.skipif(not TRUTH.is_dir(), reason="the published measurements are not beside this checkout")
@pytest.mark.parametrize(
    ("source", "metric", "most"),
    [
        ("aiconfigurator_silicon_e2e", "tpot_ms", 0.13), ("aiconfigurator_silicon_e2e", "ttft_ms", 0.23),
        ("trtllm_perf_overview", "output_tok_s_total", 0.15), ("mlperf_v5_1_llm", "output_tok_s_total", 0.15),
    ],
)  # fmt: skip
def test_predictions_are_near_published_rows(source: str, metric: str, most: float) -> None:
    with (TRUTH / f"{source}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == metric][::3]
    found = [(predict(row), float(row["value"])) for row in rows]
    errors = [abs(one.value / truth - 1) for one, truth in found if isinstance(one, RowPrediction)]
    assert len(errors) >= 0.9 * len(rows)
    assert statistics.median(errors) <= most


WANTED = {
    "tpot_ms": 0.15, "ttft_ms aggregated": 0.28, "ttft_ms disaggregated": 0.38, "output_tok_s_total": 0.18,
}  # fmt: skip
"""Medians of the absolute error for held-out groups."""


@pytest.mark.parametrize("split", ["chip", "model", "engine", "campaign"])
def test_shipped_fit_is_accurate_for_held_out_groups_and_documented(split: str) -> None:
    figures = {
        figure["metric"]: figure["median"]
        for figure in load_table("serving")["cross_validation"]
        if figure["split"] == split
    }
    for metric, most in WANTED.items():
        assert figures[metric] <= most
    line = " | ".join(f"{100 * figures[metric]:.1f} %" for metric in WANTED)
    page = Path(__file__).parents[2] / "docs" / "estimates.md"
    assert f"| {split} | {line} |" in page.read_text()
