"""The folder where bedplate keeps models, engine environments, logs and state."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

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


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents. Only the owner may open the home, and its logs in any case.

    This also applies to a home that an older version created, but not to a folder that is not only bedplate's: the
    user's own, or one for temporary files.
    """
    home, logs = get_home(), get_logs_dir()
    if home == folder or home in folder.parents:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home not in (Path.home(), *Path.home().parents):
            _make_private(home, 0o700)
    folder.mkdir(parents=True, exist_ok=True)
    if folder == logs:
        _make_private(logs, 0o700)
        for file in logs.glob("*.log*"):
            _make_private(file, 0o600)
    return folder


def _make_private(path: Path, mode: int) -> None:
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # rotated meanwhile, or a read-only disk
        status = path.lstat()
        if (
            status.st_mode & 0o077
            and not status.st_mode & stat.S_ISVTX
            and not stat.S_ISLNK(status.st_mode)
            and status.st_uid == os.getuid()
        ):
            path.chmod(mode)


def open_private(path: Path | str, mode: str) -> IO[bytes]:
    """Open a file for writing that only its owner may read."""
    return cast("IO[bytes]", open(path, mode, opener=open_for_owner))


def open_for_owner(path: str, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags, 0o600)


def ensure_writable(folder: Path) -> Path:
    """Create `folder` if needed and check that a file can be written in it."""
    import tempfile

    try:
        make_folder(folder)
        # Without a name where the operating system can: nothing is left behind by a process that is killed meanwhile.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"\0" * 4096)
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

    make_folder(path.parent)
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
