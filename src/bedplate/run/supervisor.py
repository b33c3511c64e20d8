"""Keeps one engine running. One task owns the process; nothing else sends signals to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from io import FileIO
from pathlib import Path

import aiohttp

from bedplate.engines import Engine, KnownFailure
from bedplate.engines.base import HIGHEST_PORT
from bedplate.errors import ExternalFailure
from bedplate.home import open_for_owner
from bedplate.run.environments import EngineEnvironment, add_library_path, build_command, get_compiled_dir
from bedplate.run.gateway import GatewayBackend
from bedplate.run.liveness import (
    DEFAULT_LIMITS,
    Hang,
    HangDetector,
    HangLimits,
    ProgressSample,
    is_stopped,
    measure_activity,
)
from bedplate.run.log_text import MAX_CLIENT_LINE_CHARS, MAX_LINE_CHARS, OutputLimit, clean_line
from bedplate.run.prepare import SECRETS, has_local_weights, set_offline
from bedplate.run.warden import wrap_with_warden
from bedplate.values import Launch, Plan
from bedplate.values.service import ExitCause, LastExit
from bedplate.values.units import format_seconds

LOG_BYTES = 10_000_000
LOGS_KEPT = 4
TAIL_LINES = 200
MAX_LINE_BYTES = 65536
STOP_GRACE_S = 5.0
KILL_GRACE_S = 10.0
"""A process in a system call cannot be killed; after this time the warden waits for it alone."""
EARLY_DEATHS = 3
"""After this many consecutive exits before the engine was ever ready, it is not started again."""
LATER_DEATHS = 10
"""The same for an engine that was ready before with the same plan: the cause, such as another program's memory use,
may be temporary."""
SLOWEST_DISK_BYTES_S = 20_000_000
START_LIMIT_S = 60.0
"""A start without CPU use fails after this time plus the time to read the weights at the rate above."""
LONGEST_START_S = 1800.0
"""A start fails after this time even if it uses the CPU all the time."""
CHECK_EVERY_S = 5.0
BUSY_SHARE = 0.02
"""Of a core. An engine that loads, compiles or warms up uses more; one that hangs uses none."""
HANG_LIMITS = DEFAULT_LIMITS
LOWEST_PORT = 10_000
MIN_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 10.0


class EngineExit:
    """How an engine process ended."""

    def __init__(
        self,
        code: int | None,
        log: str,
        was_ready: bool,
        worked: bool,
        overdue_s: float | None = None,
        hang: Hang | None = None,
    ) -> None:
        self.code = code
        """`None`: it was never started."""
        self.log = log
        self.was_ready = was_ready
        self.worked = worked
        """Whether it answered a request: then it is not a crash loop, however soon it died."""
        self.overdue_s = overdue_s
        """It was stopped because it was not ready after this time."""
        self.hang = hang
        """It was stopped because it made no progress."""

    @property
    def cause(self) -> ExitCause:
        if self.hang is not None:
            return "hung"
        if self.overdue_s is not None:
            return "not ready"
        if self.code is None:
            return "not started"
        return "killed" if self.code < 0 else "exited"


def compute_back_off_s(deaths: list[EngineExit]) -> float:
    """How long to wait before the next start: longer after each exit without an answered request."""
    idle = 0
    for death in reversed(deaths):
        if death.worked:
            break
        idle += 1
    return min(MIN_BACK_OFF_S * 2.0 ** max(idle - 1, 0), MAX_BACK_OFF_S)


def find_final_failure(deaths: list[EngineExit], engine: Engine) -> KnownFailure | None:
    """Why the engine is not started again; `None` if it is."""
    last = deaths[-1]
    early = 0
    for death in reversed(deaths):
        if death.was_ready:
            break
        early += 1
    known = engine.explain(last.log) if early else None
    if known is not None and known.lasting:
        return known
    most = EARLY_DEATHS if early == len(deaths) else LATER_DEATHS
    return explain_exit(last, engine) if early >= most else None


def explain_exit(death: EngineExit, engine: Engine) -> KnownFailure:
    """That it hung; else the known failure in the log; otherwise an explanation of the exit status."""
    if death.hang is not None:
        return KnownFailure(message=death.hang.text, hint="see the engine's log", lasting=False)
    if known := engine.explain(death.log):
        return known
    if death.overdue_s is not None:
        message = f"it was not ready after {format_seconds(death.overdue_s)}"
        return KnownFailure(
            message=message, hint="check whether the disk with the model is very slow; see the engine's log"
        )
    code = death.code
    if code == -signal.SIGKILL:
        message = "it was killed (SIGKILL), most likely because the system was out of memory"
        return KnownFailure(message=message, hint="reduce memory use: --context 4096, or a smaller model")
    if code == -signal.SIGILL:
        message = "it used an instruction that this CPU does not support (SIGILL)"
        return KnownFailure(message=message, hint="please report this with the output of `bedplate probe`")
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return KnownFailure(message=f"it crashed ({name})", hint="see the engine's log")
    lines = [line for line in death.log.splitlines() if line.strip() and not line.startswith("#")]
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    what = "it could not be started" if code is None else f"it ended with status {code}"
    return KnownFailure(message=f"{what}{last}", hint="see the engine's log")


class StartDeadline:
    """The time limit of a start. It is extended while the engine uses the CPU, since other processes may slow it."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._began = self._looked = time.monotonic()
        self._busy_s = 0.0

    def extend(self, pid: int | None) -> float | None:
        """The remaining time from now on if the process has used the CPU since the last check; otherwise `None`."""
        now = time.monotonic()
        if pid is None or now - self._looked < CHECK_EVERY_S:
            return None
        busy_s, before_s, waited_s = measure_busy_seconds(pid), self._busy_s, now - self._looked
        self._looked, self._busy_s = now, busy_s
        left_s = self._began + LONGEST_START_S + self.limit_s - now
        return min(self.limit_s, left_s) if busy_s - before_s >= BUSY_SHARE * waited_s else None

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began


class EngineWatcher:
    """Takes samples of a ready engine until it hangs.

    It measures only what it needs: nothing while answers arrive, and one health check now and then while the engine is
    idle. The processes of an orchestrator are judged by their health checks alone: their requests are not known, and
    they use the CPU all the time.
    """

    def __init__(
        self,
        process: EngineProcess,
        engine: Engine,
        backend: GatewayBackend,
        health_path: str,
        device: str,
        *,
        by_health: bool,
        limits: HangLimits,
    ) -> None:
        self._process, self._engine, self._backend, self._device = process, engine, backend, device
        self._health_path, self._by_health = health_path, by_health
        self.detector = HangDetector(limits)
        self._has_metrics = not by_health
        self._answered_at = time.monotonic()

    async def take_sample(self, session: aiohttp.ClientSession) -> ProgressSample:
        backend, limits = self._backend, self.detector.limits
        waiting = 0 if self._by_health else max(0, backend.in_flight - backend.unread)
        received = backend.received
        now = time.monotonic()
        if self.detector.has_news(received) or (not waiting and now - self._answered_at < limits.idle_every_s):
            return ProgressSample(now, waiting, received)
        is_answering = activity = counters = None
        if not waiting:
            # Any status: an engine that says that it is not healthy does not hang.
            is_answering = await self._request(session, self._health_path) is not None
            if is_answering:
                self._answered_at = time.monotonic()
        if not is_answering and not self._by_health and (pid := self._process.group_pid) is not None:
            activity = await asyncio.to_thread(measure_activity, pid, self._device)
        if waiting and self._has_metrics:
            counters = await self._read_counters(session)
        return ProgressSample(time.monotonic(), waiting, received, counters, activity, is_answering)

    async def check_stopped(self, hang: Hang) -> Hang:
        pid = self._process.group_pid
        stopped = pid is not None and await asyncio.to_thread(is_stopped, pid)
        return hang._replace(is_stopped=stopped)

    async def _read_counters(self, session: aiohttp.ClientSession) -> tuple[float | None, ...] | None:
        answer = await self._request(session, "/metrics")
        if answer is None:
            return None
        status, text = answer
        if status != HTTPStatus.OK:
            self._has_metrics = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED
            return None
        try:
            state = self._engine.read_metrics(text)
        except Exception:  # a bug in an engine's file must not end its supervision
            self._has_metrics = False
            return None
        return state.computed, state.kv_use, state.preemptions

    async def _request(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str] | None:
        """The status and body of its answer; `None` if it does not answer in time."""
        if (address := self._backend.address) is None:
            return None
        key = self._backend.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with session.get(f"http://{address[0]}:{address[1]}{path}", headers=headers) as answer:
                return answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            return None


def measure_busy_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, including those that have ended."""
    import psutil

    total = 0.0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


class EngineLog:
    """The engine's output: in files of limited size, with the last lines in memory to explain failures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file: FileIO | None = None
        self._rest = b""
        self._limit: OutputLimit | None = None
        self._left_out = 0

    def limit_output(self, count_requests: Callable[[], int] | None) -> None:
        """Limits the engine's output from now on, since it may contain what clients send; `None`: ends the limit."""
        self._limit = OutputLimit(count_requests, time.monotonic()) if count_requests is not None else None

    def append_output(self, data: bytes) -> list[str]:
        """Appends output and returns the lines that it completes; empty `data` ends the last line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES or not data:
            lines += [self._rest] if self._rest else []
            self._rest = b""
        if self._limit is not None and len(lines) > TAIL_LINES:  # many short lines would delay other requests
            self._left_out += len(lines) - TAIL_LINES
            del lines[:-TAIL_LINES]
        texts = [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        for text in texts:
            self._write_output(text)
        if not data:
            self._write_left_out()
        return texts

    @property
    def unfinished(self) -> str:
        """The current state of a line that has not ended: a progress bar writes it again after each carriage return."""
        return self._rest.rpartition(b"\r")[2].decode("utf-8", "replace")

    def write(self, text: str) -> None:
        """Writes a line of bedplate's own."""
        text = clean_line(text)
        self.tail.append(text)
        self._write_line(text)

    def _write_output(self, text: str) -> None:
        text = clean_line(text, MAX_LINE_CHARS if self._limit is None else MAX_CLIENT_LINE_CHARS)
        if text.startswith("#"):  # only bedplate's own lines do
            text = f" {text}"
        self.tail.append(text)
        line = _encode_line(text)
        if self._left_out:
            line = _encode_line(_describe_left_out(self._left_out)) + line
        if self._limit is not None and not self._limit.take(len(line), time.monotonic()):
            self._left_out += 1
            return
        self._left_out = 0
        self._write(line)

    def _write_left_out(self) -> None:
        """Writes the last lines of an engine that has ended, which explain why, whatever the rate was."""
        if not self._left_out:
            return
        shown = min(self._left_out, len(self.tail))
        if self._left_out > shown:
            self._write_line(_describe_left_out(self._left_out - shown))
        self._left_out = 0
        for text in list(self.tail)[-shown:]:
            self._write_line(text)

    def _write_line(self, text: str) -> None:
        self._write(_encode_line(text))

    def _write(self, line: bytes) -> None:
        try:
            # Unbuffered: nothing is lost when bedplate is killed, and closing cannot fail.
            if self._file is not None and self._file.tell() + len(line) > LOG_BYTES:
                self._rotate()
            if self._file is None:
                self._file = FileIO(self.path, "ab", opener=open_for_owner)
            self._file.write(line)
        except OSError:
            # With a full disk log lines are lost, and the service continues. The next line tries again.
            self.close()

    def _rotate(self) -> None:
        self.close()
        for number in range(LOGS_KEPT, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
            if newer.exists():
                newer.replace(older)

    def read_tail(self) -> str:
        return "\n".join(self.tail)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _describe_left_out(count: int) -> str:
    return f"# {count:,} lines left out: the requests caused more output than is logged"


def _encode_line(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace") + b"\n"


class EngineProcess:
    """One engine process with its warden, from start to end."""

    def __init__(self, log: EngineLog, on_line: Callable[[str], None]) -> None:
        self._log = log
        self._on_line = on_line
        self._warden: asyncio.subprocess.Process | None = None
        self._lifeline: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._readers: list[asyncio.Task[None]] = []
        self.pid: int | None = None
        self.code: int | None = None
        self.ended = asyncio.Event()

    @property
    def group_pid(self) -> int | None:
        """The process that all processes of the engine descend from, also those whose parents have ended."""
        return self._warden.pid if self._warden is not None else None

    async def start(self, argv: list[str], env: dict[str, str], cwd: Path | None = None) -> None:
        # Shielded: when a start is cancelled, uvloop leaves a process that is never reaped.
        self._starting = asyncio.create_task(self._start(argv, env, cwd))
        await asyncio.shield(self._starting)

    async def _start(self, argv: list[str], env: dict[str, str], cwd: Path | None) -> None:
        try:
            self._warden = await asyncio.create_subprocess_exec(
                *wrap_with_warden(argv),
                env=env,
                cwd=cwd,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that only bedplate gets Ctrl-C, and stops the engine in order
            )
        except OSError:
            self.ended.set()
            raise
        self._lifeline = self._warden.stdin
        self._readers = [asyncio.create_task(self._read_reports()), asyncio.create_task(self._read_log())]

    def terminate(self) -> None:
        self._send_command(b"t")

    def kill(self) -> None:
        self._send_command(b"k")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Sends SIGTERM, waits for `grace_s`, then kills."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        self.terminate()
        await self.wait_for_end(grace_s)
        if not self.ended.is_set():
            self.kill()
            await self.wait_for_end(KILL_GRACE_S)

    async def wait_for_end(self, seconds: float) -> None:
        """Waits until the process has ended, at most for `seconds`."""
        # Not wait_for, which before Python 3.12 loses a cancellation that coincides with the end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()

    def _send_command(self, what: bytes) -> None:
        if self._lifeline is not None and not self._lifeline.is_closing():
            self._lifeline.write(what)

    async def _read_reports(self) -> None:
        warden = self._warden
        if warden is None or warden.stdout is None:
            return
        try:
            async for raw in warden.stdout:
                word, _, rest = raw.decode("utf-8", "replace").strip().partition(" ")
                if word == "started":
                    self.pid = int(rest)
                elif word == "exited":
                    self.code = int(rest)
                elif word == "failed":
                    self._log.write(rest)
            await warden.wait()
            if self.code is None and self.pid is not None:
                # The warden itself was killed. The engine got its death signal; its group may have members left.
                self.code = -signal.SIGKILL
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            await asyncio.wait(self._readers[1:], timeout=2)  # for the last lines, which explain the failure
        finally:
            self.ended.set()

    async def _read_log(self) -> None:
        warden = self._warden
        if warden is None or warden.stderr is None:
            return
        data = b"-"
        while data:
            data = await warden.stderr.read(65536)
            for line in self._log.append_output(data):
                self._on_line(line)
            if self._log.unfinished:
                self._on_line(self._log.unfinished)


class Supervisor:
    """Starts the engine of one plan, updates the gateway's backend, and restarts the engine when it dies."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        environment: EngineEnvironment,
        backend: GatewayBackend,
        log_path: Path,
        say: Callable[[str], None] = lambda text: None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        *,
        by_health: bool = False,
    ) -> None:
        self.plan = plan
        self.by_health = by_health
        """Whether only its health checks show that it hangs: a process of an orchestrator."""
        self.is_paused = False
        """Set while bedplate itself has stopped the engine's processes."""
        self.env = env or {}
        """Variables in addition to those of the launch."""
        self.cwd = cwd
        """The working directory: paths of prepared weights are relative to it."""
        self.engine = engine
        self.environment = environment
        self.backend = backend
        self.log = EngineLog(log_path)
        self.process: EngineProcess | None = None
        self.settled = asyncio.Event()
        """Set when the engine is ready for the first time, or has failed for good."""
        self.failure: KnownFailure | None = None
        self.before_ready: Callable[[], Awaitable[None]] | None = None
        """Called when a new process answers, before it gets requests."""
        self._say = say
        self._deaths: list[EngineExit] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self.backend.state = "stopped"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # its error is raised where the engine is awaited
        if self.process is not None and not self.process.ended.is_set():
            await self.process.stop()
        self.log.close()

    async def wait_for_start(self) -> None:
        """Waits until the engine is ready for the first time; raises the error that prevented it."""
        await self.settled.wait()
        if self._task is not None and self._task.done() and not self._task.cancelled() and self._task.exception():
            self._task.result()
        if self.failure is not None:
            raise self.to_error(self.failure)

    async def wait_for_failure(self) -> KnownFailure:
        """Waits until the engine has failed for good."""
        if self._task is not None:
            await self._task
        return self.failure or KnownFailure(message="it was stopped", hint="start it again")

    @property
    def last_words(self) -> str:
        """The last line of the engine's output, shortened."""
        lines = (line.strip() for line in reversed(self.log.tail) if line.strip() and not line.startswith("#"))
        return next(lines, "no output yet")[:160]

    def to_error(self, failure: KnownFailure) -> ExternalFailure:
        hint = f"{failure.hint}; log: {self.log.path}"
        return ExternalFailure(f"{self.engine.name} did not start: {failure.message}", hint=hint)

    async def _run(self) -> None:
        try:
            while self.failure is None:
                death = await self._run_once()
                self._deaths = [*self._deaths[-20:], death]
                self.failure = find_final_failure(self._deaths, self.engine)
                if self.failure is None:
                    await self._wait_before_restart(death)
            self._mark_failed(self.failure.message)
            if self.settled.is_set():
                self._say(f"{self.engine.name} is not restarted: {self.failure.message} (log: {self.log.path})")
        except Exception as error:
            self._mark_failed(str(error))
            raise
        finally:
            self.settled.set()

    def _mark_failed(self, reason: str) -> None:
        self.backend.address = None
        self.backend.reason = reason
        self.backend.state = "failed"

    async def _run_once(self) -> EngineExit:
        backend = self.backend
        port = find_free_port(self.engine.highest_port)
        launch = self.engine.launch(self.plan, port)
        self.process = process = EngineProcess(self.log, functools.partial(self._read_line, launch.argv))
        self.log.tail.clear()
        self.log.limit_output(None)
        # One line, whatever the options contain; the lines after it are the engine's.
        options = " ".join(word if len(word) < 200 else f"({len(word)} characters)" for word in launch.argv)
        self.log.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {options}".replace("\n", " "))
        backend.progress = None
        backend.phases.begin(known=bool(self.engine.start_phases))
        backend.worked = False
        env = self._build_variables(launch)
        try:
            command = build_command(self.environment, launch, wrapped=self.engine.is_wrapped)
            await process.start(command, env, self.cwd)
        except OSError as error:  # no memory or too many processes, which may be temporary
            self.log.write(str(error))
            return EngineExit(None, self.log.read_tail(), was_ready=False, worked=False)
        limit_s = START_LIMIT_S + self.plan.model.weight_bytes / SLOWEST_DISK_BYTES_S
        overdue_s = hang = None
        patience = StartDeadline(limit_s)
        try:
            async with asyncio.timeout(limit_s) as timer:
                url = f"http://127.0.0.1:{port}{launch.health_path}"
                was_ready = await self._wait_until_ready(process, url, patience, timer)
                if was_ready and self.engine.is_wrapped:
                    await self._require_refusal(process, url)
        except TimeoutError:
            overdue_s = patience.spent_s if patience.spent_s > limit_s + CHECK_EVERY_S else limit_s
            self.log.write(f"# not ready after {format_seconds(overdue_s)}; stopped by bedplate")
            was_ready = False
            await process.stop(grace_s=0)
        backend.phases.end()
        if was_ready:
            self.log.limit_output(lambda: backend.sent)
            backend.address = ("127.0.0.1", port)
            backend.reason = None
            if self.before_ready is not None:
                await self.before_ready()
            backend.state = "ready"
            self.settled.set()
            hang = await self._wait_for_end_or_hang(process, launch)
            if hang is not None:
                await self._stop_hung(process, hang)
        return EngineExit(process.code, self.log.read_tail(), was_ready, backend.worked, overdue_s, hang)

    async def _wait_until_ready(
        self, process: EngineProcess, url: str, patience: StartDeadline, timer: asyncio.Timeout
    ) -> bool:
        """Whether its health check succeeded before it ended."""
        loop = asyncio.get_running_loop()
        key = self.backend.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=headers) as session:
            while not process.ended.is_set():
                try:
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet, or still loading
                if (longer_s := patience.extend(process.pid)) is not None:
                    timer.reschedule(loop.time() + longer_s)
                await process.wait_for_end(0.05)
        return False

    async def _wait_for_end_or_hang(self, process: EngineProcess, launch: Launch) -> Hang | None:
        """Waits until the process ends (`None`) or hangs."""
        limits = HANG_LIMITS
        watcher = EngineWatcher(
            process, self.engine, self.backend, self.engine.liveness_path or launch.health_path,
            self.plan.settings.device, by_health=self.by_health, limits=limits,
        )  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=limits.answer_s)
        # An idle connection would occupy one of the few that some engines' servers handle.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while not process.ended.is_set():
                await process.wait_for_end(limits.every_s)
                if self.is_paused:
                    watcher.detector.forget()
                    continue
                hang = watcher.detector.observe(await watcher.take_sample(session))
                if hang is not None and not self.is_paused and not process.ended.is_set():
                    return await watcher.check_stopped(hang)
        return None

    async def _stop_hung(self, process: EngineProcess, hang: Hang) -> None:
        """Kills the engine. Its requests get an error first, or go to another engine: killing it may take a while."""
        backend = self.backend
        self.log.write(f"# {hang.text}; stopped by bedplate")
        backend.address = None
        backend.reason, backend.last_exit = hang.text, LastExit(cause="hung", text=hang.text)
        backend.state = "restarting"
        if backend.drop_requests is not None:
            backend.drop_requests()
        await process.stop(grace_s=0)

    async def _require_refusal(self, process: EngineProcess, url: str) -> None:
        """Stops an engine that answers without the key: this version's server is not one that the wrapper covers."""
        async with aiohttp.ClientSession() as session:
            while not process.ended.is_set():
                try:
                    async with session.get(url) as answer:
                        if answer.status == HTTPStatus.UNAUTHORIZED:
                            return
                        break
                except aiohttp.ClientError:
                    await process.wait_for_end(0.05)
            else:
                return  # it died, and is restarted
        await process.stop(grace_s=0)
        raise ExternalFailure(
            f"{self.engine.name} {self.environment.version} was stopped: its private port answered without the key",
            hint="use the version that bedplate installs, or unset variables that select another HTTP server",
        )

    async def _wait_before_restart(self, death: EngineExit) -> None:
        wait_s = compute_back_off_s(self._deaths)
        backend = self.backend
        backend.address = None
        backend.reason = explain_exit(death, self.engine).message
        backend.last_exit = LastExit(cause=death.cause, text=backend.reason)
        backend.retry_after_s = max(1, round(wait_s) + 1)
        backend.restarts += 1
        backend.state = "restarting"
        how = "hung" if death.hang is not None else "stopped"
        self._say(f"{self.engine.name} {how}: {backend.reason}; restarting it in {format_seconds(wait_s)}")
        await asyncio.sleep(wait_s)

    def _build_variables(self, launch: Launch) -> dict[str, str]:
        env = build_engine_variables(self.plan, self.engine, self.environment, launch, self.env)
        if (variable := self.engine.private_key_variable) is not None:
            self.backend.engine_key = env[variable] = secrets.token_urlsafe(32)
        return env

    def _read_line(self, argv: Sequence[str], line: str) -> None:
        try:
            done = self.engine.read_progress(line)
            phase = self.engine.read_phase(line, argv)
        except Exception as error:  # a bug in an engine's file must not stop the reading of its output
            self.log.write(f"# bedplate could not parse the previous line: {error!r}")
            return
        if done is not None:
            self.backend.progress = done
        if phase is not None:
            self.backend.phases.enter(phase)


def build_engine_variables(
    plan: Plan, engine: Engine, environment: EngineEnvironment, launch: Launch, additional: Mapping[str, str]
) -> dict[str, str]:
    """The engine's environment variables: bedplate's own without secrets, and those of the launch."""
    # A key that the user has set for other servers of this engine is not the one that the gateway sends.
    given = {name: value for name, value in os.environ.items() if name not in (*SECRETS, engine.key_variable)}
    if has_local_weights(plan):
        given = set_offline(given)
    compiled = get_compiled_dir(engine.id, environment.version)
    given = {**{name: str(compiled / name.lower()) for name in engine.compile_caches}, **given}
    if given.pop("PYTHONDONTWRITEBYTECODE", None):
        # Without bytecode, PyTorch alone is compiled again in each of an engine's processes at each start.
        given.setdefault("PYTHONPYCACHEPREFIX", str(compiled / "bytecode"))
    return add_library_path(Path(environment.path), {**given, **engine.supervised_env, **launch.env, **additional})


def find_free_port(highest: int = HIGHEST_PORT) -> int:
    """A free private port. If another program takes it first, the engine fails to bind and is started again."""
    while True:
        # The kernel chooses high ports only.
        wanted = 0 if highest == HIGHEST_PORT else random.randint(LOWEST_PORT, highest)  # noqa: S311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            port: int = probe.getsockname()[1]
            return port
