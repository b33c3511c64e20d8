"""The measurements of `probe --measure`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from bedplate.facts.cpu import INSTRUCTION_SETS
from bedplate.show.page import make_fact_table
from bedplate.values import Figure
from bedplate.values.measurements import GpuBandwidth, MatrixRate, Measurements, RamBandwidth
from bedplate.values.units import format_memory, format_seconds, format_size

Row = tuple[str, str, str]


def render_measured(found: Measurements) -> RenderableType:
    """A separate table below the hardware: each figure with its spread."""
    return make_fact_table(_list_rows(found))


def format_rate(figure: Figure) -> str:
    """Such as "21.3 GB/s ± 2 %"; the spread is that of the repeats."""
    return f"{format_size(figure.value)}/s{_format_spread(figure)}"


def format_operations(figure: Figure, data_type: str) -> str:
    """Such as "788 TFLOP/s", or "1500 TOP/s" for integers."""
    value, prefix = (figure.value / 1e12, "T") if figure.value >= 999.5e9 else (figure.value / 1e9, "G")
    digits = f"{value:.3g}" if value < 99.5 else f"{value:.0f}"
    return f"{digits} {prefix}{'OP' if data_type.startswith('int') else 'FLOP'}/s{_format_spread(figure)}"


def _list_rows(found: Measurements) -> Iterator[Row]:
    date = found.when[:16].replace("T", " ")
    yield "Measured", f"{date}, in {format_seconds(found.took_s)} · {found.machine.os} {found.machine.kernel}", ""
    yield from _list_instruction_sets(found)
    for ram in (found.ram_all_cores, found.ram_one_core):
        if ram is not None:
            yield "Memory", _describe_ram(ram), "measured"
    for gpu in found.gpus:
        yield from _list_gpu_rows(gpu)
    for peer in found.peers:
        yield "Links", f"GPU {peer.source} to GPU {peer.target} {format_rate(peer.bytes_s)}", "measured"
    for product in found.matrix:
        yield "Matrix", _describe_matrix_rate(product), "measured"
    if found.disk is not None:
        how = (
            f"read {format_rate(found.disk.read_bytes_s)} over {format_size(found.disk.read_bytes)} · {found.disk.path}"
        )
        yield "Disk", how, "measured"
    for note in found.notes:
        yield "Left out", note, ""


def _list_instruction_sets(found: Measurements) -> Iterator[Row]:
    by_result = {
        result: [check for check in found.instruction_sets if check.result == result]
        for result in ("runs", "does not run", "not tried")
    }
    if found.instruction_sets:
        count, total = len(by_result["runs"]), len(found.instruction_sets)
        every = f"all {total}" if count == total else f"{count} of {total}"
        yield "CPU", f"{every} advertised instruction sets run", "measured"
    for result in ("does not run", "not tried"):
        for check in by_result[result]:
            yield "CPU", f"{INSTRUCTION_SETS.get(check.name, check.name)} {result}: {check.why}", ""


def _describe_ram(ram: RamBandwidth) -> str:
    threads = "1 core" if ram.threads == 1 else f"{ram.threads} cores"
    read, copy = format_rate(ram.read_bytes_s), format_rate(ram.copy_bytes_s)
    return f"{threads}: read {read} · copy {copy} · over {format_memory(ram.buffer_bytes)}"


def _list_gpu_rows(gpu: GpuBandwidth) -> Iterator[Row]:
    label = f"GPU {gpu.index}"
    rates = [
        f"{what} {format_rate(figure)}"
        for what, figure in (("read", gpu.read_bytes_s), ("copy", gpu.copy_bytes_s))
        if figure
    ]
    if rates:
        if gpu.theoretical_bytes_s:
            rates.append(f"theoretical {format_size(gpu.theoretical_bytes_s)}/s")
        if gpu.spec_bytes_s:
            rates.append(f"spec {format_size(gpu.spec_bytes_s.value)}/s")
        yield label, " · ".join(rates), "measured"
    directions = (
        ("from host", gpu.to_device_pinned_bytes_s, gpu.to_device_pageable_bytes_s),
        ("to host", gpu.from_device_pinned_bytes_s, gpu.from_device_pageable_bytes_s),
    )
    for direction, pinned, pageable in directions:
        kinds = [
            f"{format_rate(figure)} {kind}" for kind, figure in (("pinned", pinned), ("pageable", pageable)) if figure
        ]
        if kinds:
            yield label, f"{direction} {' · '.join(kinds)}", "measured"


def _describe_matrix_rate(product: MatrixRate) -> str:
    device = "CPU" if product.device == "cpu" else f"GPU {product.device}"
    speed = format_operations(product.operations_s, product.data_type)
    return f"{device} {product.data_type} {speed} · {product.size}³ · {product.library}"


def _format_spread(figure: Figure) -> str:
    """Half of the range in percent of the value; omitted below 0.5 %."""
    share = max(figure.high - figure.value, figure.value - figure.low) / figure.value if figure.value else 0.0
    return f" ± {share:.0%}" if share >= 0.005 else ""
