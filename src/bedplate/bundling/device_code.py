"""Clears machine code for other GPUs in a shared library, so that it compresses to almost nothing.

A library built by nvcc contains fat binaries: a header, and one entry per architecture. The driver loads the entry
for the GPU and does not read the others, so their content can be zeros. All offsets stay the same.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The magic number is from fatbinary_section.h of the CUDA toolkit; the fields are those that cuobjdump prints.
MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, size of this header, size of the content; after 12 more bytes, the architecture."""
_LEAST_ENTRY_BYTES = 64
PTX, ELF = 1, 2


class DeviceCode(NamedTuple):
    """One entry of a fat binary."""

    kind: int
    architecture: int
    """90 for compute capability 9.0."""
    start: int
    size_bytes: int


def find_fat_binaries(data: bytes | mmap.mmap) -> Iterator[list[DeviceCode]]:
    """Yield the entries of each fat binary; one of unknown format is skipped and so stays unchanged."""
    position = 0
    while (position := data.find(MAGIC, position)) >= 0:
        found = _read_entries(data, position)
        if found is None:
            position += len(MAGIC)
            continue
        entries, position = found
        yield entries


def _read_entries(data: bytes | mmap.mmap, position: int) -> tuple[list[DeviceCode], int] | None:
    if position + _HEADER.size > len(data):
        return None
    _, version, header, size = _HEADER.unpack_from(data, position)
    end = position + header + size
    if version != 1 or header != _HEADER.size or end > len(data):
        return None
    entries: list[DeviceCode] = []
    at = position + header
    while at < end:
        if at + _LEAST_ENTRY_BYTES > end:
            return None
        kind, _, header, size, architecture = _ENTRY.unpack_from(data, at)
        if kind not in (PTX, ELF) or header < _LEAST_ENTRY_BYTES or at + header + size > end:
            return None
        entries.append(DeviceCode(kind, architecture, at + header, size))
        at += header + size
    return entries, end


def find_unused(entries: list[DeviceCode], architecture: int) -> list[DeviceCode]:
    """Return the entries that a GPU of this architecture never loads.

    Machine code runs on the same major version with the same or a newer minor version. The driver compiles PTX for
    any newer architecture, but only if no machine code fits.
    """

    def runs(one: DeviceCode) -> bool:
        return one.architecture // 10 == architecture // 10 and one.architecture <= architecture

    has_machine_code = any(one.kind == ELF and runs(one) for one in entries)
    return [
        one
        for one in entries
        if not (runs(one) if one.kind == ELF else one.architecture <= architecture and not has_machine_code)
    ]


def clear_unused(library: Path, architecture: int) -> int:
    """Replace the library by a copy with zeros in place of unused code; return the number of cleared bytes.

    It writes a copy because the file may be a hard link into a package cache.
    """
    if library.stat().st_size < _HEADER.size:
        return 0
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        unused = [one for entries in find_fat_binaries(data) for one in find_unused(entries, architecture)]
    if not unused:
        return 0
    copy = library.with_name(f"{library.name}.cleared")
    shutil.copy2(library, copy)
    with copy.open("r+b") as out:
        for one in unused:
            out.seek(one.start)
            out.write(bytes(one.size_bytes))
    copy.replace(library)
    return sum(one.size_bytes for one in unused)
