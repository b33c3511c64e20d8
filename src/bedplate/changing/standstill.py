"""Engines that stand still while somebody else is served: their processes are stopped, and go on where they were."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from bedplate.measure.watch import tree_of
from bedplate.run.supervisor import busy_seconds

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedEngine


class Standstill:
    """All of its engines move, or none does.

    One signal to a process group, and nothing of it runs a moment later, however deep in a computation it is. A lower
    priority would leave it caches, memory bandwidth and idle cores, and cannot be taken back without privileges.
    """

    def __init__(self) -> None:
        self.engines: list[HostedEngine] = []
        self.is_still = False
        self._groups: dict[int, frozenset[int]] = {}

    def add(self, engine: HostedEngine) -> None:
        if engine not in self.engines:
            self.engines.append(engine)

    def stop(self) -> None:
        """Also those that were added since, and processes that were started anew."""
        self.is_still = True
        self._signal(signal.SIGSTOP)

    def go(self) -> None:
        self.is_still = False
        self._signal(signal.SIGCONT)

    def look(self) -> None:
        """Finds process groups that engines have made for processes of their own. Blocks for a moment."""
        found = {}
        for pid in self._pids():
            groups = set()
            for one in tree_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    groups.add(os.getpgid(one))
            found[pid] = frozenset(groups - {pid, os.getpgrp()})
        self._groups = found

    def busy_s(self) -> float:
        """Processor time that they have taken so far. Blocks for a moment."""
        return sum(busy_seconds(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        return [engine.pid for engine in self.engines if engine.pid is not None]

    def _signal(self, number: int) -> None:
        for pid in self._pids():
            # An engine leads a group of its own: its warden has made it so.
            for group in (pid, *self._groups.get(pid, ())):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
