"""Every engine is found by its id and its other names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.engines import load_engines
from bedplate.engines.names import ORCHESTRATORS, find_engine_id, find_nearest_names, find_orchestrator_id


def test_every_id_and_spelling_maps_to_one_id() -> None:
    for known, engine in load_engines().items():
        assert {find_engine_id(name) for name in (known, known.upper(), engine.name, *engine.spellings)} == {known}
        assert find_orchestrator_id(known) is None
    for known, spellings in ORCHESTRATORS.items():
        assert {find_orchestrator_id(name) for name in (known, known.title(), *spellings)} == {known}
        assert find_engine_id(known) is None
    said = [name for one in load_engines().values() for name in one.spellings]
    said += [name for names in ORCHESTRATORS.values() for name in names]
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("TensorRT-LLM", "tensorrt-llm"),
        ("TensorRT LLM 1.2.0rc3", "tensorrt-llm"),
        ("llamacpp", "llama.cpp"),
        ("llama-server", "llama.cpp"),
        ("LM Studio", "llama.cpp"),
        ("Ollama 0.32.15", "ollama"),
        ("LMDeploy TurboMind", "lmdeploy"),
        ("HF Transformers", "pytorch"),
        ("Hugging Face TGI", "tgi"),
        ("text-generation-inference", "tgi"),
        ("vLLM v0.10.1", "vllm"),
        ("vllm==0.9.2", "vllm"),
        ("ExLlamaV2 0.2.9", "exllamav2"),
        ("MLX-LM", "mlx"),
        ("ONNX Runtime", "onnxruntime"),
        ("mistralrs", "mistral.rs"),
        ("mistral-rs", "mistral.rs"),
        ("llama cpp", "llama.cpp"),
        ("LMStudio", "llama.cpp"),
        ("llama.cpp b4567", "llama.cpp"),
        ("llama.cpp (CUDA)", "llama.cpp"),
        ("ORT", "onnxruntime"),
        ("ONNX-RT", "onnxruntime"),
        ("ExLlama v3", "exllamav3"),
        ("ExLlama v3.0", "exllamav3"),
        ("exllama 2.4", "exllamav2"),
        ("ExLlamaV3 (turboderp)", "exllamav3"),
        ("ExLlama", None),
        ("deepspeed", None),
        ("", None),
        ("0.9", None),
    ],
)
def test_common_names_map_to_ids(text: str, engine: str | None) -> None:
    assert find_engine_id(text) == engine


def test_finds_the_nearest_names() -> None:
    assert find_nearest_names("vlm")[0] == "vllm"
    assert find_nearest_names("sg-lang") == ("sglang",)
    assert find_nearest_names("zzz") == ()


@given(st.text(max_size=300))
def test_any_text_maps_to_a_known_id_or_none(text: str) -> None:
    assert find_engine_id(text) in (None, *load_engines())
    assert set(find_nearest_names(text)) <= {*load_engines(), *ORCHESTRATORS}
