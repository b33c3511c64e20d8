"""Who may use the endpoints of this installation: tenants, their keys, and what they used."""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bedplate import store
from bedplate.errors import BadQuestion
from bedplate.values.record import replaced
from bedplate.values.tenant import DEFAULT_TENANT, LIMITS, Declared, Tenant, TenantKey, is_name, key_digest
from bedplate.values.traffic import UsageBy, UsageReport, UsageRow

KEY_MARK = "bp-"
KEY_BYTES = 32
ID_LETTERS = 8


def add_key(
    name: str, changes: dict[str, Any], expires_s: float | None = None, path: Path | None = None
) -> tuple[Tenant, str]:
    """A new key for a tenant, which is made if there is none of that name; the key is told once, and not kept."""
    if not is_name(name):
        raise BadQuestion(f"{name!r} cannot be the name of a tenant", hint="letters, digits and . _ @ -, at most 64")
    before = next((one for one in store.tenants(path) if one.name == name), None)
    tenant = _changed(before or Tenant(name=name), changes)
    key = KEY_MARK + secrets.token_urlsafe(KEY_BYTES)
    now = dt.datetime.now(dt.UTC)
    kept = TenantKey(
        id=secrets.token_hex(ID_LETTERS // 2),
        created_at=now.isoformat(timespec="seconds"),
        expires_at=_after(now, expires_s),
    )
    if tenant != before:
        store.put_tenant(tenant, path)
    store.add_key(name, kept, key_digest(key.encode(), store.salt(path)), path)
    return replaced(tenant, keys=(*tenant.keys, kept)), key


def change(name: str, changes: dict[str, Any], path: Path | None = None) -> Tenant:
    """Other limits or another weight. The tenant `default` is whoever comes without a key of the store."""
    found = next((one for one in store.tenants(path) if one.name == name), None)
    if found is None and name != DEFAULT_TENANT:
        raise _nobody(name, path)
    if not changes:
        raise BadQuestion("nothing is to be changed", hint="--weight, --requests-per-minute, --in-flight …")
    tenant = _changed(found or Tenant(name=name), changes)
    store.put_tenant(tenant, path)
    return tenant


def remarks(declared: Sequence[Declared], stored: Sequence[Tenant]) -> tuple[str, ...]:
    """What is odd about the tenants that an endpoint was started for, beside those that have keys."""
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
        found.append(f"{' and '.join(keyless)} {have} no key yet and cannot ask for anything: {commands}")
    for one in declared:
        usual = Tenant(name=one.name)
        for field in LIMITS:
            here, there = getattr(one, field), getattr(known.get(one.name, usual), field)
            if here is not None and there not in (here, getattr(usual, field)):
                what = field.replace("_", " ")
                found.append(f"{one.name}: {what} {here:g} of the file holds here, not the {there:g} of bedplate keys")
    if others := [one.name for one in stored if one.keys and one.name not in named]:
        found.append(f"not in the file, and let in by their keys all the same: {', '.join(others)}")
    return tuple(found)


def revoke(which: str, path: Path | None = None) -> tuple[str, ...]:
    """Takes back one key by its id, or a tenant with all of its keys by its name; says which keys are gone."""
    known = store.tenants(path)
    for tenant in known:
        if tenant.name == which:
            store.remove_tenant(which, path)
            return tuple(key.id for key in tenant.keys)
    for tenant in known:
        for key in tenant.keys:
            if key.id == which:
                if len(tenant.keys) == 1:
                    store.remove_tenant(tenant.name, path)
                else:
                    store.remove_key(which, path)
                return (which,)
    raise _nobody(which, path)


def usage(
    by: UsageBy, since_s: float | None = None, tenant: str | None = None, path: Path | None = None
) -> UsageReport:
    """What was used in the last `since_s` seconds, or ever."""
    now = time.time()
    began = now - since_s if since_s is not None else None
    rows = store.usage(by, began or 0.0, tenant=tenant, path=path)
    fields = ("requests", "failed", "turned_away", "prompt_tokens", "cached_tokens", "completion_tokens")
    return UsageReport(
        since=_moment(began) if began is not None else None,
        until=_moment(now),
        by=by,
        tenant=tenant,
        rows=rows,
        total=UsageRow(key="all", **{field: sum(getattr(row, field) for row in rows) for field in fields}),
    )


def _changed(tenant: Tenant, changes: dict[str, Any]) -> Tenant:
    try:
        return msgspec.convert({**msgspec.structs.asdict(tenant), **changes}, Tenant)
    except msgspec.ValidationError as error:
        raise BadQuestion("this cannot be allowed to a tenant", cause=str(error)) from error


def _nobody(which: str, path: Path | None) -> BadQuestion:
    names = ", ".join(one.name for one in store.tenants(path)[:10])
    hint = f"there are {names}" if names else "bedplate keys add NAME makes one"
    return BadQuestion(f"there is no tenant and no key {which!r}", hint=hint)


def _after(now: dt.datetime, expires_s: float | None) -> str | None:
    if expires_s is None:
        return None
    if expires_s <= 0:
        raise BadQuestion("a key must be valid for some time", hint="--expires 30d")
    try:
        return (now + dt.timedelta(seconds=expires_s)).isoformat(timespec="seconds")
    except OverflowError:
        raise BadQuestion("a key cannot be valid for that long", hint="leave out --expires") from None


def _moment(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat(timespec="seconds")
