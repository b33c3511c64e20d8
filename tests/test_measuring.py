"""A measuring test fails only where other processes left the CPU to it; otherwise it is run again and then listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests import measuring
from tests.conftest import wait_for
from tests.measuring import OtherLoad, _used_seconds, wait_until_quiet

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import measuring
from tests.measuring import *
from tests.measuring import (
    pytest_addoption, pytest_report_teststatus, pytest_runtest_makereport, pytest_runtest_setup, pytest_runtestloop,
    pytest_sessionfinish, pytest_terminal_summary,
)
measuring.wait_until_quiet = lambda: True
"""
TEST = """
@pytest.mark.{mark}
def test_{name}(monkeypatch, runs=[]):
    runs.append(1)
    monkeypatch.setattr(OtherLoad, "share", lambda self: {shares}[len(runs) - 1])
    assert {passes}[len(runs) - 1], "a measured figure"
"""


def run_tests(folder: Path, options: list[str], **tests: tuple[str, list[float], list[bool]]) -> tuple[int, str]:
    """Exit code and output of a pytest run. A test has a mark and, for each attempt, the other load and the outcome."""
    (folder / "conftest.py").write_text(CONFTEST)
    written = [
        TEST.format(name=name, mark=mark, shares=shares, passes=passes)
        for name, (mark, shares, passes) in tests.items()
    ]
    (folder / "test_one.py").write_text("import pytest\nfrom tests.measuring import OtherLoad\n" + "".join(written))
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", str(folder), "-p", "no:cacheprovider", "-rA"]
    # Of the plugins, the other settings in pyproject.toml need this one.
    command += ["-o", "addopts=--disable-plugin-autoload -p timeout"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


STAYS_DISTURBED = ("measures", [0.5, 0.5, 0.5], [False, False, False])
PASSES_LATER = ("measures", [0.5, 0.05], [False, True])


def test_a_disturbed_measurement_is_repeated_then_listed(tmp_path: Path) -> None:
    code, output = run_tests(
        tmp_path,
        [],
        passes=("measures", [0.5], [True]),
        fails_undisturbed=("measures", [0.05], [False]),
        fails_without_measuring=("timeout(60)", [0.5], [False]),
        passes_later=PASSES_LATER,
        fails_later=("measures", [0.5, 0.05], [False, False]),
        stays_disturbed=STAYS_DISTURBED,
    )
    outcomes = {name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED) .*::test_(\w+)", output, re.MULTILINE)}
    assert code == 1 and "3 failed, 2 passed, 5 disturbed" in output.splitlines()[-1], output
    assert outcomes == {
        "passes": "PASSED", "passes_later": "PASSED", "fails_undisturbed": "FAILED",
        "fails_without_measuring": "FAILED", "fails_later": "FAILED",
    }  # fmt: skip
    listed = output.partition("undecided measuring tests")[2]
    assert "test_stays_disturbed: other processes used 50% of the CPU: AssertionError: a measured figure" in listed


@pytest.mark.parametrize(
    ("options", "tests", "code"),
    [
        ([], {"stays": STAYS_DISTURBED}, 0),
        (["--fail-undecided"], {"stays": STAYS_DISTURBED, "later": PASSES_LATER}, 1),
        (["--fail-undecided"], {"later": PASSES_LATER}, 0),
    ],
)
def test_undecided_tests_fail_the_run_on_request(
    tmp_path: Path, options: list[str], tests: dict[str, tuple[str, list[float], list[bool]]], code: int
) -> None:
    assert run_tests(tmp_path, options, **tests)[0] == code


def test_waiting_ends_with_a_quiet_sample_or_at_the_limit() -> None:
    shares, now = iter([0.9, 0.2, 0.01, 0.9]), iter([0.0, 10.0, 20.0])
    assert wait_until_quiet(lambda: next(shares), limit_s=60, clock=lambda: next(now))
    assert next(shares) == 0.9
    now = iter([0.0, 30.0, 61.0])
    assert not wait_until_quiet(lambda: 0.9, limit_s=60, clock=lambda: next(now))


def test_stolen_cpu_time_counts_as_load(monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times()._replace(steal=100.0) if hasattr(psutil.cpu_times(), "steal") else None
    if times is None:
        pytest.skip("this system does not report stolen CPU time")
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    load = OtherLoad()
    before = load.share()
    monkeypatch.setattr(psutil, "cpu_times", lambda: times._replace(steal=3700.0))
    assert load.share() - before > 1, "an hour within a moment"


SPINS = "import os; print(os.getpid(), flush=True)\nwhile True: pass"


def spin(seconds: float) -> str:
    return f"import time\nwhile time.process_time() < {seconds}: pass"


def count_other_seconds(load: OtherLoad, began: float) -> float:
    return load.share() * (os.cpu_count() or 1) * (time.monotonic() - began)


@pytest.mark.parametrize("when", ["earlier", "meanwhile", "meanwhile, and ended"])
def test_a_process_of_others_counts_as_load(when: str) -> None:
    """`setsid --fork` leaves a process that is nobody's child."""
    command = ["setsid", "--fork", sys.executable, "-c"]
    began, load = time.monotonic(), OtherLoad()
    code = f"{spin(1.5)}\nprint(flush=True)" if when.endswith("ended") else SPINS
    with subprocess.Popen([*command, code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        line = starter.stdout.readline()
        if when.endswith("ended"):
            assert count_other_seconds(load, began) > 1.0
            return
        other = psutil.Process(int(line))
        try:
            if when == "earlier":
                began, load = time.monotonic(), OtherLoad()
            before = other.cpu_times().user
            wait_for(lambda: other.cpu_times().user > before + 1.5, "it to use the CPU")
            assert count_other_seconds(load, began) > 1.0
        finally:
            other.kill()


def test_child_processes_do_not_count_as_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others use meanwhile is left out: the test must hold on a busy machine."""
    load = OtherLoad()
    used_s = _used_seconds()
    for _ in range(2):  # one after the other: both have ended
        subprocess.run([sys.executable, "-c", spin(1.0)], check=True)
    monkeypatch.setattr(measuring, "_used_seconds", lambda: used_s + 2.0)
    assert load.share() < 0.05
