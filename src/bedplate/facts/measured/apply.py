"""Add measured figures to probed hardware. They take precedence over data sheets."""

from __future__ import annotations

from bedplate.values import Accelerator, Figure, Hardware, Link, replace_fields
from bedplate.values.measurements import GpuBandwidth, Measurements


def apply_measurements(hardware: Hardware, found: Measurements) -> Hardware:
    """`hardware` with the measured figures of `found`; everything else stays unchanged.

    Figures that were measured while other processes used the machine replace no figure of a data sheet.
    """
    ram = found.ram_all_cores
    gpus = {gpu.index: gpu for gpu in found.gpus}
    if found.disturbances:
        ram = ram if hardware.memory.bandwidth_bytes_s is None else None
        known = {card.index for card in hardware.accelerators if card.bandwidth_bytes_s is not None}
        gpus = {index: gpu for index, gpu in gpus.items() if index not in known}
    return replace_fields(
        hardware,
        cpu=replace_fields(hardware.cpu, instruction_sets=_remove_broken(hardware.cpu.instruction_sets, found)),
        memory=replace_fields(hardware.memory, bandwidth_bytes_s=ram.read_bytes_s) if ram else hardware.memory,
        accelerators=tuple(_apply_to_card(card, gpus.get(card.index)) for card in hardware.accelerators),
        links=hardware.links if found.disturbances else _apply_to_links(hardware.links, found),
        measured=found,
        notes=(*hardware.notes, *_list_broken(found)),
    )


def _remove_broken(advertised: tuple[str, ...], found: Measurements) -> tuple[str, ...]:
    """The advertised instruction sets without those that do not run, because an engine would crash on them."""
    broken = {check.name for check in found.instruction_sets if check.result == "does not run"}
    return tuple(name for name in advertised if name not in broken)


def _list_broken(found: Measurements) -> tuple[str, ...]:
    return tuple(
        f"{check.name} is advertised but does not run here: {check.why}"
        for check in found.instruction_sets
        if check.result == "does not run"
    )


def _apply_to_card(card: Accelerator, gpu: GpuBandwidth | None) -> Accelerator:
    # Decoding reads memory. If the read kernel did not run, the copy is the closest figure.
    figure = (gpu.read_bytes_s or gpu.copy_bytes_s) if gpu and card.vendor == "nvidia" else None
    return replace_fields(card, bandwidth_bytes_s=figure) if figure else card


def _apply_to_links(links: tuple[Link, ...], found: Measurements) -> tuple[Link, ...]:
    """Set the measured figure of each link, one direction, and add unknown links."""
    figures: dict[frozenset[str], Figure] = {}
    for gpu in found.gpus:
        if gpu.to_device_pinned_bytes_s is not None:
            figures[frozenset({str(gpu.index), "host"})] = gpu.to_device_pinned_bytes_s
    for peer in found.peers:
        pair = frozenset({str(peer.source), str(peer.target)})
        # A plan can rely only on the slower direction.
        figures[pair] = min(peer.bytes_s, figures.get(pair, peer.bytes_s), key=lambda figure: figure.value)
    known = list(links)
    # If two cards have both NVLink and PCIe between them, copies use NVLink.
    for place in sorted(range(len(known)), key=lambda place: known[place].kind == "pcie"):
        figure = figures.pop(frozenset({known[place].a, known[place].b}), None)
        if figure is not None:
            known[place] = replace_fields(known[place], bandwidth_bytes_s=figure)
    return (*known, *(_make_link(pair, figure) for pair, figure in figures.items()))


def _make_link(pair: frozenset[str], figure: Figure) -> Link:
    a, b = sorted(pair)
    return Link(kind="pcie" if b == "host" else "other", a=a, b=b, bandwidth_bytes_s=figure)
