"""The page of `plan` for several services: the standard engine, each placement, and every exception with its reason."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import describe_layout
from bedplate.decide.wording import join_alternatives
from bedplate.show.decision import format_short, list_remedies
from bedplate.values.portfolio import Portfolio


def render_portfolio(found: Portfolio) -> RenderableType:
    head = Text(f" Standard: {found.engine or 'none'}", style="bold green" if found.fits else "bold red")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1), header_style="bold")
    for name in ("service", "pool", "cards", "engine", "weights", "layout", "tok/s", "capacity"):
        table.add_column(name, justify="right" if name in ("cards", "tok/s", "capacity") else "left")
    for placement in found.placements:
        decision = placement.decision
        rate = decision.estimate.output_tok_s
        table.add_row(
            Text(placement.service),
            placement.pool or Text("not placed", style="red"),
            str(placement.accelerators),
            decision.engine or "",
            Text(decision.quantization or ""),
            describe_layout(decision) if decision.fits else "",
            format_short(rate.value) if rate is not None else "unknown",
            f"{decision.max_concurrency:,}",
        )
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
