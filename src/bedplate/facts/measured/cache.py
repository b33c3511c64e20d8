"""Stored measurements: one file under BEDPLATE_HOME, with an entry per machine and driver."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from pathlib import Path

from bedplate.errors import UsageError
from bedplate.home import get_home, hold_lock, make_disk_failure
from bedplate.values import Accelerator, Hardware, Record, from_json, to_json
from bedplate.values.measurements import MeasuredMachine, Measurements

MOST_ENTRIES = 32


class StoredMeasurements(Record, frozen=True, kw_only=True):
    """The file's content, newest first."""

    entries: tuple[Measurements, ...] = ()


def get_cache_path() -> Path:
    return get_home() / "measured.json"


def identify_machine(hardware: Hardware, kernel: str | None = None) -> MeasuredMachine:
    """What the figures depend on. Machines may share a folder, and a machine's driver may change."""
    return MeasuredMachine(
        os=hardware.os,
        kernel=kernel if kernel is not None else platform.release(),
        arch=hardware.cpu.arch,
        cpu=hardware.cpu.name,
        logical_cores=hardware.cpu.logical_cores,
        allowed_cores=hardware.cpu.allowed_cores,
        gpus=tuple(map(_describe_gpu, hardware.accelerators)),
    )


def recall(machine: MeasuredMachine) -> Measurements | None:
    """The newest entry of this machine. An unreadable file counts as empty."""
    return next((entry for entry in _read().entries if entry.machine == machine), None)


def remember(measurements: Measurements) -> Path:
    """Replace older entries of the same machine. Readers see either the old file or the new one."""
    path = get_cache_path()
    try:
        with hold_lock(path, "storing measurements"):
            others = (entry for entry in _read().entries if entry.machine != measurements.machine)
            content = StoredMeasurements(entries=(measurements, *others)[:MOST_ENTRIES])
            _replace(path, to_json(content))
    except OSError as error:
        raise make_disk_failure(error, path) from error
    return path


def _read() -> StoredMeasurements:
    try:
        return from_json(StoredMeasurements, get_cache_path().read_bytes(), str(get_cache_path()))
    except (OSError, UsageError):
        return StoredMeasurements()


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".measured-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _describe_gpu(card: Accelerator) -> str:
    # Not the UUID: the figures hold for the kind of card, and slices get new UUIDs.
    return f"{card.index} {card.name}, {card.memory_bytes} bytes, driver {card.driver_version}"
