"""Callbacks at absolute nanosecond deadlines, on one Linux timerfd."""

import asyncio
import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Deadlines:
    """Replaces loop.call_at, whose whole milliseconds (libuv, epoll) would bunch the chunks of many streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._spec_ref = ctypes.byref(self._spec)
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()
        self._armed = 0
        self._firing = False
        loop.add_reader(self._fd, self._fire)

    def at(self, when_ns: int, callback: Callable[[int], None]) -> None:
        """Calls callback(when_ns) once, as soon as the monotonic clock has passed when_ns."""
        heapq.heappush(self._heap, (when_ns, next(self._order), callback))
        if not self._firing and (not self._armed or when_ns < self._armed):
            self._arm(when_ns)

    def _fire(self) -> None:
        self._firing = True
        heap = self._heap
        try:
            while heap and heap[0][0] <= time.monotonic_ns():
                when_ns, _, callback = heapq.heappop(heap)
                callback(when_ns)
        finally:
            self._firing = False
            # Setting the timer again also clears its expiry count, so the descriptor never has to be read.
            self._arm(heap[0][0] if heap else 0)

    def _arm(self, when_ns: int) -> None:
        self._armed = when_ns
        value = self._spec.value
        value.sec, value.nsec = divmod(when_ns, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._spec_ref, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
