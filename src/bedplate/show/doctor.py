"""The page of `doctor`, which can be pasted into a bug report."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.facts.doctor import DoctorReport
from bedplate.show.probe import describe_hardware
from bedplate.values.units import format_memory, format_size

MOST_MODELS = 12


def render_report(report: DoctorReport) -> RenderableType:
    """The facts, then the problems."""
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for label, value in _list_rows(report):
        table.add_row("" if label == last else label, value)
        last = label
    return Group(table, Text(""), *_list_problems(report))


def _list_rows(report: DoctorReport) -> Iterator[tuple[str, Text]]:
    hardware = report.hardware
    yield "bedplate", Text(f"{report.bedplate} · {report.python} · uv {report.uv or 'not found'}")
    yield "System", Text(f"{report.system}" + (f" · in {hardware.container}" if hardware.container else ""))
    yield "Hardware", Text(describe_hardware(hardware))
    for card in hardware.accelerators:
        driver = f"driver {card.driver_version}" if card.driver_version else "driver unknown"
        cuda = f", CUDA {card.cuda_version}" if card.cuda_version else ""
        yield "GPU", Text(f"{card.index}  {card.name} · {driver}{cuda}")
    free = f" · {format_size(hardware.disk.free_bytes)} free" if hardware.disk is not None else ""
    yield "Home", Text(f"{report.home}{free}{'' if report.home_writable else ' · not writable'}")
    if report.swap_used_bytes:
        yield "Swap", Text(f"{format_memory(report.swap_used_bytes)} in use")
    yield "Port 8080", Text("free" if report.port_free else "taken")
    for engine in report.engines:
        mark = ("runs", "green") if engine.failure is None else ("does not run", "red")
        words = [
            f"{engine.engine} {engine.version}",
            f"Python {engine.python}" if engine.python else "",
            format_size(engine.disk_bytes) if engine.disk_bytes is not None else "",
        ]
        yield "Engines", Text.assemble(" · ".join(filter(None, words)), " · ", mark)
    if not report.engines:
        yield "Engines", Text("none installed")
    for model in report.models[:MOST_MODELS]:
        yield "Models", Text(f"{model.name} · {format_size(model.bytes)} · {model.origin}")
    if len(report.models) > MOST_MODELS:
        yield "Models", Text(f"… and {len(report.models) - MOST_MODELS} more")
    if not report.models:
        yield "Models", Text("none found")
    for setting in report.settings:
        yield "Settings", Text(f"{setting.name}={setting.value}")
    for log in report.logs:
        yield "Log", Text(log.name, style="bold")
        for line in log.lines:
            yield "Log", Text(line, style="dim")


def _list_problems(report: DoctorReport) -> Iterator[Text]:
    for problem in report.problems:
        mark = (" ✗ ", "bold red") if problem.kind == "problem" else (" · ", "dim")
        yield Text.assemble(mark, problem.what)
        if problem.hint:
            yield Text.assemble(("   hint: ", "cyan"), problem.hint)
    if report.is_healthy:
        yield Text.assemble((" ✓ ", "bold green"), "no problems found")
