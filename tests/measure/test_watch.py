"""Readings of the machine: summaries of given readings, and readings of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S, wait_for

from bedplate.engines import EngineState, get_engine
from bedplate.measure import watch
from bedplate.measure.watch import (
    CounterReading,
    CpuEnergyMeter,
    EngineMeters,
    EngineMetrics,
    GaugeReading,
    GpuMeter,
    Watcher,
    compute_use,
    summarize_states,
)
from bedplate.values.run import EngineSeries, ResourceUse

CAPTURES = Path(__file__).parents[1] / "captures"


def summarize_use(
    first: CounterReading,
    last: CounterReading,
    *looks: GaugeReading,
    on_card: bool = False,
    range_j: float | None = None,
) -> ResourceUse:
    return compute_use(first, last, looks, 4, on_card=on_card, package_range_j=range_j)


def test_other_cpu_share_excludes_the_engine_and_bedplate() -> None:
    first = CounterReading(at_s=10, machine_s=100, engine_s=5, own_s=1)
    last = CounterReading(at_s=20, machine_s=130, engine_s=20, own_s=2)
    found = summarize_use(first, last)
    assert found.engine_cpu_s == 15 and found.other_cpu_share == pytest.approx((30 - 15 - 1) / 40)
    assert summarize_use(CounterReading(at_s=1), CounterReading(at_s=2)).other_cpu_share is None


def test_memory_is_the_maximum_and_the_clock_the_minimum() -> None:
    looks = (
        GaugeReading(memory_bytes=5, clock_share=0.9),
        GaugeReading(memory_bytes=9, gpu_bytes=7),
        GaugeReading(clock_share=0.8),
    )
    found = summarize_use(CounterReading(at_s=0), CounterReading(at_s=1), *looks)
    assert (found.peak_memory_bytes, found.peak_gpu_bytes, found.clock_share) == (9, 7, 0.8)


def test_energy_is_that_of_the_gpu_or_of_the_cpu_package() -> None:
    first = CounterReading(at_s=0, cards_j=100, package_j=7)
    last = CounterReading(at_s=1, cards_j=350, package_j=9)
    assert (summarize_use(first, last).energy_j, summarize_use(first, last).energy_source) == (2, "rapl")
    card = summarize_use(first, last, on_card=True)
    assert (card.energy_j, card.energy_source) == (250, "nvml")
    nothing = summarize_use(CounterReading(at_s=0), CounterReading(at_s=1), on_card=True)
    assert nothing.energy_j is None and nothing.energy_source is None


def test_handles_a_counter_that_wraps_around() -> None:
    first, last = CounterReading(at_s=0, package_j=95, machine_s=9), CounterReading(at_s=1, package_j=5, machine_s=8)
    assert summarize_use(first, last, range_j=100).energy_j == 10 and summarize_use(first, last).energy_j is None


def test_reads_throttling_from_the_driver_and_the_cpu_counter() -> None:
    first, last = CounterReading(at_s=0, heat_events=3), CounterReading(at_s=1, heat_events=4)
    assert summarize_use(first, last).throttled == ("heat",)
    assert summarize_use(first, first).throttled == ()
    assert summarize_use(
        first, first, GaugeReading(reasons=("power limit",)), GaugeReading(reasons=("power limit",))
    ).throttled == ("power limit",)
    assert watch.list_throttle_reasons(0x04 | 0x01) == ("power limit",) and watch.list_throttle_reasons(0x60) == (
        "heat",
    )


def test_summarizes_engine_metrics() -> None:
    states = [
        EngineState(running=1, waiting=0, kv_use=0.1, preemptions=5, cache_hits=10, cache_queries=100),
        EngineState(running=3, waiting=4, kv_use=0.7),
        EngineState(running=2, waiting=2, kv_use=0.5, preemptions=8, cache_hits=60, cache_queries=300),
    ]
    assert summarize_states(states) == EngineSeries(
        scrapes=3, running_mean=2, running_max=3, waiting_mean=2, waiting_max=4, kv_use_max=0.7, preemptions=3,
        cache_hit_share=0.25,
    )  # fmt: skip
    assert summarize_states([]) == EngineSeries() and summarize_states([EngineState()]) == EngineSeries(scrapes=1)


figures = st.none() | st.floats(0, 1e9)


@given(st.lists(st.builds(EngineState, running=figures, cache_hits=figures, cache_queries=figures), max_size=5))
def test_cache_hit_share_is_between_zero_and_one(states: list[EngineState]) -> None:
    share = summarize_states(states).cache_hit_share
    assert share is None or 0 <= share <= 1


@pytest.mark.parametrize(
    ("name", "capture", "hits", "queries"),
    [
        ("vllm", "vllm/metrics-busy.txt", 0, 12),
        ("llama.cpp", "llama.cpp/metrics-busy.txt", 0, 0),
        ("tensorrt-llm", "tensorrt-llm/metrics.json", 4, 3125),
    ],
)
def test_reads_cache_hits_of_engines(name: str, capture: str, hits: float, queries: float) -> None:
    state = get_engine(name).read_metrics((CAPTURES / capture).read_text())
    assert (state.cache_hits, state.cache_queries) == (hits, queries)


def test_adds_sglangs_cached_tokens_of_all_sources() -> None:
    text = (
        'sglang:prompt_tokens_total{model_name="m"} 400.0\n'
        'sglang:cached_tokens_total{model_name="m",cache_source="device"} 90.0\n'
        'sglang:cached_tokens_total{model_name="m",cache_source="host"} 10.0\n'
    )
    state = get_engine("sglang").read_metrics(text)
    assert (state.cache_hits, state.cache_queries) == (100, 400)


# real processes


@pytest.fixture
def process_tree() -> Iterator[subprocess.Popen[bytes]]:
    """A process with 60 MB, and a child with as much."""
    hold = "b = bytearray(60_000_000); b[::4096] = b'x' * len(b[::4096]); print('held', flush=True)"
    child = f"import time; {hold}; time.sleep(60)"
    code = f"import subprocess, sys, time; {hold}; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"held\n"] * 2
    yield process
    for pid in reversed(watch.list_process_tree(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_memory_includes_child_processes(process_tree: subprocess.Popen[bytes]) -> None:
    pids = watch.list_process_tree(process_tree.pid)
    assert len(pids) == 2
    alone, both = watch.measure_memory_bytes(pids[:1]), watch.measure_memory_bytes(pids)
    assert alone is not None and 60_000_000 < alone < 110_000_000
    assert both is not None and alone + 60_000_000 < both < 220_000_000


def test_an_ended_process_has_no_readings(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    assert watch.list_process_tree(gone.pid) == [] and watch.measure_memory_bytes([]) is None
    assert watch.measure_memory_bytes([gone.pid], tmp_path) is None and watch.measure_engine_seconds([gone.pid]) is None


@pytest.mark.parametrize("text", ["", "Rss: 5 kB\n", "Pss: x kB\n", "Pss:  12\n"])
def test_an_invalid_rollup_is_none(text: str) -> None:
    assert watch.read_pss_bytes(text) is None
    assert watch.read_pss_bytes("Rss:   10 kB\nPss:      7 kB\nPss_Dirty: 9 kB\n") == 7 * 1024


def test_reads_energy_and_clocks_from_sysfs(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    (tmp_path / "intel-rapl:0:0").mkdir()
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999999999")
    (zone / "energy_uj").write_text("5000000\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    package = CpuEnergyMeter(tmp_path)
    assert package.read_joules() == 5 and package.range_j == pytest.approx(262143.32885)
    (zone / "energy_uj").write_text("nothing")
    assert package.read_joules() is None and CpuEnergyMeter(tmp_path / "none").read_joules() is None
    clock = tmp_path / "cpu0" / "cpufreq"
    clock.mkdir(parents=True)
    assert watch.measure_processor_clock(tmp_path) is None
    (clock / "base_frequency").write_text("2000000")
    (clock / "scaling_cur_freq").write_text("1500000")
    assert watch.measure_processor_clock(tmp_path) == 0.75
    throttle = tmp_path / "cpu0" / "thermal_throttle"
    throttle.mkdir()
    assert watch.count_heat_events(tmp_path) is None
    (throttle / "core_throttle_count").write_text("3")
    (throttle / "package_throttle_count").write_text("4")
    assert watch.count_heat_events(tmp_path) == 7


# accelerators


class Driver:
    """A fake NVML with two GPUs; the engine uses the second."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.used = {"a": 1_000, "b": 1_000}
        self.processes: dict[str, list[Any]] = {"a": [], "b": []}

    def nvmlDeviceGetMemoryInfo(self, card: str) -> Any:
        return SimpleNamespace(used=self.used[card])

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> Any:
        return self.processes[card]

    def nvmlDeviceGetTotalEnergyConsumption(self, card: str) -> int:
        return {"a": 1_000, "b": 7_000}[card]

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        return SimpleNamespace(gpu={"a": 0, "b": 99}[card])

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:
        return {"a": 200, "b": 1500}[card]

    def nvmlDeviceGetMaxClockInfo(self, card: str, kind: int) -> int:
        return 2000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: str) -> int:
        return 0x04 if card == "b" else 0x01


def test_only_gpus_that_the_engine_uses_count() -> None:
    driver = Driver()
    cards = GpuMeter(driver, ["a", "b"])
    assert cards.read_joules() == 8  # no GPU is in use yet, so all count
    driver.used["b"] += 5_000_000_000
    assert cards.measure_gpu_bytes([]) == 5_000_000_000 and cards.read_joules() == 7
    assert cards.read_clock() == (0.75, ("power limit",)) and cards.read_utilization() == 0.99
    driver.processes["b"] = [SimpleNamespace(pid=42, usedGpuMemory=3_000), SimpleNamespace(pid=7, usedGpuMemory=None)]
    assert cards.measure_gpu_bytes([42]) == 3_000


def test_a_driver_without_answers_gives_none() -> None:
    cards = GpuMeter(SimpleNamespace(), ["a"])
    assert cards.measure_gpu_bytes([1]) is None and cards.read_joules() is None and cards.read_clock() == (None, ())


# readings


class Page(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        keyed = self.headers.get("authorization") == "Bearer secret"
        self.wfile.write(f"llamacpp:requests_processing {3 if keyed else 1}\n".encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_requests_metrics_with_the_engines_key(page: str) -> None:
    read = get_engine("llama.cpp").read_metrics
    assert EngineMetrics(page, "secret", read).read_state() == EngineState(running=3)
    assert EngineMetrics(page, None, read).read_state() == EngineState(running=1)


def test_requests_metrics_only_once_if_there_are_none(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "status", 404)
    metrics = EngineMetrics(page, None, get_engine("llama.cpp").read_metrics)
    assert metrics.read_state() is None
    monkeypatch.setattr(Page, "status", 200)
    assert metrics.read_state() is None


def test_an_unreachable_engine_has_no_metrics() -> None:
    assert EngineMetrics("http://127.0.0.1:9", None, get_engine("llama.cpp").read_metrics).read_state() is None


def test_takes_readings_from_begin_to_end(process_tree: subprocess.Popen[bytes], page: str) -> None:
    meters = EngineMeters()
    meters.pid = process_tree.pid
    meters.metrics = EngineMetrics(page, None, get_engine("llama.cpp").read_metrics)
    with Watcher(meters) as watcher:
        watcher.mark("warm-up")
        watcher.mark("begin")
        wait_for(lambda: watcher._looks or None, "the first reading")
        watcher.mark("end")
        wait_for(lambda: watcher._last, "the last reading")
    use, series = watcher.summarize_readings()
    assert use.peak_memory_bytes is not None and use.peak_memory_bytes > 120_000_000
    assert use.engine_cpu_s is not None and use.other_cpu_share is not None and 0 <= use.other_cpu_share <= 1
    assert series.scrapes >= 3 and series.running_max == 1


def test_only_allowed_cpus_count() -> None:
    whole = watch.measure_machine_seconds(None)
    part = watch.measure_machine_seconds(frozenset([0]))
    assert 0 < part <= watch.measure_machine_seconds(None) and whole <= watch.measure_machine_seconds(
        frozenset([10**6])
    )


def test_a_window_that_never_began_has_no_readings() -> None:
    with Watcher(EngineMeters()) as watcher:
        watcher.mark("warm-up")
    assert watcher.summarize_readings() == (ResourceUse(), EngineSeries())


def test_finds_the_process_that_listens_on_a_port(page: str) -> None:
    assert watch.find_listening_pid(int(page.rpartition(":")[2])) == os.getpid()
    assert 0 <= watch.measure_idle_share(0.05) <= 1


def test_a_window_that_ends_during_a_reading_has_a_last_reading() -> None:
    """Both marks arrive while the engine is slow to answer, and the watcher stops directly after them."""

    class Slow(EngineMeters):
        looking, answered, looks = threading.Event(), threading.Event(), 0

        def read_gauges(self) -> GaugeReading:
            self.looks += 1
            self.looking.set()
            assert self.answered.wait(HANG_S)
            return super().read_gauges()

    meters = Slow()
    meters.pid = os.getpid()
    with Watcher(meters) as watcher:
        watcher.mark("begin")
        assert meters.looking.wait(HANG_S)
        watcher.mark("end")
        threading.Timer(0.1, meters.answered.set).start()
    use, _ = watcher.summarize_readings()
    assert use.peak_memory_bytes is not None and use.engine_cpu_s is not None and meters.looks == 2


def test_a_window_that_ends_before_the_first_reading_has_readings() -> None:
    meters = EngineMeters()
    meters.pid = os.getpid()
    watcher = Watcher(meters)
    watcher.mark("begin")
    watcher.mark("end")
    with watcher:
        pass
    assert watcher.summarize_readings()[0].peak_memory_bytes is not None
