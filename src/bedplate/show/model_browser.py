"""The list of `models` on a terminal: sorted, filtered and searched by keys. Each key gives a new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.catalogue import CatalogueEntry
from bedplate.show.models import UNKNOWN, format_context, format_parameters
from bedplate.values.model import Task
from bedplate.values.units import format_figure, format_memory

T = TypeVar("T")
Sort = Literal["rank", "speed", "size", "memory", "context", "year", "name"]
Fit = Literal["fits", "all", "here"]
Action = Literal["serve", "plan", "quit"]
SORTS: tuple[Sort, ...] = get_args(Sort)
FITS: tuple[Fit, ...] = get_args(Fit)
TASKS: tuple[Task, ...] = ("generate", "embed", "classify")
SPEEDS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Minimum tokens per second, in the order of the key `v`."""
FRAME_LINES = 7
"""Lines around the rows: title, filters, table header, detail, keys and the blank lines between them."""
LEAST_ROWS = 3
KEYS = "↑↓  Enter {enter}  p plan  s sort  t task  f fit  v speed  / search  q quit"
_SORT_KEYS: Mapping[Sort, Callable[[CatalogueEntry], object]] = {
    "speed": lambda entry: -(entry.tok_s.value if entry.tok_s is not None else 0),
    "size": lambda entry: -entry.parameters,
    "memory": lambda entry: entry.memory_bytes if entry.memory_bytes is not None else float("inf"),
    "context": lambda entry: -(entry.longest_context or 0),
    "year": lambda entry: -(entry.released or 0),
    "name": lambda entry: entry.name.rpartition("/")[2].lower(),
}


@dataclass(frozen=True)
class ModelBrowser:
    """What is listed, what is selected, and what the last key asked for."""

    entries: tuple[CatalogueEntry, ...]
    """All models of the task, ranked."""
    machine: str
    task: Task = "generate"
    sort: Sort = "rank"
    fit: Fit = "fits"
    least_tok_s: float = 0.0
    search: str = ""
    searching: bool = False
    """Keys are appended to the search."""
    at: int = 0
    page: int = 10
    serves: bool = True
    """Enter serves the model; for hypothetical hardware it shows the plan."""
    action: Action | None = None

    @cached_property
    def rows(self) -> tuple[CatalogueEntry, ...]:
        words = self.search.lower().split()
        kept = [
            entry
            for entry in self.entries
            if (self.fit == "all" or entry.fits)
            and (self.fit != "here" or entry.here)
            and (not self.least_tok_s or (entry.tok_s is not None and entry.tok_s.value >= self.least_tok_s))
            and all(word in entry.name.lower() for word in words)
        ]
        order = _SORT_KEYS.get(self.sort)
        return tuple(sorted(kept, key=order) if order is not None else kept)  # type: ignore[arg-type]

    @property
    def selected(self) -> CatalogueEntry | None:
        return self.rows[min(self.at, len(self.rows) - 1)] if self.rows else None

    def press(self, key: str) -> ModelBrowser:
        if self.searching and key not in _MOVES:
            return self._edit_search(key)
        if key in _MOVES:
            last = max(0, len(self.rows) - 1)
            return replace(self, at=min(max(0, _MOVES[key](self.at, self.page, last)), last))
        match key:
            case "enter" | "p" if self.selected is not None and self.selected.fits:
                return replace(self, action="serve" if key == "enter" and self.serves else "plan")
            case "s" | "S":
                return replace(self, sort=_choose_next(SORTS, self.sort, back=key == "S"), at=0)
            case "t":
                return replace(self, task=_choose_next(TASKS, self.task), at=0)
            case "f":
                return replace(self, fit=_choose_next(FITS, self.fit), at=0)
            case "v" | "V":
                return replace(self, least_tok_s=_choose_next(SPEEDS, self.least_tok_s, back=key == "V"), at=0)
            case "/":
                return replace(self, searching=True)
            case "q" | "escape" | "ctrl-c" | "ctrl-d":
                return replace(self, action="quit")
        return self

    def _edit_search(self, key: str) -> ModelBrowser:
        match key:
            case "enter":
                return replace(self, searching=False)
            case "escape":
                return replace(self, searching=False, search="", at=0)
            case "ctrl-c" | "ctrl-d":
                return replace(self, action="quit")
            case "backspace":
                return replace(self, search=self.search[:-1], at=0)
        return replace(self, search=self.search + key, at=0) if len(key) == 1 and key.isprintable() else self


_MOVES: Mapping[str, Callable[[int, int, int], int]] = {
    "up": lambda at, page, last: at - 1,
    "down": lambda at, page, last: at + 1,
    "page-up": lambda at, page, last: at - page,
    "page-down": lambda at, page, last: at + page,
    "home": lambda at, page, last: 0,
    "end": lambda at, page, last: last,
}


def _choose_next(values: tuple[T, ...], value: T, *, back: bool = False) -> T:
    at = values.index(value) if value in values else -1
    return values[(at + (-1 if back else 1)) % len(values)]


def render_browser(state: ModelBrowser, height: int, width: int) -> RenderableType:
    """One screen: the selected model is always among the rows."""
    rows = max(LEAST_ROWS, height - FRAME_LINES)
    at = min(state.at, max(0, len(state.rows) - 1))
    first = max(0, min(at - rows // 2, len(state.rows) - rows))
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", expand=True)
    table.add_column("model", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("size", "weights", "engine", "tok/s", "memory", "context"):
        if width >= 70 or name not in ("memory", "context"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("weights", "engine") else "right")
    for number, entry in enumerate(state.rows[first : first + rows], first):
        cells = _make_cells(entry)[: len(table.columns)]
        table.add_row(*cells, style="reverse" if number == at else "" if entry.fits else "dim")
    shown = f"{at + 1} of {len(state.rows)}" if state.rows else "no model matches"
    speed = f"{format_figure(state.least_tok_s)} tok/s or more" if state.least_tok_s else "any"
    empty = "change a filter: f, v, t, or / and Esc"
    if not any(entry.tok_s is not None for entry in state.entries):
        speed = "unknown"
        if state.least_tok_s:
            empty = "speeds are unknown until bedplate probe --measure; V: any speed"
    search = f"{state.search}▏" if state.searching else state.search or "none"
    filters = f"sort {state.sort} · task {state.task} · fit {state.fit} · speed {speed} · search {search}"
    return Group(
        Text(f" {shown} · {state.machine}", style="bold", no_wrap=True, overflow="ellipsis"),
        Text(f" {filters}\n", style="dim", no_wrap=True, overflow="ellipsis"),
        table if state.rows else Text(f" {empty}", style="yellow"),
        Text(f"\n {_describe(state)}", no_wrap=True, overflow="ellipsis"),
        Text(f" {KEYS.format(enter='serve' if state.serves else 'plan')}", style="dim", no_wrap=True),
    )


def _make_cells(entry: CatalogueEntry) -> list[Text]:
    name = Text.assemble(entry.name.rpartition("/")[2], (" here", "green") if entry.here else "")
    if not entry.fits:
        return [name, Text(format_parameters(entry)), Text("does not fit"), *(Text("") for _ in range(4))]
    return [
        name,
        Text(format_parameters(entry)),
        Text(entry.quantization or ""),
        Text(entry.engine or ""),
        Text(format_figure(entry.tok_s.value) if entry.tok_s is not None else UNKNOWN),
        Text(format_memory(entry.memory_bytes) if entry.memory_bytes is not None else UNKNOWN),
        Text(format_context(entry, whole=False)),
    ]


def _describe(state: ModelBrowser) -> str:
    entry = state.selected
    if entry is None:
        return ""
    if not entry.fits:
        return f"{entry.name}: {entry.why}"
    where = f"on this machine as {entry.here[0]}" if entry.here else "downloaded when it is served"
    year = f" · {entry.released}" if entry.released else ""
    requests = f"capacity: {entry.max_concurrency} concurrent request{'' if entry.max_concurrency == 1 else 's'}"
    return f"{entry.name}{year} · {where if state.serves else requests}"
