"""The engines that are known, and what is installed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.engines import Engine
from bedplate.run.environments import Environment
from bedplate.values.units import size


def render_engines(engines: Mapping[str, Engine], installed: Sequence[Environment]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1), header_style="dim")
    for column in ("engine", "version", "weights", "here", "right for"):
        table.add_column(column, overflow="fold")
    for engine in engines.values():
        there = [environment for environment in installed if environment.engine == engine.id]
        if there:
            state = Text(f"installed, {size(sum(e.disk_bytes for e in there))}", style="green")
        else:
            state = Text("can be installed" if engine.recipe else "not yet", style="" if engine.recipe else "dim")
        row = (Text(engine.id, style="bold"), engine.version or "", " ".join(engine.formats), state, engine.strength)
        table.add_row(*row)
    return table
