"""Commands that are interrupted: a migration that is cancelled, a service that is stopped meanwhile, Ctrl-C, a closed
pipe. No command shows a traceback."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.commands import run
from tests.conftest import HANG_S, have_ended, wait_for
from tests.contract.documents import check_document
from tests.e2e.test_services import SMALL, Background, ask, list_descendants
from tests.soak.challengers import installed

from bedplate.home import get_logs_dir
from bedplate.run.environments import EngineEnvironment
from bedplate.run.prepare import get_prepared_dir

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture
def background(
    tmp_path: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Background]:
    monkeypatch.setenv("PYTHONPATH", str(installed(tmp_path / "site", pause_s=0)))
    one = Background()
    yield one
    one.end()


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command of bedplate in the background; it must end within the block."""
    command = [sys.executable, "-m", "bedplate", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Wait for its exit; returns what it printed on stderr."""
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == code and "Traceback" not in errors, errors
    return errors


def find_conversions(pid: int) -> list[psutil.Process]:
    found = []
    for process in list_descendants(pid):
        with contextlib.suppress(psutil.Error):
            if "# conversion" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_conversion_of_a_migration_is_cancelled_and_stopped(background: Background) -> None:
    log = get_logs_dir() / "moving@host.log"
    log.unlink(missing_ok=True)
    endpoint = background.start("--name", "moving", *SMALL)
    with running("migrate", "converting", "moving") as migrating:
        conversions = wait_for(lambda: find_conversions(endpoint["pid"]), "the conversion to run")
        answer = run("migrate", "--cancel", "moving", "--json")
        assert answer.code == 0, answer.err
        done = check_document("migration", answer.out)
        assert (done["outcome"], done["stage"], done["b"]["engine"]) == ("rolled back", "cancelled", "converting")
        assert "by request (preparing)" in finish_output(migrating, 1)
        wait_for(lambda: have_ended(conversions), "the conversion to end")
    assert ask(endpoint)[0] == 200
    answer = run("migrate", "--cancel", "moving")
    assert answer.code == 1 and "error: no migration is running" in answer.err

    with running("migrate", "converting", "moving") as migrating:
        conversions = wait_for(lambda: find_conversions(endpoint["pid"]), "the conversion to run")
        migrating.send_signal(signal.SIGINT)
        assert "the migration continues; to cancel it: bedplate migrate --cancel moving" in finish(migrating, 130)
    with running("migrate", "converting", "moving") as second:
        assert "it is busy: migrating to converting: preparing" in finish(second, 1)
    below = list_descendants(endpoint["pid"])
    answer = run("stop", "moving")
    assert answer.code == 0 and "Traceback" not in answer.err, answer.err
    wait_for(lambda: have_ended([*below, *conversions]), "all processes to end")
    assert "Traceback" not in log.read_text()


def finish_output(process: subprocess.Popen[str], code: int) -> str:
    output, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == code and "Traceback" not in errors, errors
    return output


def test_service_is_stopped_while_its_weights_are_converted(background: Background) -> None:
    words = ("serve", "-d", "--name", "converts", "--engine", "converting", "--port", "0", *SMALL)
    with running(*words) as starting:
        conversions = wait_for(lambda: find_conversions(starting.pid) or find_children("converts"), "the conversion")
        answer = run("stop", "converts")
        assert answer.code == 0 and "Traceback" not in answer.err, answer.err
        assert "error: " in finish(starting, 3)
        wait_for(lambda: have_ended(conversions), "the conversion to end")


def find_children(name: str) -> list[psutil.Process]:
    """The conversions of a service in the background, which is a session of its own."""
    from bedplate.hosting import records

    pids = [one.pid for one in records.list_running() if one.name == name]
    return [process for pid in pids for process in find_conversions(pid)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_service_is_interrupted_during_a_conversion(background: Background, number: int) -> None:
    with running("serve", "--name", "front", "--engine", "converting", "--port", "0", *SMALL) as serving:
        conversions = wait_for(lambda: find_conversions(serving.pid), "the conversion to run")
        serving.send_signal(number)
        _, errors = serving.communicate(timeout=HANG_S)
        assert serving.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
        assert "Traceback" not in errors
        wait_for(lambda: have_ended(conversions), "the conversion to end")
        assert list(get_prepared_dir().glob(".making-*")) == []


def test_service_continues_when_nobody_reads_its_progress(background: Background) -> None:
    """As in `bedplate serve 2>&1 | head -1`."""
    words = ("serve", "--json", "--name", "unread", "--port", "0", "--no-check", *SMALL)
    with running(*words) as serving:
        assert serving.stdout is not None and serving.stderr is not None
        endpoint = check_document("endpoint", serving.stdout.readline())
        serving.stderr.close()
        (engine,) = [one for one in list_descendants(endpoint["pid"]) if is_engine(one)]
        engine.kill()
        wait_for(lambda: have_ended([engine]), "the engine to end")
        wait_for(lambda: ask(endpoint)[0] == 200, "the engine to be restarted")
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(HANG_S) == 0


def is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return "llama-server" in words and "warden.py" not in words
    return False
