"""Probe this machine: combine the facts that each part reports."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from bedplate.facts.amd import read_amd
from bedplate.facts.apple import read_apple
from bedplate.facts.cgroup import CgroupLimits, is_there, read_limits, read_text
from bedplate.facts.cpu import parse_cpuinfo, read_cpu
from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.intel import read_intel
from bedplate.facts.nvidia import read_nvidia
from bedplate.facts.tenstorrent import read_tenstorrent
from bedplate.home import get_home
from bedplate.values import Accelerator, Cpu, Disk, Figure, Hardware, Link, Memory, replace_fields, units
from bedplate.values.hardware import OperatingSystem
from bedplate.values.record import Basis

DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "f2fs", "btrfs", "squashfs", "erofs")
# Names of virtual machines in firmware and clock sources.
VIRTUAL_MACHINES = (
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("virtual machine", "hyper-v"),
    ("hyperv", "hyper-v"),
    ("parallels", "parallels"),
    ("apple virtualization", "apple-virtualization"),
    ("bhyve", "bhyve"),
    ("xen", "xen"),
    ("firecracker", "firecracker"),
    ("kvm", "kvm"),
    ("qemu", "kvm"),
    ("amazon ec2", "kvm"),
    ("google compute engine", "kvm"),
    ("openstack", "kvm"),
)


def probe(*, recall: bool = True) -> Hardware:
    """Probe everything about this machine that matters to inference. Notes state what could not be read."""
    system = detect_operating_system()
    root = Path("/")
    limits = read_limits(root) if system == "linux" else CgroupLimits()
    cpu, cpu_notes = read_cpu(limits, root)
    memory = read_memory(limits, root)
    found = read_accelerators(system, memory, root)
    disk, disk_notes = read_disk()
    hardware = Hardware(
        os=system,
        os_version=read_os_version(system, root),
        container=detect_container(root) if system == "linux" else None,
        cpu=cpu,
        memory=memory,
        accelerators=found.accelerators,
        links=found.links,
        disk=disk,
        notes=(*cpu_notes, *note_numa_gaps(cpu, memory), *found.notes, *disk_notes),
    )
    hardware = add_specs(hardware)
    return add_measurements(hardware) if recall else hardware


def note_numa_gaps(cpu: Cpu, memory: Memory) -> tuple[str, ...]:
    """Some virtual machines get memory later, and their NUMA nodes do not include it."""
    listed = [node.memory_bytes for node in cpu.numa]
    known = sum(size for size in listed if size is not None)
    if not listed or None in listed or known > 0.8 * memory.total_bytes:
        return ()
    return (f"the NUMA nodes list {units.format_memory(known)} of {units.format_memory(memory.total_bytes)} of memory",)


def read_accelerators(system: OperatingSystem, memory: Memory, root: Path = Path("/")) -> FoundAccelerators:
    """The accelerators of all vendors, each with a unique index."""
    if system == "macos":
        return read_apple(memory.available_bytes)
    parts = [read_nvidia(root)]
    if system == "linux":
        parts += [read_amd(root), read_intel(root), read_tenstorrent(root)]
    found = merge_found(parts)
    return replace(found, accelerators=tuple(add_shared_memory(card, memory) for card in found.accelerators))


def merge_found(parts: list[FoundAccelerators]) -> FoundAccelerators:
    """Merge the lists. Every driver counts from 0, so the indexes of later vendors continue after the earlier ones."""
    accelerators: list[Accelerator] = []
    links: list[Link] = []
    notes: list[str] = []
    for part in parts:
        offset = max((card.index for card in accelerators), default=-1) + 1 if part.accelerators else 0
        for card in part.accelerators:
            parent = None if card.parent is None else card.parent + offset
            own = card.index if offset else None
            accelerators.append(replace_fields(card, index=card.index + offset, driver_index=own, parent=parent))
        links += [
            replace_fields(link, a=_shift_index(link.a, offset), b=_shift_index(link.b, offset)) for link in part.links
        ]
        notes += part.notes
    return FoundAccelerators(accelerators=tuple(accelerators), links=tuple(links), notes=tuple(notes))


def add_shared_memory(card: Accelerator, memory: Memory) -> Accelerator:
    """A chip without its own memory uses the machine's."""
    if card.memory_bytes is not None or not card.unified_memory:
        return card
    return replace_fields(card, memory_bytes=memory.total_bytes, free_bytes=memory.available_bytes)


def add_specs(hardware: Hardware) -> Hardware:
    """Add data-sheet figures: memory bandwidth, and the memory of cards whose drivers do not report it."""
    from bedplate.facts.chips import find_accelerator_chip

    cards, notes = [], []
    for card in hardware.accelerators:
        chip = find_accelerator_chip(card)
        if chip is not None:
            rate = chip.bandwidth_bytes_s
            # For a slice, the data sheet gives its share of the card's bandwidth, which is not measured.
            basis: Basis = "spec" if card.parent is None else "estimate"
            figure = Figure(value=rate, low=rate, high=rate, basis=basis, source=chip.source)
            if card.memory_bytes is None and chip.memory_bytes is not None:
                notes.append(f"{card.name}: its driver does not report its memory, so the data sheet's figure is used")
            card = replace_fields(card, bandwidth_bytes_s=figure, memory_bytes=card.memory_bytes or chip.memory_bytes)
        elif card.bandwidth_bytes_s is None and card.parent is None:
            notes.append(f"{card.name} is not in the list of chips, so its memory bandwidth is unknown")
        cards.append(card)
    return replace_fields(
        hardware,
        memory=add_memory_spec(hardware.memory, hardware.cpu),
        accelerators=tuple(cards),
        notes=(*hardware.notes, *dict.fromkeys(notes)),
    )


def add_memory_spec(memory: Memory, cpu: Cpu) -> Memory:
    """RAM with the bandwidth of the CPU's data sheet, if the CPU is known and no better figure exists."""
    from bedplate.facts.chips import estimate_memory_bandwidth, find_cpu_chip

    chip = find_cpu_chip(cpu)
    if memory.bandwidth_bytes_s is not None or chip is None:
        return memory
    return replace_fields(memory, bandwidth_bytes_s=estimate_memory_bandwidth(chip, cpu))


def add_measurements(hardware: Hardware) -> Hardware:
    """Add earlier measurements of this machine."""
    from bedplate.facts.measured import apply_stored

    return apply_stored(hardware)


def detect_operating_system() -> OperatingSystem:
    if sys.platform == "darwin":
        return "macos"
    return "windows" if sys.platform == "win32" else "linux"


def read_os_version(system: OperatingSystem, root: Path = Path("/")) -> str | None:
    if system == "macos":
        return f"macOS {platform.mac_ver()[0]}".strip()
    if system == "windows":
        return f"Windows {platform.release()} {platform.version()}"
    for place in ("etc/os-release", "usr/lib/os-release"):
        if name := parse_os_release(read_text(root / place) or ""):
            return name
    return None


def parse_os_release(text: str) -> str | None:
    """PRETTY_NAME, or name and version if there is none."""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals:
            values[key] = value.strip("\"'")
    return values.get("PRETTY_NAME") or f"{values.get('NAME', '')} {values.get('VERSION_ID', '')}".strip() or None


def detect_container(root: Path = Path("/")) -> str | None:
    """The innermost container or virtual machine that can be detected; `None`: bare metal, or unknown."""
    groups = read_text(root / "proc/self/cgroup") or ""
    declared = (read_text(root / "run/systemd/container") or "").strip()
    if "kubepods" in groups or is_there(root / "var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if is_there(root / "run/.containerenv") or "libpod" in groups:
        return "podman"
    if re.search(r"[/-]docker[/-]", groups):
        return "docker"
    # A virtual machine whose disk was made from a container image keeps Docker's marker files. In a real container / is
    # not a whole disk.
    left_over = is_root_a_disk(read_text(root / "proc/self/mountinfo") or "")
    if is_there(root / ".dockerenv") and not left_over:
        return "docker"
    if re.search(r"/lxc[./]", groups) or is_there(root / "dev/.lxc"):
        return "lxc"
    if declared and not (declared == "docker" and left_over):
        return declared
    if "microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower():
        return "wsl"
    return _detect_virtual_machine(root)


def is_root_a_disk(mountinfo: str) -> bool:
    """Whether / is a whole block device."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) > 4 and len(tail) > 1 and fields[4] == "/":
            device = tail[1].startswith("/dev/") and "docker" not in tail[1]
            return device and fields[3] == "/" and tail[0] in DISK_FILE_SYSTEMS
    return False


def read_memory(limits: CgroupLimits, root: Path = Path("/")) -> Memory:
    """Total and available RAM, within the cgroup's limit."""
    total, available = parse_meminfo(read_text(root / "proc/meminfo") or "") or _read_psutil_memory()
    limit = limits.memory_limit_bytes
    headroom = limits.memory_headroom_bytes
    return Memory(
        total_bytes=total,
        available_bytes=available if headroom is None else min(available, headroom),
        limit_bytes=limit if limit is not None and limit < total else None,
    )


def parse_meminfo(text: str) -> tuple[int, int] | None:
    """Total and available bytes in Linux's /proc/meminfo; `None` on old kernels without MemAvailable."""
    values = {key: int(number) * 1024 for key, number in re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", text, re.MULTILINE)}
    total, available = values.get("MemTotal"), values.get("MemAvailable")
    return (total, min(available, total)) if total and available is not None else None


def read_disk() -> tuple[Disk | None, tuple[str, ...]]:
    """The disk of BEDPLATE_HOME, which may not exist yet."""
    try:
        path = get_home()
        there = next(folder for folder in (path, *path.parents) if is_there(folder))
        usage = shutil.disk_usage(there)
    except (OSError, RuntimeError, StopIteration) as error:
        return None, (f"the disk of BEDPLATE_HOME could not be read: {error}",)
    return Disk(path=str(path), total_bytes=usage.total, free_bytes=usage.free), ()


def _shift_index(end: str, offset: int) -> str:
    return str(int(end) + offset) if end.isdigit() else end


def _detect_virtual_machine(root: Path) -> str | None:
    firmware = [root / "sys/class/dmi/id" / name for name in ("product_name", "sys_vendor", "bios_vendor")]
    clocks = root / "sys/devices/system/clocksource/clocksource0/available_clocksource"
    inside = "hypervisor" in parse_cpuinfo(read_text(root / "proc/cpuinfo") or "").flags
    if not inside and platform.machine() in ("x86_64", "AMD64", "i686"):
        return None  # for example a bare-metal cloud instance, whose firmware has the same vendor name
    for place in (*firmware, root / "sys/hypervisor/type", clocks):
        content = (read_text(place) or "").lower()
        for sign, kind in VIRTUAL_MACHINES:
            if sign in content:
                return kind
    return "vm" if inside else None


def _read_psutil_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available
