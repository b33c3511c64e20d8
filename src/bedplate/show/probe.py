"""A machine's hardware as people read it: one page, or one line."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.facts.cpu import summarise
from bedplate.values import Accelerator, Cpu, Figure, Hardware
from bedplate.values.units import memory, size

SYSTEMS = {"linux": "Linux", "macos": "macOS", "windows": "Windows"}


def one_line(hardware: Hardware) -> str:
    """Such as "Intel Xeon, 2 cores allowed (of 2), AVX-512 AMX · 23.4 GiB RAM free · no GPU"."""
    parts = [short_name(hardware.cpu.name), cores(hardware.cpu), summarise(hardware.cpu.instruction_sets)]
    ram = f"{memory(hardware.memory.available_bytes)} RAM free"
    return " · ".join((", ".join(filter(None, parts)), ram, gpus(hardware)))


def render_hardware(hardware: Hardware) -> RenderableType:
    """A compact page: what it is, how much of it, and on whose word."""
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)

    def row(label: str, value: str, basis: str = "") -> None:
        # As Text, since names may hold brackets that would be taken for markup.
        table.add_row(label, Text(value), Text(basis))

    cpu, ram, disk = hardware.cpu, hardware.memory, hardware.disk
    system = [hardware.os_version or SYSTEMS[hardware.os], f"in {hardware.container}" if hardware.container else ""]
    row("System", " · ".join(filter(None, system)), "reported")
    row("CPU", f"{short_name(cpu.name)} · {cpu.arch}", cpu.basis)
    row("", _core_counts(cpu))
    row("", " ".join(cpu.instruction_sets) or "instruction sets: TBD")
    limit = f" · limited to {memory(ram.limit_bytes)} by its container" if ram.limit_bytes is not None else ""
    row("Memory", f"{memory(ram.available_bytes)} free of {memory(ram.total_bytes)}{limit}", ram.basis)
    row("", f"bandwidth {_bandwidth(ram.bandwidth_bytes_s)}", _basis(ram.bandwidth_bytes_s))
    for position, card in enumerate(hardware.accelerators):
        row("GPU" if position == 0 else "", f"{card.index}  {card.name} · {_card(card)}", card.basis)
        row("", f"   bandwidth {_bandwidth(card.bandwidth_bytes_s)}", _basis(card.bandwidth_bytes_s))
    if not hardware.accelerators:
        row("GPU", "none found")
    for position, link in enumerate(hardware.links):
        ends = f"{link.kind} {link.a} – {link.b} · {_bandwidth(link.bandwidth_bytes_s)}"
        row("Links" if position == 0 else "", ends, _basis(link.bandwidth_bytes_s))
    if disk is not None:
        row("Disk", f"{size(disk.free_bytes)} free of {size(disk.total_bytes)} · {disk.path}", disk.basis)
    for position, note in enumerate(hardware.notes):
        row("Notes" if position == 0 else "", note)
    return table


def short_name(name: str) -> str:
    """A CPU's name without the words that say nothing: "Intel(R) Xeon(R) Processor" is an Intel Xeon."""
    short = re.sub(r"\((R|TM|C|r|tm)\)|®|™", " ", name)
    short = re.sub(r"\b(CPU|Processor)\b|\b\w+-Core\b|@ ?[0-9.]+ ?GHz|\b[0-9]+th Gen\b|\bwith Radeon.*$", " ", short)
    return " ".join(short.split()) or name


def cores(cpu: Cpu) -> str:
    """How many cores we may use, of how many."""
    # A quota below one core leaves a share of one, and saying "1 core" would promise too much.
    share = cpu.allowed_cores < 1
    allowed = f"{cpu.allowed_cores:.2g}" if share else f"{cpu.allowed_physical_cores}"
    noun = "core" if allowed == "1" else "cores"
    return f"{allowed} {noun} allowed (of {cpu.physical_cores or cpu.logical_cores})"


def gpus(hardware: Hardware) -> str:
    """The accelerators by name: "4 × NVIDIA H100 80GB HBM3, 79.1 GiB free each"."""
    counts = Counter(card.name for card in hardware.accelerators)
    parts = []
    for name, count in counts.items():
        cards = [card for card in hardware.accelerators if card.name == name]
        known = [card.free_bytes for card in cards if card.free_bytes is not None]
        free = f", {memory(min(known))} free" if known else ""
        if cards[0].unified_memory:
            free = " GPU, unified memory"
        parts.append(f"{count} × {name}{free} each" if count > 1 else f"{name}{free}")
    return " + ".join(parts) or "no GPU"


def _core_counts(cpu: Cpu) -> str:
    counts = [cores(cpu), f"{cpu.logical_cores} logical"]
    if cpu.sockets:
        counts.append(f"{cpu.sockets} socket" + ("s" if cpu.sockets > 1 else ""))
    if cpu.allowed_cores < cpu.logical_cores:
        counts.append(f"CPU time for {cpu.allowed_cores:g}")
    return " · ".join(counts)


def _card(card: Accelerator) -> str:
    words = []
    if card.free_bytes is not None and card.memory_bytes is not None:
        words.append(f"{memory(card.free_bytes)} free of {memory(card.memory_bytes)}")
    else:
        words.append(memory(card.memory_bytes) if card.memory_bytes is not None else "memory TBD")
    if card.unified_memory:
        words.append("shared with the CPU")
    if card.compute_capability:
        words.append(f"compute capability {card.compute_capability}")
    if card.driver_version:
        words.append(f"driver {card.driver_version}")
    return " · ".join(words)


def _bandwidth(figure: Figure | None) -> str:
    return "TBD" if figure is None else f"{size(figure.value)}/s"


def _basis(figure: Figure | None) -> str:
    return "" if figure is None else figure.basis
