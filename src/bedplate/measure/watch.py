"""Observe the machine and the engine under load: memory, energy, clocks, other processes, the engine's metrics.

A thread takes a reading once a second, and at the beginning and the end of the measurement window. The load generator
is a separate process, so that readings do not delay it. `None`: not available on this machine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bedplate.engines import EngineState
from bedplate.run.starting import RunningEngine
from bedplate.values.run import EngineSeries, ResourceUse

if TYPE_CHECKING:
    from bedplate.measure.gpu_reservation import GpuReservation
    from bedplate.measure.gpu_use import OtherGpuUse

LOOK_S = 1.0
SCRAPE_LIMIT_S = 2.0
JOIN_S = 10.0
OVER = "over"
BUSY_CARD = 50
"""Utilization in percent below which a low clock is not throttling but idling."""
POWERCAP = Path("/sys/class/powercap")
PROCESSORS = Path("/sys/devices/system/cpu")
CLOCK_REASONS = {0x04: "power limit", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""NVML's clocks event reasons (nvml.h), without those for idling and for clocks set by an application."""
Read = Callable[[str], EngineState]


class CounterReading(msgspec.Struct, frozen=True, kw_only=True):
    """Monotonic counters at one moment."""

    at_s: float
    machine_s: float | None = None
    """CPU time of all processes, with the time stolen by other guests of the host."""
    engine_s: float | None = None
    own_s: float = 0.0
    cards_j: float | None = None
    package_j: float | None = None
    swapped_bytes: int | None = None
    heat_events: int | None = None
    """How often a CPU lowered its clock because of heat."""
    state: EngineState | None = None


class GaugeReading(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges at one moment."""

    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    clock_share: float | None = None
    reasons: tuple[str, ...] = ()
    state: EngineState | None = None
    other_gpu: OtherGpuUse | None = None
    other_measurements: tuple[int, ...] = ()


# summaries


def compute_use(
    first: CounterReading,
    last: CounterReading,
    looks: Sequence[GaugeReading],
    cores: int,
    *,
    on_card: bool,
    package_range_j: float | None,
) -> ResourceUse:
    """The use between two readings. On an accelerator, the energy is that of the accelerator alone."""
    wall_s = last.at_s - first.at_s
    engine_s = _subtract_counters(first.engine_s, last.engine_s)
    machine_s = _subtract_counters(first.machine_s, last.machine_s)
    others = None
    if engine_s is not None and machine_s is not None and wall_s > 0:
        own_s = last.own_s - first.own_s
        others = min(1.0, max(0.0, (machine_s - engine_s - own_s) / (cores * wall_s)))
    cards_j = _subtract_counters(first.cards_j, last.cards_j)
    package_j = _subtract_wrapping(first.package_j, last.package_j, package_range_j)
    energy_j = cards_j if on_card else package_j
    reasons = dict.fromkeys(reason for look in looks for reason in look.reasons)
    if (_subtract_counters(first.heat_events, last.heat_events) or 0) > 0:
        reasons["heat"] = None
    swapped = _subtract_counters(first.swapped_bytes, last.swapped_bytes)
    seen = [look.other_gpu for look in looks if look.other_gpu is not None]
    shares = [one.share for one in seen if one.share is not None]
    busy = [process for one in seen if one.is_busy for process in one.processes]
    names = {process.pid: process.describe(with_user=False) for process in busy}
    return ResourceUse(
        peak_memory_bytes=_find_maximum(look.memory_bytes for look in looks),
        peak_gpu_bytes=_find_maximum(look.gpu_bytes for look in looks),
        energy_j=energy_j,
        energy_source=None if energy_j is None else "nvml" if on_card else "rapl",
        engine_cpu_s=engine_s,
        other_cpu_share=others,
        other_gpu_share=_compute_mean(shares),
        other_gpu_processes=tuple(names.values()),
        other_measurements=tuple(dict.fromkeys(pid for look in looks for pid in look.other_measurements)),
        clock_share=min((look.clock_share for look in looks if look.clock_share is not None), default=None),
        throttled=tuple(reasons),
        swapped_bytes=None if swapped is None else round(swapped),
    )


def summarize_states(states: Sequence[EngineState]) -> EngineSeries:
    """The engine's metrics from the first reading to the last; counters as differences."""
    if not states:
        return EngineSeries()
    first, last = states[0], states[-1]
    running = [state.running for state in states if state.running is not None]
    waiting = [state.waiting for state in states if state.waiting is not None]
    queries = _subtract_counters(first.cache_queries, last.cache_queries)
    hits = _subtract_counters(first.cache_hits, last.cache_hits)
    return EngineSeries(
        scrapes=len(states),
        running_mean=_compute_mean(running),
        running_max=max(running, default=None),
        waiting_mean=_compute_mean(waiting),
        waiting_max=max(waiting, default=None),
        kv_use_max=max((state.kv_use for state in states if state.kv_use is not None), default=None),
        preemptions=_subtract_counters(first.preemptions, last.preemptions),
        cache_hit_share=min(1.0, hits / queries) if hits is not None and queries else None,
    )


def _subtract_counters(before: float | None, after: float | None) -> float | None:
    """The difference; `None` if either is unknown or the counter was reset."""
    return after - before if before is not None and after is not None and after >= before else None


def _subtract_wrapping(before: float | None, after: float | None, range_j: float | None) -> float | None:
    """The difference of a counter that wraps around at `range_j`."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after - before + range_j if range_j else None


def _find_maximum(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _compute_mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# memory and CPU


def read_pss_bytes(rollup: str) -> int | None:
    """The proportional set size in /proc/PID/smaps_rollup: shared memory is divided among its processes."""
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def list_process_tree(pid: int) -> list[int]:
    """The process and its descendants."""
    import psutil

    try:
        top = psutil.Process(pid)
        return [pid, *(child.pid for child in top.children(recursive=True))]
    except psutil.Error:
        return []


def measure_memory_bytes(pids: Sequence[int], root: Path = Path("/proc")) -> int | None:
    """Memory of all processes together, shared memory counted once; resident memory if the system reports no PSS."""
    found = [size for pid in pids if (size := _measure_process_memory(pid, root)) is not None]
    return sum(found) if found else None


def _measure_process_memory(pid: int, root: Path) -> int | None:
    with contextlib.suppress(OSError):
        if (size := read_pss_bytes((root / str(pid) / "smaps_rollup").read_text())) is not None:
            return size
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return None


def find_allowed_processors() -> frozenset[int] | None:
    """The CPUs that this process and the engine may run on; `None`: all."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def measure_machine_seconds(allowed: frozenset[int] | None = None) -> float:
    """CPU time of all processes on the allowed CPUs; the other CPUs of the host do not matter."""
    import psutil

    each = psutil.cpu_times(percpu=True)
    numbers = range(len(each)) if allowed is None or max(allowed) >= len(each) else allowed
    return float(sum(getattr(each[number], name, 0.0) for number in numbers for name in TAKEN))


TAKEN = ("user", "nice", "system", "irq", "softirq", "steal")
"""Not idle and iowait, during which the CPU is free; guest time is part of user time."""


def measure_own_seconds(engine_pids: Sequence[int]) -> float:
    """CPU time of bedplate and its descendants, without the engine."""
    import psutil

    me = psutil.Process()
    times = me.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    left_out = set(engine_pids)
    for child in me.children(recursive=True):
        if child.pid not in left_out:
            with contextlib.suppress(psutil.Error):
                spent = child.cpu_times()
                total += spent.user + spent.system
    return float(total)


def measure_engine_seconds(pids: Sequence[int]) -> float | None:
    import psutil

    total, seen = 0.0, False
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            spent = psutil.Process(pid).cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
            seen = True
    return total if seen else None


def read_swapped_bytes() -> int | None:
    """Bytes written to and read from swap since boot."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    pages = [int(found) for found in re.findall(r"^pswp(?:in|out) (\d+)$", text, re.MULTILINE)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if pages else None


def count_heat_events(root: Path = PROCESSORS) -> int | None:
    return _sum_files(root.glob("cpu[0-9]*/thermal_throttle/*_throttle_count"))


def measure_processor_clock(root: Path = PROCESSORS) -> float | None:
    """The mean ratio of clock to base clock, since a CPU does not sustain its boost clock."""
    shares = []
    for base in root.glob("cpu[0-9]*/cpufreq/base_frequency"):
        usual, now = _read_integer(base), _read_integer(base.with_name("scaling_cur_freq"))
        if usual and now:
            shares.append(now / usual)
    return _compute_mean(shares)


def _sum_files(files: Iterable[Path]) -> int | None:
    found = [value for file in files if (value := _read_integer(file)) is not None]
    return sum(found) if found else None


def _read_integer(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


# CPU energy


class CpuEnergyMeter:
    """The CPU's energy counter (RAPL), which on most systems only root may read."""

    def __init__(self, root: Path = POWERCAP) -> None:
        zones = [zone for zone in sorted(root.glob("*-rapl:*")) if zone.name.count(":") == 1]
        self._files = [zone / "energy_uj" for zone in zones if _read_integer(zone / "energy_uj") is not None]
        ends = [_read_integer(file.with_name("max_energy_range_uj")) for file in self._files]
        self.range_j = ends[0] / 1e6 if len(ends) == 1 and ends[0] else None
        """`None` for several packages: if their sum falls, it is unknown which counter wrapped around."""

    def read_joules(self) -> float | None:
        found = [_read_integer(file) for file in self._files]
        known = [value for value in found if value is not None]
        return sum(known) / 1e6 if known and len(known) == len(found) else None


# accelerators


class GpuMeter:
    """NVIDIA GPUs, through NVML. Create it before the engine starts: memory in use then is not the engine's."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = list(handles)
        self._before = [self._read_used_bytes(handle) for handle in self._handles]

    @classmethod
    def open_driver(cls) -> GpuMeter | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no driver, no library or no permission
            return None
        return cls(pynvml, handles) if handles else None

    def measure_gpu_bytes(self, pids: Sequence[int]) -> int | None:
        """Memory of the processes by NVML. A container hides them; then the growth since the start."""
        named = [size for handle in self._handles for pid, size in self._list_processes(handle) if pid in pids and size]
        if named:
            return sum(named)
        grown = [
            now - before
            for handle, before in zip(self._handles, self._before, strict=True)
            if before is not None and (now := self._read_used_bytes(handle)) is not None
        ]
        return max(0, sum(grown)) if grown else None

    def read_joules(self) -> float | None:
        found = [
            self._call_driver("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self._find_engine_gpus()
        ]
        known = [value for value in found if value is not None]
        return sum(known) / 1000 if known and len(known) == len(found) else None

    def read_clock(self) -> tuple[float | None, tuple[str, ...]]:
        """The lowest ratio of clock to maximum clock of a busy GPU, and the reasons for a lower clock."""
        shares: list[float] = []
        reasons: dict[str, None] = {}
        for handle in self._find_engine_gpus():
            load = self._call_driver("nvmlDeviceGetUtilizationRates", handle)
            if load is None or load.gpu < BUSY_CARD:
                continue
            now = self._call_driver("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM)
            most = self._call_driver("nvmlDeviceGetMaxClockInfo", handle, self._nvml.NVML_CLOCK_SM)
            if now and most:
                shares.append(now / most)
            bits = self._call_driver("nvmlDeviceGetCurrentClocksEventReasons", handle)
            if bits is None:
                bits = self._call_driver("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
            reasons |= dict.fromkeys(list_throttle_reasons(bits or 0))
        return min(shares, default=None), tuple(reasons)

    def read_utilization(self) -> float | None:
        """The mean utilization of the engine's GPUs, 0 to 1: the share of time in which a kernel was running."""
        found = [self._call_driver("nvmlDeviceGetUtilizationRates", handle) for handle in self._find_engine_gpus()]
        known = [one.gpu / 100 for one in found if one is not None]
        return _compute_mean(known)

    def _find_engine_gpus(self) -> list[Any]:
        """The GPUs whose memory use has grown since the start; all, if none has."""
        grown = [
            handle
            for handle, before in zip(self._handles, self._before, strict=True)
            if before is not None and (self._read_used_bytes(handle) or 0) - before > 64_000_000
        ]
        return grown or self._handles

    def _read_used_bytes(self, handle: Any) -> int | None:
        found = self._call_driver("nvmlDeviceGetMemoryInfo", handle)
        return None if found is None else int(found.used)

    def _list_processes(self, handle: Any) -> list[tuple[int, int | None]]:
        found = self._call_driver("nvmlDeviceGetComputeRunningProcesses", handle) or []
        return [(one.pid, one.usedGpuMemory) for one in found]

    def _call_driver(self, name: str, *arguments: Any) -> Any:
        """Calls NVML; `None` if an older driver, a MIG slice or the platform does not support the call."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except Exception:
            return None


def list_throttle_reasons(bits: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words for bit, words in CLOCK_REASONS.items() if bits & bit))


# engine metrics


class EngineMetrics:
    """Reads the metrics of an engine; stops after the first response that says there are none."""

    def __init__(self, url: str, key: str | None, read: Read) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(url)
        self._request = urllib.request.Request(f"{url}/metrics")  # noqa: S310
        if key:
            self._request.add_header("authorization", f"Bearer {key}")
        self._read = read
        self._gone = False

    def read_state(self) -> EngineState | None:
        if self._gone:
            return None
        try:
            with urllib.request.urlopen(self._request, timeout=SCRAPE_LIMIT_S) as answer:  # noqa: S310
                return self._read(answer.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            error.close()
            self._gone = error.code in (401, 403, 404, 405, 501)
        except (OSError, ValueError):
            pass  # the engine is busy; the next reading may succeed
        return None


# readings


class EngineMeters:
    """Takes readings of one engine and its machine. Create it before the engine starts; set `pid` when it runs."""

    def __init__(self) -> None:
        import psutil

        self.cards = GpuMeter.open_driver()
        self.package = CpuEnergyMeter()
        self._allowed = find_allowed_processors()
        self.cores = len(self._allowed) if self._allowed else psutil.cpu_count() or 1
        self.pid: int | None = None
        self.on_card = False
        self.reservation: GpuReservation | None = None
        """Watches for other processes on the engine's GPUs."""
        self.metrics: EngineMetrics | None = None

    def read_counters(self) -> CounterReading:
        pids = list_process_tree(self.pid) if self.pid is not None else []
        return CounterReading(
            at_s=time.monotonic(),
            machine_s=measure_machine_seconds(self._allowed),
            engine_s=measure_engine_seconds(pids),
            own_s=measure_own_seconds(pids),
            cards_j=self.cards.read_joules() if self.cards is not None and self.on_card else None,
            package_j=self.package.read_joules(),
            swapped_bytes=read_swapped_bytes(),
            heat_events=count_heat_events(),
            state=self.metrics.read_state() if self.metrics is not None else None,
        )

    def read_gauges(self) -> GaugeReading:
        pids, held = list_process_tree(self.pid) if self.pid is not None else [], self.reservation
        share, reasons = (
            self.cards.read_clock() if self.cards is not None and self.on_card else (measure_processor_clock(), ())
        )
        return GaugeReading(
            memory_bytes=measure_memory_bytes(pids),
            gpu_bytes=self.cards.measure_gpu_bytes(pids) if self.cards is not None and self.on_card else None,
            clock_share=share,
            reasons=reasons,
            other_gpu=held.read_others() if held is not None else None,
            other_measurements=tuple(one.pid for one in held.list_other_measurements()) if held is not None else (),
            state=self.metrics.read_state() if self.metrics is not None else None,
        )


def make_meters(started: RunningEngine, reservation: GpuReservation | None = None) -> EngineMeters:
    """The meters of a running engine."""
    meters = EngineMeters()
    meters.reservation = reservation
    meters.pid = started.pid
    meters.on_card = started.start.plan.settings.device not in ("cpu", "metal")
    meters.metrics = EngineMetrics(started.own_url, started.backend.engine_key, started.start.engine.read_metrics)
    return meters


class Watcher:
    """Takes readings during one measurement window. `mark` reports its begin and end; `seen` returns the summary."""

    def __init__(self, meters: EngineMeters) -> None:
        self._meters = meters
        self._moments: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._first: CounterReading | None = None
        self._last: CounterReading | None = None
        self._looks: list[GaugeReading] = []
        self._thread = threading.Thread(target=self._run, name="bedplate-watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._moments.put(OVER)
        self._thread.join(JOIN_S)

    def mark(self, moment: str) -> None:
        self._moments.put(moment)

    def summarize_readings(self) -> tuple[ResourceUse, EngineSeries]:
        """Call it after the end of the measurement window."""
        first, last, meters = self._first, self._last, self._meters
        if first is None or last is None:
            return ResourceUse(), EngineSeries()
        known = [first.state, *(look.state for look in self._looks), last.state]
        states = [state for state in known if state is not None]
        range_j = meters.package.range_j
        use = compute_use(first, last, self._looks, meters.cores, on_card=meters.on_card, package_range_j=range_j)
        return use, summarize_states(states)

    def _run(self) -> None:
        """Handles each mark in order, even if late: a reading waits for the response of a busy engine."""
        while (moment := self._get_next_mark()) != OVER:
            if moment == "begin" and self._first is None:
                self._first = self._meters.read_counters()
            elif moment == "end" and self._first is not None and self._last is None:
                self._last = self._meters.read_counters()
            elif self._first is None or self._last is not None:
                continue
            self._looks.append(self._meters.read_gauges())

    def _get_next_mark(self) -> str | None:
        """The next mark; `None` after `LOOK_S` without one: take the next reading."""
        with contextlib.suppress(queue.Empty):
            return self._moments.get(timeout=LOOK_S)
        return None


def find_listening_pid(port: int) -> int | None:
    """The process on this machine that listens on a port, if the system reports it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return connection.pid
    return None


def measure_idle_share(seconds: float = 1.0) -> float:
    """The idle share of the machine's CPUs now."""
    import psutil

    return max(0.0, 1 - float(psutil.cpu_percent(interval=seconds)) / 100)
