"""Detect garbled text: it repeats itself, or it is not a language. Pure; reports only clear cases."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

LEAST_WORDS = 12
LONGEST_UNIT = 4
LOOPING = 0.8
"""Share of the words in the loop. Small models repeat whole sentences in greedy decoding; that is not garbled."""
ODD = 0.35
UNREADABLE = 0.05
SCRIPTS = 4
SHOWN = 40
NO_CHARACTERS = ("Cc", "Cn", "Co")
"""Unicode categories: control, unassigned and private use."""


def find_garbling(text: str) -> str | None:
    """What is wrong with the text, in one clause; `None`: nothing obvious."""
    if not text.strip():
        return "the text is empty"
    bad = sum(map(_is_invalid_character, text))
    if bad / len(text) > UNREADABLE:
        return f"the text is garbled: {bad} of {len(text)} characters are invalid"
    words = text.split()
    if unit := find_loop(words):
        return f"the text is garbled: it repeats {_shorten(' '.join(unit))}"
    if len(words) < LEAST_WORDS:
        return None
    if len(find_scripts(text)) >= SCRIPTS:
        return f"the text is garbled: it mixes {len(find_scripts(text))} scripts, {_shorten(text)}"
    odd = [word for word in words if is_odd(word)]
    if len(odd) / len(words) > ODD:
        return f"the text is garbled: {_shorten(' '.join(odd))}"
    return None


def _is_invalid_character(character: str) -> bool:
    return character == "\ufffd" or (unicodedata.category(character) in NO_CHARACTERS and character not in "\n\r\t")


def find_loop(words: Sequence[str]) -> tuple[str, ...] | None:
    """The sequence of words that nearly all of the text repeats."""
    if len(words) < LEAST_WORDS:
        return None
    for size in range(1, LONGEST_UNIT + 1):
        units = Counter(tuple(words[at : at + size]) for at in range(0, len(words) - size + 1, size))
        unit, count = units.most_common(1)[0]
        if count > 2 and count * size >= LOOPING * len(words):
            return unit
    return None


def find_scripts(text: str) -> set[str]:
    """The scripts of its letters, each with at least two letters."""
    found = Counter(
        unicodedata.name(letter, "").split(" ")[0] for letter in text if letter.isalpha() and not letter.isascii()
    )
    latin = sum(letter.isascii() and letter.isalpha() for letter in text)
    # Japanese text uses three scripts.
    names = Counter({"LATIN": latin})
    for name, count in found.items():
        names["EAST ASIAN" if name in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL") else name] += count
    return {name for name, count in names.items() if count >= 2}


def is_odd(word: str) -> bool:
    """Whether a word is not from a language: capitals inside, or digits or symbols among letters."""
    bare = word.strip("\"'“”‘’()[]{}<>*_`#.,;:!?…–—-")
    if len(bare) < 2 or (bare.isalpha() and (bare.islower() or bare.istitle() or bare.isupper())):
        return len(bare) > 24 and bare.isascii()
    if re.fullmatch(r"[\d.,:/%€$£-]+", bare) or re.fullmatch(r"[^\W\d_]+(?:['’\-/][^\W\d_]+)*", bare):
        return any(before.islower() and after.isupper() for before, after in itertools.pairwise(bare))
    return any(letter.isalpha() for letter in bare)


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= SHOWN else f"{flat[:SHOWN]}…")
