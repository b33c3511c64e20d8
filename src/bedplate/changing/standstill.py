"""Pauses engines while requests are served: their processes get SIGSTOP, and SIGCONT to continue."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from bedplate.measure.watch import list_process_tree
from bedplate.run.supervisor import measure_busy_seconds

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedEngine


class EnginePauser:
    """Pauses and continues a set of engines together.

    One signal to a process group stops it at once, even in the middle of a computation. A lower priority would still
    let it use caches, memory bandwidth and idle cores, and cannot be reverted without privileges.
    """

    def __init__(self) -> None:
        self.engines: list[HostedEngine] = []
        self.is_still = False
        self._groups: dict[int, frozenset[int]] = {}

    def add(self, engine: HostedEngine) -> None:
        if engine not in self.engines:
            self.engines.append(engine)

    def pause(self) -> None:
        """Pause all engines, including those added since the last call and restarted processes."""
        self.is_still = True
        self._set_paused(True)
        self._send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.is_still = False
        self._send_signal(signal.SIGCONT)
        self._set_paused(False)

    def find_groups(self) -> None:
        """Find the process groups that engines created for their child processes. Blocks for a moment."""
        found = {}
        for pid in self._list_pids():
            groups = set()
            for one in list_process_tree(pid):
                with contextlib.suppress(ProcessLookupError):
                    groups.add(os.getpgid(one))
            found[pid] = frozenset(groups - {pid, os.getpgrp()})
        self._groups = found

    def read_cpu_seconds(self) -> float:
        """CPU time that the engines have used so far. Blocks for a moment."""
        return sum(measure_busy_seconds(pid) for pid in self._list_pids())

    def _list_pids(self) -> list[int]:
        return [engine.pid for engine in self.engines if engine.pid is not None]

    def _set_paused(self, paused: bool) -> None:
        """Tell the supervisors, which would restart an engine that makes no progress."""
        for engine in self.engines:
            engine.supervisor.is_paused = paused

    def _send_signal(self, number: int) -> None:
        for pid in self._list_pids():
            # An engine leads its own process group: its warden starts it so.
            for group in (pid, *self._groups.get(pid, ())):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
