"""What was measured here, in one SQLite file under BEDPLATE_HOME: written by measure, read by decide."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.home import disk_failure, home
from bedplate.values.agreement import Agreement
from bedplate.values.hardware import Hardware
from bedplate.values.record import Record, from_json, replaced, to_json
from bedplate.values.result import Result
from bedplate.values.run import Cell, Run

VERSION = 3
"""1: results. 2: agreements. 3: runs and their cells. Each has tables of its own: an older file needs nothing else."""
MOST_READ = 10_000
SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS results_by_machine ON results (machine, model, engine, at);
CREATE TABLE IF NOT EXISTS agreements (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS agreements_by_machine ON agreements (machine, model, engine, at);
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS cells (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run TEXT NOT NULL,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS cells_by_run ON cells (run, number);
CREATE INDEX IF NOT EXISTS cells_by_machine ON cells (machine, model, engine, at);
"""

R = TypeVar("R", bound=Record)


def store_path() -> Path:
    return home() / "store.sqlite"


def fingerprint(hardware: Hardware) -> str:
    """What makes two machines the same for a measurement: chips, their number and memory, cores and system."""
    cards = [f"{card.name}/{card.memory_bytes}" for card in hardware.accelerators]
    memory_gib = round(hardware.memory.total_bytes / (1 << 30))
    parts = [hardware.os, hardware.cpu.name, f"{hardware.cpu.allowed_cores:g}", str(memory_gib), *cards]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=10)
    except (OSError, sqlite3.Error) as error:
        raise _failure(error, path) from error
    try:
        with connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise OutsideFailed(
                    f"{path} was written by a newer bedplate: version {version} of its tables, not {VERSION}",
                    hint="update bedplate, or point BEDPLATE_HOME elsewhere",
                )
            if version < VERSION:  # readers of a store that is as it should be write nothing, and hold nobody up
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(SCHEMA)
                connection.execute(f"PRAGMA user_version={VERSION}")
            yield connection
    except sqlite3.Error as error:
        raise _failure(error, path) from error
    finally:
        connection.close()


def _failure(error: Exception, path: Path) -> OutsideFailed:
    if isinstance(error, OSError):
        return disk_failure(error, path)
    return OutsideFailed(
        f"cannot use the store {path}",
        cause=getattr(error, "cause", None) or str(error),
        hint="move the file away; it is made anew, without what was measured",
    )


def add(result: Result, path: Path | None = None) -> None:
    _insert("INSERT INTO results (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)", result, path)


def add_agreement(agreement: Agreement, path: Path | None = None) -> None:
    _insert("INSERT INTO agreements (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)", agreement, path)


def results(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Result, ...]:
    """What was measured on this machine, the newest first. Without a store there is nothing, and none is made."""
    query = "SELECT body FROM results WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    return _selected(query, Result, machine, model, path)


def agreements(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Agreement, ...]:
    """Whose answers were checked on this machine, the newest first."""
    query = (
        "SELECT body FROM agreements WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    )
    return _selected(query, Agreement, machine, model, path)


def add_run(run: Run, path: Path | None = None) -> None:
    """Keeps what is said of a run as a whole, and puts it in the place of what was kept of it before.

    Its cells are kept one by one, by `add_cell`.
    """
    _put(
        "INSERT INTO runs (id, at, machine, body) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
        (run.id, run.at, run.environment.machine, _line(replaced(run, cells=()))),
        path,
    )


def add_cell(cell: Cell, path: Path | None = None) -> None:
    """Keeps a cell as it is now; one with more repeats takes its place."""
    _put(
        "INSERT INTO cells (id, run, at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
        (cell.id, cell.run, cell.at, cell.machine, cell.subject.engine, cell.subject.model, _line(cell)),
        path,
    )


def runs(machine: str | None = None, path: Path | None = None) -> tuple[Run, ...]:
    """The runs that are kept, without their cells, the newest first."""
    query = "SELECT body FROM runs WHERE (? IS NULL OR machine = ?) ORDER BY at DESC, number DESC LIMIT ?"
    return _read(query, Run, (machine, machine, MOST_READ), path)


def cells(
    run: str | None = None,
    *,
    machine: str | None = None,
    engine: str | None = None,
    model: str | None = None,
    path: Path | None = None,
) -> tuple[Cell, ...]:
    """The cells of a run in the order in which they were begun; without a run, the newest of all first."""
    query = (
        "SELECT body FROM cells WHERE (? IS NULL OR run = ?) AND (? IS NULL OR machine = ?) "
        "AND (? IS NULL OR engine = ?) AND (? IS NULL OR model = ?) ORDER BY number DESC LIMIT ?"
    )
    newest = _read(query, Cell, (run, run, machine, machine, engine, engine, model, model, MOST_READ), path)
    return newest if run is None else newest[::-1]


def run(named: str | None = None, path: Path | None = None) -> Run:
    """One run with its cells, by its id or the beginning of it; without a name the newest."""
    kept = runs(path=path)
    found = [one for one in kept if named is None or one.id.startswith(named)]
    if named is None or any(one.id == named for one in found):
        found = [one for one in found if named is None or one.id == named][:1]
    if len(found) != 1:
        what = f"no run is called {named}" if named is not None else "nothing was measured here yet"
        if len(found) > 1:
            what = f"{len(found)} runs begin with {named}"
        newest = ", ".join(one.id for one in (found or kept)[:5])
        raise BadQuestion(what, hint=f"there are {newest}" if newest else "bedplate bench measures")
    return replaced(found[0], cells=cells(found[0].id, path=path))


def _line(record: Record) -> str:
    return msgspec.json.encode(record).decode()


def _put(statement: str, values: Sequence[object], path: Path | None) -> None:
    with _opened(path or store_path()) as connection:
        connection.execute(statement, values)


def _read(query: str, kind: type[R], values: Sequence[object], path: Path | None) -> tuple[R, ...]:
    where = path or store_path()
    if not where.is_file():
        return ()
    with _opened(where) as connection:
        found = connection.execute(query, values).fetchall()
    try:
        return tuple(from_json(kind, body, origin=str(where)) for (body,) in found)
    except BadQuestion as error:
        raise _failure(error, where) from error


def _insert(statement: str, record: Result | Agreement, path: Path | None) -> None:
    _put(statement, (record.at, record.machine, record.engine, record.model, to_json(record, indent=0)), path)


def _selected(query: str, kind: type[R], machine: str, model: str | None, path: Path | None) -> tuple[R, ...]:
    return _read(query, kind, (machine, model, model, MOST_READ), path)
