"""Measuring tests run alone, and run again if other processes used the CPU.

A test marked `measures` compares figures that it measured. If one fails while other processes or other virtual
machines used more than a tenth of the CPU, the failure says nothing about the code. Such a test is run again after all
others, once the machine is quiet. What is still undecided then is listed at the end of the run; with
`--fail-undecided`, as the nightly run has it, the run fails.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator

import psutil
import pytest

from bedplate.measure.flags import BUSY

ATTEMPTS = 3
WAIT_FOR_QUIET_S = 60.0
SAMPLE_S = 2.0
RUN_ALONE = "measures: other tests run beside it; `make test-all` runs it alone (pytest -n 0 -m measures)"

OTHER_LOAD = pytest.StashKey["OtherLoad"]()
DISTURBED = pytest.StashKey[str]()


class OtherLoad:
    """CPU time that processes outside this test run, and other virtual machines on the host, use from now on.

    It is what all of the machine uses, without this process and its descendants: others may start and end meanwhile.
    """

    def __init__(self) -> None:
        self._used_s, self._own_s = _used_seconds(), _own_seconds()
        self._began = time.monotonic()

    def share(self) -> float:
        """Share of all cores since the start."""
        elapsed_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, _used_seconds() - self._used_s - (_own_seconds() - self._own_s)) / elapsed_s


def _used_seconds() -> float:
    times = psutil.cpu_times()
    return sum(float(getattr(times, name, 0.0)) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own_seconds() -> float:
    """Of this process and its descendants, those included that have ended and whose parent has waited for them."""
    total = 0.0
    for one in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def wait_until_quiet(
    sample: Callable[[], float] | None = None,
    limit_s: float = WAIT_FOR_QUIET_S,
    clock: Callable[[], float] | None = None,
) -> bool:
    """Wait for one sample in which other processes used little CPU. Returns whether there was one within the limit."""
    sample, clock = sample or _sampled_share, clock or time.monotonic
    deadline = clock() + limit_s
    while sample() > BUSY:
        if clock() >= deadline:
            return False
    return True


def _sampled_share() -> float:
    load = OtherLoad()
    time.sleep(SAMPLE_S)
    return load.share()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-undecided", action="store_true", help="fail if a measuring test was disturbed in every attempt"
    )


def skip_beside_others(item: pytest.Item) -> None:
    if hasattr(item.config, "workerinput"):
        item.add_marker(pytest.mark.skip(reason=RUN_ALONE))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("measures"):
        item.stash[OTHER_LOAD] = OtherLoad()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    load = item.stash.get(OTHER_LOAD, None)
    if load is not None and call.when == "call":
        item.stash[DISTURBED] = ""
        if report.failed and (share := load.share()) > BUSY:
            failure = call.excinfo.exconly().splitlines()[0] if call.excinfo is not None else "it failed"
            item.stash[DISTURBED] = f"other processes used {share:.0%} of the CPU: {failure}"
            report.outcome = "disturbed"  # type: ignore[assignment]  # neither passed nor failed
    return report


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return ("disturbed", "D", "DISTURBED") if report.outcome == "disturbed" else None  # type: ignore[comparison-overlap]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    for _ in range(ATTEMPTS - 1):
        again = list_undecided(session)
        if not again:
            break
        wait_until_quiet()
        for item, following in zip(again, [*again[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return result


def list_undecided(session: pytest.Session) -> list[pytest.Item]:
    return [item for item in session.items if item.stash.get(DISTURBED, "")]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if list_undecided(session) and session.config.getoption("--fail-undecided"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[UNDECIDED] = [(item.nodeid, item.stash[DISTURBED]) for item in list_undecided(session)]


UNDECIDED = pytest.StashKey[list[tuple[str, str]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(UNDECIDED, []):
        terminalreporter.section("undecided measuring tests")
        for name, why in left:
            terminalreporter.line(f"{name}: {why}")
        terminalreporter.line(f"{len(left)} undecided after {ATTEMPTS} attempts each; run them on a quiet machine")
