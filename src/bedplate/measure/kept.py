"""Find stored measurements by name: a run, a cell, a file, or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from bedplate import store
from bedplate.engines.names import engine_id
from bedplate.errors import BadQuestion
from bedplate.values.model import Model
from bedplate.values.record import from_json
from bedplate.values.run import Cell, Environment, Run


class Kept(NamedTuple):
    cells: tuple[Cell, ...]
    environments: dict[str, Environment]
    """The environments of the cells' runs, if known."""
    models: tuple[Model, ...] = ()
    """The models of the runs."""
    by_engine: bool = False
    """Whether the name is an engine, so that the cells may come from several runs."""


def kept(named: str | None = None, machine: str | None = None) -> Kept:
    """Accepts a JSON file, `RUN`, `RUN:ENGINE`, a cell, or an engine (all of its cells on `machine`, newest first).

    The default is the newest run.
    """
    if named is None:
        return _of_run(store.run())
    if named.endswith(".json") or Path(named).is_file():
        return _of_file(Path(named))
    if (engine := engine_id(named)) is not None:
        return in_version(_of_engine(engine, machine), named)
    cells = tuple(cell for cell in store.cells() if cell.id == named)
    if cells:
        return _of_cells(cells)
    run, _, part = named.partition(":")
    found = _of_run(_run(run, named))
    return only_engine(found, part) if part else found


def only_engine(found: Kept, named: str) -> Kept:
    wanted = engine_id(named) or named.partition("@")[0]
    cells = tuple(cell for cell in found.cells if cell.subject.engine == wanted)
    if not cells:
        there = ", ".join(dict.fromkeys(cell.subject.engine for cell in found.cells)) or "nothing"
        raise BadQuestion(f"{named} was not measured in this run", hint=f"it has {there}")
    return in_version(found._replace(cells=cells), named)


def in_version(found: Kept, named: str) -> Kept:
    """The cells of the version in ID@VERSION; all cells if there is none."""
    _, at, version = named.partition("@")
    if not at:
        return found
    cells = tuple(cell for cell in found.cells if cell.subject.engine_version == version.removeprefix("v"))
    if not cells:
        there = ", ".join(dict.fromkeys(cell.subject.engine_version or "none" for cell in found.cells))
        raise BadQuestion(f"{named} was not measured", hint=f"measured versions: {there}")
    return found._replace(cells=cells)


def one_subject(found: Kept, named: str) -> Kept:
    """Rejects a run with several engines, because the name does not say which one."""
    engines = list(dict.fromkeys(cell.subject.engine for cell in found.cells))
    if len(engines) > 1:
        raise BadQuestion(
            f"{named} has several engines: {', '.join(engines)}",
            hint=f"choose one, as in {named}:{engines[0]}, or name the engines",
        )
    return found


def _run(run: str, named: str) -> Run:
    try:
        return store.run(run)
    except BadQuestion as error:
        hint = f"{error.hint}; or name an engine, or a file from `bedplate bench --json`"
        raise BadQuestion(f"no run, cell or engine is named {named}", hint=hint) from error


def _of_run(run: Run) -> Kept:
    if not run.cells:
        raise BadQuestion(f"run {run.id} has no cells: it was stopped before the first one was measured")
    return Kept(run.cells, {run.id: run.environment}, run.models)


def _of_engine(engine: str, machine: str | None) -> Kept:
    found = store.cells(machine=machine, engine=engine)
    if not found:
        raise BadQuestion(
            f"{engine} was not measured on this machine", hint=f"measure it: bedplate bench --engines {engine}"
        )
    return _of_cells(found)._replace(by_engine=True)


def _of_cells(cells: tuple[Cell, ...]) -> Kept:
    wanted = {cell.run for cell in cells}
    found = [run for run in store.runs() if run.id in wanted]
    models = tuple(model for run in found for model in run.models)
    return Kept(cells, {run.id: run.environment for run in found}, models)


def _of_file(path: Path) -> Kept:
    text = _bytes(path)
    if _schema(text) == "cell/1":
        return Kept((from_json(Cell, text, origin=str(path)),), {})
    return _of_run(from_json(Run, text, origin=str(path)))


def run_of_file(path: Path) -> Run:
    return from_json(Run, _bytes(path), origin=str(path))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadQuestion(f"cannot read {path}", cause=error.strerror or str(error)) from error


class _Any(msgspec.Struct):
    schema: str | None = None


def _schema(text: bytes) -> str | None:
    try:
        return msgspec.json.decode(text, type=_Any).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
