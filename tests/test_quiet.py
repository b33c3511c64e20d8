"""A test that measures may fail only where the machine can be measured on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conftest import wait_for
from tests.quiet import Others

ROOT = Path(__file__).parents[1]
HOOKS = "from tests.conftest import pytest_runtest_makereport, pytest_runtest_setup\n"
TESTS = """
import pytest
from tests.quiet import Others
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


def test_what_was_there_before_counts_and_what_is_ours_does_not() -> None:
    """`setsid --fork` leaves a process that is nobody's child."""
    spin = "import os, sys, time; print(os.getpid(), flush=True)\nwhile True: pass"
    ours = Others()
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as child:
        try:
            mine = psutil.Process(child.pid)
            after = Others()
            wait_for(lambda: mine.cpu_times().user > 0.5, "it to be busy")
            assert child.pid not in {one.pid for one in (*ours._before, *after._before)}
        finally:
            child.kill()
    with subprocess.Popen(["setsid", "--fork", sys.executable, "-c", spin], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        other = psutil.Process(int(starter.stdout.readline()))
        try:
            others = Others()
            began = other.cpu_times().user
            wait_for(lambda: other.cpu_times().user > began + 1.0, "it to be busy")
            assert others.share() > 0.1 / (os.cpu_count() or 1)
        finally:
            other.kill()
