"""The page of `list`: the models on this machine."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.run.local_models import LocalModel
from bedplate.show.columns import Column, SplitTable
from bedplate.show.prepared import describe_age
from bedplate.values.units import format_size


def render_local_models(models: Sequence[LocalModel]) -> RenderableType:
    if not models:
        return Text(" no model is on this machine; bedplate pull downloads the built-in one", style="dim")
    now = dt.datetime.now(dt.UTC)
    table = SplitTable(
        Column.from_cells("model", [Text(one.name, style="bold") for one in models], comfortable=40),
        (
            Column.from_cells("size", [format_size(one.size_bytes) for one in models], right=True),
            Column.from_cells("origin", [one.origin for one in models]),
            Column.from_cells("last used", [_describe_use(one, now) for one in models]),
        ),
    )
    total = format_size(sum(one.size_bytes for one in models))
    return Group(Text(), table, Text(f"\n {len(models)} in total, {total}", style="dim"))


def _describe_use(one: LocalModel, now: dt.datetime) -> Text:
    return Text("in use", style="green") if one.in_use else Text(describe_age(one.used_at, now))
