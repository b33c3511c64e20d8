"""RAM bandwidth, with the C library's vectorized loops: memchr reads, memcpy copies.

memchr searches for an absent byte. ctypes releases the GIL during a call, so the threads run in parallel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bedplate.facts.cpu import read_siblings
from bedplate.facts.measured.statistics import compute_rates, make_figure
from bedplate.values import Cpu, Record
from bedplate.values.measurements import RamBandwidth
from bedplate.values.units import format_memory

MIB = 1 << 20
LEAST_BYTES = 256 * MIB
MOST_BYTES = 16 << 30
TOO_SMALL_BYTES = 16 * MIB
TIMES_THE_CACHE = 4
SHARE_OF_FREE = 4
ROUNDS, LEAST_ROUNDS, BUDGET_S = 9, 3, 0.6
ROUND_S = 0.05
"""A shorter round would mainly measure the start of the threads."""
PRESENT, ABSENT = 0x01, 0xFF


class RamRequest(Record, frozen=True, kw_only=True):
    threads: int
    available_bytes: int
    cache_bytes: int | None
    """All last-level caches together."""
    one_cache_bytes: int | None
    """The largest cache that one core can reach."""
    when: str


class RamResult(Record, frozen=True, kw_only=True):
    all_cores: RamBandwidth | None = None
    one_core: RamBandwidth | None = None
    notes: tuple[str, ...] = ()


def make_request(cpu: Cpu, available_bytes: int, when: str) -> RamRequest:
    """The measurement for this CPU."""
    deepest = max((cache.level for cache in cpu.caches), default=0)
    last = [cache for cache in cpu.caches if cache.level == deepest and cache.kind != "instruction"]
    return RamRequest(
        threads=cpu.allowed_physical_cores,
        available_bytes=available_bytes,
        cache_bytes=sum(cache.bytes * cache.count for cache in last) or None,
        one_cache_bytes=max((cache.bytes for cache in last), default=None),
        when=when,
    )


def choose_buffer_bytes(cache_bytes: int | None, available_bytes: int) -> int:
    """Several times the cache, but at most a quarter of the free memory."""
    wanted = max(TIMES_THE_CACHE * (cache_bytes or 0), LEAST_BYTES)
    return min(wanted, available_bytes // SHARE_OF_FREE, MOST_BYTES)


def note_doubts(buffer: int, cache_bytes: int | None) -> tuple[str, ...]:
    """Notes on the reliability of the figures."""
    if cache_bytes is None:
        return ("the size of the last-level cache is unknown, so the RAM bandwidth may include cache hits",)
    if buffer < TIMES_THE_CACHE * cache_bytes:
        return (
            f"RAM bandwidth was measured on {format_memory(buffer)}, less than {TIMES_THE_CACHE} times the "
            f"last-level cache "
            f"({format_memory(cache_bytes)}): too little memory is free, so the figure may include cache hits",
        )
    return ()


def measure_ram(asked: RamRequest, tell: Callable[[float], None]) -> RamResult:
    total = choose_buffer_bytes(asked.cache_bytes, asked.available_bytes)
    if total < TOO_SMALL_BYTES:
        return RamResult(notes=("RAM bandwidth is not measured: too little memory is free",))
    cpus = list_physical_cpus()
    pinned: Sequence[int | None] = cpus if len(cpus) == asked.threads else [None] * asked.threads
    every = measure_bandwidth(pinned, total, asked.cache_bytes, asked.when, lambda share: tell(share / 2))
    notes = note_doubts(total, asked.cache_bytes)
    if asked.threads == 1:
        return RamResult(all_cores=every, one_core=every, notes=notes)
    alone = choose_buffer_bytes(asked.one_cache_bytes, asked.available_bytes)
    one = measure_bandwidth(pinned[:1], alone, asked.one_cache_bytes, asked.when, lambda share: tell((1 + share) / 2))
    return RamResult(all_cores=every, one_core=one, notes=notes)


def measure_bandwidth(
    cpus: Sequence[int | None], total: int, cache_bytes: int | None, when: str, tell: Callable[[float], None]
) -> RamBandwidth:
    """Read and copy with one thread for each of `cpus`. Each uses the part of the buffer that it touched first."""
    slices = BufferSlices(total, len(cpus))
    with ThreadTeam(cpus) as crew:
        crew.run_round(slices.fill)  # places each part's pages on the NUMA node of its core
        tell(0.2)
        reads = compute_rates(slices.total, time_passes(crew, slices.read))
        tell(0.6)
        copies = compute_rates(slices.total, time_passes(crew, slices.copy))
        tell(1.0)
    source = f"{format_memory(slices.total)} with {len(cpus)} thread{'s' if len(cpus) > 1 else ''}, {when}"
    return RamBandwidth(
        threads=len(cpus),
        buffer_bytes=slices.total,
        cache_bytes=cache_bytes,
        read_bytes_s=make_figure(reads, f"memchr over {source}"),
        copy_bytes_s=make_figure(copies, f"memcpy over {source}"),
    )


class BufferSlices:
    """One buffer with a part for each thread. A copy goes from the first half of a part to its second."""

    def __init__(self, total: int, parts: int) -> None:
        page = mmap.PAGESIZE
        self.half = max(page, total // parts // 2 // page * page)
        self.part = 2 * self.half
        self.total = self.part * parts
        self._buffer = mmap.mmap(-1, self.total)
        view = (ctypes.c_char * self.total).from_buffer(self._buffer)
        self._start = ctypes.addressof(view)
        self._view = view
        libc: Any = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
        self._memset, self._memcpy, self._memchr = libc.memset, libc.memcpy, libc.memchr
        self._memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        for function in (self._memset, self._memcpy, self._memchr):
            function.restype = ctypes.c_void_p

    def fill(self, part: int) -> None:
        self._memset(self._start + part * self.part, PRESENT, self.part)

    def read(self, part: int) -> None:
        found = self._memchr(self._start + part * self.part, ABSENT, self.part)
        if found is not None:
            raise RuntimeError("memchr found a byte that is not in the buffer")

    def copy(self, part: int) -> None:
        start = self._start + part * self.part
        self._memcpy(start + self.half, start, self.half)


class ThreadTeam:
    """Threads that start a job at the same time, each pinned to a core if cores are given."""

    def __init__(self, cpus: Sequence[int | None]) -> None:
        self._gate = threading.Barrier(len(cpus) + 1)
        self._job: Callable[[int], None] | None = None
        self._loops = 1
        self._times = [(0.0, 0.0)] * len(cpus)
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run_thread, args=(number, cpu), daemon=True)
            for number, cpu in enumerate(cpus)
        ]

    def __enter__(self) -> ThreadTeam:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._job = None
        self._gate.wait()
        for thread in self._threads:
            thread.join()

    def run_round(self, job: Callable[[int], None], loops: int = 1) -> float:
        """Seconds from the first thread's start to the last thread's end."""
        self._job, self._loops = job, loops
        self._gate.wait()
        self._gate.wait()
        if self._failure is not None:
            raise self._failure
        return max(end for _, end in self._times) - min(start for start, _ in self._times)

    def _run_thread(self, number: int, cpu: int | None) -> None:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})  # only for this thread
        while True:
            self._gate.wait()
            job = self._job
            if job is None:
                return
            began = time.perf_counter()
            try:
                for _ in range(self._loops):
                    job(number)
            except BaseException as error:
                self._failure = error
            self._times[number] = (began, time.perf_counter())
            self._gate.wait()


def time_passes(crew: ThreadTeam, job: Callable[[int], None]) -> list[float]:
    """Seconds for one pass, from several rounds after an uncounted one."""
    warm_up_s = crew.run_round(job)
    loops = max(1, min(100, round(ROUND_S / warm_up_s))) if warm_up_s > 0 else 1
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < LEAST_ROUNDS or (len(found) < ROUNDS and time.perf_counter() - began < BUDGET_S):
        found.append(crew.run_round(job, loops) / loops)
    return found


def list_physical_cpus() -> list[int]:
    """One CPU of each physical core that this process may use; empty if threads cannot be pinned."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    siblings = read_siblings()
    chosen: dict[frozenset[int], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        chosen.setdefault(siblings.get(cpu, frozenset({cpu})), cpu)
    return list(chosen.values())
