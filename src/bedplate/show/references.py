"""The pages of `reference`: one reference, and the cache."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.show.columns import Column, SplitTable
from bedplate.show.prepared import describe_age
from bedplate.values.reference import ReferenceSummary
from bedplate.values.units import format_seconds

METHODS = {
    "float32": "float32, the whole model in memory",
    "float32 by layer": "float32, one layer in memory at a time",
    "engine": "the answers of an engine, less faithful than float32",
}
WIDTH = 12


def render_reference(one: ReferenceSummary) -> RenderableType:
    seconds = f" in {format_seconds(one.seconds)}" if one.seconds is not None else ""
    rows = [
        ("Method", METHODS[one.method]),
        ("Made with", f"{one.made_with}{seconds}"),
        ("Prefixes", f"{one.prefixes}, {one.clear} of them with a clear answer"),
        ("Perplexity", "unavailable" if one.perplexity is None else f"{one.perplexity:.2f} on the fixed text"),
        ("File", one.path or "shipped with bedplate"),
    ]
    lines = [Text.assemble((f" {name:<{WIDTH}}", "dim"), value) for name, value in rows]
    return Group(Text(), Text.assemble((f" Reference of {one.model}", "bold"), (f"   {one.id}", "dim")), *lines)


def render_references(found: Sequence[ReferenceSummary]) -> RenderableType:
    if not found:
        return Text(" no cached references; bedplate reference MODEL computes one", style="dim")
    now = dt.datetime.now(dt.UTC)
    return SplitTable(
        Column.from_cells("model", [Text(one.model, style="bold") for one in found]),
        (
            Column.from_cells("id", [one.id for one in found]),
            Column.from_cells("method", [one.method for one in found]),
            Column.from_cells("prefixes", [str(one.prefixes) for one in found], right=True),
            Column.from_cells("clear", [str(one.clear) for one in found], right=True),
            Column.from_cells(
                "perplexity", ["" if one.perplexity is None else f"{one.perplexity:.2f}" for one in found], right=True
            ),
            Column.from_cells("made with", [one.made_with for one in found], comfortable=46),
            Column.from_cells("computed", [describe_age(one.at, now) for one in found]),
        ),
    )
