"""The SQLite store under BEDPLATE_HOME: measurements, verdicts, tunings, tenants and requests.

`measure` writes measurements and `decide` reads them. The gateway owns tenants and requests.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from bedplate.errors import ExternalFailure, UsageError
from bedplate.home import get_home, make_disk_failure, make_folder
from bedplate.values.agreement import Agreement
from bedplate.values.evidence import StoredEvidence, find_exclusions
from bedplate.values.hardware import Hardware
from bedplate.values.record import Record, from_json, replace_fields, to_json
from bedplate.values.result import Result
from bedplate.values.run import Cell, Exclusion, Run, Subject
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import ServedRequest, UsageBy, UsageRow
from bedplate.values.tuning import RefusedSetting, TuningRun
from bedplate.values.verdict import Verdict

VERSION = 8
"""Version of the tables.

1: results. 2: agreements. 3: runs and their cells. 4: tenants, their keys and requests. 5: verdicts. 6: tunings and
refused settings. 7: daily sums of the reasons of refused and failed requests. 8: exclusions of cells, which are filled
in for the cells of an older file. Each version only adds tables.
"""
FIRST_WITH_EXCLUSIONS = 8
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
CREATE TABLE IF NOT EXISTS exclusions (
    id INTEGER PRIMARY KEY,
    cell TEXT NOT NULL,
    run TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS exclusions_by_cell ON exclusions (cell);
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tunings (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS tunings_by_machine ON tunings (machine, model, engine, at);
CREATE TABLE IF NOT EXISTS refused_settings (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    machine TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS install (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS tenants (
    name TEXT PRIMARY KEY,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT,
    outcome TEXT NOT NULL,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    completion_tokens INTEGER,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (at_s);
CREATE TABLE IF NOT EXISTS usage_days (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    requests INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    turned_away INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, model, engine)
);
CREATE TABLE IF NOT EXISTS reason_days (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    reason TEXT NOT NULL,
    requests INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, model, engine, reason)
);
CREATE VIEW IF NOT EXISTS counted AS SELECT
    id, at_s, strftime('%Y-%m-%d', at_s, 'unixepoch') AS day, tenant, model, COALESCE(engine, '') AS engine,
    outcome != 'turned_away' AS requests, outcome = 'failed' AS failed, outcome = 'turned_away' AS turned_away,
    COALESCE(prompt_tokens, 0) AS prompt_tokens, COALESCE(cached_tokens, 0) AS cached_tokens,
    COALESCE(completion_tokens, 0) AS completion_tokens
FROM requests;
"""
PAGE = 5000
ROWS_AT_ONCE = 100
"""Each row has nine values, and older SQLite builds allow 999 values in a statement."""
SALT_BYTES = 32
KEY_MARKER_TEXT = b"API keys have existed here, so endpoints require one. `bedplate keys open` ends this.\n"

R = TypeVar("R", bound=Record)


def get_store_path() -> Path:
    return get_home() / "store.sqlite"


def compute_fingerprint(hardware: Hardware) -> str:
    """An id of the hardware. Measurements are comparable only between machines with the same id.

    It covers the operating system, the CPU and its allowed cores, the memory size, and the accelerators with their
    memory.
    """
    cards = [f"{card.name}/{card.memory_bytes}" for card in hardware.accelerators]
    memory_gib = round(hardware.memory.total_bytes / (1 << 30))
    parts = [hardware.os, hardware.cpu.name, f"{hardware.cpu.allowed_cores:g}", str(memory_gib), *cards]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _connect(path: Path) -> sqlite3.Connection:
    """Open the store and create the tables that it lacks."""
    try:
        make_folder(path.parent)
        connection = sqlite3.connect(path, timeout=10)
    except (OSError, sqlite3.Error) as error:
        raise _make_failure(error, path) from error
    try:
        with connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise ExternalFailure(
                    f"{path} was written by a newer bedplate (store version {version}; this one reads {VERSION})",
                    hint="update bedplate, or point BEDPLATE_HOME at another folder",
                )
            if version < VERSION:  # readers of an up-to-date store write nothing and take no lock
                _create_missing_tables(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise _make_failure(error, path) from error
        raise
    return connection


@contextlib.contextmanager
def _open_store(path: Path) -> Iterator[sqlite3.Connection]:
    connection = _connect(path)
    try:
        with connection:
            yield connection
    except sqlite3.Error as error:
        raise _make_failure(error, path) from error
    finally:
        connection.close()


def _create_missing_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the missing tables. A file lock lets one process at a time do it.

    SQLite rejects a concurrent change of the journal mode at once, whatever the busy timeout is.
    """
    from filelock import FileLock

    try:
        with FileLock(path.with_name(f"{path.name}.making")):
            connection.execute("PRAGMA journal_mode=WAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.executescript(SCHEMA)
            if version < FIRST_WITH_EXCLUSIONS:
                _exclude_stored_cells(connection, path)
            connection.execute(f"PRAGMA user_version={VERSION}")
            connection.commit()  # before another process may take the lock
    except OSError as error:
        raise _make_failure(error, path) from error


def _exclude_stored_cells(connection: sqlite3.Connection, path: Path) -> None:
    """Apply the rules for evidence to the cells of an older store, and remove the results of excluded cells."""
    excluded: set[tuple[object, ...]] = set()
    for (body,) in connection.execute("SELECT body FROM cells"):
        with contextlib.suppress(UsageError):  # whoever reads a damaged record gets the error
            cell = from_json(Cell, body, origin=str(path))
            if _write_exclusions(connection, cell):
                load, measured = cell.load, (cell.run, cell.subject.engine)
                excluded.add((*measured, load.concurrency, load.prompt_tokens, load.output_tokens))
                if load.concurrency is None:  # `shadow` converts an open loop to a concurrency
                    excluded.add(measured)
    for number, body in connection.execute("SELECT id, body FROM results").fetchall():
        with contextlib.suppress(UsageError):
            result = from_json(Result, body, origin=str(path))
            measured = (result.run or "", result.engine)
            load_key = (*measured, result.concurrency, result.prompt_tokens, result.output_tokens)
            if excluded & {measured, load_key}:
                connection.execute("DELETE FROM results WHERE id = ?", (number,))


def _write_exclusions(connection: sqlite3.Connection, cell: Cell) -> bool:
    found = find_exclusions(cell)
    connection.execute("DELETE FROM exclusions WHERE cell = ?", (cell.id,))
    connection.executemany(
        "INSERT INTO exclusions (cell, run, body) VALUES (?, ?, ?)",
        [(cell.id, cell.run, _to_line(one)) for one in found],
    )
    return bool(found)


def _make_failure(error: Exception, path: Path) -> ExternalFailure:
    if isinstance(error, OSError):
        return make_disk_failure(error, path)
    return ExternalFailure(
        f"cannot use the store {path}",
        cause=getattr(error, "cause", None) or str(error),
        hint="move the file away; bedplate then creates an empty one, without the earlier measurements",
    )


def add_result(result: Result, path: Path | None = None) -> None:
    _insert("INSERT INTO results (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)", result, path)


def add_agreement(agreement: Agreement, path: Path | None = None) -> None:
    _insert("INSERT INTO agreements (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)", agreement, path)


def read_results(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Result, ...]:
    """The results measured on this machine, newest first. Empty if there is no store; none is created."""
    query = "SELECT body FROM results WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    return _select(query, Result, machine, model, path)


def read_agreements(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Agreement, ...]:
    """The agreement checks run on this machine, newest first."""
    query = (
        "SELECT body FROM agreements WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    )
    return _select(query, Agreement, machine, model, path)


def add_run(run: Run, path: Path | None = None) -> None:
    """Store a run without its cells, or replace it. `add_cell` stores the cells."""
    _write(
        "INSERT INTO runs (id, at, machine, body) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
        (run.id, run.at, run.environment.machine, _to_line(replace_fields(run, cells=()))),
        path,
    )


def add_cell(cell: Cell, path: Path | None = None) -> None:
    """Store a cell, or replace it, for example after another repeat."""
    subject = cell.subject
    with _open_store(path or get_store_path()) as connection:
        connection.execute(
            "INSERT INTO cells (id, run, at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
            (cell.id, cell.run, cell.at, cell.machine, subject.engine, subject.model, _to_line(cell)),
        )
        _write_exclusions(connection, cell)


def import_run(run: Run, path: Path | None = None) -> None:
    """Store a run from a file with its cells. It may replace an earlier import, never what was measured here."""
    for head in read_cell_heads(path):
        if head.run != run.id and any(cell.id == head.id for cell in run.cells):
            raise UsageError(
                f"run {run.id} is not imported", cause=f"its cell {head.id} is stored already, in run {head.run}"
            )
    if any(cell.run != run.id for cell in run.cells) or len({cell.id for cell in run.cells}) < len(run.cells):
        raise UsageError(
            f"run {run.id} is not imported", cause="the ids of its cells are not unique, or of another run"
        )
    if any(one.id == run.id and one.source is None for one in read_runs(path=path)):
        raise UsageError(
            f"run {run.id} is stored already and was measured here", hint=f"bedplate runs show {run.id} explains it"
        )
    with _open_store(path or get_store_path()) as connection:
        connection.execute("DELETE FROM exclusions WHERE run = ?", (run.id,))
        connection.execute("DELETE FROM cells WHERE run = ?", (run.id,))
        connection.execute("DELETE FROM runs WHERE id = ?", (run.id,))
    add_run(run, path)
    for cell in run.cells:
        add_cell(cell, path)


def read_runs(machine: str | None = None, path: Path | None = None) -> tuple[Run, ...]:
    """The stored runs without their cells, newest first."""
    query = "SELECT body FROM runs WHERE (? IS NULL OR machine = ?) ORDER BY at DESC, number DESC LIMIT ?"
    return _read(query, Run, (machine, machine, MOST_READ), path)


def read_cells(
    run: str | None = None,
    *,
    machine: str | None = None,
    engine: str | None = None,
    model: str | None = None,
    path: Path | None = None,
) -> tuple[Cell, ...]:
    """The cells of a run in the order they were started; without `run`, all cells, newest first."""
    query = (
        "SELECT body FROM cells WHERE (? IS NULL OR run = ?) AND (? IS NULL OR machine = ?) "
        "AND (? IS NULL OR engine = ?) AND (? IS NULL OR model = ?) ORDER BY number DESC LIMIT ?"
    )
    newest = _read(query, Cell, (run, run, machine, machine, engine, engine, model, model, MOST_READ), path)
    return newest if run is None else newest[::-1]


def find_run(named: str | None = None, path: Path | None = None) -> Run:
    """One run with its cells, by its id or an unambiguous beginning of it; without a name, the newest."""
    kept = read_runs(path=path)
    found = [one for one in kept if named is None or one.id.startswith(named)]
    if named is None or any(one.id == named for one in found):
        found = [one for one in found if named is None or one.id == named][:1]
    if len(found) != 1:
        what = f"there is no run {named}" if named is not None else "no run is stored yet"
        if len(found) > 1:
            what = f"{len(found)} run ids begin with {named}"
        newest = ", ".join(one.id for one in (found or kept)[:5])
        raise UsageError(what, hint=f"stored runs: {newest}" if newest else "run bedplate bench first")
    return replace_fields(found[0], cells=read_cells(found[0].id, path=path))


class CellHead(msgspec.Struct):
    """A cell without its samples."""

    id: str
    run: str
    machine: str
    subject: Subject


def read_cell_heads(path: Path | None = None) -> tuple[CellHead, ...]:
    """All cells without their samples, in the order they were started."""
    where = path or get_store_path()
    if not where.is_file():
        return ()
    decode = msgspec.json.Decoder(CellHead).decode
    with _open_store(where) as connection:
        bodies = connection.execute("SELECT body FROM cells ORDER BY number")
        try:
            return tuple(decode(body) for (body,) in bodies)
        except msgspec.DecodeError as error:
            raise _make_failure(error, where) from error


class RemovedRecords(NamedTuple):
    cells: int
    results: int
    verdicts: int


def remove_run(id_: str, path: Path | None = None) -> RemovedRecords:
    """Remove a run or a tuning, and the results and verdicts that were computed from it."""
    with _open_store(path or get_store_path()) as connection:
        results = [
            (number,)
            for number, body in connection.execute("SELECT id, body FROM results")
            if _decode_derived(body).run == id_
        ]
        verdicts = [
            (number,)
            for number, body in connection.execute("SELECT id, body FROM verdicts")
            if id_ in _decode_derived(body).list_runs()
        ]
        connection.executemany("DELETE FROM results WHERE id = ?", results)
        connection.executemany("DELETE FROM verdicts WHERE id = ?", verdicts)
        connection.execute("DELETE FROM exclusions WHERE run = ?", (id_,))
        cells = connection.execute("DELETE FROM cells WHERE run = ?", (id_,)).rowcount
        connection.execute("DELETE FROM runs WHERE id = ?", (id_,))
        connection.execute("DELETE FROM tunings WHERE id = ?", (id_,))
    return RemovedRecords(cells, len(results), len(verdicts))


class _RunsOfSide(msgspec.Struct):
    runs: tuple[str, ...] = ()


class _DerivedRecord(msgspec.Struct):
    """The runs that a result or a verdict was computed from."""

    run: str | None = None
    a: _RunsOfSide | None = None
    b: _RunsOfSide | None = None

    def list_runs(self) -> tuple[str, ...]:
        return tuple(run for side in (self.a, self.b) if side is not None for run in side.runs)


_decode_derived = msgspec.json.Decoder(_DerivedRecord).decode


def add_verdict(verdict: Verdict, at: str, path: Path | None = None) -> None:
    """`at`: when the verdict was reached, ISO 8601 in UTC."""
    _write(
        "INSERT INTO verdicts (at, machine, model, body) VALUES (?, ?, ?, ?)",
        (at, verdict.machine, verdict.model, _to_line(verdict)),
        path,
    )


def read_last_verdict(machine: str, model: str, path: Path | None = None) -> tuple[str, Verdict] | None:
    """The newest verdict for a model on this machine, and when it was reached."""
    where = path or get_store_path()
    if not where.exists():
        return None
    query = "SELECT at, body FROM verdicts WHERE machine = ? AND model = ? ORDER BY at DESC, id DESC LIMIT 1"
    with _open_store(where) as connection:
        found = connection.execute(query, (machine, model)).fetchone()
    if found is None:
        return None
    try:
        return found[0], from_json(Verdict, found[1], origin=str(where))
    except UsageError as error:
        raise _make_failure(error, where) from error


def read_verdicts(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Verdict, ...]:
    """The verdicts reached on this machine, newest first."""
    query = "SELECT body FROM verdicts WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    return _select(query, Verdict, machine, model, path)


def add_tuning(tuned: TuningRun, path: Path | None = None) -> None:
    """Store a tuning, or replace it."""
    _write(
        "INSERT INTO tunings (id, at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
        (tuned.id, tuned.at, tuned.machine, tuned.engine, tuned.model, _to_line(tuned)),
        path,
    )


def read_tunings(machine: str | None, model: str | None = None, path: Path | None = None) -> tuple[TuningRun, ...]:
    """The tunings of this machine, or of every machine if `machine` is None, newest first."""
    query = (
        "SELECT body FROM tunings WHERE (? IS NULL OR machine = ?) AND (? IS NULL OR model = ?) "
        "ORDER BY at DESC, number DESC LIMIT ?"
    )
    return _read(query, TuningRun, (machine, machine, model, model, MOST_READ), path)


def read_evidence(machine: str, path: Path | None = None) -> StoredEvidence:
    """The measurements that may change plans on this machine.

    A result, verdict or tuning counts only if its run is stored, so that a person can see and discard it, was measured
    here, and no cell behind it is excluded. Checks of answers do not depend on the speed, so they always count.
    """
    where = path or get_store_path()
    if not where.is_file():
        return StoredEvidence()
    with _open_store(where) as connection:
        bodies = connection.execute("SELECT id, body FROM runs WHERE machine = ?", (machine,))
        runs = {run for run, body in bodies if not _decode_origin(body).source}
        excluded = {cell for (cell,) in connection.execute("SELECT DISTINCT cell FROM exclusions")}
    return StoredEvidence(
        tuple(one for one in read_results(machine, path=path) if one.run in runs),
        read_agreements(machine, path=path),
        tuple(
            one
            for one in read_verdicts(machine, path=path)
            if runs.issuperset((*one.a.runs, *one.b.runs)) and excluded.isdisjoint((*one.a.cells, *one.b.cells))
        ),
        tuple(one for one in read_tunings(machine, path=path) if not one.exclusions),
    )


class _Origin(msgspec.Struct):
    """Where a run is from."""

    source: str | None = None


_decode_origin = msgspec.json.Decoder(_Origin).decode


def read_exclusions(run: str | None = None, path: Path | None = None) -> dict[str, tuple[Exclusion, ...]]:
    """The reasons why cells of a run, or of all runs, are not evidence, by cell."""
    where = path or get_store_path()
    if not where.is_file():
        return {}
    query = "SELECT cell, body FROM exclusions WHERE ? IS NULL OR run = ? ORDER BY id"
    found: dict[str, tuple[Exclusion, ...]] = {}
    with _open_store(where) as connection:
        for cell, body in connection.execute(query, (run, run)):
            found[cell] = (*found.get(cell, ()), from_json(Exclusion, body, origin=str(where)))
    return found


def add_refused(refused: RefusedSetting, path: Path | None = None) -> None:
    _write(
        "INSERT INTO refused_settings (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)",
        (refused.at, refused.machine, refused.engine, refused.model, _to_line(refused)),
        path,
    )


def read_refused_settings(machine: str, engine: str, path: Path | None = None) -> tuple[RefusedSetting, ...]:
    """The settings that `tune` must not propose again on this machine, newest first."""
    query = "SELECT body FROM refused_settings WHERE machine = ? AND engine = ? ORDER BY at DESC, id DESC LIMIT ?"
    return _read(query, RefusedSetting, (machine, engine, MOST_READ), path)


def get_salt(path: Path | None = None) -> bytes:
    """A secret of this installation, created on first use. Hashes made with it cannot be compared elsewhere."""
    where = path or get_store_path()
    with _open_store(where) as connection:
        (found,) = connection.execute("SELECT COUNT(*) FROM install WHERE name = 'salt'").fetchone()
        if not found:
            connection.execute(
                "INSERT OR IGNORE INTO install (name, value) VALUES ('salt', ?)", (secrets.token_bytes(SALT_BYTES),)
            )
            with contextlib.suppress(OSError):
                where.chmod(0o600)
        (value,) = connection.execute("SELECT value FROM install WHERE name = 'salt'").fetchone()
        return bytes(value)


def put_tenant(tenant: Tenant, path: Path | None = None) -> None:
    """Store a tenant's limits. `add_key` stores its keys."""
    _write(
        "INSERT INTO tenants (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
        (tenant.name, _to_line(replace_fields(tenant, keys=()))),
        path,
    )


def mark_keys_exist(path: Path | None = None) -> None:
    """Remember that keys have existed, in a file beside the store: also if the store is moved away."""
    marker = _get_key_marker(path)
    try:
        make_folder(marker.parent)
        descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, KEY_MARKER_TEXT)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise make_disk_failure(error, marker) from error


def have_keys_existed(path: Path | None = None) -> bool:
    """Whether keys have existed since the last `forget_keys`. A marker that cannot be read counts as one."""
    try:
        _get_key_marker(path).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def forget_keys(path: Path | None = None) -> None:
    """Forget that keys have existed: endpoints that start from now on require none."""
    marker = _get_key_marker(path)
    try:
        marker.unlink(missing_ok=True)
    except OSError as error:
        raise make_disk_failure(error, marker) from error


def _get_key_marker(path: Path | None) -> Path:
    return (path or get_store_path()).with_name("keys-required")


def add_key(tenant: str, key: TenantKey, digest: bytes, path: Path | None = None) -> None:
    mark_keys_exist(path)
    _write(
        "INSERT INTO keys (id, tenant, digest, body) VALUES (?, ?, ?, ?)", (key.id, tenant, digest, _to_line(key)), path
    )


def remove_key(id_: str, path: Path | None = None) -> None:
    _write("DELETE FROM keys WHERE id = ?", (id_,), path)


def remove_tenant(name: str, path: Path | None = None) -> None:
    """Remove a tenant and its keys. Its usage records stay."""
    with _open_store(path or get_store_path()) as connection:
        connection.execute("DELETE FROM keys WHERE tenant = ?", (name,))
        connection.execute("DELETE FROM tenants WHERE name = ?", (name,))


def read_tenants(path: Path | None = None) -> tuple[Tenant, ...]:
    """All tenants with their keys, ordered by name."""
    return tuple(tenant for tenant, _ in read_tenants_and_digests(path))


def read_tenants_and_digests(path: Path | None = None) -> tuple[tuple[Tenant, tuple[bytes, ...]], ...]:
    """All tenants, each with the digests of its keys in the order of `keys`."""
    where = path or get_store_path()
    if not where.is_file():
        return ()
    with _open_store(where) as connection:
        bodies = connection.execute("SELECT name, body FROM tenants ORDER BY name").fetchall()
        rows = connection.execute("SELECT tenant, digest, body FROM keys ORDER BY rowid").fetchall()
    try:
        return parse_tenants(tuple(bodies), tuple(rows), str(where))
    except UsageError as error:
        raise _make_failure(error, where) from error


@functools.lru_cache(maxsize=1)
def parse_tenants(
    bodies: tuple[tuple[str, str], ...], rows: tuple[tuple[str, bytes, str], ...], origin: str
) -> tuple[tuple[Tenant, tuple[bytes, ...]], ...]:
    """The same object for the same rows: a gateway reads them after each write to the store, and few writes change
    them."""
    own: dict[str, list[tuple[bytes, str]]] = {}
    for name, digest, key in rows:
        own.setdefault(name, []).append((digest, key))
    found = []
    for name, body in bodies:
        keys = tuple(from_json(TenantKey, key, origin=origin) for _, key in own.get(name, ()))
        tenant = replace_fields(from_json(Tenant, body, origin=origin), keys=keys)
        found.append((tenant, tuple(digest for digest, _ in own.get(name, ()))))
    return tuple(found)


class RequestWriter:
    """Adds requests to the store over one connection, which it opens when it first writes. For use in one thread.

    Opening and closing the store takes longer than adding a hundred requests: the last connection that is closed also
    copies the write-ahead log into the file and deletes it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or get_store_path()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """The device and the inode of the file that is open."""

    def keep(self, request: ServedRequest) -> None:
        """The store is on this disk: nothing is noted before."""

    def prepare(self) -> None: ...

    def seal(self) -> None: ...

    def recover(self) -> int:
        return 0

    def add(self, requests: Sequence[ServedRequest]) -> None:
        """Store all of the requests or none.

        They survive a killed process. After a power failure the last ones may be missing.
        """
        if self._connection is not None and _identify_file(self._path) != self._file:
            self.close()  # the store was moved away or replaced
        try:
            if self._connection is None:
                self._connection = _connect(self._path)
                self._connection.execute("PRAGMA synchronous=NORMAL")
                self._file = _identify_file(self._path)
            with self._connection:
                _insert_requests(self._connection, requests)
        except sqlite3.Error as error:
            self.close()
            raise _make_failure(error, self._path) from error

    def read_foreign_version(self) -> object | None:
        """A value that changes whenever the store is changed other than by this writer; `None`: not known."""
        if self._connection is None or _identify_file(self._path) != self._file:
            return None
        try:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return self._connection, version  # the numbers of two connections are not comparable

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def add_requests(requests: Sequence[ServedRequest], path: Path | None = None) -> None:
    """Store all of the requests or none."""
    with contextlib.closing(RequestWriter(path)) as writer:
        writer.add(requests)


def _insert_requests(connection: sqlite3.Connection, requests: Sequence[ServedRequest]) -> None:
    # Insert a hundred rows in one statement. SQLite releases the GIL once per statement, and handing it to the
    # gateway's thread and back for every row takes longer than the insert. A hundred rows take less than a millisecond.
    for begin in range(0, len(requests), ROWS_AT_ONCE):
        some = requests[begin : begin + ROWS_AT_ONCE]
        values: list[object] = []
        for one in some:
            values += (
                one.at_s, one.tenant, one.model, one.engine, one.outcome,
                one.prompt_tokens, one.cached_tokens, one.completion_tokens, _to_line(one),
            )  # fmt: skip
        places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(some))
        connection.execute(
            "INSERT INTO requests (at_s, tenant, model, engine, outcome, prompt_tokens, cached_tokens, "  # noqa: S608
            f"completion_tokens, body) VALUES {places}",
            values,
        )


def _identify_file(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino


def read_requests(
    since_s: float = 0.0,
    *,
    model: str | None = None,
    path: Path | None = None,
) -> Iterator[ServedRequest]:
    """The requests from `since_s` on, in the order they ended. They are read one page at a time."""
    where = path or get_store_path()
    if not where.is_file():
        return
    query = "SELECT id, body FROM requests WHERE id > ? AND at_s >= ? AND (? IS NULL OR model = ?) ORDER BY id LIMIT ?"
    last = 0
    while True:
        with _open_store(where) as connection:
            values = (last, since_s, model, model, PAGE)
            page = connection.execute(query, values).fetchall()
        for number, body in page:
            last = number
            try:
                yield from_json(ServedRequest, body, origin=str(where))
            except UsageError as error:
                raise _make_failure(error, where) from error
        if len(page) < PAGE:
            return


def fold_requests(before_s: float, most: int, path: Path | None = None) -> int:
    """Replace old requests by daily sums: those before `before_s`, and all but the newest `most`.

    Returns the number of requests removed.
    """
    with _open_store(path or get_store_path()) as connection:
        (last,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM requests").fetchone()
        old = (before_s, last - most)
        connection.execute(
            "INSERT INTO usage_days SELECT day, tenant, model, engine, SUM(requests), SUM(failed), SUM(turned_away), "
            "SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens) "
            "FROM counted WHERE at_s < ? OR id <= ? GROUP BY day, tenant, model, engine "
            "ON CONFLICT (day, tenant, model, engine) DO UPDATE SET requests = requests + excluded.requests, "
            "failed = failed + excluded.failed, turned_away = turned_away + excluded.turned_away, "
            "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "cached_tokens = cached_tokens + excluded.cached_tokens, "
            "completion_tokens = completion_tokens + excluded.completion_tokens",
            old,
        )
        counts = _count_reasons(connection, "(at_s < ? OR id <= ?)", old)
        connection.executemany(
            "INSERT INTO reason_days VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (day, tenant, model, engine, reason) DO UPDATE SET requests = requests + excluded.requests",
            [(*key, count) for key, count in counts.items()],
        )
        return connection.execute("DELETE FROM requests WHERE at_s < ? OR id <= ?", old).rowcount


class _RequestReason(msgspec.Struct):
    reason: str | None = None


_decode_reason = msgspec.json.Decoder(_RequestReason).decode
_ReasonKey = tuple[str, str, str, str, str]
"""Day, tenant, model, engine and reason."""


def _count_reasons(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...]
) -> collections.Counter[_ReasonKey]:
    """The reasons of the requests that were not answered. Only their rows are read."""
    query = (
        "SELECT strftime('%Y-%m-%d', at_s, 'unixepoch'), tenant, model, COALESCE(engine, ''), body FROM requests "  # noqa: S608
        f"WHERE {where} AND outcome NOT IN ('ok', 'cancelled')"
    )
    found: collections.Counter[_ReasonKey] = collections.Counter()
    for *key, body in connection.execute(query, values):
        if (reason := _decode_reason(body).reason) is not None:
            day, tenant, model, engine = key
            found[day, tenant, model, engine, reason] += 1
    return found


def read_usage(
    by: UsageBy, since_s: float = 0.0, *, tenant: str | None = None, path: Path | None = None
) -> tuple[UsageRow, ...]:
    """Usage since `since_s`. Requests that are kept only as daily sums count from the beginning of that day."""
    where = path or get_store_path()
    if not where.is_file():
        return ()
    query = (
        "SELECT CASE ?3 WHEN 'day' THEN day WHEN 'model' THEN model WHEN 'engine' THEN engine ELSE tenant END, "
        "SUM(requests), SUM(failed), SUM(turned_away), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens) "
        "FROM (SELECT day, tenant, model, engine, requests, failed, turned_away, prompt_tokens, cached_tokens, "
        "completion_tokens FROM counted WHERE at_s >= ?1 UNION ALL SELECT * FROM usage_days "
        "WHERE day >= strftime('%Y-%m-%d', ?1, 'unixepoch')) WHERE ?2 IS NULL OR tenant = ?2 GROUP BY 1 ORDER BY 1"
    )
    with _open_store(where) as connection:
        rows = connection.execute(query, (since_s, tenant, by)).fetchall()
        counts = _count_reasons(connection, "at_s >= ? AND (? IS NULL OR tenant = ?)", (since_s, tenant, tenant))
        folded = (
            "SELECT day, tenant, model, engine, reason, requests FROM reason_days "
            "WHERE day >= strftime('%Y-%m-%d', ?1, 'unixepoch') AND (?2 IS NULL OR tenant = ?2)"
        )
        for *key, count in connection.execute(folded, (since_s, tenant)):
            day, name, model, engine, reason = key
            counts[day, name, model, engine, reason] += count
    place = ("day", "tenant", "model", "engine").index(by)
    reasons: dict[str, dict[str, int]] = {}
    for key, count in sorted(counts.items()):
        own = reasons.setdefault(key[place], {})
        own[key[4]] = own.get(key[4], 0) + count
    return tuple(
        UsageRow(
            key=key, requests=requests, failed=failed, turned_away=away, prompt_tokens=prompt, cached_tokens=cached,
            completion_tokens=completion, reasons=sort_counts(reasons.get(key, {})),
        )
        for key, requests, failed, away, prompt, cached, completion in rows
    )  # fmt: skip


def sort_counts(counts: dict[str, int]) -> dict[str, int]:
    """The same, the most frequent first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _to_line(record: Record) -> str:
    return msgspec.json.encode(record).decode()


def _write(statement: str, values: Sequence[object], path: Path | None) -> None:
    with _open_store(path or get_store_path()) as connection:
        connection.execute(statement, values)


def _read(query: str, kind: type[R], values: Sequence[object], path: Path | None) -> tuple[R, ...]:
    where = path or get_store_path()
    if not where.is_file():
        return ()
    with _open_store(where) as connection:
        found = connection.execute(query, values).fetchall()
    try:
        return tuple(from_json(kind, body, origin=str(where)) for (body,) in found)
    except UsageError as error:
        raise _make_failure(error, where) from error


def _insert(statement: str, record: Result | Agreement, path: Path | None) -> None:
    _write(statement, (record.at, record.machine, record.engine, record.model, to_json(record, indent=0)), path)


def _select(query: str, kind: type[R], machine: str, model: str | None, path: Path | None) -> tuple[R, ...]:
    return _read(query, kind, (machine, model, model, MOST_READ), path)
