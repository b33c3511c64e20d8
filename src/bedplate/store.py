"""What was measured, asked and allowed here, in one SQLite file under BEDPLATE_HOME.

Measurements are written by measure and read by decide; tenants and requests are the gateway's.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
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
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import ServedRequest, UsageBy, UsageRow
from bedplate.values.tuning import Refused, Tuned
from bedplate.values.verdict import Verdict

VERSION = 6
"""1: results. 2: agreements. 3: runs and their cells. 4: tenants, their keys and requests. 5: verdicts. 6: tunings, and
settings that they refused.

Each has tables of its own: an older file needs nothing else.
"""
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
CREATE VIEW IF NOT EXISTS counted AS SELECT
    id, at_s, strftime('%Y-%m-%d', at_s, 'unixepoch') AS day, tenant, model, COALESCE(engine, '') AS engine,
    outcome != 'turned_away' AS requests, outcome = 'failed' AS failed, outcome = 'turned_away' AS turned_away,
    COALESCE(prompt_tokens, 0) AS prompt_tokens, COALESCE(cached_tokens, 0) AS cached_tokens,
    COALESCE(completion_tokens, 0) AS completion_tokens
FROM requests;
"""
PAGE = 5000
ROWS_AT_ONCE = 100
"""Of nine values each; older builds of SQLite take 999."""
SALT_BYTES = 32

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
                _bring_up_to_date(connection, path)
            yield connection
    except sqlite3.Error as error:
        raise _failure(error, path) from error
    finally:
        connection.close()


def _bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    """One process at a time: SQLite refuses a concurrent change of the journal mode, whatever its busy timeout."""
    from filelock import FileLock

    try:
        with FileLock(path.with_name(f"{path.name}.making")):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA user_version={VERSION}")
    except OSError as error:
        raise _failure(error, path) from error


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


def add_verdict(verdict: Verdict, at: str, path: Path | None = None) -> None:
    """`at`: when it was reached, ISO 8601 in UTC."""
    _put(
        "INSERT INTO verdicts (at, machine, model, body) VALUES (?, ?, ?, ?)",
        (at, verdict.machine, verdict.model, _line(verdict)),
        path,
    )


def last_verdict(machine: str, model: str, path: Path | None = None) -> tuple[str, Verdict] | None:
    """The newest for a model on this machine, and when it was reached."""
    where = path or store_path()
    if not where.exists():
        return None
    query = "SELECT at, body FROM verdicts WHERE machine = ? AND model = ? ORDER BY at DESC, id DESC LIMIT 1"
    with _opened(where) as connection:
        found = connection.execute(query, (machine, model)).fetchone()
    if found is None:
        return None
    try:
        return found[0], from_json(Verdict, found[1], origin=str(where))
    except BadQuestion as error:
        raise _failure(error, where) from error


def verdicts(machine: str, model: str | None = None, path: Path | None = None) -> tuple[Verdict, ...]:
    """What was said of two engines on this machine, the newest first."""
    query = "SELECT body FROM verdicts WHERE machine = ? AND (? IS NULL OR model = ?) ORDER BY at DESC, id DESC LIMIT ?"
    return _selected(query, Verdict, machine, model, path)


def add_tuning(tuned: Tuned, path: Path | None = None) -> None:
    """Keeps a tuning as it is now, in the place of what was kept of it before."""
    _put(
        "INSERT INTO tunings (id, at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
        (tuned.id, tuned.at, tuned.machine, tuned.engine, tuned.model, _line(tuned)),
        path,
    )


def tunings(machine: str | None, model: str | None = None, path: Path | None = None) -> tuple[Tuned, ...]:
    """What was tuned on this machine, or on any, the newest first."""
    query = (
        "SELECT body FROM tunings WHERE (? IS NULL OR machine = ?) AND (? IS NULL OR model = ?) "
        "ORDER BY at DESC, number DESC LIMIT ?"
    )
    return _read(query, Tuned, (machine, machine, model, model, MOST_READ), path)


def add_refused(refused: Refused, path: Path | None = None) -> None:
    _put(
        "INSERT INTO refused_settings (at, machine, engine, model, body) VALUES (?, ?, ?, ?, ?)",
        (refused.at, refused.machine, refused.engine, refused.model, _line(refused)),
        path,
    )


def refused_settings(machine: str, engine: str, path: Path | None = None) -> tuple[Refused, ...]:
    """What no tuning proposes again on this machine, the newest first."""
    query = "SELECT body FROM refused_settings WHERE machine = ? AND engine = ? ORDER BY at DESC, id DESC LIMIT ?"
    return _read(query, Refused, (machine, engine, MOST_READ), path)


def salt(path: Path | None = None) -> bytes:
    """A secret of this installation, made when it is first asked for: hashes made with it mean nothing elsewhere."""
    where = path or store_path()
    with _opened(where) as connection:
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
    """Keeps what a tenant may have; its keys are kept one by one, by `add_key`."""
    _put(
        "INSERT INTO tenants (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
        (tenant.name, _line(replaced(tenant, keys=()))),
        path,
    )


def add_key(tenant: str, key: TenantKey, digest: bytes, path: Path | None = None) -> None:
    _put("INSERT INTO keys (id, tenant, digest, body) VALUES (?, ?, ?, ?)", (key.id, tenant, digest, _line(key)), path)


def remove_key(id_: str, path: Path | None = None) -> None:
    _put("DELETE FROM keys WHERE id = ?", (id_,), path)


def remove_tenant(name: str, path: Path | None = None) -> None:
    """With all of its keys. What it used stays known."""
    with _opened(path or store_path()) as connection:
        connection.execute("DELETE FROM keys WHERE tenant = ?", (name,))
        connection.execute("DELETE FROM tenants WHERE name = ?", (name,))


def tenants(path: Path | None = None) -> tuple[Tenant, ...]:
    """All tenants with their keys, by name."""
    return tuple(tenant for tenant, _ in tenants_and_digests(path))


def tenants_and_digests(path: Path | None = None) -> tuple[tuple[Tenant, tuple[bytes, ...]], ...]:
    """All tenants, each with the hashes of its keys in the order of `keys`."""
    where = path or store_path()
    if not where.is_file():
        return ()
    with _opened(where) as connection:
        bodies = connection.execute("SELECT name, body FROM tenants ORDER BY name").fetchall()
        rows = connection.execute("SELECT tenant, digest, body FROM keys ORDER BY rowid").fetchall()
    try:
        found = []
        for name, body in bodies:
            own = [(bytes(digest), key) for tenant, digest, key in rows if tenant == name]
            keys = tuple(from_json(TenantKey, key, origin=str(where)) for _, key in own)
            tenant = replaced(from_json(Tenant, body, origin=str(where)), keys=keys)
            found.append((tenant, tuple(digest for digest, _ in own)))
        return tuple(found)
    except BadQuestion as error:
        raise _failure(error, where) from error


def add_requests(requests: Sequence[ServedRequest], path: Path | None = None) -> None:
    """All of them or none. They outlive a process that is killed; of a machine that is, perhaps not the last ones."""
    with _opened(path or store_path()) as connection:
        connection.execute("PRAGMA synchronous=NORMAL")
        # A hundred in one statement: SQLite lets other threads go on once for each, and one of these answers requests.
        # To hand over to it and back for every row takes longer than the row; a hundred take less than a millisecond.
        for begin in range(0, len(requests), ROWS_AT_ONCE):
            some = requests[begin : begin + ROWS_AT_ONCE]
            values: list[object] = []
            for one in some:
                values += (
                    one.at_s, one.tenant, one.model, one.engine, one.outcome,
                    one.prompt_tokens, one.cached_tokens, one.completion_tokens, _line(one),
                )  # fmt: skip
            places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(some))
            connection.execute(
                "INSERT INTO requests (at_s, tenant, model, engine, outcome, prompt_tokens, cached_tokens, "  # noqa: S608
                f"completion_tokens, body) VALUES {places}",
                values,
            )


def requests(
    since_s: float = 0.0,
    *,
    until_s: float | None = None,
    model: str | None = None,
    tenant: str | None = None,
    path: Path | None = None,
) -> Iterator[ServedRequest]:
    """What was asked from a moment on, in the order in which it ended, a page at a time."""
    where = path or store_path()
    if not where.is_file():
        return
    query = (
        "SELECT id, body FROM requests WHERE id > ? AND at_s >= ? AND (? IS NULL OR at_s < ?) "
        "AND (? IS NULL OR model = ?) AND (? IS NULL OR tenant = ?) ORDER BY id LIMIT ?"
    )
    last = 0
    while True:
        with _opened(where) as connection:
            values = (last, since_s, until_s, until_s, model, model, tenant, tenant, PAGE)
            page = connection.execute(query, values).fetchall()
        for number, body in page:
            last = number
            try:
                yield from_json(ServedRequest, body, origin=str(where))
            except BadQuestion as error:
                raise _failure(error, where) from error
        if len(page) < PAGE:
            return


def fold_requests(before_s: float, most: int, path: Path | None = None) -> int:
    """Keeps of requests before that moment, and of those beyond the newest `most`, only what each day used."""
    with _opened(path or store_path()) as connection:
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
        return connection.execute("DELETE FROM requests WHERE at_s < ? OR id <= ?", old).rowcount


def usage(
    by: UsageBy, since_s: float = 0.0, *, tenant: str | None = None, path: Path | None = None
) -> tuple[UsageRow, ...]:
    """What was used from a moment on, or, of what is so old that only days are known, from that day on."""
    where = path or store_path()
    if not where.is_file():
        return ()
    query = (
        "SELECT CASE ?3 WHEN 'day' THEN day WHEN 'model' THEN model WHEN 'engine' THEN engine ELSE tenant END, "
        "SUM(requests), SUM(failed), SUM(turned_away), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens) "
        "FROM (SELECT day, tenant, model, engine, requests, failed, turned_away, prompt_tokens, cached_tokens, "
        "completion_tokens FROM counted WHERE at_s >= ?1 UNION ALL SELECT * FROM usage_days "
        "WHERE day >= strftime('%Y-%m-%d', ?1, 'unixepoch')) WHERE ?2 IS NULL OR tenant = ?2 GROUP BY 1 ORDER BY 1"
    )
    with _opened(where) as connection:
        rows = connection.execute(query, (since_s, tenant, by)).fetchall()
    return tuple(
        UsageRow(
            key=key, requests=requests, failed=failed, turned_away=away,
            prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion,
        )
        for key, requests, failed, away, prompt, cached, completion in rows
    )  # fmt: skip


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
