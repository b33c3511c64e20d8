"""Checksums of model files: what a hub lists, what the Hugging Face cache names its files by, and what was verified."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from bedplate.errors import ExternalFailure
from bedplate.facts.library import find_hub_cache
from bedplate.home import get_home
from bedplate.progress import Progress
from bedplate.values import Model

_CHUNK_BYTES = 1 << 22
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


def is_digest(text: str) -> bool:
    """Whether this is the SHA-256 of a large file, or the SHA-1 by which git names a small one."""
    return _DIGEST.fullmatch(text) is not None


def compute_digest(path: Path, kind: str, report: Callable[[int], None] = lambda done: None) -> str:
    """The digest of a file, of the same kind as `kind`."""
    size = path.stat().st_size
    # git hashes a short header before the content. It is no protection against an attacker, but what the hub lists.
    digest = hashlib.sha256() if len(kind) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(done)
    return digest.hexdigest()


def compute_digest_of_bytes(content: bytes, kind: str) -> str:
    header = b"" if len(kind) == 64 else b"blob %d\0" % len(content)
    return hashlib.new("sha256" if len(kind) == 64 else "sha1", header + content, usedforsecurity=False).hexdigest()


def is_verified(path: Path, expected: str, report: Callable[[int], None] = lambda done: None) -> bool:
    """Whether a file has this digest. It is computed again only if the file has changed since the last time."""
    if _is_recorded(path, expected):
        return True
    if compute_digest(path, expected, report) != expected:
        return False
    record_verified(path, expected)
    return True


def record_verified(path: Path, digest: str) -> None:
    """Records that a file has this digest, as long as it is not changed."""
    record = _get_record_path(path)
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(_describe_state(path, digest), encoding="utf-8")


def _is_recorded(path: Path, digest: str) -> bool:
    with contextlib.suppress(OSError):
        return _get_record_path(path).read_text(encoding="utf-8") == _describe_state(path, digest)
    return False


def _get_record_path(path: Path) -> Path:
    return get_home() / "verified" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]


def _describe_state(path: Path, digest: str) -> str:
    """A user cannot set the time of a file's last change (ctime) to an earlier one."""
    found = path.stat()
    return f"{digest} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def verify_cached_model(model: Model, progress: Progress) -> None:
    """Compares the files of a model in the Hugging Face cache with the digests that the cache names them by."""
    cache = find_hub_cache().resolve()
    files = [Path(file) for file in model.files if _is_below(Path(file), cache)]
    if files and model.format != "gguf":  # configuration and tokenizer too
        files = [file for file in sorted(files[0].parent.rglob("*")) if file.is_file()]
    # A cache on a file system without links does not have the digests.
    named = [(file, blob.name) for file in files if is_digest((blob := file.resolve()).name)]
    named = [(file, digest) for file, digest in named if not _is_recorded(file, digest)]
    if not named:
        return
    total = sum(file.stat().st_size for file, _ in named)
    with progress.step(f"verifying {model.name}", total) as done:
        before = 0
        for file, digest in named:
            if not is_verified(file, digest, lambda count, before=before: done(before + count)):  # type: ignore[misc]
                raise ExternalFailure(
                    f"{file.name} in the Hugging Face cache does not have the checksum that it was downloaded with",
                    cause=f"{file.resolve()} was changed or is damaged",
                    hint="delete that file, then run it again to download the model",
                )
            before += file.stat().st_size


def _is_below(file: Path, cache: Path) -> bool:
    return file.is_file() and file.resolve().is_relative_to(cache)
