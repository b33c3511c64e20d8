"""Well-known models by their common names, so that a plan needs neither files nor network.

The data file holds the relevant fields of each model's config.json, and the sizes of published quantizations.
Everything else is computed by the code that reads configurations.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec

from bedplate.errors import UsageError
from bedplate.facts.hf_config import read_anatomy, read_config, sum_weights
from bedplate.facts.hf_fields import Config, InvalidConfig, Weight, escape_value
from bedplate.facts.quantization import FP8, MODELOPT, MXFP4, MXFP8, NVFP4, Storage, StorageScheme
from bedplate.values import Model, replace_fields
from bedplate.values.intent import ModelFacts
from bedplate.values.model import ModelPart, Quantization, Task, TensorGroup

# Bits per weight over a whole file, including embedding and output: the sizes of Llama 3 8B's GGUF files, divided by
# its 8.03 B weights. The recipes use other types for a few tensors, so other models differ by a few percent.
GGUF_BITS = {
    "Q2_K": 3.17, "Q2_K_L": 3.4, "Q3_K_S": 3.65, "Q3_K_M": 4.0, "Q3_K_L": 4.3, "Q3_K_XL": 3.55, "Q3_K": 4.0,
    "Q4_0": 4.64, "Q4_1": 5.11, "Q4_K_S": 4.67,
    "Q4_K_M": 4.9, "Q4_K_L": 5.1, "Q4_K_XL": 4.85, "Q4_K": 4.9, "Q5_0": 5.54, "Q5_1": 6.0, "Q5_K_S": 5.58,
    "Q5_K_M": 5.71, "Q5_K_XL": 5.75,
    "Q5_K": 5.71, "Q6_K": 6.57, "Q6_K_XL": 7.0, "Q8_0": 8.5, "Q8_K_XL": 10.5, "IQ1_S": 2.0, "IQ1_M": 2.15,
    "IQ2_XXS": 2.39, "IQ2_XS": 2.6,
    "IQ2_S": 2.75, "IQ2_M": 2.94, "IQ3_XXS": 3.27, "IQ3_XS": 3.5, "IQ3_S": 3.66, "IQ3_M": 3.77, "IQ4_XS": 4.43,
    "IQ4_NL": 4.66, "Q2_K_XL": 3.3,
}  # fmt: skip

_LABEL = re.compile(
    r"(?<![a-z0-9])(?P<gguf>(?:ud[-_])?i?q\d(?:[-_](?:[0-9]|k|xxs|xs|nl|xl|s|m|l))*)(?![a-z0-9])"
    r"|(?<![a-z0-9])(?P<word>nvfp4|mxfp4|mxfp8|fp8|fp4|bf16|fp16|f16|fp32|f32|"
    r"(?:gptq|awq)(?:[-_ ]?int[348])?(?:[-_ ]?w4a16)?|"
    r"int[48]|w4a16|w8a16|w8a8|w4a8|nf4|bnb[-_]?4bit|[2-8][-_ ]?bits?|(?:\d(?:\.\d+)?)[-_ ]?bpw)(?![a-z0-9.])"
)
_NOISE = {
    "gguf", "instruct", "chat", "it", "hf", "base", "meta", "mlx", "exl2", "exl3", "onnx", "ud", "i1", "imatrix",
    "edge", "99", "99.9", "inst", "moe",
    "qat", "dyn", "dynamic", "pre", "trtllm", "quark", "medium", "small", "block", "model",
    "weights", "unsloth", "bnb", "uqff",
    "nvidia", "kv",
}  # fmt: skip
# Words that mean another model, not another quantization.
_KEPT = {
    ("mistral", "small"),
    ("mistral", "medium"),
    ("devstral", "small"),
    ("phi", "medium"),
    ("phi", "small"),
    ("bge", "small"),
    ("bge", "base"),
    ("e5", "base"),
    ("bert", "base"),
}


class StoredWeights(msgspec.Struct):
    label: str
    bytes: int
    parts: dict[str, int]
    groups: list[tuple[str, int, int, int]]
    method: str = ""
    bits: float = 16
    group: int | None = None
    block: tuple[int, int] | None = None
    kv: str | None = None
    act: int | None = None


class ModelVariant(msgspec.Struct):
    base: str
    stored: StoredWeights | None = None
    scheme: str | None = None
    kv: str | None = None


class _ModelData(msgspec.Struct):
    source: str
    models: dict[str, msgspec.Raw]
    variants: dict[str, ModelVariant]
    aliases: dict[str, str]


class ParsedModelName(NamedTuple):
    """The model, quantization and name that a user's text means."""

    key: str
    label: str | None


@lru_cache(maxsize=1)
def _load_data() -> _ModelData:
    shipped = importlib.resources.files("bedplate.facts") / "data" / "models.json"
    return msgspec.json.decode(shipped.read_bytes(), type=_ModelData)


@lru_cache(maxsize=1)
def _build_keys() -> dict[str, str]:
    """Every known spelling in normal form. Of two models with the same form, the first is the base model."""
    keys: dict[str, str] = {}
    data = _load_data()
    for name in sorted(data.variants, key=lambda name: (name != data.variants[name].base, len(name), name)):
        asked = parse_model_name(name)
        keys.setdefault(f"{asked.key} {asked.label}" if asked.label else asked.key, name)
        if asked.label:
            keys.setdefault(asked.key, name)
    for alias, name in data.aliases.items():
        keys[parse_model_name(alias).key] = name
    return keys


def list_known_names() -> tuple[str, ...]:
    """The models whose facts come with bedplate, by hub name."""
    return tuple(sorted(_load_data().variants))


def parse_model_name(text: str) -> ParsedModelName:
    """Normalize a name:

    `meta-llama/Meta-Llama-3.1-8B-Instruct-FP8`, `LLaMA v3.1 8B FP8` and `llama3_1-8b-fp8` are equal.
    """
    words = text.strip().lower().rstrip("/").rpartition("/")[2].removesuffix(".gguf").partition(":")
    words_text = words[0] + (f" {words[2]}" if words[2] not in ("", "latest") else "")
    label = _find_label([match[0] for match in _LABEL.finditer(words_text)])
    medium = re.search(r"q(\d)_k\s*-\s*(medium|small|large)", words_text)
    if medium:
        label = f"Q{medium[1]}_K_{medium[2][0].upper()}"
    rest = _LABEL.sub(" ", words_text)
    rest = re.sub(r"(?<=\d)_(?=\d)", ".", rest)
    rest = re.sub(r"(?<=[a-z])\.|\.(?=[a-z])|\.$", " ", rest)
    tokens = [token.strip(".") for token in re.split(r"[^a-z0-9.]+", rest) if token.strip(".")]
    kept: list[str] = []
    for token in tokens:
        token = re.sub(r"^v(?=\d)", "", token)
        if token in _NOISE and (kept[0] if kept else "", token) not in _KEPT:
            continue
        kept.append(token)
    return ParsedModelName("".join(kept), label)


def _find_label(found: list[str]) -> str | None:
    """The quantization that the words name, by the rightmost match; `gptq` with its bits."""
    label = None
    for word in found:
        plain = word.upper().replace(" ", "-")
        if plain.startswith(("GPTQ", "AWQ")):
            label = plain if "INT" in plain else f"{plain.partition('-')[0]}-INT4"
        elif label and label.startswith(("GPTQ", "AWQ")) and plain.startswith(("INT", "W4")):
            continue
        elif re.fullmatch(r"(?:UD[-_])?I?Q\d.*", plain):
            label = plain.removeprefix("UD-").removeprefix("UD_").replace("-", "_")
        else:
            label = {
                "FP4": "NVFP4",
                "FP16": "F16",
                "FP32": "F32",
                "W4A16": "INT4",
                "W8A16": "INT8",
                "W8A8": "INT8",
                "W4A8": "INT4",
            }.get(plain, plain)
    return label


def find_model(text: str) -> Model:
    """The facts of the model with this common name. A quantization in the name is applied."""
    found = look_up_model(text)
    if found is None:
        near = find_nearest(text)
        meant = f"did you mean {' or '.join(near)}?" if near else "specify a folder, a .gguf file, or owner/name"
        raise UsageError(f"unknown model {text[:100]!r}", hint=meant)
    return found


@lru_cache(maxsize=512)
def look_up_model(text: str) -> Model | None:
    """Like `find_model`, but None if there is none."""
    asked = parse_model_name(text)
    if not asked.key or len(text) > 300:
        return None
    keys, data = _build_keys(), _load_data()
    name = keys.get(f"{asked.key} {asked.label}") if asked.label else None
    exact = name is not None
    name = name or keys.get(asked.key) or _find_base_model(asked.key, keys)
    if name is None:
        return None
    variant = data.variants[name]
    model = _build_model(name, variant)
    own = parse_model_name(name).label
    if exact and variant.stored is None and variant.scheme is None and asked.label not in ("BF16", "F16"):
        # Its configuration does not state how the weights are stored; only the name does.
        return replace_fields(apply_label(model, str(asked.label), variant), name=_choose_shown_name(text, name))
    if exact or asked.label is None:
        # A name without a quantization means the model as published.
        if asked.label is None and own and not exact and variant.stored and own.startswith(("NVFP4", "INT")):
            model = _build_plain_model(name, variant)
        return replace_fields(model, name=_choose_shown_name(text, name))
    if variant.stored is not None and _keeps_native(asked.label, variant.stored):
        return replace_fields(model, name=_choose_shown_name(text, name))
    return replace_fields(
        apply_label(_build_plain_model(name, variant), asked.label, variant), name=_choose_shown_name(text, name)
    )


def _find_base_model(key: str, keys: dict[str, str]) -> str | None:
    """Find the base model in a fine-tune's name: `hermes-3-llama-3.1-8b`."""
    inside = [
        known
        for known in keys
        if len(known) >= 8 and " " not in known and known in key and _keeps_numbers_whole(known, key)
    ]
    if not inside:
        return None
    longest = max(inside, key=len)
    # The rest must not state another size: a 16B of a family is not its 671B.
    rest = key.replace(longest, " ", 1)
    return None if re.search(r"\d[bm](?![a-z])", rest) else keys[longest]


def _keeps_numbers_whole(known: str, key: str) -> bool:
    """Whether the match does not cut a number in the name."""
    end = key.find(known) + len(known)
    start = key.find(known)
    return not (end < len(key) and key[end - 1].isdigit() and key[end].isdigit()) and not (
        start and key[start].isdigit() and key[start - 1].isdigit()
    )


def _keeps_native(label: str, stored: StoredWeights) -> bool:
    """GGUF files of models trained in MXFP4 keep their experts in it; F16 refers to the other weights."""
    return stored.label == label or (stored.label == "MXFP4" and label in ("F16", "BF16", "FP4", "NVFP4"))


def find_nearest(text: str) -> list[str]:
    """Known names similar to the text."""
    names = {name.rpartition("/")[2].lower(): name for name in list_known_names()}
    near = difflib.get_close_matches(text[:200].lower().rpartition("/")[2], list(names), n=3, cutoff=0.6)
    return [names[match] for match in near]


def _choose_shown_name(text: str, name: str) -> str:
    return text.strip() if "/" in text else name


def _expand_lists(value: Any) -> Any:
    """Expand lists that the data file stores in a short form."""
    if isinstance(value, dict):
        if set(value) == {"cycle", "n"}:
            cycle = value["cycle"]
            return [cycle[position % len(cycle)] for position in range(value["n"])]
        if set(value) == {"runs"}:
            return [_expand_lists(item) for item, count in value["runs"] for _ in range(count)]
        return {key: _expand_lists(inner) for key, inner in value.items()}
    return value


def load_config_fields(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = _expand_lists(msgspec.json.decode(_load_data().models[_load_data().variants[name].base]))
    return fields


def _build_plain_model(name: str, variant: ModelVariant) -> Model:
    """The model with 16-bit weights."""
    model = read_config(load_config_fields(name), name=name, origin="known facts")
    return replace_fields(
        model,
        basis="spec",
        task=_find_task(name, model),
        has_chat_template=is_chat_model(name),
        sources=(f"config.json of {variant.base}",),
    )


def _find_task(name: str, model: Model) -> Task:
    if "rerank" in name.lower():
        return "classify"
    return "embed" if re.search(r"embed|[-/]e5-", name, re.IGNORECASE) else model.task


def is_chat_model(name: str) -> bool:
    """Whether the name says that the model is a chat model."""
    return bool(re.search(r"instruct|chat|[-_]it\b|r1|gpt-oss|thinking|kimi-k|glm-[45]|minimax-m", name, re.IGNORECASE))


def _build_model(name: str, variant: ModelVariant) -> Model:
    model = _build_plain_model(name, variant)
    if variant.scheme:
        model = _with_owners_method(apply_label(model, variant.scheme, variant))
    stored = variant.stored
    if stored is None:
        return model
    parts = tuple(
        replace_fields(part, bytes=stored.parts[part.name]) for part in model.parts if part.name in stored.parts
    )
    return replace_fields(
        model,
        parts=parts,
        weight_bytes=stored.bytes,
        quantization=stored.label,
        tensor_groups=tuple(TensorGroup(type=t, tensors=n, parameters=p, bytes=b) for t, n, p, b in stored.groups),
        vision_weight_bytes=stored.parts.get("vision", 0),
        mtp_weight_bytes=stored.parts.get("mtp", 0),
        quantization_details=Quantization(
            method=stored.method,
            bits=stored.bits,
            group_size=stored.group,
            block=stored.block,
            kv_cache=stored.kv,
            activation_bits=stored.act,
        ),
    )


_FACTS = frozenset(ModelFacts.__struct_fields__)
_FORMAT_BITS = {"gguf": 4.9, "onnx": 32.0, "mlx": 4.5, "exl2": 4.0, "exl3": 4.0, "safetensors": 16.0, "facts": 16.0}


def make_model_from_facts(fields: object) -> Model:
    """A model given only by facts in an intent: {task: embed, params_b: 0.11, format: onnx}."""
    if not isinstance(fields, dict):
        raise UsageError(
            "model facts are not an object", hint="write them as {task: embed, params_b: 0.11, format: onnx}"
        )
    if unknown := sorted(str(key) for key in fields if key not in _FACTS):
        raise UsageError(f"model: {unknown[0]} is not a known field", hint=f"known fields: {', '.join(sorted(_FACTS))}")
    given = Config(fields)
    try:
        return _make_from_facts(given)
    except InvalidConfig as problem:
        raise UsageError(
            "the model's facts are not valid", cause=str(problem), hint="params_b is in billions"
        ) from None


def _make_from_facts(given: Config) -> Model:
    billions = given.get_number("params_b")
    if billions is None or not 0 < billions <= 1e5:
        raise InvalidConfig("params_b, the parameters in billions, is missing or out of range")
    task, form = _get_or_default(given, "task", "generate"), _get_or_default(given, "format", "facts")
    if task not in ("generate", "embed", "classify", "transcribe", "other"):
        known = "generate, embed, classify, transcribe or other"
        raise InvalidConfig(f"task is {escape_value(task)}; it must be {known}")
    if not isinstance(form, str) or form not in _FORMAT_BITS:
        raise InvalidConfig(f"format is {escape_value(form)}; it must be one of {', '.join(_FORMAT_BITS)}")
    active = given.get_number("active_params_b")
    layers = given.get_count("layers", most=4096)
    kv = given.get_count("kv_bytes_per_token")
    if kv is None and task == "generate":
        kv = _compute_cache_by_shape(given, billions if active is None else active)
    parameters = round(billions * 1e9)
    weight_gb = given.get_number("weight_gb")
    label = given.get_text("quantization")
    asked = parse_model_name(label).label if label else None
    bits = GGUF_BITS.get(asked or "") or (_WORDS[asked][1].bits * 1.06 if asked in _WORDS else _FORMAT_BITS[form])
    return Model(
        name=given.get_text("name") or f"a model of {billions:g} B parameters",
        format=cast(Any, form),
        origin="facts of the intent",
        architecture="unknown",
        task=cast(Any, task),
        parameters=parameters,
        active_parameters=round((billions if active is None else active) * 1e9),
        weight_bytes=round(weight_gb * 1e9) if weight_gb else round(parameters * bits / 8),
        quantization=asked or label,
        num_layers=layers or max(6, round(32 * (billions / 8) ** 0.4)),
        hidden_size=given.get_count("hidden_size"),
        num_heads=given.get_count("heads"),
        num_kv_heads=given.get_count("kv_heads"),
        head_dim=given.get_count("head_dim"),
        num_experts=given.get_count("experts"),
        num_experts_active=given.get_count("experts_active"),
        max_context=given.get_count("context", most=1 << 40),
        kv_bytes_per_token=kv or 0,
        basis="estimate",
    )


def _get_or_default(given: Config, name: str, default: str) -> Any:
    value = given.get(name)
    return default if value is None else value


def _compute_cache_by_shape(given: Config, active_b: float) -> int:
    """KV bytes per token: from the given shape, else typical of grouped-query models of that size.

    Llama 3.2 1B keeps 32 KiB, Llama 3.1 8B 128 KiB, 70B 320 KiB and 405B 504 KiB.
    """
    layers, kv_heads, head = (
        given.get_count("layers", most=4096),
        given.get_count("kv_heads"),
        given.get_count("head_dim"),
    )
    if layers and kv_heads and head:
        return 4 * layers * kv_heads * head
    return int(131_072 * min(4.0, float(active_b / 8) ** 0.42))


def quantize_by_name(model: Model) -> Model:
    """A model whose quantization is stated only in its name, such as GLM-5-NVFP4."""
    label = parse_model_name(model.name).label
    return _with_owners_method(apply_label(model, label)) if label and label not in ("BF16", "F16") else model


def _with_owners_method(model: Model) -> Model:
    """NVIDIA's repositories with FP8 weights are made with ModelOpt."""
    details = model.quantization_details
    if details is None or details.method != "fp8" or not model.name.lower().startswith("nvidia/"):
        return model
    return replace_fields(model, quantization_details=replace_fields(details, method=MODELOPT))


_WORDS: dict[str, tuple[str, StorageScheme]] = {
    "FP8": ("fp8", FP8), "NVFP4": ("nvfp4", NVFP4), "MXFP4": ("mxfp4", MXFP4), "MXFP8": ("mxfp8", MXFP8),
    "INT8": ("int8", StorageScheme("INT8", 8)),
    "INT4": ("compressed-tensors", StorageScheme("INT4", 4, 128, 16)), "NF4": ("bitsandbytes", StorageScheme("NF4",
    4, 64, 32)),
    "GPTQ-INT4": ("gptq", StorageScheme("GPTQ-Int4", 4, 128, 20)), "GPTQ-INT8": ("gptq", StorageScheme("GPTQ-Int8",
    8, 128, 24)),
    "GPTQ-INT3": ("gptq", StorageScheme("GPTQ-Int3", 3, 128, 19)), "AWQ-INT4": ("awq", StorageScheme("AWQ-Int4", 4,
    128, 20)),
    "AWQ-INT8": ("awq", StorageScheme("AWQ-Int8", 8, 128, 24)),
}  # fmt: skip


def apply_label(model: Model, label: str, variant: ModelVariant | None = None) -> Model:
    """The model with its weights stored as `label`: FP8, AWQ-INT4, Q4_K_M, 4-BIT, 4.0BPW …"""
    if label in ("BF16", "F16", "F32"):
        factor = 2 if label == "F32" else 1
        return _scale_weights(model, label, 16 * factor, None)
    if label in _WORDS:
        method, scheme = _WORDS[label]
        return _apply_scheme(model, scheme, method, variant.kv if variant else None)
    if bits := GGUF_BITS.get(label):
        details = Quantization(method="gguf", bits=bits)
        return replace_fields(_scale_weights(model, label, bits, details), basis="estimate")
    if match := re.fullmatch(r"(?:BNB[-_]?)?(\d)[-_]?BITS?", label):
        # MLX: a 16-bit scale and bias for each 64 weights.
        details = Quantization(method="mlx", bits=float(match[1]), group_size=64)
        return _scale_weights(model, f"{match[1]}-bit", int(match[1]) + 0.5, details)
    if match := re.fullmatch(r"(\d(?:\.\d+)?)[-_]?BPW", label):
        return _scale_weights(
            model, f"{match[1]} bpw", float(match[1]), Quantization(method="exl3", bits=float(match[1]))
        )
    if match := re.match(r"I?Q(\d)", label):
        details = Quantization(method="gguf", bits=float(match[1]))
        return replace_fields(_scale_weights(model, label, float(match[1]) + 0.6, details), basis="estimate")
    return model


def _scale_weights(model: Model, label: str, bits: float, details: Quantization | None) -> Model:
    """The model with `bits` bits per weight. Vision encoders stay in 16 bits."""
    parts = tuple(
        part if part.name == "vision" else replace_fields(part, bytes=round(part.parameters * bits / 8))
        for part in model.parts
    )
    return _sum_parts(model, parts, label, details, bits)


@lru_cache(maxsize=512)
def _sum_quantized(name: str, scheme: StorageScheme) -> tuple[tuple[ModelPart, ...], tuple[TensorGroup, ...]]:
    """The parts and storage types of a known model with quantized linear layers; engines share most schemes."""
    quantizable = ("attention", "state space", "mlp", "experts", "shared experts", "mtp")

    def choose(weight: Weight) -> StorageScheme | None:
        return scheme if weight.matrix and weight.cols > 1 and weight.part in quantizable else None

    parts, groups = sum_weights(_merge_equal_weights(name), Storage(None, 2, "BF16", choose))
    return tuple(parts.values()), groups


@lru_cache(maxsize=64)
def _merge_equal_weights(name: str) -> list[Weight]:
    """The weights of a known model without names, and the same weight of all layers as one."""
    counts = Counter(one._replace(name="") for one in read_anatomy(Config(load_config_fields(name))).weights)
    return [
        one._replace(copies=one.copies * count, used=None if one.used is None else one.used * count)
        for one, count in counts.items()
    ]


def _apply_scheme(model: Model, scheme: StorageScheme, method: str, kv: str | None) -> Model:
    """The model with quantized linear layers. Embedding, output, norms and routers stay as they are."""
    bits = scheme.bits + (scheme.group_bits / scheme.group if scheme.group else 0)
    try:
        ordered, groups = _sum_quantized(model.name, scheme)
    except KeyError:
        kept = ("embedding", "output", "norms", "router", "vision")
        ordered = tuple(
            part if part.name in kept else replace_fields(part, bytes=round(part.parameters * bits / 8))
            for part in model.parts
        )
        groups = ()
    details = Quantization(method=method, bits=scheme.bits, group_size=scheme.group, block=scheme.block, kv_cache=kv)
    return replace_fields(_sum_parts(model, ordered, scheme.label, details, bits), tensor_groups=groups)


def _sum_parts(
    model: Model, parts: tuple[ModelPart, ...], label: str, details: Quantization | None, bits: float
) -> Model:
    """The model with sums over `parts`; without known parts, its parameters at `bits` bits."""
    by_name = {part.name: part.bytes for part in parts}
    if not parts:
        by_name = {"all": round(model.parameters * bits / 8), "vision": model.vision_weight_bytes}
    method = details.method if details else ""
    return replace_fields(
        model,
        format=method if method in ("gguf", "mlx", "exl3") else model.format,
        parts=parts,
        weight_bytes=sum(size for name, size in by_name.items() if name != "mtp"),
        vision_weight_bytes=by_name.get("vision", 0),
        mtp_weight_bytes=by_name.get("mtp", 0),
        quantization=label,
        quantization_details=details,
        tensor_groups=(),
    )
