"""The engine map together with the installed environments of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from bedplate.decide.engine_map import EngineRow, Situation
from bedplate.engines import Engine
from bedplate.run.environments import EngineEnvironment
from bedplate.run.locks import find_lock
from bedplate.values.decision import Device
from bedplate.values.record import Record

E = TypeVar("E", bound="EngineEntry")


class LockStatus(Record, frozen=True, kw_only=True):
    """Whether an engine is installed from a lock file, with the hash of every package."""

    locked: bool
    reason: str | None = None
    """Why not every package is locked."""


class EngineEntry(EngineRow, frozen=True, kw_only=True):
    """One engine and its installed environments."""

    installed: tuple[EngineEnvironment, ...]
    lock: LockStatus | None = None
    """`None`: bedplate does not install this engine."""


class EngineList(Record, frozen=True, kw_only=True):
    """What `bedplate engines --json` prints."""

    schema: Literal["engines/1"] = "engines/1"
    cheat_sheet: tuple[Situation, ...]
    engines: tuple[EngineEntry, ...]


class EnginePage(EngineEntry, frozen=True, kw_only=True):
    """What `bedplate engines show --json` prints."""

    schema: Literal["engine/1"] = "engine/1"


def add_environments(
    kind: type[E], row: EngineRow, installed: Sequence[EngineEnvironment], lock: LockStatus | None
) -> E:
    own = tuple(environment for environment in installed if environment.engine == row.engine)
    return kind(**msgspec.structs.asdict(row), installed=own, lock=lock)


def find_lock_status(engine: Engine, device: Device | None) -> LockStatus | None:
    """Whether this platform has a lock for the engine on a device; `None` if bedplate does not install the engine."""
    used = device if device is not None and device in engine.built_for else engine.built_for[0]
    recipe = engine.find_recipe(used)
    if recipe is None:
        return None
    _, reason = find_lock(engine.id, recipe, used)
    return LockStatus(locked=reason is None, reason=reason)
