"""A challenger's next tokens beside those of the engine in service: what stored bits explain, and what they do not."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.changing.migrating import made

from bedplate.measure.agreement import Answer, Failed, Reply
from bedplate.measure.answers import Basis, Where, against_incumbent, as_known, warmed
from bedplate.values import Plan, replaced
from bedplate.values.decision import Weights
from bedplate.values.migration import Checked, Stage

PREFIXES = [f"prefix {number}" for number in range(48)]
WORDS = (" river", " stone", " lamp", " cloud")


def word(prefix: str, seed: str = "") -> str:
    return WORDS[hashlib.sha256(f"{seed}{prefix}".encode()).digest()[0] % 4]


@pytest.fixture
def plan(tmp_path: Path, bedplate_home: Path) -> Plan:
    return made(tmp_path, "one").plan


def basis(plan: Plan, *, gap: float | None = 2.0, strips: bool = False, clear_known: bool = True) -> Basis:
    pairs = tuple((prefix, as_known(Answer(text=word(prefix)), gap, strips)) for prefix in PREFIXES)
    return Basis(plan, pairs, clear_known, strips, None)


def said(wrong: int = 0) -> list[Reply]:
    return [
        Answer(text=" wrong" if number < wrong else word(prefix), made_tokens=1)
        for number, prefix in enumerate(PREFIXES)
    ]


def compared(plan: Plan, held: Basis, answers: Sequence[Reply], stage: Stage) -> Checked:
    return against_incumbent(plan, held, held.pairs, answers, stage)


def test_the_same_answers_agree(plan: Plan) -> None:
    found = compared(plan, basis(plan), said(), "answers")
    assert (found.verdict, found.clear_agreed, found.against) == ("ok", 48, "the engine in service")


def test_other_answers_are_broken_and_the_words_name_the_engine_in_service(plan: Plan) -> None:
    found = compared(plan, basis(plan), said(wrong=30), "answers")
    assert found.verdict == "broken" and "18 of 48 prefixes agree with the engine in service" in found.why


def test_near_ties_do_not_count(plan: Plan) -> None:
    found = compared(plan, basis(plan, gap=0.1), said(wrong=30), "answers")
    assert (found.verdict, found.clear) == ("unchecked", 0)


def test_what_four_bits_explain_is_allowed(plan: Plan) -> None:
    four = replaced(plan, weights=Weights(label="INT4", made="converted", format="onnx"))
    assert compared(four, basis(plan), said(wrong=20), "answers").verdict == "ok"
    assert compared(plan, basis(plan), said(wrong=20), "answers").verdict == "broken"
    assert compared(four, basis(plan), said(wrong=48), "answers").verdict == "broken"


def test_without_log_probabilities_near_ties_are_allowed_for(plan: Plan) -> None:
    unclear = basis(plan, gap=None, clear_known=False)
    assert compared(plan, unclear, said(wrong=12), "answers").verdict == "ok"
    assert compared(plan, unclear, said(wrong=30), "answers").verdict == "broken"


def test_an_engine_that_strips_spaces_is_compared_without_them(plan: Plan) -> None:
    assert compared(plan, basis(plan, strips=True), said(), "answers").verdict == "ok"


def test_an_engine_without_the_api_is_unchecked(plan: Plan) -> None:
    none = [Failed(why="it has no completions API (HTTP 404)", lasting=True)] * 48
    found = compared(plan, basis(plan), none, "answers")
    assert found.verdict == "unchecked" and found.floor is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(text=" river"), "text"),
        (Answer(text="", ended=True), "special"),
        (Answer(text="\ufffd"), "part"),
        (Answer(text=""), "part"),
    ],
)
def test_what_an_engine_says_becomes_what_another_is_held_to(answer: Answer, kind: str) -> None:
    assert as_known(answer, 1.0, False).kind == kind


def test_warming_up_tells_of_an_engine_that_is_not_there() -> None:
    wrong = asyncio.run(warmed(Where("http://127.0.0.1:9", None, "alpha"), 2))
    assert wrong is not None and wrong.startswith("it did not answer a small request")
