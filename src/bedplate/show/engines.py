"""The map of engines: by hardware, by feature, here, and measured here; and the page of one engine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.engine_map import Here, Row, Situation
from bedplate.engines.base import VENDOR_NAMES
from bedplate.run.environments import Environment
from bedplate.show.columns import Column, Columns
from bedplate.show.decision import short
from bedplate.show.page import page_of
from bedplate.show.probe import SYSTEMS, one_line
from bedplate.values import Hardware
from bedplate.values.result import Result
from bedplate.values.units import memory, size

PROVERB = "Feature checklists are maps, not proof."
DEVICE_WORDS = {
    "cpu": "the CPU",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "metal": "the Apple GPU",
    "xpu": "Intel GPUs",
    "vulkan": "GPUs through Vulkan",
}
FEATURES = (
    ("batching", "batching"),
    ("kv_cache", "KV cache"),
    ("structured_output", "structured output"),
    ("quantization", "quantization"),
    ("hardware", "hardware"),
    ("multi_node", "several nodes"),
    ("server", "server"),
    ("maintained", "maintained"),
)
TBD = Text("TBD", style="dim")


def render_map(
    hardware: Hardware, sheet: Sequence[Situation], rows: Sequence[Row], installed: Sequence[Environment]
) -> RenderableType:
    """The page of `engines`."""
    names = Column.of("engine", [Text(row.engine, style="bold") for row in rows])
    return Group(
        Text("\n By hardware", style="bold"),
        _cheat_sheet(sheet),
        Text("\n What each can do", style="bold"),
        Columns(names, tuple(_feature(rows, field, title) for field, title in FEATURES)),
        Text(f"\n {PROVERB}", style="italic"),
        Text.assemble(("\n Here", "bold"), (f"  {one_line(hardware)}", "dim")),
        Columns(
            names,
            (
                Column.of("version", [row.version or "" for row in rows]),
                Column.of("installed", [_state(row, installed) for row in rows]),
                Column.of("this machine", [_here(row.here) for row in rows], comfortable=30),
                *_measurements(rows),
            ),
        ),
        _measured_on(rows),
        Text("\n One engine: bedplate engines show ID   What runs here: bedplate models", style="dim"),
    )


def _cheat_sheet(sheet: Sequence[Situation]) -> Table:
    """The situation, its engine, and whether this machine is one."""
    table = Table.grid(padding=(0, 1), pad_edge=True, collapse_padding=False)
    table.add_column(overflow="fold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for line in sheet:
        mark = (f"  ← this machine, {' and '.join(line.here)}", "green") if line.here else ""
        table.add_row(Text.assemble(line.when, mark), ", ".join(line.engines), line.rules[0])
    return table


def _feature(rows: Sequence[Row], field: str, title: str) -> Column:
    return Column.of(title, [getattr(row.features, field) if row.features is not None else TBD for row in rows])


def _state(row: Row, installed: Sequence[Environment]) -> Text:
    there = [environment for environment in installed if environment.engine == row.engine]
    if not there:
        can = f"no; {size(row.download_bytes or 0)} to download" if row.packages else "planned only"
        return Text(can, style="" if row.packages else "dim")
    built = any(environment.built for environment in there)
    others = sorted({environment.version for environment in there if not environment.built} - {row.version or ""})
    pinned = any(environment.version == row.version for environment in there)
    words = "yes" if pinned else f"another version: {', '.join(others)}" if others else ""
    words = " and ".join(filter(None, [words, "built here" if built else ""]))
    return Text(f"{words}, {size(sum(environment.disk_bytes for environment in there))}", style="green")


def _here(here: Here) -> Text:
    if not here.runs:
        return Text(f"no: {here.why}", style="dim")
    where = f"yes, on {DEVICE_WORDS.get(here.device or '', here.device or 'it')}"
    if here.doubt is not None and here.doubt_for_many is not None:
        return Text(f"{where}, but {here.doubt}")
    for who, doubt in (("one", here.doubt), ("many", here.doubt_for_many)):
        if doubt is not None:
            return Text(f"{where}; for {who}: {doubt}")
    return Text(where)


def _measurements(rows: Sequence[Row]) -> tuple[Column, ...]:
    found = [row.measured for row in rows]
    return (
        Column.of("TTFT ms", [_cell(one, one.ttft_ms if one else None) for one in found], right=True),
        Column.of("tok/s", [_cell(one, one.output_tok_s if one else None) for one in found], right=True),
        Column.of("peak", [_peak(one) for one in found], right=True),
        Column.of("quality", [_quality(one) for one in found], right=True),
    )


def _cell(result: Result | None, value: float | None) -> Text:
    return TBD if result is None or value is None else Text(short(value))


def _peak(result: Result | None) -> Text:
    return TBD if result is None or result.peak_memory_bytes is None else Text(memory(result.peak_memory_bytes))


def _quality(result: Result | None) -> Text:
    return TBD if result is None or result.quality is None else Text(f"{result.quality:.2f}")


def _measured_on(rows: Sequence[Row]) -> Text:
    found = [row.measured for row in rows if row.measured is not None]
    if not found:
        return Text(" TTFT, tok/s, peak memory and quality are TBD until this machine has measured them", style="dim")
    return Text(f" Measured here: {work_words(found[0])}", style="dim")


def work_words(result: Result) -> str:
    weights = f" {result.quantization}" if result.quantization else ""
    lengths = f"{result.prompt_tokens:,} + {result.output_tokens:,} tokens"
    return f"{result.model}{weights}, {result.concurrency} at once, {lengths}"


def render_engine(hardware: Hardware, row: Row, installed: Sequence[Environment]) -> RenderableType:
    """The page of `engines show`."""
    lines: list[tuple[str, str, str]] = [("Right for", row.strength, "")]
    if row.features is None:
        lines.append(("Features", "TBD", "not described yet"))
    else:
        lines += [
            (title[:1].upper() + title[1:], getattr(row.features, field), "")
            for field, title in FEATURES
            if field != "hardware"
        ]
    lines += [
        ("Hardware", row.features.hardware if row.features is not None else "TBD", ""),
        ("", _machines(row), ""),
        ("Weights", f"loads {', '.join(row.formats)}{_made(row)}", ""),
        ("Divides", f"a model by {', '.join(row.ways)}" if row.ways else "nothing: one device takes it all", ""),
        ("Tasks", ", ".join(row.tasks), ""),
    ]
    lines += _installation(row, installed)
    lines += [("On", one_line(hardware), ""), *_said_here(row.here)]
    lines += _figures(row.measured)
    if row.features is not None:
        lines.append(("Source", row.features.source, ""))
    return Group(
        Text(f"\n {row.name} {row.version or ''}".rstrip(), style="bold green"),
        Text(""),
        page_of(lines),
        Text("\n Rules that speak of it", style="bold"),
        _rules(row),
        Text(f"\n {PROVERB}", style="italic"),
    )


def _machines(row: Row) -> str:
    vendors = [VENDOR_NAMES.get(vendor, vendor) for vendor in row.vendors]
    chips = [*(f"{vendor} GPUs" for vendor in vendors), *(["CPUs"] if row.cpu else [])]
    systems = ", ".join(SYSTEMS.get(system, system) for system in row.systems)
    return f"planned for {', '.join(chips) or 'nothing yet'} under {systems}"


def _made(row: Row) -> str:
    converted = [name for name in row.converts if name not in row.formats]
    return f"; made from {', '.join(converted)}" if converted else ""


def _installation(row: Row, installed: Sequence[Environment]) -> list[tuple[str, str, str]]:
    lines = [("Installed", _state(row, installed).plain, "")]
    if row.packages:
        sizes = f"download {size(row.download_bytes or 0)}, {size(row.disk_bytes or 0)} on disk"
        lines.append(("Recipe", f"{', '.join(row.packages)} · {sizes}", ""))
    for environment in (one for one in installed if one.engine == row.engine):
        lines.append(("", environment.theirs or environment.path, ""))
        lines += [("", f"  {note}", "") for note in environment.notes]
    return lines


def _said_here(here: Here) -> list[tuple[str, str, str]]:
    if not here.runs:
        return [("Here", f"no: {here.why}", "")]
    where = DEVICE_WORDS.get(here.device or "", here.device or "it")
    lines = [("Here", f"runs on {where}", "")]
    lines += [
        ("", f"{who}: {doubt or 'nothing speaks against it'}", "")
        for who, doubt in (("for one user", here.doubt), ("for many", here.doubt_for_many))
    ]
    return lines


def _figures(result: Result | None) -> list[tuple[str, str, str]]:
    if result is None:
        return [("Measured", "TTFT TBD   tok/s TBD   peak memory TBD   quality TBD", "")]
    figures = (
        f"TTFT {_cell(result, result.ttft_ms)} ms   {_cell(result, result.output_tok_s)} tok/s   "
        f"peak memory {_peak(result)}   quality {_quality(result)}"
    )
    return [("Measured", figures, ""), ("", f"{work_words(result)}, {result.at}", "")]


def _rules(row: Row) -> Columns:
    return Columns(
        Column.of("rule", [Text(line.rule, style="bold") for line in row.rules]),
        (
            Column.of("", [line.kind for line in row.rules]),
            Column.of("what it says", [line.text for line in row.rules], comfortable=36),
        ),
    )
