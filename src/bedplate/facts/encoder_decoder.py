"""Encoder-decoder models: T5, BART and their relatives, and Whisper.

Weights follow the definitions in transformers 5. The decoder keeps the keys and values of the input (cross-attention)
and of its own output.
"""

from __future__ import annotations

from dataclasses import dataclass

from bedplate.facts.attention import Mixer, ModelDims
from bedplate.facts.hf_fields import MAX_CONTEXT, MAX_LAYERS, Config, InvalidConfig, Weight, make_vectors

_T5 = {"t5", "mt5", "umt5"}
_BART = {"bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small"}
FAMILIES = _T5 | _BART | {"whisper"}
# How positions are encoded. Marian and Pegasus compute them, but store them as a table.
_LEARNED = {"bart", "mbart"}
_TABLES = {"marian", "pegasus", "blenderbot", "blenderbot-small"}
_NORMED_EMBEDDING = {"bart", "mbart", "blenderbot-small"}
_NORMED_END = {"mbart", "pegasus", "m2m_100", "blenderbot", "whisper"} | _T5


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """Encoder and decoder of a model; only the encoder if the decoder was left out."""

    dims: ModelDims
    weights: list[Weight]
    mixers: list[Mixer]
    tied: bool
    intermediate: int | None


@dataclass(frozen=True, slots=True)
class _EncoderDecoderShape:
    kind: str
    hidden: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_dim: int
    encoder_width: int
    decoder_width: int
    gated: bool

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def norm_size(self) -> int:
        """Weights of a norm. T5's norms have no bias."""
        return self.hidden if self.kind in _T5 else 2 * self.hidden


def is_encoder_decoder(config: Config) -> bool:
    kind = config.get_text("model_type") or ""
    if config.get("is_encoder_decoder") is True and kind not in FAMILIES:
        raise InvalidConfig(f"unknown encoder-decoder architecture: {kind[:40] or 'no model_type'}")
    return kind in FAMILIES


def read_encoder_decoder(config: Config) -> EncoderDecoder:
    """All weights of encoder and decoder, and the decoder's cache."""
    shape = _read_shape(config)
    alone = any(str(name).endswith("EncoderModel") for name in config.get("architectures") or ())
    vocabulary = config.require_count("vocab_size", most=1 << 28)
    tied = alone or config.get_flag("tie_word_embeddings", default=True)
    shared = "embedding" if alone or not tied else "output"
    weights = [Weight("shared", shared, vocabulary, shape.hidden, matrix=False)]
    if not tied:
        weights.append(Weight("lm_head", "output", vocabulary, shape.hidden))
    # Generated tokens use the decoder only.
    weights += [weight._replace(part="encoder", used=0) for weight in _make_encoder_weights(config, shape)]
    mixers = [Mixer("no cache") for _ in range(shape.encoder_layers)]
    if not alone:
        weights += _make_decoder_weights(config, shape)
        mixers += [_make_mixer(config, shape) for _ in range(shape.decoder_layers)]
    context = config.get_count("max_target_positions", "max_position_embeddings", "n_positions", most=MAX_CONTEXT)
    found = ModelDims(
        shape.kind, shape.hidden, len(mixers), shape.heads, shape.heads, shape.head_dim, shape.head_dim, context or None
    )
    return EncoderDecoder(found, weights, mixers, tied, shape.encoder_width if alone else shape.decoder_width)


def _read_shape(config: Config) -> _EncoderDecoderShape:
    kind = config.get_text("model_type") or ""
    hidden = config.require_count("d_model")
    encoder = config.require_count("num_layers" if kind in _T5 else "encoder_layers", most=MAX_LAYERS)
    decoder = config.get_count("num_decoder_layers", "decoder_layers", most=MAX_LAYERS) or encoder
    heads = config.require_count("num_heads", "decoder_attention_heads", "encoder_attention_heads")
    width = config.require_count("d_ff", "encoder_ffn_dim")
    return _EncoderDecoderShape(
        kind,
        hidden,
        encoder,
        decoder,
        heads,
        (config.get_count("d_kv") if kind in _T5 else None) or hidden // heads,
        width,
        config.get_count("decoder_ffn_dim") or width,
        (config.get_text("feed_forward_proj") or "").startswith("gated"),
    )


def _make_mixer(config: Config, shape: _EncoderDecoderShape) -> Mixer:
    """The cache per token, the same for input (cross-attention) and output (self-attention).

    Whisper always reads 30 seconds, padded, and its context length counts only output.
    """
    values = 2 * shape.inner_size
    fixed = 0
    if shape.kind == "whisper":
        fixed = values * (config.get_count("max_source_positions", most=1 << 20) or 1500)
    heads, size = shape.heads, shape.head_dim
    return Mixer("full attention", [], values, kv_heads=heads, key_dim=size, value_dim=size, fixed_values=fixed)


def _make_encoder_weights(config: Config, shape: _EncoderDecoderShape) -> list[Weight]:
    found = _make_position_weights(config, shape, "encoder")
    if shape.kind == "whisper":
        mels = config.get_count("num_mel_bins") or 80
        found.append(Weight("encoder.conv1", "encoder", shape.hidden, 3 * mels, matrix=False))
        found.append(Weight("encoder.conv2", "encoder", shape.hidden, 3 * shape.hidden, matrix=False))
        found += make_vectors("encoder", "encoder", [("conv_bias", 2 * shape.hidden)])
    for layer in range(shape.encoder_layers):
        base = f"encoder.layers.{layer}"
        found += _make_attention_weights(config, shape, f"{base}.self_attn", layer)
        found += _make_feed_forward_weights(shape, base, shape.encoder_width)
        found += make_vectors("norms", base, [("norms", 2 * shape.norm_size)])
    return found


def _make_decoder_weights(config: Config, shape: _EncoderDecoderShape) -> list[Weight]:
    found = _make_position_weights(config, shape, "decoder")
    for layer in range(shape.decoder_layers):
        base = f"decoder.layers.{layer}"
        found += _make_attention_weights(config, shape, f"{base}.self_attn", layer)
        found += _make_attention_weights(config, shape, f"{base}.encoder_attn", None)
        found += _make_feed_forward_weights(shape, base, shape.decoder_width)
        found += make_vectors("norms", base, [("norms", 3 * shape.norm_size)])
    return found


def _make_position_weights(config: Config, shape: _EncoderDecoderShape, side: str) -> list[Weight]:
    """The weights of one side besides its layers: positions, and norms at its ends."""
    rows = 0
    if shape.kind == "whisper":
        name, usual = ("max_source_positions", 1500) if side == "encoder" else ("max_target_positions", 448)
        rows = config.get_count(name, most=1 << 20) or usual
    elif shape.kind in _LEARNED | _TABLES:
        rows = config.require_count("max_position_embeddings") + (2 if shape.kind in _LEARNED else 0)
    norms = (shape.kind in _NORMED_EMBEDDING) + (shape.kind in _NORMED_END)
    return [
        *make_vectors("embedding", side, [("positions", rows * shape.hidden)]),
        *make_vectors("norms", side, [("norms", norms * shape.norm_size)]),
    ]


def _make_attention_weights(config: Config, shape: _EncoderDecoderShape, base: str, layer: int | None) -> list[Weight]:
    """`layer` is None for cross-attention, which has no relative position bias."""
    found = [Weight(f"{base}.{name}_proj", "attention", shape.inner_size, shape.hidden) for name in "qkv"]
    found.append(Weight(f"{base}.out_proj", "attention", shape.hidden, shape.inner_size))
    if shape.kind not in _T5:
        # Whisper's keys have no bias.
        return found + make_vectors("attention", base, [("bias", (3 if shape.kind == "whisper" else 4) * shape.hidden)])
    if layer == 0 or (layer is not None and shape.kind == "umt5"):
        buckets = config.get_count("relative_attention_num_buckets") or 32
        found += make_vectors("attention", base, [("relative_attention_bias", buckets * shape.heads)])
    return found


def _make_feed_forward_weights(shape: _EncoderDecoderShape, base: str, width: int) -> list[Weight]:
    names = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    found = [Weight(f"{base}.mlp.{name}", "mlp", width, shape.hidden) for name in names]
    found.append(Weight(f"{base}.mlp.down_proj", "mlp", shape.hidden, width))
    if shape.kind not in _T5:
        found += make_vectors("mlp", base, [("mlp_bias", width + shape.hidden)])
    return found
