"""What was measured before: one file under BEDPLATE_HOME, an entry for each machine and driver that it has seen."""

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
    """What the figures depend on. A folder may be shared by several machines, and a machine get another driver."""
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
    """The newest entry of this very machine; a file that cannot be read is as good as none."""
    return next((entry for entry in _read().entries if entry.machine == machine), None)


def remember(measurements: Measurements) -> Path:
    """Puts an entry in the place of older ones of the same machine; readers see the old file or the new one."""
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, "writing down what it measured"):
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
    # Not the UUID: figures are those of the kind of card, and slices get new ones.
    return f"{card.index} {card.name}, {card.memory_bytes} bytes, driver {card.driver_version}"
