"""Detects an engine that hangs: a request waits for it, and it neither answers nor computes.

Progress is any of: a part of an answer, a counter in the engine's own metrics, CPU time, disk reads or GPU time. An
engine without requests must answer its health check. The decision is a pure function of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bedplate.values.units import format_seconds

STOPPED = ("stopped", "tracing-stop")
READ_BYTES = 1_000_000
"""Disk reads that count as progress: an engine that was swapped out, or reads its weights again, uses little CPU."""


class HangLimits(NamedTuple):
    """With the defaults, an engine that hangs is restarted within a minute, whether or not requests wait."""

    silent_s: float = 40.0
    """Time without progress after which an engine hangs."""
    every_s: float = 5.0
    """Interval of the samples."""
    idle_every_s: float = 15.0
    """Interval of the health checks of an engine without requests."""
    answer_s: float = 5.0
    """Timeout of a health check, and of a request for the engine's metrics."""
    longest_gap_s: float = 15.0
    """A longer interval between two samples counts as this long: bedplate itself was stopped or suspended then."""
    busy_share: float = 0.02
    """Of a core. An engine that computes uses more; the idle threads of one that hangs use less."""


DEFAULT_LIMITS = HangLimits()


class ProcessActivity(NamedTuple):
    """What a process and its descendants have used since they were started."""

    cpu_s: float = 0.0
    """CPU time, and time in which a thread could run but other processes had the CPU."""
    read_bytes: int = 0
    gpu_is_busy: bool = False
    """Now."""


class ProgressSample(NamedTuple):
    """The state of an engine at one moment. `None`: not measured, since something else decides, or not available."""

    at_s: float
    """On a monotonic clock, which does not count the time in which the machine is suspended."""
    waiting: int
    """Requests that wait for the engine, without those whose clients do not read."""
    received: int = 0
    """Parts of answers that have been received from it."""
    counters: tuple[float | None, ...] | None = None
    """From its own metrics; they change when it computes."""
    activity: ProcessActivity | None = None
    is_answering: bool | None = None
    """Whether it has answered its health check."""


class Hang(NamedTuple):
    """An engine that made no progress."""

    silent_s: float
    waiting: int
    is_stopped: bool = False
    """Whether its process was stopped by a signal."""

    @property
    def text(self) -> str:
        stopped = "its process was stopped by a signal (SIGSTOP), and " if self.is_stopped else ""
        if not self.waiting:
            return f"{stopped}it did not answer its health check for {format_seconds(self.silent_s)}"
        requests = f"{self.waiting} requests" if self.waiting > 1 else "a request"
        return f"{stopped}it made no progress for {format_seconds(self.silent_s)} while {requests} waited"


class HangDetector:
    """Decides from successive samples whether an engine hangs."""

    def __init__(self, limits: HangLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.silent_s = 0.0
        self._last: ProgressSample | None = None
        self._activity: tuple[float, ProcessActivity] | None = None
        self._counters: tuple[float | None, ...] | None = None

    def forget(self) -> None:
        """Starts again, without earlier samples."""
        self.__init__(self.limits)  # type: ignore[misc]

    def has_news(self, received: int) -> bool:
        """Whether a part of an answer was received since the last sample; nothing else needs to be measured then."""
        return self._last is not None and received != self._last.received

    def observe(self, sample: ProgressSample) -> Hang | None:
        last, self._last = self._last, sample
        progressed = self._has_computed(sample)
        if last is None:
            return None
        if progressed or sample.received != last.received or (not sample.waiting and sample.is_answering):
            self.silent_s = 0.0
        elif last.waiting if sample.waiting else sample.is_answering is not None:
            self.silent_s += min(sample.at_s - last.at_s, self.limits.longest_gap_s)
        return Hang(self.silent_s, sample.waiting) if self.silent_s >= self.limits.silent_s else None

    def _has_computed(self, sample: ProgressSample) -> bool:
        """Whether its processes or its counters show work since they were last read."""
        found = False
        if sample.counters is not None:
            found = self._counters is not None and sample.counters != self._counters
            self._counters = sample.counters
        if sample.activity is not None:
            before, self._activity = self._activity, (sample.at_s, sample.activity)
            found = found or sample.activity.gpu_is_busy
            if before is not None:
                elapsed_s = min(sample.at_s - before[0], self.limits.longest_gap_s)
                found = found or sample.activity.cpu_s - before[1].cpu_s >= self.limits.busy_share * elapsed_s
                found = found or sample.activity.read_bytes - before[1].read_bytes >= READ_BYTES
        return found


# readings; all of them block


def measure_activity(pid: int, device: str) -> ProcessActivity:
    """The activity of a process and its descendants."""
    import psutil

    cpu_s, read_bytes, pids = 0.0, 0, []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                cpu_s += times.user + times.system + times.children_user + times.children_system
                cpu_s += _read_waiting_seconds(process.pid)
                pids.append(process.pid)
                read_bytes += process.io_counters().read_bytes if hasattr(process, "io_counters") else 0
    return ProcessActivity(cpu_s, read_bytes, is_gpu_busy(pids, device))


def _read_waiting_seconds(pid: int) -> float:
    """How long the threads of a process could run but had no CPU. On a busy machine, that is most of their time."""
    total_ns = 0
    with contextlib.suppress(OSError):  # the process has ended, or the system has no such files
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                total_ns += int((thread / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process or one of its descendants."""
    import psutil

    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() in STOPPED:
                    return True
    return False


def is_gpu_busy(pids: Sequence[int], device: str) -> bool:
    """Whether a GPU computes for these processes; for any process, where the driver does not name processes.

    CPU time is not enough: a process that keeps an H200 busy and blocks until its kernels end uses 0.4 % of a core.
    """
    if device == "cuda":
        return _is_nvidia_busy(pids)
    if device == "rocm":
        files = Path("/sys/class/drm").glob("card*/device/gpu_busy_percent")
        return any(_read_number(file) > 0 for file in files)
    return False


def _is_nvidia_busy(pids: Sequence[int]) -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library or no permission
        return False
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if not pynvml.nvmlDeviceGetUtilizationRates(handle).gpu:
                continue
            named = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            # In a container the driver names no process, or the process ids of the host.
            if not any(Path(f"/proc/{pid}").exists() for pid in named) or named & set(pids):
                return True
    except Exception:  # a driver that does not report it
        return False
    finally:
        pynvml.nvmlShutdown()
    return False


def _read_number(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
