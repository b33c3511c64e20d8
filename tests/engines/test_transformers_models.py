"""Engines that take their architectures from Transformers refuse those that only the model's repository has."""

from __future__ import annotations

import pytest
from tests.engines.plans import machine, model

from bedplate.decide import decide
from bedplate.engines import get_engine
from bedplate.engines.transformers_models import ARCHITECTURES_5_19, GENERATORS_5_22
from bedplate.facts.known_models import list_known_names, look_up_model
from bedplate.facts.unpack import ARCHITECTURES as DEQUANTIZED
from bedplate.values import Workload, replace_fields

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
READERS = ("pytorch", "vllm", "sglang")


@pytest.mark.parametrize("engine", READERS)
def test_an_architecture_that_no_release_has_is_refused(engine: str) -> None:
    unheard = replace_fields(model(LLAMA), architecture="lluma9")
    refused = get_engine(engine).refuse(machine("H100 SXM"), unheard, Workload())
    assert refused is not None and refused.kind == "impossible" and "lluma9" in refused.why
    assert "the model's repository" in refused.why
    assert get_engine(engine).refuse(machine("H100 SXM"), model(LLAMA), Workload()) is None


@pytest.mark.parametrize("engine", READERS)
def test_other_versions_may_have_it(engine: str) -> None:
    unheard = replace_fields(model(LLAMA), architecture="lluma9")
    newer = get_engine(engine).at_version("99.0.0")
    assert newer.refuse(machine("H100 SXM"), unheard, Workload()) is None


@pytest.mark.parametrize("architecture", ["unknown", ""])
def test_a_model_that_is_described_by_facts_is_not_refused(architecture: str) -> None:
    described = replace_fields(model(LLAMA), architecture=architecture)
    assert [one for one in READERS if get_engine(one).refuse(machine("H100 SXM"), described, Workload())] == []


@pytest.mark.parametrize(
    ("engine", "name", "refused"),
    [
        ("vllm", "moonshotai/Kimi-K2-Instruct", False),  # a configuration of its own
        ("pytorch", "moonshotai/Kimi-K2-Instruct", True),
        ("vllm", "internlm/internlm2_5-7b", True),
        ("sglang", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", True),
        ("pytorch", "Qwen/Qwen3-8B", False),
    ],
)
def test_known_models(engine: str, name: str, refused: bool) -> None:
    found = get_engine(engine).refuse(machine("H100 SXM"), model(name), Workload())
    assert (found is not None and "repository" in found.why) == refused


def test_no_answer_has_an_engine_that_cannot_load_the_model() -> None:
    """Kimi K2 on a CPU, where PyTorch would be the only engine that accepts everything."""
    for name in ("moonshotai/Kimi-K2-Instruct", "XiaomiMiMo/MiMo-7B-Base", "internlm/internlm2_5-7b"):
        found = decide(machine("cpu"), model(name), Workload())
        assert found.engine not in READERS or model(name).architecture in GENERATORS_5_22
        (why,) = [one.why for one in found.refused if one.engine == "pytorch"]
        assert "the model's repository" in why


def test_dequantized_files_have_architectures_of_transformers() -> None:
    assert set(DEQUANTIZED.values()) <= GENERATORS_5_22 & ARCHITECTURES_5_19


def test_nearly_all_known_models_are_in_the_lists() -> None:
    known = [found for name in list_known_names() if (found := look_up_model(name)) is not None]
    missing = {one.architecture for one in known} - GENERATORS_5_22 - ARCHITECTURES_5_19
    assert missing == {
        "deepseek_ref", "internlm", "internlm2", "kimi_k2", "kimi_k3", "mimo", "minimax_m3", "minimax_text_01",
        "nemotron-nas",
    }  # fmt: skip
