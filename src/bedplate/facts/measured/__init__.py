"""Hardware measurements of this machine, stored with date, driver and machine."""

from __future__ import annotations

from bedplate.facts.measured.apply import apply_measurements
from bedplate.facts.measured.cache import identify_machine, recall
from bedplate.progress import Progress
from bedplate.values import Hardware
from bedplate.values.measurements import Measurements

__all__ = ["apply_measurements", "apply_stored", "measure"]


def measure(hardware: Hardware, progress: Progress | None = None) -> Measurements:
    """Measure this machine, which takes seconds, and store the figures."""
    from bedplate.facts.measured.measuring import measure as run

    return run(hardware, progress)


def apply_stored(hardware: Hardware) -> Hardware:
    """`hardware` with the stored measurements of this machine, if its driver is still the same."""
    found = recall(identify_machine(hardware))
    return hardware if found is None else apply_measurements(hardware, found)
