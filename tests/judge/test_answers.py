"""Answers of two engines are worse, better, equivalent within a margin, or not proven."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import GOOD, Noise, make_pair

from bedplate.judge.answers import MARGINS, compare_answers, describe_interval
from bedplate.judge.compare import compare
from bedplate.values import replace_fields
from bedplate.values.run import Cell, Quality


def make_quality(right: int, asked: int, **other: object) -> Quality:
    return replace_fields(Quality(asked=asked, agreement=right / asked, verdict="ok"), **other)


def make_likelihood(perplexity: float, error: float | None) -> Quality:
    return Quality(verdict="ok", perplexity=perplexity, reference_perplexity=20.0, perplexity_error=error)


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome"),
    [
        ((128, 128), (128, 128), "equivalent"),
        ((128, 128), (122, 128), "equivalent"),
        ((126, 128), (119, 128), "not proven"),
        ((128, 128), (90, 128), "worse"),
        ((90, 128), (128, 128), "better"),
        ((48, 48), (48, 48), "equivalent"),
        ((48, 48), (46, 48), "not proven"),
        ((12, 12), (12, 12), "not proven"),
    ],
)
def test_agreement(mine: tuple[int, int], theirs: tuple[int, int], outcome: str) -> None:
    (found,) = compare_answers(make_quality(*mine), make_quality(*theirs))
    assert (found.metric, found.outcome, found.margin) == ("agreement", outcome, MARGINS["agreement"])
    assert found.change.low <= found.change.value <= found.change.high


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome"),
    [
        ((20.0, 0.001), (20.1, 0.001), "equivalent"),
        ((20.0, 0.001), (24.0, 0.001), "worse"),
        ((24.0, 0.001), (20.0, 0.001), "better"),
        ((20.0, 0.2), (24.0, 0.2), "not proven"),
        ((20.0, None), (24.0, None), "worse"),  # runs of earlier versions have no standard error
        ((20.0, None), (20.5, 0.01), "equivalent"),
    ],
)
def test_perplexity(mine: tuple[float, float | None], theirs: tuple[float, float | None], outcome: str) -> None:
    (found,) = compare_answers(make_likelihood(*mine), make_likelihood(*theirs))
    assert (found.metric, found.outcome) == ("perplexity", outcome)


@given(st.integers(1, 300), st.data())
def test_a_fraction_of_the_prompts_never_proves_more(asked: int, data: st.DataObject) -> None:
    """The interval of a side against itself contains zero, and narrows with the number of prompts."""
    right = data.draw(st.integers(0, asked))
    (one,) = compare_answers(make_quality(right, asked), make_quality(right, asked))
    (more,) = compare_answers(make_quality(4 * right, 4 * asked), make_quality(4 * right, 4 * asked))
    assert one.change.low <= 0 <= one.change.high and one.outcome in ("equivalent", "not proven")
    assert more.change.high - more.change.low <= one.change.high - one.change.low + 1e-9


def test_nothing_is_compared_without_a_reference() -> None:
    checked = make_quality(48, 48)
    for other in (None, Quality(), Quality(agreement=1.0, asked=48)):
        assert compare_answers(checked, other) == () == compare_answers(other, checked)


def faster(mine: Quality, theirs: Quality) -> tuple[list[Cell], list[Cell]]:
    one, other = make_pair(Noise(3), 1.3)
    return [replace_fields(cell, quality=mine) for cell in one], [
        replace_fields(cell, quality=theirs) for cell in other
    ]


def test_a_faster_engine_is_recommended_only_with_equivalent_answers() -> None:
    equivalent = compare(*faster(make_quality(128, 128), make_quality(126, 128)))
    assert equivalent.answer == "migrate" and equivalent.answers[0].outcome == "equivalent"
    unproven = compare(*faster(make_quality(48, 48), make_quality(44, 48)))
    assert (unproven.answer, unproven.constraint) == ("not proven", "quality") and "margin 10 points" in unproven.text
    assert unproven.worse is None and unproven.would_prove is not None and "more answers" in unproven.would_prove
    worse = compare(*faster(make_quality(128, 128), make_quality(90, 128)))
    assert (worse.answer, worse.constraint) == ("stay", "quality") and worse.worse is not None


def test_uncertain_perplexity_leaves_a_faster_engine_not_proven() -> None:
    known = replace_fields(GOOD, perplexity=20.0, reference_perplexity=20.0, perplexity_error=0.001)
    vague = replace_fields(known, perplexity=20.5, perplexity_error=0.1)
    assert compare(*faster(known, vague)).constraint == "quality"
    assert compare(*faster(known, replace_fields(vague, perplexity_error=0.001))).answer == "migrate"


def test_wording() -> None:
    (found,) = compare_answers(make_quality(128, 128), make_quality(122, 128))
    assert describe_interval(found) == "−10 … −1 points (95 % interval), margin 10 points"
    (words,) = compare_answers(make_likelihood(20.0, 0.001), make_likelihood(20.0 * math.exp(0.01), 0.001))
    assert describe_interval(words) == "−1 … −1 % (95 % interval), margin 5 %"
