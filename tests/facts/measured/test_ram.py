"""RAM bandwidth: buffer size, threads, and a small real measurement."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S

from bedplate.facts.measured import ram
from bedplate.facts.measured.ram import (
    BufferSlices,
    RamRequest,
    ThreadTeam,
    choose_buffer_bytes,
    list_physical_cpus,
    make_request,
    measure_ram,
    note_doubts,
)
from bedplate.values import Cpu
from bedplate.values.hardware import Cache

MIB = 1 << 20
GIB = 1 << 30
CPU = Cpu(name="x", arch="x86_64", logical_cores=8, allowed_cores=8.0, allowed_physical_cores=4)


def test_the_buffer_is_four_times_the_cache_and_at_least_256_mib() -> None:
    assert choose_buffer_bytes(300 * MIB, 23 * GIB) == 1200 * MIB
    assert choose_buffer_bytes(8 * MIB, 23 * GIB) == choose_buffer_bytes(None, 23 * GIB) == 256 * MIB


@given(st.none() | st.integers(0, 1 << 40), st.integers(0, 1 << 50))
def test_the_buffer_is_at_most_a_quarter_of_free_memory(cache: int | None, free: int) -> None:
    assert 0 <= choose_buffer_bytes(cache, free) <= min(free // 4, ram.MOST_BYTES)


def test_possible_cache_hits_are_noted() -> None:
    assert note_doubts(1200 * MIB, 300 * MIB) == ()
    assert "may include cache hits" in note_doubts(1199 * MIB, 300 * MIB)[0]
    assert "is unknown" in note_doubts(1200 * MIB, None)[0]


def test_the_cache_size_is_the_sum_of_the_last_level() -> None:
    caches = (
        Cache(level=1, kind="instruction", bytes=32768, count=8, shared_by=1),
        Cache(level=2, kind="unified", bytes=MIB, count=8, shared_by=1),
        Cache(level=3, kind="unified", bytes=32 * MIB, count=2, shared_by=4),
    )
    cpu = Cpu(**{field: getattr(CPU, field) for field in CPU.__struct_fields__ if field != "caches"}, caches=caches)
    asked = make_request(cpu, GIB, "today")
    assert (asked.threads, asked.cache_bytes, asked.one_cache_bytes) == (4, 64 * MIB, 32 * MIB)
    assert make_request(CPU, GIB, "today").cache_bytes is None


def test_too_little_memory_is_a_note_and_no_figure() -> None:
    found = measure_ram(
        RamRequest(threads=2, available_bytes=32 * MIB, cache_bytes=None, one_cache_bytes=None, when="today"), print
    )
    assert found.all_cores is None and "too little memory" in found.notes[0]


def test_a_small_run_gives_plausible_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "LEAST_BYTES", 32 * MIB)
    monkeypatch.setattr(ram, "BUDGET_S", 0.05)
    told: list[float] = []
    threads = len(list_physical_cpus()) or 1
    asked = RamRequest(threads=threads, available_bytes=GIB, cache_bytes=MIB, one_cache_bytes=MIB, when="today")
    found = measure_ram(asked, told.append)
    assert found.all_cores is not None and found.one_core is not None and found.notes == ()
    assert (found.all_cores.threads, found.one_core.threads) == (threads, 1)
    for one in (found.all_cores, found.one_core):
        for figure in (one.read_bytes_s, one.copy_bytes_s):
            assert 1e8 < figure.low <= figure.value <= figure.high < 1e13
            assert figure.basis == "measured" and "today" in (figure.source or "")
    assert told == sorted(told) and told[-1] <= 1.0


def test_every_part_is_filled_read_and_copied_completely() -> None:
    slices = BufferSlices(8 * MIB, 3)
    assert slices.total % (2 * 3) == 0 and slices.part * 3 == slices.total <= 8 * MIB
    for part in range(3):
        slices.fill(part)
        slices.read(part)
    assert bytes(slices._buffer) == b"\x01" * slices.total
    slices._buffer[slices.part : slices.part + slices.half] = b"\x02" * slices.half
    slices.copy(1)
    assert bytes(slices._buffer[slices.part : 2 * slices.part]) == b"\x02" * slices.part
    assert slices._buffer[2 * slices.part] == 1


def test_an_unexpected_byte_is_detected() -> None:
    slices = BufferSlices(MIB, 1)
    slices.fill(0)
    slices._buffer[4096] = ram.ABSENT
    with pytest.raises(RuntimeError):
        slices.read(0)


def test_all_threads_of_a_crew_work_at_the_same_time() -> None:
    together = threading.Barrier(3)
    seen: list[int] = []
    with ThreadTeam([None] * 3) as crew:
        assert crew.run_round(lambda number: seen.append(together.wait(HANG_S)), loops=2) > 0
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_a_failing_job_is_raised_and_the_crew_still_ends() -> None:
    def job(number: int) -> None:
        if number == 1:
            raise ValueError("no")

    with pytest.raises(ValueError), ThreadTeam([None, None]) as crew:
        crew.run_round(job)


def test_one_cpu_of_each_allowed_core_is_used() -> None:
    found = list_physical_cpus()
    if not hasattr(os, "sched_getaffinity"):
        assert found == []
        return
    assert found and set(found) <= os.sched_getaffinity(0)


def test_pinning_affects_only_the_thread() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads cannot be tied to a CPU on this operating system")
    before = os.sched_getaffinity(0)
    seen: dict[int, set[int]] = {}
    cpu = min(before)
    with ThreadTeam([cpu]) as crew:
        crew.run_round(lambda number: seen.update({number: os.sched_getaffinity(0)}))
    assert seen == {0: {cpu}} and os.sched_getaffinity(0) == before
