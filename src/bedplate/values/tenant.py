"""Tenant: who may use an endpoint, and how much of it."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

import msgspec

from bedplate.values.record import Record

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
DEFAULT_TENANT = "default"
"""Whoever holds the one key that `serve` was given, and everybody where no key is asked for."""


class TenantKey(Record, frozen=True, kw_only=True):
    """One key of a tenant; what it opens is known, the key itself is not."""

    id: str
    created_at: str
    expires_at: str | None = None


class Tenant(Record, frozen=True, kw_only=True):
    schema: Literal["tenant/1"] = "tenant/1"
    name: Name
    weight: Weight = 1.0
    """Its part of an engine that several tenants wait for, beside the weights of the others."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None
    """Requests that it may have under way at once."""
    admin: bool = False
    """Whether it may see what others use: all metrics, and the whole of the live page."""
    keys: tuple[TenantKey, ...] = ()


class TenantList(Record, frozen=True, kw_only=True):
    """What `bedplate keys list --json` prints."""

    schema: Literal["tenants/1"] = "tenants/1"
    tenants: tuple[Tenant, ...]


class NewKey(Record, frozen=True, kw_only=True):
    """What `bedplate keys add --json` prints."""

    key: str
    """The key itself. It is not stored, and cannot be printed again."""
    tenant: Tenant


class Declared(Record, frozen=True, kw_only=True):
    """A tenant as whoever starts an endpoint names it; `None`: nothing is said, and the store's word holds."""

    name: Name
    weight: Weight | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None


LIMITS = ("weight", "requests_per_minute", "tokens_per_minute", "in_flight")
"""What a tenant may have."""


def is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", text) is not None


def key_digest(key: bytes, salt: bytes) -> bytes:
    """What is kept of a key. Keys are 256 bits of chance, which nobody can try out: a slow hash adds nothing."""
    return hashlib.blake2b(key, key=salt, digest_size=32).digest()
