"""Machines that are known by a name: cloud instance types, servers and small computers that are sold with one chip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import msgspec

from bedplate.values.record import Record

DATA = Path(__file__).parent / "data" / "machines.json"
CPU_DATA = DATA.with_name("cpu_machines.json")
AZURE = "Standard_"
COUNT_FIRST = re.compile(r"\s*([0-9]{1,4})\s*(?:[x×*]\s*|\s)(?=[a-z])", re.IGNORECASE)


class NamedMachine(Record, frozen=True, kw_only=True):
    """What such a machine has, in the fields of a described machine."""

    names: tuple[str, ...]
    accelerator: str | None = None
    cpu: str | None = None
    """Given if there is no accelerator: the processor, or of several that the provider uses, the oldest."""
    count: int | None = None
    gpus_per_node: int | None = None
    hosts: int = 1
    """Operating systems; cores and RAM are those of each."""
    cores: int | None = None
    """Half of the virtual CPUs that a cloud counts: each core has two."""
    ram_gb: float
    source: str

    def describe(self, machines: int) -> dict[str, object]:
        """The fields of so many of these machines."""
        fields: dict[str, object] = {
            "accelerator": self.accelerator,
            "cpu": self.cpu,
            "count": None if self.count is None else self.count * machines,
            "gpus_per_node": self.gpus_per_node or (self.count if machines > 1 or self.hosts == 1 else None),
            "cores": self.cores,
            "ram_gb": self.ram_gb,
        }
        return {name: value for name, value in fields.items() if value is not None}


class CpuMachines(Record, frozen=True, kw_only=True):
    """Sizes of a cloud's instance type without accelerators."""

    cpu: str
    threads: int
    """Virtual CPUs for each core."""
    sizes: tuple[tuple[str, int, float], ...]
    """Name, virtual CPUs, GiB of memory."""
    source: str

    def list_machines(self) -> list[NamedMachine]:
        return [
            NamedMachine(
                names=(name, name.removeprefix(AZURE)) if name.startswith(AZURE) else (name,),
                cpu=self.cpu,
                cores=max(1, cpus // self.threads),
                ram_gb=ram_gb,
                source=self.source,
            )
            for name, cpus, ram_gb in self.sizes
        ]


@lru_cache(maxsize=1)
def load_machines() -> Mapping[str, NamedMachine]:
    found = msgspec.json.decode(DATA.read_bytes(), type=list[NamedMachine])
    for family in msgspec.json.decode(CPU_DATA.read_bytes(), type=list[CpuMachines]):
        found += family.list_machines()
    return MappingProxyType({_flatten(name): one for one in found for name in one.names})


def find_machine(text: str) -> tuple[NamedMachine, int] | None:
    """The machine that a text names, and how many; `None` if it is not the name of one."""
    known = load_machines()
    if one := known.get(_flatten(text)):
        return one, 1
    if (counted := COUNT_FIRST.match(text)) and (one := known.get(_flatten(text[counted.end() :]))):
        return one, int(counted[1])
    return None


def _flatten(name: str) -> str:
    """Without what people write differently: case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", name.lower())
