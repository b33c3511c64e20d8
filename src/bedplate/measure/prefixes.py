"""The fixed prefixes for greedy-token agreement, cut from a shipped text. They are always the same."""

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
"""Maximum lengths in characters, used cyclically: a few words to about 200 tokens, mostly short ones."""
LEAST_CHARACTERS = 12
SHORT_PREFIXES = 480
SHORT_LENGTHS = (20, 26)
"""A few tokens each, so that hundreds of them are feasible on engines with slow prefill."""

T = TypeVar("T")


def read_reference_text() -> str:
    return (importlib.resources.files("bedplate.measure") / "data" / "reference_text.txt").read_text(encoding="utf-8")


@functools.cache
def list_fixed_prefixes() -> tuple[str, ...]:
    return cut_prefixes(read_reference_text(), PREFIXES)


def list_short_prefixes() -> tuple[str, ...]:
    """Additional prefixes, all of them short."""
    fixed = set(list_fixed_prefixes())
    found = cut_prefixes(read_reference_text(), SHORT_PREFIXES, SHORT_LENGTHS)
    return tuple(prefix for prefix in found if prefix not in fixed)


def cut_prefixes(text: str, count: int, lengths: Sequence[int] = LENGTHS) -> tuple[str, ...]:
    """At most `count` different pieces of whole words, evenly distributed over the text.

    They are cut by characters, so that they are the same for every tokenizer. Each starts at another place, so that a
    prefix cache has no effect.
    """
    words = [(found.start(), found.end()) for found in re.finditer(r"\S+", text)]
    starts = [start for start, _ in words]
    usable = [end for _, end in words if end - starts[0] >= LEAST_CHARACTERS]
    found: dict[str, None] = {}
    for number, end in enumerate(choose_spread(usable, count)):
        length = lengths[number % len(lengths)]
        following = bisect_left(starts, end - length)
        start = starts[following] if following < len(starts) else end
        if end - start < LEAST_CHARACTERS:  # only the last word fits
            start = starts[bisect_right(starts, end - LEAST_CHARACTERS) - 1]
        found.setdefault(text[start:end])
    return tuple(found)


def choose_spread(items: Sequence[T], count: int) -> tuple[T, ...]:
    """`count` items at even distances, or all if there are fewer."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[number * len(items) // count] for number in range(count))


def hash_prefix(prefix: str) -> str:
    return hashlib.sha256(prefix.encode()).hexdigest()[:12]
