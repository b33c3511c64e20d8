"""Tests that hold what was measured against what must come out need a machine that can be measured on.

They are marked `measures`, and no other test runs beside them. Where one fails while others had the processors, it is
skipped and says by how much: what is measured then is wrong, as `bedplate bench` says of its own figures. On a quiet
machine it fails.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


class Turns:
    """Between the processes that share the tests of one run: several at a time, or one alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        with (self._folder / "room").open("w") as room:
            # Who waits for the room holds the gate: those who need it alone would never have their turn otherwise.
            with (self._folder / "gate").open("w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            try:
                yield
            finally:
                fcntl.flock(room, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too


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
