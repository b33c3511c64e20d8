"""Runs tests in forked processes: `pytest -p tests.forking --forks 4`.

pytest-xdist starts its workers from nothing, and each one imports and collects all tests: eight seconds of CPU time for
each of four workers. Here the tests are collected once, and each worker is a copy of that process.
To plugins and fixtures, a forked process looks like a worker of pytest-xdist.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

MOST_TESTS = 120
"""A file with more tests is divided, so that the last one does not keep a single worker busy."""
_LENGTH = struct.Struct("!I")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in this many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    forks = session.config.getoption("--forks")
    if not forks or session.testsfailed or session.config.option.collectonly:
        return None  # as without this plugin
    _Workers(session).run(forks)
    return True


class _Pipe:
    """Sends and receives objects between a worker and the process that started it."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self._writes = reads, writes

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        while left:
            left = left[os.write(self._writes, left) :]

    def receive(self) -> Any:
        """The next object; raises `EOFError` if the other process has ended."""
        return pickle.loads(self._read(*_LENGTH.unpack(self._read(_LENGTH.size))))  # of our own process

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.reads, size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        os.close(self.reads)
        os.close(self._writes)


class _Worker:
    def __init__(self, number: int, pid: int, pipe: _Pipe) -> None:
        self.number, self.pid, self.pipe = number, pid, pipe
        self.tests: deque[int] = deque()
        """Positions of the tests that it has been given; the first one may be running."""
        self.output: dict[str, Any] = {}


class _Workers:
    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._parts = deque(_divide(session.items))
        self._by_fd: dict[int, _Worker] = {}
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all workers

    def run(self, count: int) -> None:
        try:
            for number in range(count):
                self._start(number)
            while self._by_fd:
                for fd in select.select(list(self._by_fd), [], [])[0]:
                    self._handle(self._by_fd[fd])
        finally:
            for worker in self._by_fd.values():
                os.kill(worker.pid, signal.SIGTERM)
                os.waitpid(worker.pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self, number: int) -> None:
        to_worker, from_worker = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            for worker in self._by_fd.values():
                worker.pipe.close()
            os.close(to_worker[1])
            os.close(from_worker[0])
            _run_worker(self._session, number, _Pipe(to_worker[0], from_worker[1]))
        os.close(to_worker[0])
        os.close(from_worker[1])
        self._by_fd[from_worker[0]] = _Worker(number, pid, _Pipe(from_worker[0], to_worker[1]))

    def _handle(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.receive()
        except EOFError:
            message = None
        if message is None:
            self._remove(worker)
            return
        kind, content = message
        hook = self._config.hook
        if kind == "next":
            stop = self._session.shouldfail or self._session.shouldstop
            part = self._parts.popleft() if self._parts and not stop else []
            worker.tests.extend(part)
            worker.pipe.send(part)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                worker.tests.popleft()
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        else:
            worker.output = content

    def _remove(self, worker: _Worker) -> None:
        del self._by_fd[worker.pipe.reads]
        worker.pipe.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        node = SimpleNamespace(workeroutput=worker.output, config=self._config)
        self._config.hook.pytest_testnodedown(node=node, error=None)
        if worker.tests:
            test = self._session.items[worker.tests.popleft()]
            how = f"the process of this test ended with status {status}"
            report = pytest.TestReport(test.nodeid, test.location, {}, "failed", how, "call")
            self._config.hook.pytest_runtest_logreport(report=report)
            if worker.tests:
                self._parts.appendleft(list(worker.tests))
            self._start(worker.number)
        elif status:
            raise RuntimeError(f"a worker ended with status {status}")


def _divide(items: list[pytest.Item]) -> Iterator[list[int]]:
    """Positions of tests of one file, which share fixtures."""
    for _, group in groupby(range(len(items)), lambda at: items[at].path):
        tests = list(group)
        for first in range(0, len(tests), MOST_TESTS):
            yield tests[first : first + MOST_TESTS]


def _run_worker(session: pytest.Session, number: int, pipe: _Pipe) -> None:
    """Runs tests in this process, which has just been forked, and ends it."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _become_worker(session.config, number)
        _run_tests(session, pipe)
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        pipe.send(("output", session.config.workeroutput))  # type: ignore[attr-defined]
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _become_worker(config: pytest.Config, number: int) -> None:
    name = f"gw{number}"
    os.environ["PYTEST_XDIST_WORKER"] = name
    config.workerinput = {"workerid": name}  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # the files that output goes to are those of all processes until now
        capture.stop_global_capturing()
        capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / name
    folders._basetemp.mkdir(mode=0o700, exist_ok=True)


def _run_tests(session: pytest.Session, pipe: _Pipe) -> None:
    hook, reports = session.config.hook, _ReportSender(session.config, pipe)
    session.config.pluginmanager.register(reports)
    pipe.send(("next", None))
    part = pipe.receive()
    while part:
        for at, following in zip(part, [*part[1:], None], strict=True):
            item = session.items[at]
            if following is None:
                pipe.send(("next", None))
                part = pipe.receive()
                following = part[0] if part else None
            next_item = session.items[following] if following is not None else None
            hook.pytest_runtest_protocol(item=item, nextitem=next_item)


class _ReportSender:
    def __init__(self, config: pytest.Config, pipe: _Pipe) -> None:
        self._config, self._pipe = config, pipe

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))
