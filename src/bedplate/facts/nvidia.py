"""NVIDIA GPUs, as the driver's management library (NVML) reports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedplate.facts.cgroup import is_there, read_text
from bedplate.values import Accelerator

# Importing the bindings costs more than the rest of the probe, so first see whether a driver has left any trace:
# the kernel module, its device files (a sandbox may show only these), WSL's paravirtual GPU, or a Jetson's.
DRIVER_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvmap")
NVIDIA_PCI_VENDOR = "0x10de"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAnswers:
    """What NVML answered about one GPU; `None` where it would not."""

    index: int
    name: str | bytes | None = None
    uuid: str | bytes | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig: bool = False


def accelerator(answers: DeviceAnswers, driver_version: str | bytes | None) -> Accelerator:
    capability = answers.compute_capability
    return Accelerator(
        name=_text(answers.name) or "NVIDIA GPU",
        vendor="nvidia",
        index=answers.index,
        memory_bytes=answers.total_bytes,
        free_bytes=answers.free_bytes,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        driver_version=_text(driver_version),
    )


def conclude(
    devices: Sequence[DeviceAnswers], driver_version: str | bytes | None, visible_devices: str | None = None
) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """The GPUs that engines will see, and notes on what is odd about them."""
    kept = visible([_text(device.uuid) for device in devices], visible_devices)
    notes = []
    if len(kept) < len(devices):
        hidden = len(devices) - len(kept)
        notes.append(f"CUDA_VISIBLE_DEVICES={visible_devices} hides {hidden} of {len(devices)} NVIDIA GPUs")
    for position in kept:
        device = devices[position]
        if device.mig:
            notes.append(f"GPU {device.index} is split by MIG: its memory is that of the whole card, not of one slice")
        if device.total_bytes is None:
            notes.append(f"GPU {device.index}: the driver does not say how much memory it has")
    return tuple(accelerator(devices[position], driver_version) for position in kept), tuple(notes)


def visible(uuids: Sequence[str | None], value: str | None) -> tuple[int, ...]:
    """Positions that CUDA_VISIBLE_DEVICES leaves, in its order; as in CUDA, the first entry that names none ends it."""
    if value is None:
        return tuple(range(len(uuids)))
    kept: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isascii() and entry.isdigit() and len(entry) < 6:
            found = int(entry) if int(entry) < len(uuids) else None
        elif entry.startswith("MIG-"):
            # A slice's own name: which card it is on cannot be told from it, and slices are not counted apart here.
            return tuple(range(len(uuids)))
        else:
            starts = entry.startswith("GPU-")
            matches = [place for place, uuid in enumerate(uuids) if starts and uuid and uuid.startswith(entry)]
            found = matches[0] if len(matches) == 1 else None
        if found is None or found in kept:
            break
        kept.append(found)
    return tuple(kept)


def explain(error: str, *, loaded: bool) -> str:
    """Why there is no NVML where a driver or a card seems to be, and what to do; `error` is NVML's own word for it."""
    if "Mismatch" in error or "mismatch" in error:
        return "NVIDIA's driver and its library are of different versions (an update without a restart?): reboot"
    if "LibraryNotFound" in error and loaded:
        return "an NVIDIA driver is loaded but its library is not here: in a container, start it with GPUs (--gpus all)"
    if "LibraryNotFound" in error or "DriverNotLoaded" in error:
        return "an NVIDIA GPU is in this machine but its driver is not loaded, so it cannot be used"
    if "NoPermission" in error:
        return "NVIDIA's driver refuses this user: is the device passed through, and are /dev/nvidia* readable?"
    return f"NVIDIA's driver did not answer ({error})"


def read_nvidia(root: Path = Path("/")) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """All NVIDIA GPUs; none, with a note, where a driver or a card is there but cannot be asked."""
    if sys.platform == "darwin":
        return (), ()
    linux = sys.platform.startswith("linux")
    traces = [trace for trace in DRIVER_TRACES if is_there(root / trace)]
    if linux and not traces:
        return (), (explain("LibraryNotFound", loaded=False),) if card_on_bus(root) else ()
    try:
        import pynvml
    except ImportError:
        return (), ("NVIDIA GPUs are not read: the package nvidia-ml-py is not installed",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Windows, WSL (dxg) and Tegra boards (nvmap) look like this without an NVIDIA GPU that NVML could know.
        certain = any("dev/nvidia" in trace or "proc" in trace for trace in traces)
        return (), (explain(type(error).__name__, loaded=True),) if certain else ()
    try:
        devices = tuple(_ask(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        driver = _answer(pynvml, pynvml.nvmlSystemGetDriverVersion)
        return conclude(devices, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        return (), (explain(type(error).__name__, loaded=True),)
    finally:
        pynvml.nvmlShutdown()


def card_on_bus(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA card is plugged in, driver or not."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = read_text(device / "vendor") or "", read_text(device / "class") or ""
        # 0x03….: a display or 3D controller, not the sound or USB function of a card.
        if vendor.strip() == NVIDIA_PCI_VENDOR and kind.startswith("0x03"):
            return True
    return False


def _ask(nvml: Any, index: int) -> DeviceAnswers:
    handle = _answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return DeviceAnswers(index=index)
    memory = _answer(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    mig = _answer(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return DeviceAnswers(
        index=index,
        name=_answer(nvml, nvml.nvmlDeviceGetName, handle),
        uuid=_answer(nvml, nvml.nvmlDeviceGetUUID, handle),
        total_bytes=int(memory.total) if memory is not None else None,
        free_bytes=int(memory.free) if memory is not None else None,
        compute_capability=_answer(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        mig=bool(mig and mig[0]),
    )


def _answer(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """One NVML answer. Cards and slices each support some questions only, so a refusal is an unknown, not a failure."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    """Old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
