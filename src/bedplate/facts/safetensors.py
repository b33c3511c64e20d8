"""safetensors: names, types and shapes of tensors, read from the header.

The file is untrusted. The length, the JSON and every offset are checked against the file and against limits far above
any model before anything is allocated. Weights are not read.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from bedplate.errors import UsageError
from bedplate.values.units import format_size as human_size

BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
# The format's own limit is 100 MB. The longest header of a published file has about 15 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 18
MAX_DIMS = 16
_MAX_BYTES = 1 << 50


class SafetensorsTensor(NamedTuple):
    name: str
    type: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


class SafetensorsHeader(NamedTuple):
    tensors: list[SafetensorsTensor]
    metadata: dict[str, str]
    promised_bytes: int
    """The required file size."""


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse_header_length(first: bytes, name: str) -> int:
    """The length of the JSON header, from the first eight bytes."""
    if len(first) < 8:
        raise UsageError(f"{name} is cut short: it has {len(first)} bytes", hint="download it again")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise UsageError(
            f"{name} is not a safetensors file, or it is damaged",
            cause=f"its header would take {human_size(length) if length < _MAX_BYTES else 'more than any disk has'}",
            hint="download it again, and compare its checksum",
        )
    if length < 2:
        raise UsageError(f"{name} is damaged: its header is empty", hint="download it again")
    return length


def parse_header(data: bytes, name: str) -> SafetensorsHeader:
    """Parse the JSON of a header and check that types, shapes and offsets agree."""
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        metadata = _parse_metadata(raw.pop("__metadata__", None))
        if len(raw) > MAX_TENSORS:
            raise _make_damaged_error(name, f"it lists {len(raw):,} tensors, more than any model has")
        entries = {key: msgspec.json.decode(value, type=_TensorEntry) for key, value in raw.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _make_damaged_error(name, f"its header is not a safetensors header: {str(error)[:200]}") from None
    tensors = []
    spans = []
    for key, entry in entries.items():
        tensor = _make_tensor(name, key, entry)
        tensors.append(tensor)
        spans.append((entry.data_offsets[0], entry.data_offsets[1], key))
    end = 0
    for start, stop, key in sorted(spans):
        if start < end:
            raise _make_damaged_error(name, f"the tensor {_escape_text(key)} overlaps another")
        if start > end:
            raise _make_damaged_error(name, f"there is a gap before the tensor {_escape_text(key)}")
        end = stop
    return SafetensorsHeader(tensors, metadata, 8 + len(data) + end)


def _make_tensor(name: str, key: str, entry: _TensorEntry) -> SafetensorsTensor:
    bits = BITS.get(entry.dtype)
    if bits is None:
        raise UsageError(
            f"{name} stores {_escape_text(key)} as {_escape_text(entry.dtype)}, a type that this version of "
            f"bedplate does not know",
            hint="update bedplate",
        )
    if len(entry.shape) > MAX_DIMS:
        raise _make_damaged_error(name, f"the tensor {_escape_text(key)} has {len(entry.shape):,} dimensions")
    elements = 1
    for size in entry.shape:
        if not 0 <= size <= _MAX_BYTES:
            raise _make_damaged_error(name, f"the tensor {_escape_text(key)} has a dimension of {size:,}")
        elements *= size
        if elements > _MAX_BYTES:
            raise _make_damaged_error(name, f"the tensor {_escape_text(key)} has more weights than a file can hold")
    start, stop = entry.data_offsets
    needed = -(-elements * bits // 8)
    if not 0 <= start <= stop <= _MAX_BYTES or stop - start != needed:
        raise _make_damaged_error(
            name, f"the tensor {_escape_text(key)} needs {needed:,} bytes, but its offsets are {start:,} to {stop:,}"
        )
    return SafetensorsTensor(key, entry.dtype, tuple(entry.shape), elements, needed)


def _parse_metadata(raw: msgspec.Raw | None) -> dict[str, str]:
    if raw is None:
        return {}
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(raw, type=dict[str, str])
    return {}


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of one file and check the file size against it."""
    name = path.name
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file", hint="specify a .safetensors file")
        with path.open("rb") as file:
            first = file.read(8)
            if first.startswith(b"version "):
                raise UsageError(f"{name} is a Git LFS pointer without the weights", hint="run `git lfs pull`")
            length = parse_header_length(first, name)
            if 8 + length > status.st_size:
                raise _make_cut_short_error(name, f"its header alone needs {8 + length:,} bytes", status.st_size)
            header = parse_header(file.read(length), name)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", hint="check the path") from None
    except PermissionError:
        raise UsageError(f"no permission to read {path}", hint=f"chmod a+r {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", cause=error.strerror or str(error), hint="check the disk") from None
    if header.promised_bytes > status.st_size:
        raise _make_cut_short_error(name, f"the header requires {header.promised_bytes:,} bytes", status.st_size)
    return header


class _RawIndex(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, msgspec.Raw] | None = None


class SafetensorsIndex(NamedTuple):
    files: tuple[str, ...]
    total_bytes: int | None


MAX_INDEX_BYTES = 64 << 20


def parse_index(data: bytes, name: str) -> SafetensorsIndex:
    """Parse model.safetensors.index.json, the list of a split model's files."""
    try:
        index = msgspec.json.decode(data, type=_RawIndex)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _make_damaged_error(name, f"it is not an index of tensors: {str(error)[:200]}") from None
    if len(index.weight_map) > 4 * MAX_TENSORS:
        raise _make_damaged_error(name, "it lists more tensors than any model has")
    files = tuple(sorted(set(index.weight_map.values())))
    if any("/" in file or "\\" in file or file.startswith(".") or not file.endswith(".safetensors") for file in files):
        raise _make_damaged_error(name, "it lists files outside of its folder")
    total = (index.metadata or {}).get("total_size")
    size: int | None = None
    if total is not None:
        with suppress(msgspec.DecodeError):
            size = round(msgspec.json.decode(total, type=float))
    return SafetensorsIndex(files, size if size is not None and 0 <= size <= _MAX_BYTES else None)


def sum_bytes(tensors: Iterable[SafetensorsTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _make_damaged_error(name: str, cause: str) -> UsageError:
    return UsageError(f"{name} is damaged", cause=cause, hint="download it again, and compare its checksum")


def _make_cut_short_error(name: str, promise: str, file_bytes: int) -> UsageError:
    return UsageError(
        f"{name} is cut short: {promise}, the file has {file_bytes:,}", hint="download it again, or check the disk"
    )


def _escape_text(text: str, most: int = 60) -> str:
    return "".join(char if char.isprintable() else "·" for char in text[:most])
