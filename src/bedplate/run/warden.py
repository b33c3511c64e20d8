"""Starts one engine and outlives it by a moment: when bedplate dies, however it dies, the engine and all of its
descendants die too.

A program of its own, on the standard library alone. Its stdin is the lifeline: bedplate holds the other end, and the
kernel closes it even on SIGKILL. A death signal alone would not do: it reaches children, but not their children.

On the lifeline: b"t" asks the engine to end, b"k" kills it, end of file means that bedplate is gone.
On stdout, a line each: "started PID", then "exited CODE" (negative: the signal) or "failed REASON".
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform.startswith("linux")


def main(argv: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
    if libc is not None:
        # Descendants whose own parent dies become our children, so that none can slip away.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            # For the case that it is the warden itself which is killed.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        engine = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,  # kept open and silent: some engines end when it closes
            stdout=sys.stderr.fileno(),
            process_group=0,
            preexec_fn=in_child,  # safe: this process has one thread
        )
    except OSError as error:
        say(f"failed {error}")
        return 1
    say(f"started {engine.pid}")

    lifeline = sys.stdin.fileno()
    code: int | None = None
    while code is None:
        ready, _, _ = select.select([lifeline, wake_read], [], [])
        if lifeline in ready:
            asked = os.read(lifeline, 64)
            if not asked or b"k" in asked:
                kill_all(engine.pid)
            elif b"t" in asked:
                signal_group(engine.pid, signal.SIGTERM)
            if not asked:
                break
        if wake_read in ready:
            os.read(wake_read, 4096)
        code = engine.poll()
    kill_all(engine.pid)
    if code is not None:
        say(f"exited {code}")
    return 0


def say(line: str) -> None:
    try:
        os.write(sys.stdout.fileno(), line.encode() + b"\n")
    except OSError:
        # Nobody listens any more, which the lifeline tells as well.
        return


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def kill_all(group: int) -> None:
    """The engine's process group, and whatever descended from us and left that group, until nothing is left."""
    for _ in range(100):
        signal_group(group, signal.SIGKILL)
        rest = descendants(os.getpid())
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        reap(group)
        if not rest:
            return
        select.select([], [], [], 0.01)


def reap(engine: int) -> None:
    """Waits for adopted descendants that have ended, but leaves the engine's own status to whoever asks for it."""
    if not LINUX:
        return
    for pid in descendants(os.getpid(), zombies=True):
        if pid != engine:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def descendants(ancestor: int, zombies: bool = False) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent, state in processes():
        if zombies or state != "Z":
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [ancestor]
    while queue:
        for pid in children.get(queue.pop(), []):
            found.append(pid)
            queue.append(pid)
    return found


def processes() -> list[tuple[int, int, str]]:
    """(pid, parent's pid, state) of every process that can be seen."""
    rows = []
    if LINUX:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        # The command name stands in brackets and may itself hold brackets and spaces.
                        state, parent = file.read().rpartition(")")[2].split()[:2]
                except (OSError, ValueError):
                    continue
                rows.append((int(name), int(parent), state))
        return rows
    lister = subprocess.Popen(["ps", "-axo", "pid=,ppid=,state="], stdout=subprocess.PIPE, text=True)
    for line in lister.communicate()[0].splitlines():
        pid, parent, state = line.split()[:3]
        if int(pid) != lister.pid:
            rows.append((int(pid), int(parent), state[0]))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
