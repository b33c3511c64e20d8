"""Wrong command lines: one style of error, and a hint at what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import all_commands, invoke, run


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("chat", "bedplate has no command 'chat'", "bedplate run"),
        ("k8s", "bedplate has no command 'k8s'", "bedplate plan MODEL --emit kubernetes -o DIR"),
        ("srve --port 9000", "bedplate has no command 'srve'", "did you mean bedplate serve?"),
        ("8 H100 SXM", "bedplate has no command '8'", 'bedplate plan MODEL --hardware "8 H100 SXM"'),
        ("llama3.1:8b", "bedplate has no command 'llama3.1:8b'", "bedplate run llama3.1:8b"),
        ("frobnicate", "bedplate has no command 'frobnicate'", "bedplate --help lists the commands"),
        ("plan --users many", "--users: 'many' is not an integer", "an integer of at least 1, such as --users 10"),
        ("plan --users 0", "--users: 0 is out of range", "an integer of at least 1"),
        ("serve --port 99999", "--port: 99999 is out of range", "an integer from 0 to 65535"),
        ("plan --users", "--users needs a value", "bedplate plan --help"),
        ("plan m --hardware 8 H100 SXM", "unexpected argument 'H100 SXM'", '--hardware "8 H100 SXM"'),
        ("serve --prot 3", "bedplate serve has no option --prot", "did you mean --port"),
        ("plan --slo x", "bedplate plan has no option --slo", "--set ttft_ms=500"),
        ("plan --sol x", "bedplate plan has no option --sol", "bedplate plan --help lists the options"),
        ("plan m --hardware H999", "unknown chip “H999”", "docs/chips.md lists the known chips"),
        ("--foo", "bedplate has no option --foo", "bedplate --help"),
        ("stop a b", "bedplate stop: unexpected argument 'b'", "usage: bedplate stop [OPTIONS] [NAME]"),
        ("rm", "bedplate rm needs MODEL...", "usage: bedplate rm [OPTIONS] MODEL..."),
        ("serve --on mars", "--on: 'mars' is not known", "choose dynamo or ray"),
        ("engines instal vllm", "bedplate engines has no command 'instal'", "did you mean bedplate engines install?"),
        ("runs frob", "bedplate runs has no command 'frob'", "commands of bedplate runs: "),
    ],
)
def test_a_wrong_command_line_gets_a_hint(line: str, message: str, hint: str) -> None:
    answer = invoke(*line.split())
    assert answer.code == 2 and answer.out == ""
    said, _, hinted = answer.err.rpartition("\n")
    assert message in said and hint in hinted


def test_hardware_in_the_place_of_the_model_gets_a_hint() -> None:
    assert '--hardware "8 H100 SXM"' in invoke("plan", "8 H100 SXM").err


def test_a_file_or_folder_without_a_model_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a slash, which names of known models do not have either."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("hello")
    Path("folder").mkdir()
    for name, message in (("notes.txt", "is not a model file"), ("folder", "contains no model")):
        answer = invoke("plan", name)
        assert answer.code == 2 and message in answer.err and "expected: a .gguf file" in answer.err


def test_an_intent_file_in_the_place_of_the_model_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a platform.yaml").write_text("model: Qwen/Qwen3-8B")
    answer = invoke("plan", str(tmp_path / "a platform.yaml"))
    assert answer.code == 2 and "is not a model file" in answer.err and "--file '/" in answer.err.replace("\n", " ")


def test_errors_have_one_style() -> None:
    """click's own would begin with a usage line."""
    answer = run("plan", "--users", "many")
    assert answer.code == 2 and answer.out == ""
    assert answer.err == (
        "error: --users: 'many' is not an integer\nhint: --users takes an integer of at least 1, such as --users 10\n"
    )


@pytest.mark.parametrize("path", [path for path, _ in all_commands() if path], ids=" ".join)
def test_every_command_reports_an_unknown_option_alike(path: tuple[str, ...]) -> None:
    answer = invoke(*path, "--no-such-option")
    assert answer.code == 2 and f"bedplate {' '.join(path)} has no option --no-such-option" in answer.err
