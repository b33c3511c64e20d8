"""The key of an engine's private port where it must be the same at each start."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from bedplate.home import get_home, make_disk_failure, make_folder


def read_stable_key(engine_id: str) -> str:
    """One key for each engine of this home, derived from a secret that only this user may read."""
    file = get_home() / "engine-secret"
    try:
        secret = file.read_bytes() if file.exists() else write_secret(file)
    except OSError as error:
        raise make_disk_failure(error, file) from error
    return hmac.digest(secret, engine_id.encode(), "sha256").hex()


def write_secret(file: Path) -> bytes:
    """Written whole or not at all; of two processes at once, the first one's secret counts."""
    make_folder(file.parent)
    fresh = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()
    return file.read_bytes()
