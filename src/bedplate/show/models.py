"""What can run here, as people choose from it: the most capable that is comfortable first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bedplate.decide.candidates import READING_TOK_S
from bedplate.decide.catalogue import PACES, Catalogue, Entry, Pace
from bedplate.show.decision import arrivals, short
from bedplate.show.probe import one_line
from bedplate.values import Figure, Hardware, Workload
from bedplate.values.units import memory

WIDE = 110
"""Columns of a terminal from which on bands have a place of their own."""
WITH_OWNERS = 140
"""And from here on the owners' names."""


def render_models(
    hardware: Hardware, workload: Workload, found: Catalogue, *, limit: int | None, least_tok_s: float | None, plan: str
) -> RenderableType:
    """The page of `models`. `plan` is how to ask for one of them with the same work."""
    parts: list[RenderableType] = [Text(""), *_head(hardware, workload, found)]
    fitting = [entry for entry in found.models if entry.fits]
    shown = fitting[:limit]
    for pace in PACES:
        group = [entry for entry in shown if entry.pace == pace]
        if group:
            parts += [
                Text(f"\n {_title(pace, least_tok_s)}", style="bold"),
                *_advice(hardware, group),
                Listing(tuple(group)),
            ]
    if len(fitting) > len(shown):
        parts.append(Text(f" … and {len(fitting) - len(shown)} more: --limit {len(fitting)}, or --search", style="dim"))
    refused = [entry for entry in found.models if not entry.fits]
    if refused:
        parts += [Text("\n Not here", style="bold"), Refused(tuple(refused[:limit]))]
        if limit is not None and len(refused) > limit:
            parts.append(Text(f" … and {len(refused) - limit} more: --limit {len(refused)}", style="dim"))
    if fitting:
        parts += _foot(shown, plan)
    return Group(*parts)


def _head(hardware: Hardware, workload: Workload, found: Catalogue) -> list[RenderableType]:
    style = "bold green" if found.fitting else "bold red"
    work = f"{_requests(workload)}, {workload.request_tokens:,} tokens each"
    return [Text(f" {_answer(found)}", style=style), Text(f" {one_line(hardware)}"), Text(f" {work}", style="dim")]


def _answer(found: Catalogue) -> str:
    if not found.known:
        return "No known model of this task is called so"
    if not found.fitting:
        return f"None of {found.known} known models runs here as asked; --all says why"
    return f"{found.fitting} of {found.known} known models run here"


def _requests(workload: Workload) -> str:
    at_once = workload.in_flight()
    return arrivals(workload) or ("one request at a time" if at_once == 1 else f"{at_once:,} requests at once")


def _title(pace: Pace, least_tok_s: float | None) -> str:
    comfort = short(least_tok_s or READING_TOK_S)
    return {
        "comfortable": f"Comfortable: {comfort} tok/s or more for one stream",
        "not predicted": "Fits; its speed is not predicted",
        "slow": f"Fits, but slower than {comfort} tok/s",
        "some wait": "Fits, but not for everyone at once: some wait",
    }[pace]


def _advice(hardware: Hardware, group: Sequence[Entry]) -> list[RenderableType]:
    """What would let speeds be predicted, and the order follow them."""
    unknown = any(entry.pace == "not predicted" and entry.task == "generate" for entry in group)
    if not unknown or hardware.accelerators or hardware.memory.bandwidth_bytes_s is not None:
        return []
    return [Text(" speeds follow from the memory bandwidth, which bedplate probe --measure finds once", style="yellow")]


class Listing:
    """The table of one group, as wide as the terminal bears."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        table = Table(box=None, padding=(0, 1, 0, 1) if width >= WIDE else (0, 0, 0, 1), header_style="dim")
        table.add_column("model", overflow="fold", min_width=24)
        for name in ("size", "weights", "engine", "tok/s", *(["band"] if width >= WIDE else []), "memory", "context"):
            right = name not in ("weights", "engine", "band")
            table.add_column(name, no_wrap=True, justify="right" if right else "left")
        for entry in self.entries:
            table.add_row(*_cells(entry, width))
        yield table


def _cells(entry: Entry, width: int) -> list[Text]:
    name = entry.name if width >= WITH_OWNERS else entry.name.rpartition("/")[2]
    return [
        Text.assemble(name, (" here", "bold green") if entry.here else ""),
        Text(parameters(entry)),
        Text(_weights(entry)),
        Text(entry.engine or ""),
        Text(short(entry.tok_s.value) if entry.tok_s is not None else "TBD"),
        *([Text(band(entry.tok_s), style="dim")] if width >= WIDE else []),
        Text(_memory(entry)),
        Text(context(entry, whole=width >= WIDE)),
    ]


def _memory(entry: Entry) -> str:
    each = f"{entry.devices} × " if entry.devices > 1 else ""
    return f"{each}{memory(entry.memory_bytes)}" if entry.memory_bytes is not None else "TBD"


def _weights(entry: Entry) -> str:
    return f"{entry.quantization}{' +RAM' if entry.offload is not None else ''}"


def parameters(entry: Entry) -> str:
    """30.5B, and of experts how much of it a token passes through: 30.5B-A3.3B."""
    total = _billions(entry.parameters)
    active = entry.active_parameters
    return total if active is None or active > 0.7 * entry.parameters else f"{total}-A{_billions(active)}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def band(figure: Figure | None) -> str:
    return f"{short(figure.low)}–{short(figure.high)}" if figure is not None else ""


def context(entry: Entry, *, whole: bool = True) -> str:
    """What fits of what the model reads, in units of 1,024 tokens."""
    if entry.longest_context is None:
        return "TBD"
    if not whole or entry.longest_context == entry.max_context or entry.max_context is None:
        return _thousands(entry.longest_context)
    return f"{_thousands(entry.longest_context)} of {_thousands(entry.max_context)}"


def _thousands(tokens: int) -> str:
    if tokens < 1024:
        return str(tokens)
    return f"{tokens / 1024:.3g}k" if tokens < 1 << 20 else f"{tokens / (1 << 20):.3g}M"


class Refused:
    """What does not fit, and why in a few words."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 0, 0, 1), pad_edge=True)
        table.add_column(overflow="fold", min_width=24)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(overflow="fold", style="dim")
        for entry in self.entries:
            name = entry.name if options.max_width >= WIDE else entry.name.rpartition("/")[2]
            table.add_row(Text(name), Text(parameters(entry)), Text(entry.why or ""))
        yield table


def _foot(shown: Sequence[Entry], plan: str) -> list[RenderableType]:
    lines = ["speeds are estimates; order: by size, active experts and year, not by measured quality"]
    if any(entry.offload is not None for entry in shown):
        lines.append("+RAM: a part of the weights stays in the host's memory")
    if any(entry.here for entry in shown):
        first = next(entry for entry in shown if entry.here)
        lines.append(f"here: on this machine already, as {first.here[0]}")
    return [Text(""), *(Text(f" {line}", style="dim") for line in lines), Text(f" Next  {plan}", style="bold")]
