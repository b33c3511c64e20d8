"""The page of `estimate --explain`: the terms of one prediction, its assumptions and its bands."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.values.explanation import Explanation
from bedplate.values.units import format_figure


def render_explanation(found: Explanation) -> RenderableType:
    low, high = next((band.low, band.high) for band in found.bands if band.level == 80)
    head = Text.assemble(
        (f" {found.metric} {format_figure(found.predicted)}", "bold"),
        f" ({format_figure(low)} to {format_figure(high)})",
        (f" · row {found.row_id}" if found.row_id else "", "dim"),
    )
    parts: list[RenderableType] = [head, Text(""), _render_terms(found)]
    if found.total_s is not None:
        parts += [Text(""), Text(f" The terms add up to {_format_time(found.total_s)}, {found.total_is}.")]
    if found.factors:
        named = ", ".join(f"{one.name} {one.value:.3g} ({one.share:+.0%})" for one in found.factors)
        said = " Fitted numbers that scale several terms, with their effect on the total:"
        parts += [Text(""), Text(said), Text(f" {named}")]
    if found.assumed:
        parts += [Text(""), _render_pairs("Assumed", found.assumed)]
    bands = {f"{band.level} %": f"{format_figure(band.low)} to {format_figure(band.high)}" for band in found.bands}
    parts += [Text(""), _render_pairs("Bands", bands), Text("")]
    basis = f" from the group {found.band_group}: {found.band_campaigns} campaigns, {found.band_rows:,} left-out rows"
    parts.append(Text(basis, style="dim"))
    if found.far:
        parts.append(Text(f" The bands are wide because there is {found.far}."))
    return Group(*parts)


def _render_terms(found: Explanation) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    timed = found.total_s is not None
    table.add_column("term")
    for name in ("basic cost", "efficiency", "seconds", "share") if timed else ("amount", "share"):
        table.add_column(name, justify="left" if name == "efficiency" else "right", no_wrap=True)
    for term in found.terms:
        amount = f"{term.value:.3g} {term.unit}"
        if not timed:
            table.add_row(term.name, amount, f"{term.share:.1%}")
            continue
        efficiency = f"{term.efficiency_name} {term.efficiency:.3g}" if term.efficiency is not None else ""
        table.add_row(term.name, amount, efficiency, _format_time(term.seconds or 0.0), f"{term.share:.1%}")
    return table


def _format_time(seconds: float) -> str:
    """With three digits, so that small terms are comparable."""
    return f"{seconds:.3g} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms"


def _render_pairs(title: str, pairs: dict[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for number, (name, value) in enumerate(pairs.items()):
        table.add_row(title if number == 0 else "", name, value)
    return table
