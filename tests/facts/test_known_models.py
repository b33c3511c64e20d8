"""Well-known models are found by their common names."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts.hf_config import read_anatomy, sum_weights
from bedplate.facts.hf_fields import Config
from bedplate.facts.known_models import (
    _merge_equal_weights,
    find_model,
    list_known_names,
    load_config_fields,
    look_up_model,
    make_model_from_facts,
    parse_model_name,
)
from bedplate.facts.quantization import FP8, MXFP4, Storage, StorageScheme
from bedplate.facts.released import find_release_year
from bedplate.values import replace_fields

SHARED = Path(__file__).parents[2].parent / "shared"
CONFIGS, TRUTH = SHARED / "model_configs", SHARED / "truth"


@pytest.mark.parametrize(
    ("typed", "base", "label"),
    [
        ("Llama 3.1 8B FP8", "meta-llama/Meta-Llama-3.1-8B", "FP8"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B", "BF16"),
        ("LLaMA v3.1 8B", "meta-llama/Meta-Llama-3.1-8B", "BF16"),
        ("llama3_1-8b", "meta-llama/Meta-Llama-3.1-8B", "BF16"),
        ("llama3.1:8b", "meta-llama/Meta-Llama-3.1-8B", "BF16"),
        ("llama3 8B", "meta-llama/Meta-Llama-3-8B", "BF16"),
        ("Llama 3.3 70B FP4", "meta-llama/Meta-Llama-3.1-70B", "NVFP4"),
        ("llama-2-7b.Q4_K_M.gguf", "meta-llama/Llama-2-7b", "Q4_K_M"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B", "GPTQ-Int4"),
        ("Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B", "AWQ-Int4"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B", "4-bit"),
        ("turboderp/Llama-3.1-8B-Instruct-exl3-4.0bpw", "meta-llama/Meta-Llama-3.1-8B", "4.0 bpw"),
        ("DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "FP8"),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-ai/DeepSeek-R1", "NVFP4"),
        ("gpt-oss-120b", "openai/gpt-oss-120b", "MXFP4"),
        ("gpt-oss-20b-F16", "openai/gpt-oss-20b", "MXFP4"),
        ("gemma4 E4B Q4_K - Medium", "google/gemma-4-E4B", "Q4_K_M"),
        ("Hermes-3-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "BF16"),
        ("someone/My-Tune-of-Qwen3-14B-v7", "Qwen/Qwen3-14B", "BF16"),
        ("nvidia/GLM-5-NVFP4", "zai-org/GLM-5", "NVFP4"),
        ("Mistral 7B", "mistralai/Mistral-7B-Instruct-v0.3", "BF16"),
        ("unsloth/Qwen3-30B-A3B-bf16", "Qwen/Qwen3-30B-A3B", "BF16"),
    ],
)
def test_spellings_find_the_model(typed: str, base: str, label: str) -> None:
    model, plain = find_model(typed), find_model(base)
    assert model.parameters == plain.parameters
    assert model.num_layers == plain.num_layers
    assert model.quantization == label
    assert model.origin == "known facts"
    assert model.sources


@pytest.mark.parametrize(
    "typed",
    ["", " ", "gpt-7", "no such thing", "???", "/", "llama", "deepseek-v3-tiny-16b", "deepseek-r1:8b", "x" * 5000],
)
def test_unknown_names_are_rejected(typed: str) -> None:
    assert look_up_model(typed) is None
    with pytest.raises(UsageError):
        find_model(typed)


def test_an_unknown_name_lists_similar_names() -> None:
    with pytest.raises(UsageError) as caught:
        find_model("Qwen3-31B")
    assert "Qwen3-32B" in str(caught.value.hint)


def test_a_quantization_determines_the_size() -> None:
    sixteen = find_model("Qwen3-32B").weight_bytes
    assert find_model("Qwen3-32B Q8_0").weight_bytes == pytest.approx(sixteen * 8.5 / 16, rel=1e-6)
    assert find_model("Qwen3-32B-AWQ").weight_bytes == pytest.approx(19.3e9, rel=0.02)  # hub: Qwen/Qwen3-32B-AWQ
    assert find_model("Qwen/Qwen3-32B-FP8").weight_bytes == pytest.approx(34.3e9, rel=0.01)


# llama-bench prints how many weights a GGUF holds: model_n_params in github:lhl/strix-halo-testing. Those below are the
# hub's counts of the safetensors files; of Qwen3-Next those of Qwen3-Coder-Next, which leaves the MTP layer out.
@pytest.mark.parametrize(
    ("typed", "parameters"),
    [
        ("Hunyuan-A13B-Instruct", 80_393_183_232),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-235B-A22B-Instruct-2507", 235_093_634_560),
        ("gemma-3-27b-it", 27_009_346_304),
        ("Mistral-Small-3.1-24B-Instruct-2503", 23_572_403_200),
        ("gpt-oss-120b", 116_829_156_672),
        ("gpt-oss-20b", 20_914_757_184),
        ("llama-2-7b", 6_738_415_616),
        ("Llama-3.2-1B", 1_235_814_400),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Qwen2.5-72B-Instruct", 72_706_203_648),
        ("Qwen3-Next-80B-A3B-Instruct", 79_674_391_296),
        ("gemma-2-9b-it", 9_241_705_984),
        ("phi-4", 14_659_507_200),
        ("Phi-4-mini-instruct", 3_836_021_760),
        ("DeepSeek-V2-Lite", 15_706_484_224),
        ("DeepSeek-V2", 235_741_434_880),
        ("MiniMax-Text-01", 456_089_655_296),
        ("bge-base-en-v1.5", 109_482_240),
    ],
)
def test_parameters_are_exact(typed: str, parameters: int) -> None:
    assert find_model(typed).parameters == parameters


@pytest.mark.parametrize(
    ("typed", "billions", "source"),
    [
        ("gemma-4-E4B-it", 7.52, "llama-bench"),
        ("Nemotron-3-Nano-4B", 3.97, "llama-bench, github:ggml-org/llama.cpp benches/nemotron"),
        ("GLM-4.7-Flash", 29.94, "llama-bench, github:ggml-org/llama.cpp benches/dgx-spark"),
        ("LFM2.5-230M", 0.230, "model card"),
        ("LFM2-8B-A1B", 8.34, "model card: 8.3B"),
        ("Kimi-Linear-48B-A3B-Instruct", 49.1, "hub: 49B"),
        ("AI21-Jamba-1.5-Mini", 51.6, "model card: 52B"),
        ("Falcon-H1-7B-Instruct", 7.59, "hub: 7.59B"),
        ("NVIDIA-Nemotron-Nano-9B-v2", 8.89, "hub: 8.89B"),
        ("GLM-4.5-Air", 106.85, "hub: 106,852,251,264 of INTELLECT-3, which is made from it"),
        ("GLM-4.5", 355, "arXiv:2508.06471"),
        ("gemma-3-1b", 1.0, "hub: 1,000 M"),
        ("TinyLlama-1.1B", 1.10, "hub: 1.1B"),
        ("all-MiniLM-L6-v2", 0.0227, "hub: 22.7M"),
        ("bge-m3", 0.568, "hub: 568M"),
    ],
)
def test_parameters_of_further_models_match(typed: str, billions: float, source: str) -> None:
    assert find_model(typed).parameters / 1e9 == pytest.approx(billions, rel=0.01), source


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="shared/model_configs is not beside the repository")
def test_every_configuration_is_known_and_gives_the_same_facts() -> None:
    from bedplate.facts.model_folder import read_config_file

    wrong = []
    for path in sorted(CONFIGS.glob("*_config.json")):
        if "hf_quant" in path.name:
            continue
        read = read_config_file(path)
        known = look_up_model(read.name)
        if known is not None and not read.vision_parameters:
            # The built-in facts of Llama 4 include the vision encoder that these configurations leave out.
            known = replace_fields(known, weight_bytes=known.weight_bytes - known.vision_weight_bytes)
        figures = (
            "parameters",
            "active_parameters",
            "weight_bytes",
            "kv_bytes_per_token",
            "kv_bytes_window",
            "state_bytes",
            "num_layers",
            "max_context",
        )
        wrong += [
            f"{read.name}: {figure} is {getattr(known, figure, None)}, computed {getattr(read, figure)}"
            for figure in figures
            if known is None or getattr(known, figure) != getattr(read, figure)
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not TRUTH.is_dir(), reason="shared/truth is not beside the repository")
def test_models_of_published_measurements_are_known() -> None:
    rows: Counter[str] = Counter()
    for path in TRUTH.glob("*.csv"):
        with path.open(newline="") as file:
            rows.update(row["model"] for row in csv.DictReader(file) if row.get("model"))
    unknown = {name: count for name, count in rows.items() if look_up_model(name) is None}
    print(f"{sum(rows.values())} rows, {len(rows)} spellings, unknown: {unknown}")
    assert sum(unknown.values()) <= 0.02 * sum(rows.values()), unknown


def test_every_known_model_is_found_by_its_own_name() -> None:
    for name in list_known_names():
        model = find_model(name)
        assert model.name == name
        assert model.parameters > 0 and model.weight_bytes > 0 and model.max_context


@pytest.mark.measures
def test_the_first_lookup_is_fast() -> None:
    """In a separate process, without the time to import the package."""
    code = (
        "import time; from bedplate.facts import known_models as k; best = 9.0\n"
        "for _ in range(5):\n"
        "    k._load_data.cache_clear(); k._build_keys.cache_clear(); began = time.process_time()\n"
        "    k.find_model('DeepSeek-R1'); best = min(best, time.process_time() - began)\n"
        "print(best)"
    )
    took = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(took.stdout) < 0.1  # about 10 ms on a core of today


@pytest.mark.measures
@given(text=st.text(max_size=60))
def test_no_text_makes_the_lookup_raise(text: str) -> None:
    parse_model_name(text)
    began = time.process_time()
    look_up_model(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("typed", "task"),
    [
        ("Qwen3-Embedding-0.6B", "embed"),
        ("bge-reranker-v2-m3", "classify"),
        ("bge-m3", "embed"),
        ("Qwen3-0.6B", "generate"),
    ],
)
def test_the_task_follows_from_the_name(typed: str, task: str) -> None:
    assert find_model(typed).task == task


class TestInline:
    def test_facts_describe_an_embedding_model(self) -> None:
        model = make_model_from_facts({"task": "embed", "params_b": 0.11, "format": "onnx"})
        assert (model.task, model.format, model.parameters) == ("embed", "onnx", 110_000_000)
        assert (model.kv_bytes_per_token, model.weight_bytes, model.basis) == (0, 440_000_000, "estimate")

    def test_a_shape_gives_the_cache(self) -> None:
        model = make_model_from_facts({"params_b": 8, "layers": 32, "kv_heads": 8, "head_dim": 128})
        assert model.kv_bytes_per_token == 131_072

    def test_without_a_shape_the_cache_is_typical_of_the_size(self) -> None:
        for billions, kib in ((1, 32), (8, 128), (70, 320), (405, 504)):
            assert make_model_from_facts({"params_b": billions}).kv_bytes_per_token / 1024 == pytest.approx(
                kib, rel=0.7
            )

    @pytest.mark.parametrize(
        "fields",
        [
            None,
            [],
            {},
            {"params_b": -1},
            {"params_b": "8"},
            {"params_b": 8, "task": "fly"},
            {"params_b": 8, "format": []},
            {"params_b": 8, "colour": 1},
        ],
    )
    def test_invalid_facts_are_rejected(self, fields: Any) -> None:
        with pytest.raises(UsageError):
            make_model_from_facts(fields)


@pytest.mark.parametrize("scheme", [FP8, MXFP4])
def test_merging_equal_weights_changes_no_sum(scheme: StorageScheme) -> None:
    """The layers of a model repeat, so that merged weights take a fiftieth of the time."""
    stored = Storage(None, 2, "BF16", lambda weight: scheme if weight.matrix else None)
    for name in list_known_names()[::5]:
        each = read_anatomy(Config(load_config_fields(name))).weights
        merged = _merge_equal_weights(name)
        assert len(merged) < len(each) and sum_weights(merged, stored) == sum_weights(each, stored), name


@pytest.mark.parametrize(
    ("name", "parameters", "year"),
    [("openai/whisper-large-v3", 1.55e9, 2023), ("whisper-large-v3-turbo", 0.809e9, 2024)],
)
def test_whisper_has_the_parameters_of_its_model_card(name: str, parameters: float, year: int) -> None:
    model = find_model(name)
    assert model.task == "transcribe" and find_release_year(model.name) == year
    assert sum(part.parameters for part in model.parts) == pytest.approx(parameters, rel=0.005)
