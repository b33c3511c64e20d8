"""Read speed of the disk with the model folder, without the operating system's cache.

Several readers run at once, as in engines that load weights. A single one leaves a fast disk idle between requests.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bedplate.facts.measured.statistics import compute_window_rates, make_figure
from bedplate.home import get_models_dir
from bedplate.values import Record
from bedplate.values.measurements import DiskRead
from bedplate.values.units import format_size

MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
READERS = 4
MOST_BYTES = 512 * MIB
MOST_S = 2.0
LEAST_FILE_BYTES = 64 * MIB
OWN_FILE_BYTES = 256 * MIB
WINDOWS = 8
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class DiskRequest(Record, frozen=True, kw_only=True):
    folder: str
    when: str


class DiskResult(Record, frozen=True, kw_only=True):
    disk: DiskRead | None = None
    notes: tuple[str, ...] = ()


def make_request(when: str) -> DiskRequest:
    return DiskRequest(folder=str(get_models_dir()), when=when)


def measure_disk(asked: DiskRequest, tell: Callable[[float], None]) -> DiskResult:
    folder = next(place for place in (Path(asked.folder), *Path(asked.folder).parents) if place.is_dir())
    if sys.platform == "win32":
        return DiskResult(notes=("disk speed is not measured on this operating system",))
    kind = find_file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        return DiskResult(notes=(f"disk speed is not measured: {folder} is in memory ({kind})",))
    try:
        with open_large_file(folder) as (descriptor, file_bytes, what):
            how = disable_cache(descriptor)
            if how is None:
                return DiskResult(notes=(f"disk speed is not measured: the cache cannot be bypassed in {folder}",))
            tell(0.3)
            began = time.perf_counter()
            ends = read_blocks(descriptor, file_bytes, lambda share: tell(0.3 + 0.7 * share))
    except OSError as error:
        return DiskResult(notes=(f"disk speed is not measured: {folder}: {error.strerror or error}",))
    found = compute_window_rates(ends, began, WINDOWS)
    found = found[1:] or found  # the first one includes the start of the readers and the disk's own cache
    if not found:
        return DiskResult(notes=("disk speed is not measured: nothing could be read",))
    source = f"{what}, {how}, {READERS} readers of {format_size(BLOCK_BYTES)}, {asked.when}"
    read = DiskRead(
        path=asked.folder, read_bytes=sum(count for _, count in ends), read_bytes_s=make_figure(found, source)
    )
    return DiskResult(disk=read)


@contextlib.contextmanager
def open_large_file(folder: Path) -> Iterator[tuple[int, int, str]]:
    """A large file of the folder: a model, or else a temporary unnamed file, which cannot be left behind."""
    if model := find_largest(folder):
        descriptor = os.open(model, os.O_RDONLY)
        try:
            yield descriptor, os.fstat(descriptor).st_size, "a model file"
        finally:
            os.close(descriptor)
        return
    free = shutil.disk_usage(folder).free
    if free < 4 * OWN_FILE_BYTES:
        raise OSError(f"only {format_size(free)} are free, too little for a test file")
    with tempfile.TemporaryFile(dir=folder, prefix=".measure-") as file:
        for _ in range(OWN_FILE_BYTES // BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))  # random, so that compression or deduplication has no effect
        file.flush()
        os.fsync(file.fileno())
        yield file.fileno(), OWN_FILE_BYTES, "a file of random bytes"


def find_largest(folder: Path) -> Path | None:
    """The largest file under `folder` that is large enough to measure."""
    best: tuple[int, Path] | None = None
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                found = path.stat().st_size
                if found >= LEAST_FILE_BYTES and (best is None or found > best[0]) and os.access(path, os.R_OK):
                    best = (found, path)
    return best[1] if best else None


def disable_cache(descriptor: int) -> str | None:
    """Make reads of `descriptor` bypass the cache. Returns how; `None` if it is not possible."""
    if sys.platform == "win32":
        return None
    import fcntl

    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return "F_NOCACHE"
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
        return "O_DIRECT"
    except OSError:
        # Some file systems accept the flag but fail the read.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return "cache dropped by fadvise"
    except OSError:
        return None


def read_blocks(descriptor: int, file_bytes: int, tell: Callable[[float], None]) -> list[tuple[float, int]]:
    """The end time and size of each read. Only whole blocks, because direct reads must be aligned."""
    offsets = iter(range(0, min(file_bytes, MOST_BYTES) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES))
    planned = max(1, min(file_bytes, MOST_BYTES) // BLOCK_BYTES)
    ends: list[tuple[float, int]] = []
    failures: list[OSError] = []
    lock = threading.Lock()
    deadline = time.perf_counter() + MOST_S

    def read_next() -> None:
        block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as direct reads require
        while time.perf_counter() < deadline and not failures:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            try:
                count = os.preadv(descriptor, [block], offset)
            except OSError as error:
                failures.append(error)
                return
            with lock:
                ends.append((time.perf_counter(), count))
                tell(len(ends) / planned)

    readers = [threading.Thread(target=read_next) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if failures:
        raise failures[0]
    return ends


def find_file_system(folder: Path) -> str | None:
    """The file system type of `folder`, on Linux."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        return parse_file_system(text, str(folder.resolve()))
    except OSError:
        return None


def parse_file_system(mountinfo: str, path: str) -> str | None:
    """From Linux's mountinfo: the deepest mount above `path`; of several at one path, the last."""
    best, kind = "", None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or not tail:
            continue
        place = fields[4].replace("\\040", " ")
        below = path == place or path.startswith(place.rstrip("/") + "/")
        if below and len(place) >= len(best):
            best, kind = place, tail[0]
    return kind
