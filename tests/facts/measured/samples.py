"""Measurements and machines for tests. The figures are made up."""

from __future__ import annotations

from bedplate.facts.measured.cache import identify_machine
from bedplate.values import Accelerator, Cpu, Figure, Hardware, Link, Memory
from bedplate.values.measurements import (
    DiskRead,
    GpuBandwidth,
    InstructionSetCheck,
    MatrixRate,
    Measurements,
    PeerBandwidth,
    RamBandwidth,
)

HARDWARE = Hardware(
    os="linux",
    cpu=Cpu(
        name="Xeon",
        arch="x86_64",
        logical_cores=4,
        allowed_cores=4.0,
        allowed_physical_cores=2,
        instruction_sets=("avx2", "avx512f", "amx_tile"),
    ),
    memory=Memory(total_bytes=1 << 35, available_bytes=1 << 34),
    accelerators=(
        Accelerator(name="NVIDIA H200", vendor="nvidia", index=0, driver_version="580.1"),
        Accelerator(name="NVIDIA H200", vendor="nvidia", index=1, driver_version="580.1"),
    ),
    links=(Link(kind="pcie", a="0", b="1"), Link(kind="nvlink", a="1", b="0", count=18)),
)


def make_figure(value: float) -> Figure:
    return Figure(value=value, low=value * 0.9, high=value * 1.05, basis="measured", source="a test, 9 repeats")


MEASURED = Measurements(
    when="2026-11-15T04:20:00+00:00",
    took_s=4.2,
    machine=identify_machine(HARDWARE),
    instruction_sets=(
        InstructionSetCheck(name="avx2", result="runs"),
        InstructionSetCheck(name="avx512f", result="not tried", why="no executable memory"),
        InstructionSetCheck(name="amx_tile", result="does not run", why="SIGILL at tileloadd"),
    ),
    ram_all_cores=RamBandwidth(
        threads=2, buffer_bytes=1 << 30, read_bytes_s=make_figure(20e9), copy_bytes_s=make_figure(30e9)
    ),
    ram_one_core=RamBandwidth(
        threads=1, buffer_bytes=1 << 30, read_bytes_s=make_figure(12e9), copy_bytes_s=make_figure(15e9)
    ),
    gpus=(
        GpuBandwidth(
            index=0,
            name="NVIDIA H200",
            theoretical_bytes_s=4_916_736_000_000,
            spec_bytes_s=Figure(value=4.8e12, low=4.8e12, high=4.8e12, basis="spec", source="a sheet"),
            read_bytes_s=make_figure(4.4e12),
            copy_bytes_s=make_figure(4.2e12),
            to_device_pinned_bytes_s=make_figure(55e9),
            from_device_pinned_bytes_s=make_figure(54e9),
            to_device_pageable_bytes_s=make_figure(9e9),
        ),
        GpuBandwidth(index=1, name="NVIDIA H200", copy_bytes_s=make_figure(4.1e12)),
    ),
    peers=(
        PeerBandwidth(source=0, target=1, bytes_s=make_figure(400e9)),
        PeerBandwidth(source=1, target=0, bytes_s=make_figure(380e9)),
    ),
    matrix=(
        MatrixRate(device="0", data_type="bf16", library="cuBLAS 13.1", size=8192, operations_s=make_figure(788e12)),
        MatrixRate(device="0", data_type="int8", library="cuBLAS 13.1", size=8192, operations_s=make_figure(1500e12)),
        MatrixRate(device="cpu", data_type="fp32", library="numpy 2.3", size=2048, operations_s=make_figure(210e9)),
    ),
    disk=DiskRead(path="/models", read_bytes=1 << 28, read_bytes_s=make_figure(2.1e9)),
    notes=("GPU 1: read bandwidth is not measured: why not",),
)
