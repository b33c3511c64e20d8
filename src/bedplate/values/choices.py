"""Choices as part of a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def join_with_or(choices: Iterable[str]) -> str:
    """“a, b or c”."""
    words = tuple(choices)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
