"""A table of facts: label, value, source."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def make_fact_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """One line per row; a repeated label is shown once."""
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    last = ""
    for label, value, basis in rows:
        # As Text, because names may contain brackets, which rich would read as markup.
        table.add_row("" if label == last else label, Text(value), Text(basis))
        last = label
    return table
