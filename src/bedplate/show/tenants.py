"""The pages of `keys` and `usage`."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.show.columns import Column, SplitTable
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import UsageReport

NO_LIMIT = "–"


def render_tenants(tenants: Sequence[Tenant]) -> RenderableType:
    if not tenants:
        return Text(" no keys: endpoints on this machine require none, unless serve was started with one", style="dim")
    moment = dt.datetime.now(dt.UTC)
    return SplitTable(
        Column.from_cells("tenant", [_format_name(one) for one in tenants]),
        (
            Column.from_cells("weight", [f"{one.weight:g}" for one in tenants], right=True),
            Column.from_cells("requests/min", [_format_limit(one.requests_per_minute) for one in tenants], right=True),
            Column.from_cells("tokens/min", [_format_limit(one.tokens_per_minute) for one in tenants], right=True),
            Column.from_cells("in flight", [_format_limit(one.in_flight) for one in tenants], right=True),
            Column.from_cells("keys", [_describe_keys(one.keys, moment) for one in tenants], comfortable=60),
        ),
    )


def render_usage(report: UsageReport) -> RenderableType:
    if not report.rows:
        since = f" since {report.since[:16].replace('T', ' ')} UTC" if report.since is not None else ""
        return Text(f" no requests{since}", style="dim")
    rows = (*report.rows, report.total) if len(report.rows) > 1 else report.rows
    table = SplitTable(
        Column.from_cells(report.by, [Text(row.key or "none", style="bold") for row in rows]),
        (
            Column.from_cells("requests", [f"{row.requests:,}" for row in rows], right=True),
            Column.from_cells("failed", [f"{row.failed:,}" for row in rows], right=True),
            Column.from_cells("rejected", [f"{row.turned_away:,}" for row in rows], right=True),
            Column.from_cells("prompt tokens", [f"{row.prompt_tokens:,}" for row in rows], right=True),
            Column.from_cells("cached prompt tokens", [f"{row.cached_tokens:,}" for row in rows], right=True),
            Column.from_cells("output tokens", [f"{row.completion_tokens:,}" for row in rows], right=True),
        ),
    )
    since = (
        f"since {report.since[:16].replace('T', ' ')} UTC" if report.since is not None else "since the first request"
    )
    tenant = f" · {report.tenant}" if report.tenant is not None else ""
    return Group(table, *_render_reasons(report), Text(), Text(f" {since}{tenant}", style="dim"))


def _render_reasons(report: UsageReport) -> list[RenderableType]:
    """Refused, rejected and failed requests by reason, for each row that has any."""
    rows = [(row.key or "none", reason, count) for row in report.rows for reason, count in row.reasons.items()]
    if not rows:
        return []
    table = SplitTable(
        Column.from_cells(report.by, [Text(key, style="bold") for key, _, _ in rows]),
        (
            Column.from_cells("not answered because of", [reason for _, reason, _ in rows]),
            Column.from_cells("requests", [f"{count:,}" for _, _, count in rows], right=True),
        ),
    )
    return [Text(), table]


def to_usage_csv(report: UsageReport) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = ("requests", "failed", "turned_away", "prompt_tokens", "cached_tokens", "completion_tokens")
    writer.writerow((report.by, *fields, "reasons"))
    for row in report.rows:
        reasons = " ".join(f"{reason}={count}" for reason, count in row.reasons.items())
        writer.writerow((row.key, *(getattr(row, field) for field in fields), reasons))
    return out.getvalue()


def _format_name(tenant: Tenant) -> Text:
    return Text.assemble((tenant.name, "bold"), (" (admin)" if tenant.admin else "", "dim"))


def _format_limit(value: int | None) -> str:
    return NO_LIMIT if value is None else f"{value:,}"


def _describe_keys(keys: Sequence[TenantKey], now: dt.datetime) -> str:
    return ", ".join(f"{key.id}{_describe_expiry(key, now)}" for key in keys) or "the --api-key of serve"


def _describe_expiry(key: TenantKey, now: dt.datetime) -> str:
    if key.expires_at is None:
        return ""
    word = "expired" if dt.datetime.fromisoformat(key.expires_at) <= now else "until"
    return f" ({word} {key.expires_at[:10]})"
