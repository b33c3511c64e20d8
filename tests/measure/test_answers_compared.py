"""Compare the answers of a challenger with those of the engine in service."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.changing.migrating import make_engine

from bedplate.measure.agreement import CompletionAnswer, FailedRequest, Reply
from bedplate.measure.answers import AnswerBasis, EngineAddress, as_known, check_against_incumbent, warm_up_engine
from bedplate.values import Plan, replace_fields
from bedplate.values.decision import Weights
from bedplate.values.migration import AnswerCheck, Stage

PREFIXES = [f"prefix {number}" for number in range(48)]
WORDS = (" river", " stone", " lamp", " cloud")


def choose_word(prefix: str, seed: str = "") -> str:
    return WORDS[hashlib.sha256(f"{seed}{prefix}".encode()).digest()[0] % 4]


@pytest.fixture
def plan(tmp_path: Path, bedplate_home: Path) -> Plan:
    return make_engine(tmp_path, "one").plan


def make_basis(plan: Plan, *, gap: float | None = 2.0, strips: bool = False, clear_known: bool = True) -> AnswerBasis:
    pairs = tuple((prefix, as_known(CompletionAnswer(text=choose_word(prefix)), gap, strips)) for prefix in PREFIXES)
    return AnswerBasis(plan, pairs, clear_known, strips, None)


def make_replies(wrong: int = 0) -> list[Reply]:
    return [
        CompletionAnswer(text=" wrong" if number < wrong else choose_word(prefix), made_tokens=1)
        for number, prefix in enumerate(PREFIXES)
    ]


def compare_with_incumbent(plan: Plan, basis: AnswerBasis, answers: Sequence[Reply], stage: Stage) -> AnswerCheck:
    return check_against_incumbent(plan, basis, basis.pairs, answers, stage)


def test_identical_answers_agree(plan: Plan) -> None:
    found = compare_with_incumbent(plan, make_basis(plan), make_replies(), "answers")
    assert (found.verdict, found.clear_agreed, found.against) == ("ok", 48, "the engine in service")


def test_different_answers_are_broken_and_the_reason_names_the_engine_in_service(plan: Plan) -> None:
    found = compare_with_incumbent(plan, make_basis(plan), make_replies(wrong=30), "answers")
    assert found.verdict == "broken" and "18 of 48 prefixes agree with the engine in service" in found.why


def test_near_ties_do_not_count(plan: Plan) -> None:
    found = compare_with_incumbent(plan, make_basis(plan, gap=0.1), make_replies(wrong=30), "answers")
    assert (found.verdict, found.clear) == ("unchecked", 0)


def test_four_bit_weights_allow_more_differences(plan: Plan) -> None:
    four = replace_fields(plan, weights=Weights(label="INT4", made="converted", format="onnx"))
    assert compare_with_incumbent(four, make_basis(plan), make_replies(wrong=20), "answers").verdict == "ok"
    assert compare_with_incumbent(plan, make_basis(plan), make_replies(wrong=20), "answers").verdict == "broken"
    assert compare_with_incumbent(four, make_basis(plan), make_replies(wrong=48), "answers").verdict == "broken"


def test_allows_near_ties_without_log_probabilities(plan: Plan) -> None:
    unclear = make_basis(plan, gap=None, clear_known=False)
    assert compare_with_incumbent(plan, unclear, make_replies(wrong=12), "answers").verdict == "ok"
    assert compare_with_incumbent(plan, unclear, make_replies(wrong=30), "answers").verdict == "broken"


def test_ignores_spaces_if_the_engine_strips_them(plan: Plan) -> None:
    assert compare_with_incumbent(plan, make_basis(plan, strips=True), make_replies(), "answers").verdict == "ok"


def test_an_engine_without_the_api_is_unchecked(plan: Plan) -> None:
    none = [FailedRequest(why="the endpoint has no completions API (HTTP 404)", lasting=True)] * 48
    found = compare_with_incumbent(plan, make_basis(plan), none, "answers")
    assert found.verdict == "unchecked" and found.floor is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (CompletionAnswer(text=" river"), "text"),
        (CompletionAnswer(text="", ended=True), "special"),
        (CompletionAnswer(text="\ufffd"), "part"),
        (CompletionAnswer(text=""), "part"),
    ],
)
def test_converts_an_answer_to_a_reference_answer(answer: CompletionAnswer, kind: str) -> None:
    assert as_known(answer, 1.0, False).kind == kind


def test_warm_up_reports_an_unreachable_engine() -> None:
    wrong = asyncio.run(warm_up_engine(EngineAddress("http://127.0.0.1:9", None, "alpha"), 2))
    assert wrong is not None and wrong.startswith("a warm-up request failed")
