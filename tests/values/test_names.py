"""Every engine goes by its id and by what people call it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.engines import all_engines
from bedplate.values.names import ENGINE_IDS, ORCHESTRATOR_IDS, SPELLINGS, engine_id, nearest_names, orchestrator_id


def test_the_ids_are_those_of_the_engines() -> None:
    own = {name for name, engine in all_engines().items() if type(engine).__module__.startswith("bedplate.")}
    assert own == set(ENGINE_IDS)


def test_every_id_and_spelling_leads_to_one_id() -> None:
    for known in ENGINE_IDS:
        assert {engine_id(name) for name in (known, known.upper(), *SPELLINGS[known])} == {known}
        assert orchestrator_id(known) is None
    for known in ORCHESTRATOR_IDS:
        assert {orchestrator_id(name) for name in (known, known.title(), *SPELLINGS[known])} == {known}
        assert engine_id(known) is None
    said = [name for names in SPELLINGS.values() for name in names]
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
    assert engine_id(text) == engine


def test_the_nearest_names() -> None:
    assert nearest_names("vlm")[0] == "vllm"
    assert nearest_names("sg-lang") == ("sglang",)
    assert nearest_names("zzz") == ()


@given(st.text(max_size=300))
def test_any_text_is_a_known_id_or_none(text: str) -> None:
    assert engine_id(text) in (None, *ENGINE_IDS)
    assert set(nearest_names(text)) <= {*ENGINE_IDS, *ORCHESTRATOR_IDS}
