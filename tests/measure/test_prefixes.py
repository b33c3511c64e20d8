"""The fixed prefixes: constant, whole words, various lengths."""

from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from bedplate.measure.prefixes import (
    LEAST_CHARACTERS,
    LENGTHS,
    choose_spread,
    cut_prefixes,
    list_fixed_prefixes,
    list_short_prefixes,
    read_reference_text,
)

ALL = "770b1add24a8"
ALL_SHORT = "0b59e5bb61b5"
"""Hashes of all prefixes. A reference is valid only for these, so both must change together."""


def test_more_than_five_hundred_different_prefixes() -> None:
    found = list_fixed_prefixes()
    assert len(set(found)) == len(found) >= 500


def test_prefixes_never_change() -> None:
    whole = hashlib.sha256("\0".join(list_fixed_prefixes()).encode()).hexdigest()
    assert whole.startswith(ALL)
    assert hashlib.sha256("\0".join(list_short_prefixes()).encode()).hexdigest().startswith(ALL_SHORT)


def test_prefixes_consist_of_whole_words() -> None:
    text = f" {read_reference_text()} "
    for prefix in list_fixed_prefixes():
        assert prefix == prefix.strip() and re.search(rf"(?<=\s){re.escape(prefix)}(?=\s)", text), prefix


def test_prefixes_have_various_lengths() -> None:
    lengths = sorted(len(prefix) for prefix in list_fixed_prefixes())
    assert lengths[0] < 25 and lengths[-1] > 700 and lengths[len(lengths) // 2] < 160


def test_short_prefixes_are_additional() -> None:
    found, text = list_short_prefixes(), f" {read_reference_text()} "
    assert len(found) > 400 and not set(found) & set(list_fixed_prefixes())
    assert sum(map(len, found)) < 30 * len(found)
    assert all(re.search(rf"(?<=\s){re.escape(prefix)}(?=\s)", text) for prefix in found)


def test_the_text_has_many_kinds_of_content() -> None:
    text = read_reference_text()
    for part in ("def ", "SELECT", '{"id"', "Straße", "fenêtre", "<li>", "User:", "- 2 kg", "π"):
        assert part in text


@given(st.text(max_size=400), st.integers(1, 40))
def test_any_text_can_be_cut(text: str, count: int) -> None:
    found = cut_prefixes(text, count)
    assert len(found) <= count and len(set(found)) == len(found)
    for piece in found:
        assert piece in text and piece == piece.strip() and len(piece) >= LEAST_CHARACTERS


@given(st.text(alphabet="ab é猫\n", min_size=2000, max_size=3000))
def test_no_piece_exceeds_its_length_except_for_a_long_word(text: str) -> None:
    longest_word = max((len(word) for word in text.split()), default=0)
    assert all(len(piece) <= max(LENGTHS) + longest_word for piece in cut_prefixes(text, 20))


@given(st.lists(st.integers(), max_size=50), st.integers(1, 60))
def test_spread_keeps_the_order_and_the_count(items: list[int], count: int) -> None:
    numbered = list(enumerate(items))
    found = choose_spread(numbered, count)
    assert list(found) == sorted(set(found)) and len(found) == min(count, len(items))
