"""Lines of logs. Engines write what clients send, so a line is short and has no control characters."""

from __future__ import annotations

import re

MAX_LINE_CHARS = 4000
_END_CHARS = 1000
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters except tab, line separators, and characters that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean_line(text: str) -> str:
    """The line without colours, with control characters escaped, and without its middle if it is too long."""
    if len(text) <= MAX_LINE_CHARS and text.isprintable():
        return text
    text = _COLOUR.sub("", text)
    if len(text) > MAX_LINE_CHARS:
        left_out = len(text) - MAX_LINE_CHARS
        text = f"{text[: MAX_LINE_CHARS - _END_CHARS]} [{left_out:,} characters left out] {text[-_END_CHARS:]}"
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
