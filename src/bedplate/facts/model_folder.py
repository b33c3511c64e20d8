"""A model folder in Hugging Face's layout: configuration, safetensors or ONNX files, and the quantizer's files.

Nothing in it is executed: `auto_map` and Python files are ignored, and pickles are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from bedplate.errors import UsageError
from bedplate.facts.hf_config import read_config
from bedplate.facts.model_files import read_bytes, read_json
from bedplate.facts.onnx import read_onnx
from bedplate.facts.safetensors import MAX_INDEX_BYTES, MAX_TENSORS, SafetensorsTensor, parse_index, read_header
from bedplate.values import Model, replace_fields
from bedplate.values.model import ModelPart, TensorGroup

PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
SENTENCE_CONFIG = "sentence_bert_config.json"
_MAX_TEMPLATE = 1 << 16
_MAX_SHARDS = 4096
Format = Literal["gguf", "safetensors", "mlx", "exl2", "exl3", "onnx", "facts"]


def is_model_folder(folder: Path) -> bool:
    """Whether the folder contains a model in this layout, complete or not."""
    with suppress(OSError):
        if any((folder / name).is_file() for name in ("config.json", "genai_config.json")):
            return True
        return any(path.suffix in (".safetensors", ".onnx") for path in folder.iterdir())
    return False


def read_folder(folder: Path, *, name: str | None = None, origin: str | None = None) -> Model:
    """The model in a folder, from its configuration and the headers of its weights."""
    folder = folder.expanduser().absolute()
    name = name or _find_folder_name(folder)
    fields = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    shards = list_weight_files(folder)
    onnx = sorted(folder.glob("*.onnx")) or sorted((folder / "onnx").glob("*.onnx"))
    if not shards and (onnx or (folder / "genai_config.json").is_file()):
        return _limit_context(read_onnx(folder, fields, name=name, origin=origin or "a folder"), folder)
    if fields is None:
        raise UsageError(
            f"{folder} has no config.json, so bedplate cannot identify its weights",
            hint="put the model's config.json beside its weights, or specify a .gguf file",
        )
    quant_path = folder / "hf_quant_config.json"
    model = read_config(
        fields,
        name=name,
        quant_file=read_json(quant_path) if quant_path.is_file() else None,
        origin=origin or "a folder",
    )
    model = _limit_context(replace_fields(model, **_read_template(folder)), folder)
    if not shards:
        refuse_pickles(folder)
        size = _read_index_total(folder)
        return apply_quantization_in_name(model) if size is None else replace_fields(model, weight_bytes=size)
    headers = [read_header(path) for path in shards]
    metadata = headers[0].metadata
    return apply_tensors(
        model, [t for header in headers for t in header.tensors], metadata, fields, tuple(str(path) for path in shards)
    )


def _limit_context(model: Model, folder: Path) -> Model:
    path = folder / SENTENCE_CONFIG
    return limit_context(model, read_json(path)) if path.is_file() else model


def limit_context(model: Model, sentence_config: Any) -> Model:
    """Applies the longest input of a sentence-transformers model, which may be shorter than its positions."""
    longest = sentence_config.get("max_seq_length") if isinstance(sentence_config, dict) else None
    if type(longest) is not int or longest < 1:
        return model
    return replace_fields(model, max_context=min(longest, model.max_context or longest))


def read_config_file(path: Path) -> Model:
    """A single configuration file: `config.json`, or a copy named after its model."""
    path = path.expanduser().absolute()
    fields = read_json(path)
    stem = path.name.removesuffix(".json").removesuffix("config").rstrip("_-.")
    name = stem.replace("--", "/", 1) if stem else _find_folder_name(path.parent)
    quant_path = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
    quant = read_json(quant_path) if quant_path != path and quant_path.is_file() else None
    return apply_quantization_in_name(
        read_config(fields, name=name, quant_file=quant, origin="a configuration, without weights")
    )


def apply_quantization_in_name(model: Model) -> Model:
    """Apply a quantization that only the model's name states, if the configuration states none."""
    from bedplate.facts.known_models import quantize_by_name

    return model if model.quantization_details is not None else quantize_by_name(model)


def list_weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the folder's index lists, or all of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = parse_index(read_bytes(index, MAX_INDEX_BYTES), index.name).files
        missing = [file for file in listed if not (folder / file).is_file()]
        if missing and len(missing) < len(listed):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UsageError(
                f"{len(missing)} of {len(listed)} files of the model are not in {folder}: {shown}",
                hint="download the missing files into the same folder",
            )
        return [folder / file for file in listed] if not missing else []
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.name.startswith("."))
    if len(found) > 1 and (folder / "consolidated.safetensors") in found:
        # Mistral's folders hold the same weights twice.
        found.remove(folder / "consolidated.safetensors")
    if len(found) > _MAX_SHARDS:
        raise UsageError(
            f"{folder} has {len(found):,} safetensors files, more than any model has",
            hint="specify one model's folder",
        )
    return found


def _read_index_total(folder: Path) -> int | None:
    index = folder / "model.safetensors.index.json"
    return parse_index(read_bytes(index, MAX_INDEX_BYTES), index.name).total_bytes if index.is_file() else None


def refuse_pickles(folder: Path) -> None:
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES and path.is_file())
    found = [
        name for name in found if name not in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    ]
    if found:
        raise make_pickle_error(found[0])


def make_pickle_error(name: str) -> UsageError:
    return UsageError(
        f"{name} is a Python pickle, which runs code when it is opened; bedplate never opens one",
        hint="use a safetensors version of the model (most have one), or convert it on an isolated machine",
    )


_VISION = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|image_newline|multi_modal_projector|mm_projector|patch_merger|audio\w*|embed_(?:vision|audio))(?:\.|$)"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_ENCODER = re.compile(r"(?:^|\.)encoder\.")
_MTP = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|nextn|model_mtp)(?:\.|_|$)")
_WORDS = (
    ("shared experts", re.compile(r"shared_?(?:experts?|mlp)(?!_gate)")),
    ("experts", re.compile(r"(?:^|\.)experts(?:\.|_|$)")),
    ("router", re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)(?:\.|$)")),
    ("state space", re.compile(r"(?:^|\.)(?:mamba|mixer\.(?:in_proj|out_proj|conv1d|A_log|D|dt_bias))")),
    ("norms", re.compile(r"norm\w*\.(?:weight|bias)$|layernorm")),
    ("attention", re.compile(r"attn|attention|(?:^|\.)conv\.|\.[qkvo]_proj|hc_")),
    (
        "embedding",
        re.compile(
            r"embed_tokens|wte|word_embeddings|(?:^|\.)embeddings?\.|^embed\.|tok_embeddings|wpe|embed_positions|^shared\."
        ),
    ),
    ("output", re.compile(r"lm_head|^head\.|^output\.|embed_out|pooler|classifier|^score\.")),
)


def find_part(name: str, num_layers: int) -> str:
    """The purpose of a tensor, by its name."""
    if _VISION.search(name):
        return "vision"
    layer = _LAYER.search(name)
    if _MTP.search(name) or (layer and int(layer[1]) >= num_layers):
        return "mtp"
    for part, pattern in _WORDS:
        if pattern.search(name):
            return part
    return "mlp"


def apply_tensors(
    model: Model,
    tensors: Sequence[SafetensorsTensor],
    metadata: dict[str, str],
    fields: Any,
    files: tuple[str, ...],
    total_bytes: int | None = None,
) -> Model:
    """The configuration's facts, corrected by the tensors in the files."""
    if len(tensors) > 4 * MAX_TENSORS:
        raise UsageError(f"{model.name} lists {len(tensors):,} tensors, more than any model has")
    two_sided = any(part.name == "encoder" for part in model.parts)
    held: dict[str, list[int]] = {}
    types: dict[str, list[int]] = {}
    for tensor in tensors:
        part = find_part(tensor.name, model.num_layers)
        if two_sided and _ENCODER.search(tensor.name):
            part = "encoder"
        elif part == "embedding" and model.tied_embeddings:
            part = "output"
        sums = held.setdefault(part, [0, 0])
        sums[0] += tensor.elements
        sums[1] += tensor.bytes
        if part != "mtp":
            kind = types.setdefault(tensor.type, [0, 0, 0])
            for position, figure in enumerate((1, tensor.elements, tensor.bytes)):
                kind[position] += figure
    ordered = sorted(types.items(), key=lambda item: (-item[1][2], item[0]))
    groups = tuple(TensorGroup(type=kind, tensors=n, parameters=p, bytes=b) for kind, (n, p, b) in ordered)
    ahead = held.get("mtp", [0, 0])
    weight_bytes = sum(figures[1] for part, figures in held.items() if part != "mtp")
    changes: dict[str, Any] = {
        "files": files,
        "format": _find_format(model, metadata),
        "tensor_groups": groups,
        "weight_bytes": weight_bytes if total_bytes is None else total_bytes,
        "vision_weight_bytes": held.get("vision", [0, 0])[1],
        "mtp_weight_bytes": ahead[1],
        "parts": _make_parts(model, held),
    }
    if not ahead[0]:
        # Many repositories do not publish these heads, whatever their configuration says.
        changes["mtp_parameters"] = 0
    if model.quantization_details is None:
        counted = sum(figures[0] for part, figures in held.items() if part not in ("mtp", "vision"))
        changes |= _count_parameters(model, counted, held, groups)
    return replace_fields(model, **changes)


def _count_parameters(
    model: Model, counted: int, held: dict[str, list[int]], groups: tuple[TensorGroup, ...]
) -> dict[str, Any]:
    """For unquantized weights of an unknown architecture, use the parameter count of the files."""
    changes: dict[str, Any] = {
        "vision_parameters": held.get("vision", [0, 0])[0],
        "mtp_parameters": held.get("mtp", [0, 0])[0],
    }
    if groups:
        changes["quantization"] = max(groups, key=lambda group: group.parameters).type
    if counted and abs(counted - model.parameters) > 0.02 * counted:
        active = model.parameters if model.active_parameters is None else model.active_parameters
        changes["parameters"] = counted
        changes["active_parameters"] = (
            counted if active == model.parameters else round(counted * active / model.parameters)
        )
    return changes


def _make_parts(model: Model, held: dict[str, list[int]]) -> tuple[ModelPart, ...]:
    """The parts of the architecture, with the bytes of the files."""
    computed = {part.name: part for part in model.parts}
    if set(held) - set(computed) or not computed:
        return tuple(
            ModelPart(name=name, parameters=elements, active_parameters=elements, bytes=size)
            for name, (elements, size) in sorted(held.items())
        ) if model.num_experts is None else model.parts  # fmt: skip
    return tuple(replace_fields(part, bytes=held[part.name][1]) for part in model.parts if part.name in held)


def _find_format(model: Model, metadata: dict[str, str]) -> Format:
    method = model.quantization_details.method if model.quantization_details else ""
    if method == "exl2":
        return "exl2"
    if method == "exl3":
        return "exl3"
    return "mlx" if method == "mlx" or metadata.get("format") == "mlx" else "safetensors"


def _read_template(folder: Path) -> dict[str, Any]:
    """The chat template, from its own file or from the tokenizer's configuration."""
    with suppress(OSError, UnicodeDecodeError):
        path = folder / "chat_template.jinja"
        if path.is_file():
            text = path.read_bytes()[: _MAX_TEMPLATE + 1].decode("utf-8")
            return {"has_chat_template": bool(text), "chat_template": text if len(text) <= _MAX_TEMPLATE else None}
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    with suppress(UsageError):
        fields = read_json(path)
        template = fields.get("chat_template") if isinstance(fields, dict) else None
        if isinstance(template, str) and template:
            return {"has_chat_template": True, "chat_template": template if len(template) <= _MAX_TEMPLATE else None}
        return {"has_chat_template": bool(template)}
    return {}


def _find_folder_name(folder: Path) -> str:
    """A folder's name; for a snapshot in the hub's cache, the repository's name."""
    parts: Iterable[str] = reversed(folder.parts)
    for part in parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return folder.name or "model"
