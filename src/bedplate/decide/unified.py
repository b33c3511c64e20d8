"""Memory that a GPU shares with the CPU: the system limits the GPU's part, and a setting raises that limit."""

from __future__ import annotations

from bedplate.engines.base import LIMITED_VENDORS
from bedplate.values import Hardware, replace_fields

SYSTEM_BYTES = 4 << 30
SYSTEM_SHARE = 0.1
"""Memory that stays with the system and other programs: at least this much, or this share."""
BARE_SYSTEM_BYTES = 3 << 30
"""Memory of a system without other programs. The limit is raised that far only if the model does not run otherwise."""
MEBIBYTE = 1 << 20


def list_raised_limits(hardware: Hardware) -> tuple[Hardware, ...]:
    """The machine after the setting is changed, with more and with less memory for other programs."""
    found = (raise_limit(hardware, system_bytes) for system_bytes in (SYSTEM_BYTES, BARE_SYSTEM_BYTES))
    return tuple(machine for machine in found if machine is not None)


def raise_limit(hardware: Hardware, system_bytes: int = SYSTEM_BYTES) -> Hardware | None:
    """The machine after the setting is changed; `None` if it has no such limit, or one that is high enough."""
    cards, total = hardware.accelerators, hardware.memory.total_bytes
    if len(cards) != 1 or not cards[0].unified_memory or cards[0].vendor not in LIMITED_VENDORS:
        return None
    most = (total - max(system_bytes, round(total * SYSTEM_SHARE))) // MEBIBYTE * MEBIBYTE
    limit = cards[0].wired_limit_bytes
    if limit is None or most <= limit.value:
        return None
    raised = replace_fields(limit, value=float(most), low=float(most), high=float(most))
    card = replace_fields(cards[0], free_bytes=most, wired_limit_bytes=raised)
    return replace_fields(hardware, accelerators=(card,))
