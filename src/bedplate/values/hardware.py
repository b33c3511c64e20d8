"""Hardware: one machine, as far as it matters to inference."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Basis, Figure, Record

OperatingSystem = Literal["linux", "macos", "windows"]


class Cpu(Record, frozen=True, kw_only=True):
    name: str
    vendor: str | None = None
    arch: str
    sockets: int | None = None
    physical_cores: int | None = None
    logical_cores: int
    allowed_cores: float
    """Logical cores' worth of time that affinity and the container's quota leave us; may be a fraction."""
    allowed_physical_cores: int
    """How many threads can compute at once without sharing a core: what engines should be given."""
    instruction_sets: tuple[str, ...] = ()
    basis: Basis = "reported"


class Memory(Record, frozen=True, kw_only=True):
    total_bytes: int
    available_bytes: int
    """What can be taken now without swapping, the container's limit included."""
    limit_bytes: int | None = None
    """The container's or cgroup's limit, when one is below the machine's total."""
    bandwidth_bytes_s: Figure | None = None
    basis: Basis = "reported"


class Accelerator(Record, frozen=True, kw_only=True):
    name: str
    vendor: Literal["nvidia", "amd", "apple", "intel", "tenstorrent", "other"]
    index: int = 0
    memory_bytes: int | None = None
    free_bytes: int | None = None
    bandwidth_bytes_s: Figure | None = None
    compute_capability: str | None = None
    driver_version: str | None = None
    unified_memory: bool = False
    basis: Basis = "reported"


class Link(Record, frozen=True, kw_only=True):
    """A connection between two devices; `a` and `b` are accelerator indexes, or "host"."""

    kind: Literal["nvlink", "pcie", "xgmi", "network", "other"]
    a: str
    b: str
    bandwidth_bytes_s: Figure | None = None


class Disk(Record, frozen=True, kw_only=True):
    path: str
    total_bytes: int
    free_bytes: int
    basis: Basis = "reported"


class Hardware(Record, frozen=True, kw_only=True):
    schema: Literal["hardware/1"] = "hardware/1"
    os: OperatingSystem
    os_version: str | None = None
    container: str | None = None
    """The kind of container or virtual machine that we are inside of, when it can be told."""
    cpu: Cpu
    memory: Memory
    accelerators: tuple[Accelerator, ...] = ()
    links: tuple[Link, ...] = ()
    disk: Disk | None = None
    """The disk that holds BEDPLATE_HOME."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why; never silently left out."""

    def has(self, vendor: str) -> bool:
        return any(accelerator.vendor == vendor for accelerator in self.accelerators)
