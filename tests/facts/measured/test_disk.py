"""Uncached disk reads: the choice of the file, clean-up, and failures as notes."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from bedplate.facts.measured import disk
from bedplate.facts.measured.disk import (
    DiskRequest,
    disable_cache,
    find_largest,
    measure_disk,
    open_large_file,
    parse_file_system,
    read_blocks,
)

CAPTURES = Path(__file__).parents[2] / "captures"
MIB = 1 << 20
here_only = pytest.mark.skipif(sys.platform == "win32", reason="disk reads are not measured on Windows")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "OWN_FILE_BYTES", 16 * MIB)
    monkeypatch.setattr(disk, "LEAST_FILE_BYTES", 8 * MIB)


def run(folder: Path) -> disk.DiskResult:
    return measure_disk(DiskRequest(folder=str(folder), when="2026-11-15"), lambda share: None)


@here_only
def test_a_temporary_file_is_read_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEMS", ())
    found = run(tmp_path / "models")
    assert found.disk is not None, found.notes
    assert found.disk.read_bytes == 16 * MIB and found.disk.path == str(tmp_path / "models")
    assert found.disk.read_bytes_s.value > 1e6 and "random bytes" in (found.disk.read_bytes_s.source or "")
    assert not list(tmp_path.iterdir())


@here_only
def test_a_model_file_is_read_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEMS", ())
    model = tmp_path / "hub" / "model.gguf"
    model.parent.mkdir()
    model.write_bytes(bytes(10 * MIB + 5))
    found = run(tmp_path)
    assert found.disk is not None, found.notes
    assert found.disk.read_bytes == 8 * MIB, "whole blocks only"
    assert "a model file" in (found.disk.read_bytes_s.source or "")
    assert model.stat().st_size == 10 * MIB + 5


def test_the_largest_readable_file_is_chosen(tmp_path: Path) -> None:
    assert find_largest(tmp_path) is None
    (tmp_path / "small").write_bytes(bytes(MIB))
    assert find_largest(tmp_path) is None
    (tmp_path / "large").write_bytes(bytes(9 * MIB))
    (tmp_path / "larger").write_bytes(bytes(10 * MIB))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert find_largest(tmp_path) == tmp_path / "larger"


def test_a_full_disk_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEMS", ())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    found = run(tmp_path)
    assert found.disk is None and "are free" in found.notes[0]


@here_only
def test_a_disk_that_fails_while_reading_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEMS", ())
    monkeypatch.setattr(disk, "disable_cache", lambda descriptor: "O_DIRECT")
    monkeypatch.setattr(os, "preadv", fails)
    found = run(tmp_path)
    assert found.disk is None and os.strerror(errno.EIO) in found.notes[0]
    assert not list(tmp_path.iterdir())


def test_a_memory_file_system_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "find_file_system", lambda folder: "tmpfs")
    assert "is in memory (tmpfs)" in run(tmp_path).notes[0]


@here_only
def test_reading_stops_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_S", 0.0)
    with open_large_file(tmp_path) as (descriptor, size, _):
        assert read_blocks(descriptor, size, lambda share: None) == []


@here_only
def test_every_block_is_read_once(tmp_path: Path) -> None:
    with open_large_file(tmp_path) as (descriptor, size, _):
        assert disable_cache(descriptor)
        ends = read_blocks(descriptor, size, lambda share: None)
    assert [count for _, count in ends] == [disk.BLOCK_BYTES] * (size // disk.BLOCK_BYTES)


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    text = (CAPTURES / "cgroup/v1-hybrid-vm.mountinfo").read_text()
    assert parse_file_system(text, "/home/somebody/.cache") == "ext4"
    assert parse_file_system(text, "/proc/self") == "proc"
    extra = "99 27 0:50 / /data/my\\040models rw - tmpfs tmpfs rw\n"
    assert parse_file_system(text + extra, "/data/my models/a") == "tmpfs"
    assert parse_file_system(text + extra, "/data/my modelsx") == "ext4"
    assert parse_file_system("garbage\n\n - \n", "/") is None
