"""Stored measurements: one file under BEDPLATE_HOME, with an entry per machine and driver."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from pathlib import Path

from bedplate.errors import BadQuestion
from bedplate.home import disk_failure, home, locked
from bedplate.values import Accelerator, Hardware, Record, from_json, to_json
from bedplate.values.measurements import Machine, Measurements

MOST_ENTRIES = 32


class Remembered(Record, frozen=True, kw_only=True):
    """The file's content, newest first."""

    entries: tuple[Measurements, ...] = ()


def cache_path() -> Path:
    return home() / "measured.json"


def machine_of(hardware: Hardware, kernel: str | None = None) -> Machine:
    """What the figures depend on. Machines may share a folder, and a machine's driver may change."""
    return Machine(
        os=hardware.os,
        kernel=kernel if kernel is not None else platform.release(),
        arch=hardware.cpu.arch,
        cpu=hardware.cpu.name,
        logical_cores=hardware.cpu.logical_cores,
        allowed_cores=hardware.cpu.allowed_cores,
        gpus=tuple(map(_gpu, hardware.accelerators)),
    )


def recall(machine: Machine) -> Measurements | None:
    """The newest entry of this machine. An unreadable file counts as empty."""
    return next((entry for entry in _read().entries if entry.machine == machine), None)


def remember(measurements: Measurements) -> Path:
    """Replace older entries of the same machine. Readers see either the old file or the new one."""
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, "storing measurements"):
            others = (entry for entry in _read().entries if entry.machine != measurements.machine)
            content = Remembered(entries=(measurements, *others)[:MOST_ENTRIES])
            _replace(path, to_json(content))
    except OSError as error:
        raise disk_failure(error, path) from error
    return path


def _read() -> Remembered:
    try:
        return from_json(Remembered, cache_path().read_bytes(), str(cache_path()))
    except (OSError, BadQuestion):
        return Remembered()


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


def _gpu(card: Accelerator) -> str:
    # Not the UUID: the figures hold for the kind of card, and slices get new UUIDs.
    return f"{card.index} {card.name}, {card.memory_bytes} bytes, driver {card.driver_version}"
