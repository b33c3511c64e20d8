"""config.json: the weights and caches of a Hugging Face model, computed from its configuration.

Every weight is listed by name and shape as the architecture defines it. Parameters, active parameters and bytes under a
quantization all come from this list. No code of a model is ever run; `auto_map` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bedplate.errors import BadQuestion
from bedplate.facts.attention import ENCODERS, Dims, Mixer, dims, kinds, mixers, nas_block
from bedplate.facts.encoder_decoder import has_two_sides, sides
from bedplate.facts.hf_fields import MAX_CONTEXT, MAX_EXPERTS, MAX_FIGURE, Config, Unplannable, Weight, shown, vectors
from bedplate.facts.quantization import Storage, storage
from bedplate.facts.vision import vision_weights
from bedplate.values.model import LayerGroup, LayerKind, Model, Part, Task, TensorGroup

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
class Anatomy:
    """The weights and layers that a configuration describes."""

    dims: Dims
    weights: list[Weight]
    mixers: list[Mixer]
    moe: Experts | None
    tied: bool
    intermediate: int | None


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    used: int
    intermediate: int
    shared: int | None
    shared_intermediate: int
    latent: int | None
    layers: tuple[bool, ...]


def text_config(config: Config) -> Config:
    """The language model's part of a multimodal configuration."""
    for name in _TEXT:
        inner = config.sub(name)
        if inner is not None:
            return text_config(inner) if name == "thinker_config" else inner
    return config


def anatomy(config: Config) -> Anatomy:
    """The language model's weights, layer by layer.

    Vision encoders and multi-token-prediction heads are separate parts.
    """
    text = text_config(config)
    if has_two_sides(text):
        both = sides(text)
        return Anatomy(both.dims, both.weights, both.mixers, None, both.tied, both.intermediate)
    d = dims(text)
    found = mixers(text, d)
    words = kinds(text, d) if d.type not in ENCODERS else ["full"] * d.layers
    moe = _experts(text, d, words)
    weights: list[Weight] = []
    last: list[Weight] = []
    for layer, mixer in enumerate(found):
        last = mixer.weights + _feed_forward(text, d, layer, words[layer], moe) + _norms(text, d, layer)
        weights += last
    tied = _tied(config, text, d)
    weights += _ends(text, d, tied)
    weights += _mtp_heads(text, d, last, words, moe)
    weights += vision_weights(config, text, d.hidden)
    return Anatomy(
        d,
        weights,
        found,
        moe,
        tied,
        text.count("intermediate_size", "ffn_dim", "n_inner", "block_ff_dim", "decoder_ffn_dim", "d_ff"),
    )


def _tied(config: Config, text: Config, d: Dims) -> bool:
    for holder in (text, config):
        value = holder.get("tie_word_embeddings", "tie_embedding")
        if value is not None:
            return bool(value)
    return d.type in _TIED_BY_DEFAULT or (config.text("model_type") or "") in _TIED_BY_DEFAULT


def _ends(text: Config, d: Dims, tied: bool) -> list[Weight]:
    """Embedding, output, and the weights between them and the layers."""
    vocabulary = text.need("vocab_size", most=1 << 28)
    found = [Weight("embed_tokens", "output" if tied else "embedding", vocabulary, d.hidden, matrix=False)]
    if not tied:
        found.append(Weight("lm_head", "output", vocabulary, d.hidden))
    found += vectors("norms", "final", [("norm", d.hidden)])
    positions = text.count("max_position_embeddings", "n_positions", most=MAX_CONTEXT) or 0
    if d.type in ENCODERS or d.type in ("gpt2", "opt", "gpt_bigcode"):
        rotary = text.text("position_embedding_type") == "rotary" or d.type in (
            "modernbert",
            "nomic_bert",
            "new",
            "eurobert",
            "neobert",
        )
        rows = (0 if rotary else positions) + (text.count("type_vocab_size") or 0)
        found += vectors("embedding", "embeddings", [("positions", rows * d.hidden), ("norm", 2 * d.hidden)])
        if d.type in ("bert", "roberta", "xlm-roberta", "mpnet"):
            found.append(Weight("pooler.dense", "output", d.hidden, d.hidden))
    if per_layer := text.count("hidden_size_per_layer_input"):
        rows = text.count("vocab_size_per_layer_input") or vocabulary
        found.append(Weight("embed_tokens_per_layer", "embedding", rows, d.layers * per_layer, matrix=False))
        found.append(Weight("per_layer_model_projection", "mlp", d.layers * per_layer, d.hidden))
    if d.type == "gemma3n_text":
        inputs = text.count("altup_num_inputs") or 4
        found.append(Weight("altup_projections", "mlp", 2 * (inputs - 1) * d.hidden, d.hidden))
    if d.type in ("deepseek_v4", "deepseek_ref"):
        streams = text.count("hc_mult") or 0
        found += vectors("attention", "final", [("hc_head", streams * streams * d.hidden + streams + 1)])
    return found


def _norms(text: Config, d: Dims, layer: int) -> list[Weight]:
    count = 4 if d.type in _FOUR_NORMS else 1 if d.type == "nemotron_h" else 2
    if d.type == "gemma4_text" and text.flag("enable_moe_block"):
        count = 7
    size = count * d.hidden * (2 if d.type in _NOT_GATED and d.type != "nemotron_h" else 1)
    found = vectors("norms", f"layers.{layer}", [("norms", size)])
    if per_layer := text.count("hidden_size_per_layer_input"):
        found.append(Weight(f"layers.{layer}.per_layer_input_gate", "mlp", per_layer, d.hidden))
        found.append(Weight(f"layers.{layer}.per_layer_projection", "mlp", d.hidden, per_layer))
    if d.type == "gemma3n_text" and (rank := text.count("laurel_rank")):
        found.append(Weight(f"layers.{layer}.laurel", "mlp", 2 * rank, d.hidden))
    return found


def _experts(text: Config, d: Dims, words: list[str]) -> Experts | None:
    count = text.count("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", most=MAX_EXPERTS)
    if (
        not count
        or (count == 1 and not text.has("moe_intermediate_size"))
        or (d.type == "gemma4_text" and not text.flag("enable_moe_block"))
    ):
        return None
    used = text.count(
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "experts_per_token",
        "top_k", "num_selected_experts",
        most=MAX_EXPERTS,
    )  # fmt: skip
    if not used or used > count:
        raise Unplannable(f"it uses {shown(used)} of {count:,} experts")
    intermediate = text.count("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
    if not intermediate:
        raise Unplannable("moe_intermediate_size is not in the configuration")
    number = text.count(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", most=MAX_EXPERTS
    )
    width = text.count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "shared_intermediate_size",
    )
    if d.type in ("llama4", "llama4_text"):
        number, width = 1, intermediate
    elif width is None:
        own = text.need("intermediate_size") if d.type == "hunyuan_v1_moe" else intermediate
        width = (number or 0) * own
    latent = text.count("moe_latent_size", "routed_expert_hidden_size")
    shared = number if number else (1 if width else None)
    return Experts(count, used, intermediate, shared, width, latent, _moe_layers(text, d, words))


def _moe_layers(text: Config, d: Dims, words: list[str]) -> tuple[bool, ...]:
    """Which layers have experts. Models state this in many ways."""
    if "moe" in words:
        return tuple(word == "moe" for word in words)
    numbers = range(d.layers)
    if listed := text.per_layer("mlp_layer_types", d.layers):
        return tuple(entry == "sparse" for entry in listed)
    if isinstance(text.get("moe_layer_freq"), list):
        return tuple(bool(mark) for mark in text.per_layer("moe_layer_freq", d.layers) or ())
    if isinstance(enumerated := text.get("moe_layers_enum"), str):
        chosen = {int(piece) for piece in enumerated.split(",")[:4096] if piece.strip().isdigit()}
        return tuple(layer in chosen for layer in numbers)
    if isinstance(chosen_layers := text.get("moe_layers"), list):
        return tuple(layer in chosen_layers for layer in numbers)
    if step := text.count("interleave_moe_layer_step"):
        return tuple((layer + 1) % step == 0 for layer in numbers)
    if period := text.count("expert_layer_period"):
        offset = text.count("expert_layer_offset") or 0
        return tuple(layer % period == offset for layer in numbers)
    if text.has("moe_layer_start_index"):
        first, step = text.count("moe_layer_start_index") or 0, text.count("moe_layer_interval") or 1
        return tuple(layer >= first and (layer + 1) % step == 0 for layer in numbers)
    dense = text.count("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped") or 0
    freq = text.count("moe_layer_freq", "decoder_sparse_step") or 1
    only = text.get("mlp_only_layers")
    skipped = {layer for layer in only if isinstance(layer, int)} if isinstance(only, list) else set()
    shift = 1 if text.has("decoder_sparse_step") else 0
    return tuple(layer >= dense and (layer + shift) % freq == 0 and layer not in skipped for layer in numbers)


def _feed_forward(text: Config, d: Dims, layer: int, word: str, moe: Experts | None) -> list[Weight]:
    if d.type in ("mamba", "mamba2", "falcon_mamba") or (d.type == "nemotron_h" and word not in ("mlp", "moe")):
        return []
    base = f"layers.{layer}.{_FEED.get(d.type, 'mlp')}"
    if text.has("block_configs"):
        return _nas_feed_forward(text, d, layer, base)
    if moe is not None and moe.layers[layer]:
        found = _moe(d, moe, base, layer)
        # Gemma 4 adds its experts to a dense network instead of replacing it.
        return found + (_dense(text, d, layer, base) if d.type == "gemma4_text" else [])
    return _dense(text, d, layer, base)


def _dense(text: Config, d: Dims, layer: int, base: str) -> list[Weight]:
    width = text.count("intermediate_size_mlp", "dense_intermediate_size")
    if width is None:
        width = text.layer_count("intermediate_size", layer, d.layers)
    if width is None or d.type == "lfm2":
        width = (
            _lfm2_width(text)
            if d.type == "lfm2"
            else text.count("ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "hidden_dim")
        )
    if width is None:
        width = 4 * d.hidden
    if text.flag("use_double_wide_mlp") and layer >= d.layers - (text.count("num_kv_shared_layers") or 0):
        width *= 2
    return _mlp("mlp", base, d, width)


def _lfm2_width(text: Config) -> int:
    """LFM2 states a width that its code reduces to two thirds and rounds up."""
    width = text.count("block_ff_dim", "intermediate_size") or 0
    if text.flag("block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        width = int((text.number("block_ffn_dim_multiplier") or 1.0) * width)
        multiple = text.count("block_multiple_of") or 256
        width = -(-width // multiple) * multiple
    return width


def _mlp(
    part: str, base: str, d: Dims, width: int, inputs: int | None = None, copies: int = 1, used: int | None = None
) -> list[Weight]:
    inputs = d.hidden if inputs is None else inputs
    ups = 1 if d.type in _NOT_GATED else 2
    names = ("up_proj",) if ups == 1 else ("gate_proj", "up_proj")
    found = [Weight(f"{base}.{name}", part, width, inputs, copies, used) for name in names]
    found.append(Weight(f"{base}.down_proj", part, inputs, width, copies, used))
    if d.type in _NOT_GATED and d.type not in ("nemotron_h", "nemotron", "falcon", "arcee"):
        found += vectors(part, base, [("bias", width + inputs)])
    return found


def _moe(d: Dims, moe: Experts, base: str, layer: int) -> list[Weight]:
    experts = f"layers.{layer}.experts" if d.type == "gemma4_text" else f"{base}.experts"
    found = _mlp("experts", experts, d, moe.intermediate, moe.latent, moe.count, moe.used)
    router = "router" if d.type in ("gpt_oss", "gemma4_text") else "gate"
    found.append(Weight(f"{base}.{router}", "router", moe.count, d.hidden))
    if moe.latent:
        found.append(Weight(f"{base}.latent_in_proj", "experts", moe.latent, d.hidden))
        found.append(Weight(f"{base}.latent_out_proj", "experts", d.hidden, moe.latent))
    if moe.shared_intermediate:
        name = "shared_expert" if d.type.startswith(("qwen", "llama4")) else "shared_experts"
        found += _mlp("shared experts", f"{base}.{name}", d, moe.shared_intermediate)
        if d.type.startswith("qwen"):
            found.append(Weight(f"{base}.shared_expert_gate", "router", 1, d.hidden))
    if d.type == "gpt_oss":
        biases = 2 * moe.intermediate + d.hidden
        found.append(Weight(f"{base}.experts.bias", "experts", biases, 1, moe.count, moe.used, matrix=False))
        found += vectors("router", base, [("router_bias", moe.count)])
    return found


def _nas_feed_forward(text: Config, d: Dims, layer: int, base: str) -> list[Weight]:
    block = nas_block(text, layer, "ffn")
    if block.flag("no_op"):
        return []
    if block.flag("replace_with_linear"):
        return [Weight(f"{base}.linear_mlp", "mlp", d.hidden, d.hidden)]
    factor = block.number("ffn_mult")
    if factor is None or factor > 1024:
        raise Unplannable(f"ffn_mult of layer {layer} is {shown(factor)}")
    width = int(2 * factor * d.hidden / 3)
    return _mlp("mlp", base, d, -(-width // 256) * 256)


def _mtp_heads(text: Config, d: Dims, last: list[Weight], words: list[str], moe: Experts | None) -> list[Weight]:
    """Multi-token-prediction heads: each is a layer like the last one, plus the weights that connect it.

    They use the model's own embedding and output, even if files hold a second copy.
    """
    count = text.count("num_nextn_predict_layers", "mtp_num_hidden_layers", most=64)
    if count is None and text.flag("use_mtp"):
        count = (text.count("num_mtp_modules", most=64) or 0) * (text.count("mtp_transformer_layers", most=8) or 1)
    if not count:
        return []
    layer = last
    if d.type == "nemotron_h":
        attending = words.index("full") if "full" in words else None
        layer = mixers(text, d)[attending].weights if attending is not None else []
        layer = layer + (_moe(d, moe, "layers.0.mixer", 0) if moe else [])
    elif d.type.startswith("step3p"):
        # Step's heads are dense although the layers before them are not.
        layer = mixers(text, d)[-1].weights + _dense(text, d, d.layers - 1, "layers.0.mlp")
    elif d.type.startswith("qwen3_5") or d.type == "qwen3_next":
        whole = words.index("full") if "full" in words else d.layers - 1
        layer = mixers(text, d)[whole].weights + [weight for weight in last if ".mlp." in weight.name]
    joined = [
        *layer,
        Weight("eh_proj", "mtp", d.hidden, 2 * d.hidden),
        *vectors("mtp", "mtp", [("norms", 3 * d.hidden)]),
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
        raise BadQuestion(f"the configuration of {name} is not a JSON object", hint="specify a model's config.json")
    try:
        return _model(Config(fields), name, Config(quant_file) if isinstance(quant_file, dict) else None, origin)
    except Unplannable as problem:
        raise BadQuestion(
            f"the configuration of {name} does not describe a model that bedplate can plan for",
            cause=str(problem),
            hint="check config.json; or use a GGUF file of the same model",
        ) from None
    except RecursionError:
        raise BadQuestion(f"the configuration of {name} is nested too deeply", hint="check config.json") from None


def _model(config: Config, name: str, quant_file: Config | None, origin: str | None) -> Model:
    if config.text("model_type") is None and not any(
        config.has(key) for key in ("architectures", "hidden_size", *_TEXT)
    ):
        raise Unplannable("it has neither model_type nor hidden_size")
    found = anatomy(config)
    stored = storage(config, quant_file)
    parts, groups = summed(found.weights, stored)
    return built(config, found, stored, parts, groups, name=name, origin=origin)


PARTS = (
    "embedding", "encoder", "attention", "state space", "mlp", "experts", "shared experts", "router", "norms", "output",
    "vision", "mtp",
)  # fmt: skip


def summed(weights: list[Weight], stored: Storage) -> tuple[dict[str, Part], tuple[TensorGroup, ...]]:
    """Sum the weights by purpose and by storage type."""
    parts: dict[str, list[int]] = {}
    types: dict[str, list[int]] = {}
    for weight in weights:
        size = stored.bytes(weight)
        sums = parts.setdefault(weight.part, [0, 0, 0])
        for position, figure in enumerate((weight.elements, weight.active, size)):
            sums[position] += figure
        if weight.part != "mtp":
            kind = types.setdefault(stored.label(weight), [0, 0, 0])
            for position, figure in enumerate((weight.copies, weight.elements, size)):
                kind[position] += figure
    ordered = sorted(types.items(), key=lambda item: (-item[1][2], item[0]))
    return (
        {
            part: Part(name=part, parameters=parts[part][0], active_parameters=parts[part][1], bytes=parts[part][2])
            for part in PARTS
            if part in parts
        },
        tuple(TensorGroup(type=kind, tensors=n, parameters=p, bytes=b) for kind, (n, p, b) in ordered),
    )


def built(
    config: Config,
    found: Anatomy,
    stored: Storage,
    parts: dict[str, Part],
    groups: tuple[TensorGroup, ...],
    *,
    name: str,
    origin: str | None,
) -> Model:
    text, d, moe = text_config(config), found.dims, found.moe
    own = [part for key, part in parts.items() if key not in ("vision", "mtp")]
    vision, ahead = parts.get("vision"), parts.get("mtp")
    layers = layer_groups(found.mixers)
    parameters = sum(part.parameters for part in own)
    weight_bytes = sum(part.bytes for part in own) + (vision.bytes if vision else 0)
    per_token = round(sum(group.kv_bytes_per_token for group in layers))
    if (
        max(parameters, weight_bytes, per_token, *(group.kv_bytes_window + group.state_bytes for group in layers), 0)
        > MAX_FIGURE
    ):
        raise Unplannable("its sizes exceed any computer's memory")
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
        architecture=_printable(config.text("model_type") or d.type or first or "unknown"),
        task=task_of(first, d.type),
        parameters=parameters,
        active_parameters=sum(part.active_parameters for part in own),
        weight_bytes=weight_bytes,
        quantization=_label(groups, stored),
        tensor_groups=groups,
        num_layers=d.layers,
        hidden_size=d.hidden,
        num_heads=d.heads or None,
        num_kv_heads=max((mixer.kv_heads or 0 for mixer in found.mixers), default=0) or None,
        num_experts=moe.count if moe else None,
        num_experts_active=moe.used if moe else None,
        vocab_size=text.count("vocab_size", most=1 << 28),
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
        kv_lora_rank=text.count("kv_lora_rank"),
        qk_rope_head_dim=text.count("qk_rope_head_dim"),
        sliding_window=max((mixer.window or 0 for mixer in found.mixers), default=0) or None,
        tied_embeddings=found.tied,
    )


def _label(groups: tuple[TensorGroup, ...], stored: Storage) -> str | None:
    """The common name of the type that holds most weights."""
    if not groups:
        return None
    main = max(groups, key=lambda group: group.parameters)
    details = stored.details
    if details is not None and details.method in ("gptq", "awq") and main.type.startswith("INT"):
        return f"{details.method.upper()}-{main.type.title()}"
    return main.type


def layer_groups(found: list[Mixer]) -> tuple[LayerGroup, ...]:
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


def task_of(architecture: str | None, model_type: str) -> Task:
    name = architecture or ""
    if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return "classify"
    if model_type == "whisper" or name.endswith("ForSpeechSeq2Seq"):
        return "other"
    if model_type in ENCODERS or name.endswith("EncoderModel"):
        return "embed"
    return "embed" if name.endswith("Model") and not name.endswith("LMHeadModel") else "generate"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text[:80])
