"""This machine, put together from what each part of it reports."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bedplate.facts.cgroup import CgroupLimits, is_there, read_limits, read_text
from bedplate.facts.cpu import parse_cpuinfo, read_cpu, read_sysctl
from bedplate.facts.nvidia import read_nvidia
from bedplate.home import home
from bedplate.values import Accelerator, Disk, Hardware, Memory
from bedplate.values.hardware import OperatingSystem

AMD_PCI_VENDOR = "0x1002"
DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "f2fs", "btrfs", "squashfs", "erofs")
# What firmware and clocks call the machine inside of which we run.
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


def probe() -> Hardware:
    """Everything about this machine that matters to inference; what could not be read is in its notes."""
    system = operating_system()
    root = Path("/")
    limits = read_limits(root) if system == "linux" else CgroupLimits()
    cpu, cpu_notes = read_cpu(limits, root)
    memory = read_memory(limits, root)
    accelerators, gpu_notes = read_nvidia(root)
    if system == "linux":
        accelerators += read_amd(root)
    elif system == "macos":
        accelerators, gpu_notes = read_apple(memory.available_bytes)
    disk, disk_notes = read_disk()
    return Hardware(
        os=system,
        os_version=os_version(system, root),
        container=container_kind(root) if system == "linux" else None,
        cpu=cpu,
        memory=memory,
        accelerators=accelerators,
        disk=disk,
        notes=(*cpu_notes, *gpu_notes, *disk_notes),
    )


def operating_system() -> OperatingSystem:
    if sys.platform == "darwin":
        return "macos"
    return "windows" if sys.platform == "win32" else "linux"


def os_version(system: OperatingSystem, root: Path = Path("/")) -> str | None:
    if system == "macos":
        return f"macOS {platform.mac_ver()[0]}".strip()
    if system == "windows":
        return f"Windows {platform.release()} {platform.version()}"
    for place in ("etc/os-release", "usr/lib/os-release"):
        if name := parse_os_release(read_text(root / place) or ""):
            return name
    return None


def parse_os_release(text: str) -> str | None:
    """PRETTY_NAME, or the name and version where a distribution has none."""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals:
            values[key] = value.strip("\"'")
    return values.get("PRETTY_NAME") or f"{values.get('NAME', '')} {values.get('VERSION_ID', '')}".strip() or None


def container_kind(root: Path = Path("/")) -> str | None:
    """The innermost container or virtual machine that leaves a trace; `None` is bare metal, or cannot be told."""
    groups = read_text(root / "proc/self/cgroup") or ""
    declared = (read_text(root / "run/systemd/container") or "").strip()
    if "kubepods" in groups or is_there(root / "var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if is_there(root / "run/.containerenv") or "libpod" in groups:
        return "podman"
    if re.search(r"[/-]docker[/-]", groups):
        return "docker"
    # A virtual machine whose disk was made from an image keeps Docker's marks; a real container's / is no whole disk.
    left_over = root_is_disk(read_text(root / "proc/self/mountinfo") or "")
    if is_there(root / ".dockerenv") and not left_over:
        return "docker"
    if re.search(r"/lxc[./]", groups) or is_there(root / "dev/.lxc"):
        return "lxc"
    if declared and not (declared == "docker" and left_over):
        return declared
    if "microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower():
        return "wsl"
    return _virtual_machine(root)


def root_is_disk(mountinfo: str) -> bool:
    """Whether / is a whole block device."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) > 4 and len(tail) > 1 and fields[4] == "/":
            device = tail[1].startswith("/dev/") and "docker" not in tail[1]
            return device and fields[3] == "/" and tail[0] in DISK_FILE_SYSTEMS
    return False


def read_memory(limits: CgroupLimits, root: Path = Path("/")) -> Memory:
    """RAM in all and what is left of it, the control group's limit included."""
    total, available = parse_meminfo(read_text(root / "proc/meminfo") or "") or _psutil_memory()
    limit = limits.memory_limit_bytes
    headroom = limits.memory_headroom_bytes
    return Memory(
        total_bytes=total,
        available_bytes=available if headroom is None else min(available, headroom),
        limit_bytes=limit if limit is not None and limit < total else None,
    )


def parse_meminfo(text: str) -> tuple[int, int] | None:
    """Total and available bytes from Linux's /proc/meminfo; `None` before kernels had MemAvailable."""
    values = {key: int(number) * 1024 for key, number in re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", text, re.MULTILINE)}
    total, available = values.get("MemTotal"), values.get("MemAvailable")
    return (total, min(available, total)) if total and available is not None else None


def read_amd(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """AMD GPUs, from what the amdgpu driver puts into sysfs."""
    cards = [
        (int(match[1]), folder / "device")
        for folder in (root / "sys/class/drm").glob("card*")
        if (match := re.fullmatch(r"card([0-9]{1,4})", folder.name))
    ]
    devices = [device for _, device in sorted(cards) if _word(device / "vendor") == AMD_PCI_VENDOR]
    return tuple(amd_accelerator(index, device, root) for index, device in enumerate(devices))


def amd_accelerator(index: int, device: Path, root: Path = Path("/")) -> Accelerator:
    total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
    chip = _word(device / "device")
    return Accelerator(
        name=_word(device / "product_name") or f"AMD GPU {chip or ''}".strip(),
        vendor="amd",
        index=index,
        memory_bytes=total,
        free_bytes=max(0, total - used) if total is not None and used is not None else None,
        driver_version=_word(root / "sys/module/amdgpu/version"),
    )


def apple_accelerator(sysctl: Mapping[str, str], profiler: Mapping[str, str], available: int) -> Accelerator | None:
    """The GPU of an Apple chip, which shares the machine's memory; `None` on an Intel Mac."""
    name = sysctl.get("machdep.cpu.brand_string") or profiler.get("Chip") or ""
    if not name.startswith("Apple "):
        return None
    size = re.fullmatch(r"([0-9]{1,6}) GB", profiler.get("Memory", ""))
    stated = sysctl.get("hw.memsize", "")
    memory = int(stated) if re.fullmatch(r"[0-9]{1,18}", stated) else int(size[1]) << 30 if size else None
    return Accelerator(
        name=name,
        vendor="apple",
        memory_bytes=memory,
        free_bytes=available if memory is None else min(available, memory),
        unified_memory=True,
    )


def parse_system_profiler(text: str) -> dict[str, str]:
    """`system_profiler SPHardwareDataType` as pairs."""
    pairs = (line.strip().partition(": ") for line in text.splitlines())
    return {key: value.strip() for key, colon, value in pairs if colon}


def read_apple(available: int) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """The GPU of this Mac; none on an Intel Mac."""
    sysctl = read_sysctl()
    # system_profiler takes its time, so it is asked only where sysctl left something open.
    profiler: dict[str, str] = {}
    if not sysctl.get("machdep.cpu.brand_string") or not sysctl.get("hw.memsize"):
        try:
            argv = ["system_profiler", "SPHardwareDataType"]
            done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
            profiler = parse_system_profiler(done.stdout.decode(errors="replace"))
        except (OSError, subprocess.SubprocessError) as error:
            return (), (f"the chip could not be read: system_profiler failed ({error})",)
    found = apple_accelerator(sysctl, profiler, available)
    return (found,) if found else (), ()


def read_disk() -> tuple[Disk | None, tuple[str, ...]]:
    """The disk that holds, or will hold, BEDPLATE_HOME."""
    try:
        path = home()
        there = next(folder for folder in (path, *path.parents) if is_there(folder))
        usage = shutil.disk_usage(there)
    except (OSError, RuntimeError, StopIteration) as error:
        return None, (f"the disk of BEDPLATE_HOME could not be read: {error}",)
    return Disk(path=str(path), total_bytes=usage.total, free_bytes=usage.free), ()


def _virtual_machine(root: Path) -> str | None:
    firmware = [root / "sys/class/dmi/id" / name for name in ("product_name", "sys_vendor", "bios_vendor")]
    clocks = root / "sys/devices/system/clocksource/clocksource0/available_clocksource"
    inside = "hypervisor" in parse_cpuinfo(read_text(root / "proc/cpuinfo") or "").flags
    if not inside and platform.machine() in ("x86_64", "AMD64", "i686"):
        return None  # such as a bare-metal cloud instance, whose firmware has the same vendor's name
    for place in (*firmware, root / "sys/hypervisor/type", clocks):
        said = (read_text(place) or "").lower()
        for sign, kind in VIRTUAL_MACHINES:
            if sign in said:
                return kind
    return "vm" if inside else None


def _psutil_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _word(path: Path) -> str | None:
    return (read_text(path) or "").strip() or None


def _number(path: Path) -> int | None:
    word = _word(path)
    return int(word) if word and re.fullmatch(r"[0-9]{1,18}", word) else None
