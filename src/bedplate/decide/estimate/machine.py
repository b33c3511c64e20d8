"""The rates and links of a machine that estimates use, by the chip's architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from bedplate.errors import UsageError
from bedplate.facts.chips import Chip, find_chip, load_chips
from bedplate.values import Accelerator, Cpu, Figure, Hardware, Link, replace_fields

# A streaming kernel reaches about this share of the data sheet's bandwidth. Fitted efficiencies refer to the data
# sheet, so a measured value is converted to a data sheet value.
MEASURED_SHARE = 0.92
# A measurement below this share of the data sheet means that the machine differs: fewer channels, a power cap.
TRUSTED_SHARE = 0.8
# Operations of one core per cycle with 8-bit weights (multiply and add count as two), by the widest dot product of its
# instruction sets. First the peak, two issued per cycle: vendors' optimisation guides; clocks are typical ones of all
# cores. Then what kernels for 4-bit weights reach: they dequantize and scale as much as they multiply, so sets that
# multiply four times as much are only 50% faster. Published prompt speeds of llama.cpp over cores and clocks
# (benchmarks/score/more/cpus.csv): 26 on Skylake, 22 on Zen 2, 28 to 36 with 512-bit dot products, 25 to 38 on Neoverse
# V2. With AMX twice as much (ggml-org/llama.cpp, pull request 8998), without dot products 40 % (docs/tune.md).
CORE_OPS_PER_CYCLE = (
    ("amx_int8", 2048.0, 64.0), ("avx512_vnni", 256.0, 32.0), ("avx_vnni", 128.0, 26.0), ("avx512f", 128.0, 28.0),
    ("avx2", 64.0, 24.0), ("i8mm", 256.0, 32.0), ("dotprod", 128.0, 24.0), ("neon", 32.0, 10.0), ("avx", 32.0, 12.0),
    ("rvv", 64.0, 16.0),
)  # fmt: skip
PLAIN_OPS_PER_CYCLE = (16.0, 4.0)
"""Peak and reached operations without any of these sets."""
DOT_PRODUCT_OPS_PER_CYCLE = 24.0
"""Reached operations from which on a set has dot products. With fewer, dequantizing takes more instructions, too."""
HALF_SHARE = 0.4
"""Share of the reached rate with 16-bit weights, which are multiplied as 32-bit numbers."""
# Assumed for a processor with unknown instruction sets: all processors of the last ten years have these.
USUAL_SETS = {"x86": ("avx2",), "arm": ("neon",)}
# 32-bit lanes of one multiprocessor or compute unit, by architecture; 128 where none is listed (vendors' whitepapers).
LANES = {"volta": 64, "turing": 64, "ampere-dc": 64, "rdna2": 64}
# Operations of one multiprocessor per cycle with warp-wide 16-bit matrix instructions, 16-bit accumulation. The higher
# rates of Hopper and data-centre Blackwell need instructions for groups of warps, which portable kernels do not use.
PLAIN_OPS_PER_CYCLE_16 = {
    "volta": 1024, "turing": 1024, "ampere-dc": 2048, "ampere": 1024, "ada": 1024, "hopper": 1024,
    "blackwell-dc": 1024, "blackwell": 1024,
}  # fmt: skip
# Apple's GPUs since M3 issue floating-point and integer operations in parallel (Apple, "Explore GPU advancements in M3
# and A17 Pro", 2023). Dequantizing weights uses both equally, multiplying matrices in part.
APPLE_SIDE_BY_SIDE, APPLE_SIDE_BY_SIDE_MATRIX = 1.5, 1.2
# 16-bit operations per joule that portable matrix kernels sustain. Cards run below their highest clock when they
# multiply matrices: published prompt speeds of cards of one generation follow their power limits, not their peaks.
OPS_PER_JOULE = {
    "pascal": 0.1e12, "volta": 0.4e12, "turing": 0.3e12, "ampere-dc": 0.75e12, "ampere": 0.4e12, "ada": 0.65e12,
    "hopper": 1.0e12, "blackwell-dc": 1.2e12, "blackwell": 0.75e12, "rdna2": 0.15e12, "rdna3": 0.3e12, "rdna4": 0.6e12,
}  # fmt: skip
SHARED_CPU_BANDWIDTH = 0.6
"""Share of unified memory bandwidth that all CPU cores together reach: their link to it is narrower than the GPU's. Two
dies of Strix Halo read 32 bytes per cycle each, 128 of 256 GB/s; the cores of an M1 Max were measured at 243 of 400."""
CORE_HZ = {"server": 2.6e9, "desktop": 3.6e9, "small": 2.0e9}
SMALL_CORES = ("Intel N", "Atom", "Celeron", "Raspberry", "Rockchip", "Cortex-A", "GB10")
"""Words in the names of low-power processors, or of those with low-power cores: threads that share a step evenly wait
for the slowest core."""
SMALL_UNITS = 0.5
"""Vector rate of low-power cores relative to other cores."""
NARROW_CORES = ("Neoverse-N1", "Graviton2", "Altra")
"""Words in the names of server processors whose cores have two 128-bit vector units; later ones have twice as much
(Arm, Neoverse N1 and V1 software optimization guides)."""
NVIDIA_FAMILIES = (
    ((6, 1), "pascal"), ((7, 0), "volta"), ((7, 5), "turing"), ((8, 0), "ampere-dc"), ((8, 6), "ampere"),
    ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "blackwell-dc"), ((11, 0), "blackwell"), ((12, 0), "blackwell"),
)  # fmt: skip
GFX_FAMILIES = (
    ("gfx95", "cdna"), ("gfx94", "cdna"), ("gfx90", "cdna"), ("gfx12", "rdna4"), ("gfx115", "rdna3"),
    ("gfx11", "rdna3"), ("gfx10", "rdna2"),
)  # fmt: skip


class MachineRates(NamedTuple):
    """One kind of device, the number of devices, and the links between them."""

    name: str
    vendor: str
    family: str
    """The architecture: ampere, hopper, rdna3, apple, x86, arm …"""
    kind: str
    """gpu or cpu."""
    devices: int
    bandwidth_bytes_s: float
    """Memory bandwidth of one device by its data sheet."""
    ops_s: Mapping[str, float]
    """Dense operations per second of one device by data type; for a missing type, it has no units."""
    memory_bytes: int | None
    unified: bool
    consumer: bool
    peer_bytes_s: float | None
    """Bandwidth between two devices of one node, one direction; `None`: unknown."""
    peer_kind: str
    """nvlink, xgmi, pcie or none."""
    per_node: int
    network_bytes_s: float | None
    """Bandwidth of one node to other nodes, one direction."""
    host_bytes_s: float | None
    """Bandwidth of the host's RAM."""
    host_link_bytes_s: float | None
    """Bandwidth between host and device, one direction."""
    cores: int | None
    """CPU cores that compute in parallel."""
    core_hz: float = 0.0
    """Cycles per second of all its multiprocessors, compute units or cores together."""
    plain_ops_s: float = 0.0
    """16-bit matrix rate with instructions of the previous generation, which portable kernels use; data sheets do not
    state it. For a CPU, the rate that kernels for 4-bit weights reach."""

    def rate(self, *types: str) -> float | None:
        """The rate of the first of `types` that the device has units for."""
        return next((self.ops_s[name] for name in types if name in self.ops_s), None)


class _Memo:
    """A small cache by object identity: hashing a machine with many links takes longer than computing the result."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.held: dict[int, tuple[object, MachineRates]] = {}

    def get(self, owner: object) -> MachineRates | None:
        found = self.held.get(id(owner))
        return found[1] if found is not None and found[0] is owner else None

    def put(self, owner: object, value: MachineRates) -> MachineRates:
        if len(self.held) >= self.most:
            self.held.clear()
        self.held[id(owner)] = (owner, value)
        return value


_machines = _Memo()
_hosts = _Memo()
_pipelines = _Memo()


def get_machine_rates(hardware: Hardware) -> MachineRates:
    """The accelerators of a machine, or its CPU if it has none."""
    return _machines.get(hardware) or _machines.put(hardware, _compute_rates(hardware))


def _compute_rates(hardware: Hardware) -> MachineRates:
    if not hardware.accelerators:
        return make_cpu_rates(hardware.cpu, hardware.memory.bandwidth_bytes_s)
    cards = hardware.accelerators
    card = _find_slowest(cards)
    chip = _find_card_chip(card)
    between = [link for link in hardware.links if "host" not in (link.a, link.b)]
    near = [link for link in between if link.kind != "network"]
    fastest = max(near, key=lambda link: _get_value(link.bandwidth_bytes_s) or 0.0, default=None)
    across = next((link for link in between if link.kind == "network"), None)
    hosts = [link for link in hardware.links if "host" in (link.a, link.b)]
    to_host = min(hosts, key=lambda link: _get_value(link.bandwidth_bytes_s) or math.inf, default=None)
    kind = get_family(chip) if chip else _get_family_by_driver(card)
    bandwidth = _get_bandwidth(card.bandwidth_bytes_s, chip)
    ops = _add_measured_ops(hardware, card, dict(_get_ops(chip)) if chip else {}) or dict(
        _estimate_ops(kind, bandwidth)
    )
    return MachineRates(
        name=card.name,
        vendor=card.vendor,
        family=kind,
        kind="gpu",
        devices=len(cards),
        bandwidth_bytes_s=bandwidth,
        ops_s=MappingProxyType(ops),
        memory_bytes=card.memory_bytes,
        unified=card.unified_memory,
        consumer=chip is None or chip.kind not in ("datacenter", "accelerator"),
        peer_bytes_s=_get_value(fastest.bandwidth_bytes_s) if fastest else None,
        peer_kind=fastest.kind if fastest else "none",
        per_node=_count_per_node(len(cards), across is not None, near),
        network_bytes_s=_get_value(across.bandwidth_bytes_s) if across else None,
        host_bytes_s=_get_host_bandwidth(hardware),
        host_link_bytes_s=_get_value(to_host.bandwidth_bytes_s) if to_host else None,
        cores=hardware.cpu.allowed_physical_cores,
        core_hz=_compute_core_hz(kind, chip) if chip else 0.0,
        plain_ops_s=_compute_plain_ops(kind, chip) if chip else ops.get("fp16", 0.0),
    )


def make_chip_rates(chip: Chip, devices: int = 1, *, threads: int | None = None) -> MachineRates:
    """A machine with `devices` of these chips and the vendor's links between them."""
    if chip.kind == "cpu":
        cores = threads or chip.cores or 1
        return _build_cpu_rates(
            chip.name, chip.arch or "x86_64", chip.instruction_sets, cores, _get_cpu_bandwidth(chip), chip
        )
    link = chip.link if chip.link is not None and not chip.link.optional else None
    peers = max(1, link.domain - 1) if link is not None and link.topology == "mesh" else 1
    peer = link.gb_s * 1e9 / peers if link is not None else chip.pcie_bytes_s
    switched = link is not None and link.topology != "bridge"
    return MachineRates(
        name=chip.name,
        vendor=chip.vendor,
        family=get_family(chip),
        kind="gpu",
        devices=devices,
        bandwidth_bytes_s=chip.bandwidth_bytes_s,
        ops_s=_get_ops(chip),
        memory_bytes=chip.memory_bytes,
        unified=chip.unified,
        consumer=chip.kind not in ("datacenter", "accelerator"),
        peer_bytes_s=peer if devices > 1 else None,
        peer_kind=(link.kind if link is not None else "pcie") if devices > 1 else "none",
        per_node=min(devices, max(8, link.domain if link is not None and switched else 8)),
        network_bytes_s=chip.network_gb_s * 1e9 if chip.network_gb_s else None,
        host_bytes_s=chip.bandwidth_bytes_s if chip.unified else None,
        host_link_bytes_s=chip.host_link_gb_s * 1e9 if chip.host_link_gb_s else chip.pcie_bytes_s,
        cores=chip.cores,
        core_hz=_compute_core_hz(get_family(chip), chip),
        plain_ops_s=_compute_plain_ops(get_family(chip), chip),
    )


def make_cpu_rates(cpu: Cpu, bandwidth: Figure | None) -> MachineRates:
    """The CPU as the device that computes."""
    chip = _look_up_chip(cpu.name, None)
    if chip is not None and chip.kind != "cpu":
        chip = None
    sockets = cpu.sockets or 1
    sheet = _get_cpu_bandwidth(chip) * sockets if chip else None
    if bandwidth is not None and bandwidth.basis != "measured" and chip is not None and _shares_memory(chip):
        bandwidth = None
    rate = _choose_bandwidth(bandwidth, sheet)
    sets = cpu.instruction_sets or (chip.instruction_sets if chip else ())
    return _build_cpu_rates(cpu.name, cpu.arch, sets, cpu.allowed_physical_cores, rate, chip)


def _shares_memory(chip: Chip) -> bool:
    """Whether a CPU shares wide memory with a GPU."""
    return (chip.memory_type or "").startswith("LPDDR") and (chip.memory_bits or 0) >= 256


def _get_cpu_bandwidth(chip: Chip) -> float:
    return chip.bandwidth_bytes_s * (SHARED_CPU_BANDWIDTH if _shares_memory(chip) else 1.0)


def get_host_rates(hardware: Hardware) -> MachineRates:
    """The CPU of a machine, with or without accelerators; it computes the layers that stay on the host."""
    return _hosts.get(hardware) or _hosts.put(hardware, make_cpu_rates(hardware.cpu, hardware.memory.bandwidth_bytes_s))


def get_family(chip: Chip) -> str:
    if chip.kind == "cpu":
        return _get_arch_family(chip.arch or "")
    if chip.vendor == "apple":
        return "apple"
    if chip.capability is not None:
        major, _, minor = chip.capability.partition(".")
        return _get_nvidia_family((int(major), int(minor)))
    if chip.gfx is not None:
        return next((name for prefix, name in GFX_FAMILIES if chip.gfx.startswith(prefix)), "rdna2")
    return {"intel": "xe", "amd": "rdna3"}.get(chip.vendor, "other")


def _get_nvidia_family(capability: tuple[int, int]) -> str:
    return next((name for least, name in reversed(NVIDIA_FAMILIES) if capability >= least), "pascal")


def _get_family_by_driver(card: Accelerator) -> str:
    """The family of an unlisted card, from the architecture that its driver reports."""
    if card.vendor == "apple":
        return "apple"
    if card.compute_capability:
        major, _, minor = card.compute_capability.partition(".")
        if major.isdigit() and minor.isdigit():
            return _get_nvidia_family((int(major), int(minor)))
    gfx = card.architecture or ""
    return next((name for prefix, name in GFX_FAMILIES if gfx.startswith(prefix)), "other")


def _get_arch_family(arch: str) -> str:
    if arch.startswith(("arm", "aarch")):
        return "arm"
    return "riscv" if arch.startswith("riscv") else "x86"


def _build_cpu_rates(
    name: str, arch: str, sets: tuple[str, ...], cores: int, bandwidth_bytes_s: float, chip: Chip | None
) -> MachineRates:
    found = {word.replace(".", "_") for word in sets or USUAL_SETS.get(_get_arch_family(arch), ())}
    peak, reached = next((ops for word, *ops in CORE_OPS_PER_CYCLE if word in found), PLAIN_OPS_PER_CYCLE)
    server = any(word in name for word in ("Xeon", "EPYC", "Graviton", "Altra", "Ampere", "Grace", "Neoverse"))
    small = arch.startswith("riscv") or any(word in name for word in SMALL_CORES)
    narrow = any(word in name for word in NARROW_CORES)
    kind = "server" if server else "small" if small else "desktop"
    clock = CORE_HZ[kind]
    ops = {"int8": cores * peak * clock, "fp32": cores * min(peak, 64.0) / 2 * clock}
    return MachineRates(
        name=name, vendor=chip.vendor if chip else "other", family=_get_arch_family(arch), kind="cpu", devices=1,
        bandwidth_bytes_s=bandwidth_bytes_s, ops_s=MappingProxyType(ops), memory_bytes=None, unified=True,
        consumer=not server, peer_bytes_s=None, peer_kind="none", per_node=1, network_bytes_s=None,
        host_bytes_s=bandwidth_bytes_s, host_link_bytes_s=None, cores=cores,
        core_hz=cores * clock * min(1.0, reached / DOT_PRODUCT_OPS_PER_CYCLE) * (SMALL_UNITS if narrow else 1.0),
        plain_ops_s=cores * reached * clock * (SMALL_UNITS if kind == "small" or narrow else 1.0),
    )  # fmt: skip


def _get_ops(chip: Chip) -> Mapping[str, float]:
    """The data sheet's rates, or those of similar chips if the vendor states none."""
    return _read_sheet_ops(chip) or _estimate_ops(get_family(chip), chip.bandwidth_bytes_s)


def _estimate_ops(kind: str, bandwidth_bytes_s: float) -> Mapping[str, float]:
    """Rates from the median operations per byte of a chip family, or of all chips if the family is unknown."""
    return MappingProxyType({name: ratio * bandwidth_bytes_s for name, ratio in _compute_ops_per_byte(kind).items()})


@lru_cache(maxsize=32)
def _compute_ops_per_byte(kind: str) -> dict[str, float]:
    known = [(chip, rates) for chip in load_chips().values() if chip.kind != "cpu" and (rates := _read_sheet_ops(chip))]
    alike = [one for one in known if get_family(one[0]) == kind] or known
    found = {}
    for name in ("fp16", "fp32"):
        ratios = sorted(rates[name] / chip.bandwidth_bytes_s for chip, rates in alike if name in rates)
        if ratios:
            found[name] = ratios[len(ratios) // 2]
    return found


def _read_sheet_ops(chip: Chip) -> Mapping[str, float]:
    """The data sheet's rates; a missing rate is derived from another one of the same units."""
    rates = {str(name): tera * 1e12 for name, tera in chip.dense_tera_ops.items()}
    if "fp16" not in rates:
        known = next((rates[name] / ratio for name, ratio in (("bf16", 1), ("fp8", 2), ("fp4", 4)) if name in rates), 0)
        if known or "fp32" in rates:
            rates["fp16"] = known or rates["fp32"]
    if "bf16" not in rates and "fp16" in rates and "bf16" in chip.features:
        rates["bf16"] = rates["fp16"]
    return MappingProxyType(rates)


def _compute_core_hz(kind: str, chip: Chip) -> float:
    """Computed from the 32-bit rate, which is lanes times clock, or without it from the 16-bit rate."""
    rates = _get_ops(chip)
    rate = rates.get("fp32") or rates.get("fp16", 0.0) / 4
    if kind == "apple" and _parse_apple_generation(chip) >= 3:
        rate *= APPLE_SIDE_BY_SIDE
    return rate / (2 * LANES.get(kind, 128))


def _parse_apple_generation(chip: Chip) -> int:
    found = re.search(r"\bM(\d)", chip.name)
    return int(found[1]) if found else 1


def _compute_plain_ops(kind: str, chip: Chip) -> float:
    rates = _get_ops(chip)
    sheet = rates.get("fp16") or rates.get("fp32", 0.0)
    per_cycle = PLAIN_OPS_PER_CYCLE_16.get(kind)
    if kind == "apple" and _parse_apple_generation(chip) >= 3:
        return sheet * APPLE_SIDE_BY_SIDE_MATRIX
    peak = sheet
    if per_cycle is not None:
        # GeForce cards accumulate in 16 bits at twice the data sheet's 32-bit rate; other cards do not.
        peak = min(per_cycle * _compute_core_hz(kind, chip), sheet * (2 if chip.kind == "consumer" else 1))
    if not peak or not chip.watts or kind not in OPS_PER_JOULE:
        return peak
    powered = OPS_PER_JOULE[kind] * chip.watts
    return float((peak**-2 + powered**-2) ** -0.5)


def _find_slowest(cards: Sequence[Accelerator]) -> Accelerator:
    """The card that the others wait for."""
    first = cards[0]
    if all(card.name == first.name for card in cards):
        return first
    return min(cards, key=lambda card: _get_bandwidth(card.bandwidth_bytes_s, _find_card_chip(card)))


def get_pipeline_rates(hardware: Hardware) -> MachineRates:
    """The rates of a pipeline whose cards compute one after the other, each with layers in proportion to its memory."""
    return _pipelines.get(hardware) or _pipelines.put(hardware, _blend_rates(hardware))


def _blend_rates(hardware: Hardware) -> MachineRates:
    cards, slowest = hardware.accelerators, get_machine_rates(hardware)
    sizes = [card.free_bytes or card.memory_bytes or 0 for card in cards]
    if len({card.name for card in cards}) < 2 or not all(sizes):
        return slowest
    each = [_compute_rates(replace_fields(hardware, accelerators=(card,))) for card in cards]
    shares = [size / sum(sizes) for size in sizes]

    def blend(rates: Sequence[float]) -> float:
        return 1 / sum(share / rate for share, rate in zip(shares, rates, strict=True)) if all(rates) else 0.0

    common = [name for name in slowest.ops_s if all(name in one.ops_s for one in each)]
    return slowest._replace(
        bandwidth_bytes_s=blend([one.bandwidth_bytes_s for one in each]),
        ops_s=MappingProxyType({name: blend([one.ops_s[name] for one in each]) for name in common}),
        core_hz=blend([one.core_hz for one in each]),
        plain_ops_s=blend([one.plain_ops_s for one in each]),
    )


def _add_measured_ops(hardware: Hardware, card: Accelerator, sheet: dict[str, float]) -> dict[str, float]:
    """The data sheet's rates, completed by rates that were measured on this machine."""
    if hardware.measured is not None:
        for found in hardware.measured.matrix:
            if found.device == str(card.index):
                sheet.setdefault(found.data_type, found.operations_s.value)
    return sheet


def _find_card_chip(card: Accelerator) -> Chip | None:
    return _look_up_chip(card.name, card.memory_bytes)


@lru_cache(maxsize=256)
def _look_up_chip(name: str, memory_bytes: int | None) -> Chip | None:
    try:
        return find_chip(name, guess=True, memory_bytes=memory_bytes).chip
    except UsageError:
        return None


def _get_bandwidth(figure: Figure | None, chip: Chip | None) -> float:
    return _choose_bandwidth(figure, chip.bandwidth_bytes_s if chip else None)


def _choose_bandwidth(figure: Figure | None, sheet: float | None) -> float:
    """The data sheet's bandwidth, unless a measurement shows that this machine differs."""
    if figure is not None and figure.basis == "measured":
        as_sheet = figure.value / MEASURED_SHARE
        return as_sheet if sheet is None or as_sheet < TRUSTED_SHARE * sheet else sheet
    if figure is not None:
        return figure.value
    return sheet or 0.0


def _get_host_bandwidth(hardware: Hardware) -> float | None:
    figure = hardware.memory.bandwidth_bytes_s
    if figure is not None:
        return figure.value
    chip = _look_up_chip(hardware.cpu.name, None)
    return chip.bandwidth_bytes_s * (hardware.cpu.sockets or 1) if chip is not None and chip.kind == "cpu" else None


def _count_per_node(cards: int, several_nodes: bool, near: list[Link]) -> int:
    if not several_nodes:
        return cards
    # Each node lists all pairs of its cards: k·(k-1)/2 pairs for k cards.
    for size in range(min(cards, 256), 1, -1):
        if cards % size == 0 and len(near) == (cards // size) * size * (size - 1) // 2:
            return size
    return min(8, cards)


def _get_value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value
