"""What can run here, as people choose from it: the most capable that is comfortable first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bedplate.decide.candidates import READING_TOK_S
from bedplate.decide.catalogue import PACES, Catalogue, Entry, Pace, in_memory
from bedplate.show.decision import short
from bedplate.show.probe import one_line
from bedplate.values import Figure, Hardware, Workload

WIDE = 110
"""Columns from which on owners' names and bands have a place of their own."""


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
            parts += [Text(f"\n {_title(pace, least_tok_s)}", style="bold"), Listing(tuple(group))]
    if len(fitting) > len(shown):
        parts.append(Text(f" … and {len(fitting) - len(shown)} more: --limit {len(fitting)}, or --search", style="dim"))
    refused = [entry for entry in found.models if not entry.fits]
    if refused:
        parts += [Text("\n Not here", style="bold"), *(_refused(entry) for entry in refused[:limit])]
        if limit is not None and len(refused) > limit:
            parts.append(Text(f" … and {len(refused) - limit} more: --limit {len(refused)}", style="dim"))
    if fitting:
        parts += _foot(hardware, shown, plan)
    return Group(*parts)


def _head(hardware: Hardware, workload: Workload, found: Catalogue) -> list[RenderableType]:
    style = "bold green" if found.fitting else "bold red"
    work = f"{_requests(found.in_flight)}, {workload.request_tokens:,} tokens each"
    answer = f" {found.fitting} of {found.known} known models run here" if found.fitting else " None of"
    if not found.fitting:
        answer = (
            f" None of {found.known} known models runs here as asked" if found.known else " No known model is called so"
        )
    return [Text(answer, style=style), Text(f" {one_line(hardware)}"), Text(f" {work}", style="dim")]


def _requests(in_flight: int) -> str:
    return "one request at a time" if in_flight == 1 else f"{in_flight:,} requests at once"


def _title(pace: Pace, least_tok_s: float | None) -> str:
    comfort = short(least_tok_s or READING_TOK_S)
    return {
        "comfortable": f"Comfortable: {comfort} tok/s or more for one stream",
        "not predicted": "Fits; its speed is not predicted",
        "slow": f"Fits, but slower than {comfort} tok/s",
        "some wait": "Fits, but not for everyone at once: some wait",
    }[pace]


class Listing:
    """The table of one group, as wide as the terminal bears."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="dim")
        table.add_column(" model", overflow="fold", ratio=None)
        for name in ("size", "weights", "engine", "tok/s"):
            table.add_column(name, no_wrap=True, justify="right" if name in ("size", "tok/s") else "left")
        if wide:
            table.add_column("band", no_wrap=True, style="dim")
        table.add_column("memory", no_wrap=True, justify="right")
        table.add_column("context", no_wrap=True, justify="right")
        for entry in self.entries:
            table.add_row(*_cells(entry, wide))
        yield table


def _cells(entry: Entry, wide: bool) -> list[Text]:
    name = entry.name if wide else entry.name.rpartition("/")[2]
    cells = [
        Text.assemble(" ", name, (" here", "bold green") if entry.here else ""),
        Text(parameters(entry)),
        Text(_weights(entry)),
        Text(entry.engine or ""),
        Text(short(entry.tok_s.value) if entry.tok_s is not None else "TBD"),
    ]
    if wide:
        cells.append(Text(band(entry.tok_s)))
    where = in_memory(entry) if wide else in_memory(entry).partition(" of ")[0]
    return [*cells, Text(where), Text(context(entry, wide))]


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
    return f"{short(figure.low)} to {short(figure.high)}" if figure is not None else ""


def context(entry: Entry, wide: bool = True) -> str:
    """What fits of what the model reads, in units of 1,024 tokens."""
    if entry.longest_context is None:
        return "TBD"
    if not wide or entry.longest_context == entry.max_context or entry.max_context is None:
        return _thousands(entry.longest_context)
    return f"{_thousands(entry.longest_context)} of {_thousands(entry.max_context)}"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1024:.3g}k" if tokens < 1 << 20 else f"{tokens / (1 << 20):.3g}M"


def _refused(entry: Entry) -> Text:
    return Text.assemble(f" {entry.name}", (f"  {parameters(entry)}  ", "dim"), entry.why or "")


def _foot(hardware: Hardware, shown: Sequence[Entry], plan: str) -> list[RenderableType]:
    lines = ["speeds are estimates; order: by size, active experts and year, not by measured quality"]
    if any(entry.offload is not None for entry in shown):
        lines.append("+RAM: a part of the weights stays in the host's memory")
    if any(entry.pace == "not predicted" for entry in shown) and not hardware.accelerators:
        lines.append("speeds need this machine's memory bandwidth: bedplate probe --measure")
    if any(entry.here for entry in shown):
        first = next(entry for entry in shown if entry.here)
        lines.append(f"here: on this machine already, as {first.here[0]}")
    return [Text(""), *(Text(f" {line}", style="dim") for line in lines), Text(f" Next  {plan}", style="bold")]
