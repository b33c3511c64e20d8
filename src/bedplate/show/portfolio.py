"""The page of `plan` for several services: the standard engine, each placement, and every exception with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.decide.questions import describe_layout
from bedplate.decide.wording import join_alternatives
from bedplate.show.columns import Column, SplitTable
from bedplate.show.decision import format_short, list_remedies
from bedplate.values.portfolio import Placement, Portfolio


def render_portfolio(found: Portfolio) -> RenderableType:
    head = Text(f" Standard: {found.engine or 'none'}", style="bold green" if found.fits else "bold red")
    table = _make_table(found.placements)
    lines: list[RenderableType] = [Text(""), head, Text(f" {found.text}"), Text(""), table, Text("")]
    for placement in found.placements:
        if placement.pool is None:
            hints = join_alternatives(list_remedies(placement.decision)) or "no pool has enough left"
            lines.append(Text(f" {placement.service} is not placed: {hints}", style="red"))
        elif placement.exception is not None:
            lines.append(Text(f" exception  {placement.service}: {placement.exception}"))
    if found.free:
        lines.append(Text(" free  " + ", ".join(f"{name}: {count}" for name, count in found.free.items()), style="dim"))
    lines += [Text(f" note  {note}", style="dim") for note in found.notes]
    return Group(*lines)


def _make_table(placements: Sequence[Placement]) -> SplitTable:
    decisions = [one.decision for one in placements]
    rates = [one.estimate.output_tok_s for one in decisions]
    texts: dict[str, list[str | Text]] = {
        "pool": [one.pool or Text("not placed", style="red") for one in placements],
        "cards": [str(one.accelerators) for one in placements],
        "engine": [one.engine or "" for one in decisions],
        "weights": [one.quantization or "" for one in decisions],
        "layout": [describe_layout(one) if one.fits else "" for one in decisions],
        "tok/s": [format_short(rate.value) if rate is not None else "unknown" for rate in rates],
        "capacity": [f"{one.max_concurrency:,}" for one in decisions],
    }
    figures = ("cards", "tok/s", "capacity")
    return SplitTable(
        Column.from_cells("service", [one.service for one in placements]),
        tuple(Column.from_cells(name, cells, right=name in figures) for name, cells in texts.items()),
    )
