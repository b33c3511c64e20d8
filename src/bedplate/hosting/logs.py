"""What a service and its engines have said: the last lines, over rotated files, and what comes from now on."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bedplate.errors import AnswerIsNo
from bedplate.home import logs_dir
from bedplate.hosting import records
from bedplate.run.supervisor import LOGS_KEPT
from bedplate.values.service import ServiceRecord

LOOK_S = 0.2
BLOCK = 65536


def files_of(name: str) -> list[Path]:
    """Its own log first, then those of its engines; nothing where there is none of either."""
    try:
        found = sorted(path for path in logs_dir().glob(f"{name}@*.log") if path.stat().st_size)
    except OSError:
        found = []
    own = logs_dir() / f"{name}.log"
    return [own, *found] if own.exists() else found


def current_files(record: ServiceRecord) -> list[Path]:
    """Of a service that runs: what was written since it began."""
    import datetime as dt

    began = dt.datetime.fromisoformat(record.started_at).timestamp()
    return [path for path in files_of(record.name) if path.stat().st_mtime >= began - 1]


def chosen(name: str | None) -> Callable[[], list[Path]]:
    """The files to read, looked for anew each time; of a service that has ended, what is left of it."""
    if name is None:
        record = records.chosen(None)
        return lambda: current_files(record)
    records.checked_name(name)
    if running := next((one for one in records.running() if one.name == name), None):
        return lambda: current_files(running)
    if not files_of(name):
        known = sorted({re.split(r"[@]|\.log", path.name)[0] for path in logs_dir().glob("*.log")})
        raise AnswerIsNo(f"there is no log of a service called {name}", hint=f"there are: {', '.join(known) or 'none'}")
    return lambda: files_of(name)


def last_lines(path: Path, count: int, before: int | None = None) -> list[str]:
    """The last lines, those of rotated files included where the newest has too few; of it, what is `before` a byte."""
    found: list[str] = []
    for number in range(LOGS_KEPT + 1):
        piece = path if number == 0 else path.with_name(f"{path.name}.{number}")
        lines = _tail(piece, count - len(found), before if number == 0 else None) if len(found) < count else None
        if lines is None:
            break
        found = lines + found
    return found


def _tail(path: Path, count: int, before: int | None) -> list[str] | None:
    """Read from its end, since it may be large; `None`: there is no such file."""
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
    return data.decode("utf-8", "replace").splitlines()[-count:]


class Follower:
    """Reads what is added to one file, also when it is rotated or cut under our hands."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.path = path
        self._inode: int | None = None
        self._at = 0
        self._rest = b""
        if from_end and (status := self._status()) is not None:
            self._inode, self._at = status.st_ino, status.st_size

    @property
    def position(self) -> int:
        return self._at

    def read(self) -> list[str]:
        """The lines that were completed since it was last asked."""
        lines: list[str] = []
        status = self._status()
        if status is None:
            return lines
        if self._inode is not None and status.st_ino != self._inode:
            lines += self._rotated_away()
            self._at, self._rest = 0, b""
        elif status.st_size < self._at:
            self._at, self._rest = 0, b""
        self._inode = status.st_ino
        return lines + self._added(self.path)

    def _rotated_away(self) -> list[str]:
        """What was added to the old file before it got its new name."""
        for number in range(1, LOGS_KEPT + 1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            try:
                if older.stat().st_ino == self._inode:
                    return self._added(older)
            except OSError:
                break
        return []

    def _added(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def _status(self) -> os.stat_result | None:
        try:
            return self.path.stat()
        except OSError:
            return None


def follow(files: Callable[[], list[Path]], count: int) -> Iterator[tuple[Path, list[str]]]:
    """The last lines of each file and then what is added, in order and once; files that come later from their start."""
    followers = {path: Follower(path, from_end=True) for path in files()}
    for path, follower in followers.items():
        yield path, last_lines(path, count, follower.position)
    while True:
        for path in files():
            followers.setdefault(path, Follower(path, from_end=False))
        for path, follower in followers.items():
            if lines := follower.read():
                yield path, lines
        time.sleep(LOOK_S)
