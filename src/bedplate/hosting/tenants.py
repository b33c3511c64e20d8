"""Tenants of this installation: their keys, limits and usage."""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bedplate import store
from bedplate.errors import UsageError
from bedplate.usage_store import UsageStore, open_usage_store, read_tenants
from bedplate.values.record import replace_fields
from bedplate.values.tenant import DEFAULT_TENANT, LIMITS, DeclaredTenant, Tenant, TenantKey, digest_key, is_tenant_name
from bedplate.values.traffic import UsageBy, UsageReport, UsageRow

KEY_MARK = "bp-"
KEY_BYTES = 32
ID_LETTERS = 8
CLOSED = (
    "a key is required because keys have existed here, and none is valid now: bedplate keys add NAME creates one, "
    "bedplate keys open lets endpoints start without keys"
)


def add_key(
    name: str, changes: dict[str, Any], expires_s: float | None = None, path: Path | None = None
) -> tuple[Tenant, str]:
    """Create a key for a tenant, and the tenant if it does not exist. The key is returned once and stored as a hash."""
    if not is_tenant_name(name):
        raise UsageError(
            f"{name!r} is not a valid tenant name", hint="use letters, digits and . _ @ -, at most 64 characters"
        )
    usage = open_usage_store(path)
    before = next((one for one in read_tenants(usage) if one.name == name), None)
    tenant = _apply_changes(before or Tenant(name=name), changes)
    key = KEY_MARK + secrets.token_urlsafe(KEY_BYTES)
    now = dt.datetime.now(dt.UTC)
    kept = TenantKey(
        id=secrets.token_hex(ID_LETTERS // 2),
        created_at=now.isoformat(timespec="seconds"),
        expires_at=_compute_expiry(now, expires_s),
    )
    if tenant != before:
        usage.put_tenant(tenant)
    usage.add_key(name, kept, digest_key(key.encode(), usage.get_salt()))
    return replace_fields(tenant, keys=(*tenant.keys, kept)), key


def change_tenant(name: str, changes: dict[str, Any], path: Path | None = None) -> Tenant:
    """Change limits or the weight of a tenant. Requests without a stored key belong to the tenant `default`."""
    usage = open_usage_store(path)
    found = next((one for one in read_tenants(usage) if one.name == name), None)
    if found is None and name != DEFAULT_TENANT:
        raise _make_unknown_error(name, usage)
    if not changes:
        raise UsageError("no change given", hint="use --weight, --requests-per-minute, --in-flight …")
    tenant = _apply_changes(found or Tenant(name=name), changes)
    usage.put_tenant(tenant)
    return tenant


def list_warnings(declared: Sequence[DeclaredTenant], stored: Sequence[Tenant]) -> tuple[str, ...]:
    """Warnings about differences between the tenants in an intent file and those in the store."""
    if not declared:
        return ()
    known = {one.name: one for one in stored}
    named = {one.name for one in declared}
    found = []
    keyless = [one.name for one in declared if not (one.name in known and known[one.name].keys)]
    if keyless := [name for name in keyless if name != DEFAULT_TENANT]:
        have, commands = (
            ("has" if len(keyless) == 1 else "have"),
            " and ".join(f"bedplate keys add {n}" for n in keyless),
        )
        found.append(f"{' and '.join(keyless)} {have} no key yet and cannot send requests: run {commands}")
    for one in declared:
        usual = Tenant(name=one.name)
        for field in LIMITS:
            in_file, in_store = getattr(one, field), getattr(known.get(one.name, usual), field)
            if in_file is not None and in_store not in (in_file, getattr(usual, field)):
                limit = field.replace("_", " ")
                found.append(
                    f"{one.name}: {limit} {in_file:g} from the file applies here, not {in_store:g} from bedplate keys"
                )
    if others := [one.name for one in stored if one.keys and one.name not in named]:
        found.append(f"not in the file, but accepted because they have keys: {', '.join(others)}")
    return tuple(found)


def revoke(which: str, path: Path | None = None) -> tuple[str, ...]:
    """Revoke a key by its id, or a tenant and all of its keys by its name. Returns the ids of the revoked keys."""
    usage = open_usage_store(path)
    known = read_tenants(usage)
    for tenant in known:
        if tenant.name == which:
            usage.remove_tenant(which)
            return tuple(key.id for key in tenant.keys)
    for tenant in known:
        for key in tenant.keys:
            if key.id == which:
                if len(tenant.keys) == 1:
                    usage.remove_tenant(tenant.name)
                else:
                    usage.remove_key(which)
                return (which,)
    raise _make_unknown_error(which, usage)


def open_endpoints(path: Path | None = None) -> bool:
    """Let endpoints that start from now on require no key again. Returns False if they require none anyway."""
    usage = open_usage_store(path)
    if tenants := [one for one in read_tenants(usage) if one.keys]:
        names = ", ".join(one.name for one in tenants)
        commands = " && ".join(f"bedplate keys revoke {one.name}" for one in tenants)
        have = "has" if len(tenants) == 1 else "have"
        raise UsageError(f"{names} {have} keys, so endpoints require one", hint=f"revoke them first: {commands}")
    required = usage.have_keys_existed()
    usage.forget_keys()
    return required


def explain_closed(path: Path | None = None) -> str | None:
    """Why endpoints reject every request although there is no key, and what to do; `None`: they do not."""
    usage = open_usage_store(path)
    if not usage.have_keys_existed() or any(one.keys for one in read_tenants(usage)):
        return None
    return CLOSED


def report_usage(
    by: UsageBy, since_s: float | None = None, tenant: str | None = None, path: Path | None = None
) -> UsageReport:
    """Usage in the last `since_s` seconds, or in total."""
    now = time.time()
    began = now - since_s if since_s is not None else None
    rows = open_usage_store(path).read_usage(by, began or 0.0, tenant=tenant)
    fields = ("requests", "failed", "turned_away", "prompt_tokens", "cached_tokens", "completion_tokens")
    return UsageReport(
        since=_format_time(began) if began is not None else None,
        until=_format_time(now),
        by=by,
        tenant=tenant,
        rows=rows,
        total=UsageRow(
            key="all",
            reasons=store.sort_counts(_sum_reasons(rows)),
            **{field: sum(getattr(row, field) for row in rows) for field in fields},
        ),
    )


def _sum_reasons(rows: Sequence[UsageRow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        for reason, count in row.reasons.items():
            counts[reason] = counts.get(reason, 0) + count
    return counts


def _apply_changes(tenant: Tenant, changes: dict[str, Any]) -> Tenant:
    try:
        return msgspec.convert({**msgspec.structs.asdict(tenant), **changes}, Tenant)
    except msgspec.ValidationError as error:
        raise UsageError("invalid limit for a tenant", cause=str(error)) from error


def _make_unknown_error(which: str, usage: UsageStore) -> UsageError:
    names = ", ".join(one.name for one in read_tenants(usage)[:10])
    hint = f"tenants: {names}" if names else "bedplate keys add NAME creates a tenant"
    return UsageError(f"no tenant and no key {which!r}", hint=hint)


def _compute_expiry(now: dt.datetime, expires_s: float | None) -> str | None:
    if expires_s is None:
        return None
    if expires_s <= 0:
        raise UsageError("--expires must be longer than 0", hint="for example --expires 30d")
    try:
        return (now + dt.timedelta(seconds=expires_s)).isoformat(timespec="seconds")
    except OverflowError:
        raise UsageError("--expires is too long", hint="leave out --expires for a key that does not expire") from None


def _format_time(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat(timespec="seconds")
