"""What a service in the background reports until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bedplate.errors import ExternalFailure
from bedplate.hosting.control import ErrorReport
from bedplate.hosting.detached import LogReport, PipeReporter, StartReport, _follow_reports


class Steps:
    """Progress that keeps the steps that were completed."""

    def __init__(self) -> None:
        self.completed: list[str] = []

    def note(self, text: str) -> None: ...

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield lambda done: None
        self.completed.append(label)


def test_a_step_that_failed_in_the_background_is_not_completed(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    sender, progress = PipeReporter(writing), Steps()
    with sender.step("downloading"):
        pass
    with pytest.raises(OSError), sender.step("installing"):
        raise OSError
    sender.send(StartReport(error=ErrorReport.from_error(ExternalFailure("installing failed"))))
    sender.close()
    child = subprocess.Popen([sys.executable, "-c", ""])
    with os.fdopen(reading, "rb") as reports, pytest.raises(ExternalFailure, match="installing failed"):
        _follow_reports(reports, progress, lambda choice: None, child, LogReport(path=str(tmp_path / "log"), began=0))
    child.wait()
    assert progress.completed == ["downloading"]


def test_an_unexpected_end_is_explained_from_the_log_that_the_service_moved_to(tmp_path: Path) -> None:
    early, moved = tmp_path / "early.log", tmp_path / "service.log"
    early.write_text("")
    moved.write_text("of an earlier start\nTypeError: it broke\n")
    reading, writing = os.pipe()
    sender = PipeReporter(writing)
    sender.send(StartReport(log=LogReport(path=str(moved), began=len("of an earlier start\n"))))
    sender.close()
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    with os.fdopen(reading, "rb") as reports, pytest.raises(ExternalFailure, match="status 1") as caught:
        _follow_reports(reports, Steps(), lambda choice: None, child, LogReport(path=str(early), began=0))
    assert (caught.value.cause, caught.value.hint) == ("TypeError: it broke", f"see its log: {moved}")
