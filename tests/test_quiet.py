"""A test that measures may fail only where the machine can be measured on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.conftest import wait_for
from tests.quiet import Others, Turns

ROOT = Path(__file__).parents[1]
HOOKS = "from tests.conftest import pytest_runtest_makereport, pytest_runtest_setup\n"
TESTS = """
import pytest
from tests.quiet import Others, Turns
@pytest.mark.{mark}
def test_it(monkeypatch):
    monkeypatch.setattr(Others, "share", lambda self: {share})
    assert {holds}, "what was measured"
"""
MEASURES, OTHER = "measures", "timeout(60)"


@pytest.mark.parametrize(
    ("mark", "share", "holds", "ends"),
    [
        (MEASURES, 0.5, False, "1 skipped"),
        (MEASURES, 0.5, True, "1 passed"),
        (MEASURES, 0.05, False, "1 failed"),
        (OTHER, 0.5, False, "1 failed"),
    ],
)
def test_only_what_measures_and_fails_while_others_have_the_processors_is_skipped(
    tmp_path: Path, mark: str, share: float, holds: bool, ends: str
) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_one.py").write_text(TESTS.format(mark=mark, share=share, holds=holds))
    words = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", str(tmp_path), "-p", "no:cacheprovider"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert ends in told.splitlines()[-1], told
    if "skipped" in ends:
        assert "others had 50% of the processors, and nothing can be measured then" in told
        assert "AssertionError: what was measured" in told


def test_what_other_machines_take_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = psutil.cpu_times()._replace(steal=100.0) if hasattr(psutil.cpu_times(), "steal") else None
    if taken is None:
        pytest.skip("this system does not tell what was stolen")
    monkeypatch.setattr(psutil, "cpu_times", lambda: taken)
    others = Others()
    before = others.share()
    monkeypatch.setattr(psutil, "cpu_times", lambda: taken._replace(steal=3700.0))
    assert others.share() - before > 1, "an hour within a moment"


SPINS = "import os; print(os.getpid(), flush=True)\nwhile True: pass"


def test_what_was_there_before_counts() -> None:
    """`setsid --fork` leaves a process that is nobody's child."""
    words = ["setsid", "--fork", sys.executable, "-c", SPINS]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        other = psutil.Process(int(starter.stdout.readline()))
        try:
            began, others, before = time.monotonic(), Others(), other.cpu_times().user
            wait_for(lambda: other.cpu_times().user > before + 1.0, "it to be busy")
            taken_s = others.share() * (os.cpu_count() or 1) * (time.monotonic() - began)
            assert taken_s > 0.9
        finally:
            other.kill()


def test_what_is_ours_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.DEVNULL) as child:
        try:
            assert psutil.Process(child.pid) not in Others()._before
        finally:
            child.kill()


def test_several_at_a_time_or_one_alone(tmp_path: Path) -> None:
    mine, theirs = Turns(tmp_path), Turns(tmp_path)
    done: list[str] = []

    def measure() -> None:
        with theirs.taken(alone=True):
            done.append("alone")

    with mine.taken(alone=False):
        with theirs.taken(alone=False):
            done.append("together")
        other = threading.Thread(target=measure)
        other.start()
        other.join(0.2)
        done.append("still there")
    other.join(30)
    assert done == ["together", "still there", "alone"]
