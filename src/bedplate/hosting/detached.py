"""A host in the background: a separate process in its own session that reports its progress until it is ready.

The starting process sends the order to its stdin and reads its reports from a pipe, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from bedplate.errors import ExternalFailure
from bedplate.home import ensure_writable, get_logs_dir, open_private
from bedplate.hosting.control import ErrorReport
from bedplate.hosting.logs import EARLY_LOG
from bedplate.progress import Progress, StepFailure
from bedplate.values import Decision, Endpoint, Hardware, Model
from bedplate.values.record import Record
from bedplate.values.service import ModelOrder, Order

STOP_S = 30.0
MOST_EARLY_BYTES = 1_000_000
SHOWN_LINES = 5


class DetachedInput(Record, frozen=True, kw_only=True):
    """The input of the background process."""

    order: Order
    fallback: str | None = None
    report_fd: int
    lifeline_fd: int | None = None
    """The service stops when the other end of this pipe is closed; `None`: it outlives the starting process."""


class ChoiceReport(Record, frozen=True, kw_only=True):
    """What was decided for one model."""

    hardware: Hardware
    model: Model
    wanted: ModelOrder
    decision: Decision


class ProgressStep(Record, frozen=True, kw_only=True):
    label: str
    total: int | None = None


class LogReport(Record, frozen=True, kw_only=True):
    """Where the background process writes from now on, and where in that file it begins."""

    path: str
    began: int


class StartReport(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the background process. Exactly one field is set."""

    note: str | None = None
    step: ProgressStep | None = None
    """A long step begins. `done` reports how much of it is complete, and `ended` or `failed` ends it."""
    done: int | None = None
    ended: bool = False
    failed: bool = False
    choice: ChoiceReport | None = None
    log: LogReport | None = None
    ready: Endpoint | None = None
    error: ErrorReport | None = None


# the starting process


def start_detached(
    program: str,
    order: Order,
    progress: Progress,
    on_choice: Callable[[ChoiceReport], None] = lambda choice: None,
    fallback: str | None = None,
    lifeline_fd: int | None = None,
) -> Endpoint:
    """Run the module `program` and return when the service is ready.

    Raises the error that prevented it. Ctrl-C stops the background process. `lifeline_fd` is the reading end of a pipe:
    the service stops once the other end is closed, so also when its holder is killed.
    """
    early = ensure_writable(get_logs_dir()) / EARLY_LOG
    if early.exists() and early.stat().st_size > MOST_EARLY_BYTES:
        early.unlink()
    reading, writing = os.pipe()
    with open_private(early, "ab") as log:
        began = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writing, *([lifeline_fd] if lifeline_fd is not None else [])],
            start_new_session=True,
        )
    os.close(writing)
    errand = DetachedInput(order=order, fallback=fallback, report_fd=writing, lifeline_fd=lifeline_fd)
    with os.fdopen(reading, "rb") as reports:
        try:
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError), child.stdin as out:
                    out.write(msgspec.json.encode(errand))
            return _follow_reports(reports, progress, on_choice, child, LogReport(path=str(early), began=began))
        except BaseException:
            _stop_child(child)
            raise


def _follow_reports(
    reports: Iterator[bytes],
    progress: Progress,
    on_choice: Callable[[ChoiceReport], None],
    child: subprocess.Popen[bytes],
    log: LogReport,
) -> Endpoint:
    with ExitStack() as steps:
        update: Callable[[int], None] = lambda done: None  # noqa: E731
        for line in reports:
            report = msgspec.json.decode(line, type=StartReport)
            if report.note is not None:
                progress.note(report.note)
            elif report.choice is not None:
                on_choice(report.choice)
            elif report.step is not None:
                steps.close()
                update = steps.enter_context(progress.step(report.step.label, report.step.total))
            elif report.done is not None:
                update(report.done)
            elif report.ended:
                steps.close()
            elif report.failed:
                steps.__exit__(StepFailure, StepFailure(), None)
            elif report.log is not None:
                log = report.log
            elif report.error is not None:
                raise report.error.to_exception()
            elif report.ready is not None:
                return report.ready
    code = child.wait()
    with Path(log.path).open("rb") as written:
        written.seek(log.began)
        lines = written.read().decode("utf-8", "replace").strip().splitlines()
    raise ExternalFailure(
        f"the service exited before it was ready (status {code})",
        cause=" / ".join(lines[-SHOWN_LINES:]) or None,
        hint=f"see its log: {log.path}",
    )


def _stop_child(child: subprocess.Popen[bytes]) -> None:
    """Terminate it, and kill it after `STOP_S`. Its engines end with it in both cases."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


# the background process


class PipeReporter:
    """Sends reports to the starting process until it closes the pipe."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd: int | None = fd
        self._done: int | None = None

    def send(self, report: StartReport) -> None:
        if self._fd is None:
            return
        data = msgspec.json.encode(report) + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the starting process has exited; the service runs on
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def note(self, text: str) -> None:
        self.send(StartReport(note=text))

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        self.send(StartReport(step=ProgressStep(label=label, total=total)))
        self._done = None
        try:
            yield self._update
        except BaseException:
            self.send(StartReport(failed=True))
            raise
        self.send(StartReport(ended=True))

    def _update(self, done: int) -> None:
        if done != self._done:
            self._done = done
            self.send(StartReport(done=done))
