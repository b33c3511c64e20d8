"""Prints data that is not rendered, such as JSON or a log, without loading what draws on terminals."""

from __future__ import annotations

from bedplate.values.quoting import escape_controls


def print_text(text: str, end: str = "\n") -> None:
    """Print data, such as a table or a log, without its control characters."""
    print(escape_controls(text, keep="\n\t"), end=end, flush=True)  # noqa: T201
