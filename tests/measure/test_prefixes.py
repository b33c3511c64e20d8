"""The fixed prefixes: the same ones always, whole words, short and long."""

from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from bedplate.measure.prefixes import (
    LEAST_CHARACTERS,
    LENGTHS,
    cut,
    fixed_prefixes,
    reference_text,
    short_prefixes,
    spread,
)

ALL = "770b1add24a8"
ALL_SHORT = "0b59e5bb61b5"
"""What all of them hash to: a reference is of no use when they change, so that both must change together."""


def test_there_are_more_than_five_hundred_different_ones() -> None:
    found = fixed_prefixes()
    assert len(set(found)) == len(found) >= 500


def test_they_are_the_same_ones_always() -> None:
    whole = hashlib.sha256("\0".join(fixed_prefixes()).encode()).hexdigest()
    assert whole.startswith(ALL)
    assert hashlib.sha256("\0".join(short_prefixes()).encode()).hexdigest().startswith(ALL_SHORT)


def test_they_begin_and_end_with_whole_words() -> None:
    text = f" {reference_text()} "
    for prefix in fixed_prefixes():
        assert prefix == prefix.strip() and re.search(rf"(?<=\s){re.escape(prefix)}(?=\s)", text), prefix


def test_they_are_short_and_long() -> None:
    lengths = sorted(len(prefix) for prefix in fixed_prefixes())
    assert lengths[0] < 25 and lengths[-1] > 700 and lengths[len(lengths) // 2] < 160


def test_the_short_ones_are_others_and_hundreds() -> None:
    found, text = short_prefixes(), f" {reference_text()} "
    assert len(found) > 400 and not set(found) & set(fixed_prefixes())
    assert sum(map(len, found)) < 30 * len(found)
    assert all(re.search(rf"(?<=\s){re.escape(prefix)}(?=\s)", text) for prefix in found)


def test_the_text_is_of_many_kinds() -> None:
    text = reference_text()
    for part in ("def ", "SELECT", '{"id"', "Straße", "fenêtre", "<li>", "User:", "- 2 kg", "π"):
        assert part in text


@given(st.text(max_size=400), st.integers(1, 40))
def test_any_text_can_be_cut(text: str, count: int) -> None:
    found = cut(text, count)
    assert len(found) <= count and len(set(found)) == len(found)
    for piece in found:
        assert piece in text and piece == piece.strip() and len(piece) >= LEAST_CHARACTERS


@given(st.text(alphabet="ab é猫\n", min_size=2000, max_size=3000))
def test_none_is_longer_than_asked_unless_a_single_word_is(text: str) -> None:
    longest_word = max((len(word) for word in text.split()), default=0)
    assert all(len(piece) <= max(LENGTHS) + longest_word for piece in cut(text, 20))


@given(st.lists(st.integers(), max_size=50), st.integers(1, 60))
def test_what_is_spread_is_in_order_and_as_many(items: list[int], count: int) -> None:
    numbered = list(enumerate(items))
    found = spread(numbered, count)
    assert list(found) == sorted(set(found)) and len(found) == min(count, len(items))
