"""Interrupts and closed pipes show no traceback, at any moment of a command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import HANG_S

from bedplate.cli.terminal import TerminalProgress
from bedplate.measure.load.separate_process import start_generator


def run_python(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path is not None else {})}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=HANG_S)


def test_ctrl_c_during_the_imports(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run_python("-m", "bedplate", "plan", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigterm_removes_temporary_folders(tmp_path: Path) -> None:
    code = """
import os, signal, sys, tempfile
import bedplate.cli.app
from bedplate.cli import main

def work():
    with tempfile.TemporaryDirectory(prefix=".making-", dir=sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

bedplate.cli.app.main = work
main()
"""
    done = run_python("-c", code, str(tmp_path))
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_interpreter_ends() -> None:
    code = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["bedplate", "--version"]
from bedplate.cli import main
main()
"""
    done = run_python("-c", code)
    assert done.returncode == 130 and done.stdout.startswith("bedplate ") and done.stderr == ""


def test_progress_without_a_reader_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        progress = TerminalProgress()
        for _ in range(3):
            progress.note("nobody reads this")
            with progress.step("working", 10) as done:
                done(5)


def test_ctrl_c_does_not_reach_the_load_generator() -> None:
    """It reaches all processes of the terminal's process group; the generator would show a traceback."""
    with start_generator("bedplate.measure.load") as process:
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
        process.communicate(timeout=HANG_S)  # without a call: its caller has ended
        assert process.returncode == 0
