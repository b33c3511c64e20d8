"""docs/advice.md: fifty questions, answered as the page says, and as the recipe of each allows."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CLASSES = {
    "Home GPUs", "Macs", "Laptops and edge", "Data-centre cards", "Mixtures of experts", "Several nodes",
    "Embeddings and rerankers", "Adapters", "Old cards", "CPU servers", "Mixed cards", "Other accelerators",
    "Air-gapped sites", "Limits",
}  # fmt: skip


@pytest.fixture(scope="module")
def advice() -> ModuleType:
    path = ROOT / "benchmarks" / "advice" / "write_page.py"
    spec = importlib.util.spec_from_file_location("write_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_today_s_answers_and_recipes_allow_them(advice: ModuleType) -> None:
    page, different = advice.write_page()
    assert different == []
    assert page == (ROOT / "docs" / "advice.md").read_text(encoding="utf-8"), "run `make advice`"


def test_there_are_fifty_questions_of_every_class(advice: ModuleType) -> None:
    questions = advice.read_questions()
    assert len(questions) == 50 == len({one.id for one in questions}) == len({one.question for one in questions})
    assert {one.kind for one in questions} == CLASSES


LINE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[\w./-]+(\?plain=1)?#L\d+")
PAGE = re.compile(r"https://(github\.com/[\w.-]+/[\w.-]+/pull/\d+|sbert\.net/docs/\S+)")


def test_every_check_cites_a_line_and_names_typed_fields(advice: ModuleType) -> None:
    for one in advice.read_questions():
        assert one.sources and all(LINE.fullmatch(text) or PAGE.fullmatch(text) for text in one.sources), one.id
        assert len(one.says) > 20, one.id
        assert "engine" in one.expect and set(one.expect) <= set(advice.EXPECTED), one.id


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", ["ollama"]), ("quantization", "Q2_K"), ("tensor", 64), ("cards", [3]), ("device", "xpu"),
        ("adapters", True), ("experts_in_ram", True), ("slots_at_least", 10_000), ("option", "--no-such-option"),
    ],
)  # fmt: skip
def test_an_answer_that_a_recipe_does_not_allow_is_found(advice: ModuleType, field: str, value: object) -> None:
    question = next(one for one in advice.read_questions() if one.id == "l4-8b")
    found = advice.answer(question)
    assert advice.list_differences(question, found) == []
    changed = replace(question, expect={**question.expect, field: value})
    assert len(advice.list_differences(changed, found)) == 1
