"""File descriptors: how many of them clients may take before idle connections are closed."""

from __future__ import annotations

import contextlib
import os

MAX_BACKLOG = 1024
WANTED_LIMIT = 65_536


class DescriptorBudget:
    """The limits of client connections, from the process's limit of open files (`ulimit -n`).

    The kernel assigns the lowest free number, so the number of a new connection is a lower bound of the descriptors in
    use. Half of the free descriptors are for clients. The others are for connections to engines, for logs, the store
    and new processes, and for connections that the event loop accepts before it reports them.
    """

    def __init__(self, limit: int | None, used: int) -> None:
        """`limit`: `None` for no limit. `used`: descriptors in use before the first client connects."""
        spare = max(0, (limit or 0) - used)
        self.evict_from = None if limit is None else used + spare // 2
        """From this number on, a new connection closes one that is idle."""
        self.refuse_from = None if limit is None else limit - spare // 4
        """From this number on, a new connection is closed if no other one is idle."""
        self.backlog = MAX_BACKLOG if limit is None else max(1, min(MAX_BACKLOG, spare // 3))

    def has_room(self, number: int) -> bool:
        """Whether the connection with this descriptor may stay although no other one is idle.

        Others may have been closed since the event loop accepted it, so the lowest free descriptor counts as well.
        """
        if self.refuse_from is None or number < self.refuse_from:
            return True
        try:
            return _find_lowest_free() < self.refuse_from
        except OSError:  # there is none
            return False

    @classmethod
    def measure(cls) -> DescriptorBudget:
        return cls(_read_limit(), _find_lowest_free())


def raise_descriptor_limit() -> None:
    """Raise the process's soft limit of open files, which shells set low, as far as its hard limit permits."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # macOS has a second, lower limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = WANTED_LIMIT if hard == resource.RLIM_INFINITY else min(hard, WANTED_LIMIT)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _read_limit() -> int | None:
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft
    return None


def _find_lowest_free() -> int:
    number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    return number
