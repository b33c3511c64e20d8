"""AMD GPUs, from sysfs and the kernel's compute topology (KFD). AMD's library or programs add names and more."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bedplate.facts.cgroup import read_text
from bedplate.facts.devices import (
    Ask,
    FoundAccelerators,
    ask_program,
    list_cards,
    make_host_link,
    parse_decimal,
    parse_json,
    parse_natural,
    read_numa_node,
    read_number,
    read_pcie,
    read_uevent,
    read_word,
    select_visible,
    validate_lanes,
)
from bedplate.values import Accelerator, Figure, GpuProcess, Link, Pcie

AMD_PCI_VENDOR = "0x1002"
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
# The kernel's HSA_IOLINKTYPE_…: the type of a link in the topology.
KFD_PCIE, KFD_XGMI = 2, 11
XGMI_HOP_WEIGHT = 15
# Graphics inside a CPU, which uses the machine's memory (LLVM's list of AMDGPU processors calls them APU).
APU_TARGETS = frozenset(
    ["gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103", "gfx1150",
     "gfx1151", "gfx1152", "gfx1153"]
)  # fmt: skip
MI300A_DEVICE = 0x74A0


@dataclass(frozen=True, kw_only=True, slots=True)
class KfdLink:
    kind: int
    to: int
    weight: int | None = None
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KfdNode:
    """One GPU, or one part of a partitioned GPU, as the compute driver lists it."""

    number: int
    target: str | None = None
    compute_units: int | None = None
    pci_address: str | None = None
    device_id: int | None = None
    memory_bytes: int | None = None
    max_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    unified: bool = False
    links: tuple[KfdLink, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AmdFacts:
    """Facts about one GPU from AMD's library or one of its programs."""

    name: str | None = None
    pci_address: str | None = None
    target: str | None = None
    compute_units: int | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    driver_version: str | None = None
    power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    pcie: Pcie | None = None
    processes: tuple[GpuProcess, ...] = field(default=())


def parse_properties(text: str | None) -> dict[str, int]:
    """A KFD `properties` file: a name and a number on each line."""
    found = {}
    for line in (text or "").splitlines():
        if match := re.fullmatch(r"\s*([a-z0-9_]{1,64}) ([0-9]{1,20})\s*", line):
            found[match[1]] = int(match[2])
    return found


def make_kfd_node(
    place: int, properties: Mapping[str, int], banks: Sequence[Mapping[str, int]], links: Sequence[Mapping[str, int]]
) -> KfdNode | None:
    """The GPU of a topology node; `None` for a CPU."""
    simds = properties.get("simd_count", 0)
    if not simds:
        return None
    target = format_gfx_target(properties.get("gfx_target_version", 0))
    device = properties.get("device_id")
    # Heap types 1 and 2 are the GPU's own memory (visible to the CPU or not); 0 is system memory.
    own = [bank for bank in banks if bank.get("heap_type") in (1, 2)]
    return KfdNode(
        number=place,
        target=target,
        compute_units=simds // (properties.get("simd_per_cu") or 4) or None,
        pci_address=format_kfd_address(properties.get("domain", 0), properties.get("location_id")),
        device_id=device,
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in own) or None,
        max_clock_mhz=properties.get("max_engine_clk_fcompute") or None,
        max_memory_clock_mhz=max((bank.get("mem_clk_max", 0) for bank in own), default=0) or None,
        unified=target in APU_TARGETS or device == MI300A_DEVICE or properties.get("cpu_cores_count", 0) > 0,
        links=tuple(
            KfdLink(
                kind=link.get("type", 0),
                to=link["node_to"],
                weight=link.get("weight"),
                bandwidth_bytes_s=link.get("max_bandwidth", 0) * 1e6 or None,
            )
            for link in links
            if "node_to" in link
        ),
    )


def format_gfx_target(version: int) -> str | None:
    """90402 is gfx942, 110501 is gfx1151: two decimal digits each for minor and stepping, printed in base 16."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}" if 0 < major < 100 and minor < 16 and stepping < 16 else None


def format_kfd_address(domain: int, location: int | None) -> str | None:
    if not location or location > 0xFFFF or domain > 0xFFFF:
        return None
    return f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def parse_rocm_smi(text: str | None) -> tuple[AmdFacts, ...]:
    """Parse `rocm-smi … --json`. Its field names differ between versions."""
    answer = parse_json(text)
    if not isinstance(answer, dict):
        return ()
    system = answer.get("system")
    driver = system.get("Driver version") if isinstance(system, dict) else None
    cards = [
        (parse_natural(key[4:]), card)
        for key, card in answer.items()
        if key.startswith("card") and isinstance(card, dict)
    ]
    found = []
    for _, card in sorted(((place, card) for place, card in cards if place is not None), key=lambda pair: pair[0]):
        series, name = (
            _find_word(card, "Card Series", "Card series"),
            _find_word(card, "Device Name", "Card Model", "Card model"),
        )
        found.append(
            AmdFacts(
                # In older versions one of the two fields holds only the device number.
                name=next((text for text in (series, name) if text and not text.startswith("0x")), None),
                pci_address=_parse_address(_find_word(card, "PCI Bus")),
                target=_parse_target(_find_word(card, "GFX Version")),
                total_bytes=parse_natural(card.get("VRAM Total Memory (B)")),
                used_bytes=parse_natural(card.get("VRAM Total Used Memory (B)")),
                driver_version=driver if isinstance(driver, str) else None,
                power_limit_w=parse_decimal(card.get("Max Graphics Package Power (W)")),
            )
        )
    return tuple(found)


def parse_amd_smi(text: str | None) -> tuple[AmdFacts, ...]:
    """Parse `amd-smi static --json`: a list, which newer versions wrap in an object."""
    answer = parse_json(text)
    if isinstance(answer, dict):
        answer = answer.get("gpu_data", [answer] if "asic" in answer else [])
    gpus = [gpu for gpu in answer if isinstance(gpu, dict)] if isinstance(answer, list) else []
    return tuple(_parse_amd_smi_gpu(gpu) for gpu in gpus)


def parse_clock_levels(text: str | None) -> tuple[int | None, int | None]:
    """The current and the highest clock of `pp_dpm_sclk` in MHz, from lines such as `1: 1700Mhz *`."""
    levels = re.findall(r"^\s*\w{1,3}: ([0-9]{1,6})M[Hh]z( \*)?", text or "", re.MULTILINE)
    now = next((int(clock) for clock, star in levels if star), None)
    return now, max((int(clock) for clock, _ in levels), default=None)


def ask_amdsmi(amdsmi: Any) -> tuple[AmdFacts, ...]:
    """Ask AMD's Python library. Fields that a version or a card does not support are left out."""

    def ask(question: str, *about: Any) -> Any:
        asked = getattr(amdsmi, question, None)
        try:
            return asked(*about) if asked else None
        except (amdsmi.AmdSmiException, KeyError, TypeError, AttributeError):
            return None

    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return ()
    try:
        found = []
        vram = getattr(getattr(amdsmi, "AmdSmiMemoryType", None), "VRAM", None)
        for handle in ask("amdsmi_get_processor_handles") or ():
            asic, driver = (
                ask("amdsmi_get_gpu_asic_info", handle) or {},
                ask("amdsmi_get_gpu_driver_info", handle) or {},
            )
            cap = ask("amdsmi_get_power_cap_info", handle) or {}
            found.append(
                AmdFacts(
                    name=_find_word(asic, "market_name"),
                    pci_address=_parse_address(ask("amdsmi_get_gpu_device_bdf", handle)),
                    target=_parse_target(_find_word(asic, "target_graphics_version")),
                    compute_units=parse_natural(asic.get("num_compute_units")),
                    total_bytes=parse_natural(ask("amdsmi_get_gpu_memory_total", handle, vram)),
                    used_bytes=parse_natural(ask("amdsmi_get_gpu_memory_usage", handle, vram)),
                    driver_version=_find_word(driver, "driver_version"),
                    power_limit_w=_parse_microwatts(cap.get("power_cap")),
                    max_power_limit_w=_parse_microwatts(cap.get("max_power_cap")),
                    processes=_parse_processes(ask("amdsmi_get_gpu_process_list", handle)),
                )
            )
        return tuple(found)
    finally:
        ask("amdsmi_shut_down")


def read_amd(root: Path = Path("/"), ask: Ask = ask_program) -> FoundAccelerators:
    """AMD's GPUs. Most facts come from kernel files; the library or a program is only asked if there is a GPU."""
    devices = list_cards(root, AMD_PCI_VENDOR)
    nodes = read_kfd(root)
    if not devices and not nodes:
        return FoundAccelerators()
    known = _import_and_ask() or parse_amd_smi(ask(["amd-smi", "static", "--json"]))
    if not known:
        options = ("--showproductname", "--showmeminfo", "vram", "--showbus", "--showdriverversion", "--showmaxpower")
        known = parse_rocm_smi(ask(["rocm-smi", *options, "--json"]))
    return combine_amd_sources(devices, nodes, known, root, os.environ)


def combine_amd_sources(
    devices: Sequence[Path],
    nodes: Sequence[KfdNode],
    known: Sequence[AmdFacts],
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
) -> FoundAccelerators:
    """One accelerator per GPU of the compute driver; without that driver, one per card."""
    by_board = {
        _strip_function_number(read_uevent(device).get("PCI_SLOT_NAME", "").lower()): device for device in devices
    }
    pairs: list[tuple[KfdNode | None, Path | None]] = [
        (node, by_board.get(_strip_function_number(node.pci_address)) or _get_only_device(devices, nodes))
        for node in nodes
    ] or [(None, device) for device in devices]
    parts = Counter(_strip_function_number(node.pci_address) for node in nodes if node.pci_address)
    found = []
    for index, (node, device) in enumerate(pairs):
        facts = _find_matching_facts(known, node, device, index, len(pairs))
        partition = node is not None and parts[_strip_function_number(node.pci_address)] > 1
        found.append(make_amd_accelerator(index, device, node, facts, root, partition=partition))
    notes = []
    if devices and not nodes:
        notes.append(
            "AMD's compute driver (KFD) lists no GPU, so ROCm cannot use the card: "
            "check that /dev/kfd exists and is accessible"
        )
    environment = environment or {}
    places: tuple[int, ...] = tuple(range(len(found)))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = environment.get(variable)
        kept = select_visible([found[place].uuid for place in places], value)
        if len(kept) < len(places):
            notes.append(f"{variable}={value} hides {len(places) - len(kept)} of {len(places)} AMD GPUs")
        places = tuple(places[place] for place in kept)
    return FoundAccelerators(
        accelerators=tuple(found[place] for place in places),
        links=_make_links(nodes, [found[place] for place in places]),
        notes=tuple(notes),
    )


def make_amd_accelerator(
    index: int,
    device: Path | None,
    node: KfdNode | None,
    facts: AmdFacts,
    root: Path = Path("/"),
    *,
    partition: bool = False,
) -> Accelerator:
    """Merge the three sources. Kernel files take precedence over programs."""
    node, device = node or KfdNode(number=-1), device or root / "nowhere"
    unified = node.unified or (node.target or facts.target) in APU_TARGETS
    total, used = read_number(device / "mem_info_vram_total"), read_number(device / "mem_info_vram_used")
    if unified and total is not None:
        # The memory that firmware reserves, plus what the driver may borrow from the rest.
        total += read_number(device / "mem_info_gtt_total") or 0
        used = used + (read_number(device / "mem_info_gtt_used") or 0) if used is not None else None
    if partition:
        total, used = node.memory_bytes, None
    total = total if total is not None else facts.total_bytes or node.memory_bytes
    used = used if used is not None or partition else facts.used_bytes
    clock, top_clock = parse_clock_levels(read_text(device / "pp_dpm_sclk"))
    memory_clock, top_memory_clock = parse_clock_levels(read_text(device / "pp_dpm_mclk"))
    chip = read_word(device / "device")
    limits = next(iter(sorted((device / "hwmon").glob("hwmon*"))), device)
    return Accelerator(
        name=facts.name or read_word(device / "product_name") or f"AMD GPU {chip or node.target or ''}".strip(),
        vendor="amd",
        index=index,
        pci_address=node.pci_address or read_uevent(device).get("PCI_SLOT_NAME") or facts.pci_address,
        architecture=node.target or facts.target,
        compute_units=node.compute_units or facts.compute_units,
        memory_bytes=total,
        free_bytes=max(0, total - used) if total is not None and used is not None else None,
        driver_version=read_word(root / "sys/module/amdgpu/version") or _drop_long_text(facts.driver_version),
        sm_clock_mhz=clock,
        max_sm_clock_mhz=top_clock or node.max_clock_mhz,
        memory_clock_mhz=memory_clock,
        max_memory_clock_mhz=top_memory_clock or node.max_memory_clock_mhz,
        power_limit_w=_parse_microwatts(read_number(limits / "power1_cap")) or facts.power_limit_w,
        max_power_limit_w=_parse_microwatts(read_number(limits / "power1_cap_max")) or facts.max_power_limit_w,
        pcie=read_pcie(device) or facts.pcie,
        numa_node=read_numa_node(device),
        unified_memory=unified,
        processes=facts.processes,
    )


def read_kfd(root: Path = Path("/")) -> tuple[KfdNode, ...]:
    """The GPUs of the compute topology. A container cannot read GPUs that it may not use; they are skipped."""
    found = []
    for folder in (root / KFD_NODES).glob("*"):
        place = parse_natural(folder.name)
        properties = parse_properties(read_text(folder / "properties"))
        if place is None or not properties.get("simd_count"):
            continue
        banks = [parse_properties(read_text(file)) for file in folder.glob("mem_banks/*/properties")]
        links = [parse_properties(read_text(file)) for file in folder.glob("*_links/*/properties")]
        if node := make_kfd_node(place, properties, banks, links):
            found.append(node)
    return tuple(sorted(found, key=lambda node: node.number))


def _make_links(nodes: Sequence[KfdNode], found: Sequence[Accelerator]) -> tuple[Link, ...]:
    """xGMI or PCIe links between GPUs, and each GPU's link to the CPU."""
    present = {card.index for card in found}
    places = {node.number: place for place, node in enumerate(nodes) if place in present}
    best: dict[tuple[int, int], KfdLink] = {}
    for node in nodes:
        for link in node.links:
            if node.number in places and link.to in places and places[node.number] < places[link.to]:
                ends = places[node.number], places[link.to]
                if link.kind == KFD_XGMI or (link.kind == KFD_PCIE and ends not in best):
                    best[ends] = link
    between = []
    for (one, other), link in sorted(best.items()):
        rate = link.bandwidth_bytes_s
        figure = rate and Figure(value=rate, low=rate, high=rate, basis="reported", source="the kernel's KFD topology")
        xgmi = link.kind == KFD_XGMI
        whole = xgmi and link.weight and link.weight % XGMI_HOP_WEIGHT == 0
        hops = link.weight // XGMI_HOP_WEIGHT if whole and link.weight else None
        between.append(
            Link(kind="xgmi" if xgmi else "pcie", a=str(one), b=str(other), hops=hops, bandwidth_bytes_s=figure or None)
        )
    to_host = (make_host_link(card.index, card.pcie) for card in found if not card.unified_memory)
    return (*between, *(link for link in to_host if link is not None))


def _import_and_ask() -> tuple[AmdFacts, ...]:
    try:
        amdsmi = import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # the last two are raised if its C library is missing
        return ()
    return ask_amdsmi(amdsmi)


def _parse_amd_smi_gpu(gpu: Mapping[str, Any]) -> AmdFacts:
    asic, bus, vram, limit, driver = (_get_section(gpu, name) for name in ("asic", "bus", "vram", "limit", "driver"))
    generation = re.fullmatch(r"Gen ([0-9])", _find_word(bus, "pcie_interface_version") or "")
    slot = Pcie(
        max_generation=int(generation[1]) if generation else None,
        max_width=validate_lanes(parse_natural(bus.get("max_pcie_width"))),
    )
    return AmdFacts(
        name=_find_word(asic, "market_name"),
        pci_address=_parse_address(_find_word(bus, "bdf")),
        target=_parse_target(_find_word(asic, "target_graphics_version")),
        compute_units=parse_natural(asic.get("num_compute_units")),
        total_bytes=_parse_size(vram.get("size")),
        driver_version=_find_word(driver, "version"),
        power_limit_w=parse_decimal(_get_section(limit, "socket_power").get("value")),
        max_power_limit_w=parse_decimal(_get_section(limit, "max_power").get("value")),
        pcie=None if slot == Pcie() else slot,
    )


def _parse_processes(listed: Any) -> tuple[GpuProcess, ...]:
    found = []
    for process in listed if isinstance(listed, list) else ():
        pid = parse_natural(process.get("pid")) if isinstance(process, dict) else None
        if pid and pid != os.getpid():
            used = parse_natural(_get_section(process, "memory_usage").get("vram_mem")) or parse_natural(
                process.get("mem")
            )
            found.append(GpuProcess(pid=pid, name=_find_word(process, "name"), bytes=used))
    return tuple(found)


def _find_matching_facts(
    known: Sequence[AmdFacts], node: KfdNode | None, device: Path | None, index: int, count: int
) -> AmdFacts:
    address = node.pci_address if node else read_uevent(device).get("PCI_SLOT_NAME", "").lower() if device else None
    for facts in known:
        if facts.pci_address is not None and facts.pci_address == address:
            return facts
    # Without addresses, programs list GPUs in the same order. If the counts differ, they cannot be matched.
    addressed = any(facts.pci_address for facts in known) and address
    return known[index] if len(known) == count and not addressed else AmdFacts()


def _strip_function_number(address: str | None) -> str:
    """A PCI address without its function number, which differs between the parts of a partitioned card."""
    return (address or "").rpartition(".")[0]


def _get_only_device(devices: Sequence[Path], nodes: Sequence[KfdNode]) -> Path | None:
    return devices[0] if len(devices) == len(nodes) == 1 else None


def _get_section(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _find_word(fields: Mapping[str, Any], *names: str) -> str | None:
    texts = (fields.get(name) for name in names)
    return next((text.strip() for text in texts if isinstance(text, str) and text.strip() not in ("", "N/A")), None)


def _parse_address(text: object) -> str | None:
    match = (
        re.fullmatch(r"\s*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s*", text.lower())
        if isinstance(text, str)
        else None
    )
    return match[1] if match else None


def _parse_target(text: str | None) -> str | None:
    return text if text and re.fullmatch(r"gfx[0-9a-f]{3,5}", text) else None


def _drop_long_text(text: str | None) -> str | None:
    """Some versions report all of /proc/version as the driver version."""
    return text if text and len(text) <= 40 else None


def _parse_size(size: Any) -> int | None:
    """`{"value": 65520, "unit": "MB"}`; amd-smi's MB are binary."""
    if not isinstance(size, dict):
        return None
    value = parse_natural(size.get("value"))
    shift = {"B": 0, "KB": 10, "MB": 20, "GB": 30}.get(str(size.get("unit")))
    return value << shift if value is not None and shift is not None and value < 1 << 40 else None


def _parse_microwatts(value: object) -> float | None:
    count = parse_natural(value)
    return count / 1e6 if count else None
