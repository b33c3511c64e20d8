"""Tenant: who may use an endpoint, and their limits."""

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
"""The holder of the one key given to `serve`, and everybody if no key is required."""


class TenantKey(Record, frozen=True, kw_only=True):
    """One key of a tenant. The key itself is not stored."""

    id: str
    created_at: str
    expires_at: str | None = None


class Tenant(Record, frozen=True, kw_only=True):
    schema: Literal["tenant/1"] = "tenant/1"
    name: Name
    weight: Weight = 1.0
    """Weight of the tenant when several wait for the same engine."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None
    """Maximum concurrent requests."""
    admin: bool = False
    """Whether it may see the use of all tenants: all metrics and the whole live page."""
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


class DeclaredTenant(Record, frozen=True, kw_only=True):
    """A tenant as declared when an endpoint starts; `None`: keep the stored value."""

    name: Name
    weight: Weight | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None


LIMITS = ("weight", "requests_per_minute", "tokens_per_minute", "in_flight")
"""The fields that limit a tenant."""


def is_tenant_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", text) is not None


def digest_key(key: bytes, salt: bytes) -> bytes:
    """The stored hash of a key. Keys are 256 random bits, so a slow hash would add no protection."""
    return hashlib.blake2b(key, key=salt, digest_size=32).digest()
