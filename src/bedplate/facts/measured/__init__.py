"""Hardware, measured: what it really does, timed here and written down with date, driver and machine."""

from __future__ import annotations

from bedplate.facts.measured.apply import apply
from bedplate.facts.measured.cache import machine_of, recall
from bedplate.progress import Progress
from bedplate.values import Hardware
from bedplate.values.measurements import Measurements

__all__ = ["apply", "measure", "remembered"]


def measure(hardware: Hardware, progress: Progress | None = None) -> Measurements:
    """Times this machine, which takes seconds, and writes the figures down."""
    from bedplate.facts.measured.measuring import measure as run

    return run(hardware, progress)


def remembered(hardware: Hardware) -> Hardware:
    """`hardware` with what was measured on this machine before, as long as its driver is still the same."""
    found = recall(machine_of(hardware))
    return hardware if found is None else apply(hardware, found)
