"""Encoder-decoder models: T5, BART and their relatives, and Whisper.

Weights follow the definitions in transformers 5. The decoder keeps the keys and values of the input (cross-attention)
and of its own output.
"""

from __future__ import annotations

from dataclasses import dataclass

from bedplate.facts.attention import Dims, Mixer
from bedplate.facts.hf_fields import MAX_CONTEXT, MAX_LAYERS, Config, Unplannable, Weight, vectors

_T5 = {"t5", "mt5", "umt5"}
_BART = {"bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small"}
FAMILIES = _T5 | _BART | {"whisper"}
# How positions are encoded. Marian and Pegasus compute them, but store them as a table.
_LEARNED = {"bart", "mbart"}
_TABLES = {"marian", "pegasus", "blenderbot", "blenderbot-small"}
_NORMED_EMBEDDING = {"bart", "mbart", "blenderbot-small"}
_NORMED_END = {"mbart", "pegasus", "m2m_100", "blenderbot", "whisper"} | _T5


@dataclass(frozen=True, slots=True)
class Sides:
    """Encoder and decoder of a model; only the encoder if the decoder was left out."""

    dims: Dims
    weights: list[Weight]
    mixers: list[Mixer]
    tied: bool
    intermediate: int | None


@dataclass(frozen=True, slots=True)
class _Shape:
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
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def norm(self) -> int:
        """Weights of a norm. T5's norms have no bias."""
        return self.hidden if self.kind in _T5 else 2 * self.hidden


def has_two_sides(config: Config) -> bool:
    kind = config.text("model_type") or ""
    if config.get("is_encoder_decoder") is True and kind not in FAMILIES:
        raise Unplannable(f"unknown encoder-decoder architecture: {kind[:40] or 'no model_type'}")
    return kind in FAMILIES


def sides(config: Config) -> Sides:
    """All weights of encoder and decoder, and the decoder's cache."""
    shape = _shape(config)
    alone = any(str(name).endswith("EncoderModel") for name in config.get("architectures") or ())
    vocabulary = config.need("vocab_size", most=1 << 28)
    tied = alone or config.flag("tie_word_embeddings", default=True)
    shared = "embedding" if alone or not tied else "output"
    weights = [Weight("shared", shared, vocabulary, shape.hidden, matrix=False)]
    if not tied:
        weights.append(Weight("lm_head", "output", vocabulary, shape.hidden))
    # Generated tokens use the decoder only.
    weights += [weight._replace(part="encoder", used=0) for weight in _encoder(config, shape)]
    mixers = [Mixer("no cache") for _ in range(shape.encoder_layers)]
    if not alone:
        weights += _decoder(config, shape)
        mixers += [_memory(config, shape) for _ in range(shape.decoder_layers)]
    context = config.count("max_target_positions", "max_position_embeddings", "n_positions", most=MAX_CONTEXT)
    found = Dims(
        shape.kind, shape.hidden, len(mixers), shape.heads, shape.heads, shape.head_dim, shape.head_dim, context or None
    )
    return Sides(found, weights, mixers, tied, shape.encoder_width if alone else shape.decoder_width)


def _shape(config: Config) -> _Shape:
    kind = config.text("model_type") or ""
    hidden = config.need("d_model")
    encoder = config.need("num_layers" if kind in _T5 else "encoder_layers", most=MAX_LAYERS)
    decoder = config.count("num_decoder_layers", "decoder_layers", most=MAX_LAYERS) or encoder
    heads = config.need("num_heads", "decoder_attention_heads", "encoder_attention_heads")
    width = config.need("d_ff", "encoder_ffn_dim")
    return _Shape(
        kind,
        hidden,
        encoder,
        decoder,
        heads,
        (config.count("d_kv") if kind in _T5 else None) or hidden // heads,
        width,
        config.count("decoder_ffn_dim") or width,
        (config.text("feed_forward_proj") or "").startswith("gated"),
    )


def _memory(config: Config, shape: _Shape) -> Mixer:
    """The cache per token, the same for input (cross-attention) and output (self-attention).

    Whisper always reads 30 seconds, padded, and its context length counts only output.
    """
    values = 2 * shape.inner
    fixed = 0
    if shape.kind == "whisper":
        fixed = values * (config.count("max_source_positions", most=1 << 20) or 1500)
    heads, size = shape.heads, shape.head_dim
    return Mixer("full attention", [], values, kv_heads=heads, key_dim=size, value_dim=size, fixed_values=fixed)


def _encoder(config: Config, shape: _Shape) -> list[Weight]:
    found = _positions(config, shape, "encoder")
    if shape.kind == "whisper":
        mels = config.count("num_mel_bins") or 80
        found.append(Weight("encoder.conv1", "encoder", shape.hidden, 3 * mels, matrix=False))
        found.append(Weight("encoder.conv2", "encoder", shape.hidden, 3 * shape.hidden, matrix=False))
        found += vectors("encoder", "encoder", [("conv_bias", 2 * shape.hidden)])
    for layer in range(shape.encoder_layers):
        base = f"encoder.layers.{layer}"
        found += _attention(config, shape, f"{base}.self_attn", layer)
        found += _feed_forward(shape, base, shape.encoder_width)
        found += vectors("norms", base, [("norms", 2 * shape.norm)])
    return found


def _decoder(config: Config, shape: _Shape) -> list[Weight]:
    found = _positions(config, shape, "decoder")
    for layer in range(shape.decoder_layers):
        base = f"decoder.layers.{layer}"
        found += _attention(config, shape, f"{base}.self_attn", layer)
        found += _attention(config, shape, f"{base}.encoder_attn", None)
        found += _feed_forward(shape, base, shape.decoder_width)
        found += vectors("norms", base, [("norms", 3 * shape.norm)])
    return found


def _positions(config: Config, shape: _Shape, side: str) -> list[Weight]:
    """The weights of one side besides its layers: positions, and norms at its ends."""
    rows = 0
    if shape.kind == "whisper":
        name, usual = ("max_source_positions", 1500) if side == "encoder" else ("max_target_positions", 448)
        rows = config.count(name, most=1 << 20) or usual
    elif shape.kind in _LEARNED | _TABLES:
        rows = config.need("max_position_embeddings") + (2 if shape.kind in _LEARNED else 0)
    norms = (shape.kind in _NORMED_EMBEDDING) + (shape.kind in _NORMED_END)
    return [
        *vectors("embedding", side, [("positions", rows * shape.hidden)]),
        *vectors("norms", side, [("norms", norms * shape.norm)]),
    ]


def _attention(config: Config, shape: _Shape, base: str, layer: int | None) -> list[Weight]:
    """`layer` is None for cross-attention, which has no relative position bias."""
    found = [Weight(f"{base}.{name}_proj", "attention", shape.inner, shape.hidden) for name in "qkv"]
    found.append(Weight(f"{base}.out_proj", "attention", shape.hidden, shape.inner))
    if shape.kind not in _T5:
        # Whisper's keys have no bias.
        return found + vectors("attention", base, [("bias", (3 if shape.kind == "whisper" else 4) * shape.hidden)])
    if layer == 0 or (layer is not None and shape.kind == "umt5"):
        buckets = config.count("relative_attention_num_buckets") or 32
        found += vectors("attention", base, [("relative_attention_bias", buckets * shape.heads)])
    return found


def _feed_forward(shape: _Shape, base: str, width: int) -> list[Weight]:
    names = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    found = [Weight(f"{base}.mlp.{name}", "mlp", width, shape.hidden) for name in names]
    found.append(Weight(f"{base}.mlp.down_proj", "mlp", shape.hidden, width))
    if shape.kind not in _T5:
        found += vectors("mlp", base, [("mlp_bias", width + shape.hidden)])
    return found
