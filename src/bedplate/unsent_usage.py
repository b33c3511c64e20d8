"""Usage records on this disk until PostgreSQL has them: a gateway that was killed writes them when it starts again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bedplate.home import get_home, make_folder
from bedplate.values.traffic import ServedRequest

SUFFIX = ".jsonl"


class NumberedRequest(msgspec.Struct, array_like=True):
    """A request as the database identifies it, so that it is stored only once."""

    gateway: str
    number: int
    request: ServedRequest


class _UnsentFile:
    """A file that this process locks as long as it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def lock(self) -> bool:
        import fcntl

        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self.file)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.close()


class UnsentUsage:
    """The records of one gateway. The caller guards `keep` and `seal` by a lock; both are fast.

    Nothing waits for the disk: a killed process loses nothing that it has handed to the kernel.
    """

    def __init__(self, folder: Path, gateway: str) -> None:
        self._folder, self._gateway = folder, gateway
        self._count = 0
        self._current: _UnsentFile | None = None
        self._spare: _UnsentFile | None = None
        self._sealed: list[_UnsentFile] = []
        self._has_lines = False
        self._failed = False

    def keep(self, number: int, request: ServedRequest) -> None:
        if self._failed:
            return
        line = msgspec.json.encode(NumberedRequest(self._gateway, number, request)) + b"\n"
        try:
            if self._current is None:
                self._current = self._open()
            os.write(self._current.file, line)
            self._has_lines = True
        except OSError:  # the disk is full or read-only: records wait in memory only
            self._failed = True

    def prepare(self) -> None:
        """Create the next file, so that `seal` need not."""
        if self._spare is None and not self._failed:
            with contextlib.suppress(OSError):
                self._spare = self._open()

    def seal(self) -> None:
        """What was kept until now belongs to the batch that is written next.

        While the database does not answer, all goes into one file. Lines that are written twice are stored once.
        """
        if self._current is not None and self._has_lines and not self._sealed:
            self._sealed.append(self._current)
            self._current, self._spare = self._spare, None
            self._has_lines = False

    def discard(self) -> None:
        """The database has all that was sealed."""
        sealed, self._sealed = self._sealed, []
        for segment in sealed:
            segment.remove()

    def close(self) -> None:
        """Remove files that are empty, and leave others for the next gateway."""
        for segment in (self._current, self._spare, *self._sealed):
            if segment is not None:
                if os.fstat(segment.file).st_size:
                    segment.close()
                else:
                    segment.remove()
        self._current, self._spare, self._sealed, self._failed = None, None, [], True

    def _open(self) -> _UnsentFile:
        make_folder(self._folder)
        while True:
            self._count += 1
            segment = _UnsentFile(self._folder / f"{self._gateway}-{self._count}{SUFFIX}")
            if segment.lock() and os.fstat(segment.file).st_nlink:
                return segment
            segment.close()  # another gateway has found it before it was locked


def get_unsent_folder(url: str) -> Path | None:
    """The folder for one database, whoever the user is; `None` where files cannot be locked like this."""
    parts = urlsplit(url)
    name = hashlib.blake2b((parts.netloc.rpartition("@")[2] + parts.path).encode(), digest_size=8).hexdigest()
    return get_home() / "unsent-usage" / name if os.name == "posix" else None


@contextlib.contextmanager
def take_unsent(folder: Path) -> Iterator[list[NumberedRequest]]:
    """Yield what gateways left that are gone. Their files are removed at the end, unless there was an exception."""
    found: list[NumberedRequest] = []
    with contextlib.ExitStack() as stack:
        segments = []
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                segment = _UnsentFile(path)
            except OSError:
                continue
            if not segment.lock():
                segment.close()
                continue
            stack.callback(segment.close)
            segments.append(segment)
            found += _read(path)
        yield found
        for segment in segments:
            segment.path.unlink(missing_ok=True)


def _read(path: Path) -> Iterator[NumberedRequest]:
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # the last line may be incomplete
            yield msgspec.json.decode(line, type=NumberedRequest)
