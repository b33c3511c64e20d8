"""Hardware measurements of this machine, stored with date, driver and machine."""

from __future__ import annotations

from bedplate.facts.measured.apply import apply
from bedplate.facts.measured.cache import machine_of, recall
from bedplate.progress import Progress
from bedplate.values import Hardware
from bedplate.values.measurements import Measurements

__all__ = ["apply", "measure", "remembered"]


def measure(hardware: Hardware, progress: Progress | None = None) -> Measurements:
    """Measure this machine, which takes seconds, and store the figures."""
    from bedplate.facts.measured.measuring import measure as run

    return run(hardware, progress)


def remembered(hardware: Hardware) -> Hardware:
    """`hardware` with the stored measurements of this machine, if its driver is still the same."""
    found = recall(machine_of(hardware))
    return hardware if found is None else apply(hardware, found)
