"""Encoder-decoder models are counted exactly. The configurations come from the model cards."""

from __future__ import annotations

from typing import Any

import pytest

from bedplate.errors import UsageError
from bedplate.facts.hf_config import read_config
from bedplate.values import Model, from_json, to_json

T5: dict[str, Any] = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "d_model": 768,
    "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128, "n_positions": 512,
    "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
}  # fmt: skip
FLAN = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: dict[str, Any] = {
    "model_type": "bart", "architectures": ["BartModel"], "is_encoder_decoder": True, "d_model": 768,
    "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265, "max_position_embeddings": 1024,
}  # fmt: skip
LARGE = {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}
SIXTEEN = {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
    "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51866, "torch_dtype": "float16",
}  # fmt: skip


def read(fields: dict[str, Any]) -> Model:
    return read_config(fields, name="made-up")


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        # The hub's count of the safetensors files; if it shows none, the sum over model.parameters().
        pytest.param(T5, 222_903_552, id="t5-base"),
        pytest.param(FLAN | {"d_ff": 2048}, 247_577_856, id="flan-t5-base"),
        pytest.param(
            FLAN | {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32}, 2_849_757_184, id="flan-t5-xl"
        ),
        pytest.param(
            FLAN
            | {
                "model_type": "mt5",
                "d_model": 512,
                "d_ff": 1024,
                "num_layers": 8,
                "num_heads": 6,
                "vocab_size": 250112,
            },
            300_176_768,
            id="mt5-small",
        ),
        pytest.param(BART, 139_420_416, id="bart-base"),
        pytest.param(BART | LARGE | SIXTEEN, 406_291_456, id="bart-large"),
        pytest.param(
            BART | LARGE | SIXTEEN | {"model_type": "mbart", "vocab_size": 250054}, 610_879_488, id="mbart-large-50"
        ),
        pytest.param(
            BART | LARGE | SIXTEEN | {"model_type": "m2m_100", "vocab_size": 256206},
            615_073_792,
            id="nllb-200-distilled-600M",
        ),
        pytest.param(WHISPER, 1_543_490_560, id="whisper-large-v3"),
        pytest.param(WHISPER | {"decoder_layers": 4}, 808_878_080, id="whisper-large-v3-turbo"),
        pytest.param(
            WHISPER
            | {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12}
            | {"decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "num_mel_bins": 80}
            | {"vocab_size": 51865},
            241_734_912,
            id="whisper-small",
        ),
    ],
)
def test_every_weight_of_both_sides_is_counted(fields: dict[str, Any], parameters: int) -> None:
    model = read(fields)
    assert model.parameters == parameters
    assert from_json(Model, to_json(model)) == model
    assert sum(part.parameters for part in model.parts) == parameters
    assert sum(group.count for group in model.layers) == model.num_layers


def test_input_and_output_tokens_take_the_same_cache() -> None:
    """12 decoder layers, 12 heads of 64, keys and values, 16 bits. The encoder has no cache."""
    model = read(T5)
    assert model.kv_bytes_per_token == 12 * 12 * 64 * 2 * 2
    assert model.kv_bytes_window == 0
    assert [(group.kind, group.count) for group in model.layers] == [("no cache", 12), ("full attention", 12)]
    assert (model.task, model.max_context) == ("generate", 512)


def test_whisper_keeps_thirty_seconds_of_sound_for_each_sequence() -> None:
    model = read(WHISPER)
    assert model.kv_bytes_window == 32 * 1500 * 1280 * 2 * 2
    assert model.compute_kv_bytes(448) == 32 * (1500 + 448) * 1280 * 2 * 2
    assert (model.task, model.max_context) == ("transcribe", 448)


def test_generation_reads_only_the_decoder() -> None:
    model = read(WHISPER)
    encoder = next(part for part in model.parts if part.name == "encoder")
    assert encoder.parameters == 636_968_960
    assert encoder.active_parameters == 0
    assert model.active_parameters == model.parameters - encoder.parameters
    assert model.read_bytes_per_token <= 2 * (model.parameters - encoder.parameters)


def test_the_encoder_alone_is_an_embedder_without_a_cache() -> None:
    model = read(T5 | {"architectures": ["T5EncoderModel"]})
    layer = 4 * 768 * 768 + 2 * 768 * 3072 + 2 * 768
    assert model.parameters == 32128 * 768 + 12 * layer + 32 * 12 + 768
    assert (model.task, model.kv_bytes_per_token, model.num_layers) == ("embed", 0, 12)


@pytest.mark.parametrize(
    "fields",
    [
        T5 | {"model_type": "prophetnet"},
        T5 | {"d_model": None},
        T5 | {"num_layers": 10**9},
        T5 | {"num_heads": 0},
        T5 | {"architectures": [{}, 3], "vocab_size": "many"},
        WHISPER | {"max_source_positions": 2**62},
        BART | {"max_position_embeddings": None},
        {"model_type": "whisper"},
    ],
)
def test_invalid_configurations_are_usage_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read(fields)
