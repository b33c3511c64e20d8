"""Export a stored run as a self-contained result, with hardware, versions, lock hashes, samples, quality and flags."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from bedplate._version import __version__
from bedplate.engines import get_engine, load_engines
from bedplate.errors import BedplateError
from bedplate.home import get_home
from bedplate.measure.moments import format_now
from bedplate.run.locks import find_lock
from bedplate.store import compute_fingerprint
from bedplate.values import Hardware, to_json
from bedplate.values.decision import Device
from bedplate.values.run import Run
from bedplate.values.signed_result import LockedEngine, SignedResult

T = TypeVar("T", bound=msgspec.Struct)


def export_run(run: Run, hardware: Hardware) -> SignedResult:
    """`hardware`: this machine. Paths of the user's home are shortened."""
    is_local = run.environment.machine == compute_fingerprint(hardware)
    return SignedResult(
        at=format_now(),
        bedplate=__version__,
        hardware=_hide_home(Hardware, hardware) if is_local else None,
        locks=_list_locks(run) if is_local else (),
        run=_hide_home(Run, run),
    )


def _list_locks(run: Run) -> tuple[LockedEngine, ...]:
    """The lock of each measured version on this platform, as it would be installed now."""
    subjects = {(cell.subject.engine, cell.subject.engine_version): cell.subject for cell in run.cells}
    return tuple(
        _find_lock(engine, version, subject.device or "cpu", subject.build)
        for (engine, version), subject in subjects.items()
        if engine in load_engines()
    )


def _find_lock(engine: str, version: str | None, device: Device, build: str | None) -> LockedEngine:
    if build not in (None, "wheel"):
        return LockedEngine(engine=engine, engine_version=version, reason=f"{build} build")
    try:
        recipe = get_engine(f"{engine}@{version}" if version else engine).find_recipe(device)
    except BedplateError as error:
        return LockedEngine(engine=engine, engine_version=version, reason=error.message)
    if recipe is None:
        return LockedEngine(engine=engine, engine_version=version, reason="bedplate does not install it")
    found = find_lock(engine, recipe, device)
    digest = found.lock.digest if found.lock is not None else None
    return LockedEngine(engine=engine, engine_version=version, lock_sha256=digest, reason=found.reason)


def _hide_home(kind: type[T], record: T) -> T:
    """Replaces the folders of bedplate and of the user, which may contain a name."""
    text = to_json(record)
    for folder, name in ((get_home(), "$BEDPLATE_HOME"), (Path.home(), "~")):
        quoted = msgspec.json.encode(str(folder)).decode()[1:-1]
        if len(folder.parts) > 1:
            text = text.replace(f'"{quoted}', f'"{name}').replace(f"={quoted}", f"={name}")
    return msgspec.json.decode(text, type=kind)
