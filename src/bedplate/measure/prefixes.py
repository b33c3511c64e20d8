"""The fixed prefixes whose next token engines are asked for: cut out of a text of our own, always the same ones."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

PREFIXES = 560
LENGTHS = (24, 40, 64, 110, 160, 240, 400, 800)
"""Characters at the most, in turn: from a few words to about 200 tokens, short ones more often since they cost less."""
LEAST_CHARACTERS = 12
SHORT_PREFIXES = 480
SHORT_LENGTHS = (20, 26)
"""A few tokens each, so that engines that read slowly can be asked for hundreds, too."""

T = TypeVar("T")


def reference_text() -> str:
    return (importlib.resources.files("bedplate.measure") / "data" / "reference_text.txt").read_text(encoding="utf-8")


@functools.cache
def fixed_prefixes() -> tuple[str, ...]:
    return cut(reference_text(), PREFIXES)


def short_prefixes() -> tuple[str, ...]:
    """Others beside the fixed ones, all of them short."""
    fixed = set(fixed_prefixes())
    found = cut(reference_text(), SHORT_PREFIXES, SHORT_LENGTHS)
    return tuple(prefix for prefix in found if prefix not in fixed)


def cut(text: str, count: int, lengths: Sequence[int] = LENGTHS) -> tuple[str, ...]:
    """At most `count` different pieces that begin and end with whole words, spread over all of the text.

    They are cut by characters and not by tokens, so that they are the same for every tokenizer; each starts elsewhere,
    so that no cache of an engine answers for another.
    """
    words = [(found.start(), found.end()) for found in re.finditer(r"\S+", text)]
    starts = [start for start, _ in words]
    usable = [end for _, end in words if end - starts[0] >= LEAST_CHARACTERS]
    found: dict[str, None] = {}
    for number, end in enumerate(spread(usable, count)):
        length = lengths[number % len(lengths)]
        following = bisect_left(starts, end - length)
        start = starts[following] if following < len(starts) else end
        if end - start < LEAST_CHARACTERS:  # the last word alone fills it
            start = starts[bisect_right(starts, end - LEAST_CHARACTERS) - 1]
        found.setdefault(text[start:end])
    return tuple(found)


def spread(items: Sequence[T], count: int) -> tuple[T, ...]:
    """`count` of them at even distances, or all when there are fewer."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[number * len(items) // count] for number in range(count))


def prefix_hash(prefix: str) -> str:
    return hashlib.sha256(prefix.encode()).hexdigest()[:12]
