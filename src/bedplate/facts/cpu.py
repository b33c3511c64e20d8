"""The CPU: its name, its instruction sets, and how many of its cores this process may use."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bedplate.facts.cgroup import CgroupLimits, parse_cpu_list, read_text
from bedplate.values import Cache, Cpu, NumaNode

# Instruction sets that inference engines have kernels for, from old to new: bedplate's name and the display name.
INSTRUCTION_SETS = {
    "sse4_2": "SSE4.2",
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512bw": "AVX-512 BW",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_tile": "AMX",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "neon": "NEON",
    "dotprod": "dot product",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
    "sme": "SME",
}
# Each line is one kind of unit. The summary names the first one present on each line.
SUMMARY = (
    ("avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "neon"),
    ("amx_tile", "sme", "i8mm", "dotprod"),
)
ARM_FEATURES = {"asimd": "neon", "asimddp": "dotprod"}
SYSCTL_FEATURES = {
    "hw.optional.sse4_2": "sse4_2",
    "hw.optional.avx1_0": "avx",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.f16c": "f16c",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.neon": "neon",
    "hw.optional.AdvSIMD": "neon",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
}
VENDORS = {
    "GenuineIntel": "intel",
    "AuthenticAMD": "amd",
    "HygonGenuine": "hygon",
    "CentaurHauls": "centaur",
    "Shanghai": "zhaoxin",
    "IBM/S390": "ibm",
}
IMPLEMENTERS = {
    0x41: "arm",
    0x42: "broadcom",
    0x43: "cavium",
    0x46: "fujitsu",
    0x48: "hisilicon",
    0x4E: "nvidia",
    0x50: "apm",
    0x51: "qualcomm",
    0x53: "samsung",
    0x61: "apple",
    0x6D: "microsoft",
    0x70: "phytium",
    0xC0: "ampere",
}
# Part numbers of the main ID register, from the vendors' reference manuals.
PARTS = {
    0x41: {
        0xB76: "ARM1176", 0xC07: "Cortex-A7", 0xC08: "Cortex-A8", 0xC09: "Cortex-A9", 0xC0D: "Cortex-A17",
        0xC0E: "Cortex-A17", 0xC0F: "Cortex-A15", 0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55",
        0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76",
        0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78",
        0xD42: "Cortex-A78AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD48: "Cortex-X2",
        0xD49: "Neoverse-N2", 0xD4A: "Neoverse-E1", 0xD4B: "Cortex-A78C", 0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715",
        0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4",
        0xD83: "Neoverse-V3AE", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725", 0xD8E: "Neoverse-N3",
    },
    0x43: {0x0A1: "ThunderX", 0x0AF: "ThunderX2"},
    0x46: {0x001: "A64FX"},
    0x48: {0xD01: "Kunpeng 920", 0xD02: "TaiShan v120"},
    0x4E: {0x003: "Denver 2", 0x004: "Carmel"},
    0x51: {0x001: "Oryon"},
    0x61: {
        0x022: "Apple M1", 0x023: "Apple M1", 0x024: "Apple M1 Pro", 0x025: "Apple M1 Pro", 0x028: "Apple M1 Max",
        0x029: "Apple M1 Max", 0x032: "Apple M2", 0x033: "Apple M2", 0x034: "Apple M2 Pro", 0x035: "Apple M2 Pro",
        0x038: "Apple M2 Max", 0x039: "Apple M2 Max",
    },
    0x6D: {0xD49: "Azure Cobalt 100"},
    0xC0: {0xAC3: "AmpereOne", 0xAC4: "AmpereOne"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """One logical CPU."""

    number: int
    package: int | None = None
    core: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuInfo:
    """The contents of /proc/cpuinfo."""

    name: str | None = None
    vendor: str | None = None
    board: str | None = None
    processors: tuple[Processor, ...] = ()
    flags: frozenset[str] = frozenset()
    """Flags that every CPU has, because a thread may run on any of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreCounts:
    sockets: int | None
    physical: int
    allowed_physical: int


def select_instruction_sets(flags: Collection[str]) -> tuple[str, ...]:
    """The known instruction sets among `flags` (Linux's names or bedplate's), in a fixed order."""
    names = {ARM_FEATURES.get(flag, flag) for flag in flags}
    return tuple(name for name in INSTRUCTION_SETS if name in names)


def summarize_instruction_sets(sets: Collection[str]) -> str:
    """A short summary such as "AVX-512 AMX"; empty if nothing is known."""
    best = (next((name for name in kind if name in sets), None) for kind in SUMMARY)
    return " ".join(INSTRUCTION_SETS[name] for name in best if name)


def parse_cpuinfo(text: str) -> CpuInfo:
    """Parse Linux's /proc/cpuinfo, whose keys depend on the architecture."""
    blocks: list[dict[str, str]] = []
    common: dict[str, str] = {}
    numbers: list[int] = []
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if not colon:
            continue
        # s390x has one line for each CPU: "processor 3: version = 00,  identification = …,  machine = 2817".
        if match := re.fullmatch(r"processor ([0-9]{1,5})", key):
            numbers.append(int(match[1]))
            common.setdefault("machine", value.rpartition("machine =")[2].strip())
        elif key == "processor" and (number := _parse_integer(value)) is not None:
            numbers.append(number)
            blocks.append({})
        elif blocks:
            blocks[-1].setdefault(key, value)
        common.setdefault(key, value)
    flags = [set(found.split()) for block in blocks or [common] if (found := _get_first(block, "flags", "Features"))]
    return CpuInfo(
        name=_find_arm_name(blocks) or _find_plain_name(common),
        vendor=_find_vendor(common),
        board=common.get("Model") or None,
        processors=tuple(
            Processor(
                number=number,
                package=_parse_integer(block.get("physical id")),
                core=_parse_integer(block.get("core id")),
            )
            for number, block in zip(numbers, blocks or [{} for _ in numbers], strict=False)
        ),
        flags=frozenset(set.intersection(*flags)) if flags else frozenset(),
    )


def count_cores(
    processors: Collection[Processor], siblings: Mapping[int, frozenset[int]], allowed: frozenset[int]
) -> CoreCounts:
    """All physical cores, and how many distinct ones `allowed` covers.

    `siblings` (CPUs that share a core, from sysfs) is used if /proc/cpuinfo lists no cores, as on ARM.
    """

    def identify_core(processor: Processor) -> object:
        if processor.core is not None:
            return processor.package or 0, processor.core
        return siblings.get(processor.number, processor.number)

    physical = len({identify_core(processor) for processor in processors})
    reached = {identify_core(processor) for processor in processors if processor.number in allowed}
    allowed_physical = len(reached)
    if not allowed <= {processor.number for processor in processors}:
        # lxcfs shows a container only its own CPUs, renumbered from 0. The affinity mask keeps the host's numbers.
        if all(number in siblings for number in allowed):
            allowed_physical = len({siblings[number] for number in allowed})
        else:
            allowed_physical = min(len(allowed), physical or len(allowed))
    packages = {processor.package for processor in processors if processor.package is not None}
    return CoreCounts(
        sockets=len(packages) or None,
        physical=max(physical, allowed_physical),
        allowed_physical=max(1, allowed_physical),
    )


def cap_by_quota(cores: int, quota_cores: float | None) -> int:
    """The cores that a CPU quota can keep busy. Beyond it the kernel throttles a thread, and all others wait for it."""
    return cores if quota_cores is None else max(1, min(cores, math.floor(quota_cores)))


def parse_sysctl(text: str) -> dict[str, str]:
    """Parse the output of macOS's `sysctl`: one `key: value` per line."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def make_mac_cpu(values: Mapping[str, str], arch: str) -> Cpu | None:
    """The CPU of a Mac; `None` if the text has no core count."""
    logical = _parse_integer(_get_first(values, "hw.logicalcpu", "hw.ncpu", "machdep.cpu.thread_count"))
    if not logical:
        return None
    physical = _parse_integer(_get_first(values, "hw.physicalcpu", "machdep.cpu.core_count"))
    performance, efficiency = read_core_kinds(values)
    apple = values.get("hw.optional.arm64") == "1"
    flags = {name for key, name in SYSCTL_FEATURES.items() if values.get(key) == "1"}
    flags |= {word.replace(".", "_") for word in values.get("machdep.cpu.features", "").lower().split()}
    flags |= {"avx"} if "avx1_0" in flags else set()
    flags |= set(values.get("machdep.cpu.leaf7_features", "").lower().split())
    return Cpu(
        name=values.get("machdep.cpu.brand_string") or "unknown CPU",
        vendor="apple" if apple else VENDORS.get(values.get("machdep.cpu.vendor", "")),
        # A translated x86 Python reports x86_64 on an ARM chip.
        arch="arm64" if apple else arch,
        sockets=_parse_integer(values.get("hw.packages")),
        physical_cores=physical,
        performance_cores=performance,
        efficiency_cores=efficiency,
        logical_cores=logical,
        allowed_cores=float(logical),
        allowed_physical_cores=max(1, physical or logical),
        instruction_sets=select_instruction_sets(flags),
        caches=list_sysctl_caches(values),
    )


def read_core_kinds(values: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Performance and efficiency cores of an Apple chip. Level 0 is the fastest kind."""
    levels = _parse_integer(values.get("hw.nperflevels")) or 0
    counts = [_parse_integer(values.get(f"hw.perflevel{level}.physicalcpu")) for level in range(min(levels, 8))]
    known = [count for count in counts if count]
    return (known[0], sum(known[1:])) if len(known) > 1 else (None, None)


def list_sysctl_caches(values: Mapping[str, str]) -> tuple[Cache, ...]:
    """The caches that macOS lists, for each kind of core or once for all."""
    found: list[Cache] = []
    for level in ("hw.perflevel0.", "hw.perflevel1.", "hw."):
        cores = _parse_integer(_get_first(values, f"{level}physicalcpu", f"{level}ncpu"))
        if not cores or (level == "hw." and found):
            continue
        l1d, l2 = _parse_integer(values.get(f"{level}l1dcachesize")), _parse_integer(values.get(f"{level}l2cachesize"))
        l3, shared = (
            _parse_integer(values.get(f"{level}l3cachesize")),
            _parse_integer(values.get(f"{level}cpusperl2")) or 1,
        )
        if l1d:
            found.append(Cache(level=1, kind="data", bytes=l1d, count=cores, shared_by=1))
        if l2:
            found.append(Cache(level=2, kind="unified", bytes=l2, count=-(-cores // shared), shared_by=shared))
        if l3:
            found.append(Cache(level=3, kind="unified", bytes=l3, count=1, shared_by=cores))
    return tuple(found)


def read_cpu(limits: CgroupLimits | None = None, root: Path = Path("/")) -> tuple[Cpu, tuple[str, ...]]:
    """This machine's CPU, and notes on what could not be read."""
    limits = limits or CgroupLimits()
    if sys.platform == "darwin":
        if cpu := make_mac_cpu(read_sysctl(), platform.machine()):
            return cpu, ()
        return _make_plain_cpu("sysctl reports no CPU; using the operating system's core counts")
    if sys.platform.startswith("linux"):
        text = read_text(root / "proc/cpuinfo")
        if text and (cpu := make_linux_cpu(text, platform.machine(), os.sched_getaffinity(0), limits, root)):
            return cpu, ()
        return _make_plain_cpu("/proc/cpuinfo lists no CPU; hyper-threads may be counted as cores")
    return _make_plain_cpu("bedplate does not read CPU instruction sets on this operating system")


def make_linux_cpu(
    cpuinfo: str, arch: str, affinity: Collection[int], limits: CgroupLimits, root: Path = Path("/")
) -> Cpu | None:
    """The CPU that `cpuinfo` describes, as far as `affinity` and `limits` allow its use."""
    info = parse_cpuinfo(cpuinfo)
    if not info.processors:
        return None
    allowed = frozenset(affinity) or frozenset(processor.number for processor in info.processors)
    # The mask follows the cpuset, but some sandboxes show a cpuset with CPUs that this process cannot use.
    allowed = allowed & (limits.cpus or allowed) or allowed
    named = all(processor.core is not None for processor in info.processors)
    renumbered = not allowed <= {processor.number for processor in info.processors}
    siblings = read_siblings(root) if renumbered or not named else {}
    cores = count_cores(info.processors, siblings, allowed)
    board = info.board or _read_board(root)
    name = info.name or f"unknown {arch} CPU"
    quota = limits.cpu_quota_cores
    return Cpu(
        name=f"{name} ({board})" if board else name,
        vendor=info.vendor,
        arch=arch,
        sockets=cores.sockets,
        physical_cores=cores.physical,
        logical_cores=max(len(info.processors), len(allowed)),
        allowed_cores=float(len(allowed)) if quota is None else min(float(len(allowed)), quota),
        allowed_physical_cores=cap_by_quota(cores.allowed_physical, quota),
        instruction_sets=select_instruction_sets(info.flags),
        caches=read_caches(root),
        numa=read_numa(root),
    )


def read_caches(root: Path = Path("/")) -> tuple[Cache, ...]:
    """The caches by level and kind; identical ones are counted together.

    Empty if the kernel shows none, as in some VMs.
    """
    seen: dict[str, set[int]] = {}
    counts: Counter[tuple[int, str, int, int]] = Counter()
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    for number, folder in sorted((_parse_integer(folder.name[3:]) or 0, folder) for folder in folders):
        for index in folder.glob("cache/index[0-9]*"):
            # Every CPU that shares a cache lists it. A known one is not read again.
            known = seen.setdefault(index.name, set())
            if number in known:
                continue
            shared = parse_cpu_list(read_text(index / "shared_cpu_list")) or frozenset([number])
            known |= shared | {number}
            level, size = _parse_integer(_read_line(index / "level")), parse_cache_size(_read_line(index / "size"))
            if level and size:
                counts[level, _read_line(index / "type") or "Unified", size, len(shared)] += 1
    kinds: dict[str, Literal["data", "instruction", "unified"]] = {
        "Data": "data",
        "Instruction": "instruction",
        "Unified": "unified",
    }
    return tuple(
        Cache(level=level, kind=kinds[kind], bytes=size, count=count, shared_by=shared)
        for (level, kind, size, shared), count in sorted(counts.items())
        if kind in kinds
    )


def parse_cache_size(text: str | None) -> int | None:
    """`48K` or `32M` in bytes."""
    match = re.fullmatch(r"([0-9]{1,9})([KMG]?)", text or "")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else None


def read_numa(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Each node's CPUs and memory; empty if the kernel was built without NUMA."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        index = _parse_integer(folder.name.removeprefix("node"))
        if index is not None:
            cpus = _read_line(folder / "cpulist") or ""
            total, free = parse_node_meminfo(read_text(folder / "meminfo") or "")
            found.append(
                NumaNode(index=index, cpus=cpus if parse_cpu_list(cpus) else "", memory_bytes=total, free_bytes=free)
            )
    return tuple(sorted(found, key=lambda node: node.index))


def parse_node_meminfo(text: str) -> tuple[int | None, int | None]:
    """Total and free bytes of `Node 0 MemTotal:       32617188 kB` and so on."""
    values = dict(re.findall(r"^Node [0-9]+ (MemTotal|MemFree):\s+([0-9]{1,15}) kB", text, re.MULTILINE))
    total, free = values.get("MemTotal"), values.get("MemFree")
    return int(total) * 1024 if total else None, int(free) * 1024 if free else None


def read_siblings(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """The CPUs that share a core with each CPU."""
    found = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        number = _parse_integer(folder.name.removeprefix("cpu"))
        shared = parse_cpu_list(read_text(folder / "topology/thread_siblings_list"))
        if number is not None and shared:
            found[number] = shared
    return found


def read_sysctl() -> dict[str, str]:
    """macOS's sysctl values; empty if there is no sysctl."""
    try:
        done = subprocess.run(["sysctl", "hw", "machdep.cpu", "iogpu"], capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_sysctl(done.stdout.decode(errors="replace"))


def _make_plain_cpu(note: str) -> tuple[Cpu, tuple[str, ...]]:
    """A CPU from the counts that every operating system reports."""
    import psutil

    logical = psutil.cpu_count() or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False)
    process = psutil.Process()
    allowed = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else logical
    return Cpu(
        name=_read_registry_name() or platform.processor() or f"unknown {platform.machine()} CPU",
        arch=platform.machine(),
        physical_cores=physical,
        logical_cores=logical,
        allowed_cores=float(allowed),
        allowed_physical_cores=max(1, min(allowed, physical or allowed)),
    ), (note,)


def _read_registry_name() -> str | None:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            return None
    return None


def _find_arm_name(blocks: list[dict[str, str]]) -> str | None:
    """The distinct core names: "Cortex-A55 + Cortex-A76"."""
    names: list[str] = []
    for block in blocks:
        implementer, part = _parse_integer(block.get("CPU implementer"), 16), _parse_integer(block.get("CPU part"), 16)
        if implementer is None or part is None:
            continue
        maker = IMPLEMENTERS.get(implementer, f"{implementer:#04x}")
        name = PARTS.get(implementer, {}).get(part, f"{maker} core {part:#05x}")
        if name not in names:
            names.append(name)
    return " + ".join(names) or None


def _find_plain_name(common: Mapping[str, str]) -> str | None:
    if found := _get_first(common, "model name", "Model Name", "cpu model", "uarch"):
        return " ".join(found.split())
    if found := common.get("cpu"):  # POWER: "POWER8E (raw), altivec supported"
        return found.partition(",")[0].strip() or None
    if machine := common.get("machine"):
        return f"IBM Z ({machine})" if common.get("vendor_id") == "IBM/S390" else None
    return None


def _find_vendor(common: Mapping[str, str]) -> str | None:
    if (implementer := _parse_integer(common.get("CPU implementer"), 16)) is not None:
        return IMPLEMENTERS.get(implementer)
    if (common.get("cpu") or "").startswith("POWER"):
        return "ibm"
    return VENDORS.get(common.get("vendor_id", ""))


def _read_board(root: Path) -> str | None:
    """The board name in the device tree, such as "Raspberry Pi 5 Model B Rev 1.0"."""
    return (read_text(root / "proc/device-tree/model") or "").strip("\0 \n") or None


def _read_line(path: Path) -> str | None:
    return (read_text(path) or "").strip() or None


def _get_first(values: Mapping[str, str], *keys: str) -> str | None:
    return next((values[key] for key in keys if values.get(key)), None)


def _parse_integer(text: str | None, base: int = 10) -> int | None:
    pattern = r"(0x)?[0-9a-fA-F]{1,8}" if base == 16 else r"[0-9]{1,9}"
    return int(text, base) if text and re.fullmatch(pattern, text) else None
