"""Short names resolve to the models of the catalogue, offline."""

from __future__ import annotations

import pytest
from tests.commands import invoke

from bedplate.errors import UsageError
from bedplate.facts.known_models import look_up_model
from bedplate.facts.published_weights import load_catalogue
from bedplate.facts.short_names import list_family, resolve_short_name
from bedplate.run.models import find_known_model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("LLAMA3.1:8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama3.1:70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("gemma3:4b", "google/gemma-3-4b-it"),
        ("gemma4:26b", "google/gemma-4-26B-A4B-it"),
        ("deepseek-r1:8b", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
        ("llama3.1:8b-instruct-q8_0", "meta-llama/Llama-3.1-8B-Instruct:Q8_0"),
    ],
)
def test_a_short_name_means_one_model(text: str, name: str) -> None:
    assert resolve_short_name(text) == name
    model = find_known_model(text)
    assert model.name == name and text in str(model.origin)


@pytest.mark.parametrize("text", ["llama3.1", "llama3.1:9b", "owner/name:Q4_K_M", "model.gguf", "8b", "a:b", ":", ""])
def test_other_names_are_not_short_names(text: str) -> None:
    assert resolve_short_name(text) is None


def test_every_short_name_of_the_catalogue_resolves_to_its_model_with_known_facts() -> None:
    shorts = {model.short: name for name, model in load_catalogue().models.items() if model.short}
    assert len(shorts) > 60
    assert {short: resolve_short_name(short) for short in shorts} == shorts
    assert [name for name in shorts.values() if look_up_model(name) is None] == []


@pytest.mark.parametrize("text", ["llama3.1", "llama3.1:9b"])
def test_a_wrong_size_lists_the_right_ones(text: str) -> None:
    assert list_family(text)[0] == "llama3.1:8b"
    with pytest.raises(UsageError) as caught:
        find_known_model(text)
    assert "llama3.1:8b" in (caught.value.hint or "") and "on the hub" not in (caught.value.hint or "")


def test_many_sizes_are_one_list() -> None:
    with pytest.raises(UsageError) as caught:
        find_known_model("qwen3:77b")
    hint = caught.value.hint or ""
    assert hint.startswith("did you mean qwen3:4b, qwen3:8b, ") and hint.count(" or ") == 1


def test_a_plan_says_which_model_it_is() -> None:
    shown = " ".join(invoke("plan", "qwen3:0.6b", "--hardware", "RTX 4090").out.split())
    assert "known facts (qwen3:0.6b)" in shown and "Qwen/Qwen3-0.6B" in shown
