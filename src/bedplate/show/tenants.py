"""The pages of `keys` and `usage`."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.show.columns import Column, Columns
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import UsageReport

NO_LIMIT = "–"


def render_tenants(tenants: Sequence[Tenant]) -> RenderableType:
    if not tenants:
        return Text(" no keys: endpoints on this machine require none, unless serve was started with one", style="dim")
    moment = dt.datetime.now(dt.UTC)
    return Columns(
        Column.of("tenant", [_name(one) for one in tenants]),
        (
            Column.of("weight", [f"{one.weight:g}" for one in tenants], right=True),
            Column.of("requests/min", [_limit(one.requests_per_minute) for one in tenants], right=True),
            Column.of("tokens/min", [_limit(one.tokens_per_minute) for one in tenants], right=True),
            Column.of("in flight", [_limit(one.in_flight) for one in tenants], right=True),
            Column.of("keys", [_keys(one.keys, moment) for one in tenants], comfortable=60),
        ),
    )


def render_usage(report: UsageReport) -> RenderableType:
    if not report.rows:
        since = f" since {report.since[:16].replace('T', ' ')} UTC" if report.since is not None else ""
        return Text(f" no requests{since}", style="dim")
    rows = (*report.rows, report.total) if len(report.rows) > 1 else report.rows
    table = Columns(
        Column.of(report.by, [Text(row.key or "none", style="bold") for row in rows]),
        (
            Column.of("requests", [f"{row.requests:,}" for row in rows], right=True),
            Column.of("failed", [f"{row.failed:,}" for row in rows], right=True),
            Column.of("rejected (429)", [f"{row.turned_away:,}" for row in rows], right=True),
            Column.of("prompt tokens", [f"{row.prompt_tokens:,}" for row in rows], right=True),
            Column.of("cached prompt tokens", [f"{row.cached_tokens:,}" for row in rows], right=True),
            Column.of("output tokens", [f"{row.completion_tokens:,}" for row in rows], right=True),
        ),
    )
    since = (
        f"since {report.since[:16].replace('T', ' ')} UTC" if report.since is not None else "since the first request"
    )
    tenant = f" · {report.tenant}" if report.tenant is not None else ""
    return Group(table, Text(), Text(f" {since}{tenant}", style="dim"))


def usage_csv(report: UsageReport) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = ("requests", "failed", "turned_away", "prompt_tokens", "cached_tokens", "completion_tokens")
    writer.writerow((report.by, *fields))
    for row in report.rows:
        writer.writerow((row.key, *(getattr(row, field) for field in fields)))
    return out.getvalue()


def _name(tenant: Tenant) -> Text:
    return Text.assemble((tenant.name, "bold"), (" (admin)" if tenant.admin else "", "dim"))


def _limit(value: int | None) -> str:
    return NO_LIMIT if value is None else f"{value:,}"


def _keys(keys: Sequence[TenantKey], now: dt.datetime) -> str:
    return ", ".join(f"{key.id}{_until(key, now)}" for key in keys) or "the --api-key of serve"


def _until(key: TenantKey, now: dt.datetime) -> str:
    if key.expires_at is None:
        return ""
    word = "expired" if dt.datetime.fromisoformat(key.expires_at) <= now else "until"
    return f" ({word} {key.expires_at[:10]})"
