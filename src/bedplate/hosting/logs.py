"""The logs of a service and its engines: the last lines, across rotated files, and new lines as they are written."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bedplate.errors import NotPossible
from bedplate.home import get_logs_dir
from bedplate.hosting import records
from bedplate.run.log_text import clean_line
from bedplate.run.supervisor import LOGS_KEPT
from bedplate.values.service import ServiceRecord

EARLY_LOG = "detached.log"
"""Output of background processes before their service has a name."""

LOOK_S = 0.2
BLOCK = 65536


def list_files(name: str) -> list[Path]:
    """The service's log, then those of its engines. Missing files are left out."""
    try:
        found = sorted(path for path in get_logs_dir().glob(f"{name}@*.log") if path.stat().st_size)
    except OSError:
        found = []
    own = get_logs_dir() / f"{name}.log"
    return [own, *found] if own.exists() else found


def list_current_files(record: ServiceRecord) -> list[Path]:
    """The logs of a running service that were written since it started."""
    import datetime as dt

    began = dt.datetime.fromisoformat(record.started_at).timestamp()
    return [path for path in list_files(record.name) if path.stat().st_mtime >= began - 1]


def choose_files(name: str | None) -> Callable[[], list[Path]]:
    """A function that lists the files to read. It is called repeatedly, since engines may be added."""
    if name is None:
        record = records.choose_service(None)
        return lambda: list_current_files(record)
    records.check_name(name)
    if running := next((one for one in records.list_running() if one.name == name), None):
        return lambda: list_current_files(running)
    if not list_files(name):
        files = (path.name for path in get_logs_dir().glob("*.log") if path.name != EARLY_LOG)
        known = sorted({re.split(r"[@]|\.log", file)[0] for file in files})
        raise NotPossible(f"no log of a service named {name}", hint=f"services with logs: {', '.join(known) or 'none'}")
    return lambda: list_files(name)


def read_last_lines(path: Path, count: int, before: int | None = None) -> list[str]:
    """The last `count` lines, including rotated files if the newest has fewer.

    With `before`, the newest file is read only up to that byte.
    """
    found: list[str] = []
    for number in range(LOGS_KEPT + 1):
        file = path if number == 0 else path.with_name(f"{path.name}.{number}")
        lines = _read_tail(file, count - len(found), before if number == 0 else None) if len(found) < count else None
        if lines is None:
            break
        found = lines + found
    return found


def _read_tail(path: Path, count: int, before: int | None) -> list[str] | None:
    """The last `count` lines, read backwards since the file may be large. None if there is no such file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            at = end if before is None else min(before, end)
            data = b""
            while at > 0 and data.count(b"\n") <= count:
                step = min(BLOCK, at)
                at = file.seek(at - step)
                data = file.read(step) + data
    except OSError:
        return None
    lines = data.removesuffix(b"\n").split(b"\n")[-count:] if data else []
    return [_decode_line(line) for line in lines]


class LogFollower:
    """Reads the lines appended to one file, also when it is rotated or truncated meanwhile."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.path = path
        self._inode: int | None = None
        self._at = 0
        self._rest = b""
        if from_end and (status := self._read_status()) is not None:
            self._inode, self._at = status.st_ino, status.st_size

    @property
    def position(self) -> int:
        return self._at

    def read(self) -> list[str]:
        """The lines completed since the last call."""
        lines: list[str] = []
        status = self._read_status()
        if status is None:
            return lines
        if self._inode is not None and status.st_ino != self._inode:
            lines += self._read_rotated()
            self._at, self._rest = 0, b""
        elif status.st_size < self._at:
            self._at, self._rest = 0, b""
        self._inode = status.st_ino
        return lines + self._read_added(self.path)

    def _read_rotated(self) -> list[str]:
        """The lines that were appended to the old file before it was rotated."""
        for number in range(1, LOGS_KEPT + 1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            try:
                if older.stat().st_ino == self._inode:
                    return self._read_added(older)
            except OSError:
                break
        return []

    def _read_added(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_decode_line(line) for line in lines]

    def _read_status(self) -> os.stat_result | None:
        try:
            return self.path.stat()
        except OSError:
            return None


def _decode_line(line: bytes) -> str:
    """Cleaned again: older versions wrote what an engine printed as it was."""
    return clean_line(line.decode("utf-8", "replace").rstrip("\r"))


def follow(files: Callable[[], list[Path]], count: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the last lines of each file, then each new line once. Files that appear later are read from the start."""
    followers = {path: LogFollower(path, from_end=True) for path in files()}
    for path, follower in followers.items():
        yield path, read_last_lines(path, count, follower.position)
    while True:
        for path in files():
            followers.setdefault(path, LogFollower(path, from_end=False))
        for path, follower in followers.items():
            if lines := follower.read():
                yield path, lines
        time.sleep(LOOK_S)
