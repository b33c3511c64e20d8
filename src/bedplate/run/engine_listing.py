"""The engine map together with the installed environments of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from bedplate.decide.engine_map import EngineRow, Situation
from bedplate.run.environments import EngineEnvironment
from bedplate.values.record import Record

E = TypeVar("E", bound="EngineEntry")


class EngineEntry(EngineRow, frozen=True, kw_only=True):
    """One engine and its installed environments."""

    installed: tuple[EngineEnvironment, ...]


class EngineList(Record, frozen=True, kw_only=True):
    """What `bedplate engines --json` prints."""

    schema: Literal["engines/1"] = "engines/1"
    cheat_sheet: tuple[Situation, ...]
    engines: tuple[EngineEntry, ...]


class EnginePage(EngineEntry, frozen=True, kw_only=True):
    """What `bedplate engines show --json` prints."""

    schema: Literal["engine/1"] = "engine/1"


def add_environments(kind: type[E], row: EngineRow, installed: Sequence[EngineEnvironment]) -> E:
    own = tuple(environment for environment in installed if environment.engine == row.engine)
    return kind(**msgspec.structs.asdict(row), installed=own)
