"""A build is right if it answers as the ready-made engine and the reference do, but for ties."""

from __future__ import annotations

from bedplate.measure.agreement import Answer, Failed, Reply
from bedplate.measure.builds import judged_build
from bedplate.measure.reference import Known

COUNT = 200
PAIRS = [
    (
        f"prefix number {number}",
        Known(text=f" word{number}", kind="text", tokens=4, gap=0.1 if number % 10 == 0 else 3.0),
    )
    for number in range(COUNT)
]


def answers(*wrong: int) -> list[Reply]:
    return [
        Answer(text=" another" if number in wrong else known.text, prompt_tokens=4, made_tokens=1)
        for number, (_, known) in enumerate(PAIRS)
    ]


def test_the_same_answers() -> None:
    found = judged_build(PAIRS, answers(), answers(), 0.97)
    assert found.runs and found.right
    assert "200 of 200 next tokens as the ready-made engine's" in found.why


def test_ties_may_turn() -> None:
    ties = range(0, COUNT, 10)
    found = judged_build(PAIRS, answers(*ties), answers(), 0.97)
    assert found.right and "180 of 200" in found.why and "the rest: 20 near-ties)" in found.why


def test_as_good_by_itself_but_not_as_the_ready_made_one() -> None:
    """Each is within what rounding explains, and both together are not."""
    found = judged_build(PAIRS, answers(*range(1, 9)), answers(*range(11, 31)), 0.97)
    assert found.runs and not found.right
    assert "differently" in found.why and len(found.evidence) == 3 and "the ready-made one" in found.evidence[0]


def test_wrong_by_the_reference() -> None:
    found = judged_build(PAIRS, answers(*range(100)), answers(*range(100)), 0.97)
    assert not found.right and "wrong answers" in found.why
    assert found.evidence and "and not ' word" in found.evidence[0]


def test_without_a_ready_made_one_the_reference_decides() -> None:
    assert judged_build(PAIRS, answers(3), None, 0.97).right
    assert not judged_build(PAIRS, answers(*range(100)), None, 0.97).right


def test_what_does_not_answer_is_not_right() -> None:
    failed: list[Reply] = [Failed(why="HTTP 500: no")] * COUNT
    found = judged_build(PAIRS, failed, answers(), 0.97)
    assert not found.right and "HTTP 500" in found.why
    assert judged_build(PAIRS, answers(), failed, 0.97).right  # the reference is enough
