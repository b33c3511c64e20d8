"""Hardware: one machine, as far as it matters to inference."""

from __future__ import annotations

from typing import Literal

from bedplate.values.measurements import Measurements
from bedplate.values.record import Basis, Figure, Record

OperatingSystem = Literal["linux", "macos", "windows"]
Vendor = Literal["nvidia", "amd", "apple", "intel", "tenstorrent", "other"]
PciePath = Literal["board", "switch", "switches", "host-bridge", "node", "system"]
"""What two cards' traffic crosses, from near to far: one board, one PCIe switch, several, the CPU's host bridge, the
CPU's inner interconnect, the interconnect between sockets."""


class Cache(Record, frozen=True, kw_only=True):
    """All caches of one level and kind that are alike."""

    level: int
    kind: Literal["data", "instruction", "unified"]
    bytes: int
    """Of one of them."""
    count: int
    shared_by: int
    """Logical CPUs that share one."""


class NumaNode(Record, frozen=True, kw_only=True):
    """Memory and the CPUs that are near to it."""

    index: int
    cpus: str = ""
    """Logical CPUs as the kernel lists them: `0-55,112-167`."""
    memory_bytes: int | None = None
    free_bytes: int | None = None


UNNAMED_CPU = "unknown CPU"
"""Of a machine on paper for which nobody says it."""


class Cpu(Record, frozen=True, kw_only=True):
    name: str
    vendor: str | None = None
    arch: str
    sockets: int | None = None
    physical_cores: int | None = None
    performance_cores: int | None = None
    """Of the physical cores, the fast ones, where a chip has two kinds."""
    efficiency_cores: int | None = None
    logical_cores: int
    allowed_cores: float
    """Logical cores' worth of time that affinity and the container's quota leave us; may be a fraction."""
    allowed_physical_cores: int
    """How many threads can compute at once without sharing a core: what engines should be given."""
    instruction_sets: tuple[str, ...] = ()
    caches: tuple[Cache, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    basis: Basis = "reported"


class Memory(Record, frozen=True, kw_only=True):
    total_bytes: int
    available_bytes: int
    """What can be taken now without swapping, the container's limit included."""
    limit_bytes: int | None = None
    """The container's or cgroup's limit, when one is below the machine's total."""
    bandwidth_bytes_s: Figure | None = None
    basis: Basis = "reported"


class Pcie(Record, frozen=True, kw_only=True):
    """A card's slot. Cards slow their link down when idle, so what is now may be less than what it will be."""

    generation: int | None = None
    max_generation: int | None = None
    """The most that card and slot can do together."""
    width: int | None = None
    max_width: int | None = None


class GpuProcess(Record, frozen=True, kw_only=True):
    """Somebody else's memory on an accelerator."""

    pid: int
    name: str | None = None
    bytes: int | None = None


class Accelerator(Record, frozen=True, kw_only=True):
    name: str
    vendor: Vendor
    index: int = 0
    """The driver's number of a whole card. Slices are numbered on, after the last card."""
    parent: int | None = None
    """A slice's card, which is not listed itself: nothing can run on it but in its slices."""
    uuid: str | None = None
    pci_address: str | None = None
    architecture: str | None = None
    """The vendor's word for the generation: Hopper, gfx942."""
    compute_units: int | None = None
    """Multiprocessors, compute units, GPU cores: whatever the vendor counts."""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    bandwidth_bytes_s: Figure | None = None
    compute_capability: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA that the driver runs."""
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    mig: bool | None = None
    """Whether the card is split; `None` where it cannot be, or the driver does not say."""
    pcie: Pcie | None = None
    nvlinks: int | None = None
    """Active NVLinks, wherever they lead."""
    numa_node: int | None = None
    unified_memory: bool = False
    wired_limit_bytes: Figure | None = None
    """Of memory that is shared with the CPU, the most that the GPU may hold."""
    processes: tuple[GpuProcess, ...] = ()
    basis: Basis = "reported"


class Link(Record, frozen=True, kw_only=True):
    """A connection between two devices; `a` and `b` are accelerator indexes, or "host"."""

    kind: Literal["nvlink", "pcie", "xgmi", "network", "other"]
    a: str
    b: str
    count: int | None = None
    """Links that work side by side, where they are counted."""
    path: PciePath | None = None
    hops: int | None = None
    bandwidth_bytes_s: Figure | None = None
    """In one direction, all of `count` together."""


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
    measured: Measurements | None = None
    """What was timed here; its main figures stand in the parts above too."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why; never silently left out."""

    def has(self, vendor: str) -> bool:
        return any(accelerator.vendor == vendor for accelerator in self.accelerators)

    @property
    def cards_per_node(self) -> int:
        """Accelerators that share a node; all of them, unless a network lies between some."""
        network = next((link for link in self.links if link.kind == "network"), None)
        return int(network.b) - int(network.a) if network is not None else len(self.accelerators)

    @property
    def nodes(self) -> int:
        return -(-len(self.accelerators) // self.cards_per_node) if self.accelerators else 1
