"""Runs `bedplate serve --engine ID` in a separate process, and observes its output and processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from tests.conftest import HANG_S
from tests.fleet.checks import Wrong

START_LIMIT_S = 1500.0
"""Limit of a first start, conversions included, on a slow and busy machine."""
STOP_LIMIT_S = 180.0
LEFT_LIMIT_S = 30.0
TAIL_LINES = 40


class Serving:
    """One `bedplate serve`, from its start to its end."""

    def __init__(self, *arguments: str, tell: Callable[[str], None] = lambda line: None) -> None:
        self.began = time.monotonic()
        self.printed: list[str] = []
        self.endpoint: dict[str, str] = {}
        self.ready_s: float | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bedplate", "serve", "--json", "--port", "0", "--no-check", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._tell = tell
        self._readers = [
            threading.Thread(target=self._read_errors, daemon=True),
            threading.Thread(target=self._read_endpoint, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed.append(line)
            if line.startswith(" ") and not line.startswith("  ") and line.strip():  # a note, or a completed step
                self._tell(line.strip())

    def _read_endpoint(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        try:
            line = self._said.get(timeout=limit_s)
        except queue.Empty:
            raise Wrong(f"it was not ready after {limit_s:.0f} s") from None
        if not line:
            raise Wrong(f"it exited with status {self.process.wait(HANG_S)} before it was ready")
        self.endpoint = json.loads(line)
        self.ready_s = time.monotonic() - self.began

    @property
    def root(self) -> str:
        return self.endpoint["url"].removesuffix("/v1")

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def engine_processes(self) -> list[psutil.Process]:
        """The processes of the engine, the parent first."""
        return [one for one in self.descendants() if not is_warden(one)]

    def cpu_s(self) -> float:
        """CPU time of the engine."""
        found = 0.0
        for process in self.engine_processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found += times.user + times.system
        return found

    def peak_bytes(self) -> int:
        """The sum of the peak memory of the engine's processes."""
        return sum(_high_water_bytes(process) for process in self.engine_processes())

    def kill_engine(self) -> None:
        processes = self.engine_processes()
        if not processes:
            raise Wrong("there is no engine process to kill")
        processes[0].kill()

    def stop(self) -> None:
        """Stop with SIGTERM: it must exit with status 0 and leave no process."""
        below = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it did not exit within {STOP_LIMIT_S:.0f} s of SIGTERM") from None
        finally:
            _, alive = psutil.wait_procs(below, timeout=LEFT_LIMIT_S)
            left = [process for process in alive if _runs(process)]
            for process in left:
                process.kill()
        if code != 0:
            raise Wrong(f"it exited with status {code} on SIGTERM")
        if left:
            raise Wrong(f"it left processes behind: {', '.join(_named(process) for process in left)}")

    def end(self) -> None:
        """End all processes, in any state."""
        below = self.descendants()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for reader in self._readers:
            reader.join(HANG_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def evidence(self, lines: int = TAIL_LINES) -> str:
        """The end of its output and of the engine's log."""
        parts = ["".join(self.printed[-lines:]).rstrip()]
        log = self.endpoint.get("log") or self._log_named()
        if log and Path(log).is_file():
            tail = Path(log).read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- the end of {log}", *tail]
        return "\n".join(parts)

    def _log_named(self) -> str | None:
        """The log named in the hint of a failed start."""
        words = " ".join(self.printed).replace(";", " ").split()
        return next((word for word in reversed(words) if word.endswith(".log")), None)


@contextlib.contextmanager
def serving(*arguments: str, tell: Callable[[str], None] = lambda line: None) -> Iterator[Serving]:
    one = Serving(*arguments, tell=tell)
    try:
        yield one
    finally:
        one.end()


def is_warden(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("warden.py") for word in process.cmdline())
    return True


def _high_water_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # only Linux reports the peak
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _named(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    return str(process.pid)
