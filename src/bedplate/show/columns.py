"""Tables for narrow terminals: columns that do not fit go to a second table below the first, or are left out; a column
of sources is written behind the texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
THREE_COLUMNS = 100
"""Width from which a text and its source have a column each: two narrow columns would break the names of files."""


@dataclass(frozen=True)
class Column:
    name: str
    cells: tuple[Text, ...]
    right: bool = False
    comfortable: int = 30
    """Width at which longer cells wrap, unless the terminal has space for more."""

    @classmethod
    def from_cells(
        cls, name: str, cells: Sequence[str | Text], *, right: bool = False, comfortable: int = 30
    ) -> Column:
        return cls(name, tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells), right, comfortable)

    @property
    def width(self) -> int:
        longest = max((cell.cell_len for cell in self.cells), default=0)
        return max(len(self.name), min(longest, self.comfortable))


@dataclass(frozen=True)
class SplitTable:
    """A table that is split to the terminal's width; each part repeats the first column."""

    first: Column
    rest: tuple[Column, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, columns in enumerate(self.split(options.max_width)):
            if number:
                yield Text("")
            yield _make_table((self.first, *columns))

    def split(self, width: int) -> Iterator[tuple[Column, ...]]:
        part: list[Column] = []
        left = width - GAP - self.first.width
        for column in self.rest:
            if part and column.width + GAP > left:
                yield tuple(part)
                part, left = [], width - GAP - self.first.width
            part.append(column)
            left -= column.width + GAP
        yield tuple(part)


@dataclass(frozen=True)
class FittingTable:
    """One table without the columns that the terminal has no space for."""

    columns: tuple[Column, ...]
    dropped_first: tuple[str, ...]
    """Names of the columns that may be left out, in this order."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _make_table(self.choose(options.max_width))

    def choose(self, width: int) -> tuple[Column, ...]:
        kept = list(self.columns)
        for name in self.dropped_first:
            if sum(column.width + GAP for column in kept) <= width:
                break
            kept = [column for column in kept if column.name != name]
        return tuple(kept)


@dataclass(frozen=True)
class _SourcedRow:
    label: str
    name: str
    text: Text
    source: Text


@dataclass
class SourcedTable:
    """Three columns: label, text, source. In a narrow terminal the source follows the text."""

    rows: list[_SourcedRow] = field(default_factory=list)

    def add_row(self, label: str, text: str | Text, source: str | Text = "", *, name: str = "") -> None:
        """A text about `name` begins behind it, and its further lines begin there too."""
        # As Text, because names from files may contain brackets, which rich would read as markup.
        text, source = (one if isinstance(one, Text) else Text(one) for one in (text, source))
        self.rows.append(_SourcedRow(label, name, text, source))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 2, 0, 1))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold", max_width=96)
        if options.max_width >= THREE_COLUMNS:
            table.add_column(style="dim", overflow="fold", max_width=48)
        for row in self.rows:
            if options.max_width >= THREE_COLUMNS:
                table.add_row(row.label, _put_behind(row.name, row.text), row.source)
            else:
                table.add_row(row.label, _put_behind(row.name, _append_source(row.text, row.source)))
        yield table


def _put_behind(name: str, text: Text) -> Text | Table:
    if not name:
        return text
    pair = Table.grid(padding=(0, 1, 0, 0))
    pair.add_column(style="bold", no_wrap=True, min_width=12)
    pair.add_column(overflow="fold")
    pair.add_row(name, text)
    return pair


def _append_source(text: Text, source: Text) -> Text:
    if not source.plain.strip():
        return text
    words = Text.assemble(" · ", source, style="dim") if text.plain else source
    return Text.assemble(text, words)


def _make_table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, GAP - 1, 0, 1), header_style="dim")
    for number, column in enumerate(columns):
        whole = number == 0 or column.right
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=column.width if whole else min(column.width, 12),
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table
