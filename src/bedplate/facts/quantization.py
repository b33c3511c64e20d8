"""Quantization in a configuration, and the bytes of each weight under it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bedplate.facts.hf_fields import Config, InvalidConfig, Weight, check_count
from bedplate.values.model import Quantization

_PREFIX = re.compile(r"^(?:(?:model|language_model|backbone|text_model|transformer|llm|thinker)\.)+")
_MAX_PATTERNS = 1 << 16
_MAX_WILDCARDS = 2048
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "int8": 1,
    "uint8": 1,
}  # fmt: skip
DTYPE_LABELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "half": "F16"}


@dataclass(frozen=True, slots=True)
class StorageScheme:
    """A storage scheme of a matrix."""

    label: str
    bits: float
    group: int | None = None
    """Number of weights along a row that share a scale."""
    group_bits: float = 0.0
    """Extra bits per group: scale and zero point."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a 32-bit scale."""

    def compute_bytes(self, weight: Weight) -> int:
        rows, cols = weight.rows, weight.cols
        total = rows * cols * self.bits / 8
        if self.group:
            total += rows * -(-cols // self.group) * self.group_bits / 8
        elif self.block:
            total += -(-rows // self.block[0]) * -(-cols // self.block[1]) * 4
        return round(total) * weight.copies


MODELOPT = "modelopt"
"""Method of FP8 weights by NVIDIA's ModelOpt, for which engines have a loader that needs newer GPUs."""
FP8 = StorageScheme("FP8", 8)
NVFP4 = StorageScheme("NVFP4", 4, 16, 8)
MXFP4 = StorageScheme("MXFP4", 4, 32, 8)
MXFP8 = StorageScheme("MXFP8", 8, 32, 8)
_ALGORITHMS = {
    "FP8": FP8, "FP8_PB_WO": StorageScheme("FP8", 8, block=(128, 128)), "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4, "NVFP4_AWQ": NVFP4, "MXFP4": MXFP4, "W4A8_MXFP4_FP8": MXFP4, "MXFP8": MXFP8,
    "W4A16_AWQ": StorageScheme("INT4", 4, 128, 16), "W4A8_AWQ": StorageScheme("INT4", 4, 128, 16),
    "INT8_SQ": StorageScheme("INT8", 8),
    "W8A8_SQ_PER_CHANNEL": StorageScheme("INT8", 8), "W8A16": StorageScheme("INT8", 8),
    "W4A16": StorageScheme("INT4", 4, 128, 16),
}  # fmt: skip


class ModuleNames:
    """Module names in the quantizers' notations: whole, partial, with `*`, or as `re:` patterns."""

    def __init__(self, patterns: Iterable[Any]) -> None:
        self._whole: set[str] = set()
        wild: list[str] = []
        for number, pattern in enumerate(patterns):
            if number >= _MAX_PATTERNS:
                raise InvalidConfig("the quantization lists more modules than any model has")
            if not isinstance(pattern, str) or not pattern or len(pattern) > 500:
                continue
            if pattern.startswith("re:"):
                if _is_harmless(pattern[3:]):
                    wild.append(f"(?:model\\.)?(?:{pattern[3:]})")
            elif any(char in pattern for char in "*?["):
                if pattern.count("*") <= 6:
                    wild.append(fnmatch.translate(_PREFIX.sub("", pattern)))
            else:
                self._whole.add(_PREFIX.sub("", pattern).removesuffix(".weight").removesuffix(".bias"))
        if len(wild) > _MAX_WILDCARDS:
            raise InvalidConfig("the quantization lists more patterns than any model has")
        self._wild = [re.compile(pattern) for pattern in dict.fromkeys(wild)]

    def __bool__(self) -> bool:
        return bool(self._whole or self._wild)

    def has(self, name: str) -> bool:
        pieces = name.split(".")
        for start in range(len(pieces)):
            for end in range(start + 1, len(pieces) + 1):
                if ".".join(pieces[start:end]) in self._whole:
                    return True
        return any(pattern.match(name) for pattern in self._wild)


def _is_harmless(pattern: str) -> bool:
    """Whether an untrusted pattern is safe to run: repeated groups can take exponential time."""
    if len(pattern) > 300 or re.search(r"[)\]}*+?]\s*[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Storage:
    """The scheme of each weight; None: the model's own type."""

    details: Quantization | None
    plain_bytes: int
    plain_label: str
    choose: Callable[[Weight], StorageScheme | None]

    def compute_bytes(self, weight: Weight) -> int:
        scheme = self.choose(weight)
        return weight.elements * self.plain_bytes if scheme is None else scheme.compute_bytes(weight)

    def get_label(self, weight: Weight) -> str:
        scheme = self.choose(weight)
        return self.plain_label if scheme is None else scheme.label


def read_storage(config: Config, quant_file: Config | None = None) -> Storage:
    """Read `quantization_config` (or MLX's `quantization`) and modelopt's hf_quant_config.json."""
    dtype = _read_dtype(config)
    plain_bytes, plain_label = DTYPE_BYTES.get(dtype, 2), DTYPE_LABELS.get(dtype, "BF16")
    text = config.get_section("text_config", "llm_config", "language_config")
    quantized = config.get_section("quantization_config") or (text.get_section("quantization_config") if text else None)
    quantized = quantized or config.get_section("compression_config")
    mlx = config.get_section("quantization")
    if quantized is None and quant_file is not None:
        quantized = quant_file.get_section("quantization")
    if mlx is not None and mlx.has("bits") and (quantized is None or not quantized.has("quant_method")):
        # MLX writes the same twice and does not name itself.
        quantized = Config({**mlx.fields, "quant_method": "mlx"})
    if quantized is None:
        return Storage(None, plain_bytes, plain_label, lambda weight: None)
    separate = quant_file.get_section("quantization") if quant_file is not None else None
    details, choose = _read_rules(quantized, separate, (text or config).get_text("expert_dtype"))
    return Storage(details, plain_bytes, plain_label, choose)


def _read_dtype(config: Config) -> str:
    for holder in (config, config.get_section("text_config", "llm_config", "language_config")):
        if holder is not None and (value := holder.get_text("torch_dtype", "dtype")):
            return value.removeprefix("torch.")
    return "bfloat16"


def _read_rules(
    config: Config, separate: Config | None, expert_dtype: str | None
) -> tuple[Quantization, Callable[[Weight], StorageScheme | None]]:
    method = (config.get_text("quant_method") or "").lower()
    algorithm = (config.get_text("quant_algo") or (separate.get_text("quant_algo") if separate else None) or "").upper()
    kv_cache = _read_kv_cache(config) or (_read_kv_cache(separate) if separate else None)
    lists = [holder.get(key) for holder in (config, separate) if holder for key in _EXCLUDE_KEYS]
    skip = ModuleNames([name for listed in lists if isinstance(listed, list) for name in listed])
    layers = config.get("quantized_layers") or (separate.get("quantized_layers") if separate else None)
    if isinstance(layers, dict) and layers:
        return _read_layer_rules(layers, method, kv_cache, skip)
    groups = config.get("config_groups")
    if isinstance(groups, dict) and groups and algorithm not in _ALGORITHMS:
        return _read_group_rules(groups, config, kv_cache, skip)
    if method in _OF_EVERYTHING:
        scheme = _make_uniform_scheme(method, config)
        details = _make_details(method, scheme, kv_cache)
        # These tools also quantize the embedding and the output.
        return details, lambda weight: scheme if weight.cols > 1 and weight.part not in ("norms", "vision") else None
    scheme = _choose_scheme(method, algorithm, config)
    name = "nvfp4" if scheme.label == "NVFP4" else method if method and method != "modelopt" else scheme.label.lower()
    name = MODELOPT if scheme.label == "FP8" and algorithm else name  # only ModelOpt names an algorithm
    experts = MXFP4 if expert_dtype == "fp4" and method == "fp8" else None
    only_experts = method == "mxfp4"

    def choose(weight: Weight) -> StorageScheme | None:
        if not _is_quantizable(weight) or skip.has(weight.name) or (only_experts and weight.part != "experts"):
            return None
        return experts if experts is not None and weight.part == "experts" else scheme

    return _make_details("mxfp4 experts, fp8" if experts else name, experts or scheme, kv_cache), choose


_EXCLUDE_KEYS = ("modules_to_not_convert", "exclude_modules", "ignore", "ignored_layers", "llm_int8_skip_modules")
_OF_EVERYTHING = {"mlx", "exl2", "exl3"}


def _is_quantizable(weight: Weight) -> bool:
    return weight.matrix and weight.cols > 1 and weight.part not in ("embedding", "output", "norms", "router", "vision")


def _make_details(method: str, scheme: StorageScheme, kv_cache: str | None) -> Quantization:
    return Quantization(
        method=method, bits=scheme.bits, group_size=scheme.group, block=scheme.block, kv_cache=kv_cache,
        activation_bits=None,
    )  # fmt: skip


def _read_kv_cache(config: Config) -> str | None:
    value = config.get("kv_cache_quant_algo", "kv_cache_scheme")
    if isinstance(value, str) and value.strip():
        return value.strip().upper()[:20]
    if isinstance(value, dict) and isinstance(bits := value.get("num_bits"), int) and 0 < bits <= 16:
        return f"{'FP' if value.get('type') == 'float' else 'INT'}{bits}"
    return None


def _read_bits(config: Config, default: float | None = None) -> float:
    bits = config.get_number("bits", "w_bit", "num_bits", "weight_bits")
    if bits is None:
        bits = default
    if bits is None or not 0.5 <= bits <= 32:
        raise InvalidConfig(f"the quantization states {bits if bits is not None else 'no'} bits")
    return bits


def _read_group_size(config: Config, default: int | None) -> int | None:
    value = config.get("group_size", "q_group_size")
    if value is None:
        return default
    return None if value in (-1, 0) else check_count("group_size", value)


def _choose_scheme(method: str, algorithm: str, config: Config) -> StorageScheme:
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]
    if method in (
        "gptq",
        "awq",
        "auto-round",
        "auto_round",
        "hqq",
        "marlin",
        "intel/auto-round",
        "gptqmodel",
        "awq_marlin",
        "gptq_marlin",
    ):
        bits, group = _read_bits(config, 4), _read_group_size(config, 128)
        return StorageScheme(f"INT{bits:g}", bits, group or 1 << 24, 16 + bits)
    if method in ("fp8", "fbgemm_fp8", "finegrained_fp8", "mxfp8"):
        if method == "mxfp8":
            return MXFP8
        return StorageScheme("FP8", 8, block=_read_block(config.get("weight_block_size")))
    if method == "mxfp4":
        return MXFP4
    if method == "bitsandbytes":
        if config.get_flag("load_in_8bit", "_load_in_8bit"):
            return StorageScheme("INT8", 8)
        return StorageScheme(
            f"{(config.get_text('bnb_4bit_quant_type') or 'nf4').upper()[:4]}",
            4,
            64,
            8.2 if config.get_flag("bnb_4bit_use_double_quant") else 32,
        )
    if method in (
        "torchao",
        "quanto",
        "eetq",
        "quark",
        "aqlm",
        "vptq",
        "higgs",
        "spqr",
        "bitnet",
        "compressed-tensors",
        "modelopt",
        "",
    ):
        known = _find_scheme_by_words(config)
        if known is not None:
            return known
    raise InvalidConfig(
        f"the weights are quantized by {method[:30] or 'an unnamed method'!r}, which bedplate does not know"
    )


def _find_scheme_by_words(config: Config) -> StorageScheme | None:
    """Methods whose name contains the type."""
    words = str(sorted((key, value) for key, value in config.fields.items() if isinstance(value, str | int | float)))[
        :2000
    ].lower()
    inner = config.get("global_quant_config", "quant_type")
    words += str(inner)[:2000].lower()
    for word, scheme in (
        ("mxfp4", MXFP4),
        ("fp4", MXFP4),
        ("nvfp4", NVFP4),
        ("fp8", FP8),
        ("float8", FP8),
        ("int4", StorageScheme("INT4", 4, 128, 16)),
        ("int8", StorageScheme("INT8", 8)),
    ):
        if word in words:
            return scheme
    if config.has("bits"):
        return StorageScheme(f"INT{_read_bits(config):g}", _read_bits(config), _read_group_size(config, 128), 16)
    return None


def _read_block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidConfig("weight_block_size is not two sizes")
    rows, cols = (check_count("weight_block_size", size) for size in value)
    if not rows or not cols:
        raise InvalidConfig("weight_block_size is zero")
    return rows, cols


def _make_uniform_scheme(method: str, config: Config) -> StorageScheme:
    bits = _read_bits(config)
    if method == "mlx":
        mode = (config.get_text("mode") or "affine").lower()
        if mode in ("mxfp4", "nvfp4", "mxfp8"):
            return {"mxfp4": MXFP4, "nvfp4": NVFP4, "mxfp8": MXFP8}[mode]
        # A 16-bit scale and a 16-bit bias for each group.
        return StorageScheme(f"{bits:g}-bit", bits, _read_group_size(config, 64) or 64, 32)
    return StorageScheme(f"{bits:g} bpw", bits)


def _read_layer_rules(
    layers: dict[Any, Any], method: str, kv_cache: str | None, skip: ModuleNames
) -> tuple[Quantization, Callable[[Weight], StorageScheme | None]]:
    """modelopt's mixed precision: each module states its own type."""
    by_algorithm: dict[str, list[str]] = {}
    for name, entry in layers.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else None
        if isinstance(algorithm, str):
            by_algorithm.setdefault(algorithm.upper(), []).append(str(name))
    chosen = [
        (ModuleNames(names), _ALGORITHMS[algorithm])
        for algorithm, names in by_algorithm.items()
        if algorithm in _ALGORITHMS
    ]
    if not chosen:
        raise InvalidConfig("quantized_layers names no type that bedplate knows")
    rest = StorageScheme("FP8", 8, block=(128, 128)) if method == "fp8" else None

    def choose(weight: Weight) -> StorageScheme | None:
        if not weight.matrix or weight.cols <= 1 or weight.part in ("embedding", "norms", "router", "vision"):
            return None
        if skip.has(weight.name):
            return None
        for names, scheme in chosen:
            if names.has(weight.name):
                return scheme
        return None if weight.part == "output" else rest

    best = min((scheme for _, scheme in chosen), key=lambda scheme: scheme.bits)
    return _make_details("mixed: " + ", ".join(sorted({scheme.label for _, scheme in chosen})), best, kv_cache), choose


def _read_group_rules(
    groups: dict[Any, Any], config: Config, kv_cache: str | None, skip: ModuleNames
) -> tuple[Quantization, Callable[[Weight], StorageScheme | None]]:
    """compressed-tensors: groups of modules, each with a scheme."""
    chosen: list[tuple[ModuleNames | None, StorageScheme]] = []
    activation: int | None = None
    for entry in list(groups.values())[:64]:
        if not isinstance(entry, dict) or not isinstance(entry.get("weights"), dict):
            continue
        weights = Config(entry["weights"])
        form = str(entry.get("format") or config.get_text("format") or "").lower()
        targets = entry.get("targets")
        names = None if not isinstance(targets, list) or "Linear" in targets else ModuleNames(targets)
        chosen.append((names, _make_group_scheme(weights, form)))
        inputs = entry.get("input_activations")
        if isinstance(inputs, dict) and isinstance(inputs.get("num_bits"), int):
            activation = inputs["num_bits"]
    if not chosen:
        raise InvalidConfig("config_groups describes no weights")

    def choose(weight: Weight) -> StorageScheme | None:
        if (
            not weight.matrix
            or weight.cols <= 1
            or weight.part in ("embedding", "norms", "vision")
            or skip.has(weight.name)
        ):
            return None
        for names, scheme in chosen:
            if names is not None and names.has(weight.name):
                return scheme
        if weight.part in ("output", "router"):
            return None
        return next((scheme for names, scheme in chosen if names is None), None)

    first = chosen[0][1]
    method = (config.get_text("quant_method") or "compressed-tensors").lower()
    details = Quantization(
        method=method if method != "modelopt" else first.label.lower(), bits=first.bits, group_size=first.group,
        block=first.block, kv_cache=kv_cache, activation_bits=activation if activation and activation <= 16 else None,
    )  # fmt: skip
    return details, choose


def _make_group_scheme(weights: Config, form: str) -> StorageScheme:
    bits = _read_bits(weights)
    group = _read_group_size(weights, None)
    floating = weights.get_text("type") == "float"
    if floating and bits == 4:
        return MXFP4 if "mxfp4" in form or group == 32 else NVFP4
    if floating and bits == 8 and (group == 32 or "mxfp8" in form):
        return MXFP8
    label = f"{'FP' if floating else 'INT'}{bits:g}"
    block = _read_block(weights.get("block_structure")) if isinstance(weights.get("block_structure"), list) else None
    return StorageScheme(label, bits, group, 16.0 if group else 0.0, block)
