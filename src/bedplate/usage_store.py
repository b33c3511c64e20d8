"""Where tenants, keys and usage are kept: SQLite on one machine, or PostgreSQL that several gateways share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bedplate import store
from bedplate.errors import UsageError
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import ServedRequest, UsageBy, UsageRow

if TYPE_CHECKING:
    from bedplate.postgres_store import PostgresLimits

VARIABLE = "BEDPLATE_USAGE_STORE"
"""The environment variable with the URL of a PostgreSQL database."""
SCHEMES = ("postgresql://", "postgres://")
TenantRows = tuple[tuple[Tenant, tuple[bytes, ...]], ...]
"""Tenants, each with the digests of its keys."""


class RequestWriting(Protocol):
    """Adds requests over one connection. For use in one thread."""

    def add(self, requests: Sequence[ServedRequest]) -> None:
        """Store all of the requests or none; requests of a failed call may be given again."""

    def keep(self, request: ServedRequest) -> None:
        """Note a request that will be added, so that it is found after a crash. Not while `seal` runs."""

    def prepare(self) -> None:
        """Do what is slow in `seal`."""

    def seal(self) -> None:
        """The next call of `add` has all requests that were noted until now."""

    def recover(self) -> int:
        """Store what crashed gateways noted and did not add; returns how many requests."""

    def read_foreign_version(self) -> object | None:
        """A value that changes whenever tenants or keys may have changed; `None`: not known."""

    def close(self) -> None: ...


class UsageStore(Protocol):
    """Tenants, keys and usage."""

    def get_salt(self) -> bytes: ...

    def read_tenants_and_digests(self) -> TenantRows: ...

    def put_tenant(self, tenant: Tenant) -> None: ...

    def remove_tenant(self, name: str) -> None: ...

    def add_key(self, tenant: str, key: TenantKey, digest: bytes) -> None: ...

    def remove_key(self, id_: str) -> None: ...

    def mark_keys_exist(self) -> None: ...

    def have_keys_existed(self) -> bool: ...

    def forget_keys(self) -> None: ...

    def read_version(self) -> object:
        """A value that changes whenever the store may have changed."""

    def make_writer(self) -> RequestWriting: ...

    def make_limits(self) -> PostgresLimits | None:
        """The limits that several gateways share; `None`: each gateway has its own."""

    def fold_requests(self, before_s: float, most: int) -> int: ...

    def read_requests(self, since_s: float = 0.0, *, model: str | None = None) -> Iterator[ServedRequest]: ...

    def read_usage(self, by: UsageBy, since_s: float = 0.0, *, tenant: str | None = None) -> tuple[UsageRow, ...]: ...


class LocalUsageStore:
    """Tenants, keys and usage in the SQLite store of one machine."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or store.get_store_path()

    def get_salt(self) -> bytes:
        return store.get_salt(self.path)

    def read_tenants_and_digests(self) -> TenantRows:
        return store.read_tenants_and_digests(self.path)

    def put_tenant(self, tenant: Tenant) -> None:
        store.put_tenant(tenant, self.path)

    def remove_tenant(self, name: str) -> None:
        store.remove_tenant(name, self.path)

    def add_key(self, tenant: str, key: TenantKey, digest: bytes) -> None:
        store.add_key(tenant, key, digest, self.path)

    def remove_key(self, id_: str) -> None:
        store.remove_key(id_, self.path)

    def mark_keys_exist(self) -> None:
        store.mark_keys_exist(self.path)

    def have_keys_existed(self) -> bool:
        return store.have_keys_existed(self.path)

    def forget_keys(self) -> None:
        store.forget_keys(self.path)

    def read_version(self) -> object:
        marks = []
        for name in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                state = name.stat()
                marks.append((state.st_mtime_ns, state.st_size, state.st_ino))
            except OSError:
                marks.append((0, 0, 0))
        return tuple(marks)

    def make_writer(self) -> RequestWriting:
        return store.RequestWriter(self.path)

    def make_limits(self) -> None:
        return None

    def fold_requests(self, before_s: float, most: int) -> int:
        return store.fold_requests(before_s, most, self.path)

    def read_requests(self, since_s: float = 0.0, *, model: str | None = None) -> Iterator[ServedRequest]:
        return store.read_requests(since_s, model=model, path=self.path)

    def read_usage(self, by: UsageBy, since_s: float = 0.0, *, tenant: str | None = None) -> tuple[UsageRow, ...]:
        return store.read_usage(by, since_s, tenant=tenant, path=self.path)


def open_usage_store(path: Path | None = None) -> UsageStore:
    """The store at `path`; without one, the database in BEDPLATE_USAGE_STORE, or the store of this BEDPLATE_HOME."""
    url = os.environ.get(VARIABLE, "").strip()
    if path is not None or not url:
        return LocalUsageStore(path)
    check_url(url, VARIABLE)
    from bedplate.postgres_store import PostgresUsageStore

    return PostgresUsageStore(url)


def check_url(url: str, source: str) -> None:
    if not url.startswith(SCHEMES):
        # Without the value: it may contain a password.
        raise UsageError(
            f"{source} is not the URL of a PostgreSQL database", hint="for example postgresql://bedplate@db/bedplate"
        )


def read_tenants(usage: UsageStore) -> tuple[Tenant, ...]:
    """All tenants with their keys, ordered by name."""
    return tuple(tenant for tenant, _ in usage.read_tenants_and_digests())
