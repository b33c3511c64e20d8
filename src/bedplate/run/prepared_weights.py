"""Lists and removes prepared weights: their model, last use, and whether they are stale."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import BedplateError, UsageError
from bedplate.home import make_disk_failure
from bedplate.run.prepare import MANIFEST, PreparationRecord, get_prepared_dir, hash_identity, measure_size
from bedplate.values.record import Record

MAKING = ".making-"


class PreparedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """One folder of prepared weights."""

    id: str
    path: str
    what: str
    model: str
    engine: str
    """The engine whose environment converted it."""
    disk_bytes: int
    made_at: str | None
    used_at: str | None
    in_use: bool
    stale: str | None
    """Why no future start will use it; `None` if one may."""
    checked: tuple[str, ...] = ()
    built_for: tuple[str, ...] = ()
    """For compiled code: the interpreter, packages, GPUs and compiler that it was built for."""


class PreparedList(Record, frozen=True, kw_only=True):
    """What `bedplate prepared --json` prints."""

    schema: Literal["prepared/1"] = "prepared/1"
    prepared: tuple[PreparedWeights, ...]


def list_prepared() -> list[PreparedWeights]:
    """All prepared weights, most recently used first, including the remains of interrupted conversions."""
    folders = [path for path in get_prepared_dir().glob("*") if path.is_dir()] if get_prepared_dir().is_dir() else []
    found = [one for path in folders if (one := _read(path)) is not None]
    return sorted(found, key=lambda one: (one.used_at or "", one.id), reverse=True)


def select_prepared(ids: Sequence[str], *, stale: bool = False, unused: bool = False) -> list[PreparedWeights]:
    """Selects by ids or their prefixes; or all stale ones, or all that are not in use."""
    prepared = list_prepared()
    found = [one for one in prepared if (stale and one.stale) or (unused and not one.in_use)]
    for prefix in ids:
        matching = [one for one in prepared if one.id.startswith(prefix)]
        if len(matching) != 1:
            count = "no prepared weights have" if not matching else f"{len(matching)} prepared weights have"
            raise UsageError(f"{count} an id that starts with {prefix}", hint="bedplate prepared lists the ids")
        found += [one for one in matching if one not in found]
    return found


def remove_prepared(which: Sequence[PreparedWeights]) -> tuple[list[PreparedWeights], list[PreparedWeights]]:
    """Returns those that were removed, and those that stay because a running bedplate uses or creates them."""
    removed, kept_in_use = [], []
    for one in which:
        folder = Path(one.path)
        try:
            with _lock_alone(folder) as alone:
                if not alone:
                    kept_in_use.append(one)
                    continue
                # The manifest first: an interrupted removal must not leave a part that looks complete.
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)
        except OSError as error:
            raise make_disk_failure(error, folder) from error
        removed.append(one)
    return removed, kept_in_use


@contextlib.contextmanager
def _lock_alone(folder: Path) -> Iterator[bool]:
    """Yields whether no other process uses or creates the folder; while locked, none can start to."""
    from filelock import FileLock, Timeout

    name = folder.name.removeprefix(MAKING).partition("-")[0]
    lock = FileLock(f"{folder.parent / name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        with lock_use_mark(folder.parent / name) as free:
            yield free
    finally:
        lock.release()


@contextlib.contextmanager
def lock_use_mark(folder: Path) -> Iterator[bool]:
    """Takes the lock that users of the folder share; yields False if one of them holds it."""
    mark = Path(f"{folder}.use")
    if os.name != "posix" or not mark.exists():
        yield True
        return
    import fcntl

    file = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


def _read(folder: Path) -> PreparedWeights | None:
    if folder.name == "hashes":
        return None
    with _lock_alone(folder) as alone:
        in_use = not alone
    temporary = MAKING in folder.name
    try:
        record = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PreparationRecord)
        used: str | None = _format_time((folder / MANIFEST).stat().st_mtime)
    except (OSError, msgspec.DecodeError):
        record, used = None, None
    if record is None:
        return PreparedWeights(
            id=folder.name.removeprefix(MAKING),
            path=str(folder),
            what="conversion in progress" if temporary and in_use else "remains of an interrupted conversion",
            model="",
            engine="",
            disk_bytes=_measure_own_bytes(folder),
            made_at=None,
            used_at=used,
            in_use=in_use,
            stale=None if in_use else "it is incomplete",
        )
    return PreparedWeights(
        id=folder.name,
        path=str(folder),
        what=record.what,
        model=record.model,
        engine=record.engine,
        disk_bytes=_measure_own_bytes(folder),
        made_at=record.made_at or None,
        used_at=used,
        in_use=in_use,
        stale=_explain_stale(record),
        checked=record.checked,
        built_for=record.built_for,
    )


def _explain_stale(record: PreparationRecord) -> str | None:
    if not record.identity:
        return "an earlier version of bedplate created it"
    try:
        now = hash_identity(engine_by_id(record.engine), record.argv)
    except BedplateError:
        return f"this version of bedplate has no engine {record.engine}"
    if now != record.identity:
        return "it was converted with other versions of packages or programs than the current ones"
    if record.built_for and not Path(record.built_for[0]).exists():
        return "the environment that it was compiled for was removed"
    return None


def _measure_own_bytes(folder: Path) -> int:
    """The size without the targets of links."""
    return sum(measure_size(path) for path in folder.iterdir() if not path.is_symlink())


def _format_time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds")
