"""Callbacks at absolute deadlines in nanoseconds; the timers of event loops are rounded to milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _TimerFd:
    """A Linux timerfd, registered with the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)
        self._loop = loop
        loop.add_reader(self._fd, fire)

    def set(self, when_ns: int) -> None:
        value = self._spec.value
        value.sec, value.nsec = divmod(when_ns, 1_000_000_000)
        # Setting it again also clears its expiry count, so the descriptor never has to be read.
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._reference, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _LoopTimer:
    """The event loop's own timer, for platforms without timerfd; up to a millisecond late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._loop = loop
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None

    def set(self, when_ns: int) -> None:
        self.close()
        if when_ns:
            self._handle = self._loop.call_later(max(0.0, (when_ns - time.monotonic_ns()) / 1e9), self._fire)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Deadlines:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer: _TimerFd | _LoopTimer = (_TimerFd if sys.platform == "linux" else _LoopTimer)(loop, self._fire)
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()
        self._armed = 0
        self._firing = False

    def at(self, when_ns: int, callback: Callable[[int], None]) -> None:
        """Calls callback(when_ns) once, as soon as the monotonic clock has passed when_ns."""
        heapq.heappush(self._heap, (when_ns, next(self._order), callback))
        if not self._firing and (not self._armed or when_ns < self._armed):
            self._set_timer(when_ns)

    def close(self) -> None:
        """Discards the pending callbacks."""
        self._heap.clear()
        self._timer.close()

    def _fire(self) -> None:
        self._firing = True
        heap = self._heap
        try:
            while heap and heap[0][0] <= time.monotonic_ns():
                when_ns, _, callback = heapq.heappop(heap)
                callback(when_ns)
        finally:
            self._firing = False
            self._set_timer(heap[0][0] if heap else 0)

    def _set_timer(self, when_ns: int) -> None:
        self._armed = when_ns
        self._timer.set(when_ns)
