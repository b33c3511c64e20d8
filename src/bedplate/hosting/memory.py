"""Who may be loaded beside whom: needs against room, and which idle model makes way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bedplate.decide.memory import free_of
from bedplate.decide.together import HOST, Need
from bedplate.engines.base import RESERVED_SHARE
from bedplate.values import Hardware
from bedplate.values.units import memory


@dataclass(frozen=True)
class Room:
    """What engines may take: on each device, and in all."""

    devices: dict[str, int] = field(default_factory=dict)
    """A device that is not here has no limit that is known."""
    budget_bytes: int | None = None

    @classmethod
    def of(cls, hardware: Hardware, budget_bytes: int | None = None) -> Room:
        """What was free when the host started, before any of its own engines took some."""
        devices = {HOST: round(hardware.memory.available_bytes * (1 - RESERVED_SHARE))}
        for card in hardware.accelerators:
            if (free := free_of(card)) is not None:
                devices[f"card {card.index}"] = free
        return cls(devices, budget_bytes)

    def holds(self, needs: Iterable[Need]) -> bool:
        taken = summed(needs)
        if self.budget_bytes is not None and sum(taken.values()) > self.budget_bytes:
            return False
        return all(bytes_ <= self.devices.get(device, bytes_) for device, bytes_ in taken.items())

    def in_words(self) -> str:
        if self.budget_bytes is not None:
            return f"a budget of {memory(self.budget_bytes)}"
        return " and ".join(f"{memory(size)} of {device} memory" for device, size in self.devices.items())


@dataclass(frozen=True)
class Holder:
    """Something that is loaded."""

    name: str
    need: Need
    last_used: float
    """On any one clock."""
    may_go: bool
    """It is loaded on demand, and nobody uses it now."""


def summed(needs: Iterable[Need]) -> dict[str, int]:
    found: dict[str, int] = {}
    for need in needs:
        for device, size in need.items():
            found[device] = found.get(device, 0) + size
    return found


def to_unload(room: Room, holders: Sequence[Holder], need: Need) -> tuple[str, ...] | None:
    """Who must go so that `need` fits, those first that were used longest ago; `None`: not even then.

    Whoever would go without making a difference stays.
    """
    staying = [one for one in holders if not one.may_go]
    candidates = sorted((one for one in holders if one.may_go), key=lambda one: one.last_used)
    going: list[Holder] = []
    while not room.holds([need, *(one.need for one in (*staying, *candidates))]):
        if not candidates:
            return None
        going.append(candidates.pop(0))
    for one in reversed(going[:]):
        kept = [*staying, *candidates, one]
        if room.holds([need, *(other.need for other in kept)]):
            going.remove(one)
            candidates.append(one)
    return tuple(one.name for one in going)
