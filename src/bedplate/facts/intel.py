"""Intel's graphics cards, from the sysfs files of the i915 and xe drivers."""

from __future__ import annotations

from pathlib import Path

from bedplate.facts.devices import (
    FoundAccelerators,
    list_cards,
    make_host_link,
    read_numa_node,
    read_number,
    read_pcie,
    read_uevent,
    read_word,
)
from bedplate.values import Accelerator, replace_fields

INTEL_PCI_VENDOR = "0x8086"
# Discrete cards by PCI device id, with the names in Mesa's list of Intel GPUs.
NAMES = {
    0x0BD5: "Intel Data Center GPU Max 1550",
    0x0BDA: "Intel Data Center GPU Max 1100",
    0x56A0: "Intel Arc A770",
    0x56A1: "Intel Arc A750",
    0x56A2: "Intel Arc A580",
    0x56A5: "Intel Arc A380",
    0x56A6: "Intel Arc A310",
    0x56C0: "Intel Data Center GPU Flex 170",
    0x56C1: "Intel Data Center GPU Flex 140",
    0xE20B: "Intel Arc B580",
    0xE20C: "Intel Arc B570",
    0xE211: "Intel Arc Pro B60",
    0xE212: "Intel Arc Pro B50",
}
STACKS = {0x0BD5: 2}
"""GPUs in a card that the runtime shows as devices of their own, unless ZE_FLAT_DEVICE_HIERARCHY says otherwise (oneAPI
GPU Optimization Guide 2025.0, "Exposing the Device Hierarchy")."""


def read_intel(root: Path = Path("/")) -> FoundAccelerators:
    """The GPUs of Intel's discrete cards. Graphics inside a CPU has no memory of its own and is only noted."""
    found: list[Accelerator] = []
    notes: list[str] = []
    for device in list_cards(root, INTEL_PCI_VENDOR):
        chip = parse_device_number(read_word(device / "device"))
        memory = read_own_memory(device)
        if memory is None and chip not in NAMES:
            notes.append(
                f"Intel graphics {read_word(device / 'device') or ''} is built into the CPU and does not count as a GPU"
            )
            continue
        stacks = STACKS.get(chip or 0, 1)
        card = make_intel_accelerator(device, chip, memory, stacks)
        found += [replace_fields(card, index=len(found) + stack) for stack in range(stacks)]
        if memory is None:
            notes.append(f"{found[-1].name}: this version of its driver does not report its memory")
    to_host = (make_host_link(card.index, card.pcie) for card in found)
    links = tuple(link for link in to_host if link is not None)
    return FoundAccelerators(accelerators=tuple(found), links=links, notes=tuple(notes))


def make_intel_accelerator(device: Path, chip: int | None, memory: int | None, stacks: int = 1) -> Accelerator:
    """One of the GPUs of a card."""
    about, free = read_uevent(device), read_free_memory(device)
    clocks = sorted(device.glob("tile0/gt0/freq0")) or sorted(device.glob("drm/card*/gt/gt0"))
    clock = clocks[0] if clocks else device
    return Accelerator(
        name=NAMES.get(chip or 0, f"Intel GPU {read_word(device / 'device') or ''}".strip()),
        vendor="intel",
        index=0,
        pci_address=about.get("PCI_SLOT_NAME"),
        memory_bytes=memory and memory // stacks,
        free_bytes=free and free // stacks,
        driver_version=about.get("DRIVER"),
        sm_clock_mhz=read_number(clock / "act_freq") or read_number(clock / "rps_act_freq_mhz"),
        max_sm_clock_mhz=read_number(clock / "max_freq") or read_number(clock / "rps_max_freq_mhz"),
        pcie=read_pcie(device),
        numa_node=read_numa_node(device),
    )


def read_own_memory(device: Path) -> int | None:
    """The card's memory. xe has a file per tile, the data-center i915 one per card."""
    tiles = [read_number(file) for file in sorted(device.glob("tile*/physical_vram_size_bytes"))]
    whole = [read_number(file) for file in sorted(device.glob("drm/card*/lmem_total_bytes"))]
    return sum(tile or 0 for tile in tiles) or next((size for size in whole if size), None)


def read_free_memory(device: Path) -> int | None:
    """Only the data-center i915 reports it."""
    files = sorted(device.glob("drm/card*/lmem_avail_bytes"))
    return read_number(files[0]) if files else None


def parse_device_number(text: str | None) -> int | None:
    """`0x56a0` as a number."""
    try:
        return int(text or "", 16)
    except ValueError:
        return None
