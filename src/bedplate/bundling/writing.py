"""Writes the files of a bundle and its manifest, to a folder or an archive that appears only when it is complete."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from bedplate.errors import ExternalFailure, UsageError
from bedplate.progress import Progress
from bedplate.values.bundle import MANIFEST, SUMS, TOP, BundledFile

CHUNK_BYTES = 1 << 20
T = TypeVar("T")


def check_output(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} already exists", hint="name another path with -o, or remove it")
    if not output.absolute().parent.is_dir():
        raise UsageError(
            f"the folder {output.absolute().parent} does not exist", hint="create it, or name another with -o"
        )


class _Sink(Protocol):
    def write(self, path: str, size_bytes: int, source: BinaryIO, mode: int) -> None: ...

    def link(self, path: str, to: str) -> None: ...


class _FolderSink:
    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, size_bytes: int, source: BinaryIO, mode: int) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as out:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
        file.chmod(mode)

    def link(self, path: str, to: str) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).symlink_to(to)


class _ArchiveSink:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    def write(self, path: str, size_bytes: int, source: BinaryIO, mode: int) -> None:
        info = self._make_info(path)
        info.size, info.mode = size_bytes, mode
        self._archive.addfile(info, source)

    def link(self, path: str, to: str) -> None:
        info = self._make_info(path)
        info.type, info.linkname = tarfile.SYMTYPE, to
        self._archive.addfile(info)

    @staticmethod
    def _make_info(path: str) -> tarfile.TarInfo:
        return tarfile.TarInfo(f"{TOP}/{path}")


class _HashingReader(io.RawIOBase):
    """A file that computes its hash and size while it is read."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file, self._tell = file, tell
        self.hash, self.count = hashlib.sha256(), 0

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self.hash.update(data)
        self.count += len(data)
        self._tell(len(data))
        return data


class BundleWriter:
    """Adds files and collects their manifest entries."""

    def __init__(self, sink: _Sink, tell: Callable[[int], None], note: Callable[[str], None]) -> None:
        self._sink, self._tell, self._done = sink, tell, 0
        self.note = note
        self.files: list[BundledFile] = []

    def report(self, count: int) -> None:
        self._done += count
        self._tell(self._done)

    def add_file(self, path: str, source: Path, *, silent: bool = False) -> BundledFile:
        before = source.stat()
        with source.open("rb") as opened:
            reading = _HashingReader(opened, (lambda count: None) if silent else self.report)
            self._sink.write(path, before.st_size, reading, 0o755 if before.st_mode & 0o111 else 0o644)  # type: ignore[arg-type]
        if reading.count != before.st_size:
            raise ExternalFailure(
                f"{source} changed while it was packed", hint="try again when no process writes to it"
            )
        return self._record(BundledFile(path=path, size_bytes=reading.count, sha256=reading.hash.hexdigest()))

    def add_text(self, path: str, text: str, *, listed: bool = True) -> None:
        data = text.encode()
        mode = 0o755 if text.startswith("#!") else 0o644
        self._sink.write(path, len(data), io.BytesIO(data), mode)
        if listed:
            self._record(BundledFile(path=path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))

    def link(self, path: str, to: str) -> None:
        self._sink.link(path, to)
        self._record(BundledFile(path=path, link=to))

    def _record(self, file: BundledFile) -> BundledFile:
        self.files.append(file)
        return file

    def add_manifest(self, text: str) -> str:
        """Write the manifest and SHA256SUMS, after all other files; return the hash of the manifest."""
        manifest = f"{text}\n"
        sha256 = hashlib.sha256(manifest.encode()).hexdigest()
        self.add_text(SUMS, write_sums(self.files, sha256), listed=False)
        self.add_text(MANIFEST, manifest, listed=False)
        return sha256


def write_sums(files: Iterable[BundledFile], manifest_sha256: str) -> str:
    """Write the list that `sha256sum --check` reads: every file, and the manifest."""
    sums = [f"{one.sha256}  {one.path}\n" for one in files if one.link is None]
    return "".join([*sums, f"{manifest_sha256}  {MANIFEST}\n"])


def write_atomically(output: Path, total: int, progress: Progress, fill: Callable[[BundleWriter, Path], T]) -> T:
    """Call `fill` with a writer and a scratch folder; the output appears when it returns."""
    for leftover in output.parent.glob(f".making-{output.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".making-{output.name}-", dir=output.parent, ignore_cleanup_errors=True
        ) as holder:
            staging = Path(holder) / "bundle"
            with progress.step("packing", total) as tell, _open_sink(output, staging) as sink:
                filled = fill(BundleWriter(sink, tell, progress.note), Path(holder))
            staging.chmod(0o644 if staging.is_file() else 0o755)
            staging.rename(output)
    except OSError as error:
        hint = "free some disk space, or name another path with -o"
        raise ExternalFailure(f"cannot write {output}", cause=error.strerror or str(error), hint=hint) from error
    return filled


@contextmanager
def _open_sink(output: Path, staging: Path) -> Iterator[_Sink]:
    if output.suffix == ".tar":
        with tarfile.open(staging, "x:", format=tarfile.PAX_FORMAT) as archive:
            yield _ArchiveSink(archive)
    else:
        staging.mkdir()
        yield _FolderSink(staging)


def measure_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
