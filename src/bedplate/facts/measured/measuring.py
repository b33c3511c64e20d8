"""Run all measurements one after the other, because they would disturb each other."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import TypeVar

from bedplate.errors import BedplateError, ExternalFailure
from bedplate.facts.measured import cuda, disk, matrix, ram
from bedplate.facts.measured.cache import identify_machine, recall, remember
from bedplate.facts.measured.instructions import check_instruction_sets
from bedplate.facts.measured.part import run_part
from bedplate.progress import Progress, SilentProgress
from bedplate.values import Hardware, Record, replace_fields
from bedplate.values.measurements import TOO_LOW, GpuBandwidth, Measurements

BUSY_SHARE = 0.15
"""Share of all CPUs. An idle desktop stays below it."""
R = TypeVar("R", bound=Record)


def measure(hardware: Hardware, progress: Progress | None = None) -> Measurements:
    """Measure this machine, which takes seconds, and store the figures. A part that fails becomes a note."""
    progress = progress or SilentProgress()
    notes = list(find_disturbances(hardware, _measure_busy_share()))
    began = time.monotonic()
    machine = identify_machine(hardware)
    now = dt.datetime.now().astimezone()
    when = f"{now:%Y-%m-%d}, {hardware.os} {machine.kernel}"
    cpu, free = hardware.cpu, hardware.memory.available_bytes

    def run_one_part(label: str, name: str, request: Record, result: type[R], empty: R, limit_s: float = 60.0) -> R:
        with progress.step(label, 100) as update:
            return _try_part(lambda: run_part(name, request, result, update, limit_s=limit_s), empty, label, notes)

    with progress.step("checking instruction sets", max(1, len(cpu.instruction_sets))) as update:
        checks = check_instruction_sets(cpu.instruction_sets, cpu.arch, update)
    memory = run_one_part(
        "measuring RAM bandwidth", "ram", ram.make_request(cpu, free, when), ram.RamResult, ram.RamResult()
    )
    gpus = cuda.CudaResult()
    if hardware.has_vendor("nvidia"):
        asked = cuda.make_request(hardware.accelerators, free, when)
        limit_s = 60.0 + 15 * len(asked.cards)
        gpus = run_one_part("measuring GPU and link bandwidth", "cuda", asked, cuda.CudaResult, gpus, limit_s)
    products = run_one_part(
        "measuring matrix products",
        "matrix",
        matrix.make_request(hardware.accelerators, cpu.allowed_physical_cores, when),
        matrix.MatrixResult,
        matrix.MatrixResult(),
    )
    reads = run_one_part("measuring disk reads", "disk", disk.make_request(when), disk.DiskResult, disk.DiskResult())
    found = Measurements(
        when=now.isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - began, 1),
        machine=machine,
        instruction_sets=checks,
        ram_all_cores=memory.all_cores,
        ram_one_core=memory.one_core,
        gpus=_add_specs(gpus.gpus, hardware),
        peers=gpus.peers,
        matrix=products.rates,
        disk=reads.disk,
        notes=(*notes, *memory.notes, *gpus.notes, *products.notes, *reads.notes, *_note_unmeasured(hardware)),
    )
    earlier = recall(machine)
    if found.disturbances and earlier is not None and not earlier.disturbances:
        kept = f"not stored: the figures of {earlier.when[:10]}, measured on the idle machine, stay in use"
        return replace_fields(found, notes=(*found.notes, kept))
    try:
        remember(found)
    except ExternalFailure as error:
        unkept = (
            f"the figures could not be stored, so the next probe will not have them: {error.message} ({error.cause})"
        )
        return replace_fields(found, notes=(*found.notes, unkept))
    return found


def find_disturbances(hardware: Hardware, busy_share: float) -> tuple[str, ...]:
    """Other processes on this machine, which make the measured figures too low."""
    found = []
    if busy_share >= BUSY_SHARE:
        found.append(f"other processes used {busy_share:.0%} of the CPU just before, so {TOO_LOW}")
    for card in hardware.accelerators:
        if card.processes:
            count = len(card.processes)
            others = "another process uses" if count == 1 else f"{count} other processes use"
            found.append(f"{others} GPU {card.index}, so its {TOO_LOW}")
    return tuple(found)


def _measure_busy_share() -> float:
    import psutil

    return float(psutil.cpu_percent(interval=0.25)) / 100


def _try_part(run: Callable[[], R], empty: R, label: str, notes: list[str]) -> R:
    try:
        return run()
    except BedplateError as error:
        cause = f" ({error.cause})" if error.cause else ""
        notes.append(f"{label}: {error.message}{cause}")
        return empty


def _add_specs(gpus: tuple[GpuBandwidth, ...], hardware: Hardware) -> tuple[GpuBandwidth, ...]:
    figures = {card.index: card.bandwidth_bytes_s for card in hardware.accelerators if card.vendor == "nvidia"}
    specs = {index: figure for index, figure in figures.items() if figure and figure.basis == "spec"}
    return tuple(replace_fields(gpu, spec_bytes_s=specs.get(gpu.index)) for gpu in gpus)


def _note_unmeasured(hardware: Hardware) -> tuple[str, ...]:
    """Accelerators of this machine that bedplate cannot measure yet."""
    others = sorted({card.vendor for card in hardware.accelerators} - {"nvidia"})
    return tuple(f"GPUs of {vendor} are not measured: bedplate can only measure NVIDIA GPUs" for vendor in others)
