"""The kind of each layer, its weights, and the cache that it keeps for a sequence.

Sizes follow the layer definitions in transformers 5.22 and, for Kimi K3, sglang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bedplate.facts.hf_fields import MAX_CONTEXT, Config, InvalidConfig, Weight, check_count, make_vectors
from bedplate.values.model import LayerKind

ENCODERS = {
    "bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "modernbert", "nomic_bert", "new", "deberta",
    "deberta-v2", "albert", "camembert", "xlm-roberta-xl", "eurobert", "jina_bert", "neobert",
}  # fmt: skip
_QKV_BIAS = {"qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "mimo"}
_BIASED = {"gpt2", "gpt_neox", "opt", "phi", "gpt_bigcode", "starcoder2", "bloom"} | ENCODERS
_HEAD_NORMS = {
    "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4_text", "lfm2", "lfm2_moe", "hunyuan_v1_moe", "hunyuan_v1_dense", "dots1",
    "step3p7", "step3p5", "step3p7_text", "minimax_m3", "exaone4",
}  # fmt: skip
# All but every n-th layer are windowed, if no list says which.
_WINDOW_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "cohere2": 4,
    "gpt_oss": 2,
    "exaone4": 4,
}
_FULL_WINDOW_TYPES = {"mistral", "phi3", "starcoder2", "ministral", "phi4mm"}
STATE_BYTES = 4
"""transformers and llama.cpp keep recurrent state in 32 bits. vLLM does so for models that ask for it."""
CONV_BYTES = 2


@dataclass(frozen=True, slots=True)
class Mixer:
    """The token mixer of one layer: attention, state space or convolution."""

    kind: LayerKind
    weights: list[Weight] = field(default_factory=list)
    kv_values: float = 0.0
    """Values that each further token adds to the cache."""
    window: int | None = None
    window_values: int = 0
    """Values per token of the window."""
    state_bytes: int = 0
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    fixed_values: int = 0
    """Values kept once per sequence, such as the keys of an image."""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions that most layers of a model share."""

    type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: int | None


def read_dims(config: Config) -> ModelDims:
    kind = config.get_text("model_type") or ""
    hidden = config.require_count("hidden_size", "n_embd", "d_model", "dim")
    layers = _read_num_layers(config)
    if layers > 4096:
        raise InvalidConfig(f"num_hidden_layers is {layers:,}")
    heads = config.get_count("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads") or 0
    default_kv = 1 if kind == "gpt_bigcode" and config.get_flag("multi_query") else heads
    if kind == "falcon":
        default_kv = (config.get_count("num_kv_heads") or heads) if config.get_flag("new_decoder_architecture") else 1
    kv_heads = config.get_count("num_key_value_heads", "n_kv_heads", "multi_query_group_num")
    kv_heads = default_kv if kv_heads is None else kv_heads
    head_dim = config.get_count("head_dim", "attention_head_dim", "d_kv", "kv_channels")
    if not head_dim:
        head_dim = hidden // heads if heads else 0
    value_dim = config.get_count("v_head_dim") or head_dim
    context = config.get_count(
        "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx", most=MAX_CONTEXT
    )
    return ModelDims(kind, hidden, layers, heads, kv_heads, head_dim, value_dim, context or None)


def _read_num_layers(config: Config) -> int:
    layers = config.get_count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", most=1 << 31)
    if not layers:
        for name in ("layers_block_type", "hybrid_override_pattern", "layer_types"):
            value = config.get(name)
            if isinstance(value, list | str) and value:
                return len(value)
        raise InvalidConfig("num_hidden_layers is not in the configuration")
    return layers


def make_mixers(config: Config, d: ModelDims) -> list[Mixer]:
    """One mixer per layer, first to last."""
    if d.type in ENCODERS:
        return [
            Mixer("no cache", _make_softmax_weights(config, d, i, d.kv_heads, d.head_dim, d.value_dim))
            for i in range(d.layers)
        ]
    shared_from = d.layers - min(d.layers, config.get_count("num_kv_shared_layers") or 0)
    made = [_make_mixer(config, d, layer, kind) for layer, kind in enumerate(list_layer_kinds(config, d))]
    # Gemma's files keep the key and value projections of layers that share another layer's cache.
    return [
        mixer if layer < shared_from else Mixer("shares another layer's cache", mixer.weights)
        for layer, mixer in enumerate(made)
    ]


def list_layer_kinds(config: Config, d: ModelDims) -> list[str]:
    """One word per layer: full, window, chunk, linear, kda, mamba, conv, lightning, both, moe, mlp, cross."""
    listed = _read_listed_kinds(config, d)
    if listed is not None:
        return listed
    if config.get_section("linear_attn_config"):
        return _list_kimi_kinds(config, d)
    if ratios := config.get_per_layer("compress_ratios", d.layers):
        return [f"ratio {check_count('compress_ratios', ratio)}" for ratio in ratios]
    if pattern := config.get_per_layer("hybrid_layer_pattern", d.layers):
        return ["window" if mark else "full" for mark in pattern]
    if (types := config.get_per_layer("attn_type_list", d.layers)) is not None:
        return ["full" if mark else "lightning" for mark in types]
    if period := config.get_count("attn_layer_period"):
        offset = config.get_count("attn_layer_offset") or 0
        return ["full" if layer % period == offset else "mamba1" for layer in range(d.layers)]
    if d.type in ("mamba", "falcon_mamba"):
        return ["mamba1"] * d.layers
    if d.type == "mamba2":
        return ["mamba"] * d.layers
    if d.type == "falcon_h1":
        return ["both"] * d.layers
    if interval := config.get_count("full_attention_interval"):
        return ["linear" if (layer + 1) % interval else "full" for layer in range(d.layers)]
    if isinstance(indices := config.get("full_attn_idxs"), list):
        return ["full" if layer in indices else "conv" for layer in range(d.layers)]
    return _list_window_kinds(config, d)


_LISTED = {
    "full_attention": "full", "attention": "full", "sliding_attention": "window", "chunked_attention": "chunk",
    "linear_attention": "linear", "mamba": "mamba", "conv": "conv", "short_conv": "conv", "hybrid": "both",
    "moe": "moe",
    "mlp": "mlp", "minimax_m3_sparse": "full", "sparse_attention": "full", "global_attention": "full",
    "local_attention": "window", "deepseek_sparse_attention": "full", "latent_attention": "full",
}  # fmt: skip
_LETTERS = {"M": "mamba", "*": "full", "-": "mlp", "E": "moe"}


def _read_listed_kinds(config: Config, d: ModelDims) -> list[str] | None:
    if config.has("block_configs"):
        return ["block"] * d.layers
    if config.has("compress_ratios") or config.get_section("linear_attn_config"):
        return None
    pattern = config.get_text("hybrid_override_pattern")
    if pattern is not None:
        letters = pattern.replace("|", "")
        if len(letters) < d.layers or any(letter not in _LETTERS for letter in letters):
            raise InvalidConfig(f"hybrid_override_pattern does not describe {d.layers} layers")
        return [_LETTERS[letter] for letter in letters[: d.layers]]
    listed = config.get_per_layer("layers_block_type", d.layers) or config.get_per_layer("layer_types", d.layers)
    if listed is None:
        return None
    unknown = next((entry for entry in listed if not isinstance(entry, str) or entry not in _LISTED), None)
    if unknown is not None:
        raise InvalidConfig(f"unknown layer kind: {str(unknown)[:40]!r}")
    words = [_LISTED[entry] for entry in listed]
    if not (config.get_count("sliding_window", most=MAX_CONTEXT) or 0):
        words = ["full" if word == "window" else word for word in words]
    return words


def _list_kimi_kinds(config: Config, d: ModelDims) -> list[str]:
    linear = config.get_section("linear_attn_config") or Config({})
    numbers = linear.get("full_attn_layers")
    if not isinstance(numbers, list):
        raise InvalidConfig("linear_attn_config does not list full_attn_layers")
    full = {check_count("full_attn_layers", number) for number in numbers[: d.layers]}
    return ["full" if layer + 1 in full else "kda" for layer in range(d.layers)]


def _list_window_kinds(config: Config, d: ModelDims) -> list[str]:
    if d.type in ("llama4", "llama4_text"):
        marks = config.get_per_layer("no_rope_layers", d.layers)
        local = [bool(mark) for mark in marks] if marks else [(layer + 1) % 4 != 0 for layer in range(d.layers)]
        return ["chunk" if mark else "full" for mark in local]
    cross = config.get("cross_attention_layers")
    if isinstance(cross, list):
        return ["cross" if layer in cross else "full" for layer in range(d.layers)]
    window = config.get_count("sliding_window", "sliding_window_size", most=MAX_CONTEXT)
    if not window or not config.get_flag("use_sliding_window", default=True):
        return ["full"] * d.layers
    period = config.get_count("sliding_window_pattern", "_sliding_window_pattern") or _WINDOW_PERIODS.get(d.type)
    if period:
        return ["window" if (layer + 1) % period else "full" for layer in range(d.layers)]
    if d.type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        first = config.get_count("max_window_layers") or 0
        return ["window" if layer >= first else "full" for layer in range(d.layers)]
    if d.type in _FULL_WINDOW_TYPES and (d.context is None or window < d.context):
        return ["window"] * d.layers
    return ["full"] * d.layers


def _make_mixer(config: Config, d: ModelDims, layer: int, word: str) -> Mixer:
    if word in ("moe", "mlp"):
        return Mixer("no cache")
    if word == "linear":
        return _make_gated_delta(config, d, layer)
    if word == "kda":
        return _make_kda(config, d, layer)
    if word == "mamba":
        return _make_mamba2(config, d, layer)
    if word == "mamba1":
        return _make_mamba1(config, d, layer)
    if word == "conv":
        return _make_short_conv(config, d, layer)
    if word == "lightning":
        return _make_lightning(d, layer)
    if word == "block":
        return _make_nas_mixer(config, d, layer)
    if word.startswith("ratio "):
        return _make_compressed_attention(config, d, layer, int(word[6:]))
    if word == "both":
        attention, state = _make_attention(config, d, layer, "full"), _make_mamba2(config, d, layer)
        return Mixer(
            "attention and state space", attention.weights + state.weights, attention.kv_values,
            state_bytes=state.state_bytes, kv_heads=d.kv_heads, key_dim=d.head_dim, value_dim=d.value_dim,
        )  # fmt: skip
    if config.get_count("kv_lora_rank"):
        return _make_latent_attention(config, d, layer)
    return _make_attention(config, d, layer, word)


def _make_attention(config: Config, d: ModelDims, layer: int, word: str) -> Mixer:
    kv_heads, key, value = d.kv_heads, d.head_dim, d.value_dim
    windowed = word in ("window", "chunk")
    heads = d.heads
    if windowed:
        heads = config.get_count("swa_num_attention_heads") or heads
        kv_heads = config.get_count("swa_num_key_value_heads") or kv_heads
        key = config.get_count("swa_head_dim") or key
        value = config.get_count("swa_v_head_dim") or value
    elif d.type == "gemma4_text":
        key = value = config.get_count("global_head_dim") or key
        kv_heads = config.get_count("num_global_key_value_heads") or kv_heads
    weights = _make_softmax_weights(config, d, layer, kv_heads, key, value, heads=heads, windowed=windowed)
    values = kv_heads * (key + value)
    extra, indexer = _make_block_indexer(config, d, layer)
    weights += indexer
    if word == "cross":
        return Mixer("cross attention", weights, kv_heads=kv_heads, fixed_values=values * _count_image_tokens(config))
    if windowed:
        names = ("attention_chunk_size",) if word == "chunk" else ("sliding_window", "sliding_window_size")
        window = config.get_count(*names, most=MAX_CONTEXT) or 8192
        if d.context:
            window = min(window, d.context)
        kind: LayerKind = "chunked attention" if word == "chunk" else "windowed attention"
        return Mixer(
            kind, weights, window=window, window_values=values, kv_heads=kv_heads, key_dim=key, value_dim=value
        )
    kind = "sparse attention" if extra else "full attention"
    return Mixer(kind, weights, values + extra, kv_heads=kv_heads, key_dim=key, value_dim=value)


def _count_image_tokens(config: Config) -> int:
    """Image keys that cross-attention layers read, for the maximum number of image tiles."""
    vision = config.parent.get_section("vision_config") if config.parent else None
    if vision is None:
        return 0
    patches = (vision.get_count("image_size") or 0) // (vision.get_count("patch_size") or 1)
    return (patches * patches + 1) * (vision.get_count("max_num_tiles") or 1)


def _make_softmax_weights(
    config: Config,
    d: ModelDims,
    layer: int,
    kv_heads: int,
    key: int,
    value: int,
    *,
    heads: int | None = None,
    windowed: bool = True,
) -> list[Weight]:
    heads = d.heads if heads is None else heads
    base = f"layers.{layer}.{'mixer' if d.type == 'nemotron_h' else 'self_attn'}"
    gated = d.type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") and config.get_flag(
        "attn_output_gate", default=True
    )
    query, keys, values = heads * key * (2 if gated else 1), kv_heads * key, kv_heads * value
    found = [
        Weight(f"{base}.q_proj", "attention", query, d.hidden),
        Weight(f"{base}.k_proj", "attention", keys, d.hidden),
        Weight(f"{base}.o_proj", "attention", d.hidden, heads * value),
    ]
    # Gemma 4's full-attention layers derive values from the key projection.
    if not (d.type == "gemma4_text" and not windowed and config.get_flag("attention_k_eq_v")):
        found.append(Weight(f"{base}.v_proj", "attention", values, d.hidden))
    biased = config.get_flag("attention_bias", "bias") or d.type in _BIASED
    if biased or d.type in _QKV_BIAS or config.get_flag("qkv_bias", "add_qkv_bias"):
        found += make_vectors("attention", base, [("qkv_bias", query + keys + values)])
    if biased and d.type != "mimo":
        found += make_vectors("attention", base, [("o_bias", d.hidden)])
    if d.type in _HEAD_NORMS or config.get_flag("use_qk_norm"):
        wide = config.get_text("qk_norm_type") == "per_layer"
        found += make_vectors("norms", base, [("qk_norm", (heads + kv_heads) * key if wide else 2 * key)])
    if d.type == "gpt_oss":
        found += make_vectors("attention", base, [("sinks", heads)])
    if d.type in ("step3p5", "step3p7", "step3p7_text"):
        found.append(Weight(f"{base}.g_proj", "attention", heads, d.hidden))
    return found


def _make_block_indexer(config: Config, d: ModelDims, layer: int) -> tuple[int, list[Weight]]:
    """MiniMax M3 selects blocks of keys with a small extra key in each sparse layer."""
    sparse = config.get_section("sparse_attention_config")
    if sparse is None or not sparse.get_flag("use_sparse_attention", default=True):
        return 0, []
    marks = sparse.get_per_layer("sparse_attention_freq", d.layers)
    if marks is not None and not marks[layer]:
        return 0, []
    heads, width = sparse.require_count("sparse_num_index_heads"), sparse.require_count("sparse_index_dim")
    base = f"layers.{layer}.self_attn.indexer"
    weights = [
        Weight(f"{base}.q_proj", "attention", heads * width, d.hidden),
        Weight(f"{base}.k_proj", "attention", width, d.hidden),
        *make_vectors("norms", base, [("norms", 2 * width)]),
    ]
    return width, weights


def _make_latent_attention(config: Config, d: ModelDims, layer: int) -> Mixer:
    """MLA: one latent for all heads, and the part of the key that carries the position."""
    rank, rope = config.require_count("kv_lora_rank"), config.get_count("qk_rope_head_dim") or 0
    nope, value = config.require_count("qk_nope_head_dim"), config.require_count("v_head_dim")
    base = f"layers.{layer}.self_attn"
    query_rank = config.get_count("q_lora_rank")
    found = [
        Weight(f"{base}.kv_a_proj_with_mqa", "attention", rank + rope, d.hidden),
        Weight(f"{base}.kv_b_proj", "attention", d.heads * (nope + value), rank),
        Weight(f"{base}.o_proj", "attention", d.hidden, d.heads * value),
        *make_vectors("norms", base, [("kv_a_layernorm", rank), ("q_a_layernorm", query_rank or 0)]),
    ]
    if query_rank:
        found.append(Weight(f"{base}.q_a_proj", "attention", query_rank, d.hidden))
        found.append(Weight(f"{base}.q_b_proj", "attention", d.heads * (nope + rope), query_rank))
    else:
        found.append(Weight(f"{base}.q_proj", "attention", d.heads * (nope + rope), d.hidden))
    if config.get_flag("mla_use_output_gate"):
        found.append(Weight(f"{base}.g_proj", "attention", d.heads * value, d.hidden))
    values = rank + rope
    width = config.get_count("index_head_dim") or 0
    types = config.get_per_layer("indexer_types", d.layers)
    if width and query_rank and (types is None or types[layer] == "full"):
        # Layers that reuse another layer's indexer have neither its weights nor its keys.
        heads = config.require_count("index_n_heads")
        found += [
            Weight(f"{base}.indexer.wq_b", "attention", heads * width, query_rank),
            Weight(f"{base}.indexer.wk", "attention", width, d.hidden),
            Weight(f"{base}.indexer.weights_proj", "attention", heads, d.hidden),
            *make_vectors("norms", f"{base}.indexer", [("k_norm", 2 * width)]),
        ]
        values += width
    kind: LayerKind = "sparse attention" if width else "latent attention"
    return Mixer(kind, found, values, kv_heads=1, key_dim=rank + rope, value_dim=rank)


def _make_compressed_attention(config: Config, d: ModelDims, layer: int, ratio: int) -> Mixer:
    """DeepSeek V4: a window of shared keys and values, and one entry per `ratio` tokens before it.

    With a ratio of 4 the blocks overlap, so both projections are twice as wide, and an indexer selects entries.
    """
    head, base = d.head_dim, f"layers.{layer}.attn"
    query_rank, out_rank, groups = (config.require_count(name) for name in ("q_lora_rank", "o_lora_rank", "o_groups"))
    found = [
        Weight(f"{base}.wq_a", "attention", query_rank, d.hidden),
        Weight(f"{base}.wq_b", "attention", d.heads * head, query_rank),
        Weight(f"{base}.wkv", "attention", head, d.hidden),
        Weight(f"{base}.wo_a", "attention", groups * out_rank, d.heads * head // groups),
        Weight(f"{base}.wo_b", "attention", d.hidden, groups * out_rank),
        *make_vectors("norms", base, [("q_norm", query_rank), ("kv_norm", head), ("attn_sink", d.heads)]),
    ]
    streams = config.get_count("hc_mult") or 0
    mixes = (2 + streams) * streams
    found += make_vectors("attention", base, [("hc", 2 * (mixes * streams * d.hidden + mixes + 3))] if streams else [])
    values = 0.0
    if ratio:
        double = 2 if ratio < 128 else 1
        found += [
            Weight(f"{base}.compressor.wkv", "attention", double * head, d.hidden),
            Weight(f"{base}.compressor.wgate", "attention", double * head, d.hidden),
            *make_vectors("attention", f"{base}.compressor", [("ape", ratio * double * head), ("norm", head)]),
        ]
        values = head / ratio
        if double == 2:
            heads, width = config.require_count("index_n_heads"), config.require_count("index_head_dim")
            found += [
                Weight(f"{base}.indexer.wq_b", "attention", heads * width, query_rank),
                Weight(f"{base}.indexer.weights_proj", "attention", heads, d.hidden),
                Weight(f"{base}.indexer.compressor.wkv", "attention", 2 * width, d.hidden),
                Weight(f"{base}.indexer.compressor.wgate", "attention", 2 * width, d.hidden),
                *make_vectors("attention", f"{base}.indexer", [("ape", ratio * 2 * width), ("norm", width)]),
            ]
            values += width / ratio
    window = config.get_count("sliding_window", most=MAX_CONTEXT) or 0
    kind: LayerKind = "compressed attention" if ratio else "windowed attention"
    return Mixer(
        kind, found, values, window=window or None, window_values=head, kv_heads=1, key_dim=head, value_dim=head
    )


def _make_gated_delta(config: Config, d: ModelDims, layer: int) -> Mixer:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5."""
    key_heads, value_heads = (
        config.require_count("linear_num_key_heads"),
        config.require_count("linear_num_value_heads"),
    )
    key, value = config.require_count("linear_key_head_dim"), config.require_count("linear_value_head_dim")
    kernel = config.get_count("linear_conv_kernel_dim") or 4
    keys, values = key_heads * key, value_heads * value
    base = f"layers.{layer}.linear_attn"
    found = [
        Weight(f"{base}.in_proj_qkv", "attention", 2 * keys + values, d.hidden),
        Weight(f"{base}.in_proj_z", "attention", values, d.hidden),
        Weight(f"{base}.in_proj_ba", "attention", 2 * value_heads, d.hidden),
        Weight(f"{base}.out_proj", "attention", d.hidden, values),
        *make_vectors(
            "attention", base, [("conv1d", (2 * keys + values) * kernel), ("gates", 2 * value_heads), ("norm", value)]
        ),
    ]
    state = STATE_BYTES * value_heads * key * value + CONV_BYTES * (kernel - 1) * (2 * keys + values)
    return Mixer("linear attention", found, state_bytes=state)


def _make_kda(config: Config, d: ModelDims, layer: int) -> Mixer:
    """Kimi Delta Attention."""
    linear = config.get_section("linear_attn_config") or Config({})
    heads, head, kernel = (
        linear.require_count("num_heads"),
        linear.require_count("head_dim"),
        linear.get_count("short_conv_kernel_size") or 4,
    )
    width, base = heads * head, f"layers.{layer}.self_attn"
    found = [Weight(f"{base}.{name}_proj", "attention", width, d.hidden) for name in "qkv"]
    found += [
        Weight(f"{base}.o_proj", "attention", d.hidden, width),
        Weight(f"{base}.b_proj", "attention", heads, d.hidden),
        Weight(f"{base}.f_a_proj", "attention", head, d.hidden),
        Weight(f"{base}.f_b_proj", "attention", width, head),
        *make_vectors(
            "attention", base, [("conv1d", 3 * width * kernel), ("dt_bias", width), ("A_log", heads), ("o_norm", head)]
        ),
    ]
    if linear.get_flag("use_full_rank_gate"):
        found.append(Weight(f"{base}.g_proj", "attention", width, d.hidden))
    else:
        found += [
            Weight(f"{base}.g_a_proj", "attention", head, d.hidden),
            Weight(f"{base}.g_b_proj", "attention", width, head),
        ]
    state = STATE_BYTES * heads * head * head + CONV_BYTES * 3 * (kernel - 1) * width
    return Mixer("linear attention", found, state_bytes=state)


def _make_mamba2(config: Config, d: ModelDims, layer: int) -> Mixer:
    head = config.get_count("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim") or 64
    expand = config.get_number("mamba_expand", "expand") or 2
    inner = config.get_count("mamba_d_ssm", "mamba_intermediate_size") or 0
    heads = config.get_count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    if heads is None:
        heads = config.get_count("num_heads") or int(expand * d.hidden) // head
    inner = inner or heads * head
    state = config.require_count("ssm_state_size", "mamba_d_state", "state_size", "mamba_state_dim")
    groups = config.get_count("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    kernel = config.get_count("conv_kernel", "mamba_d_conv") or 4
    conv = inner + 2 * groups * state
    base = f"layers.{layer}.{'mixer' if d.type in ('nemotron_h', 'mamba2') else 'mamba'}"
    found = [
        Weight(f"{base}.in_proj", "state space", inner + conv + heads, d.hidden),
        Weight(f"{base}.out_proj", "state space", d.hidden, inner),
        *make_vectors("state space", base, [("conv1d", conv * (kernel + 1)), ("scalars", 3 * heads), ("norm", inner)]),
    ]
    held = STATE_BYTES * inner * state + CONV_BYTES * (kernel - 1) * conv
    return Mixer("state space", found, state_bytes=held)


def _make_mamba1(config: Config, d: ModelDims, layer: int) -> Mixer:
    state = config.require_count("mamba_d_state", "state_size")
    kernel = config.get_count("mamba_d_conv", "conv_kernel") or 4
    inner = config.get_count("intermediate_size") if d.type in ("mamba", "falcon_mamba") else None
    inner = inner or int((config.get_number("mamba_expand", "expand") or 2) * d.hidden)
    rank = config.get("mamba_dt_rank", "time_step_rank")
    rank = check_count("mamba_dt_rank", rank) if isinstance(rank, int) else -(-d.hidden // 16)
    base = f"layers.{layer}.mamba"
    found = [
        Weight(f"{base}.in_proj", "state space", 2 * inner, d.hidden),
        Weight(f"{base}.x_proj", "state space", rank + 2 * state, inner),
        Weight(f"{base}.dt_proj", "state space", inner, rank),
        Weight(f"{base}.out_proj", "state space", d.hidden, inner),
        *make_vectors(
            "state space", base, [("conv1d", inner * (kernel + 1)), ("A_log", inner * state), ("vectors", 2 * inner)]
        ),
    ]
    return Mixer("state space", found, state_bytes=STATE_BYTES * inner * state + CONV_BYTES * (kernel - 1) * inner)


def _make_short_conv(config: Config, d: ModelDims, layer: int) -> Mixer:
    length, base = config.get_count("conv_L_cache") or 3, f"layers.{layer}.conv"
    found = [
        Weight(f"{base}.in_proj", "attention", 3 * d.hidden, d.hidden),
        Weight(f"{base}.out_proj", "attention", d.hidden, d.hidden),
        *make_vectors("attention", base, [("conv", d.hidden * length)]),
    ]
    return Mixer("short convolution", found, state_bytes=CONV_BYTES * (length - 1) * d.hidden)


def _make_lightning(d: ModelDims, layer: int) -> Mixer:
    """Linear attention of MiniMax's first models."""
    width, base = d.heads * d.head_dim, f"layers.{layer}.self_attn"
    found = [
        Weight(f"{base}.qkv_proj", "attention", 3 * width, d.hidden),
        Weight(f"{base}.output_gate", "attention", width, d.hidden),
        Weight(f"{base}.out_proj", "attention", d.hidden, width),
        *make_vectors("norms", base, [("norm", width)]),
    ]
    return Mixer("linear attention", found, state_bytes=STATE_BYTES * width * d.head_dim)


def read_nas_block(config: Config, layer: int, half: str) -> Config:
    """A layer's attention or feed-forward configuration after neural architecture search (Nemotron)."""
    blocks: Any = config.get("block_configs")
    block = blocks[layer] if isinstance(blocks, list) and layer < len(blocks) else None
    found = block.get(half) if isinstance(block, dict) else None
    if not isinstance(found, dict):
        raise InvalidConfig(f"block_configs does not describe the {half} of layer {layer}")
    return Config(found, config)


def _make_nas_mixer(config: Config, d: ModelDims, layer: int) -> Mixer:
    block = read_nas_block(config, layer, "attention")
    if block.get_flag("no_op"):
        return Mixer("no cache")
    if block.get_flag("replace_with_linear"):
        return Mixer("no cache", [Weight(f"layers.{layer}.self_attn.linear_attn", "attention", d.hidden, d.hidden)])
    kv_heads = d.heads // block.require_count("n_heads_in_group")
    found = _make_softmax_weights(config, d, layer, kv_heads, d.head_dim, d.value_dim)
    values = kv_heads * (d.head_dim + d.value_dim)
    return Mixer("full attention", found, values, kv_heads=kv_heads, key_dim=d.head_dim, value_dim=d.value_dim)
