"""config.json: the weights and caches of a Hugging Face model, computed from its configuration.

Every weight is listed by name and shape as the architecture defines it. Parameters, active parameters and bytes under a
quantization all come from this list. No code of a model is ever run; `auto_map` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bedplate.errors import UsageError
from bedplate.facts.attention import (
    ENCODERS,
    Mixer,
    ModelDims,
    list_layer_kinds,
    make_mixers,
    read_dims,
    read_nas_block,
)
from bedplate.facts.encoder_decoder import is_encoder_decoder, read_encoder_decoder
from bedplate.facts.hf_fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_FIGURE,
    Config,
    InvalidConfig,
    Weight,
    escape_value,
    make_vectors,
)
from bedplate.facts.quantization import Storage, read_storage
from bedplate.facts.vision import make_vision_weights
from bedplate.values.model import LayerGroup, LayerKind, Model, ModelPart, Task, TensorGroup

_TEXT = ("text_config", "llm_config", "language_config", "language_model", "thinker_config")
_NOT_GATED = {
    "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "nemotron",
    "nemotron_h",
    "arcee",
} | (ENCODERS - {"modernbert", "new", "nomic_bert", "eurobert", "jina_bert", "neobert"})  # fmt: skip
_TIED_BY_DEFAULT = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere", "cohere2", "gpt2", "opt",
    "bloom", "falcon",
    "gpt_bigcode", "starcoder2", "lfm2", "lfm2_moe", "smollm3", "mamba", "mamba2",
    "falcon_mamba",
} | ENCODERS  # fmt: skip
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4"}
_FEED = {
    "mixtral": "block_sparse_moe",
    "minimax_m2": "block_sparse_moe",
    "nemotron_h": "mixer",
    "deepseek_v4": "ffn",
    "deepseek_ref": "ffn",
}


@dataclass(frozen=True, slots=True)
class ModelAnatomy:
    """The weights and layers that a configuration describes."""

    dims: ModelDims
    weights: list[Weight]
    mixers: list[Mixer]
    moe: ExpertDims | None
    tied: bool
    intermediate: int | None


@dataclass(frozen=True, slots=True)
class ExpertDims:
    count: int
    used: int
    intermediate: int
    shared: int | None
    shared_intermediate: int
    latent: int | None
    layers: tuple[bool, ...]


def get_text_config(config: Config) -> Config:
    """The language model's part of a multimodal configuration."""
    for name in _TEXT:
        inner = config.get_section(name)
        if inner is not None:
            return get_text_config(inner) if name == "thinker_config" else inner
    return config


def read_anatomy(config: Config) -> ModelAnatomy:
    """The language model's weights, layer by layer.

    Vision encoders and multi-token-prediction heads are separate parts.
    """
    text = get_text_config(config)
    if is_encoder_decoder(text):
        both = read_encoder_decoder(text)
        return ModelAnatomy(both.dims, both.weights, both.mixers, None, both.tied, both.intermediate)
    d = read_dims(text)
    found = make_mixers(text, d)
    words = list_layer_kinds(text, d) if d.type not in ENCODERS else ["full"] * d.layers
    moe = _read_experts(text, d, words)
    weights: list[Weight] = []
    last: list[Weight] = []
    for layer, mixer in enumerate(found):
        last = (
            mixer.weights
            + _make_feed_forward_weights(text, d, layer, words[layer], moe)
            + _make_norm_weights(text, d, layer)
        )
        weights += last
    tied = _has_tied_embeddings(config, text, d)
    weights += _make_end_weights(text, d, tied)
    weights += _make_mtp_weights(text, d, last, words, moe)
    weights += make_vision_weights(config, text, d.hidden)
    return ModelAnatomy(
        d,
        weights,
        found,
        moe,
        tied,
        text.get_count("intermediate_size", "ffn_dim", "n_inner", "block_ff_dim", "decoder_ffn_dim", "d_ff"),
    )


def _has_tied_embeddings(config: Config, text: Config, d: ModelDims) -> bool:
    for holder in (text, config):
        value = holder.get("tie_word_embeddings", "tie_embedding")
        if value is not None:
            return bool(value)
    return d.type in _TIED_BY_DEFAULT or (config.get_text("model_type") or "") in _TIED_BY_DEFAULT


def _make_end_weights(text: Config, d: ModelDims, tied: bool) -> list[Weight]:
    """Embedding, output, and the weights between them and the layers."""
    vocabulary = text.require_count("vocab_size", most=1 << 28)
    found = [Weight("embed_tokens", "output" if tied else "embedding", vocabulary, d.hidden, matrix=False)]
    if not tied:
        found.append(Weight("lm_head", "output", vocabulary, d.hidden))
    found += make_vectors("norms", "final", [("norm", d.hidden)])
    positions = text.get_count("max_position_embeddings", "n_positions", most=MAX_CONTEXT) or 0
    if d.type in ENCODERS or d.type in ("gpt2", "opt", "gpt_bigcode"):
        rotary = text.get_text("position_embedding_type") == "rotary" or d.type in (
            "modernbert",
            "nomic_bert",
            "new",
            "eurobert",
            "neobert",
        )
        rows = (0 if rotary else positions) + (text.get_count("type_vocab_size") or 0)
        found += make_vectors("embedding", "embeddings", [("positions", rows * d.hidden), ("norm", 2 * d.hidden)])
        if d.type in ("bert", "roberta", "xlm-roberta", "mpnet"):
            found.append(Weight("pooler.dense", "output", d.hidden, d.hidden))
    if per_layer := text.get_count("hidden_size_per_layer_input"):
        rows = text.get_count("vocab_size_per_layer_input") or vocabulary
        found.append(Weight("embed_tokens_per_layer", "embedding", rows, d.layers * per_layer, matrix=False))
        found.append(Weight("per_layer_model_projection", "mlp", d.layers * per_layer, d.hidden))
    if d.type == "gemma3n_text":
        inputs = text.get_count("altup_num_inputs") or 4
        found.append(Weight("altup_projections", "mlp", 2 * (inputs - 1) * d.hidden, d.hidden))
    if d.type in ("deepseek_v4", "deepseek_ref"):
        streams = text.get_count("hc_mult") or 0
        found += make_vectors("attention", "final", [("hc_head", streams * streams * d.hidden + streams + 1)])
    return found


def _make_norm_weights(text: Config, d: ModelDims, layer: int) -> list[Weight]:
    count = 4 if d.type in _FOUR_NORMS else 1 if d.type == "nemotron_h" else 2
    if d.type == "gemma4_text" and text.get_flag("enable_moe_block"):
        count = 7
    size = count * d.hidden * (2 if d.type in _NOT_GATED and d.type != "nemotron_h" else 1)
    found = make_vectors("norms", f"layers.{layer}", [("norms", size)])
    if per_layer := text.get_count("hidden_size_per_layer_input"):
        found.append(Weight(f"layers.{layer}.per_layer_input_gate", "mlp", per_layer, d.hidden))
        found.append(Weight(f"layers.{layer}.per_layer_projection", "mlp", d.hidden, per_layer))
    if d.type == "gemma3n_text" and (rank := text.get_count("laurel_rank")):
        found.append(Weight(f"layers.{layer}.laurel", "mlp", 2 * rank, d.hidden))
    return found


def _read_experts(text: Config, d: ModelDims, words: list[str]) -> ExpertDims | None:
    count = text.get_count("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", most=MAX_EXPERTS)
    if (
        not count
        or (count == 1 and not text.has("moe_intermediate_size"))
        or (d.type == "gemma4_text" and not text.get_flag("enable_moe_block"))
    ):
        return None
    used = text.get_count(
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "experts_per_token",
        "top_k", "num_selected_experts",
        most=MAX_EXPERTS,
    )  # fmt: skip
    if not used or used > count:
        raise InvalidConfig(f"it uses {escape_value(used)} of {count:,} experts")
    intermediate = text.get_count(
        "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"
    )
    if not intermediate:
        raise InvalidConfig("moe_intermediate_size is not in the configuration")
    number = text.get_count(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", most=MAX_EXPERTS
    )
    width = text.get_count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "shared_intermediate_size",
    )
    if d.type in ("llama4", "llama4_text"):
        number, width = 1, intermediate
    elif width is None:
        own = text.require_count("intermediate_size") if d.type == "hunyuan_v1_moe" else intermediate
        width = (number or 0) * own
    latent = text.get_count("moe_latent_size", "routed_expert_hidden_size")
    shared = number if number else (1 if width else None)
    return ExpertDims(count, used, intermediate, shared, width, latent, _find_moe_layers(text, d, words))


def _find_moe_layers(text: Config, d: ModelDims, words: list[str]) -> tuple[bool, ...]:
    """Which layers have experts. Models state this in many ways."""
    if "moe" in words:
        return tuple(word == "moe" for word in words)
    numbers = range(d.layers)
    if listed := text.get_per_layer("mlp_layer_types", d.layers):
        return tuple(entry == "sparse" for entry in listed)
    if isinstance(text.get("moe_layer_freq"), list):
        return tuple(bool(mark) for mark in text.get_per_layer("moe_layer_freq", d.layers) or ())
    if isinstance(enumerated := text.get("moe_layers_enum"), str):
        chosen = {int(piece) for piece in enumerated.split(",")[:4096] if piece.strip().isdigit()}
        return tuple(layer in chosen for layer in numbers)
    if isinstance(chosen_layers := text.get("moe_layers"), list):
        return tuple(layer in chosen_layers for layer in numbers)
    if step := text.get_count("interleave_moe_layer_step"):
        return tuple((layer + 1) % step == 0 for layer in numbers)
    if period := text.get_count("expert_layer_period"):
        offset = text.get_count("expert_layer_offset") or 0
        return tuple(layer % period == offset for layer in numbers)
    if text.has("moe_layer_start_index"):
        first, step = text.get_count("moe_layer_start_index") or 0, text.get_count("moe_layer_interval") or 1
        return tuple(layer >= first and (layer + 1) % step == 0 for layer in numbers)
    dense = text.get_count("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped") or 0
    freq = text.get_count("moe_layer_freq", "decoder_sparse_step") or 1
    only = text.get("mlp_only_layers")
    skipped = {layer for layer in only if isinstance(layer, int)} if isinstance(only, list) else set()
    shift = 1 if text.has("decoder_sparse_step") else 0
    return tuple(layer >= dense and (layer + shift) % freq == 0 and layer not in skipped for layer in numbers)


def _make_feed_forward_weights(
    text: Config, d: ModelDims, layer: int, word: str, moe: ExpertDims | None
) -> list[Weight]:
    if d.type in ("mamba", "mamba2", "falcon_mamba") or (d.type == "nemotron_h" and word not in ("mlp", "moe")):
        return []
    base = f"layers.{layer}.{_FEED.get(d.type, 'mlp')}"
    if text.has("block_configs"):
        return _make_nas_weights(text, d, layer, base)
    if moe is not None and moe.layers[layer]:
        found = _make_moe_weights(d, moe, base, layer)
        # Gemma 4 adds its experts to a dense network instead of replacing it.
        return found + (_make_dense_weights(text, d, layer, base) if d.type == "gemma4_text" else [])
    return _make_dense_weights(text, d, layer, base)


def _make_dense_weights(text: Config, d: ModelDims, layer: int, base: str) -> list[Weight]:
    width = text.get_count("intermediate_size_mlp", "dense_intermediate_size")
    if width is None:
        width = text.get_layer_count("intermediate_size", layer, d.layers)
    if width is None or d.type == "lfm2":
        width = (
            _compute_lfm2_width(text)
            if d.type == "lfm2"
            else text.get_count("ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "hidden_dim")
        )
    if width is None:
        width = 4 * d.hidden
    if text.get_flag("use_double_wide_mlp") and layer >= d.layers - (text.get_count("num_kv_shared_layers") or 0):
        width *= 2
    return _make_mlp_weights("mlp", base, d, width)


def _compute_lfm2_width(text: Config) -> int:
    """LFM2 states a width that its code reduces to two thirds and rounds up."""
    width = text.get_count("block_ff_dim", "intermediate_size") or 0
    if text.get_flag("block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        width = int((text.get_number("block_ffn_dim_multiplier") or 1.0) * width)
        multiple = text.get_count("block_multiple_of") or 256
        width = -(-width // multiple) * multiple
    return width


def _make_mlp_weights(
    part: str, base: str, d: ModelDims, width: int, inputs: int | None = None, copies: int = 1, used: int | None = None
) -> list[Weight]:
    inputs = d.hidden if inputs is None else inputs
    ups = 1 if d.type in _NOT_GATED else 2
    names = ("up_proj",) if ups == 1 else ("gate_proj", "up_proj")
    found = [Weight(f"{base}.{name}", part, width, inputs, copies, used) for name in names]
    found.append(Weight(f"{base}.down_proj", part, inputs, width, copies, used))
    if d.type in _NOT_GATED and d.type not in ("nemotron_h", "nemotron", "falcon", "arcee"):
        found += make_vectors(part, base, [("bias", width + inputs)])
    return found


def _make_moe_weights(d: ModelDims, moe: ExpertDims, base: str, layer: int) -> list[Weight]:
    experts = f"layers.{layer}.experts" if d.type == "gemma4_text" else f"{base}.experts"
    found = _make_mlp_weights("experts", experts, d, moe.intermediate, moe.latent, moe.count, moe.used)
    router = "router" if d.type in ("gpt_oss", "gemma4_text") else "gate"
    found.append(Weight(f"{base}.{router}", "router", moe.count, d.hidden))
    if moe.latent:
        found.append(Weight(f"{base}.latent_in_proj", "experts", moe.latent, d.hidden))
        found.append(Weight(f"{base}.latent_out_proj", "experts", d.hidden, moe.latent))
    if moe.shared_intermediate:
        name = "shared_expert" if d.type.startswith(("qwen", "llama4")) else "shared_experts"
        found += _make_mlp_weights("shared experts", f"{base}.{name}", d, moe.shared_intermediate)
        if d.type.startswith("qwen"):
            found.append(Weight(f"{base}.shared_expert_gate", "router", 1, d.hidden))
    if d.type == "gpt_oss":
        biases = 2 * moe.intermediate + d.hidden
        found.append(Weight(f"{base}.experts.bias", "experts", biases, 1, moe.count, moe.used, matrix=False))
        found += make_vectors("router", base, [("router_bias", moe.count)])
    return found


def _make_nas_weights(text: Config, d: ModelDims, layer: int, base: str) -> list[Weight]:
    block = read_nas_block(text, layer, "ffn")
    if block.get_flag("no_op"):
        return []
    if block.get_flag("replace_with_linear"):
        return [Weight(f"{base}.linear_mlp", "mlp", d.hidden, d.hidden)]
    factor = block.get_number("ffn_mult")
    if factor is None or factor > 1024:
        raise InvalidConfig(f"ffn_mult of layer {layer} is {escape_value(factor)}")
    width = int(2 * factor * d.hidden / 3)
    return _make_mlp_weights("mlp", base, d, -(-width // 256) * 256)


def _make_mtp_weights(
    text: Config, d: ModelDims, last: list[Weight], words: list[str], moe: ExpertDims | None
) -> list[Weight]:
    """Multi-token-prediction heads: each is a layer like the last one, plus the weights that connect it.

    They use the model's own embedding and output, even if files hold a second copy.
    """
    count = text.get_count("num_nextn_predict_layers", "mtp_num_hidden_layers", most=64)
    if count is None and text.get_flag("use_mtp"):
        count = (text.get_count("num_mtp_modules", most=64) or 0) * (
            text.get_count("mtp_transformer_layers", most=8) or 1
        )
    if not count:
        return []
    layer = last
    if d.type == "nemotron_h":
        attending = words.index("full") if "full" in words else None
        layer = make_mixers(text, d)[attending].weights if attending is not None else []
        layer = layer + (_make_moe_weights(d, moe, "layers.0.mixer", 0) if moe else [])
    elif d.type.startswith("step3p"):
        # Step's heads are dense although the layers before them are not.
        layer = make_mixers(text, d)[-1].weights + _make_dense_weights(text, d, d.layers - 1, "layers.0.mlp")
    elif d.type.startswith("qwen3_5") or d.type == "qwen3_next":
        whole = words.index("full") if "full" in words else d.layers - 1
        layer = make_mixers(text, d)[whole].weights + [weight for weight in last if ".mlp." in weight.name]
    joined = [
        *layer,
        Weight("eh_proj", "mtp", d.hidden, 2 * d.hidden),
        *make_vectors("mtp", "mtp", [("norms", 3 * d.hidden)]),
    ]
    found = []
    for number in range(count):
        for weight in joined:
            tail = weight.name.split(".", 2)[-1]
            found.append(
                weight._replace(name=f"layers.{d.layers + number}.mtp.{tail}", part="mtp", matrix=weight.matrix)
            )
    return found


def read_config(fields: object, *, name: str, quant_file: object = None, origin: str | None = None) -> Model:
    """The model that a configuration describes, with every size computed from it."""
    if not isinstance(fields, Mapping):
        raise UsageError(f"the configuration of {name} is not a JSON object", hint="specify a model's config.json")
    try:
        return _read_model(Config(fields), name, Config(quant_file) if isinstance(quant_file, dict) else None, origin)
    except InvalidConfig as problem:
        raise UsageError(
            f"the configuration of {name} does not describe a model that bedplate can plan for",
            cause=str(problem),
            hint="check config.json; or use a GGUF file of the same model",
        ) from None
    except RecursionError:
        raise UsageError(f"the configuration of {name} is nested too deeply", hint="check config.json") from None


def _read_model(config: Config, name: str, quant_file: Config | None, origin: str | None) -> Model:
    if config.get_text("model_type") is None and not any(
        config.has(key) for key in ("architectures", "hidden_size", *_TEXT)
    ):
        raise InvalidConfig("it has neither model_type nor hidden_size")
    found = read_anatomy(config)
    stored = read_storage(config, quant_file)
    parts, groups = sum_weights(found.weights, stored)
    return build_model(config, found, stored, parts, groups, name=name, origin=origin)


PARTS = (
    "embedding", "encoder", "attention", "state space", "mlp", "experts", "shared experts", "router", "norms", "output",
    "vision", "mtp",
)  # fmt: skip


def sum_weights(weights: list[Weight], stored: Storage) -> tuple[dict[str, ModelPart], tuple[TensorGroup, ...]]:
    """Sum the weights by purpose and by storage type."""
    parts: dict[str, list[int]] = {}
    types: dict[str, list[int]] = {}
    for weight in weights:
        size = stored.compute_bytes(weight)
        sums = parts.setdefault(weight.part, [0, 0, 0])
        for position, figure in enumerate((weight.elements, weight.active_elements, size)):
            sums[position] += figure
        if weight.part != "mtp":
            kind = types.setdefault(stored.get_label(weight), [0, 0, 0])
            for position, figure in enumerate((weight.copies, weight.elements, size)):
                kind[position] += figure
    ordered = sorted(types.items(), key=lambda item: (-item[1][2], item[0]))
    return (
        {
            part: ModelPart(
                name=part, parameters=parts[part][0], active_parameters=parts[part][1], bytes=parts[part][2]
            )
            for part in PARTS
            if part in parts
        },
        tuple(TensorGroup(type=kind, tensors=n, parameters=p, bytes=b) for kind, (n, p, b) in ordered),
    )


def build_model(
    config: Config,
    found: ModelAnatomy,
    stored: Storage,
    parts: dict[str, ModelPart],
    groups: tuple[TensorGroup, ...],
    *,
    name: str,
    origin: str | None,
) -> Model:
    text, d, moe = get_text_config(config), found.dims, found.moe
    own = [part for key, part in parts.items() if key not in ("vision", "mtp")]
    vision, ahead = parts.get("vision"), parts.get("mtp")
    layers = group_layers(found.mixers)
    parameters = sum(part.parameters for part in own)
    weight_bytes = sum(part.bytes for part in own) + (vision.bytes if vision else 0)
    per_token = round(sum(group.kv_bytes_per_token for group in layers))
    if (
        max(parameters, weight_bytes, per_token, *(group.kv_bytes_window + group.state_bytes for group in layers), 0)
        > MAX_FIGURE
    ):
        raise InvalidConfig("its sizes exceed any computer's memory")
    architectures = config.get("architectures")
    first = (
        architectures[0]
        if isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
        else None
    )
    details = stored.details
    return Model(
        name=name,
        format="safetensors",
        origin=origin,
        architecture=_make_printable(config.get_text("model_type") or d.type or first or "unknown"),
        task=find_task(first, d.type),
        parameters=parameters,
        active_parameters=sum(part.active_parameters for part in own),
        weight_bytes=weight_bytes,
        quantization=_choose_label(groups, stored),
        tensor_groups=groups,
        num_layers=d.layers,
        hidden_size=d.hidden,
        num_heads=d.heads or None,
        num_kv_heads=max((mixer.kv_heads or 0 for mixer in found.mixers), default=0) or None,
        num_experts=moe.count if moe else None,
        num_experts_active=moe.used if moe else None,
        vocab_size=text.get_count("vocab_size", most=1 << 28),
        max_context=d.context,
        kv_bytes_per_token=per_token,
        kv_bytes_window=sum(group.kv_bytes_window for group in layers),
        state_bytes=sum(group.state_bytes for group in layers),
        parts=tuple(parts.values()),
        layers=layers,
        quantization_details=details,
        mtp_parameters=ahead.parameters if ahead else 0,
        mtp_weight_bytes=ahead.bytes if ahead else 0,
        vision_parameters=vision.parameters if vision else 0,
        vision_weight_bytes=vision.bytes if vision else 0,
        head_dim=d.head_dim or None,
        intermediate_size=found.intermediate,
        moe_intermediate_size=moe.intermediate if moe else None,
        num_shared_experts=moe.shared if moe else None,
        shared_expert_intermediate_size=(moe.shared_intermediate or None) if moe else None,
        num_moe_layers=sum(moe.layers) if moe else None,
        kv_lora_rank=text.get_count("kv_lora_rank"),
        qk_rope_head_dim=text.get_count("qk_rope_head_dim"),
        sliding_window=max((mixer.window or 0 for mixer in found.mixers), default=0) or None,
        tied_embeddings=found.tied,
    )


def _choose_label(groups: tuple[TensorGroup, ...], stored: Storage) -> str | None:
    """The common name of the type that holds most weights."""
    if not groups:
        return None
    main = max(groups, key=lambda group: group.parameters)
    details = stored.details
    if details is not None and details.method in ("gptq", "awq") and main.type.startswith("INT"):
        return f"{details.method.upper()}-{main.type.title()}"
    return main.type


def group_layers(found: list[Mixer]) -> tuple[LayerGroup, ...]:
    """Layers grouped by kind and shape, in order of first occurrence."""
    alike: dict[tuple[LayerKind, float, int | None, int, int], list[Mixer]] = {}
    for mixer in found:
        key = (mixer.kind, mixer.kv_values, mixer.window, mixer.window_values, mixer.state_bytes)
        alike.setdefault(key, []).append(mixer)
    groups = []
    for members in alike.values():
        first, count = members[0], len(members)
        held = first.window_values * (first.window or 0) + first.fixed_values
        groups.append(
            LayerGroup(
                kind=first.kind,
                count=count,
                kv_bytes_per_token=2 * first.kv_values * count,
                window=first.window,
                kv_bytes_window=2 * held * count,
                state_bytes=first.state_bytes * count,
                kv_heads=first.kv_heads,
                key_dim=first.key_dim,
                value_dim=first.value_dim,
            )
        )
    return tuple(groups)


def find_task(architecture: str | None, model_type: str) -> Task:
    name = architecture or ""
    if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return "classify"
    if model_type == "whisper" or name.endswith("ForSpeechSeq2Seq"):
        return "transcribe" if model_type == "whisper" else "other"
    if model_type in ENCODERS or name.endswith("EncoderModel"):
        return "embed"
    return "embed" if name.endswith("Model") and not name.endswith("LMHeadModel") else "generate"


def _make_printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text[:80])
