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
from bedplate.hosting.detached import PipeReporter, StartReport, _follow_reports


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
        _follow_reports(reports, progress, lambda choice: None, child, tmp_path / "log", 0)
    child.wait()
    assert progress.completed == ["downloading"]
