"""The pages of `engines`: recommendations by hardware, features, support and measurements on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bedplate.decide.engine_map import EngineRow, EngineSupport, Situation
from bedplate.engines.base import DEDICATED, VENDOR_NAMES
from bedplate.run.engine_listing import LockStatus
from bedplate.run.environments import EngineEnvironment
from bedplate.show.columns import Column, SplitTable
from bedplate.show.decision import format_short
from bedplate.show.page import make_fact_table
from bedplate.show.probe import SYSTEMS, describe_hardware
from bedplate.values import Hardware
from bedplate.values.result import Result
from bedplate.values.units import format_memory, format_size

PROVERB = "Feature checklists are maps, not proof."
DEVICE_WORDS = {
    "cpu": "the CPU",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "metal": "the Apple GPU",
    "xpu": "Intel GPUs",
    "vulkan": "GPUs through Vulkan",
    "hpu": "Intel Gaudi",
    "tt": "Tenstorrent cards",
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
    hardware: Hardware,
    sheet: Sequence[Situation],
    rows: Sequence[EngineRow],
    installed: Sequence[EngineEnvironment],
    locks: Mapping[str, LockStatus | None],
) -> RenderableType:
    """The page of `engines`."""
    names = Column.from_cells("engine", [Text(row.engine, style="bold") for row in rows])
    return Group(
        Padding(
            Text.assemble(("This machine", "bold"), (f"  {describe_hardware(hardware)}", "dim")),
            (1, 0, 0, 1),
            expand=False,
        ),
        SplitTable(
            names,
            (
                Column.from_cells("version", [row.version or "" for row in rows]),
                Column.from_cells("installed", [_describe_state(row, installed) for row in rows]),
                Column.from_cells("packages", [_describe_lock(locks.get(row.engine)) for row in rows], comfortable=30),
                Column.from_cells("supported", [_describe_support(row.here) for row in rows], comfortable=30),
                *_make_measurement_columns(rows),
            ),
        ),
        _describe_measurements(rows),
        Text("\n Recommended by hardware", style="bold"),
        _make_cheat_sheet(sheet),
        Text("\n Features", style="bold"),
        SplitTable(names, tuple(_make_feature_column(rows, field, title) for field, title in FEATURES)),
        Text(f"\n {PROVERB}", style="italic"),
        Text("\n One engine: bedplate engines show ID   Models that run here: bedplate models", style="dim"),
    )


def _make_cheat_sheet(sheet: Sequence[Situation]) -> Table:
    """Each situation with its recommended engines; situations that match this machine are marked."""
    table = Table.grid(padding=(0, 1), pad_edge=True, collapse_padding=False)
    table.add_column(overflow="fold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for line in sheet:
        mark = (f"  ← this machine, {' and '.join(line.here)}", "green") if line.here else ""
        table.add_row(Text.assemble(line.when, mark), ", ".join(line.engines), line.rules[0])
    return table


def _make_feature_column(rows: Sequence[EngineRow], field: str, title: str) -> Column:
    return Column.from_cells(title, [getattr(row.features, field) if row.features is not None else TBD for row in rows])


def _describe_state(row: EngineRow, installed: Sequence[EngineEnvironment]) -> Text:
    there = [environment for environment in installed if environment.engine == row.engine]
    if not there:
        can = f"no; {format_size(row.download_bytes or 0)} to download" if row.packages else "plan only"
        return Text(can, style="" if row.packages else "dim")
    built = any(environment.built for environment in there)
    others = sorted({environment.version for environment in there if not environment.built} - {row.version or ""})
    pinned = any(environment.version == row.version for environment in there)
    kind = "also" if pinned else "another version:" if len(others) == 1 else "other versions:"
    parts = ("yes" if pinned else "", f"{kind} {', '.join(others)}" if others else "", "built here" if built else "")
    words = ", ".join(filter(None, parts))
    return Text(f"{words}, {format_size(sum(environment.disk_bytes for environment in there))}", style="green")


def _describe_lock(lock: LockStatus | None) -> Text:
    if lock is None:
        return Text("")
    return Text("locked" if lock.locked else f"not locked: {lock.reason}")


def _describe_support(here: EngineSupport) -> Text:
    if not here.runs:
        return Text(f"no: {here.why}", style="dim")
    where = f"yes, on {DEVICE_WORDS.get(here.device or '', here.device or 'it')}"
    if here.doubt is not None and here.doubt_for_many is not None:
        return Text(f"{where}, but {here.doubt}")
    for who, doubt in (("one user", here.doubt), ("many users", here.doubt_for_many)):
        if doubt is not None:
            return Text(f"{where}; for {who}: {doubt}")
    return Text(where)


def _make_measurement_columns(rows: Sequence[EngineRow]) -> tuple[Column, ...]:
    found = [row.measured for row in rows]
    return (
        Column.from_cells("TTFT ms", [_format_cell(one, one.ttft_ms if one else None) for one in found], right=True),
        Column.from_cells("tok/s", [_format_cell(one, one.output_tok_s if one else None) for one in found], right=True),
        Column.from_cells("peak", [_format_peak(one) for one in found], right=True),
        Column.from_cells("quality", [_format_quality(one) for one in found], right=True),
    )


def _format_cell(result: Result | None, value: float | None) -> Text:
    return TBD if result is None or value is None else Text(format_short(value))


def _format_peak(result: Result | None) -> Text:
    return TBD if result is None or result.peak_memory_bytes is None else Text(format_memory(result.peak_memory_bytes))


def _format_quality(result: Result | None) -> Text:
    return TBD if result is None or result.quality is None else Text(f"{result.quality:.2f}")


def _describe_measurements(rows: Sequence[EngineRow]) -> Text:
    found = [row.measured for row in rows if row.measured is not None]
    if not found:
        return Text(
            " TTFT, tok/s, peak memory and quality are TBD until they are measured on this machine", style="dim"
        )
    return Text(f" Measured here: {describe_measured_workload(found[0])}", style="dim")


def describe_measured_workload(result: Result) -> str:
    weights = f" {result.quantization}" if result.quantization else ""
    lengths = f"{result.prompt_tokens:,} + {result.output_tokens:,} tokens"
    return f"{result.model}{weights}, {result.concurrency} in flight, {lengths}"


def render_engine(
    hardware: Hardware, row: EngineRow, installed: Sequence[EngineEnvironment], lock: LockStatus | None
) -> RenderableType:
    """The page of `engines show`."""
    lines: list[tuple[str, str, str]] = [("Best for", row.strength, "")]
    if row.features is None:
        lines.append(("Features", "not described yet", ""))
    else:
        lines += [
            (title[:1].upper() + title[1:], getattr(row.features, field), "")
            for field, title in FEATURES
            if field != "hardware"
        ]
    lines += [
        ("Hardware", row.features.hardware if row.features is not None else "not described yet", ""),
        ("", _list_machines(row), ""),
        ("Weights", f"loads {', '.join(row.formats)}{_describe_conversions(row)}", ""),
        ("Parallelism", ", ".join(row.ways) if row.ways else "none: one device", ""),
        ("Tasks", ", ".join(row.tasks), ""),
    ]
    lines += _list_installations(row, installed, lock)
    lines += [("Machine", describe_hardware(hardware), ""), *_list_support(row.here)]
    lines += _list_figures(row.measured)
    if row.features is not None:
        lines.append(("Source", row.features.source, ""))
    return Group(
        Text(f"\n {row.name} {row.version or ''}".rstrip(), style="bold green"),
        Text(""),
        make_fact_table(lines),
        Text("\n Rules that name this engine", style="bold"),
        _make_rules_table(row),
        Text(f"\n {PROVERB}", style="italic"),
    )


def _list_machines(row: EngineRow) -> str:
    names = [VENDOR_NAMES.get(vendor, vendor) + ("" if vendor in DEDICATED else " GPUs") for vendor in row.vendors]
    chips = [*names, *(["CPUs"] if row.cpu else [])]
    systems = ", ".join(SYSTEMS.get(system, system) for system in row.systems)
    return f"supports {', '.join(chips) or 'no hardware yet'} on {systems}"


def _describe_conversions(row: EngineRow) -> str:
    converted = [name for name in row.converts if name not in row.formats]
    return f"; converted from {', '.join(converted)}" if converted else ""


def _list_installations(
    row: EngineRow, installed: Sequence[EngineEnvironment], lock: LockStatus | None
) -> list[tuple[str, str, str]]:
    lines = [("Installed", _describe_state(row, installed).plain, "")]
    if row.packages:
        sizes = f"download {format_size(row.download_bytes or 0)}, {format_size(row.disk_bytes or 0)} on disk"
        lines.append(("Recipe", f"{', '.join(row.packages)} · {sizes}", ""))
    for environment in (one for one in installed if one.engine == row.engine):
        size = f" · {format_size(environment.disk_bytes)}" if environment.disk_bytes else ""
        state = "" if environment.adopted_path or environment.built or environment.locked else " · not locked"
        where = environment.adopted_path or environment.path
        lines.append(("", f"{environment.engine}@{environment.version}{size}{state} · {where}", ""))
        lines += [("", f"  {note}", "") for note in environment.notes]
    if lock is not None:
        lines.append(("Packages", _describe_lock(lock).plain, ""))
    return lines


def _list_support(here: EngineSupport) -> list[tuple[str, str, str]]:
    if not here.runs:
        return [("Supported", f"no: {here.why}", "")]
    where = DEVICE_WORDS.get(here.device or "", here.device or "it")
    lines = [("Supported", f"yes, on {where}", "")]
    lines += [
        ("", f"{who}: {doubt or 'suitable'}", "")
        for who, doubt in (("for one user", here.doubt), ("for many users", here.doubt_for_many))
    ]
    return lines


def _list_figures(result: Result | None) -> list[tuple[str, str, str]]:
    if result is None:
        return [("Measured", "TTFT TBD   tok/s TBD   peak memory TBD   quality TBD", "")]
    figures = (
        f"TTFT {_format_cell(result, result.ttft_ms)} ms   {_format_cell(result, result.output_tok_s)} tok/s   "
        f"peak memory {_format_peak(result)}   quality {_format_quality(result)}"
    )
    return [("Measured", figures, ""), ("", f"{describe_measured_workload(result)}, {result.at}", "")]


def _make_rules_table(row: EngineRow) -> SplitTable:
    return SplitTable(
        Column.from_cells("rule", [Text(line.rule, style="bold") for line in row.rules]),
        (
            Column.from_cells("", [line.kind for line in row.rules]),
            Column.from_cells("description", [line.text for line in row.rules], comfortable=36),
        ),
    )
