"""Reads the small files of a model folder, with a size limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bedplate.errors import UsageError

MAX_CONFIG_BYTES = 4 << 20


def read_json(path: Path) -> Any:
    """Read a JSON file of a model folder. Python's extensions (Infinity, NaN) are tolerated."""
    return parse_json(read_bytes(path, MAX_CONFIG_BYTES), path.name)


def parse_json(data: bytes, name: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    import json

    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON", cause=str(error)[:200], hint="download it again") from None


def read_bytes(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", cause=error.strerror or str(error), hint="check the path") from None
    if len(data) > most:
        raise UsageError(
            f"{path.name} is larger than {most >> 20} MiB, the limit for such a file", hint="check the file"
        )
    return data
