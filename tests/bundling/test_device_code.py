"""Clearing code for other GPUs in a library changes nothing else."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.bundling.device_code import ELF, MAGIC, PTX, DeviceCode, clear_unused, find_fat_binaries, find_unused

CODE = b"machine code of one architecture"


def write_entry(kind: int, architecture: int, content: bytes = CODE) -> bytes:
    """Write an entry like nvcc: a header of 64 bytes, with the architecture at byte 28."""
    return struct.pack("<HHIQIIHHI32x", kind, 0x101, 64, len(content), 0, 0, 0, 1, architecture) + content


def write_fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(content)) + content


def find_kept(*entries: tuple[int, int], on: int) -> list[tuple[int, int]]:
    found = [DeviceCode(kind, architecture, 0, 0) for kind, architecture in entries]
    unused = find_unused(found, on)
    return [(one.kind, one.architecture) for one in found if one not in unused]


@pytest.mark.parametrize(
    ("entries", "on", "left"),
    [
        ([(ELF, 80), (ELF, 90), (ELF, 100)], 90, [(ELF, 90)]),
        ([(ELF, 80), (ELF, 86)], 89, [(ELF, 80), (ELF, 86)]),
        ([(ELF, 120), (PTX, 80), (ELF, 80)], 90, [(PTX, 80)]),
        ([(PTX, 80), (ELF, 90)], 90, [(ELF, 90)]),
        ([(PTX, 100), (ELF, 100)], 90, []),
    ],
    ids=["same", "older of the same major version", "PTX if no code fits", "code before PTX", "only newer"],
)
def test_keeps_code_that_the_gpu_loads(entries: list[tuple[int, int]], on: int, left: list[tuple[int, int]]) -> None:
    assert find_kept(*entries, on=on) == left


def test_clears_only_other_architectures_in_a_copy_of_the_file(tmp_path: Path) -> None:
    host = b"\x7fELF host code " * 8
    data = (
        host
        + write_fat_binary(write_entry(ELF, 80), write_entry(ELF, 90))
        + host
        + write_fat_binary(write_entry(PTX, 80), write_entry(ELF, 100))
        + host
    )
    cached, library = tmp_path / "cached.so", tmp_path / "library.so"
    cached.write_bytes(data)
    os.link(cached, library)
    assert clear_unused(library, 90) == 2 * len(CODE)
    zeros = bytes(len(CODE))
    assert library.read_bytes() == (
        host + write_fat_binary(write_entry(ELF, 80, zeros), write_entry(ELF, 90)) + host
        + write_fat_binary(write_entry(PTX, 80), write_entry(ELF, 100, zeros)) + host
    )  # fmt: skip
    assert cached.read_bytes() == data, "it may be a hard link into a package cache"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cached.so", "library.so"]


def test_library_without_device_code_is_not_rewritten(tmp_path: Path) -> None:
    library = tmp_path / "plain.so"
    library.write_bytes(b"nothing of CUDA" * 10)
    before = library.stat()
    assert clear_unused(library, 90) == 0
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@given(before=st.binary(max_size=40), rest=st.binary(max_size=200), cut=st.integers(0, 300))
def test_skips_fat_binaries_of_unknown_format(before: bytes, rest: bytes, cut: int) -> None:
    data = (before + MAGIC + rest + write_fat_binary(write_entry(ELF, 80)))[:cut]
    for entries in find_fat_binaries(data):
        for one in entries:
            assert 0 <= one.start <= one.start + one.size_bytes <= len(data)
