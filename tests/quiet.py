"""Tests that hold what was measured against what must come out need a machine that can be measured on.

They are marked `measures`. Where one fails while others had the processors, it is skipped and says by how much: what is
measured then is wrong, as `bedplate bench` says of its own figures. On a quiet machine it fails.
"""

from __future__ import annotations

import os
import time

import psutil


class Others:
    """What is taken of the processors by those who were there before, and by other machines on the same host."""

    def __init__(self) -> None:
        ours = {one.pid for one in (psutil.Process(), *psutil.Process().children(recursive=True))}
        there = [one for one in psutil.process_iter() if one.pid not in ours]
        self._before = {one: taken for one in there if (taken := _seconds_of(one)) is not None}
        self._stolen_s = _stolen_s()
        self._began = time.monotonic()

    def share(self) -> float:
        """Of all processors, until now; what came to its end meanwhile is not known any more."""
        grown = [after - before for one, before in self._before.items() if (after := _seconds_of(one)) is not None]
        whole_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return (sum(grown) + _stolen_s() - self._stolen_s) / whole_s


def _seconds_of(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _stolen_s() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
