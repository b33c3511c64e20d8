"""Code for other GPUs in a library: which is cleared, and that nothing else changes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.bundling.device_code import ELF, MAGIC, PTX, DeviceCode, clear_unused, fat_binaries, unused_on

CODE = b"machine code of one architecture"


def entry(kind: int, architecture: int, content: bytes = CODE) -> bytes:
    """As nvcc writes it: a header of 64 bytes, with the architecture at byte 28."""
    return struct.pack("<HHIQIIHHI32x", kind, 0x101, 64, len(content), 0, 0, 0, 1, architecture) + content


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(content)) + content


def kept(*entries: tuple[int, int], on: int) -> list[tuple[int, int]]:
    found = [DeviceCode(kind, architecture, 0, 0) for kind, architecture in entries]
    unused = unused_on(found, on)
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
    ids=["its own", "older of the same major version", "PTX, since no code fits", "code before PTX", "newer alone"],
)
def test_what_a_gpu_loads_is_kept(entries: list[tuple[int, int]], on: int, left: list[tuple[int, int]]) -> None:
    assert kept(*entries, on=on) == left


def test_only_other_architectures_are_cleared_and_the_original_file_stays(tmp_path: Path) -> None:
    host = b"\x7fELF host code " * 8
    data = host + fat_binary(entry(ELF, 80), entry(ELF, 90)) + host + fat_binary(entry(PTX, 80), entry(ELF, 100)) + host
    cached, library = tmp_path / "cached.so", tmp_path / "library.so"
    cached.write_bytes(data)
    os.link(cached, library)
    assert clear_unused(library, 90) == 2 * len(CODE)
    zeros = bytes(len(CODE))
    assert library.read_bytes() == (
        host + fat_binary(entry(ELF, 80, zeros), entry(ELF, 90)) + host
        + fat_binary(entry(PTX, 80), entry(ELF, 100, zeros)) + host
    )  # fmt: skip
    assert cached.read_bytes() == data, "it may be a hard link into a package cache"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cached.so", "library.so"]


def test_a_library_without_device_code_is_not_written(tmp_path: Path) -> None:
    library = tmp_path / "plain.so"
    library.write_bytes(b"nothing of CUDA" * 10)
    before = library.stat()
    assert clear_unused(library, 90) == 0
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@given(before=st.binary(max_size=40), rest=st.binary(max_size=200), cut=st.integers(0, 300))
def test_what_is_not_understood_is_left_alone(before: bytes, rest: bytes, cut: int) -> None:
    data = (before + MAGIC + rest + fat_binary(entry(ELF, 80)))[:cut]
    for entries in fat_binaries(data):
        for one in entries:
            assert 0 <= one.start <= one.start + one.size_bytes <= len(data)
