"""Memory of a host: whether models fit together, and which idle models to unload. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bedplate.decide.cards import get_free_bytes
from bedplate.decide.placement import HOST, Need
from bedplate.engines.base import RESERVED_SHARE
from bedplate.values import Hardware
from bedplate.values.units import format_memory


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that engines may take, on each device and in total."""

    devices: dict[str, int] = field(default_factory=dict)
    """Bytes by device. A device that is missing has no known limit."""
    budget_bytes: int | None = None

    @classmethod
    def from_hardware(cls, hardware: Hardware, budget_bytes: int | None = None) -> MemoryLimits:
        """The memory that was free before the host started its first engine."""
        devices = {HOST: round(hardware.memory.available_bytes * (1 - RESERVED_SHARE))}
        for card in hardware.accelerators:
            if (free := get_free_bytes(card)) is not None:
                devices[f"card {card.index}"] = free
        return cls(devices, budget_bytes)

    def holds(self, needs: Iterable[Need]) -> bool:
        taken = sum_needs(needs)
        if self.budget_bytes is not None and sum(taken.values()) > self.budget_bytes:
            return False
        return all(bytes_ <= self.devices.get(device, bytes_) for device, bytes_ in taken.items())

    def describe(self) -> str:
        if self.budget_bytes is not None:
            return f"a budget of {format_memory(self.budget_bytes)}"
        return " and ".join(f"{format_memory(size)} of {device} memory" for device, size in self.devices.items())


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model."""

    name: str
    need: Need
    last_used: float
    """On the same clock for all."""
    may_go: bool
    """Whether it may be unloaded: it is loaded on demand and idle."""


def sum_needs(needs: Iterable[Need]) -> dict[str, int]:
    found: dict[str, int] = {}
    for need in needs:
        for device, size in need.items():
            found[device] = found.get(device, 0) + size
    return found


def choose_unloads(room: MemoryLimits, holders: Sequence[LoadedModel], need: Need) -> tuple[str, ...] | None:
    """The models to unload so that `need` fits, least recently used first; None if it does not fit even then.

    A model whose memory turns out not to be needed is kept.
    """
    pinned = [one for one in holders if not one.may_go]
    candidates = sorted((one for one in holders if one.may_go), key=lambda one: one.last_used)
    unloads: list[LoadedModel] = []
    while not room.holds([need, *(one.need for one in (*pinned, *candidates))]):
        if not candidates:
            return None
        unloads.append(candidates.pop(0))
    for one in reversed(unloads[:]):
        kept = [*pinned, *candidates, one]
        if room.holds([need, *(other.need for other in kept)]):
            unloads.remove(one)
            candidates.append(one)
    return tuple(one.name for one in unloads)
