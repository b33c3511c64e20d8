"""Child processes of a comparison: pinned, measured as whole process trees, and always stopped."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def free_ports(count: int) -> list[int]:
    """Different free ports of 127.0.0.1."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def in_child(core: int, nice: int) -> Callable[[], None]:
    """Set core and niceness in a child before it runs its program; its children inherit them."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


@contextlib.contextmanager
def running(
    command: Sequence[str], core: int, nice: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for a with block, and stop its whole process tree afterwards."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(environment or {}),
            start_new_session=True,
            preexec_fn=in_child(core, nice),
        )
        try:
            yield process
        finally:
            end_tree(process)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, with HTTP proxies disabled for 127.0.0.1."""
    return {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **extra}


def measure(command: Sequence[str], core: int, nice: int, limit_s: float) -> bytes:
    """Run a program to its end and returns what it printed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=in_child(core, nice),
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        end_tree(process)
    if process.returncode:
        raise RuntimeError(f"{Path(command[1]).name} ended with status {process.returncode}")
    return output


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all of its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a tree, those of its exited and awaited children included."""
    total = 0.0
    for process in tree_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_rss_mb(pid: int) -> float:
    """Resident megabytes (10^6 bytes) of a tree; pages that its processes share count once in each."""
    total = 0
    for process in tree_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e6


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process tree, and kill what remains after five seconds."""
    members = tree_of(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    _, alive = psutil.wait_procs(members, timeout=max(0.0, deadline - time.monotonic()))
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=10)


def tail_of(log: IO[bytes], size: int = 600) -> str:
    """The last lines of a log, to explain a failure."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - size))
    return log.read().decode(errors="replace").strip()


def end_on_sigterm() -> None:
    """Make SIGTERM unwind like Ctrl-C, so that every with block stops its processes."""

    def leave(_number: int, _frame: object) -> None:
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
