"""The GPU of an Apple chip, which shares the machine's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bedplate.facts.cpu import read_sysctl
from bedplate.facts.devices import Ask, FoundAccelerators, ask_program, parse_json, parse_natural
from bedplate.values import Accelerator, Figure

PROFILER = ("system_profiler", "SPHardwareDataType", "SPDisplaysDataType", "-json")
REGISTRY = ("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator")
# The default wired-memory limit of the GPU on macOS. Apple publishes no rule; docs/probe.md lists observed values of
# Metal's recommendedMaxWorkingSetSize as shares of all memory.
LARGE_BYTES = 36 << 30
SMALL_SHARE, SMALL_HIGH = 2 / 3, 0.75
LARGE_SHARE, LARGE_HIGH = 3 / 4, 0.84


@dataclass(frozen=True, kw_only=True, slots=True)
class MacProfile:
    """Chip and GPU as system_profiler reports them."""

    chip: str | None = None
    memory_bytes: int | None = None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    gpu_cores: int | None = None
    metal: str | None = None


def parse_profiler(text: str | None) -> MacProfile:
    """Parse `system_profiler SPHardwareDataType SPDisplaysDataType -json`. Either part may be missing."""
    answer = parse_json(text)
    hardware, display = _get_first_entry(answer, "SPHardwareDataType"), _find_apple_gpu(answer)
    performance, efficiency = parse_core_kinds(hardware.get("number_processors"))
    size = re.fullmatch(r"([0-9]{1,6}) (GB|TB)", str(hardware.get("physical_memory", "")))
    metal = re.fullmatch(r"spdisplays_metal([0-9]{1,2})", str(display.get("spdisplays_mtlgpufamilysupport", "")))
    chip = hardware.get("chip_type") or display.get("sppci_model") or display.get("_name")
    return MacProfile(
        chip=chip if isinstance(chip, str) and chip.startswith("Apple ") else None,
        memory_bytes=int(size[1]) << (30 if size[2] == "GB" else 40) if size else None,
        performance_cores=performance,
        efficiency_cores=efficiency,
        gpu_cores=parse_natural(display.get("sppci_cores")) or None,
        metal=f"Metal {metal[1]}" if metal else None,
    )


def parse_core_kinds(text: object) -> tuple[int | None, int | None]:
    """Performance and efficiency cores: `proc 16:12:4` is 12 and 4 of 16.

    Newer systems report a fourth figure, and chips differ in which of the last two holds the slower cores. All cores
    but those of the first nonzero kind count as efficiency cores.
    """
    match = (
        re.fullmatch(r"proc ([0-9]{1,4}):([0-9]{1,4}):([0-9]{1,4})(?::([0-9]{1,4}))?", text)
        if isinstance(text, str)
        else None
    )
    if match is None:
        return None, None
    total, kinds = int(match[1]), [int(part) for part in match.groups()[1:] if part]
    fast = next((count for count in kinds if count), 0)
    return (fast, total - fast) if sum(kinds) == total else (None, None)


def parse_gpu_cores(text: str | None) -> int | None:
    """The GPU core count in the I/O registry: `"gpu-core-count" = 10`."""
    match = re.search(r'"gpu-core-count"\s*=\s*([0-9]{1,4})\b', text or "")
    return int(match[1]) or None if match else None


def find_wired_limit(sysctl: Mapping[str, str], memory_bytes: int | None) -> Figure | None:
    """The most memory that the GPU may hold: the configured limit, else an estimate of the macOS default."""
    stated = parse_natural(sysctl.get("iogpu.wired_limit_mb"))
    if stated:
        limit = float(stated << 20) if memory_bytes is None else float(min(stated << 20, memory_bytes))
        return Figure(value=limit, low=limit, high=limit, basis="reported", source="sysctl iogpu.wired_limit_mb")
    if memory_bytes is None:
        return None
    return estimate_wired_limit(memory_bytes)


def estimate_wired_limit(memory_bytes: int) -> Figure:
    """An estimate of the macOS default limit: the lowest observed value, with the highest as the upper end."""
    share, high = (LARGE_SHARE, LARGE_HIGH) if memory_bytes >= LARGE_BYTES else (SMALL_SHARE, SMALL_HIGH)
    return Figure(
        value=memory_bytes * share,
        low=memory_bytes * share,
        high=memory_bytes * high,
        basis="estimate",
        source="macOS default observed on other Macs: 2/3 below 36 GB, 3/4 above, more on newer systems; "
        "sudo sysctl iogpu.wired_limit_mb=N sets it",
    )


def make_apple_accelerator(
    sysctl: Mapping[str, str], profile: MacProfile, available_bytes: int, gpu_cores: int | None = None
) -> Accelerator | None:
    """The GPU of an Apple chip; `None` on an Intel Mac."""
    name = sysctl.get("machdep.cpu.brand_string") or profile.chip or ""
    if not name.startswith("Apple "):
        return None
    memory = parse_natural(sysctl.get("hw.memsize")) or profile.memory_bytes
    limit = find_wired_limit(sysctl, memory)
    free = [available_bytes, *([memory] if memory is not None else []), *([round(limit.value)] if limit else [])]
    return Accelerator(
        name=name,
        vendor="apple",
        architecture=profile.metal,
        compute_units=gpu_cores or profile.gpu_cores,
        memory_bytes=memory,
        free_bytes=min(free),
        unified_memory=True,
        wired_limit_bytes=limit,
    )


def read_apple(available_bytes: int, ask: Ask = ask_program) -> FoundAccelerators:
    """The GPU of this Mac; none on an Intel Mac."""
    sysctl = read_sysctl()
    cores = parse_gpu_cores(ask(REGISTRY))
    profile = MacProfile()
    # system_profiler is slow, so it runs only if the others did not answer everything.
    if cores is None or not sysctl.get("machdep.cpu.brand_string") or not sysctl.get("hw.memsize"):
        profile = parse_profiler(ask(PROFILER))
    found = make_apple_accelerator(sysctl, profile, available_bytes, cores)
    notes = () if found or sysctl else ("the chip could not be read: neither sysctl nor system_profiler answered",)
    return FoundAccelerators(accelerators=(found,) if found else (), notes=notes)


def _get_first_entry(answer: Any, kind: str) -> dict[str, Any]:
    listed = answer.get(kind) if isinstance(answer, dict) else None
    return next((item for item in listed if isinstance(item, dict)), {}) if isinstance(listed, list) else {}


def _find_apple_gpu(answer: Any) -> dict[str, Any]:
    listed = answer.get("SPDisplaysDataType") if isinstance(answer, dict) else None
    gpus = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return next((gpu for gpu in gpus if gpu.get("spdisplays_vendor") == "sppci_vendor_Apple"), {})
