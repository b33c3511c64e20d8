"""Real process trees under the real warden: however it ends, no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.conftest import HANG_S, wait_for

from bedplate.run.child import run_child
from bedplate.run.warden import wrap_with_warden

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux lets a process adopt its orphaned descendants"
)

TREE = r"""
import os, signal, subprocess, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
daemon = os.fork()
if daemon == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"daemon is up\n")
        time.sleep(600)
    os._exit(0)
os.waitpid(daemon, 0)
os.write(1, b"up\n")
"""
"""A child, one that left for a session of its own, and a daemon that forked twice and ignores SIGTERM."""
IN_TREE = 3
FOREVER = TREE + "time.sleep(600)"

HOLDER = """
import subprocess, sys
warden = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
warden.wait()
"""


class Tree:
    """Processes that are identified by a mark in their environment, whatever their parent."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(self, argv: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "BEDPLATE_TEST_TREE": self.mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def guard(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A warden with a Python program under it."""
        return self.start(wrap_with_warden([sys.executable, "-c", code, *arguments]))

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("BEDPLATE_TEST_TREE") == self.mark:
                    found.append(process)
        return found

    def wait_until_gone(self) -> None:
        wait_for(lambda: not self.alive(), "all processes of the tree to end")


@pytest.fixture
def tree() -> Iterator[Tree]:
    planted = Tree()
    yield planted
    for process in planted.started:
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    left = [one for one in planted.alive() if one.pid not in [process.pid for process in planted.started]]
    for one in left:
        one.kill()
    for process in planted.started:
        process.kill()
        process.wait(HANG_S)
    assert not left
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE]


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def log_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().strip()


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word)
    process.stdin.flush()


def read_started_pid(process: subprocess.Popen[str]) -> int:
    word, pid = read_line(process).split()
    assert word == "started"
    return int(pid)


def test_reports_output_and_exit_status(tree: Tree) -> None:
    warden = tree.guard("import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(7)")
    assert read_started_pid(warden) > 0
    assert read_line(warden) == "exited 7"
    assert warden.wait(HANG_S) == 7
    assert warden.stderr is not None
    assert sorted(warden.stderr.read().split("\n")) == ["", "to stderr", "to stdout"]


def test_reports_signal_that_ended_the_engine(tree: Tree) -> None:
    warden = tree.guard("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    read_started_pid(warden)
    assert read_line(warden) == f"exited {-signal.SIGSEGV}"
    assert warden.wait(HANG_S) == 128 + signal.SIGSEGV


def test_reports_program_that_cannot_be_executed(tree: Tree, tmp_path: Path) -> None:
    warden = tree.start(wrap_with_warden([str(tmp_path / "nothing-here"), "--option"]))
    report = read_line(warden)
    assert report.startswith("failed ") and "No such file" in report and "nothing-here" in report
    assert warden.wait(HANG_S) == 127


def test_t_sends_sigterm_and_k_sends_sigkill(tree: Tree) -> None:
    polite = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(3)); print('up', flush=True)"
    warden = tree.guard(f"{polite}\nwhile True: time.sleep(600)")
    read_started_pid(warden)
    assert log_line(warden) == "up"
    say(warden, "t")
    assert read_line(warden) == "exited 3"

    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))"
    warden = tree.guard(f"{deaf}; print('up', flush=True)\nwhile True: time.sleep(600)")
    read_started_pid(warden)
    assert log_line(warden) == "up"
    say(warden, "t")
    assert log_line(warden) == "heard"
    assert warden.poll() is None
    say(warden, "k")
    assert read_line(warden) == f"exited {-signal.SIGKILL}"


def test_warden_ignores_terminal_signals(tree: Tree) -> None:
    warden = tree.guard("import sys; print('up', flush=True); sys.stdin.read()")
    pid = read_started_pid(warden)
    assert log_line(warden) == "up"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        warden.send_signal(number)
    assert psutil.Process(pid).is_running() and warden.poll() is None
    # The engine has the default handlers for these signals, though the warden ignores them.
    os.kill(pid, signal.SIGTERM)
    assert read_line(warden) == f"exited {-signal.SIGTERM}"


@pytest.mark.parametrize("how", ["lifeline", "kill", "exit"])
def test_process_tree_ends_with_the_engine(tree: Tree, how: str) -> None:
    warden = tree.guard(TREE + "input()" if how == "exit" else FOREVER)
    engine = read_started_pid(warden)
    assert {log_line(warden), log_line(warden)} == {"up", "daemon is up"}
    assert len(tree.alive()) == 2 + IN_TREE
    if how == "lifeline":
        assert warden.stdin is not None
        warden.stdin.close()
    elif how == "kill":
        say(warden, "k")
    else:
        os.kill(engine, signal.SIGINT)  # a KeyboardInterrupt: it ends by itself
    warden.wait(HANG_S)
    tree.wait_until_gone()


def test_process_tree_ends_when_the_lifeline_closes(tree: Tree) -> None:
    holder = tree.start([sys.executable, "-c", HOLDER, *wrap_with_warden([sys.executable, "-c", FOREVER])])
    assert read_line(holder).startswith("started")
    assert {log_line(holder), log_line(holder)} == {"up", "daemon is up"}
    assert len(tree.alive()) == 3 + IN_TREE
    holder.kill()
    tree.wait_until_gone()


def test_engine_ends_when_the_warden_is_killed(tree: Tree) -> None:
    warden = tree.guard("import time; print('up', flush=True); time.sleep(600)")
    engine = psutil.Process(read_started_pid(warden))
    assert log_line(warden) == "up"
    warden.kill()
    wait_for(lambda: not engine.is_running(), "the engine to be killed")


@pytest.mark.parametrize("session", ["its own", "the engine's"])
def test_kills_processes_that_keep_forking(tree: Tree, session: str) -> None:
    """Each generation forks the next one and ends, so pids are outdated immediately."""
    leave = "os.setsid()" if session == "its own" else ""
    chain = f"""
import os, time
end = time.monotonic() + 20  # should it get away all the same
if os.fork() == 0:
    {leave}
    for _ in range(3):
        os.fork()
    os.write(1, b"running\\n")
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
time.sleep(600)
"""
    warden = tree.guard(chain)
    read_started_pid(warden)
    assert log_line(warden) == "running"
    say(warden, "k")
    # Its processes are too short-lived to be listed, but they hold the other end of the log.
    warden.communicate(timeout=HANG_S)
    assert warden.returncode == 128 + signal.SIGKILL


def test_kills_growing_number_of_processes(tree: Tree) -> None:
    crowd = """
import os, time
for number in range(400):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    if number == 20:
        print("growing", flush=True)
time.sleep(600)
"""
    warden = tree.guard(crowd)
    read_started_pid(warden)
    assert log_line(warden) == "growing"
    say(warden, "k")
    assert warden.wait(HANG_S) == 128 + signal.SIGKILL
    tree.wait_until_gone()


def test_reaps_orphans(tree: Tree) -> None:
    orphans = """
import os, time
for number in range(20):
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.waitpid(child, 0)
print("up", flush=True)
time.sleep(600)
"""
    warden = tree.guard(orphans)
    engine = read_started_pid(warden)
    assert log_line(warden) == "up"
    wait_for(lambda: [p.pid for p in psutil.Process(warden.pid).children()] == [engine], "orphans to be reaped")
    say(warden, "k")
    assert read_line(warden) == f"exited {-signal.SIGKILL}"


class TestRunChild:
    """Programs that run to their end, such as uv, also run under a warden."""

    def test_returns_status_and_output(self) -> None:
        assert run_child([sys.executable, "-c", "print('said'); exit(4)"]) == (4, "said\n")
        assert run_child([sys.executable, "-c", "import os; os.abort()"]).code == 128 + signal.SIGABRT

    def test_reports_why_it_could_not_start(self, tmp_path: Path) -> None:
        code, output = run_child([str(tmp_path / "nothing-here")])
        assert code == 127 and "No such file" in output

    def test_much_output_does_not_block(self) -> None:
        assert len(run_child([sys.executable, "-c", "print('x' * 3_000_000)"]).output) == 3_000_001

    def test_time_limit_ends_it(self, tree: Tree) -> None:
        env = {**os.environ, "BEDPLATE_TEST_TREE": tree.mark}
        with pytest.raises(TimeoutError):
            run_child([sys.executable, "-c", FOREVER], env, limit_s=0.5)
        assert not tree.alive()

    def test_ctrl_c_ends_it(self, tree: Tree) -> None:
        env = {**os.environ, "BEDPLATE_TEST_TREE": tree.mark}

        def interrupt(pid: int) -> None:
            if len(tree.alive()) == 2 + IN_TREE:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_child([sys.executable, "-c", FOREVER], env, tick=interrupt)
        assert not tree.alive()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_it_ends_when_bedplate_is_killed(self, tree: Tree, number: signal.Signals) -> None:
        code = f"from bedplate.run.child import run_child; run_child([{sys.executable!r}, '-c', {FOREVER!r}])"
        bedplate = tree.start([sys.executable, "-c", code])
        wait_for(lambda: len(tree.alive()) == 3 + IN_TREE, "the tree to stand")
        bedplate.send_signal(number)
        tree.wait_until_gone()
