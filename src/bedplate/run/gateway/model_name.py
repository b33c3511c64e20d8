"""The model's name in answers: engines answer with a path or with the name that the client sent. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_NAME = re.compile(rb'"model": ?("(?:[^"\\]|\\.)*")')
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _NameHolder(msgspec.Struct):
    model: Any = None


class _NamedAnswer(msgspec.Struct):
    model: Any = None
    message: _NameHolder | None = None
    response: _NameHolder | None = None


_decode_answer = msgspec.json.Decoder(_NamedAnswer).decode
Renaming = tuple[bytes, bytes]
"""What to replace in the bytes of an answer, and by what. In JSON strings quotes are escaped, so no text matches."""


class ServedName:
    """The name under which a model is served."""

    __slots__ = ("_encoded", "_last", "_marks")

    def __init__(self, name: str) -> None:
        self._encoded = msgspec.json.encode(name)
        self._marks = (b'"model":' + self._encoded, b'"model": ' + self._encoded)
        self._last: Renaming | None = None
        """The last renaming: engines seldom change the name that they answer with."""

    def find_renaming(self, data: bytes) -> Renaming | None:
        """What must be replaced in an answer, or in all events of the stream that begins with `data`."""
        at = data.find(b'"model":')
        if at < 0 or data.startswith(self._marks, at):
            return None
        if self._last is not None and data.startswith(self._last[0], at):
            return self._last
        compact, spaced = self._marks
        if compact in data or spaced in data:
            return None
        name = _read_name(data)
        for found in _NAME.finditer(data):
            if name is not None and msgspec.json.decode(found[1]) == name:
                self._last = found[0], compact
                return self._last
        return None


def _read_name(data: bytes) -> str | None:
    """The name in a JSON document, or in the first event of a stream that has one."""
    lines = [data] if data[:1] == b"{" else [line[5:] for line in data.splitlines() if line.startswith(b"data:")]
    for line in lines:
        try:
            answer = _decode_answer(line)
        except _UNREADABLE:
            continue
        for holder in (answer, answer.message, answer.response):
            if holder is not None and isinstance(holder.model, str):
                return holder.model
    return None
