"""ONNX folders: file sizes, and the tensors that a graph lists, without an ONNX library.

A .onnx file is one protocol-buffer message. The reader skips weights by their lengths and reads only names, types and
shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bedplate.errors import UsageError
from bedplate.facts.hf_config import find_task, read_config
from bedplate.facts.hf_fields import Config, InvalidConfig
from bedplate.facts.model_files import read_json
from bedplate.values import Model, replace_fields
from bedplate.values.model import LayerGroup, TensorGroup

# TensorProto.DataType: name and bits.
_TYPES = {
    1: ("F32", 32), 2: ("U8", 8), 3: ("I8", 8), 4: ("U16", 16), 5: ("I16", 16), 6: ("I32", 32), 7: ("I64", 64),
    9: ("BOOL", 8),
    10: ("F16", 16), 11: ("F64", 64), 12: ("U32", 32), 13: ("U64", 64), 16: ("BF16", 16), 17: ("F8_E4M3", 8),
    19: ("F8_E5M2", 8),
    21: ("U4", 4), 22: ("I4", 4), 23: ("F4", 4),
}  # fmt: skip
_MAX_TENSORS = 1 << 18
_MAX_FIELDS = 1 << 22
_MAX_BYTES = 1 << 50


class _DamagedGraph(Exception):
    pass


def read_onnx(folder: Path, fields: Any, *, name: str, origin: str | None) -> Model:
    """The model in a folder of .onnx files, with or without ONNX Runtime GenAI's configuration."""
    genai = read_json(folder / "genai_config.json") if (folder / "genai_config.json").is_file() else None
    graph = _choose_graph(folder, genai)
    files = (graph, *_find_weight_files(graph))
    weight_bytes = sum(path.stat().st_size for path in files)
    groups = _group_tensors(graph)
    counted = sum(group.parameters for group in groups)
    changes = {
        "format": "onnx",
        "files": tuple(str(path) for path in files),
        "weight_bytes": weight_bytes,
        "tensor_groups": groups,
        "quantization": max(groups, key=lambda group: group.bytes).type if groups else None,
        "parts": (),
        "origin": origin,
    }
    if fields is not None:
        return replace_fields(read_config(fields, name=name), **changes)
    if not isinstance(genai, dict):
        return _make_bare_model(name, counted, changes)
    try:
        return replace_fields(_make_from_genai(Config(genai), name, counted), **changes)
    except InvalidConfig as problem:
        raise UsageError(f"genai_config.json of {name} does not describe a model", cause=str(problem)) from None


def _choose_graph(folder: Path, genai: Any) -> Path:
    """The file for the engine: the one in the configuration, or the largest."""
    decoder = Config(genai).get_section("model") if isinstance(genai, dict) else None
    decoder = decoder.get_section("decoder") if decoder else None
    named = decoder.get_text("filename") if decoder else None
    if named and "/" not in named and (folder / named).is_file():
        return folder / named
    found = sorted(folder.glob("*.onnx")) or sorted((folder / "onnx").glob("*.onnx"))
    if not found:
        raise UsageError(f"{folder} has no .onnx file", hint="download the model's .onnx files")
    plain = [path for path in found if path.name in ("model.onnx", "decoder_model_merged.onnx")]
    return (
        plain[0]
        if plain
        else max(found, key=lambda path: path.stat().st_size + sum(b.stat().st_size for b in _find_weight_files(path)))
    )


def _find_weight_files(graph: Path) -> list[Path]:
    """The files that hold the weights of a graph of more than 2 GB."""
    names = (f"{graph.name}.data", f"{graph.name}_data", f"{graph.stem}.data", f"{graph.stem}.onnx_data")
    found = [graph.with_name(name) for name in names]
    found += sorted(graph.parent.glob(f"{graph.name}_data_*")) + sorted(graph.parent.glob(f"{graph.name}.data.*"))
    return [path for path in dict.fromkeys(found) if path.is_file()]


def _make_from_genai(config: Config, name: str, counted: int) -> Model:
    model = config.get_section("model") or Config({})
    decoder = model.get_section("decoder") or Config({})
    layers = decoder.require_count("num_hidden_layers", most=4096)
    heads = decoder.require_count("num_attention_heads")
    kv_heads = decoder.get_count("num_key_value_heads") or heads
    head = decoder.require_count("head_size")
    per_token = 2 * layers * kv_heads * 2 * head
    return Model(
        name=name,
        format="onnx",
        architecture=(model.get_text("type") or "unknown")[:80],
        parameters=counted,
        active_parameters=counted,
        weight_bytes=0,
        num_layers=layers,
        hidden_size=decoder.get_count("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        vocab_size=model.get_count("vocab_size", most=1 << 28),
        max_context=model.get_count("context_length", most=1 << 40),
        kv_bytes_per_token=per_token,
        layers=(
            LayerGroup(
                kind="full attention",
                count=layers,
                kv_bytes_per_token=per_token,
                kv_heads=kv_heads,
                key_dim=head,
                value_dim=head,
            ),
        ),
    )


def _make_bare_model(name: str, counted: int, changes: dict[str, Any]) -> Model:
    """A graph alone gives the size of a model but not its architecture."""
    model = Model(
        name=name, format="onnx", architecture="onnx", task=find_task(None, ""), parameters=counted,
        active_parameters=counted,
        weight_bytes=0, num_layers=0, kv_bytes_per_token=0,
    )  # fmt: skip
    return replace_fields(model, task="other", **changes)


def _group_tensors(path: Path) -> tuple[TensorGroup, ...]:
    """The initializers of a graph by type. Packed 4-bit matrices are stored as bytes with two weights each."""
    sums: dict[str, list[int]] = {}
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            for kind, elements, packed in _read_initializers(file, size):
                label, bits = _TYPES.get(kind, ("?", 8))
                if packed and label == "U8":
                    label, bits, elements = "INT4", 4, elements * 2
                group = sums.setdefault(label, [0, 0, 0])
                for position, figure in enumerate((1, elements, -(-elements * bits // 8))):
                    group[position] += figure
    except _DamagedGraph as damage:
        raise UsageError(
            f"{path.name} is damaged or not an ONNX file", cause=str(damage), hint="download it again"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", cause=error.strerror or str(error)) from None
    ordered = sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))
    return tuple(TensorGroup(type=kind, tensors=n, parameters=p, bytes=b) for kind, (n, p, b) in ordered)


def _read_initializers(file: BinaryIO, size: int) -> Iterator[tuple[int, int, bool]]:
    """Type, number of elements and packing of each initializer of the main graph."""
    seen = 0
    for field, start, end in _read_messages(file, 0, size):
        if field != 7:  # ModelProto.graph
            continue
        for inner, tensor_start, tensor_end in _read_messages(file, start, end):
            if inner == 5:  # GraphProto.initializer
                seen += 1
                if seen > _MAX_TENSORS:
                    raise _DamagedGraph(f"it lists more than {_MAX_TENSORS:,} tensors")
                yield _read_initializer(file, tensor_start, tensor_end)


def _read_initializer(file: BinaryIO, start: int, end: int) -> tuple[int, int, bool]:
    elements, kind, name = 1, 0, b""
    for field, at, until in _read_messages(file, start, end, varints=True):
        if field == 1:  # dims: one value each, or packed into one run
            if until is None:
                elements *= at
            else:
                file.seek(at)
                for value in _decode_varints(file.read(min(until - at, 1024))):
                    elements *= value
        elif field == 2 and until is None:
            kind = at
        elif field == 8 and until is not None:
            file.seek(at)
            name = file.read(min(until - at, 512))
        if elements > _MAX_BYTES:
            raise _DamagedGraph("a tensor has more weights than a file can hold")
    return kind, elements, name.lower().endswith((b"_q4", b"_quant", b".qweight", b"_packed", b"_q4g32", b"_dq_q4"))


def _decode_varints(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
        elif shift > 63:
            raise _DamagedGraph("an integer has more than 64 bits")


def _read_messages(file: BinaryIO, start: int, end: int, varints: bool = False) -> Iterator[tuple[int, int, Any]]:
    """Fields of a message: number and byte span; for an integer, its value and None."""
    at, count = start, 0
    while at < end:
        count += 1
        if count > _MAX_FIELDS:
            raise _DamagedGraph("it has more fields than any graph has")
        tag, at = _read_varint(file, at, end)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _read_varint(file, at, end)
            if varints:
                yield field, value, None
        elif wire == 2:
            length, at = _read_varint(file, at, end)
            if at + length > end:
                raise _DamagedGraph("a field reaches past the end of the file")
            yield field, at, at + length
            at += length
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise _DamagedGraph(f"a field has the unknown wire type {wire}")


def _read_varint(file: BinaryIO, at: int, end: int) -> tuple[int, int]:
    file.seek(at)
    value = shift = 0
    for byte in file.read(min(10, end - at)):
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            return value, at
    raise _DamagedGraph("an integer is not terminated")
