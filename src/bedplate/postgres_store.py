"""Tenants, keys, usage and limits in PostgreSQL, shared by several gateways. Needs the extra `bedplate[postgresql]`."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bedplate.errors import ExternalFailure, UsageError
from bedplate.store import SALT_BYTES, parse_tenants, sort_counts
from bedplate.unsent_usage import UnsentUsage, get_unsent_folder, take_unsent
from bedplate.values.record import from_json, replace_fields
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import ServedRequest, UsageBy, UsageRow

if TYPE_CHECKING:
    import psycopg

VERSION = 1
"""Version of the tables."""
LOCK = 0x62656470  # "bedp"
"""The advisory lock under which tables are created and old requests are folded."""
CONNECT_TIMEOUT_S = 3
STATEMENT_TIMEOUT_S = 10
LEASE_S = 10.0
"""A gateway that has not reported for so long is dead, and its concurrent requests no longer count."""
PAGE = 5000
SCHEMA = """
CREATE TABLE IF NOT EXISTS bedplate_install (name text PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE IF NOT EXISTS bedplate_changes (one boolean PRIMARY KEY DEFAULT true, version bigint NOT NULL);
INSERT INTO bedplate_changes (version) VALUES (0) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS bedplate_tenants (name text PRIMARY KEY, body text NOT NULL);
CREATE TABLE IF NOT EXISTS bedplate_keys (
    number bigint GENERATED ALWAYS AS IDENTITY,
    id text PRIMARY KEY,
    tenant text NOT NULL,
    digest bytea NOT NULL UNIQUE,
    body text NOT NULL
);
CREATE TABLE IF NOT EXISTS bedplate_requests (
    id bigint GENERATED ALWAYS AS IDENTITY,
    gateway text NOT NULL,
    number bigint NOT NULL,
    at_s double precision NOT NULL,
    tenant text NOT NULL,
    model text NOT NULL,
    engine text NOT NULL,
    outcome text NOT NULL,
    reason text,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    body text NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (gateway, number)
);
CREATE UNIQUE INDEX IF NOT EXISTS bedplate_requests_by_id ON bedplate_requests (id);
CREATE INDEX IF NOT EXISTS bedplate_requests_by_time ON bedplate_requests (at_s);
CREATE TABLE IF NOT EXISTS bedplate_usage_days (
    day text NOT NULL,
    tenant text NOT NULL,
    model text NOT NULL,
    engine text NOT NULL,
    requests bigint NOT NULL,
    failed bigint NOT NULL,
    turned_away bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    PRIMARY KEY (day, tenant, model, engine)
);
CREATE TABLE IF NOT EXISTS bedplate_reason_days (
    day text NOT NULL,
    tenant text NOT NULL,
    model text NOT NULL,
    engine text NOT NULL,
    reason text NOT NULL,
    requests bigint NOT NULL,
    PRIMARY KEY (day, tenant, model, engine, reason)
);
CREATE UNLOGGED TABLE IF NOT EXISTS bedplate_gateways (id text PRIMARY KEY, seen timestamptz NOT NULL);
CREATE UNLOGGED TABLE IF NOT EXISTS bedplate_in_flight (
    gateway text NOT NULL,
    tenant text NOT NULL,
    sequences bigint NOT NULL,
    PRIMARY KEY (gateway, tenant)
);
CREATE UNLOGGED TABLE IF NOT EXISTS bedplate_limits (
    tenant text PRIMARY KEY,
    requests double precision,
    tokens double precision,
    at_s double precision NOT NULL
);
"""
_DAY = "to_char(to_timestamp(at_s) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_COUNTS = (
    "count(*) FILTER (WHERE outcome <> 'turned_away') AS requests, "
    "count(*) FILTER (WHERE outcome = 'failed') AS failed, "
    "count(*) FILTER (WHERE outcome = 'turned_away') AS turned_away, sum(prompt_tokens) AS prompt_tokens, "
    "sum(cached_tokens) AS cached_tokens, sum(completion_tokens) AS completion_tokens"
)
_SUMMED = ("requests", "failed", "turned_away", "prompt_tokens", "cached_tokens", "completion_tokens")
_BY_COLUMNS = {"day": "day", "tenant": "tenant", "model": "model", "engine": "engine"}


class PostgresUsageStore:
    """Tenants, keys and usage in one database. A connection is opened for each call; gateways keep a writer."""

    def __init__(self, url: str) -> None:
        self._url = url

    # tenants and keys

    def get_salt(self) -> bytes:
        with self._open() as connection:
            connection.execute(
                "INSERT INTO bedplate_install VALUES ('salt', %s) ON CONFLICT DO NOTHING",
                (secrets.token_bytes(SALT_BYTES),),
            )
            row = connection.execute("SELECT value FROM bedplate_install WHERE name = 'salt'").fetchone()
        return bytes(_require(row)[0])

    def read_tenants_and_digests(self) -> tuple[tuple[Tenant, tuple[bytes, ...]], ...]:
        with self._open() as connection:
            bodies = connection.execute("SELECT name, body FROM bedplate_tenants ORDER BY name").fetchall()
            rows = connection.execute("SELECT tenant, digest, body FROM bedplate_keys ORDER BY number").fetchall()
        keys = tuple((tenant, bytes(digest), body) for tenant, digest, body in rows)
        try:
            return parse_tenants(tuple(bodies), keys, "the usage store")
        except UsageError as error:
            raise ExternalFailure("cannot read the tenants in the usage store", cause=error.message) from error

    def put_tenant(self, tenant: Tenant) -> None:
        body = msgspec.json.encode(replace_fields(tenant, keys=())).decode()
        self._change(
            "INSERT INTO bedplate_tenants VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
            (tenant.name, body),
        )

    def remove_tenant(self, name: str) -> None:
        self._change(
            "WITH keys AS (DELETE FROM bedplate_keys WHERE tenant = %s) DELETE FROM bedplate_tenants WHERE name = %s",
            (name, name),
        )

    def add_key(self, tenant: str, key: TenantKey, digest: bytes) -> None:
        self.mark_keys_exist()
        body = msgspec.json.encode(key).decode()
        self._change(
            "INSERT INTO bedplate_keys (id, tenant, digest, body) VALUES (%s, %s, %s, %s)",
            (key.id, tenant, digest, body),
        )

    def remove_key(self, id_: str) -> None:
        self._change("DELETE FROM bedplate_keys WHERE id = %s", (id_,))

    def mark_keys_exist(self) -> None:
        self._change("INSERT INTO bedplate_install VALUES ('keys_required', '') ON CONFLICT DO NOTHING", ())

    def have_keys_existed(self) -> bool:
        with self._open() as connection:
            query = "SELECT count(*) FROM bedplate_install WHERE name = 'keys_required'"
            return bool(_require(connection.execute(query).fetchone())[0])

    def forget_keys(self) -> None:
        self._change("DELETE FROM bedplate_install WHERE name = 'keys_required'", ())

    def read_version(self) -> object:
        with self._open() as connection:
            return _read_version(connection)

    # requests

    def make_writer(self) -> PostgresRequestWriter:
        return PostgresRequestWriter(self._url, get_unsent_folder(self._url))

    def make_limits(self) -> PostgresLimits:
        return PostgresLimits(self._url)

    def fold_requests(self, before_s: float, most: int) -> int:
        """Replace old requests by daily sums. One gateway at a time does it."""
        with self._open() as connection:
            if not _require(connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (LOCK,)).fetchone())[0]:
                return 0
            row = connection.execute("SELECT COALESCE(MAX(id), 0) FROM bedplate_requests").fetchone()
            added = ", ".join(f"{name} = bedplate_usage_days.{name} + excluded.{name}" for name in _SUMMED)
            found = connection.execute(
                f"WITH old AS (DELETE FROM bedplate_requests WHERE at_s < %s OR id <= %s RETURNING {_DAY} AS day, "  # noqa: S608
                "tenant, model, engine, outcome, reason, prompt_tokens, cached_tokens, completion_tokens), "
                f"days AS (INSERT INTO bedplate_usage_days SELECT day, tenant, model, engine, {_COUNTS} FROM old "
                "GROUP BY day, tenant, model, engine ON CONFLICT (day, tenant, model, engine) "
                f"DO UPDATE SET {added}), "
                "reasons AS (INSERT INTO bedplate_reason_days SELECT day, tenant, model, engine, reason, count(*) "
                "FROM old WHERE reason IS NOT NULL AND outcome NOT IN ('ok', 'cancelled') "
                "GROUP BY day, tenant, model, engine, reason ON CONFLICT (day, tenant, model, engine, reason) "
                "DO UPDATE SET requests = bedplate_reason_days.requests + excluded.requests) "
                "SELECT count(*) FROM old",
                (before_s, _require(row)[0] - most),
            ).fetchone()
            return int(_require(found)[0])

    def read_requests(self, since_s: float = 0.0, *, model: str | None = None) -> Iterator[ServedRequest]:
        query = (
            "SELECT id, body FROM bedplate_requests WHERE id > %s AND at_s >= %s "
            "AND (%s::text IS NULL OR model = %s) ORDER BY id LIMIT %s"
        )
        last = 0
        while True:
            with self._open() as connection:
                page = connection.execute(query, (last, since_s, model, model, PAGE)).fetchall()
            for number, body in page:
                last = number
                yield from_json(ServedRequest, body, origin="the usage store")
            if len(page) < PAGE:
                return

    def read_usage(self, by: UsageBy, since_s: float = 0.0, *, tenant: str | None = None) -> tuple[UsageRow, ...]:
        key = _BY_COLUMNS[by]
        first_day = "to_char(to_timestamp(%(since)s) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
        values = {"since": since_s, "tenant": tenant}
        sums = ", ".join(f"sum({name})" for name in _SUMMED)
        query = (
            f"SELECT {key}, {sums} FROM (SELECT {_DAY} AS day, tenant, model, engine, {_COUNTS} "  # noqa: S608
            "FROM bedplate_requests WHERE at_s >= %(since)s GROUP BY 1, 2, 3, 4 "
            f"UNION ALL SELECT * FROM bedplate_usage_days WHERE day >= {first_day}) AS counted "
            f'WHERE %(tenant)s::text IS NULL OR tenant = %(tenant)s GROUP BY {key} ORDER BY {key} COLLATE "C"'
        )
        reasons_query = (
            f"SELECT {key}, reason, sum(requests) FROM (SELECT {_DAY} AS day, tenant, model, engine, reason, "  # noqa: S608
            "1 AS requests FROM bedplate_requests WHERE at_s >= %(since)s AND reason IS NOT NULL "
            "AND outcome NOT IN ('ok', 'cancelled') "
            f"UNION ALL SELECT * FROM bedplate_reason_days WHERE day >= {first_day}) AS counted "
            f"WHERE %(tenant)s::text IS NULL OR tenant = %(tenant)s GROUP BY {key}, reason"
        )
        with self._open() as connection:
            rows = connection.execute(query, values).fetchall()
            reasons: dict[str, dict[str, int]] = {}
            for name, reason, count in connection.execute(reasons_query, values):
                reasons.setdefault(name, {})[reason] = int(count)
        return tuple(
            UsageRow(
                key=name, requests=int(requests), failed=int(failed), turned_away=int(away), prompt_tokens=int(prompt),
                cached_tokens=int(cached), completion_tokens=int(completion),
                reasons=sort_counts(reasons.get(name, {})),
            )
            for name, requests, failed, away, prompt, cached, completion in rows
        )  # fmt: skip

    @contextlib.contextmanager
    def _open(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection with one transaction."""
        with _explain_failures():
            connection = _connect(self._url)
            with contextlib.closing(connection), connection.transaction():
                yield connection

    def _change(self, statement: str, values: Sequence[object]) -> None:
        with self._open() as connection:
            connection.execute(statement, values)
            connection.execute("UPDATE bedplate_changes SET version = version + 1")


class PostgresRequestWriter:
    """Adds requests over one connection. Each has a number of this writer, so that none is stored twice.

    When the connection is lost during a commit, it is not known whether the requests were stored. They keep their
    numbers until they were, and the database ignores numbers that it has. With a folder, requests are kept there under
    their numbers until then.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self._url = url
        self._folder = folder
        self._gateway = secrets.token_hex(8)
        self._unsent = UnsentUsage(folder, self._gateway) if folder is not None else None
        self._number = 0
        self._numbers: dict[int, tuple[ServedRequest, int]] = {}
        """Of requests whose commit is unknown, by their identity. It keeps them, so that no other has the same."""
        self._connection: psycopg.Connection[Any] | None = None

    def keep(self, request: ServedRequest) -> None:
        self._number += 1
        self._numbers[id(request)] = request, self._number
        if self._unsent is not None:
            self._unsent.keep(self._number, request)

    def prepare(self) -> None:
        if self._unsent is not None:
            self._unsent.prepare()

    def seal(self) -> None:
        if self._unsent is not None:
            self._unsent.seal()

    def recover(self) -> int:
        if self._folder is None:
            return 0
        with take_unsent(self._folder) as found:
            if found:
                self._insert([_to_row(one.gateway, one.number, one.request) for one in found])
        return len(found)

    def add(self, requests: Sequence[ServedRequest]) -> None:
        for one in requests:
            if id(one) not in self._numbers:
                self.keep(one)
        self._insert([_to_row(self._gateway, self._numbers[id(one)][1], one) for one in requests])
        for one in requests:
            del self._numbers[id(one)]
        if self._unsent is not None:
            self._unsent.discard()

    def _insert(self, rows: Sequence[tuple[object, ...]]) -> None:
        with self._use() as connection, connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO bedplate_requests (gateway, number, at_s, tenant, model, engine, outcome, reason, "
                "prompt_tokens, cached_tokens, completion_tokens, body) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (gateway, number) DO NOTHING",
                rows,
            )

    def read_foreign_version(self) -> object | None:
        try:
            with self._use() as connection:
                return _read_version(connection)
        except ExternalFailure:
            return None

    def close(self) -> None:
        """Leaves what was not stored to the next gateway."""
        self._disconnect()
        if self._unsent is not None:
            self._unsent.close()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[psycopg.Connection[Any]]:
        with _explain_failures():
            try:
                if self._connection is None:
                    self._connection = _connect(self._url)
                yield self._connection
            except BaseException:
                self._disconnect()
                raise


class LimitLevels(msgspec.Struct):
    """What is left of a tenant's limits per minute, and how many of its sequences other gateways process."""

    requests: float | None
    tokens: float | None
    """`None`: all of it."""
    elapsed_s: float
    """Since the levels were valid; 0 once what was added since then is included."""
    elsewhere: int


Decide = Callable[[dict[str, LimitLevels]], None]
"""Changes the levels of the tenants while no other gateway can."""


class PostgresLimits:
    """The limits of tenants, in one transaction for a batch of requests. For use in one thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._gateway = secrets.token_hex(8)
        self._connection: psycopg.Connection[Any] | None = None

    def update(self, tenants: Sequence[str], decide: Decide, in_flight: Mapping[str, int]) -> None:
        """Locks the limits of the tenants, lets `decide` change them, and writes them.

        `in_flight` is read afterwards: the sequences of this gateway, by tenant. It replaces what was written before,
        so that a lost transaction or an expired lease is corrected by the next one.
        """
        with self._use() as connection, connection.transaction():
            if tenants:
                levels, now_s = self._lock(connection, sorted(tenants))
                decide(levels)
                with connection.cursor() as cursor:
                    cursor.executemany(
                        "INSERT INTO bedplate_limits VALUES (%s, %s, %s, %s) ON CONFLICT (tenant) DO UPDATE SET "
                        "requests = excluded.requests, tokens = excluded.tokens, "
                        "at_s = greatest(bedplate_limits.at_s, excluded.at_s)",
                        [(name, one.requests, one.tokens, now_s - one.elapsed_s) for name, one in levels.items()],
                    )
            if in_flight:
                with connection.cursor() as cursor:
                    cursor.executemany(
                        "INSERT INTO bedplate_in_flight VALUES (%s, %s, %s) "
                        "ON CONFLICT (gateway, tenant) DO UPDATE SET sequences = excluded.sequences",
                        [(self._gateway, name, count) for name, count in sorted(in_flight.items())],
                    )

    def report_alive(self, in_flight: Mapping[str, int]) -> None:
        """Renews the lease of this gateway, and removes gateways whose lease has expired."""
        with self._use() as connection, connection.transaction():
            self._renew(connection)
            connection.execute(
                "WITH dead AS (DELETE FROM bedplate_gateways WHERE seen < clock_timestamp() - %s * interval '1 second' "
                "RETURNING id) DELETE FROM bedplate_in_flight WHERE gateway IN (SELECT id FROM dead)",
                (LEASE_S,),
            )
        self.update((), lambda levels: None, in_flight)

    def close(self) -> None:
        """Ends the lease."""
        with contextlib.suppress(ExternalFailure):
            if self._connection is not None:
                with self._use() as connection, connection.transaction():
                    connection.execute("DELETE FROM bedplate_in_flight WHERE gateway = %s", (self._gateway,))
                    connection.execute("DELETE FROM bedplate_gateways WHERE id = %s", (self._gateway,))
        self._drop()

    def _lock(
        self, connection: psycopg.Connection[Any], tenants: Sequence[str]
    ) -> tuple[dict[str, LimitLevels], float]:
        names = list(tenants)
        connection.execute(
            "INSERT INTO bedplate_limits SELECT name, NULL, NULL, 0 FROM unnest(%s::text[]) AS name ORDER BY name "
            "ON CONFLICT DO NOTHING",
            (names,),
        )
        rows = connection.execute(
            "SELECT tenant, requests, tokens, at_s FROM bedplate_limits WHERE tenant = ANY(%s) "
            "ORDER BY tenant FOR UPDATE",
            (names,),
        ).fetchall()
        # After the lock: a clock that was read before it may be older than the levels.
        clock = connection.execute("SELECT extract(epoch FROM clock_timestamp())::double precision").fetchone()
        now_s = float(_require(clock)[0])
        elsewhere = dict(
            connection.execute(
                "SELECT tenant, sum(sequences)::bigint FROM bedplate_in_flight "
                "JOIN bedplate_gateways ON id = gateway WHERE gateway <> %s AND tenant = ANY(%s) "
                "AND seen > clock_timestamp() - %s * interval '1 second' GROUP BY tenant",
                (self._gateway, names, LEASE_S),
            ).fetchall()
        )
        levels = {
            tenant: LimitLevels(requests, tokens, max(0.0, now_s - at_s), elsewhere.get(tenant, 0))
            for tenant, requests, tokens, at_s in rows
        }
        return levels, now_s

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(
            "INSERT INTO bedplate_gateways VALUES (%s, clock_timestamp()) "
            "ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
            (self._gateway,),
        )

    @contextlib.contextmanager
    def _use(self) -> Iterator[psycopg.Connection[Any]]:
        with _explain_failures():
            try:
                if self._connection is None:
                    self._connection = _connect(self._url)
                    # Limits need not survive a crash of the database, and must not wait for its disk.
                    self._connection.execute("SET synchronous_commit = off")
                    with self._connection.transaction():
                        self._renew(self._connection)
                yield self._connection
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _connect(url: str) -> psycopg.Connection[Any]:
    """Open a connection, and create the tables that are missing."""
    connection: psycopg.Connection[Any] = load_driver().connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name="bedplate",
        tcp_user_timeout=1000 * STATEMENT_TIMEOUT_S,
        prepare_threshold=None,  # poolers between here and the database may not keep prepared statements
    )
    try:
        connection.execute(f"SET statement_timeout = '{STATEMENT_TIMEOUT_S}s'")
        _create_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: psycopg.Connection[Any]) -> None:
    query = "SELECT value FROM bedplate_install WHERE name = 'version'"
    known = _require(connection.execute("SELECT to_regclass('bedplate_install') IS NOT NULL").fetchone())[0]
    row = connection.execute(query).fetchone() if known else None
    if row is None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
            connection.execute(SCHEMA)
            connection.execute(
                "INSERT INTO bedplate_install VALUES ('version', %s) ON CONFLICT DO NOTHING", (str(VERSION).encode(),)
            )
        row = _require(connection.execute(query).fetchone())
    if (version := int(bytes(row[0]))) > VERSION:
        raise ExternalFailure(
            f"the usage store was written by a newer bedplate (version {version}; this one reads {VERSION})",
            hint="update bedplate, or use another database",
        )


@functools.cache
def load_driver() -> Any:
    """The driver, which is installed with an extra of bedplate."""
    try:
        import psycopg
    except ImportError as error:
        raise UsageError(
            "a usage store in PostgreSQL needs the driver psycopg",
            cause=str(error),
            hint="uv pip install 'bedplate[postgresql]'",
        ) from error
    return psycopg


@contextlib.contextmanager
def _explain_failures() -> Iterator[None]:
    try:
        yield
    except load_driver().Error as error:
        # The driver's messages name the host and the user, never the password.
        cause = " ".join(str(error).split()) or type(error).__name__
        hint = "check the database, and BEDPLATE_USAGE_STORE"
        raise ExternalFailure("cannot use the usage store in PostgreSQL", cause=cause, hint=hint) from error


def _read_version(connection: psycopg.Connection[Any]) -> tuple[int]:
    return (int(_require(connection.execute("SELECT version FROM bedplate_changes").fetchone())[0]),)


def _require(row: Any) -> Any:
    if row is None:
        raise ExternalFailure("the usage store in PostgreSQL lacks a row", hint="restore it from a backup")
    return row


def _to_row(gateway: str, number: int, one: ServedRequest) -> tuple[object, ...]:
    body = msgspec.json.encode(one).decode().replace("\\u0000", "\\ufffd")  # PostgreSQL has no NUL in texts
    return (
        gateway, number, one.at_s, one.tenant, one.model.replace("\0", "\ufffd"), one.engine or "", one.outcome,
        one.reason, one.prompt_tokens or 0, one.cached_tokens or 0, one.completion_tokens or 0, body,
    )  # fmt: skip
