"""The folder where bedplate keeps models, engine environments, logs and state."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bedplate.errors import ExternalFailure
from bedplate.interrupts import check_cancelled


def get_home() -> Path:
    """`BEDPLATE_HOME` if it is set, else the platform's cache folder of the user."""
    if chosen := os.environ.get("BEDPLATE_HOME"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("bedplate", appauthor=False))


def get_models_dir() -> Path:
    return get_home() / "models"


def get_engines_dir() -> Path:
    return get_home() / "engines"


def get_logs_dir() -> Path:
    return get_home() / "logs"


def ensure_writable(folder: Path) -> Path:
    """Create `folder` if needed and check that a file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise make_disk_failure(error, folder) from error
    return folder


def check_free_space(folder: Path, wanted_bytes: int, what: str) -> None:
    """Raise before a download or an install starts if the disk has less than `wanted_bytes` free."""
    from bedplate.values.units import format_size

    free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        raise ExternalFailure(
            f"not enough disk space for {what}: {format_size(wanted_bytes)} needed, {format_size(free)} free in "
            f"{folder}",
            hint="free some space (bedplate engines remove ID, bedplate prepared remove --unused), "
            "or point BEDPLATE_HOME at a larger disk",
        )


def make_disk_failure(error: OSError, path: Path) -> ExternalFailure:
    """Turn an operating-system error on `path` into an error with a hint."""
    hint = "point BEDPLATE_HOME at a folder that you may write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or point BEDPLATE_HOME at a larger disk"
    return ExternalFailure(f"cannot write to {path}", cause=error.strerror or str(error), hint=hint)


LOCK_LOOK_S = 0.2


@contextlib.contextmanager
def hold_lock(path: Path, what: str, waiting: object = None) -> Iterator[None]:
    """Hold the file lock `path`.lock, so that only one bedplate process does the work and others wait for it."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if callable(waiting):
            waiting(f"waiting for another bedplate process that is {what}")
        while not lock.is_locked:
            check_cancelled()
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=LOCK_LOOK_S)
    try:
        yield
    finally:
        lock.release()
