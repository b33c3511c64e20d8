"""What was measured here, in one SQLite file under BEDPLATE_HOME: written by measure, read by decide."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.home import disk_failure, home
from bedplate.values.agreement import Agreement
from bedplate.values.hardware import Hardware
from bedplate.values.record import Record, from_json, to_json
from bedplate.values.result import Result

VERSION = 2
"""1: results. 2: agreements as well, in a table of their own, so that an older file needs nothing but that table."""
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
            connection.execute("PRAGMA journal_mode=WAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise OutsideFailed(
                    f"{path} was written by a newer bedplate: version {version} of its tables, not {VERSION}",
                    hint="update bedplate, or point BEDPLATE_HOME elsewhere",
                )
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


def _insert(statement: str, record: Result | Agreement, path: Path | None) -> None:
    with _opened(path or store_path()) as connection:
        connection.execute(
            statement, (record.at, record.machine, record.engine, record.model, to_json(record, indent=0))
        )


def _selected(query: str, kind: type[R], machine: str, model: str | None, path: Path | None) -> tuple[R, ...]:
    where = path or store_path()
    if not where.is_file():
        return ()
    with _opened(where) as connection:
        rows = connection.execute(query, (machine, model, model, MOST_READ)).fetchall()
    try:
        return tuple(from_json(kind, body, origin=str(where)) for (body,) in rows)
    except BadQuestion as error:
        raise _failure(error, where) from error
