"""What `make test` relies on: forked workers run each test once, report each failure, and survive a crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.parametrize("number", range(50))
def test_many(number, shared, tmp_path):
    shared.append(number)
    print(f"printed by {number}")
    assert number != 30 and "gw" in str(tmp_path)

def test_crash():
    os._exit(3)

def test_after_the_crash(capfd):
    os.write(1, b"its own output")
    assert capfd.readouterr().out == "its own output"

def test_crash_at_the_end():
    os._exit(4)
"""


def test_forked_workers_run_every_test_and_report_each_failure(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_forked.py").write_text(TESTS)
    plugins = ["--disable-plugin-autoload", "-p", "xdist", "-p", "tests.forking"]
    command = [sys.executable, "-m", "pytest", *plugins, "--forks", "2", "--basetemp", str(tmp_path / "made")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search("=+ 3 failed, 50 passed in ", done.stdout), done.stdout
    assert "FAILED test_forked.py::test_many[30] - " in done.stdout and "printed by 30" in done.stdout
    assert "FAILED test_forked.py::test_crash - the process of this test ended with status 3" in done.stdout
