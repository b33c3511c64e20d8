"""Hardware: one machine, as far as inference needs it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.measurements import Measurements
from bedplate.values.record import Basis, Figure, Record

OperatingSystem = Literal["linux", "macos", "windows"]
Vendor = Literal["nvidia", "amd", "apple", "intel", "tenstorrent", "huawei", "google", "aws", "qualcomm", "other"]
PciePath = Literal["board", "switch", "switches", "host-bridge", "node", "system"]
"""What the traffic between two cards crosses, from near to far.

One board, one PCIe switch, several switches, the CPU's host bridge, the CPU's internal interconnect, the interconnect
between sockets.
"""


class Cache(Record, frozen=True, kw_only=True):
    """All identical caches of one level and kind."""

    level: int
    kind: Literal["data", "instruction", "unified"]
    bytes: int
    """Size of one cache."""
    count: int
    shared_by: int
    """Logical CPUs that share one cache."""


class NumaNode(Record, frozen=True, kw_only=True):
    """A NUMA node: memory, and the CPUs closest to it."""

    index: int
    cpus: str = ""
    """Logical CPUs as the kernel lists them: `0-55,112-167`."""
    memory_bytes: int | None = None
    free_bytes: int | None = None


UNNAMED_CPU = "unknown CPU"
"""Name of the CPU of hypothetical hardware if none is specified."""


class Cpu(Record, frozen=True, kw_only=True):
    name: str
    vendor: str | None = None
    arch: str
    sockets: int | None = None
    physical_cores: int | None = None
    performance_cores: int | None = None
    """Performance cores among the physical cores, on chips with two kinds."""
    efficiency_cores: int | None = None
    logical_cores: int
    allowed_cores: float
    """CPU time in logical cores that affinity and the container's quota allow. It may be a fraction."""
    allowed_physical_cores: int
    """Threads that can compute at once without sharing a core. Engines get this many."""
    instruction_sets: tuple[str, ...] = ()
    caches: tuple[Cache, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    basis: Basis = "reported"


class Memory(Record, frozen=True, kw_only=True):
    total_bytes: int
    available_bytes: int
    """Memory that can be allocated now without swapping, within the container's limit."""
    limit_bytes: int | None = None
    """The limit of the container or cgroup, if it is below the machine's total."""
    bandwidth_bytes_s: Figure | None = None
    basis: Basis = "reported"


class Pcie(Record, frozen=True, kw_only=True):
    """A card's PCIe slot. Idle cards slow their link down, so the current values may be below those under load."""

    generation: int | None = None
    max_generation: int | None = None
    """The highest that the card and the slot both support."""
    width: int | None = None
    max_width: int | None = None


class GpuProcess(Record, frozen=True, kw_only=True):
    """A process that holds accelerator memory."""

    pid: int
    name: str | None = None
    bytes: int | None = None


class Accelerator(Record, frozen=True, kw_only=True):
    name: str
    vendor: Vendor
    index: int = 0
    """Unique in the machine: the driver's index of a whole card, after the cards of other vendors. MIG slices are
    numbered after the last card."""
    parent: int | None = None
    """The index of a slice's card. That card is not listed itself, as work runs only in its slices."""
    driver_index: int | None = None
    """The index of its own driver, if cards of other vendors are counted first; `None`: `index`."""
    uuid: str | None = None
    pci_address: str | None = None
    architecture: str | None = None
    """The vendor's name for the generation: Hopper, gfx942."""
    compute_units: int | None = None
    """Multiprocessors, compute units or GPU cores: the unit that the vendor counts."""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    bandwidth_bytes_s: Figure | None = None
    compute_capability: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA version that the driver supports."""
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    mig: bool | None = None
    """Whether MIG is on; `None` if the card has no MIG or the driver does not report it."""
    pcie: Pcie | None = None
    nvlinks: int | None = None
    """Number of active NVLinks, wherever they lead."""
    numa_node: int | None = None
    unified_memory: bool = False
    wired_limit_bytes: Figure | None = None
    """The most that the GPU may hold of memory that it shares with the CPU."""
    processes: tuple[GpuProcess, ...] = ()
    basis: Basis = "reported"

    @property
    def visible_name(self) -> str:
        """What the vendor's variable for visible devices calls it: the driver's index, or the UUID of a slice."""
        if self.parent is not None and self.uuid is not None:
            return self.uuid
        return str(self.index if self.driver_index is None else self.driver_index)


class Link(Record, frozen=True, kw_only=True):
    """A connection between two devices. `a` and `b` are accelerator indexes or "host"."""

    kind: Literal["nvlink", "pcie", "xgmi", "network", "other"]
    a: str
    b: str
    count: int | None = None
    """Number of parallel links, if known."""
    path: PciePath | None = None
    hops: int | None = None
    bandwidth_bytes_s: Figure | None = None
    """In one direction, all `count` links together."""


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
    """The kind of container or virtual machine that bedplate runs in, if it can be detected."""
    cpu: Cpu
    memory: Memory
    accelerators: tuple[Accelerator, ...] = ()
    links: tuple[Link, ...] = ()
    disk: Disk | None = None
    """The disk that holds BEDPLATE_HOME."""
    measured: Measurements | None = None
    """The measured figures. The main ones also appear in the fields above."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""

    def has_vendor(self, vendor: str) -> bool:
        return any(accelerator.vendor == vendor for accelerator in self.accelerators)

    @property
    def cards_per_node(self) -> int:
        """Accelerators in one node; all of them if no network connects them."""
        # The links of a network come after those within its nodes.
        network = next((link for link in reversed(self.links) if link.kind == "network"), None)
        return int(network.b) - int(network.a) if network is not None else len(self.accelerators)

    @property
    def nodes(self) -> int:
        return -(-len(self.accelerators) // self.cards_per_node) if self.accelerators else 1
