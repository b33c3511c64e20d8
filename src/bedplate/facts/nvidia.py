"""NVIDIA GPUs, from the driver's management library (NVML) or from `nvidia-smi`."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path, PurePath
from typing import Any

from bedplate.facts.cgroup import is_there, read_text
from bedplate.facts.devices import (
    Ask,
    FoundAccelerators,
    ask_program,
    make_host_link,
    parse_decimal,
    parse_natural,
    read_numa_node,
    select_visible,
    validate_lanes,
)
from bedplate.values import Accelerator, Figure, GpuProcess, Link, Pcie
from bedplate.values.hardware import PciePath

# Importing the bindings takes longer than the rest of the probe, so first check for traces of a driver: the kernel
# module, its device files (a sandbox may show only these), WSL's paravirtual GPU, or a Jetson's.
DRIVER_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvmap")
NVIDIA_PCI_VENDOR = "0x10de"
# Chips that use the machine's memory. NVML does not report how much.
SHARED_MEMORY = ("GB10", "Thor", "Orin", "Xavier")
SWITCH = "switch"
ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
}
# One NVLink, one direction, by compute capability. NVIDIA's data sheets give links × 2 × this.
NVLINK_BYTES_S = {
    "6.0": 20e9,
    "7.0": 25e9,
    "7.5": 25e9,
    "8.0": 25e9,
    "8.6": 14.0625e9,
    "9.0": 25e9,
    "10.0": 50e9,
    "10.3": 50e9,
}
# Names of the path between two cards in NVML and `nvidia-smi topo -m`.
ANCESTORS: dict[int, PciePath] = {0: "board", 10: "switch", 20: "switches", 30: "host-bridge", 40: "node", 50: "system"}
TOPOLOGY_WORDS: dict[str, PciePath] = {
    "PSB": "board",
    "PIX": "switch",
    "PXB": "switches",
    "PHB": "host-bridge",
    "NODE": "node",
    "SOC": "system",
    "SYS": "system",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts:
    """One MIG slice."""

    name: str | bytes | None = None
    uuid: str | bytes | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    multiprocessors: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The answers about one GPU; `None`: no answer."""

    index: int
    name: str | bytes | None = None
    uuid: str | bytes | None = None
    pci_address: str | None = None
    architecture: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    memory_bus_bits: int | None = None
    power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    pcie: Pcie | None = None
    numa_node: int | None = None
    mig: bool | None = None
    slices: tuple[SliceFacts, ...] | None = None
    """`None` if they could not be queried."""
    nvlinks: tuple[str | None, ...] | None = None
    """The other end of each active NVLink: a card's PCI address, a switch, or `None` if it is hidden."""
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaFacts:
    """The answers about all GPUs."""

    devices: tuple[DeviceFacts, ...] = ()
    driver_version: str | bytes | None = None
    cuda_version: str | None = None
    paths: tuple[tuple[int, int, PciePath], ...] = ()
    nvlink_counts: tuple[tuple[int, int, int], ...] = ()
    """Links between pairs of cards, if another source counted them."""


def make_accelerator(device: DeviceFacts, driver_version: str | bytes | None, cuda_version: str | None) -> Accelerator:
    """A whole card."""
    capability = device.compute_capability
    name = _decode_text(device.name) or "NVIDIA GPU"
    return Accelerator(
        name=name,
        vendor="nvidia",
        index=device.index,
        uuid=_decode_text(device.uuid),
        pci_address=device.pci_address,
        architecture=device.architecture,
        memory_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        bandwidth_bytes_s=compute_peak_bandwidth(device.max_memory_clock_mhz, device.memory_bus_bits),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        driver_version=_decode_text(driver_version),
        cuda_version=cuda_version,
        sm_clock_mhz=device.sm_clock_mhz,
        max_sm_clock_mhz=device.max_sm_clock_mhz,
        memory_clock_mhz=device.memory_clock_mhz,
        max_memory_clock_mhz=device.max_memory_clock_mhz,
        power_limit_w=device.power_limit_w,
        max_power_limit_w=device.max_power_limit_w,
        mig=device.mig,
        pcie=device.pcie,
        nvlinks=len(device.nvlinks) if device.nvlinks is not None else None,
        numa_node=device.numa_node,
        unified_memory=device.total_bytes is None and any(mark in name for mark in SHARED_MEMORY),
        processes=device.processes,
    )


def compute_peak_bandwidth(clock_mhz: int | None, bus_bits: int | None) -> Figure | None:
    """Peak memory bandwidth: two transfers per cycle over the whole bus, with the driver's clock and width."""
    if not clock_mhz or not bus_bits:
        return None
    rate = clock_mhz * 1e6 * 2 * bus_bits / 8
    source = f"{bus_bits} bits at {clock_mhz} MHz, twice a cycle"
    return Figure(value=rate, low=rate, high=rate, basis="reported", source=source)


def make_slice_accelerator(card: Accelerator, one: SliceFacts, index: int) -> Accelerator:
    """A MIG slice, which acts as a separate GPU. Missing facts come from its card."""
    return Accelerator(
        name=_decode_text(one.name) or f"{card.name} MIG slice",
        vendor="nvidia",
        index=index,
        parent=card.index,
        uuid=_decode_text(one.uuid),
        pci_address=card.pci_address,
        architecture=card.architecture,
        compute_units=one.multiprocessors,
        memory_bytes=one.total_bytes,
        free_bytes=one.free_bytes,
        compute_capability=card.compute_capability,
        driver_version=card.driver_version,
        cuda_version=card.cuda_version,
        max_sm_clock_mhz=card.max_sm_clock_mhz,
        max_memory_clock_mhz=card.max_memory_clock_mhz,
        mig=True,
        pcie=card.pcie,
        numa_node=card.numa_node,
        processes=one.processes,
    )


def select_accelerators(answers: NvidiaFacts, visible_devices: str | None = None) -> FoundAccelerators:
    """The GPUs that engines will see, their links, and notes on problems."""
    devices = answers.devices
    notes: list[str] = []
    uuids = [_decode_text(device.uuid) for device in devices]
    chosen_slices = [part.strip() for part in (visible_devices or "").split(",") if part.strip().startswith("MIG-")]
    kept = tuple(range(len(devices))) if chosen_slices else select_visible(uuids, visible_devices)
    if len(kept) < len(devices):
        hidden = len(devices) - len(kept)
        notes.append(f"CUDA_VISIBLE_DEVICES={visible_devices} hides {hidden} of {len(devices)} NVIDIA GPUs")
    found: list[Accelerator] = []
    whole: list[DeviceFacts] = []
    for position in kept:
        device = devices[position]
        card = make_accelerator(device, answers.driver_version, answers.cuda_version)
        if device.mig and device.slices is not None:
            for one in device.slices:
                found.append(make_slice_accelerator(card, one, len(devices) + sum(a.parent is not None for a in found)))
            if not device.slices:
                notes.append(
                    f"GPU {device.index}: MIG is on but has no slice, so nothing can run on it: "
                    "create one (nvidia-smi mig -cgi PROFILE -C), or turn MIG off"
                )
            continue
        found.append(card)
        whole.append(device)
        if device.mig:
            notes.append(
                f"GPU {device.index} is split by MIG: the stated memory is that of the whole card, not of one slice"
            )
        if card.memory_bytes is None and not card.unified_memory:
            notes.append(f"GPU {device.index}: the driver does not report its memory")
    if chosen_slices:
        found = [card for card in found if card.uuid is not None and card.uuid in chosen_slices]
    return FoundAccelerators(
        accelerators=tuple(found), links=make_links(replace(answers, devices=tuple(whole))), notes=tuple(notes)
    )


def make_links(answers: NvidiaFacts) -> tuple[Link, ...]:
    """NVLinks between cards, else the PCIe path, and each card's link to the CPU."""
    devices = answers.devices
    present = {device.index for device in devices}
    counts = {(a, b): count for a, b, count in answers.nvlink_counts} | count_nvlinks(devices)
    paths = {(a, b): path for a, b, path in answers.paths}
    found = []
    for one, other in combinations(sorted(present), 2):
        if count := counts.get((one, other)):
            device = next(device for device in devices if device.index == one)
            rate = estimate_nvlink_bandwidth(device.compute_capability, count)
            found.append(Link(kind="nvlink", a=str(one), b=str(other), count=count, bandwidth_bytes_s=rate))
        elif path := paths.get((one, other)):
            found.append(Link(kind="pcie", a=str(one), b=str(other), path=path))
    to_host = (make_host_link(device.index, device.pcie) for device in devices)
    return (*found, *(link for link in to_host if link is not None))


def count_nvlinks(devices: Sequence[DeviceFacts]) -> dict[tuple[int, int], int]:
    """How many NVLinks each pair of cards can use at once.

    Behind a switch every card reaches every other with all of its links. Virtual machines hide the switches. A link
    whose other end is hidden leads to a switch, because a link to a card of this machine would show its address.
    """
    by_address: dict[str | None, int] = {d.pci_address: d.index for d in devices if d.pci_address}
    direct: Counter[tuple[int, int]] = Counter()
    switched: dict[int, int] = {}
    for device in devices:
        for remote in device.nvlinks or ():
            peer = by_address.get(remote)
            if peer is not None and device.index < peer:
                direct[device.index, peer] += 1
            elif remote in (SWITCH, None):
                switched[device.index] = switched.get(device.index, 0) + 1
    for one, other in combinations(sorted(switched), 2):
        direct[one, other] += min(switched[one], switched[other])
    return dict(direct)


def estimate_nvlink_bandwidth(capability: tuple[int, int] | None, count: int) -> Figure | None:
    name = f"{capability[0]}.{capability[1]}" if capability else ""
    each = NVLINK_BYTES_S.get(name)
    if each is None:
        return None
    source = f"{count} NVLinks of {each / 1e9:g} GB/s in each direction (NVIDIA's data sheets)"
    return Figure(value=each * count, low=each * count, high=each * count, basis="spec", source=source)


def parse_smi_log(text: str) -> NvidiaFacts:
    """`nvidia-smi -q`."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines():
        if match := re.fullmatch(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])\s*", line):
            sections.append((match[1], []))
        else:
            sections[-1][1].append(line)
    head = _parse_values(sections[0][1])
    return NvidiaFacts(
        driver_version=_drop_unknown(head.get(("Driver Version",))),
        cuda_version=_drop_unknown(head.get(("CUDA Version",))),
        devices=tuple(_parse_smi_device(index, address, lines) for index, (address, lines) in enumerate(sections[1:])),
    )


def parse_smi_topology(text: str) -> NvidiaFacts:
    """Parse `nvidia-smi topo -m`: the NVLinks or the PCIe path between cards."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU[0-9]{1,3}", name)]
    paths: list[tuple[int, int, PciePath]] = []
    counts: list[tuple[int, int, int]] = []
    for row in rows:
        if not row or not re.fullmatch(r"GPU[0-9]{1,3}", row[0]) or "X" not in row:
            continue
        own = int(row[0][3:])
        for other, cell in zip(columns, row[1:], strict=False):
            if other <= own:
                continue
            if match := re.fullmatch(r"NV([0-9]{1,3})", cell):
                counts.append((own, other, int(match[1])))
            elif path := TOPOLOGY_WORDS.get(cell):
                paths.append((own, other, path))
    return NvidiaFacts(paths=tuple(paths), nvlink_counts=tuple(counts))


def parse_smi_list(text: str) -> dict[int, tuple[SliceFacts, ...]]:
    """Parse `nvidia-smi -L`: the slices of each card, with their names for CUDA_VISIBLE_DEVICES."""
    found: dict[int, tuple[SliceFacts, ...]] = {}
    card, name = None, ""
    for line in text.splitlines():
        if match := re.match(r"GPU ([0-9]{1,4}): (.+?) \(UUID: ", line):
            card, name = int(match[1]), match[2]
            found[card] = ()
        elif card is not None and (match := re.match(r"\s+MIG (\S+)\s+Device\s+[0-9]+: \(UUID: (MIG-[^)]+)\)", line)):
            found[card] += (SliceFacts(name=f"{name} MIG {match[1]}", uuid=match[2]),)
    return found


def parse_compute_capabilities(text: str) -> tuple[tuple[int, int] | None, ...]:
    """Parse `nvidia-smi --query-gpu=compute_cap --format=csv,noheader`: one line per card."""
    matches = (re.fullmatch(r"\s*([0-9]{1,2})\.([0-9]{1,2})\s*", line) for line in text.splitlines() if line.strip())
    return tuple((int(match[1]), int(match[2])) if match else None for match in matches)


def ask_smi(ask: Ask = ask_program) -> NvidiaFacts | None:
    """The answers of `nvidia-smi`, for machines where the library cannot be loaded."""
    log = ask(["nvidia-smi", "-q"])
    if not log or not (answers := parse_smi_log(log)).devices:
        return None
    capabilities = parse_compute_capabilities(
        ask(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
    )
    listed = parse_smi_list(ask(["nvidia-smi", "-L"]) or "")
    topology = parse_smi_topology(ask(["nvidia-smi", "topo", "-m"]) or "")
    devices = []
    for position, device in enumerate(answers.devices):
        named = listed.get(device.index, ())
        slices = device.slices
        if slices is not None and len(named) == len(slices):
            slices = tuple(
                replace(one, name=other.name, uuid=other.uuid) for one, other in zip(slices, named, strict=True)
            )
        capability = capabilities[position] if len(capabilities) == len(answers.devices) else None
        devices.append(replace(device, compute_capability=capability, slices=slices))
    return replace(answers, devices=tuple(devices), paths=topology.paths, nvlink_counts=topology.nvlink_counts)


def explain_nvml_error(error: str, *, loaded: bool) -> str:
    """Why NVML does not work although a driver or a card seems present, and what to do. `error` is NVML's own text."""
    if "Mismatch" in error or "mismatch" in error:
        return "NVIDIA's driver and its library have different versions, probably after an update: reboot"
    if "LibraryNotFound" in error and loaded:
        return "an NVIDIA driver is loaded but its library is missing: start a container with --gpus all"
    if "LibraryNotFound" in error or "DriverNotLoaded" in error:
        return "this machine has an NVIDIA GPU, but its driver is not loaded: install or load the driver"
    if "NoPermission" in error:
        return "NVIDIA's driver denies access: check that the device is passed through and /dev/nvidia* are readable"
    return f"NVIDIA's driver did not answer ({error})"


def read_nvidia(root: Path = Path("/"), ask: Ask = ask_program) -> FoundAccelerators:
    """All NVIDIA GPUs. If a driver or card is present but cannot be queried, a note says so."""
    if sys.platform == "darwin":
        return FoundAccelerators()
    linux = sys.platform.startswith("linux")
    traces = [trace for trace in DRIVER_TRACES if is_there(root / trace)]
    if linux and not traces:
        return FoundAccelerators(
            notes=(explain_nvml_error("LibraryNotFound", loaded=False),) if is_card_on_bus(root) else ()
        )
    answers, failure = _ask_nvml(root)
    if answers is None and (answers := ask_smi(ask)) is not None:
        failure = "NVIDIA's library (NVML) did not answer, so bedplate used nvidia-smi"
    # Windows, WSL (dxg) and Tegra boards (nvmap) look like this without an NVIDIA GPU that NVML supports.
    certain = answers is not None or any("dev/nvidia" in trace or "proc" in trace for trace in traces)
    notes = (failure,) if failure and certain else ()
    if answers is None:
        return FoundAccelerators(notes=notes)
    found = select_accelerators(answers, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(found, notes=(*notes, *found.notes))


def is_card_on_bus(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA card is installed, with or without a driver."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = read_text(device / "vendor") or "", read_text(device / "class") or ""
        # 0x03….: a display or 3D controller, not a card's sound or USB function.
        if vendor.strip() == NVIDIA_PCI_VENDOR and kind.startswith("0x03"):
            return True
    return False


def normalize_pci_address(text: str | bytes | None) -> str | None:
    """The address as in sysfs. NVML uses an eight-digit domain and capital letters."""
    match = re.fullmatch(
        r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-9])", (_decode_text(text) or "").strip("\0 ").lower()
    )
    return f"{match[1][-4:]}:{match[2]}" if match else None


def _ask_nvml(root: Path) -> tuple[NvidiaFacts | None, str | None]:
    """NVML's answers, or why there are none."""
    try:
        import pynvml
    except ImportError:
        return None, "NVIDIA GPUs are not read because the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, explain_nvml_error(type(error).__name__, loaded=True)
    try:
        handles = [
            _ask_one(pynvml, "nvmlDeviceGetHandleByIndex", index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return NvidiaFacts(
            devices=tuple(_ask_device(pynvml, index, handle, root) for index, handle in enumerate(handles)),
            driver_version=_ask_one(pynvml, "nvmlSystemGetDriverVersion"),
            cuda_version=format_cuda_version(_ask_one(pynvml, "nvmlSystemGetCudaDriverVersion_v2")),
            paths=tuple(_ask_paths(pynvml, handles)),
        ), None
    except pynvml.NVMLError as error:
        return None, explain_nvml_error(type(error).__name__, loaded=True)
    finally:
        pynvml.nvmlShutdown()


def format_cuda_version(number: object) -> str | None:
    """12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) and number > 0 else None


def _ask_device(nvml: Any, index: int, handle: Any, root: Path) -> DeviceFacts:
    if handle is None:
        return DeviceFacts(index=index)

    def ask(question: str, *about: Any) -> Any:
        return _ask_one(nvml, question, handle, *about)

    memory, mig, pci = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetPciInfo")
    address = normalize_pci_address(getattr(pci, "busId", None))
    sm, dram = getattr(nvml, "NVML_CLOCK_SM", 1), getattr(nvml, "NVML_CLOCK_MEM", 2)
    constraints = ask("nvmlDeviceGetPowerManagementLimitConstraints")
    split = bool(mig[0]) if mig else None
    return DeviceFacts(
        index=index,
        name=ask("nvmlDeviceGetName"),
        uuid=ask("nvmlDeviceGetUUID"),
        pci_address=address,
        architecture=ARCHITECTURES.get(ask("nvmlDeviceGetArchitecture")),
        total_bytes=int(memory.total) if memory is not None else None,
        free_bytes=int(memory.free) if memory is not None else None,
        compute_capability=ask("nvmlDeviceGetCudaComputeCapability"),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", sm),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", sm),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", dram),
        max_memory_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", dram),
        memory_bus_bits=ask("nvmlDeviceGetMemoryBusWidth"),
        power_limit_w=_parse_milliwatts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        max_power_limit_w=_parse_milliwatts(constraints[1] if constraints else None),
        pcie=_make_slot(
            ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            ask("nvmlDeviceGetCurrPcieLinkWidth"),
            ask("nvmlDeviceGetMaxPcieLinkWidth"),
        ),
        numa_node=read_numa_node(root / "sys/bus/pci/devices" / address) if address else None,
        mig=split,
        slices=tuple(_ask_slices(nvml, handle, root)) if split else None,
        nvlinks=_ask_nvlinks(nvml, handle),
        processes=_ask_processes(nvml, handle, root) if not split else (),
    )


def _ask_slices(nvml: Any, handle: Any, root: Path) -> Iterator[SliceFacts]:
    for place in range(_ask_one(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        one = _ask_one(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if one is None:
            continue
        memory = _ask_one(nvml, "nvmlDeviceGetMemoryInfo", one)
        attributes = _ask_one(nvml, "nvmlDeviceGetAttributes", one)
        yield SliceFacts(
            name=_ask_one(nvml, "nvmlDeviceGetName", one),
            uuid=_ask_one(nvml, "nvmlDeviceGetUUID", one),
            total_bytes=int(memory.total) if memory is not None else None,
            free_bytes=int(memory.free) if memory is not None else None,
            multiprocessors=getattr(attributes, "multiprocessorCount", None),
            processes=_ask_processes(nvml, one, root),
        )


def _ask_nvlinks(nvml: Any, handle: Any) -> tuple[str | None, ...] | None:
    """The other end of each active link; `None` for cards without NVLink and in virtual machines that hide it."""
    states = [
        _ask_one(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    ]
    if not any(state is not None for state in states):
        return None
    found: list[str | None] = []
    for link in (link for link, state in enumerate(states) if state == 1):
        kind = _ask_one(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = _ask_one(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        switched = kind is not None and kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
        found.append(SWITCH if switched else normalize_pci_address(getattr(remote, "busId", None)))
    return tuple(found)


def _ask_paths(nvml: Any, handles: Sequence[Any]) -> Iterator[tuple[int, int, PciePath]]:
    for (one, handle), (other, second) in combinations(enumerate(handles), 2):
        if handle is not None and second is not None:
            level = _ask_one(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, second)
            if path := ANCESTORS.get(level):
                yield one, other, path


def _ask_processes(nvml: Any, handle: Any, root: Path) -> tuple[GpuProcess, ...]:
    """Processes that hold memory on the GPU, once each."""
    held: dict[int, int | None] = {}
    for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in _ask_one(nvml, question, handle) or ():
            used = getattr(process, "usedGpuMemory", None)
            if process.pid != os.getpid():
                held.setdefault(int(process.pid), int(used) if used is not None else None)
    return tuple(
        GpuProcess(
            pid=pid,
            name=_get_program(_ask_one(nvml, "nvmlSystemGetProcessName", pid)) or _read_command_name(pid, root),
            bytes=used,
        )
        for pid, used in sorted(held.items())
    )


def _ask_one(nvml: Any, question: str, *about: Any) -> Any:
    """One NVML answer; `None` if the card or slice does not support the question."""
    asked: Callable[..., Any] | None = getattr(nvml, question, None)
    if asked is None:  # older bindings
        return None
    try:
        return asked(*about)
    except nvml.NVMLError:
        return None


def _parse_values(lines: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Indented `key : value` lines by path. A repeated block gets a number: `MIG Device 1`."""
    stack: list[tuple[int, str]] = []
    values: dict[tuple[str, ...], str] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        key, colon, value = line.strip().partition(" : ")
        key = key.strip() if colon else line.strip().removesuffix(":").strip()
        if not key:
            continue
        indent = len(line) - len(line.lstrip())
        while stack and stack[-1][0] >= indent:
            stack.pop()
        path = (*(name for _, name in stack), key)
        again = seen[path]
        seen[path] += 1
        if again:
            path = (*path[:-1], f"{key} {again}")
        stack.append((indent, path[-1]))
        values[path] = value.strip()
    return values


def _parse_smi_device(index: int, address: str, lines: Sequence[str]) -> DeviceFacts:
    values = _parse_values(lines)

    def get_known(*path: str) -> str | None:
        return _drop_unknown(values.get(path))

    mig = get_known("MIG Mode", "Current")
    link = ("PCI", "GPU Link Info")
    power = "GPU Power Readings" if ("GPU Power Readings",) in values else "Power Readings"
    return DeviceFacts(
        index=index,
        name=get_known("Product Name"),
        uuid=get_known("GPU UUID"),
        pci_address=normalize_pci_address(address),
        architecture=get_known("Product Architecture"),
        total_bytes=_parse_mib(get_known("FB Memory Usage", "Total")),
        free_bytes=_parse_mib(get_known("FB Memory Usage", "Free")),
        sm_clock_mhz=_parse_whole(get_known("Clocks", "SM")),
        max_sm_clock_mhz=_parse_whole(get_known("Max Clocks", "SM")),
        memory_clock_mhz=_parse_whole(get_known("Clocks", "Memory")),
        max_memory_clock_mhz=_parse_whole(get_known("Max Clocks", "Memory")),
        power_limit_w=parse_decimal(
            get_known(power, "Current Power Limit") or get_known(power, "Enforced Power Limit")
        ),
        max_power_limit_w=parse_decimal(get_known(power, "Max Power Limit")),
        pcie=_make_slot(
            _parse_whole(get_known(*link, "PCIe Generation", "Current")),
            _parse_whole(get_known(*link, "PCIe Generation", "Max")),
            _parse_whole(get_known(*link, "Link Width", "Current")),
            _parse_whole(get_known(*link, "Link Width", "Max")),
        ),
        mig={"Enabled": True, "Disabled": False}.get(mig or ""),
        slices=tuple(_parse_smi_slices(values)) if mig == "Enabled" else None,
        processes=tuple(_parse_smi_processes(values)),
    )


def _parse_smi_slices(values: dict[tuple[str, ...], str]) -> Iterator[SliceFacts]:
    for path in values:
        if len(path) == 1 and re.fullmatch(r"MIG Device(?: [0-9]+)?", path[0]):
            block = path[0]
            shared = (block, "Device Attributes", "Shared", "Multiprocessor count")
            yield SliceFacts(
                total_bytes=_parse_mib(_drop_unknown(values.get((block, "FB Memory Usage", "Total")))),
                free_bytes=_parse_mib(_drop_unknown(values.get((block, "FB Memory Usage", "Free")))),
                multiprocessors=_parse_whole(_drop_unknown(values.get(shared))),
            )


def _parse_smi_processes(values: dict[tuple[str, ...], str]) -> Iterator[GpuProcess]:
    for path, value in values.items():
        if len(path) == 2 and path[0] == "Processes" and re.fullmatch(r"Process ID(?: [0-9]+)?", path[1]):
            pid = parse_natural(value)
            if pid is not None and pid != os.getpid():
                used = _parse_mib(_drop_unknown(values.get((*path, "Used GPU Memory"))))
                yield GpuProcess(pid=pid, name=_get_program(values.get((*path, "Name"))), bytes=used)


def _make_slot(generation: object, max_generation: object, width: object, max_width: object) -> Pcie | None:
    slot = Pcie(
        generation=parse_natural(generation) or None,
        max_generation=parse_natural(max_generation) or None,
        width=validate_lanes(parse_natural(width)),
        max_width=validate_lanes(parse_natural(max_width)),
    )
    return None if slot == Pcie() else slot


def _drop_unknown(value: str | None) -> str | None:
    """`None` for `N/A`, `[N/A]` and `Unknown Error`."""
    if not value or re.fullmatch(r"\[?(N/A|None|Not Supported|Unknown Error|GPU requires reset.*)\]?", value):
        return None
    return value


def _parse_mib(value: str | None) -> int | None:
    match = re.fullmatch(r"([0-9]{1,12}) (MiB|MB)", value or "")
    return int(match[1]) << 20 if match else None


def _parse_whole(value: str | None) -> int | None:
    """`1980 MHz`, `16x` and `5` as numbers."""
    match = re.fullmatch(r"([0-9]{1,9})(?:x| MHz)?", value or "")
    return int(match[1]) if match else None


def _parse_milliwatts(milliwatts: object) -> float | None:
    count = parse_natural(milliwatts)
    return count / 1000 if count else None


def _get_program(command: str | bytes | None) -> str | None:
    """A process's program without folder and options, which may be private."""
    words = (_decode_text(command) or "").strip().split(" -", 1)[0]
    return PurePath(words.replace("\\", "/")).name or None


def _read_command_name(pid: int, root: Path) -> str | None:
    return (read_text(root / f"proc/{pid}/comm") or "").strip() or None


def _decode_text(value: str | bytes | None) -> str | None:
    """Old bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
