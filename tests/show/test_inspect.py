"""The page of `bedplate inspect`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.facts.test_encoder_decoder import WHISPER, read

from bedplate.facts.hardware import probe
from bedplate.facts.known_models import find_model, list_known_names
from bedplate.show.inspect import render_model
from bedplate.values import Figure, Hardware, Model, replace_fields


def render_page(name: str, hardware: Hardware | None = None) -> str:
    return render(find_model(name), hardware)


def render(model: Model, hardware: Hardware | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=130, highlight=False).print(render_model(model, hardware))
    return out.getvalue()


@pytest.fixture(scope="module")
def machine() -> Hardware:
    """This machine, with a memory bandwidth of 51 GB/s."""
    real = probe()
    speed = Figure(value=51e9, low=50e9, high=52e9, basis="measured")
    return replace_fields(real, memory=replace_fields(real.memory, bandwidth_bytes_s=speed))


def test_the_speed_limit_is_shown_if_the_bandwidth_is_known(machine: Hardware) -> None:
    text = render_page("Llama 3.1 8B", machine)
    assert "15.0 GB are read per token; at 51 GB/s, at most 3.4 tokens/s for one stream" in text
    assert "measured" in text


def test_without_a_bandwidth_only_the_bytes_are_shown() -> None:
    text = render_page("Llama 3.1 8B", None)
    assert "15.0 GB are read per token" in text
    assert "tokens/s" not in text


def test_layers_are_grouped_by_kind() -> None:
    text = render_page("gemma-4-E4B-it")
    for words in (
        "20 windowed attention",
        "at most 20 MiB (window 512)",
        "4 full attention",
        "18 shares another layer's cache",
        "no cache",
    ):
        assert words in text, words


def test_the_cache_of_audio_is_named() -> None:
    text = render(read(WHISPER))
    assert text.count("for 30 seconds of audio") == 2, "in all, and for the layers of the decoder"
    assert "window" not in text and "image" not in text


def test_experts_vision_encoder_and_prediction_heads_are_counted_separately() -> None:
    text = render_page("Qwen/Qwen3.5-397B-A17B")
    assert "396 B, of which 17.3 B active per token" in text
    assert "in a vision encoder" in text and "in multi-token-prediction heads" in text
    assert "512 experts, 10 active" in text
    assert "routed experts" in text


def test_the_cache_is_shown_for_common_lengths() -> None:
    assert "1 GiB at 8k · 4 GiB at 32k · 16 GiB at 128k" in render_page("Llama 3.1 8B")


def test_estimates_are_marked() -> None:
    assert "sizes estimated" in render_page("Llama 3.1 8B Q4_K_M")


def test_every_known_model_has_a_page() -> None:
    for name in list_known_names():
        assert "Parameters" in render_page(name)
