"""A build is correct if it answers like the packaged build and the reference, except for near ties."""

from __future__ import annotations

from bedplate.measure.agreement import CompletionAnswer, FailedRequest, Reply
from bedplate.measure.builds import judge_build
from bedplate.measure.reference import ReferenceAnswer

COUNT = 200
PAIRS = [
    (
        f"prefix number {number}",
        ReferenceAnswer(text=f" word{number}", kind="text", tokens=4, gap=0.1 if number % 10 == 0 else 3.0),
    )
    for number in range(COUNT)
]


def make_answers(*wrong: int) -> list[Reply]:
    return [
        CompletionAnswer(text=" another" if number in wrong else known.text, prompt_tokens=4, made_tokens=1)
        for number, (_, known) in enumerate(PAIRS)
    ]


def test_identical_answers_are_correct() -> None:
    found = judge_build(PAIRS, make_answers(), make_answers(), 0.97)
    assert found.runs and found.right
    assert "greedy-token agreement with the packaged build: 200/200" in found.why


def test_near_ties_may_differ() -> None:
    ties = range(0, COUNT, 10)
    found = judge_build(PAIRS, make_answers(*ties), make_answers(), 0.97)
    assert found.right and "180/200" in found.why and "the rest: 20 near-ties)" in found.why


def test_answers_unlike_the_packaged_build_are_wrong() -> None:
    """Rounding explains each one's difference from the reference, but not their difference from each other."""
    found = judge_build(PAIRS, make_answers(*range(1, 9)), make_answers(*range(11, 31)), 0.97)
    assert found.runs and not found.right
    assert "differently" in found.why and len(found.evidence) == 3 and "the packaged build" in found.evidence[0]


def test_answers_unlike_the_reference_are_wrong() -> None:
    found = judge_build(PAIRS, make_answers(*range(100)), make_answers(*range(100)), 0.97)
    assert not found.right and "wrong answers" in found.why
    assert found.evidence and "instead of ' word" in found.evidence[0]


def test_the_reference_decides_without_a_packaged_build() -> None:
    assert judge_build(PAIRS, make_answers(3), None, 0.97).right
    assert not judge_build(PAIRS, make_answers(*range(100)), None, 0.97).right


def test_a_build_that_does_not_answer_is_wrong() -> None:
    failed: list[Reply] = [FailedRequest(why="HTTP 500: no")] * COUNT
    found = judge_build(PAIRS, failed, make_answers(), 0.97)
    assert not found.right and "HTTP 500" in found.why
    assert judge_build(PAIRS, make_answers(), failed, 0.97).right  # the reference is enough
