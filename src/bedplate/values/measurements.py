"""Measurements: what was timed on one machine, when and with what. An absent field was not measured."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Figure, Record

TOO_LOW = "figures may be too low"
"""The end of notes on other processes that used the machine during the measurement."""


class MeasuredMachine(Record, frozen=True, kw_only=True):
    """What must be unchanged for an old measurement to stay valid."""

    os: str
    kernel: str
    arch: str
    cpu: str
    logical_cores: int
    allowed_cores: float
    gpus: tuple[str, ...] = ()
    """Name, memory and driver of each GPU, in the machine's order."""


class InstructionSetCheck(Record, frozen=True, kw_only=True):
    """Whether an advertised instruction set works here. A virtual machine may advertise one that it does not run."""

    name: str
    result: Literal["runs", "does not run", "not tried"]
    why: str | None = None


class RamBandwidth(Record, frozen=True, kw_only=True):
    threads: int
    buffer_bytes: int
    """Size of the buffer that all threads together read."""
    cache_bytes: int | None = None
    """The last-level cache, which the buffer should greatly exceed; `None`: not reported by the machine."""
    read_bytes_s: Figure
    copy_bytes_s: Figure
    """Bytes read plus bytes written. Reads that the cache does before a write are not counted."""


class GpuBandwidth(Record, frozen=True, kw_only=True):
    index: int
    name: str
    theoretical_bytes_s: int | None = None
    """Memory clock times bus width, as the driver reports them."""
    spec_bytes_s: Figure | None = None
    """The vendor's figure if the chip is known. It is not measured; compare the measured figures with it."""
    read_bytes_s: Figure | None = None
    copy_bytes_s: Figure | None = None
    """Bytes read plus bytes written."""
    to_device_pinned_bytes_s: Figure | None = None
    to_device_pageable_bytes_s: Figure | None = None
    from_device_pinned_bytes_s: Figure | None = None
    from_device_pageable_bytes_s: Figure | None = None


class PeerBandwidth(Record, frozen=True, kw_only=True):
    """Copies from one GPU's memory to another's, one direction at a time. The numbers are accelerator indexes."""

    source: int
    target: int
    bytes_s: Figure


class MatrixRate(Record, frozen=True, kw_only=True):
    """Multiplications and additions per second of one large matrix product on random data."""

    device: str
    """An accelerator's index, or "cpu"."""
    data_type: str
    library: str
    size: int
    operations_s: Figure


class DiskRead(Record, frozen=True, kw_only=True):
    path: str
    """The folder whose disk was read."""
    read_bytes: int
    read_bytes_s: Figure


class Measurements(Record, frozen=True, kw_only=True):
    schema: Literal["measurements/1"] = "measurements/1"
    when: str
    """Local time with its UTC offset, ISO 8601."""
    took_s: float
    machine: MeasuredMachine
    instruction_sets: tuple[InstructionSetCheck, ...] = ()
    ram_all_cores: RamBandwidth | None = None
    ram_one_core: RamBandwidth | None = None
    gpus: tuple[GpuBandwidth, ...] = ()
    peers: tuple[PeerBandwidth, ...] = ()
    matrix: tuple[MatrixRate, ...] = ()
    disk: DiskRead | None = None
    notes: tuple[str, ...] = ()
    """What was not measured and why, and what makes a figure less reliable."""

    @property
    def disturbances(self) -> tuple[str, ...]:
        """The notes on other processes that used the machine. Empty: it was idle."""
        return tuple(note for note in self.notes if note.endswith(TOO_LOW))
