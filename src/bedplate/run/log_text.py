"""Lines of logs. Engines write what clients send, so a line is short and has no control characters."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable

import msgspec

MAX_LINE_CHARS = 4000
MAX_CLIENT_LINE_CHARS = 1000
"""The same for lines that may contain what a client sent."""
BYTES_PER_REQUEST = 2000
BYTES_PER_S = 1000
BURST_BYTES = 64_000
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters except tab, line separators, and characters that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """The line without colours, with control characters escaped, and without its middle if it is too long."""
    if len(text) <= max_chars and text.isprintable():
        return text
    text = _COLOUR.sub("", text)
    if len(text) > max_chars:
        end = max_chars // 4
        text = f"{text[: max_chars - end]} [{len(text) - max_chars:,} characters left out] {text[-end:]}"
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class OutputLimit:
    """How much an engine may write to its log while clients use it: so much a second, and so much for each request.

    A client can then displace no more of the log than by sending ordinary requests.
    """

    def __init__(self, count_requests: Callable[[], int], now: float) -> None:
        """`count_requests` returns the number of requests that were sent to the engine."""
        self._count_requests = count_requests
        self._requests = count_requests()
        self._at = now
        self._level: float = BURST_BYTES

    def take(self, num_bytes: int, now: float) -> bool:
        """Whether a line of this length may be written."""
        requests = self._count_requests()
        granted = BYTES_PER_S * (now - self._at) + BYTES_PER_REQUEST * (requests - self._requests)
        self._at, self._requests = now, requests
        self._level = min(BURST_BYTES, self._level + granted)
        if self._level < num_bytes:
            return False
        self._level -= num_bytes
        return True


def format_log_entry(text: str, service: str | None = None) -> str:
    """An event as one line of JSON, for programs that collect logs."""
    at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": at, "service": service, "message": clean_line(text)}).decode()
