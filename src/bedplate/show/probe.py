"""The hardware of a machine: the page of `probe`, or one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType

from bedplate.facts.cpu import summarize_instruction_sets
from bedplate.show.page import make_fact_table
from bedplate.values import Accelerator, Cache, Cpu, Figure, Hardware, Link, Memory
from bedplate.values.hardware import UNNAMED_CPU, PciePath
from bedplate.values.units import format_memory, format_size

Row = tuple[str, str, str]
SYSTEMS = {"linux": "Linux", "macos": "macOS", "windows": "Windows"}
UNITS = {
    "nvidia": "multiprocessors",
    "amd": "compute units",
    "apple": "GPU cores",
    "intel": "cores",
    "tenstorrent": "cores",
    "other": "cores",
}
PATHS: dict[PciePath, str] = {
    "board": "on one board",
    "switch": "through one PCIe switch",
    "switches": "through several PCIe switches",
    "host-bridge": "through the CPU's host bridge",
    "node": "across the CPU",
    "system": "across two CPUs",
}


def describe_hardware(hardware: Hardware) -> str:
    """Such as "Intel Xeon, 2 cores allowed (of 2), AVX-512 AMX · 23.4 GiB RAM free · no GPU"."""
    cpu = hardware.cpu
    name = "" if cpu.name == UNNAMED_CPU else shorten_name(cpu.name)
    parts = [name, describe_cores(cpu), summarize_instruction_sets(cpu.instruction_sets)]
    ram = f"{format_memory(hardware.memory.available_bytes)} RAM free"
    return " · ".join((", ".join(filter(None, parts)), ram, describe_gpus(hardware)))


def render_hardware(hardware: Hardware) -> RenderableType:
    """One page: each part, its size, the source of the figure, and the speed limit that follows."""
    return make_fact_table(_list_rows(hardware))


def _list_rows(hardware: Hardware) -> Iterator[Row]:
    disk = hardware.disk
    system = [hardware.os_version or SYSTEMS[hardware.os], f"in {hardware.container}" if hardware.container else ""]
    yield "System", " · ".join(filter(None, system)), "reported"
    yield from _list_cpu_rows(hardware.cpu)
    yield from _list_memory_rows(hardware.memory)
    yield from _list_card_rows(hardware.accelerators)
    for text, basis in describe_links(hardware.links):
        yield "Links", text, basis
    if disk is not None:
        yield (
            "Disk",
            f"{format_size(disk.free_bytes)} free of {format_size(disk.total_bytes)} · {disk.path}",
            disk.basis,
        )
    for note in hardware.notes:
        yield "Notes", note, ""


def _list_cpu_rows(cpu: Cpu) -> Iterator[Row]:
    yield "CPU", f"{shorten_name(cpu.name)} · {cpu.arch}", cpu.basis
    yield "CPU", _describe_core_counts(cpu), ""
    yield "CPU", " ".join(cpu.instruction_sets) or "instruction sets unknown", ""
    if cpu.caches:
        yield (
            "CPU",
            " · ".join(map(_describe_cache, (cache for cache in cpu.caches if cache.kind != "instruction"))),
            "",
        )
    if len(cpu.numa) > 1:
        for node in cpu.numa:
            size_words = format_memory(node.memory_bytes) if node.memory_bytes is not None else "memory unknown"
            yield "CPU", f"NUMA node {node.index}: {size_words}, CPUs {node.cpus or 'none'}", ""


def _list_memory_rows(ram: Memory) -> Iterator[Row]:
    limit = f" · limited to {format_memory(ram.limit_bytes)} by the container" if ram.limit_bytes is not None else ""
    yield "Memory", f"{format_memory(ram.available_bytes)} free of {format_memory(ram.total_bytes)}{limit}", ram.basis
    yield "Memory", f"bandwidth {_format_bandwidth(ram.bandwidth_bytes_s)}", _describe_basis(ram.bandwidth_bytes_s)
    if implication := describe_speed_limit(ram.bandwidth_bytes_s, ram.available_bytes):
        yield "Memory", implication, "estimate"


def _list_card_rows(cards: Sequence[Accelerator]) -> Iterator[Row]:
    if not cards:
        yield "GPU", "none found", ""
    shown: list[Row] = []
    for card in cards:
        slice_of = f" · a slice of GPU {card.parent}" if card.parent is not None else ""
        yield "GPU", f"{card.index}  {card.name} · {_describe_card(card)}{slice_of}", card.basis
        details = [("GPU", f"   {text}", basis) for text, basis in _list_card_details(card)]
        if details != shown:  # identical cards are described once
            yield from details
        shown = details
        for process in card.processes:
            held = format_memory(process.bytes) if process.bytes is not None else "an unknown amount"
            yield "GPU", f"   {process.name or 'another process'} (pid {process.pid}) holds {held}", "reported"


def _list_card_details(card: Accelerator) -> Iterator[tuple[str, str]]:
    words = [
        card.architecture or "",
        f"{card.compute_units} {UNITS[card.vendor]}" if card.compute_units else "",
        f"driver {card.driver_version}" if card.driver_version else "",
        f"CUDA {card.cuda_version}" if card.cuda_version else "",
    ]
    if any(words):
        yield " · ".join(filter(None, words)), ""
    words = [
        _format_current_and_maximum("clock", card.sm_clock_mhz, card.max_sm_clock_mhz, "MHz"),
        _format_current_and_maximum("memory clock", card.memory_clock_mhz, card.max_memory_clock_mhz, "MHz"),
        _format_current_and_maximum("power limit", card.power_limit_w, card.max_power_limit_w, "W"),
        _describe_slot(card),
        f"{card.nvlinks} NVLinks" if card.nvlinks else "",
    ]
    if any(words):
        yield " · ".join(filter(None, words)), "reported"
    if (limit := card.wired_limit_bytes) is not None:
        band = f" ({format_memory(limit.low)} to {format_memory(limit.high)})" if limit.low < limit.high else ""
        yield f"the GPU can use {format_memory(limit.value)} of it{band}", limit.basis
    yield f"bandwidth {_format_bandwidth(card.bandwidth_bytes_s)}", _describe_basis(card.bandwidth_bytes_s)
    if implication := describe_speed_limit(card.bandwidth_bytes_s, card.free_bytes or card.memory_bytes):
        yield implication, "estimate"


def describe_speed_limit(bandwidth: Figure | None, free_bytes: int | None) -> str | None:
    """The upper bound that a bandwidth sets: each token needs all of its weights to be read once."""
    if bandwidth is None or bandwidth.value <= 0:
        return None
    text = f"each GB of weights read per token takes {1e12 / bandwidth.value:.3g} ms"
    if free_bytes:
        rate = bandwidth.value / free_bytes
        most = f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}"
        text += f"; with {format_size(free_bytes)} of weights, at most {most} tokens/s per stream"
    return text


def describe_links(links: Sequence[Link]) -> Iterator[tuple[str, str]]:
    """Identical links on one line: eight cards behind a switch give one line, not 28."""
    groups: dict[tuple[object, ...], list[Link]] = {}
    for link in links:
        rate = link.bandwidth_bytes_s
        key = (link.kind, "host" in (link.a, link.b), link.count, link.path, link.hops, rate)
        groups.setdefault(key, []).append(link)
    for group in groups.values():
        one = group[0]
        words = [
            f"{one.kind} {_describe_ends(group)}",
            f"{one.count} link{'s' if one.count > 1 else ''}" if one.count else "",
            PATHS[one.path] if one.path else "",
            f"{one.hops} hop{'s' if one.hops > 1 else ''}" if one.hops else "",
            f"{_format_bandwidth(one.bandwidth_bytes_s)} each way" if one.bandwidth_bytes_s else "bandwidth unknown",
        ]
        yield " · ".join(filter(None, words)), _describe_basis(one.bandwidth_bytes_s)


def _describe_ends(links: Sequence[Link]) -> str:
    if "host" in (links[0].a, links[0].b):
        return f"GPU {_format_ranges(int(link.a) for link in links if link.a.isdigit())} – host"
    cards = sorted({int(end) for link in links for end in (link.a, link.b) if end.isdigit()})
    if len(cards) > 2 and len(links) == len(cards) * (len(cards) - 1) // 2:
        return f"between all of GPU {_format_ranges(cards)}"
    return "GPU " + ", ".join(f"{link.a} – {link.b}" for link in links)


def _format_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _describe_cache(cache: Cache) -> str:
    name = f"L{cache.level}" + {"data": "d", "instruction": "i", "unified": ""}[cache.kind]
    shared = f" for {cache.shared_by} CPUs" if cache.count > 1 and cache.shared_by > 1 else ""
    each = f"{cache.count} × " if cache.count > 1 else ""
    return f"{name} {each}{format_memory(cache.bytes)}{shared}"


def _describe_slot(card: Accelerator) -> str:
    """The PCIe link, and its maximum if it runs below: idle cards reduce it, and some slots are too narrow."""
    slot = card.pcie
    if slot is None:
        return ""
    now, most = (slot.generation, slot.width), (slot.max_generation, slot.max_width)
    text = f"PCIe {now[0] or most[0] or '?'} x{now[1] or most[1] or '?'}"
    less = any(have is not None and could is not None and have < could for have, could in zip(now, most, strict=True))
    return f"{text} (of {most[0] or '?'} x{most[1] or '?'})" if less else text


def _format_current_and_maximum(what: str, now: float | None, most: float | None, unit: str) -> str:
    if now is None and most is None:
        return ""
    if now is None or most is None or now == most:
        return f"{what} {(most if now is None else now):g} {unit}"
    return f"{what} {now:g} of {most:g} {unit}"


def shorten_name(name: str) -> str:
    """A CPU's name without filler words: "Intel(R) Xeon(R) Processor" becomes "Intel Xeon"."""
    short = re.sub(r"\((R|TM|C|r|tm)\)|®|™", " ", name)
    short = re.sub(r"\b(CPU|Processor)\b|\b\w+-Core\b|@ ?[0-9.]+ ?GHz|\b[0-9]+th Gen\b|\bwith Radeon.*$", " ", short)
    return " ".join(short.split()) or name


def describe_cores(cpu: Cpu) -> str:
    """The cores that this process may use, of all cores."""
    # With a quota below one core, "1 core" would overstate it.
    share = cpu.allowed_cores < 1
    allowed = f"{cpu.allowed_cores:.2g}" if share else f"{cpu.allowed_physical_cores}"
    noun = "core" if allowed == "1" else "cores"
    return f"{allowed} {noun} allowed (of {cpu.physical_cores or cpu.logical_cores})"


def describe_gpus(hardware: Hardware) -> str:
    """The accelerators by name: "4 × NVIDIA H100 80GB HBM3, 79.1 GiB free each"."""
    counts = Counter(card.name for card in hardware.accelerators)
    parts = []
    for name, count in counts.items():
        cards = [card for card in hardware.accelerators if card.name == name]
        known = [card.free_bytes for card in cards if card.free_bytes is not None]
        free = f", {format_memory(min(known))} free" if known else ""
        if cards[0].unified_memory:
            free = " GPU, unified memory"
        parts.append(f"{count} × {name}{free} each" if count > 1 else f"{name}{free}")
    return " + ".join(parts) or "no GPU"


def _describe_core_counts(cpu: Cpu) -> str:
    counts = [describe_cores(cpu), f"{cpu.logical_cores} logical"]
    if cpu.performance_cores and cpu.efficiency_cores:
        counts.append(f"{cpu.performance_cores} performance and {cpu.efficiency_cores} efficiency")
    if cpu.sockets:
        counts.append(f"{cpu.sockets} socket" + ("s" if cpu.sockets > 1 else ""))
    if len(cpu.numa) > 1:
        counts.append(f"{len(cpu.numa)} NUMA nodes")
    if cpu.allowed_cores < cpu.logical_cores:
        counts.append(f"CPU quota {cpu.allowed_cores:g}")
    return " · ".join(counts)


def _describe_card(card: Accelerator) -> str:
    words = []
    if card.free_bytes is not None and card.memory_bytes is not None:
        words.append(f"{format_memory(card.free_bytes)} free of {format_memory(card.memory_bytes)}")
    else:
        words.append(format_memory(card.memory_bytes) if card.memory_bytes is not None else "memory unknown")
    if card.unified_memory:
        words.append("shared with the CPU")
    if card.compute_capability:
        words.append(f"compute capability {card.compute_capability}")
    return " · ".join(words)


def _format_bandwidth(figure: Figure | None) -> str:
    return "not measured (bedplate probe --measure)" if figure is None else f"{format_size(figure.value)}/s"


def _describe_basis(figure: Figure | None) -> str:
    return "" if figure is None else figure.basis
