"""GGUF: facts about a model, read from the header of its file.

The file is untrusted. Every count and length is checked against the file's size, or against a limit far above any real
model, before anything is allocated. Nothing is executed, and weights are not read.
"""

from __future__ import annotations

import re
import shutil
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from bedplate.errors import UsageError
from bedplate.facts.projector import list_candidates, read_projector
from bedplate.values.model import LayerGroup, LayerKind, Model, Projector, Task, TensorGroup
from bedplate.values.units import format_size as human_size

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""ggml's tensor types by number: name, weights per block, bytes per block."""

# Type numbers in files of 2023 and 2024 that ggml has removed since.
_RETIRED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# general.file_type, numbered as in llama.h: the quantization recipe, which is more specific than a tensor type.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip

# Each limit is well above any published model, and low enough that a malicious header takes about a second.
_MAX_HEADER_BYTES = 128 << 20
_MAX_FIELDS = 1 << 16
_MAX_STRINGS = 1 << 22
_MAX_TENSORS = 1 << 18
_MAX_KEPT_STRING = 1 << 16
_MAX_KEPT_ARRAY = 1 << 12
_MAX_LAYERS = 1 << 12
_MAX_WIDTH = 1 << 24
_MAX_FIGURE = 1 << 62
_ABSURD_LENGTH = 1 << 44

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOO_LONG = b"(too long to keep)"

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


class GgufTensor(NamedTuple):
    name: str
    type: str
    elements: int
    bytes: int
    offset: int


class GgufArray(NamedTuple):
    """An array of the header. `values` is None if only the length is needed, as for vocabularies."""

    length: int
    values: tuple[int | float | bool, ...] | None


Value = int | float | bool | bytes | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """One file's header. Strings stay bytes, because files contain various encodings."""

    version: int
    little_endian: bool
    fields: dict[str, Value]
    tensors: list[GgufTensor]
    data_offset: int
    promised_bytes: int
    """The file size that the header implies."""
    file_bytes: int
    vocabulary: int | None = None
    embedding_rows: int | None = None


class _HeaderTooShort(Exception):
    """The header extends past the end of the file."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _DamagedHeader(Exception):
    """The header contains an impossible value."""


@dataclass(slots=True)
class _HeaderReader:
    """The beginning of a file, read in growing pieces."""

    file: BinaryIO
    file_bytes: int
    buffer: bytes = b""
    position: int = 0
    order: str = "<"
    strings: int = field(default=0)

    def fill_up_to(self, end: int) -> None:
        """Fill the buffer up to `end`."""
        if end <= len(self.buffer):
            return
        if end > _ABSURD_LENGTH:
            raise _DamagedHeader("it states a length that no file can have")
        if end > self.file_bytes:
            raise _HeaderTooShort(end)
        if end > _MAX_HEADER_BYTES:
            raise _DamagedHeader(f"its header is longer than {human_size(_MAX_HEADER_BYTES)}")
        wanted = min(self.file_bytes, max(end, 2 * len(self.buffer), 1 << 20))
        self.buffer += self.file.read(wanted - len(self.buffer))
        if len(self.buffer) < end:
            raise _HeaderTooShort(end)

    def read_integers(self, layout: str) -> tuple[int, ...]:
        """Read the next integers by a `struct` layout."""
        unpack = struct.Struct(self.order + layout)
        self.fill_up_to(self.position + unpack.size)
        values = unpack.unpack_from(self.buffer, self.position)
        self.position += unpack.size
        return values

    def read_scalar(self, kind: int) -> int | float | bool:
        value: int | float | bool = self.read_integers(_SCALARS[kind])[0]
        return value

    def read_text(self, most: int) -> bytes | None:
        """Read the next string. None if it is longer than `most`; it is then skipped without a copy."""
        (length,) = self.read_integers("Q")
        end = self.position + length
        self.fill_up_to(end)
        value = self.buffer[self.position : end] if length <= most else None
        self.position = end
        return value

    def read_name(self, what: str, most: int) -> str:
        value = self.read_text(most)
        if value is None:
            raise _DamagedHeader(f"it has {what} of more than {most} bytes")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedHeader(f"it has {what} that is not UTF-8") from None

    def read_array(self) -> GgufArray:
        kind, count = self.read_integers("IQ")
        if kind == _STRING:
            self.skip_strings(count)
            return GgufArray(count, None)
        if kind == _ARRAY:
            # The format allows arrays of arrays. No model has one, and llama.cpp rejects them too.
            raise _DamagedHeader("it has an array of arrays, which no engine reads")
        if kind not in _SCALARS:
            raise _DamagedHeader(f"it has an array of the unknown type {kind}")
        layout = _SCALARS[kind]
        start = self.position
        self.fill_up_to(start + count * struct.calcsize(self.order + layout))
        if count > _MAX_KEPT_ARRAY:
            self.position = start + count * struct.calcsize(self.order + layout)
            return GgufArray(count, None)
        return GgufArray(count, tuple(self.read_integers(f"{count}{layout}")))

    def skip_strings(self, count: int) -> None:
        """Skip a vocabulary. Most of the time is spent here, so the loop does nothing else."""
        self.strings += count
        if self.strings > _MAX_STRINGS:
            raise _DamagedHeader(f"it lists {self.strings:,} strings, more than any vocabulary has")
        unpack = struct.Struct(self.order + "Q").unpack_from
        position, left = self.position, count
        while left:
            buffer = self.buffer
            try:
                for left in range(left, 0, -1):  # noqa: B007, B020 - on an exception `left` says where to go on
                    position += 8 + unpack(buffer, position)[0]
                left = 0
            except (struct.error, OverflowError):
                self.fill_up_to(position + 8)
        self.fill_up_to(position)
        self.position = position


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of one file. Other parts of a split model are not read."""
    name = path.name
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{path} is a folder, not a GGUF file", hint="specify a .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file", hint="specify a .gguf file")
        with path.open("rb") as file:
            head = _HeaderReader(file, status.st_size)
            try:
                return _parse_header(head, name)
            except _HeaderTooShort as short:
                # A file that ends within its header has no tensor list, so only a lower bound is known.
                _raise_cut_short(path, f"its header alone needs {short.needed:,} bytes", status.st_size)
            except _DamagedHeader as damage:
                raise UsageError(
                    f"{name} is damaged", cause=str(damage), hint="download it again, and compare its checksum"
                ) from None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a path with a zero byte is a ValueError
        raise UsageError(f"there is no file {path}", hint="check the path") from None
    except PermissionError:
        raise UsageError(f"no permission to read {path}", hint=f"chmod a+r {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", cause=error.strerror or str(error), hint="check the disk") from None


def _parse_header(head: _HeaderReader, name: str) -> GgufHeader:
    head.fill_up_to(min(head.file_bytes, 512))
    if head.buffer[:4] != b"GGUF":
        raise UsageError(
            f"{name} is not a GGUF file: it {_describe_other_format(head.buffer, head.file_bytes)}", hint=_ADVICE
        )
    head.position = 4
    (version,) = head.read_integers("I")
    if version & 0xFFFF == 0 and version:
        # Versions are small, so zeros in the low half mean the opposite byte order.
        head.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version == 1:
        raise UsageError(
            f"{name} has GGUF version 1 (2023), which engines no longer read",
            hint="download a newer conversion of the model",
        )
    if version not in (2, 3):
        raise UsageError(
            f"{name} has GGUF version {version}; this bedplate reads versions 2 and 3",
            hint="update bedplate; if the file should have an older version, download it again",
        )
    num_tensors, num_fields = head.read_integers("QQ")
    # A field takes at least 13 bytes and a tensor at least 33.
    if num_fields > _MAX_FIELDS or num_tensors > _MAX_TENSORS:
        raise _DamagedHeader(f"it states {num_fields:,} fields and {num_tensors:,} tensors, more than any model has")
    if (needed := head.position + 13 * num_fields + 33 * num_tensors) > head.file_bytes:
        raise _HeaderTooShort(needed)

    fields: dict[str, Value] = {}
    vocabulary = None
    for _ in range(num_fields):
        key = head.read_name("a key", _MAX_KEPT_STRING)
        (kind,) = head.read_integers("I")
        value: Value
        if kind == _STRING:
            text = head.read_text(_MAX_KEPT_STRING)
            value = _TOO_LONG if text is None else text
        elif kind == _ARRAY:
            value = head.read_array()
            if key == "tokenizer.ggml.tokens":
                vocabulary = value.length
        elif kind in _SCALARS:
            value = head.read_scalar(kind)
        else:
            raise _DamagedHeader(f"the field {_escape_text(key)} has the unknown type {kind}")
        if key in fields:
            raise _DamagedHeader(f"the field {_escape_text(key)} occurs twice")
        fields[key] = value

    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise _DamagedHeader("its alignment is not a power of two")

    tensors: list[GgufTensor] = []
    seen: set[str] = set()
    embedding_rows = None
    for _ in range(num_tensors):
        tensor_name = head.read_name("a tensor name", 1024)
        if tensor_name in seen:
            raise _DamagedHeader(f"the tensor {_escape_text(tensor_name)} occurs twice")
        seen.add(tensor_name)
        (num_dims,) = head.read_integers("I")
        if num_dims > 4:
            raise _DamagedHeader(
                f"the tensor {_escape_text(tensor_name)} has {num_dims:,} dimensions; the maximum is four"
            )
        *dims, kind, offset = head.read_integers(f"{num_dims}QIQ")
        if kind not in GGML_TYPES:
            raise _make_unknown_type_error(name, tensor_name, kind)
        type_name, block, block_bytes = GGML_TYPES[kind]
        elements = 1
        for dim in dims:
            elements *= dim
        if elements >= _MAX_FIGURE:
            raise _DamagedHeader(f"the tensor {_escape_text(tensor_name)} has more weights than a file can hold")
        if (dims[0] if dims else 1) % block:
            raise _DamagedHeader(f"rows of the tensor {_escape_text(tensor_name)} are not whole blocks of {type_name}")
        if offset % alignment:
            raise _DamagedHeader(f"the tensor {_escape_text(tensor_name)} is not aligned to {alignment} bytes")
        if tensor_name == "token_embd.weight" and num_dims == 2:
            embedding_rows = dims[1]
        tensors.append(GgufTensor(tensor_name, type_name, elements, elements // block * block_bytes, offset))

    data_offset = -(-head.position // alignment) * alignment
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise _DamagedHeader(f"the tensor {_escape_text(tensor.name)} overlaps another")
        end = tensor.offset + tensor.bytes
    promised = data_offset + end if tensors else head.position
    if promised > _ABSURD_LENGTH:
        raise _DamagedHeader(f"its tensors would take {human_size(promised)}")
    return GgufHeader(
        version, head.order == "<", fields, tensors, data_offset, promised, head.file_bytes, vocabulary, embedding_rows
    )


def read_gguf(path: Path | str, *, name: str | None = None, origin: str | None = None) -> Model:
    """Read the model in a GGUF file. For one part of a split model, all parts are read."""
    path = Path(path).expanduser().absolute()
    header = read_header(path)
    parts = [(path, header)] if _read_part_count(path, header) <= 1 else _read_all_parts(path, header)
    for part, part_header in parts:
        if part_header.promised_bytes > part_header.file_bytes:
            _raise_cut_short(part, f"the header requires {part_header.promised_bytes:,} bytes", part_header.file_bytes)
    first, header = parts[0]
    tensors = [tensor for _, part_header in parts for tensor in part_header.tensors]
    try:
        return _make_model(_HeaderFacts(header), tensors, parts, name=name, origin=origin)
    except _DamagedHeader as damage:
        raise UsageError(
            f"{first.name} does not describe a model that bedplate can plan for",
            cause=str(damage),
            hint="download it again, or use another conversion of the model",
        ) from None


def list_parts(path: Path) -> tuple[Path, ...] | None:
    """The paths of all parts of a split model, derived from the name of one; None for a single file."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return None
    suffix = path.name[match.end("count") :]
    count = int(match["count"])
    return tuple(path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}{suffix}") for no in range(1, count + 1))


def _read_part_count(path: Path, header: GgufHeader) -> int:
    count = header.fields.get("split.count", 0)
    if type(count) is not int or count < 0:
        raise UsageError(f"{path.name} is damaged", cause="split.count is not a count", hint="download it again")
    return count


def _read_all_parts(path: Path, header: GgufHeader) -> list[tuple[Path, GgufHeader]]:
    """All parts in order, each checked to belong to the same model."""
    count = _read_part_count(path, header)
    paths = list_parts(path)
    if paths is None or len(paths) != count:
        raise UsageError(
            f"{path.name} is one of {count} parts, but its name does not say which one",
            hint=f"rename the parts to NAME-00001-of-{min(count, 99_999):05d}.gguf and so on",
        )
    # Ollama and the hub's cache may name blobs by hash, but a split model is always found by the names of its parts.
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UsageError(
            f"{len(missing)} of {count} parts of the model are not in {path.parent}: {shown}",
            hint="download the missing parts into the same folder",
        )
    parts = [(part, header if part == path else read_header(part)) for part in paths]
    names: set[str] = set()
    for number, (part, part_header) in enumerate(parts):
        if part_header.fields.get("split.no") != number or part_header.fields.get("split.count") != count:
            raise UsageError(
                f"{part.name} has a header for a different part than its name states",
                hint="download the parts again; files of two models may be mixed up",
            )
        for tensor in part_header.tensors:
            if tensor.name in names:
                raise UsageError(
                    f"{part.name} repeats the tensor {_escape_text(tensor.name)} of another part",
                    hint="download it again",
                )
            names.add(tensor.name)
    expected = parts[0][1].fields.get("split.tensors.count")
    if type(expected) is int and expected != len(names):
        raise UsageError(
            f"the parts beside {path.name} hold {len(names):,} tensors, but the first part states {expected:,}",
            hint="download the parts again; files of two models may be mixed up",
        )
    return parts


class _HeaderFacts:
    """The header's fields, by meaning."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.fields = header.fields
        self.architecture = self.get_text("general.architecture") or ""
        if not self.architecture:
            raise _DamagedHeader("general.architecture is not in the header")

    def get_text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if not isinstance(value, bytes):
            return None
        return _escape_text(value.decode("utf-8", "replace"), most=200).strip() or None

    def get_whole_text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if not isinstance(value, bytes) or value == _TOO_LONG:
            return None
        return value.decode("utf-8", "replace") or None

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.fields

    def get_value(self, key: str) -> Value | None:
        return self.fields.get(f"{self.architecture}.{key}")

    def get_count(self, key: str, most: int = _MAX_WIDTH) -> int | None:
        """A count in the architecture's section; for an array, the maximum."""
        value = self.get_value(key)
        if value is None:
            return None
        if isinstance(value, GgufArray):
            values = [self._check_count(key, item, most) for item in value.values or ()]
            return max(values, default=None)
        return self._check_count(key, value, most)

    def get_layer_counts(self, key: str, num_layers: int, most: int = _MAX_WIDTH) -> list[int] | None:
        """A count per layer, stated once for all or as an array."""
        value = self.get_value(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray):
            return [self._check_count(key, value, most)] * num_layers
        if value.values is None or len(value.values) < num_layers:
            raise _DamagedHeader(f"{key} has {value.length:,} entries for {num_layers} layers")
        return [self._check_count(key, item, most) for item in value.values[:num_layers]]

    def _check_count(self, key: str, value: object, most: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise _DamagedHeader(f"{self.architecture}.{key} is {_escape_text(str(value))}")
        return int(value)


_BLOCK = re.compile(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.")
_EXPERTS = re.compile(r"_(?:ch)?exps\b|ffn_(?:gate|up|down)\.\d+\.")
# Tables and scales that are not learned, and the vision or audio encoders that Ollama keeps in the same file.
_APART = re.compile(r"(?:^|\.)rope_(?:freqs|factors_\w+)\b|\.(?:input_)?scale$|^(?:v|a|mm)\.")

# Encoders have no cache: llama.cpp creates none for these (llama_model::create_memory).
_ENCODERS = {
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "nomic-bert",
    "nomic-bert-moe", "t5encoder",
}  # fmt: skip
_EMBEDDERS = _ENCODERS | {"llama-embed"}
_DIFFUSION = {"dream", "llada", "llada-moe", "rnd1"}
_POOLING_RANK = 4


def _make_model(
    facts: _HeaderFacts,
    tensors: list[GgufTensor],
    parts: list[tuple[Path, GgufHeader]],
    *,
    name: str | None,
    origin: str | None,
) -> Model:
    path = parts[0][0]
    _refuse_companions(facts, path, tensors)
    blocks = facts.get_count("block_count", _MAX_LAYERS)
    if blocks is None:
        blocks = 1 + max((int(match[1]) for t in tensors if (match := _BLOCK.match(t.name))), default=-1)
    # Multi-token-prediction heads are appended as further blocks. They are not layers of the model itself.
    ahead = facts.get_count("nextn_predict_layers", _MAX_LAYERS) or 0
    num_layers = blocks - min(blocks, ahead)
    if not 0 < num_layers <= _MAX_LAYERS:
        raise _DamagedHeader(f"it has {num_layers:,} layers")

    experts = facts.get_count("expert_count") or None
    experts_used = (facts.get_count("expert_used_count") or None) if experts else None
    if experts and experts_used and experts_used > experts:
        raise _DamagedHeader(f"{experts_used:,} of {experts:,} experts are used")
    parameters, expert_parameters = _count_parameters(tensors, num_layers if ahead else None)
    active = parameters
    if experts and experts_used:
        active = parameters - expert_parameters + expert_parameters * experts_used // experts

    groups = _group_tensors(tensors)
    weight_bytes = sum(group.bytes for group in groups)
    file_type = facts.fields.get("general.file_type")
    recipe = _FILE_TYPES.get(file_type) if type(file_type) is int else None
    max_context = facts.get_count("context_length", 1 << 40) or None
    heads = facts.get_layer_counts("attention.head_count", num_layers) or [0] * num_layers
    kv_heads = facts.get_layer_counts("attention.head_count_kv", num_layers) or heads
    cache = _compute_cache(facts, num_layers, heads, kv_heads, max_context)
    if max(parameters, weight_bytes, *cache[:3]) > _MAX_FIGURE:
        raise _DamagedHeader("its sizes exceed any computer's memory")
    header, task, hidden_size = facts.header, _find_task(facts), facts.get_count("embedding_length") or None
    return Model(
        name=name or _choose_name(facts, path),
        format="gguf",
        files=tuple(str(part) for part, _ in parts),
        origin=origin,
        architecture=facts.architecture,
        task=task,
        parameters=parameters,
        active_parameters=active,
        weight_bytes=weight_bytes,
        quantization=recipe or groups[0].type,
        tensor_groups=groups,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=max(heads) or None,
        num_kv_heads=max(kv_heads) or None,
        num_experts=experts,
        num_experts_active=experts_used,
        vocab_size=facts.get_count("vocab_size", 1 << 31) or header.vocabulary or header.embedding_rows,
        max_context=max_context,
        kv_bytes_per_token=cache.per_token,
        kv_bytes_window=cache.window,
        state_bytes=cache.state,
        layers=cache.layers,
        projector=_find_projector(path, hidden_size) if task == "generate" else None,
        chat_template=facts.get_whole_text("tokenizer.chat_template"),
        has_chat_template=any(v for key, v in facts.fields.items() if key.startswith("tokenizer.chat_template")),
    )


def _find_projector(model: Path, hidden_size: int | None) -> Projector | None:
    """The vision encoder beside a model's file; `None`: there is none, or it is not certain which one it is."""
    found = []
    for path in list_candidates(model, strip_file_name):
        try:
            header = read_header(path)
        except (UsageError, OSError):
            continue  # the language model works without it
        tensors = [(tensor.elements, tensor.bytes) for tensor in header.tensors]
        one = read_projector(path, header.fields, tensors, hidden_size)
        if one is not None and header.promised_bytes <= header.file_bytes:
            found.append(one)
    # Half precision rather than single: it is as good, and takes half the memory.
    return min(found, key=lambda one: (one.weight_bytes, one.file), default=None)


def _refuse_companions(facts: _HeaderFacts, path: Path, tensors: list[GgufTensor]) -> None:
    kind = facts.get_text("general.type")
    if kind == "mmproj" or facts.architecture == "clip":
        raise UsageError(
            f"{path.name} is a vision or audio encoder (mmproj), not a language model",
            hint="specify the language model's .gguf; it is usually in the same folder",
        )
    if kind == "adapter":
        raise UsageError(f"{path.name} is a LoRA adapter, not a model", hint="specify the base model's .gguf")
    if kind == "imatrix" or facts.architecture == "imatrix":
        raise UsageError(f"{path.name} is an importance matrix for quantization, not a model")
    if not tensors:
        raise UsageError(f"{path.name} contains only a header and no weights", hint="it may be a vocabulary for tests")


def _count_parameters(tensors: list[GgufTensor], trunk_layers: int | None) -> tuple[int, int]:
    """Learned weights, and how many of them belong to routed experts.

    Tied embeddings are one tensor in the file and count once.
    """
    total = experts = 0
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if (block and trunk_layers is not None and int(block[1]) >= trunk_layers) or _APART.search(tensor.name):
            continue
        total += tensor.elements
        if block and _EXPERTS.search(tensor.name):
            experts += tensor.elements
    return total, experts


def _group_tensors(tensors: list[GgufTensor]) -> tuple[TensorGroup, ...]:
    """Tensors by storage type, largest first."""
    sums: dict[str, list[int]] = {}
    for tensor in tensors:
        group = sums.setdefault(tensor.type, [0, 0, 0])
        group[0] += 1
        group[1] += tensor.elements
        group[2] += tensor.bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))
    return tuple(TensorGroup(type=kind, tensors=n, parameters=p, bytes=b) for kind, (n, p, b) in ordered)


def _find_task(facts: _HeaderFacts) -> Task:
    value = facts.get_value("pooling_type")
    pooling = value if type(value) is int and value > 0 else 0
    if pooling == _POOLING_RANK or facts.has("classifier.output_labels"):
        return "classify"
    if facts.architecture in _EMBEDDERS or pooling:
        return "embed"
    return "other" if facts.architecture == "wavtokenizer-dec" else "generate"


class _CacheSizes(NamedTuple):
    per_token: int
    window: int
    state: int
    layers: tuple[LayerGroup, ...] = ()


class _WindowPattern(NamedTuple):
    """Which layers of an architecture are windowed: all but the last or the first in each `period`."""

    period: int
    dense_first: bool = False
    window: int | None = None
    """The window if the file states none; with `fixed`, always."""
    fixed: bool = False


# What llama.cpp assumes for files without attention.sliding_window_pattern: load_arch_hparams in src/models/*.cpp, as
# of August 2026. Any other architecture without a pattern is computed with full attention, even if its file has a
# window (phi3, and llama files of Mistral's first models), so its cache is not smaller either.
_WINDOWS = {
    "afmoe": _WindowPattern(4),
    "cohere2": _WindowPattern(4),
    "cohere2moe": _WindowPattern(4, dense_first=True),
    "exaone-moe": _WindowPattern(4, window=128),
    "exaone4": _WindowPattern(4, window=4096),
    "gemma2": _WindowPattern(2, window=4096),
    "gemma3": _WindowPattern(6),
    "gemma3n": _WindowPattern(5),
    "gpt-oss": _WindowPattern(2),
    "gptoss": _WindowPattern(2),  # Ollama's spelling
    "laguna": _WindowPattern(4, dense_first=True),
    "llama4": _WindowPattern(4, window=8192, fixed=True),
    "mellum": _WindowPattern(4),
    "muse-glimmer": _WindowPattern(4),
    "olmo2": _WindowPattern(4),
    "plamo3": _WindowPattern(8),
    "smallthinker": _WindowPattern(4, dense_first=True, window=4096, fixed=True),
}

# Purely recurrent: llm_arch_is_recurrent in llama-arch.cpp.
_RECURRENT = {"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"}
# Every full_attention_interval-th layer has attention and the others are linear. The number is the default interval.
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
_INDEXED = {"deepseek32", "glm-dsa"}


def _compute_cache(
    facts: _HeaderFacts, num_layers: int, heads: list[int], kv_heads: list[int], max_context: int | None
) -> _CacheSizes:
    if facts.architecture in _ENCODERS | _DIFFUSION | {"wavtokenizer-dec"}:
        return _CacheSizes(0, 0, 0)
    recurrent, attends = _find_layer_kinds(facts, num_layers, kv_heads)
    windowed, window = _find_windowed_layers(facts, num_layers, attends)
    own = _count_layers_with_own_cache(facts, num_layers)

    width = facts.get_count("embedding_length") or 0
    head = width // max(heads) if max(heads) else 0
    key, value = (_get_or_default(facts, f"attention.{kind}_length", head) for kind in ("key", "value"))
    key_swa, value_swa = (
        _get_or_default(facts, f"attention.{kind}_length_swa", full) for kind, full in (("key", key), ("value", value))
    )
    latent = None
    if facts.get_count("attention.key_length_mla") and facts.get_count("attention.value_length_mla"):
        # The cache holds only the compressed latent and the rotated part, once for all heads; values are read from the
        # same cells. Conversions without these keys keep full keys and values.
        latent = (facts.get_count("attention.kv_lora_rank") or 0) + (facts.get_count("rope.dimension_count") or 0)
        latent = latent or key
    # Sparse attention keeps a small extra key for its selection, in every layer unless a list says otherwise.
    indexer = (facts.get_count("attention.indexer.key_length") or 0) if facts.architecture in _INDEXED else 0

    per_token = window_token = 0
    kinds: dict[tuple[LayerKind, int], int] = {}
    for layer in range(num_layers):
        if not attends[layer] or layer >= own:
            kind: LayerKind = (
                "state space" if recurrent[layer] else "shares another layer's cache" if attends[layer] else "no cache"
            )
            kinds[kind, 0] = kinds.get((kind, 0), 0) + 1
            continue
        if latent is not None:
            values = latent + indexer
        elif windowed[layer]:
            values = kv_heads[layer] * (key_swa + value_swa)
        else:
            values = kv_heads[layer] * (key + value)
        if windowed[layer]:
            window_token += 2 * values
            kind = "windowed attention"
        else:
            per_token += 2 * values
            kind = (
                "attention and state space"
                if recurrent[layer]
                else "latent attention"
                if latent is not None
                else "full attention"
            )
            kind = "sparse attention" if indexer and latent is not None else kind
        kinds[kind, values] = kinds.get((kind, values), 0) + 1
    held = min(window, max_context) if max_context else window
    state = _compute_state_bytes(facts, width, max(heads))
    return _CacheSizes(per_token, window_token * held, sum(recurrent) * state, _make_layer_groups(kinds, held, state))


def _make_layer_groups(kinds: dict[tuple[LayerKind, int], int], window: int, state: int) -> tuple[LayerGroup, ...]:
    """Layers grouped by kind and by bytes per token, in order of first occurrence."""
    groups = []
    for (kind, values), count in kinds.items():
        windowed = kind == "windowed attention"
        groups.append(
            LayerGroup(
                kind=kind,
                count=count,
                kv_bytes_per_token=0.0 if windowed else 2.0 * values * count,
                window=window if windowed else None,
                kv_bytes_window=2 * values * count * window if windowed else 0,
                state_bytes=state * count if kind in ("state space", "attention and state space") else 0,
            )
        )
    return tuple(groups)


def _get_or_default(facts: _HeaderFacts, key: str, default: int) -> int:
    value = facts.get_count(key)
    return default if value is None else value


def _find_layer_kinds(facts: _HeaderFacts, num_layers: int, kv_heads: list[int]) -> tuple[list[bool], list[bool]]:
    """Per layer: whether it keeps a constant state, and whether it keeps keys and values. Both are possible."""
    has_heads = [count > 0 for count in kv_heads]
    if facts.architecture in _RECURRENT:
        return [True] * num_layers, [False] * num_layers
    if facts.architecture == "falcon-h1":
        return [True] * num_layers, has_heads
    if facts.architecture in _INTERVALS:
        marked = facts.get_layer_counts("attention.recurrent_layers", num_layers)
        interval = facts.get_count("full_attention_interval") or _INTERVALS[facts.architecture]
        recurrent = [bool(mark) for mark in marked or ((layer + 1) % interval for layer in range(num_layers))]
        return recurrent, [not mark for mark in recurrent]
    if any(facts.has(key) for key in ("ssm.conv_kernel", "ssm.state_size", "shortconv.l_cache", "kda.head_dim")):
        recurrent = [not attends for attends in has_heads]
        if facts.architecture.startswith("nemotron_h") and (
            widths := facts.get_layer_counts("feed_forward_length", num_layers)
        ):
            # These models also have layers that are only a feed-forward network.
            recurrent = [mark and width == 0 for mark, width in zip(recurrent, widths, strict=True)]
        return recurrent, has_heads
    return [False] * num_layers, has_heads


def _find_windowed_layers(facts: _HeaderFacts, num_layers: int, attends: list[bool]) -> tuple[list[bool], int]:
    """Which layers are windowed, and the window in tokens."""
    nowhere = [False] * num_layers
    known = _WINDOWS.get(facts.architecture)
    stated = facts.get_count("attention.sliding_window", 1 << 31)
    window = stated
    if known and known.window and (stated is None or (known.fixed and stated)):
        window = known.window
    # Only the 32B of Exaone 4 has windows. llama.cpp recognizes it by its number of layers.
    if not window or (facts.architecture == "exaone4" and num_layers != 64):
        return nowhere, 0
    if facts.architecture in ("lfm2", "lfm2moe"):
        return attends, window
    pattern = facts.get_value("attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        marks = facts.get_layer_counts("attention.sliding_window_pattern", num_layers) or []
        return [bool(mark) for mark in marks], window
    period = facts.get_count("attention.sliding_window_pattern") if pattern is not None else known and known.period
    if period is None:
        return nowhere, 0
    if period == 0:
        return [True] * num_layers, window
    dense = 0 if known and known.dense_first else period - 1
    return [layer % period != dense for layer in range(num_layers)], window


def _count_layers_with_own_cache(facts: _HeaderFacts, num_layers: int) -> int:
    """Gemma's later layers share the cache of earlier ones."""
    shared = facts.get_count("attention.shared_kv_layers", _MAX_LAYERS)
    if shared is None:
        return min(20, num_layers) if facts.architecture == "gemma3n" else num_layers
    return max(0, num_layers - shared)


def _compute_state_bytes(facts: _HeaderFacts, width: int, heads: int) -> int:
    """Constant 32-bit state of one recurrent layer, by llama_hparams::n_embd_r and n_embd_s."""
    kernel = facts.get_count("ssm.conv_kernel") or 0
    if head := facts.get_count("wkv.head_size"):
        shifts = facts.get_count("token_shift_count")
        return 4 * (width * (2 if shifts is None else shifts) + width * head)
    if length := facts.get_count("shortconv.l_cache"):
        return 4 * width * (length - 1)
    if head := facts.get_count("kda.head_dim"):
        return 4 * (3 * (kernel - 1 if kernel else 3) * heads * head + head * head * heads)
    if facts.architecture == "minimax-01":
        head = _get_or_default(facts, "attention.key_length", width // heads if heads else 0)
        return 4 * head * head * heads
    inner, state = (facts.get_count(f"ssm.{key}") or 0 for key in ("inner_size", "state_size"))
    groups = facts.get_count("ssm.group_count") or 0
    return 4 * (max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state)


QUANTIZATION_NAME = re.compile(
    r"(?:^|[-._ ])(?P<label>(?:UD-)?(?:I?Q\d\w*|TQ[12]_0|BF16|FP?(?:16|32)|MXFP4(?:_MOE)?|NVFP4))"
    r"(?P<rest>(?:[-._]imat(?:rix)?)?)$",
    re.IGNORECASE,
)
"""The quantization at the end of a file name."""

_NAMELESS = re.compile(
    r"(?:ggml[-_])?(?:model|weights|consolidated|output|unsloth|pytorch_model)?|sha256-.*|[0-9a-f]{20,}"
)


def strip_file_name(file_name: str) -> str:
    """A file name without its ending, part number and quantization."""
    if match := _SPLIT_NAME.fullmatch(file_name):
        stem = match["stem"]
    else:
        stem = file_name[:-5] if file_name.lower().endswith(".gguf") else file_name
    while match := QUANTIZATION_NAME.search(stem):
        stem = stem[: match.start()]
    return stem


def _choose_name(facts: _HeaderFacts, path: Path) -> str:
    """The file's name if it is meaningful, because people typed it to get the file and will type it again.

    Converters fill general.name from training folders ("Smollm2 135M 8k Lc100K Mix1 Ep2"), so it comes second.
    """
    stem = strip_file_name(path.name)
    if path.suffix.lower() == ".gguf" and not _NAMELESS.fullmatch(stem.lower()):
        return stem
    if basename := facts.get_text("general.basename"):
        pieces = (basename, facts.get_text("general.size_label"), facts.get_text("general.finetune"))
        return "-".join(piece.replace(" ", "-") for piece in pieces if piece)
    return facts.get_text("general.name") or path.stem or facts.architecture


_ADVICE = "specify a .gguf file; for a hub model, use its name as owner/name"
_BEFORE_GGUF = "is in llama.cpp's format from before GGUF ({}), which engines no longer read"
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer without the weights (run `git lfs pull`)"),
    (b"PK\x03\x04", "is a zip archive, as PyTorch saves checkpoints (.pt, .bin)"),
    (b"\x1f\x8b", "is compressed with gzip"),
    (b"\x89HDF", "is an HDF5 file, as Keras saves weights"),
    (b"tjgg", _BEFORE_GGUF.format("ggjt")),
    (b"fmgg", _BEFORE_GGUF.format("ggmf")),
    (b"lmgg", _BEFORE_GGUF.format("ggml")),
    (b"algg", "is a LoRA adapter in a format from before GGUF"),
    (b"FUGG", "has its first bytes in reverse order"),
)


def _describe_other_format(head: bytes, file_bytes: int) -> str:
    if file_bytes == 0:
        return "is empty"
    for magic, words in _MAGICS:
        if head.startswith(magic):
            return words
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a Python pickle, which bedplate never opens"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= file_bytes:
        return "is a safetensors file"
    if not head.strip(b"\0"):
        return "begins with zeros: the download reserved its space but did not finish"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page: the download returned an error or login page instead of the file"
    with suppress(UnicodeDecodeError):
        words = head[:80].decode("utf-8").strip()
        if words.isprintable():
            return f"is text that begins with “{words[:40]}”"
    return f"begins with the bytes {head[:4].hex(' ')}"


def _raise_cut_short(path: Path, promise: str, file_bytes: int) -> NoReturn:
    hint = "download it again"
    if re.search(r"\.part\d+of\d+$|-split-[a-z]$", path.name):
        hint = "it is one piece of a file that was split for upload: join the pieces in order (cat) into one .gguf"
    else:
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            hint += f", or check the disk: {human_size(free)} free in {path.parent}"
    raise UsageError(f"{path.name} is cut short: {promise}, the file has {file_bytes:,}", hint=hint)


def _make_unknown_type_error(name: str, tensor: str, kind: int) -> UsageError:
    if retired := _RETIRED_TYPES.get(kind):
        return UsageError(
            f"{name} stores {_escape_text(tensor)} as {retired}, a type that llama.cpp has removed",
            hint="download a newer conversion; Q4_0 replaces the interleaved types",
        )
    return UsageError(
        f"{name} stores {_escape_text(tensor)} in tensor type {kind}, which this version of bedplate does not know",
        hint="update bedplate; the file may need a fork of llama.cpp",
    )


def _escape_text(text: str, most: int = 60) -> str:
    """Text from a file, shortened and escaped for a terminal."""
    return "".join(char if char.isprintable() else "·" for char in text[:most])
