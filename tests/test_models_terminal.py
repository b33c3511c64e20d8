"""`bedplate models` in a real terminal."""

from __future__ import annotations

import sys

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)
from tests.terminals import CTRL_C, DOWN, ENTER, Terminal

CARD = ("models", "--hardware", "RTX 4090")


def test_person_sorts_searches_and_plans_a_model() -> None:
    with Terminal(*CARD, "--search", "qwen3") as terminal:
        terminal.read_until(r"1 of \d\d+ · .*4090")
        terminal.type("s")
        terminal.read_until("sort speed")
        terminal.type("/qwen3-8b" + ENTER)
        terminal.read_until(r"search qwen3-8b\b(?!▏)")
        terminal.type(DOWN + ENTER)
        shown = terminal.read_until(r"\$ bedplate plan Qwen/Qwen3-8B --hardware 'RTX 4090' --context 8192")
        assert "Enter plan" in shown
        terminal.read_until("Launch|launch")
        assert terminal.wait() == 0


def test_ctrl_c_leaves_the_list_and_restores_the_terminal() -> None:
    with Terminal(*CARD, "--search", "qwen3-8b") as terminal:
        terminal.read_until("q quit")
        terminal.type(DOWN + CTRL_C)
        assert terminal.wait() == 0


@pytest.mark.parametrize("option", [["--plain"], ["--limit", "3"]])
def test_list_is_printed_when_asked_for(option: list[str]) -> None:
    with Terminal(*CARD, "--search", "qwen3-8b", *option) as terminal:
        terminal.read_until("known models run here")
        terminal.read_until("Next  bedplate plan")
        assert terminal.wait() == 0


def test_terminal_without_cursor_movements_gets_the_list() -> None:
    with Terminal(*CARD, "--search", "qwen3-8b", env={"TERM": "dumb"}) as terminal:
        terminal.read_until("Next  bedplate plan")
        assert terminal.wait() == 0
