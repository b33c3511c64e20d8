"""Runs bedplate in a real pseudo-terminal, as a person would: types, reads the screen, presses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import psutil
from tests.conftest import HANG_S, wait_for

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()=>].?|\r|\x07")
CTRL_C, CTRL_D, ENTER, UP, DOWN = "\x03", "\x04", "\r", "\x1b[A", "\x1b[B"
START = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Makes the pseudo-terminal the controlling one, so that Ctrl-C becomes a signal."""


class Terminal:
    """A bedplate command in a terminal of 80 columns."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        columns: int = 80,
        lines: int = 24,
        program: Sequence[str] = ("-m", "bedplate"),
    ) -> None:
        self._fd, inner = pty.openpty()
        size = {"COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *program, *arguments],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True, env={**os.environ, **size, **(env or {})},
        )  # fmt: skip
        os.close(inner)
        self.shown = ""
        self._read_to = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C once the prompt waits: Python's readline forgets one that comes between the two."""
        waiting = psutil.Process(self.process.pid)
        wait_for(lambda: waiting.status() == psutil.STATUS_SLEEPING, "a prompt that waits")
        self.type(CTRL_C)

    def read_until(self, pattern: str) -> str:
        """The new output up to the first match, without escape sequences."""
        deadline = time.monotonic() + HANG_S
        while (found := re.search(pattern, self.shown[self._read_to :])) is None:
            assert time.monotonic() < deadline, f"waited for {pattern!r}: {self.shown!r}"
            if not self._read():
                raise AssertionError(f"ended before {pattern!r}: {self.shown!r}")
        text = self.shown[self._read_to : self._read_to + found.end()]
        self._read_to += found.end()
        return text

    def wait(self) -> int:
        """The exit status, after all output was read."""
        while self._read():
            pass
        return self.process.wait(HANG_S)

    def _read(self) -> bool:
        for piece in self._read_pieces():
            self.shown = ESCAPES.sub("", self.shown + piece)
            return True
        return False

    def _read_pieces(self) -> Iterator[str]:
        ready, _, _ = select.select([self._fd], [], [], HANG_S)
        assert ready, f"no output: {self.shown!r}"
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            if data := os.read(self._fd, 65536):
                yield data.decode("utf-8", "replace")
