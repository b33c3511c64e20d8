"""Starts one engine, and ends the engine and all of its descendants when bedplate dies, even by SIGKILL.

A separate program that uses only the standard library. Its stdin is the lifeline: bedplate holds the other end, and the
kernel closes it even on SIGKILL. A parent-death signal is not enough: it reaches children, but not their children.

On the lifeline: b"t" sends SIGTERM to the engine, b"k" kills it, end of file means that bedplate has ended.
On stdout, one line each: "started PID", then "exited CODE" (negative: the signal) or "failed REASON".
The exit status is the engine's, as in a shell: 128 plus the signal; 127 if it could not be started.
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


def wrap_with_warden(argv: list[str]) -> list[str]:
    """The command that runs `argv` under a warden; on systems without one, `argv` itself."""
    return [sys.executable, "-I", "-S", __file__, *argv] if os.name == "posix" else argv


def main(argv: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
    if libc is not None:
        # Descendants whose parent dies become our children, so that none can escape.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    warden = os.getpid()

    def prepare_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            # In case the warden itself is killed.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != warden:  # the warden was killed before the line above
                os._exit(1)

    try:
        engine = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,  # kept open and silent: some engines end when it closes
            stdout=sys.stderr.fileno(),
            process_group=0,
            preexec_fn=prepare_child,  # safe: this process has one thread
        )
    except OSError as error:
        write_report(f"failed {error}")
        return 127
    write_report(f"started {engine.pid}")

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
            reap_descendants(engine.pid)
        code = engine.poll()
    kill_all(engine.pid)
    if code is None:
        return 128 + signal.SIGKILL
    write_report(f"exited {code}")
    return code if code >= 0 else 128 - code


def write_report(line: str) -> None:
    try:
        os.write(sys.stdout.fileno(), line.encode() + b"\n")
    except OSError:
        # bedplate has ended; the lifeline reports that, too.
        return


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def kill_all(engine: int) -> None:
    """Kills the engine's process group and all descendants that left it, until none is left."""
    own_group = os.getpgrp()
    for _ in range(100):
        rest = find_descendants(os.getpid())
        # By groups, which the kernel kills atomically. A process that forks and ends repeatedly is mostly visible as
        # zombies, which still show its group until they are reaped.
        for group in {engine, *(group for group, _ in rest.values())} - {own_group}:
            signal_group(group, signal.SIGKILL)
        for pid, (_, state) in rest.items():
            try:
                if state != "Z":
                    os.kill(pid, signal.SIGKILL)
                elif pid != engine:  # its status is read by Popen
                    os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, PermissionError, ChildProcessError):
                continue
        if all(pid == engine and state == "Z" for pid, (_, state) in rest.items()):
            return
        select.select([], [], [], 0.01)


def reap_descendants(engine: int) -> None:
    """Reaps adopted descendants that have ended, but not the engine, whose status Popen reads."""
    for _ in range(100 if LINUX else 0):  # bounded: a process that keeps forking must not block the warden
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == engine:
            return
        os.waitpid(ended.si_pid, 0)


def find_descendants(ancestor: int) -> dict[int, tuple[int, str]]:
    """The process group and state of each descendant, by its pid."""
    children: dict[int, list[tuple[int, int, str]]] = {}
    for pid, parent, group, state in list_processes():
        children.setdefault(parent, []).append((pid, group, state))
    found: dict[int, tuple[int, str]] = {}
    queue = [ancestor]
    while queue:
        for pid, group, state in children.get(queue.pop(), []):
            found[pid] = group, state
            queue.append(pid)
    return found


def list_processes() -> list[tuple[int, int, int, str]]:
    """(pid, parent's pid, process group, state) of every visible process."""
    rows = []
    if LINUX:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        # The command name is in parentheses, and may itself contain parentheses and spaces.
                        state, parent, group = file.read().rpartition(")")[2].split()[:3]
                except (OSError, ValueError):
                    continue
                rows.append((int(name), int(parent), int(group), state))
        return rows
    lister = subprocess.Popen(["ps", "-axo", "pid=,ppid=,pgid=,state="], stdout=subprocess.PIPE, text=True)
    for line in lister.communicate()[0].splitlines():
        pid, parent, group, state = line.split()[:4]
        if int(pid) != lister.pid:
            rows.append((int(pid), int(parent), int(group), state[0]))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
