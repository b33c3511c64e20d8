"""Find stored measurements by name: a run, a cell, a file, or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from bedplate import store
from bedplate.engines import load_engines
from bedplate.engines.names import find_engine_id
from bedplate.errors import UsageError, make_unreadable_error
from bedplate.measure.load import LoadTarget
from bedplate.measure.questions import is_url
from bedplate.measure.results import read_result
from bedplate.values.model import Model
from bedplate.values.record import from_json
from bedplate.values.run import Cell, Run, RunEnvironment


class StoredCells(NamedTuple):
    cells: tuple[Cell, ...]
    environments: dict[str, RunEnvironment]
    """The environments of the cells' runs, if known."""
    models: tuple[Model, ...] = ()
    """The models of the runs."""
    by_engine: bool = False
    """Whether the name is an engine, so that the cells may come from several runs."""


def find_cells(named: str | None = None, machine: str | None = None) -> StoredCells:
    """Accepts `FILE.json`, `RUN`, each with `:ENGINE` or not, a cell, an engine, or the URL of an endpoint.

    An engine or endpoint has all of its cells on `machine`, newest first. The default is the newest run.
    """
    if named is None:
        return _take_run(store.find_run())
    if is_url(named):
        return _take_engine(LoadTarget.from_url(named).name, machine, named)
    if named.endswith(".json") or Path(named).is_file():
        return _take_file(Path(named))
    if (engine := find_engine_id(named)) is not None:
        return select_version(_take_engine(engine, machine), named)
    cells = tuple(cell for cell in store.read_cells() if cell.id == named)
    if cells:
        return _take_cells(cells)
    if ":" not in named:
        return _take_run(_find_run(named, named))
    # The name of an endpoint may have a colon, and so may the path of a file.
    path, ends, engine = named.partition(".json:")
    name, _, engine = (path, "", engine) if ends else named.partition(":")
    found = _take_file(Path(f"{path}.json")) if ends else _take_run(_find_run(name, named))
    return select_engine(found, engine) if engine else found


def find_scenario_cells(scenario: str, named: str | None = None, machine: str | None = None) -> StoredCells:
    """The cells with sessions of this scenario: of `named`, or of the newest run that has any."""

    def is_wanted(cell: Cell) -> bool:
        return cell.load.scenario is not None and cell.load.scenario.name == scenario

    if named is not None:
        found = find_cells(named, machine)
        cells = tuple(cell for cell in found.cells if is_wanted(cell))
    else:
        every = [cell for cell in store.read_cells() if is_wanted(cell)]
        newest = max(every, key=lambda cell: cell.at).run if every else None
        cells = tuple(cell for cell in every if cell.run == newest)
        found = _take_cells(cells)
    if not cells:
        raise UsageError(
            f"the scenario {scenario} was not measured{'' if named is None else f' in {named}'}",
            hint=f"measure it: bedplate bench --scenario {scenario}",
        )
    return found._replace(cells=cells)


def select_engine(found: StoredCells, named: str) -> StoredCells:
    wanted = LoadTarget.from_url(named).name if is_url(named) else find_engine_id(named) or named.partition("@")[0]
    cells = tuple(cell for cell in found.cells if cell.subject.engine == wanted)
    if not cells:
        there = ", ".join(dict.fromkeys(cell.subject.engine for cell in found.cells)) or "nothing"
        raise UsageError(f"{named} was not measured in this run", hint=f"it has {there}")
    return select_version(found._replace(cells=cells), named)


def select_version(found: StoredCells, named: str) -> StoredCells:
    """The cells of the version in ID@VERSION; all cells if there is none."""
    _, at, version = named.partition("@")
    if not at:
        return found
    measured = list(dict.fromkeys(cell.subject.engine_version or "none" for cell in found.cells))
    known = load_engines().get(found.cells[0].subject.engine)
    wanted = version.removeprefix("v")
    if known is not None and wanted not in measured:
        wanted = known.find_version(wanted, measured)
    cells = tuple(cell for cell in found.cells if cell.subject.engine_version == wanted)
    if not cells:
        there = ", ".join(measured)
        raise UsageError(f"{named} was not measured", hint=f"measured versions: {there}")
    return found._replace(cells=cells)


def require_one_engine(found: StoredCells, named: str) -> StoredCells:
    """Rejects a run with several engines, because the name does not say which one."""
    engines = list(dict.fromkeys(cell.subject.engine for cell in found.cells))
    if len(engines) > 1:
        raise UsageError(
            f"{named} has several engines: {', '.join(engines)}",
            hint=f"choose one, as in {named}:{engines[0]}, or name the engines",
        )
    return found


def _find_run(run: str, named: str) -> Run:
    try:
        return store.find_run(run)
    except UsageError as error:
        hint = f"{error.hint}; or name an engine, or a file from `bedplate bench --json`"
        raise UsageError(f"no run, cell or engine is named {named}", hint=hint) from error


def _take_run(run: Run) -> StoredCells:
    if not run.cells:
        raise UsageError(f"run {run.id} has no cells: it was stopped before the first one was measured")
    return StoredCells(run.cells, {run.id: run.environment}, run.models)


def _take_engine(engine: str, machine: str | None, named: str | None = None) -> StoredCells:
    found = store.read_cells(machine=machine, engine=engine)
    if not found:
        hint = f"measure it: bedplate bench --engines {named or engine}"
        raise UsageError(f"{engine} was not measured on this machine", hint=hint)
    return _take_cells(found)._replace(by_engine=True)


def _take_cells(cells: tuple[Cell, ...]) -> StoredCells:
    wanted = {cell.run for cell in cells}
    found = [run for run in store.read_runs() if run.id in wanted]
    models = tuple(model for run in found for model in run.models)
    return StoredCells(cells, {run.id: run.environment for run in found}, models)


def _take_file(path: Path) -> StoredCells:
    text = _read_bytes(path)
    if _read_schema(text) == "cell/1":
        return StoredCells((from_json(Cell, text, origin=str(path)),), {})
    return _take_run(read_result(path, require_valid=True).run)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise make_unreadable_error(path, error) from error


class _SchemaOnly(msgspec.Struct):
    schema: str | None = None


def _read_schema(text: bytes) -> str | None:
    try:
        return msgspec.json.decode(text, type=_SchemaOnly).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
