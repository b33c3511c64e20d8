"""Rows of published tables: how they are read, which are refused, and how accurate the predictions are."""

from __future__ import annotations

import csv
import importlib.util
import io
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide.estimate import calibration, local
from bedplate.decide.estimate.calibration import load_table
from bedplate.decide.estimate.local import Profile
from bedplate.errors import ExternalFailure, UsageError
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, PublishedCase, RowPrediction, find_engine, parse_layout, resolve
from bedplate.published.table import predict_rows, read_table, write_table
from bedplate.values import Parallelism

ROOT = Path(__file__).parents[2]
TRUTH = ROOT.parent / "shared" / "truth"
ROW = {
    "row_id": "a", "hardware": "4090 24GB", "count": "1", "engine": "llama.cpp", "model": "Meta-Llama-3-8B",
    "quantization": "Q4_K_M", "concurrency": "1", "prompt_tokens": "0", "output_tokens": "512",
    "metric": "decode_tok_s_single", "backend": "CUDA",
}  # fmt: skip


def make_case(**changes: str) -> PublishedCase:
    found = resolve({**ROW, **changes})
    assert isinstance(found, PublishedCase), found
    return found


def predict_value(**changes: str) -> float:
    found = predict({**ROW, **changes})
    assert isinstance(found, RowPrediction), found
    assert 0 < found.low <= found.value <= found.high
    return found.value


def get_refusal(**changes: str) -> str:
    found = predict({**ROW, **changes})
    assert isinstance(found, PredictionRefusal), found
    return found.why


@pytest.mark.parametrize(
    ("written", "chip"),
    [
        ("4090 24GB", "NVIDIA GeForce RTX 4090"), ("Virtualized NVIDIA H200-SXM-141GB", "NVIDIA H200 SXM 141GB"),
        ("7900 XTX", "AMD Radeon RX 7900 XTX"), ("Apple M2 Ultra 76-Core GPU 192GB", "Apple M2 Ultra (76-core GPU)"),
        ("[MAXSUN] MS-Intel Arc Pro B60 Dual 48G Turbo", "Intel Arc Pro B60 Dual 48GB"),
        ("NVIDIA GB10 CPU (10x Cortex-X925 + 10x Cortex-A725, LPDDR5X)", "NVIDIA GB10 CPU"),
        ("AMD Ryzen AI Max+ 395 (Radeon 8060S, 128GB LPDDR5X)", "AMD Ryzen AI Max+ 395"),
    ],
)  # fmt: skip
def test_chip_names_are_recognized_in_usual_spellings(written: str, chip: str) -> None:
    assert make_case(hardware=written, backend="").chip.name == chip


@pytest.mark.parametrize(
    ("written", "engine"),
    [
        ("HF Transformers", "pytorch"), ("TensorRT", "tensorrt-llm"), ("LMDeploy TurboMind", "lmdeploy"),
        ("MLX (mlx-lm)", "mlx"), ("Ollama", "llama.cpp"), ("ExLlamaV2", "exllamav2"), ("mistral.rs", "mistral.rs"),
        ("TRT-LLM", "tensorrt-llm"), ("something new", "other"), ("", None),
    ],
)  # fmt: skip
def test_engines_as_people_write_them(written: str, engine: str | None) -> None:
    assert find_engine(written) == engine


@pytest.mark.parametrize(
    ("model", "quantization", "engine", "bits"),
    [
        ("Meta-Llama-3-8B", "Q4_K_M", "llama.cpp", 4.9), ("8B Q4_K_M", "", "llama.cpp", 4.9),
        ("Llama 3.1 8B FP8", "", "vllm", 8.6), ("qwen3-4b", "q4k", "mistral.rs", 4.9),
        ("Llama 7B", "GPTQ g128", "ExLlamaV2", 4.4), ("Llama2 7B", "EXL2 3.0 bpw", "ExLlamaV2", 3.0),
        ("Qwen/Qwen3-4B-Instruct-2507", "q4", "mlx", 4.5), ("Qwen/Qwen3-4B-Instruct-2507", "q4 g32", "mlx", 5.0),
        ("gemma4 E4B Q4_K - Medium", "Q4_K - Medium", "llama.cpp", 4.9), ("Qwen3-32B", "BF16", "SGLang", 16.0),
        ("somebody/unheard-of-13b", "Q8_0", "llama.cpp", 8.5),
    ],
)  # fmt: skip
def test_usual_spellings_of_quantizations_are_read(model: str, quantization: str, engine: str, bits: float) -> None:
    found = make_case(model=model, quantization=quantization, engine=engine)
    assert found.shape.bits == pytest.approx(bits, rel=0.06)


def test_file_size_in_the_notes_is_used() -> None:
    notes = "file_bytes=5200000000; params=8030261248; fa=True"
    assert make_case(notes=notes).model.weight_bytes == 5_200_000_000
    sized = make_case(notes="file_size=4.58 GiB; params=8.03 B")
    assert sized.model.weight_bytes == pytest.approx(4.58 * 2**30)


def test_gguf_of_mxfp4_model_stores_the_rest_in_eight_bits() -> None:
    plain, rest = (
        make_case(model="gpt-oss-20b", quantization="F16"),
        make_case(model="gpt-oss-20b", quantization="MXFP4"),
    )
    assert rest.shape.expert_bytes == plain.shape.expert_bytes
    assert rest.shape.dense_bytes == pytest.approx(plain.shape.dense_bytes * 8.5 / 16, rel=0.01)
    # The published file has 11.27 GiB.
    assert rest.model.weight_bytes == pytest.approx(11.27 * 2**30, rel=0.01)


def test_layouts_are_recognized_in_usual_spellings() -> None:
    assert parse_layout("tp8 pp1 attn_dp4 moe_tp1 moe_ep8") == Parallelism(tensor=8, expert=8, attention_data=4)
    assert parse_layout("TP4,PP2") == Parallelism(tensor=4, pipeline=2)
    assert parse_layout("TEP8") == Parallelism(tensor=8, expert=8)
    assert parse_layout("DEP8") == Parallelism(data=8, expert=8, attention_data=8)
    assert parse_layout("", 4) == Parallelism(tensor=4)
    assert parse_layout("disagg prefill x(tp4 dp1 ep4 bs) decode x(tp8 dp2 ep1 bs)") == Parallelism(tensor=8, data=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "loss"}, "unknown metric 'loss'; known:"), ({"metric": ""}, "the metric is missing"),
        ({"engine": ""}, "the engine is missing"), ({"model": ""}, "the model is missing"),
        ({"hardware": ""}, "no chip is named"),
        ({"hardware": "Quantum 9000"}, "unknown chip"), ({"model": "mystery"}, "its name has no size"),
        ({"hardware": "SpacemiT (K1 first table / K3 second table)"}, "more than one machine"),
        ({"backend": "CPU"}, "measured on a CPU, but the CPU of a machine with"),
        ({"metric": "total_tok_s_incl_prompt", "prompt_tokens": ""}, "lengths are not stated"),
        ({"metric": "peak_memory_gb", "output_tokens": ""}, "lengths are not stated"),
    ],
)  # fmt: skip
def test_row_that_cannot_be_predicted_has_a_reason(changes: dict[str, str], words: str) -> None:
    assert words in get_refusal(**changes)


def test_only_four_columns_are_required() -> None:
    row = {name: ROW[name] for name in ("hardware", "engine", "model", "metric")}
    assert isinstance(predict(row), RowPrediction)


def test_context_depth_slows_down_and_fewer_bits_speed_up() -> None:
    assert predict_value(context_depth="32768") < predict_value(context_depth="4096") < predict_value(context_depth="0")
    assert predict_value(quantization="F16") < predict_value(quantization="Q8_0") < predict_value(quantization="Q4_K_M")


def test_speed_over_a_whole_request_includes_its_prompt() -> None:
    whole = {"prompt_tokens": "30720", "output_tokens": "2048", "engine": "vLLM", "quantization": "BF16"}
    alone = predict_value(**whole, context_depth="30720")
    assert predict_value(**whole) < alone
    assert predict_value(**whole, scenario="decode phase only") == pytest.approx(alone)


def test_total_throughput_counts_prompt_and_output() -> None:
    whole = {"prompt_tokens": "6144", "output_tokens": "2048", "engine": "SGLang", "quantization": "BF16"}
    decode = predict_value(**whole)
    assert predict_value(**whole, metric="total_tok_s_incl_prompt") == pytest.approx(decode * (6144 + 2048) / 2048)


def test_pipeline_does_not_speed_up_decode_but_overlaps_prompts() -> None:
    split = {"parallelism": "layer-split (llama.cpp default)", "count": "4"}
    assert predict_value(**split) < predict_value()
    prompt = {"metric": "prefill_tok_s", "prompt_tokens": "8192", "output_tokens": "0"}
    assert predict_value(**prompt, **split) > 1.5 * predict_value(**prompt)


def test_several_streams_have_a_higher_throughput_than_one() -> None:
    both = {"prompt_tokens": "512", "output_tokens": "32", "concurrency": "8"}
    total = predict_value(**both, metric="output_tok_s_total")
    assert predict_value() < total < 8 * predict_value()
    assert predict_value(**both, metric="output_tok_s_per_gpu") == pytest.approx(total)


def test_peak_memory_agrees_with_the_fit() -> None:
    row = {"metric": "peak_memory_gb", "engine": "HF Transformers", "quantization": "BF16", "hardware": "A100 80GB",
           "prompt_tokens": "1", "output_tokens": "2048"}  # fmt: skip
    assert 16 < predict_value(**row) < 19


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                st.text(max_size=40),
                st.sampled_from(["", "1", "0", "-3", "1e9", "99999999999", "nan", "max load", "8.0", "H100", "tp0"]),
            )
            for name in (*ROW, "notes", "parallelism", "tensor_parallel", "context_depth", "scenario", "engine_version")
        },
    ),
    st.sampled_from(["decode_tok_s_single", "prefill_tok_s", "total_tok_s_incl_prompt", "peak_memory_gb", "tpot_ms",
                     "ttft_ms", "output_tok_s_total", "output_tok_s_per_gpu", "samples_s", "latency_ms"]),
    st.sampled_from(["llama.cpp", "vLLM", "HF Transformers", "TensorRT", "MLX", "?"]),
)  # fmt: skip
def test_any_row_gives_a_number_or_a_reason(changes: dict[str, str], metric: str, engine: str) -> None:
    found = predict({**ROW, "metric": metric, "engine": engine, **changes})
    if isinstance(found, PredictionRefusal):
        assert found.why
    else:
        assert 0 < found.low <= found.value <= found.high < float("inf")


def test_tables_with_any_column_order_and_odd_cells_are_read() -> None:
    text = (
        "metric,Model,hardware,extra,engine\r\ndecode_tok_s_single,Meta-Llama-3-8B Q4_K_M,RTX 4090,x,llama.cpp\r\nx\r\n"
    )
    lines = list(predict_rows(read_table(io.StringIO(text))))
    assert [line[0] for line in lines] == ["1", "2"]
    assert float(lines[0][1]) > 0 and lines[0][4] == ""
    assert lines[1][1:4] == ("", "", "") and lines[1][4]
    out = io.StringIO()
    write_table(lines, out)
    assert next(csv.DictReader(io.StringIO(out.getvalue())))["row_id"] == "1"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\n"])
def test_text_that_is_not_a_table_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        read_table(io.StringIO(text))


def test_every_fitted_value_has_a_source() -> None:
    effects = load_table("local")["effects"]
    for name, effect in effects.items():
        assert effect["sources"] and effect["rows"] > 0, name
        assert all(figure > 0 for figure in effect["values"].values()), name
    for base in ("gpu", "cpu"):
        assert set(effects[base]["values"]) == set(Profile._fields)


@pytest.mark.parametrize("damage", [{}, {"effects": {}}, {"effects": {"gpu": {"values": {"slack": 0.1}}}}])
def test_damaged_data_file_raises_an_error(monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any]) -> None:
    monkeypatch.setattr(calibration, "load_table", lambda name: damage)
    local._load_profile.cache_clear()
    try:
        with pytest.raises(ExternalFailure) as failed:
            predict(ROW)
        assert failed.value.hint is not None and "install" in failed.value.hint
    finally:
        local._load_profile.cache_clear()


def test_engine_without_measurements_uses_efficiencies_of_similar_engines() -> None:
    measured, unmeasured = predict_value(engine="exllamav2"), predict_value(engine="exllamav3")
    assert unmeasured == pytest.approx(measured, rel=0.25)
    assert predict_value(engine="something new", quantization="4-bit") > 0


def test_current_builds_are_faster_than_rows_without_a_version() -> None:
    assert predict_value(engine_version="b7340") > 1.05 * predict_value(engine_version="")


def test_older_vllm_version_is_slower() -> None:
    new, old = (
        predict_value(engine="vLLM", quantization="BF16", hardware="A100", engine_version=v) for v in ("0.11", "0.6.3")
    )
    assert new != old


def test_cpu_cores_reach_less_of_shared_bandwidth_than_the_gpu() -> None:
    assert make_case(hardware="AMD Ryzen AI Max+ 395", backend="CPU").machine.bandwidth_bytes_s == pytest.approx(
        0.6 * 256e9
    )
    assert make_case(hardware="AMD Ryzen AI Max+ 395", backend="Vulkan").machine.bandwidth_bytes_s == pytest.approx(
        256e9
    )


def load_score_program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "score"))
    spec = importlib.util.spec_from_file_location("score_speed", ROOT / "benchmarks" / "score" / "speed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "score_speed", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not TRUTH.is_dir(), reason="the published measurements are not beside this checkout")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_predictions_of_published_rows_are_accurate(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    rows, refused = load_score_program(monkeypatch).score(TRUTH, every)
    scored: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        scored.setdefault((row.source, row.metric), []).append(row)
    for (source, metric), found in scored.items():
        if metric == "decode":
            assert statistics.median(abs(one.error) for one in found) <= 0.10, source
        if metric == "prefill":
            assert statistics.median(abs(one.error) for one in found) <= 0.20, source
        if metric in ("decode", "prefill"):
            assert sum(one.is_inside for one in found) / len(found) >= 0.6, source
    memory = [abs(row.error) for row in rows if row.metric == "memory"]
    assert len(memory) > 100 / every and statistics.median(memory) <= 0.05
    for group, reasons in refused.items():
        assert reasons.total() <= 0.1 * (reasons.total() + len(scored.get(group, ()))), (group, reasons)


@pytest.mark.skipif(not TRUTH.is_dir(), reason="the published measurements are not beside this checkout")
def test_no_prediction_of_a_published_row_is_below_the_lower_bound() -> None:
    """A published row below the lower bound would mean that a data sheet value or a size is wrong."""
    from bedplate.decide.estimate.physics import compute_decode_floor_s
    from bedplate.published.one_stream import _estimate_context  # the context of the row's output

    beaten = []
    for path in sorted(TRUTH.glob("llamacpp_*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                found = resolve(row) if row["metric"] == "decode_tok_s_single" else PredictionRefusal("")
                if isinstance(found, PublishedCase):
                    floor = compute_decode_floor_s(found.shape, found.machine, 1, _estimate_context(found), 1, 16.0)
                    if 1 / float(row["value"]) < floor * 0.99:
                        beaten.append(row["row_id"])
    assert not beaten


class TestImpossibleRows:
    """Impossible measurements and unreadable cells are refused."""

    LOCAL: ClassVar[dict[str, str]] = {
        "hardware": "RTX 4090", "count": "1", "engine": "llama.cpp", "model": "Llama 3.1 8B", "quantization": "Q4_K_M",
        "concurrency": "1", "prompt_tokens": "512", "output_tokens": "128", "metric": "decode_tok_s_single",
    }  # fmt: skip

    def test_unchanged_row_is_predicted(self) -> None:
        assert isinstance(predict(self.LOCAL), RowPrediction)
        assert predict({**self.LOCAL, "prompt_tokens": "1,024"}) == predict({**self.LOCAL, "prompt_tokens": "1024"})

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"model": "Llama 3.1 70B", "quantization": "F16"}, "the weights (131 GiB) do not fit in"),
            ({"model": "Llama 3.1 70B", "quantization": "4-bit", "engine": "MLX", "hardware": "M1 8GB"}, "with 8 GiB"),
            ({"engine": "TensorRT-LLM", "hardware": "MI300X", "quantization": "fp8"}, "TensorRT-LLM does not support"),
            ({"engine": "exllamav3", "hardware": "M4 Max", "quantization": "4.0bpw"}, "ExLlamaV3 does not support"),
            ({"model": "BAAI/bge-m3", "quantization": "f16", "metric": "tpot_ms"}, "does not generate text"),
            ({"count": "-4"}, "count: '-4' is not a number"),
            ({"count": "many"}, "count: 'many' is not a number"),
            ({"output_tokens": "1e400"}, "output_tokens: '1e400' is not a number"),
            ({"concurrency": "lots"}, "concurrency: 'lots' is neither"),
            ({"parallelism": "banana"}, "parallelism: 'banana' is not a known layout"),
            ({"tensor_parallel": "8"}, "tensor_parallel is 8, but count is 1"),
            ({"prompt_tokens": "10000000"}, "the context of meta-llama/Meta-Llama-3.1-8B is 131,072"),
        ],
    )  # fmt: skip
    def test_impossible_row_is_refused_with_a_reason(self, changes: dict[str, str], why: str) -> None:
        found = predict({**self.LOCAL, **changes})
        assert isinstance(found, PredictionRefusal) and why in found.why, found

    @pytest.mark.parametrize(
        ("name", "engine"),
        [
            ("ExLlama v3", "exllamav3"), ("llama cpp", "llama.cpp"), ("llama-server", "llama.cpp"),
            ("ORT", "onnxruntime"),
            ("LMStudio 0.4", "llama.cpp"), ("mistral-rs", "mistral.rs"), ("TurboRT", "other"),
        ],
    )  # fmt: skip
    def test_engines_as_people_write_them(self, name: str, engine: str) -> None:
        assert find_engine(name) == engine


class TestLowerBounds:
    """No prediction is better than the data sheet's rates allow."""

    SERVED: ClassVar[dict[str, str]] = {
        "hardware": "RTX 3090", "count": "8", "engine": "vLLM", "model": "Llama 3.1 8B", "quantization": "bf16",
        "tensor_parallel": "1", "concurrency": "1", "prompt_tokens": "128", "output_tokens": "128",
    }  # fmt: skip

    def value(self, **changes: str) -> float:
        found = predict({**self.SERVED, **changes})
        assert isinstance(found, RowPrediction), found
        return found.value

    def test_single_request_uses_one_replica(self) -> None:
        alone = self.value(count="1", metric="output_tok_s_total")
        assert self.value(metric="output_tok_s_total") == pytest.approx(alone)
        assert alone < 936e9 / 15e9
        assert self.value(concurrency="8", metric="output_tok_s_total") == pytest.approx(8 * alone, rel=0.01)

    def test_pipeline_stages_of_a_moe_model_read_all_used_experts(self) -> None:
        took = self.value(model="Mixtral-8x7B", parallelism="tp1 pp8", prompt_tokens="1024", metric="tpot_ms")
        assert took > 12.5e9 * 2 / 936e9 * 1000

    @pytest.mark.parametrize("engine", ["HF Transformers", "vLLM"])
    def test_16_bit_weights_do_not_use_8_bit_units(self, engine: str) -> None:
        took = self.value(
            hardware="H20 96GB", count="1", engine=engine, model="Qwen2.5-32B", prompt_tokens="8192", metric="ttft_ms"
        )
        assert took > 2 * 31e9 * 8192 / 148e12 * 1000

    def test_cache_of_each_sequence_is_read(self) -> None:
        shallow, deep = (self.value(count="1", context_depth=depth, metric="tpot_ms") for depth in ("0", "16384"))
        assert deep - shallow > 16384 * 131072 / 936e9 * 1000


def test_prompt_speeds_on_cpus_agree_with_published_ones() -> None:
    with (ROOT / "benchmarks" / "score" / "more" / "cpus.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "prefill_tok_s"]
    assert len({row["hardware"] for row in rows}) >= 9
    off = {(row["row_id"], row["hardware"]): predict_value(**row) / float(row["value"]) for row in rows}
    assert {name: ratio for name, ratio in off.items() if not 1 / 2.3 < ratio < 2.3} == {}
    assert 0.8 < statistics.median(off.values()) < 1.25
