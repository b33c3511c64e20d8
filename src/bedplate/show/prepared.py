"""The page of `prepared`: the cache of prepared weights, and which entries are stale."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.run.prepared_weights import PreparedWeights
from bedplate.show.columns import Column, SplitTable
from bedplate.values.units import format_size

ID_LETTERS = 8
DAY_S = 86_400.0


def render_prepared(kept: Sequence[PreparedWeights]) -> RenderableType:
    if not kept:
        return Text(" no prepared weights: no engine on this machine has needed a conversion yet", style="dim")
    now = dt.datetime.now(dt.UTC)
    table = SplitTable(
        Column.from_cells("id", [Text(one.id[:ID_LETTERS], style="bold") for one in kept]),
        (
            Column.from_cells("weights", [one.what for one in kept], comfortable=46),
            Column.from_cells("engine", [one.engine for one in kept]),
            Column.from_cells("size", [format_size(one.disk_bytes) for one in kept], right=True),
            Column.from_cells("last used", [describe_age(one.used_at, now) for one in kept]),
            Column.from_cells("", [_describe_state(one) for one in kept], comfortable=24),
        ),
    )
    stale = [one for one in kept if one.stale and not one.in_use]
    lines: list[RenderableType] = [Text(), table, Text()]
    lines.append(Text(f" {len(kept)} in total, {format_size(sum(one.disk_bytes for one in kept))}", style="dim"))
    if stale:
        freed = format_size(sum(one.disk_bytes for one in stale))
        lines.append(Text(f" bedplate prepared remove --stale frees {freed}", style="dim"))
    return Group(*lines)


def describe_age(at: str | None, now: dt.datetime) -> str:
    if at is None:
        return "never"
    passed = (now - dt.datetime.fromisoformat(at)).total_seconds()
    if passed < 120:
        return "just now"
    if passed < 2 * 3600:
        return f"{passed / 60:.0f} min ago"
    return f"{passed / 3600:.0f} h ago" if passed < 2 * DAY_S else f"{passed / DAY_S:.0f} days ago"


def _describe_state(one: PreparedWeights) -> Text:
    if one.in_use:
        return Text("in use", style="green")
    return Text("stale", style="yellow") if one.stale else Text("")
