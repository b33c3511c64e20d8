"""The page of `models`: models that run here, the most capable at a comfortable speed first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bedplate.decide.candidates import READING_TOK_S
from bedplate.decide.catalogue import PACES, Catalogue, CatalogueEntry, Pace
from bedplate.facts.published_weights import HubListing
from bedplate.show.decision import describe_requests, format_short
from bedplate.show.probe import describe_hardware
from bedplate.values import Figure, Hardware, Workload
from bedplate.values.units import format_memory

UNKNOWN = "–"
NAME_WIDTH = 24

WIDE = 110
"""Terminal width from which ranges have a separate column."""
WITH_OWNERS = 140
"""Terminal width from which names include the owner."""


def render_listing(found: HubListing, path: Path) -> RenderableType:
    """The result of `models refresh`."""
    missing = [key for key, one in found.repositories.items() if one.missing]
    files = sum(len(one.files) for one in found.repositories.values())
    lines = [f" {len(found.repositories):,} repositories of {found.endpoint}, {files:,} files with weights"]
    lines += [f" not on the hub any more, so not planned: {', '.join(sorted(missing))}"] if missing else []
    return Text("\n".join([*lines, f" stored in {path}; plans use these files and sizes"]))


def render_models(
    hardware: Hardware, workload: Workload, found: Catalogue, *, limit: int | None, least_tok_s: float | None, plan: str
) -> RenderableType:
    """The page of `models`. `plan` is the command that plans one of them for the same workload."""
    parts: list[RenderableType] = [Text(""), *_render_head(hardware, workload, found)]
    fitting = [entry for entry in found.models if entry.fits]
    shown = fitting[:limit]
    for pace in PACES:
        group = [entry for entry in shown if entry.pace == pace]
        if group:
            parts += [
                Text(f"\n {_write_title(pace, least_tok_s)}", style="bold"),
                *_render_advice(hardware, group),
                ModelTable(tuple(group)),
            ]
    if len(fitting) > len(shown):
        parts.append(Text(f" … and {len(fitting) - len(shown)} more: --limit {len(fitting)}, or --search", style="dim"))
    refused = [entry for entry in found.models if not entry.fits]
    if refused:
        parts += [Text("\n Does not run here", style="bold"), UnfitModelTable(tuple(refused[:limit]))]
        if limit is not None and len(refused) > limit:
            parts.append(Text(f" … and {len(refused) - limit} more: --limit {len(refused)}", style="dim"))
    parts += [Text(f"\n {note}", style="dim") for note in found.notes]
    if fitting:
        parts += _render_foot(shown, plan)
    return Group(*parts)


def _render_head(hardware: Hardware, workload: Workload, found: Catalogue) -> list[RenderableType]:
    style = "bold green" if found.fitting else "bold red"
    in_flight = [entry.in_flight for entry in found.models if entry.fits]
    workload_words = f"{describe_requests(workload, in_flight)}, {workload.request_tokens:,} tokens each"
    return [
        Text(f" {_write_answer(found)}", style=style),
        Text(f" {describe_hardware(hardware)}"),
        Text(f" {workload_words}", style="dim"),
    ]


def _write_answer(found: Catalogue) -> str:
    if not found.known:
        return "No known model for this task matches the search"
    if not found.fitting:
        return f"None of {found.known} known models runs here as requested; --all shows the reasons"
    return f"{found.fitting} of {found.known} known models run here"


def _write_title(pace: Pace, least_tok_s: float | None) -> str:
    comfort = format_short(least_tok_s or READING_TOK_S)
    return {
        "comfortable": f"Comfortable: {comfort} tok/s or more for one stream",
        "not predicted": "Fits; speed not predicted",
        "slow": f"Fits, but slower than {comfort} tok/s",
        "some wait": "Fits, but not all concurrent requests: some wait in the queue",
    }[pace]


def _render_advice(hardware: Hardware, group: Sequence[CatalogueEntry]) -> list[RenderableType]:
    """How to make the speed predictable, if it is not."""
    unknown = any(entry.pace == "not predicted" and entry.task == "generate" for entry in group)
    if not unknown or hardware.accelerators or hardware.memory.bandwidth_bytes_s is not None:
        return []
    return [Text(" to predict speeds, measure the memory bandwidth once: bedplate probe --measure", style="yellow")]


class ModelTable:
    """The table of one group; wide terminals get more columns."""

    def __init__(self, entries: tuple[CatalogueEntry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        table = Table(box=None, padding=(0, 1, 0, 1) if width >= WIDE else (0, 0, 0, 1), header_style="dim")
        names = (
            "model",
            "size",
            "weights",
            "engine",
            "tok/s",
            *(["range"] if width >= WIDE else []),
            "memory",
            "context",
        )
        rows = [dict(zip(names, _make_cells(entry, width), strict=True)) for entry in self.entries]
        kept = _choose_columns(names, rows, width)
        for name in kept:
            if name == "model":
                table.add_column(name, overflow="fold", min_width=NAME_WIDTH)
            else:
                right = name not in ("weights", "engine", "range")
                table.add_column(name, no_wrap=True, justify="right" if right else "left")
        for row in rows:
            table.add_row(*(row[name] for name in kept))
        yield table


def _choose_columns(names: Sequence[str], rows: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    """All columns, without the least important ones where the terminal is too narrow."""
    kept = list(names)
    for name in ("memory", "context"):
        # Names wrap; figures do not.
        widths = [max(len(one), *(measure_lines(row[one]) for row in rows)) for one in kept[1:]]
        if NAME_WIDTH + sum(widths) + len(kept) * (2 if width >= WIDE else 1) <= width:
            break
        kept.remove(name)
    return kept


def measure_lines(text: Text) -> int:
    return max(len(line) for line in text.plain.split("\n"))


def _make_cells(entry: CatalogueEntry, width: int) -> list[Text]:
    name = entry.name if width >= WITH_OWNERS else entry.name.rpartition("/")[2]
    name = name if width >= WIDE else wrap_name(name)
    return [
        Text.assemble(name, (" here", "bold green") if entry.here else ""),
        Text(format_parameters(entry)),
        Text(_format_weights(entry)),
        Text(entry.engine or ""),
        Text(format_short(entry.tok_s.value) if entry.tok_s is not None else UNKNOWN),
        *([Text(format_speed_range(entry.tok_s), style="dim")] if width >= WIDE else []),
        Text(_format_memory(entry)),
        Text(format_context(entry, whole=width >= WIDE)),
    ]


def wrap_name(name: str) -> str:
    """Break a long name after hyphens, since rich breaks it anywhere."""
    lines = [""]
    for part in re.findall(r"[^-]+-?|-", name):
        if lines[-1] and len(lines[-1] + part) > NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _format_memory(entry: CatalogueEntry) -> str:
    each = f"{entry.devices} × " if entry.devices > 1 else ""
    return f"{each}{format_memory(entry.memory_bytes)}" if entry.memory_bytes is not None else UNKNOWN


def _format_weights(entry: CatalogueEntry) -> str:
    return f"{entry.quantization}{' +RAM' if entry.offload is not None else ''}"


def format_parameters(entry: CatalogueEntry) -> str:
    """Such as 30.5B; for mixture-of-experts models with the active parameters: 30.5B-A3.3B."""
    total = _format_billions(entry.parameters)
    active = entry.active_parameters
    return total if active is None or active > 0.7 * entry.parameters else f"{total}-A{_format_billions(active)}"


def _format_billions(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def format_speed_range(figure: Figure | None) -> str:
    return f"{format_short(figure.low)}–{format_short(figure.high)}" if figure is not None else ""


def format_context(entry: CatalogueEntry, *, whole: bool = True) -> str:
    """The longest context that fits, of the longest that the model supports, in units of 1,024 tokens."""
    if entry.longest_context is None:
        return UNKNOWN
    if not whole or entry.longest_context == entry.max_context or entry.max_context is None:
        return _format_thousands(entry.longest_context)
    return f"{_format_thousands(entry.longest_context)} of {_format_thousands(entry.max_context)}"


def _format_thousands(tokens: int) -> str:
    if tokens < 1024:
        return str(tokens)
    return f"{tokens / 1024:.3g}k" if tokens < 1 << 20 else f"{tokens / (1 << 20):.3g}M"


class UnfitModelTable:
    """The models that do not fit, with the reason."""

    def __init__(self, entries: tuple[CatalogueEntry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 0, 0, 1), pad_edge=True)
        table.add_column(overflow="fold", min_width=NAME_WIDTH)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(overflow="fold", style="dim")
        for entry in self.entries:
            name = entry.name if options.max_width >= WIDE else wrap_name(entry.name.rpartition("/")[2])
            table.add_row(Text(name), Text(format_parameters(entry)), Text(entry.why or ""))
        yield table


def _render_foot(shown: Sequence[CatalogueEntry], plan: str) -> list[RenderableType]:
    lines = ["speeds are estimates; sorted by size, active parameters and year, not by measured quality"]
    if any(entry.offload is not None for entry in shown):
        lines.append("+RAM: part of the weights stays in host memory")
    if any(entry.here for entry in shown):
        first = next(entry for entry in shown if entry.here)
        lines.append(f"here: already on this machine, as {first.here[0]}")
    return [Text(""), *(Text(f" {line}", style="dim") for line in lines), Text(f" Next  {plan}", style="bold")]
