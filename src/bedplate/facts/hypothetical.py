"""Hypothetical hardware: the `hardware` section of an intent as a full Hardware record."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, cast, get_args

import msgspec

from bedplate.errors import UsageError
from bedplate.facts.apple import estimate_wired_limit
from bedplate.facts.chips import GIB, Chip, ChipLink, ChipMatch, estimate_memory_bandwidth, find_chip
from bedplate.facts.devices import make_host_link
from bedplate.facts.machines import NamedMachine, find_machine
from bedplate.values import Accelerator, Cpu, Figure, Hardware, Link, Memory
from bedplate.values.hardware import UNNAMED_CPU, OperatingSystem, Pcie, Vendor
from bedplate.values.intent import MOST_CARDS, MOST_CORES, MOST_NODE_CARDS, MOST_RAM_GB, DescribedMachine
from bedplate.values.record import Basis

FIELDS = DescribedMachine.__struct_fields__
LINK_KINDS = ("nvlink", "xgmi", "pcie")
ARCHES = ("x86_64", "arm64", "aarch64", "riscv64", "ppc64le", "s390x", "i686", "armv7l", "loongarch64")
SAME_ARCH = {"amd64": "x86_64", "x64": "x86_64", "x86-64": "x86_64", "arm": "aarch64"}
# Pairs grow with the square of a node's cards. In a larger fleet, the listed links stand for all nodes.
MOST_LINKED = 1_024
# RAM that the operating system of an idle machine uses, at most an eighth of it.
SYSTEM_BYTES = {"linux": 1 * GIB, "macos": 4 * GIB, "windows": 4 * GIB}
# Memory that the driver of an idle card uses. NVIDIA's ("Reserved" of `nvidia-smi -q`): 422 MiB of an RTX 3090, 556 of
# an L4, 571 of an A100 40GB, 454 of an H100, 616 of an H200. AMD's shows a similar figure as used.
DRIVER_BYTES, DRIVER_SHARE = 400 << 20, 0.0015
# AMD's firmware can assign up to 96 of 128 GB to the GPU (Variable Graphics Memory); Linux alone lends half of the RAM.
AMD_SHARE, AMD_LOW_SHARE = 3 / 4, 1 / 2
CORES_PER_CARD = 8
LEAST_RAM_BYTES = 16 * GIB
MOST_SOCKETS = 8
SOCKETED = ("Xeon", "EPYC", "Altra", "NVIDIA Grace", "Graviton4")
NETWORK_GBIT_S = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
NETWORK_PORTS = re.compile(r"\s*([0-9]{1,3})\s*[x×]\s*")
NETWORK_RATE = re.compile(
    r"([0-9]{1,5}(?:\.[0-9]{1,3})?)\s*-?(gbit/s|gbps|gb/s|gbit|gbe|gb|g)?(?![a-z0-9/])", re.IGNORECASE
)


def make_simulated_hardware(described: Mapping[str, Any]) -> Hardware:
    """The machine that an intent's `hardware` describes, or that `probe --json` saved."""
    if "schema" in described:
        return _read_saved(described)
    described, named = _resolve_named_machine(described)
    if len(parts := split_cards(described.get("accelerator"))) > 1:
        return _join_cards(described, parts)
    asked = _DescribedFields(described)
    ram_bytes = asked.get_bytes("ram_gb")
    system = asked.get_system()
    card = asked.find_chip_of("accelerator", ram_bytes)
    cpu = None if asked.get_text("cpu") is None else asked.find_cpu_chip_of(ram_bytes)
    if card is None and cpu is None and asked.get_text("cpu") is None:
        raise UsageError(
            "hardware: neither an accelerator nor a cpu is specified",
            hint="for example accelerator: H100 SXM, count: 8",
        )
    if card is not None and card.chip.kind == "cpu":
        if cpu is not None:
            raise UsageError(f"hardware.accelerator: {card.chip.name} is a CPU", hint="specify it as cpu")
        card, cpu = None, card
    if card is None and cpu is not None and cpu.chip.kind != "cpu":
        card, cpu = cpu, None
    return _add_notes(_assemble(asked, card, cpu, ram_bytes, system), named)


def _add_notes(hardware: Hardware, notes: Iterable[str]) -> Hardware:
    return msgspec.structs.replace(hardware, notes=(*notes, *hardware.notes))


def _resolve_named_machine(described: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The description with the fields of the machine that it names (p5.48xlarge, DGX H100), and what was assumed."""
    text = described.get("accelerator")
    found = find_machine(text) if isinstance(text, str) else None
    if found is None:
        return described, ()
    machine, machines = found
    if machine.accelerator is None:
        return _describe_cpu_machine(machine, machines, described)
    if described.get("count") is not None:
        raise UsageError(
            f"hardware.count: {machine.names[0]} is a whole machine", hint=f"accelerator: 2x {machine.names[0]}"
        )
    given = {name: value for name, value in described.items() if value is not None and name != "accelerator"}
    fields = machine.describe(machines) | given
    cards = f"{machine.count} x {machine.accelerator}, {machine.cores} cores, {machine.ram_gb:g} GiB RAM"
    cards += f" (cores and RAM of one of its {machine.hosts} hosts)" if machine.hosts > 1 else ""
    return fields, (f"{machine.names[0]}: {cards} each" if machines > 1 else f"{machine.names[0]}: {cards}",)


def _describe_cpu_machine(
    machine: NamedMachine, machines: int, described: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    name = machine.names[0]
    if machines > 1:
        raise UsageError(
            f"hardware.accelerator: {machines} x {name} have no accelerators, and engines on CPUs use one machine",
            hint=f"plan one {name}, and run several behind one gateway",
        )
    if described.get("count") is not None:
        raise UsageError("hardware.count: counts accelerators, and this machine has none", hint="leave it out")
    given = {key: value for key, value in described.items() if value is not None and key != "accelerator"}
    said = f"{name}: {machine.cores} cores of {machine.cpu}, {machine.ram_gb:g} GiB RAM"
    return machine.describe(1) | given, (said,)


def split_cards(named: object) -> list[str]:
    """The different cards of one machine: a list, or names with a plus between them."""
    if isinstance(named, list | tuple):
        if not named or not all(isinstance(one, str) and one.strip() for one in named):
            raise UsageError("hardware.accelerator: a list needs names", hint='for example ["2x RTX 3090", "RTX 4090"]')
        return [one.strip() for one in named]
    parts = [part.strip() for part in named.split("+")] if isinstance(named, str) else []
    if len(parts) < 2 or not all(parts):
        return []
    try:
        whole = find_chip(str(named))
    except UsageError:
        return parts
    return [] if "+" in whole.chip.name else parts  # a few names contain a plus


def _join_cards(described: Mapping[str, Any], parts: Sequence[str]) -> Hardware:
    """One machine with different cards, which PCIe connects."""
    for name in ("count", "gpus_per_node", "link", "network"):
        if described.get(name) is not None:
            raise UsageError(
                f"hardware.{name}: cannot be given for different cards",
                hint="put the number before each: 2x RTX 3090 + RTX 4090",
            )
    rest = {name: value for name, value in described.items() if name != "accelerator"}
    if described.get("cpu") is None and described.get("cores") is None:
        rest["cores"] = CORES_PER_CARD * len(parts)
    machines = [make_simulated_hardware({**rest, "accelerator": part, "link": "pcie"}) for part in parts]
    for part, machine in zip(parts, machines, strict=True):
        if not machine.accelerators or any(one.unified_memory for one in machine.accelerators):
            raise UsageError(
                f"hardware.accelerator: {part} is not a card that can be added to a machine with others",
                hint="name graphics cards or accelerators with memory of their own",
            )
    largest = max(machines, key=lambda machine: (machine.memory.total_bytes, machine.accelerators[0].name))
    accelerators: list[Accelerator] = []
    links: list[Link] = []
    for machine in machines:
        first = len(accelerators)
        # Each vendor's driver counts its own cards.
        own = sum(one.vendor == machine.accelerators[0].vendor for one in accelerators)
        added = [
            msgspec.structs.replace(
                one, index=first + one.index, driver_index=own + one.index if own != first else None
            )
            for one in machine.accelerators
        ]  # fmt: skip
        links += (_move_link(link, first) for link in machine.links)
        links += (_link_different_cards(one, other) for one in accelerators for other in added)
        accelerators += added
    memory = largest.memory
    if described.get("ram_gb") is None:
        total = sum(machine.memory.total_bytes for machine in machines)
        held = memory.total_bytes - memory.available_bytes
        memory = msgspec.structs.replace(memory, total_bytes=total, available_bytes=total - held)
    notes = dict.fromkeys(note for machine in machines for note in machine.notes if "ram_gb" not in note)
    return msgspec.structs.replace(
        largest, accelerators=tuple(accelerators), links=tuple(links), memory=memory, notes=tuple(notes)
    )


def _move_link(link: Link, first: int) -> Link:
    a, b = (end if end == "host" else str(int(end) + first) for end in (link.a, link.b))
    return msgspec.structs.replace(link, a=a, b=b)


def _link_different_cards(one: Accelerator, other: Accelerator) -> Link:
    rates = [_find_slot_rate(card) for card in (one, other)]
    rate = None if None in rates else min(rate for rate in rates if rate is not None)
    source = "the slower of the two cards' PCIe slots; the path between them is unknown"
    figure = None if rate is None else _make_spec_figure(rate, source)
    return Link(kind="pcie", a=str(one.index), b=str(other.index), bandwidth_bytes_s=figure)


def _find_slot_rate(card: Accelerator) -> float | None:
    chip = find_chip(card.name, guess=True, memory_bytes=card.memory_bytes).chip
    return chip.pcie_bytes_s


def estimate_idle_free_bytes(total_bytes: int) -> int:
    """Free memory of an idle card with its own memory."""
    return max(0, total_bytes - DRIVER_BYTES - round(DRIVER_SHARE * total_bytes))


def estimate_shared_limit(chip: Chip, ram_bytes: int) -> Figure | None:
    """The default limit of the GPU on memory that it shares with the CPU."""
    if chip.vendor == "apple":
        return estimate_wired_limit(ram_bytes)
    if chip.gfx != "gfx1151":
        return None
    source = "AMD Variable Graphics Memory: up to 3/4 set in firmware; Linux alone lends half (set by ttm.pages_limit)"
    share = ram_bytes * AMD_SHARE
    return Figure(value=share, low=ram_bytes * AMD_LOW_SHARE, high=share, basis="estimate", source=source)


class _DescribedFields:
    """The described fields. Each is checked when it is read, and every error names its field."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        for name in self.given:
            if name not in FIELDS:
                raise UsageError(f"hardware.{name}: unknown field", hint=f"known fields: {', '.join(FIELDS)}")

    def get_text(self, name: str) -> str | None:
        value = self.given.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"hardware.{name}: must be text, not {value!r}")
        return value.strip()

    def get_number(self, name: str, most: int) -> int | None:
        value = self.given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"hardware.{name}: must be a whole number from 1 to {most:,}, not {value!r}")
        return value

    def get_bytes(self, name: str) -> int | None:
        value = self.given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_RAM_GB:
            raise UsageError(f"hardware.{name}: must be more than 0 and at most {MOST_RAM_GB:,} GB, not {value!r}")
        return round(value * GIB)

    def get_choice(self, name: str, values: Iterable[str], same: Mapping[str, str] = {}) -> str | None:
        value = self.get_text(name)
        if value is None:
            return None
        found = same.get(value.lower(), value.lower())
        if found not in values:
            raise UsageError(f"hardware.{name}: {value!r} is not one of {', '.join(values)}")
        return found

    def get_system(self) -> OperatingSystem | None:
        systems = get_args(OperatingSystem)
        return cast("OperatingSystem | None", self.get_choice("os", systems, {"darwin": "macos", "mac": "macos"}))

    def find_chip_of(self, name: str, ram_bytes: int | None) -> ChipMatch | None:
        text = self.get_text(name)
        if text is None:
            return None
        try:
            return find_chip(text, ram_bytes=ram_bytes)
        except UsageError as error:
            raise UsageError(f"hardware.{name}: {error.message}", hint=error.hint, cause=error.cause) from error

    def find_cpu_chip_of(self, ram_bytes: int | None) -> ChipMatch | None:
        """`None` for an unlisted CPU: its own fields may be sufficient."""
        try:
            return self.find_chip_of("cpu", ram_bytes)
        except UsageError as error:
            if self.get_number("cores", MOST_CORES) is None:
                hint = f"{error.hint}; or specify hardware.cores"
                raise UsageError(error.message, hint=hint, cause=error.cause) from error
            return None


def _read_saved(described: Mapping[str, Any]) -> Hardware:
    try:
        return msgspec.convert(dict(described), Hardware)
    except msgspec.ValidationError as error:
        raise UsageError(
            "hardware is not a machine saved by this version of bedplate",
            cause=str(error),
            hint="save it again: bedplate probe --json",
        ) from error


def _assemble(
    asked: _DescribedFields,
    card: ChipMatch | None,
    cpu: ChipMatch | None,
    ram_bytes: int | None,
    system: OperatingSystem | None,
) -> Hardware:
    notes = [match.note for match in (card, cpu) if match is not None and match.note]
    chip = card.chip if card is not None else None
    system = system or ("macos" if chip is not None and chip.vendor == "apple" else "linux")
    _check_system(chip, system)
    count = _count_devices(asked, card)
    per_node = _count_cards_per_node(asked, chip, count)
    memory, memory_notes = _make_memory(card, cpu, ram_bytes, per_node, system)
    processor, cpu_notes = _make_cpu(asked, chip, cpu, min(count, per_node))
    accelerators = () if chip is None else tuple(_make_accelerator(chip, index, memory) for index in range(count))
    links, link_notes = _make_links(asked, chip, count, per_node)
    return Hardware(
        os=system,
        cpu=processor,
        memory=_add_bandwidth(memory, chip, cpu.chip if cpu else None, processor),
        accelerators=accelerators,
        links=links,
        notes=(*notes, *memory_notes, *cpu_notes, *link_notes),
    )


def _check_system(chip: Chip | None, system: OperatingSystem) -> None:
    if chip is not None and system == "macos" and chip.vendor != "apple":
        raise UsageError(f"hardware.os: macOS does not support {chip.name}", hint="use linux or windows")
    if chip is not None and system == "windows" and chip.vendor == "apple":
        raise UsageError(f"hardware.os: Windows has no driver for the GPU of {chip.name}", hint="use macos")


def _count_devices(asked: _DescribedFields, card: ChipMatch | None) -> int:
    """The number of devices that the drivers of all nodes would list."""
    given = asked.get_number("count", MOST_CARDS)
    if card is None:
        if given not in (None, 1):
            raise UsageError(
                "hardware.count: counts accelerators, but none is specified", hint="specify the accelerator"
            )
        return 0
    if given is not None and card.counted and given != card.count:
        raise UsageError(f"hardware.count: is {given}, but hardware.accelerator states {card.count}")
    cards = given or card.count
    if cards > MOST_CARDS:
        raise UsageError(f"hardware.accelerator: at most {MOST_CARDS:,} accelerators are supported")
    if cards > 1 and card.chip.unified and card.chip.link is None and card.chip.network_gb_s is None:
        raise UsageError(
            f"hardware.count: a machine has only one {card.chip.name}, which uses the machine's memory",
            hint="use count: 1, and plan each machine separately",
        )
    return cards * card.chip.devices_per_card


def _count_cards_per_node(asked: _DescribedFields, chip: Chip | None, count: int) -> int:
    given = asked.get_number("gpus_per_node", MOST_NODE_CARDS)
    if chip is None:
        if given is not None:
            raise UsageError("hardware.gpus_per_node: no accelerator is specified", hint="specify the accelerator")
        return 1
    if given is not None:
        return given * chip.devices_per_card
    if chip.unified and chip.link is None:
        return 1
    switched = chip.link is not None and not chip.link.optional and chip.link.topology != "bridge"
    return max(1, min(count, max(8, chip.link.domain if switched and chip.link else 8)))


def _make_memory(
    card: ChipMatch | None, cpu: ChipMatch | None, ram_bytes: int | None, per_node: int, system: OperatingSystem
) -> tuple[Memory, tuple[str, ...]]:
    notes: list[str] = []
    basis: Basis = "spec"
    owner = next((match for match in (card, cpu) if match is not None and _shares_memory(match.chip)), None)
    if owner is not None:
        ram_bytes, notes = _find_machine_memory(owner, ram_bytes)
    if ram_bytes is None and card is not None and not card.chip.unified:
        ram_bytes = max(LEAST_RAM_BYTES, (card.chip.memory_bytes or 0) * per_node)
        basis = "estimate"
        notes.append(
            f"hardware.ram_gb is not specified: assuming {ram_bytes / GIB:g} GiB, as much as a node's cards have"
        )
    if ram_bytes is None:
        if owner is None:
            raise UsageError("hardware.ram_gb: specify the memory of the machine", hint="for example: ram_gb: 64")
        name, sizes = owner.chip.name, _format_sizes(owner.chip)
        raise UsageError(
            f"hardware.ram_gb: specify the memory of the {name}",
            hint=f"it is sold with {sizes} GB" if sizes else f"for example: “{name} 64GB”, or ram_gb: 64 in an intent",
        )
    if owner is not None and owner.chip.unified and ram_bytes == owner.chip.memory_bytes:
        ram_bytes = owner.chip.reported_bytes or ram_bytes  # firmware reserves a part of the nominal size
    held = min(SYSTEM_BYTES[system], ram_bytes // 8)
    return Memory(total_bytes=ram_bytes, available_bytes=ram_bytes - held, basis=basis), tuple(notes)


def _shares_memory(chip: Chip) -> bool:
    """Whether this chip uses the machine's memory."""
    return chip.unified or chip.kind == "cpu"


def _format_sizes(chip: Chip) -> str:
    return ", ".join(f"{size:g}" for size in chip.memory_options_gib)


def _find_machine_memory(owner: ChipMatch, ram_bytes: int | None) -> tuple[int | None, list[str]]:
    """The RAM from the name or the field, or the only size that the chip is sold with."""
    chip, named = owner.chip, owner.memory_bytes
    if ram_bytes is not None and named is not None and ram_bytes != named:
        raise UsageError(f"hardware.ram_gb: {ram_bytes / GIB:g}, but the name states {named / GIB:g} GB")
    ram_bytes = ram_bytes or named
    if ram_bytes is None and len(chip.memory_options_gib) == 1:
        return round(chip.memory_options_gib[0] * GIB), []
    if ram_bytes is not None and chip.memory_options_gib and ram_bytes / GIB not in chip.memory_options_gib:
        return ram_bytes, [
            f"{chip.name} is sold with {_format_sizes(chip)} GB; using the specified {ram_bytes / GIB:g} GB"
        ]
    return ram_bytes, []


def _add_bandwidth(memory: Memory, chip: Chip | None, cpu: Chip | None, processor: Cpu) -> Memory:
    if chip is not None and chip.unified:
        return msgspec.structs.replace(memory, bandwidth_bytes_s=_make_spec_figure(chip.bandwidth_bytes_s, chip.source))
    known = cpu or _find_own_cpu(chip)
    if known is None:
        return memory
    return msgspec.structs.replace(memory, bandwidth_bytes_s=estimate_memory_bandwidth(known, processor))


def _make_cpu(
    asked: _DescribedFields, card: Chip | None, named: ChipMatch | None, cards: int
) -> tuple[Cpu, tuple[str, ...]]:
    arch = asked.get_choice("arch", ARCHES, SAME_ARCH)
    cores = asked.get_number("cores", MOST_CORES)
    chip = named.chip if named is not None else _find_own_cpu(card)
    given = asked.get_text("cpu")
    if chip is None:
        name = given or UNNAMED_CPU
        notes = (
            [f"hardware.cpu: {given} is not a known chip, so its bandwidth and instruction sets are unknown"]
            if given
            else []
        )
        default_arch = (card.arch if card is not None else None) or "x86_64"
        if cores is None:
            cores = CORES_PER_CARD * max(1, cards)
            notes.append(f"hardware.cores is not specified: assuming {cores}, {CORES_PER_CARD} per accelerator")
        return Cpu(
            name=name,
            arch=arch or default_arch,
            physical_cores=cores,
            logical_cores=cores,
            allowed_cores=float(cores),
            allowed_physical_cores=cores,
            basis="estimate",
        ), tuple(notes)
    if arch is not None and chip.arch is not None and {arch, chip.arch} != {"arm64", "aarch64"} and arch != chip.arch:
        raise UsageError(f"hardware.arch: {chip.name} is {chip.arch}, not {arch}")
    own = chip.cores or cores or 1
    threads_each = max(1, (chip.threads or own) // own)
    named_sockets = named.count if named is not None and named.counted else None
    sockets, physical, logical = _count_cores(chip, cores, own, threads_each, named_sockets)
    return Cpu(
        name=chip.name,
        vendor=chip.vendor,
        arch=arch or chip.arch or "x86_64",
        sockets=sockets,
        physical_cores=physical,
        logical_cores=logical,
        allowed_cores=float(logical),
        allowed_physical_cores=physical,
        instruction_sets=chip.instruction_sets,
        basis="spec",
    ), ()


def _find_own_cpu(card: Chip | None) -> Chip | None:
    """The CPU on the same chip, or the one that always comes with it."""
    if card is None:
        return None
    if card.cpu is not None:
        return find_chip(card.cpu).chip
    return card if card.unified and card.cores else None


def _count_cores(
    chip: Chip, cores: int | None, own: int, threads_each: int, sockets: int | None = None
) -> tuple[int, int, int]:
    """Sockets, physical and logical cores. Fewer cores than the chip has are a part of it, as in a virtual machine."""
    if sockets is not None and sockets > 1:
        if not any(word in chip.name for word in SOCKETED) or sockets > MOST_SOCKETS:
            most = MOST_SOCKETS if any(word in chip.name for word in SOCKETED) else 1
            raise UsageError(f"hardware.cpu: a machine has at most {most} {chip.name}, not {sockets}")
        physical = cores or own * sockets
        if physical > own * sockets:
            raise UsageError(f"hardware.cores: {sockets} x {chip.name} have {own * sockets} cores, not {cores}")
        return sockets, physical, physical * threads_each
    if cores is None or cores == own:
        return 1, own, chip.threads or own
    if cores < own:
        return 1, cores, cores * threads_each
    if any(word in chip.name for word in SOCKETED):
        sockets = math.ceil(cores / own)
        if sockets > MOST_SOCKETS:
            raise UsageError(
                f"hardware.cores: {cores} would be {sockets} sockets of {chip.name}, which has {own} cores"
            )
        return sockets, cores, cores * threads_each
    if cores <= (chip.threads or own):
        return 1, own, cores  # the user counted threads
    raise UsageError(f"hardware.cores: {chip.name} has {own} cores, not {cores}")


def _make_accelerator(chip: Chip, index: int, memory: Memory) -> Accelerator:
    total = memory.total_bytes if chip.unified else chip.reported_bytes
    limit = estimate_shared_limit(chip, memory.total_bytes) if chip.unified else None
    if chip.unified:
        free = min(memory.available_bytes, round(limit.value) if limit else memory.available_bytes)
    else:
        free = estimate_idle_free_bytes(total or 0)
    return Accelerator(
        name=chip.name,
        vendor=cast("Vendor", chip.vendor if chip.vendor in get_args(Vendor) else "other"),
        index=index,
        architecture=chip.gfx or _name_cuda_architecture(chip.capability),
        compute_units=chip.gpu_cores,
        memory_bytes=total,
        free_bytes=free,
        bandwidth_bytes_s=_make_spec_figure(chip.bandwidth_bytes_s, chip.source),
        compute_capability=chip.capability,
        power_limit_w=chip.watts,
        pcie=_make_pcie(chip),
        unified_memory=chip.unified,
        wired_limit_bytes=limit,
        basis="spec",
    )


def _name_cuda_architecture(capability: str | None) -> str | None:
    if capability is None:
        return None
    names = {"6": "Pascal", "7.0": "Volta", "7.5": "Turing", "8": "Ampere", "8.9": "Ada Lovelace", "9": "Hopper"}
    return names.get(capability) or names.get(capability.partition(".")[0]) or "Blackwell"


def _make_pcie(chip: Chip) -> Pcie | None:
    return None if chip.pcie is None else Pcie(max_generation=chip.pcie[0], max_width=chip.pcie[1])


def _make_links(
    asked: _DescribedFields, chip: Chip | None, count: int, per_node: int
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """All links between two devices and from each device to the host, one direction each."""
    wanted = asked.get_choice("link", LINK_KINDS)
    network = asked.get_text("network") if isinstance(asked.given.get("network"), str) else asked.given.get("network")
    if chip is None:
        if wanted is not None:
            raise UsageError("hardware.link: no accelerator is specified", hint="specify the accelerator")
        return (), ()
    fabric = _choose_fabric(chip, wanted)
    found: list[Link] = []
    for index in range(min(count, MOST_LINKED)):
        if chip.host_link_gb_s is not None:
            rate = _make_spec_figure(chip.host_link_gb_s * 1e9, chip.source)
            found.append(Link(kind="nvlink", a=str(index), b="host", bandwidth_bytes_s=rate))
        elif not chip.unified and (link := make_host_link(index, _make_pcie(chip))):
            found.append(link)
    nodes = [range(first, min(first + per_node, count)) for first in range(0, count, per_node)]
    listed = nodes[: max(1, MOST_LINKED // per_node)]
    for node in listed:
        found += (_make_pair_link(chip, fabric, one, other, node.start) for one, other in combinations(node, 2))
    notes: tuple[str, ...] = ()
    if len(nodes) > 1:
        across = _estimate_network(network, chip)
        # A network acts as a switch: a link from each node to the next represents all pairs.
        pairs = pairwise(listed)
        found += (Link(kind="network", a=str(a.start), b=str(b.start), bandwidth_bytes_s=across) for a, b in pairs)
        notes = (f"{count} accelerators in {len(nodes)} nodes of {per_node}; RAM and cores are those of one node",)
    elif network is not None:
        _estimate_network(network, chip)
    return tuple(found), notes


def _choose_fabric(chip: Chip, wanted: str | None) -> ChipLink | None:
    """The link between the cards besides PCIe, if there is one."""
    if wanted == "pcie":
        return None
    if wanted is not None and (chip.link is None or chip.link.kind != wanted):
        has = f"only {chip.link.kind} and pcie" if chip.link else "only pcie"
        raise UsageError(f"hardware.link: {chip.name} has {has}, not {wanted}")
    return None if chip.link is None or (chip.link.optional and wanted is None) else chip.link


def _make_pair_link(chip: Chip, fabric: ChipLink | None, one: int, other: int, first: int) -> Link:
    bridged = fabric is not None and (one - first) // fabric.domain == (other - first) // fabric.domain
    if fabric is not None and bridged:
        peers = fabric.domain - 1 if fabric.topology == "mesh" else 1
        rate = _make_spec_figure(fabric.gb_s * 1e9 / max(1, peers), chip.source)
        return Link(kind=fabric.kind, a=str(one), b=str(other), bandwidth_bytes_s=rate)
    slot = chip.pcie_bytes_s
    return Link(
        kind="pcie",
        a=str(one),
        b=str(other),
        bandwidth_bytes_s=None
        if slot is None
        else _make_spec_figure(slot, "the cards' PCIe slots; the path between them is unknown"),
    )


def _estimate_network(given: object, chip: Chip) -> Figure | None:
    """The bandwidth from one node to others, one direction."""
    if given is None:
        return None if chip.network_gb_s is None else _make_spec_figure(chip.network_gb_s * 1e9, chip.source)
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise UsageError(f"hardware.network: must be text such as “8x 400 Gbit/s”, not {given!r}")
    text = str(given).strip()
    lowered = text.lower()
    if lowered in ("none", "ethernet", "infiniband", "roce"):
        return None
    several = NETWORK_PORTS.match(text)
    ports = int(several[1]) if several else 1
    found = NETWORK_RATE.search(text, several.end() if several else 0)
    generation = next((rate for name, rate in NETWORK_GBIT_S.items() if re.search(rf"\b{name}\b", lowered)), None)
    if found is None and generation is None:
        raise UsageError(
            f"hardware.network: {text!r} contains no rate", hint="for example: 400 Gbit/s, 8x 400 Gbit/s, NDR, 50 GB/s"
        )
    rate_gbit_s = float(found[1]) if found else float(generation or 0)
    # A capital B means bytes, a small b bits.
    if found and (found[2] or "") in ("GB", "GB/s", "GBps"):
        rate_gbit_s *= 8
    if not 0 < rate_gbit_s * ports <= 1_000_000:
        raise UsageError(f"hardware.network: {text!r} is out of range")
    return _make_spec_figure(rate_gbit_s * ports * 1e9 / 8, f"hardware.network: {text}")


def _make_spec_figure(value: float, source: str) -> Figure:
    return Figure(value=value, low=value, high=value, basis="spec", source=source)
