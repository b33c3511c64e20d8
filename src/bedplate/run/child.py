"""Runs a program to its end. The program and its descendants end when bedplate ends, even if it is killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bedplate.home import open_private
from bedplate.interrupts import check_cancelled
from bedplate.run.warden import wrap_with_warden

WAIT_S = 0.1
"""Longest time until Ctrl-C or a cancellation is noticed."""
TICK_S = 0.5
"""Time between two ticks, because counting what all descendants wrote reads every process of the machine."""


class ChildResult(NamedTuple):
    code: int
    """Its exit status; 128 plus the signal's number if a signal ended it."""
    output: str


def run_child(
    argv: list[str],
    env: Mapping[str, str] | None = None,
    tick: Callable[[int], None] | None = None,
    limit_s: float | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
) -> ChildResult:
    """Runs `argv` and returns its output. `tick` is called regularly with the pid of its topmost process.

    With `log`, the output is written to that file instead, and can be read while the program runs.
    """
    file = open_private(log, "ab") if log is not None else None
    lifeline_end, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            wrap_with_warden(argv),
            env=env,
            cwd=cwd,
            stdin=lifeline_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if file is None else file,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(lifeline_end)
        if file is not None:
            file.close()
    deadline = time.monotonic() + limit_s if limit_s is not None else None
    ticked = 0.0
    with process:
        try:
            while True:
                try:
                    reports, output = process.communicate(timeout=WAIT_S)
                    break
                except subprocess.TimeoutExpired:
                    check_cancelled()
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"not done after {limit_s:.0f} s") from None
                    if tick is not None and (now := time.monotonic()) - ticked >= TICK_S:
                        ticked = now
                        tick(process.pid)
        finally:
            # Also after Ctrl-C or a cancellation: the warden sees the closed pipe and ends its processes.
            os.close(lifeline)
            process.terminate()  # for systems without a warden; a warden ignores it
            process.wait()
    # A warden's reports repeat its exit status, except for the reason why a program could not be started.
    rest = reports.partition("failed ")[2] if os.name == "posix" else reports
    return ChildResult(process.returncode, (output or "") + rest)
