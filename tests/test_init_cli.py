"""`bedplate init`: four questions, asked in a real terminal or answered by options."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import invoke
from tests.terminals import Terminal

from bedplate.decide.intent import read_intent


def test_the_four_questions_in_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    with Terminal("init", "-o", str(path)) as terminal:
        terminal.read_until(r"Which hardware\?.*\[this\]: ")
        terminal.type("eight potatoes\r")
        terminal.read_until("error: ")  # and the same question again
        terminal.read_until(r"Which hardware\?.*\[this\]: ")
        terminal.type("2x L40S\r")
        terminal.read_until(r"How many people use it\? \[1\]: ")
        terminal.type("50\r")
        terminal.read_until(r"How fast\?.*\[chat\]: ")
        terminal.type("300/40\r")
        terminal.read_until(r"Who operates it\?.*\[me\]: ")
        terminal.type("kubernetes\r")
        terminal.read_until("wrote ")
        assert terminal.wait() == 0
    intent = read_intent(path)
    assert intent.hardware == "2x L40S" and intent.workload.users == 50
    assert intent.workload.latency is not None and intent.workload.latency.ttft_ms == 300
    assert intent.operations.machinery == "kubernetes"


def test_each_question_and_its_longest_answer_fit_on_a_line(tmp_path: Path) -> None:
    answers = ("16x H100 SXM", "10000", "2000/100", "kubernetes")
    with Terminal("init", "-o", str(tmp_path / "bedplate.yaml")) as terminal:
        for answer in answers:
            terminal.read_until(r"\]: ")
            question = terminal.shown.rpartition("\n")[2]
            assert len(question + answer) < 80
            terminal.type(f"{answer}\r")
        assert terminal.wait() == 0


def test_leaving_a_question_writes_nothing(tmp_path: Path) -> None:
    """By Ctrl-D, which waits in the terminal until it is read; Ctrl-C takes the same way."""
    path = tmp_path / "bedplate.yaml"
    with Terminal("init", "-o", str(path)) as terminal:
        terminal.read_until(r"Which hardware\?.*\[this\]: ")
        terminal.type("\x04")
        assert terminal.wait() == 130 and "Aborted" not in terminal.shown
    assert not path.exists()


def test_options_answer_without_a_terminal_and_the_rest_is_default(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    answer = invoke("init", "llama3.1:8b", "--users", "20", "--latency", "fast", "-o", str(path))
    assert answer.code == 0 and f"bedplate plan -f {path}" in answer.out
    intent = read_intent(path)
    assert (intent.model, intent.hardware, intent.workload.users) == ("llama3.1:8b", None, 20)
    assert intent.workload.latency is not None and intent.workload.latency.tpot_ms == 50
    assert intent.operations.machinery == "none"


def test_an_existing_file_stays_without_force(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text("mine\n")
    answer = invoke("init", "-o", str(path))
    assert answer.code == 2 and "--force" in answer.err and path.read_text() == "mine\n"
    assert invoke("init", "-o", str(path), "--force").code == 0
    assert read_intent(path).workload.users == 1


@pytest.mark.parametrize("option", [("--hardware", "eight potatoes"), ("--latency", "soon"), ("--users", "many")])
def test_wrong_answers_write_nothing(option: tuple[str, str], tmp_path: Path) -> None:
    answer = invoke("init", *option, "-o", str(tmp_path / "x.yaml"))
    assert answer.code == 2 and not (tmp_path / "x.yaml").exists()


def test_the_file_can_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    assert invoke("init", "--hardware", "RTX 4090", "-o", str(path)).code == 0
    assert invoke("plan", "-f", str(path)).code == 0
