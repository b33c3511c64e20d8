"""Wrong command lines: one style of error, and a hint at what was meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.commands import all_commands, invoke, run
from tests.engines.plans import machine

from bedplate import decide, inspect, plan
from bedplate.errors import NotPossible
from bedplate.values import Workload


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("chat", "bedplate has no command 'chat'", "bedplate run"),
        ("chat llama3.1:8b", "bedplate has no command 'chat'", "bedplate run llama3.1:8b"),
        ("start -p 80", "bedplate has no command 'start'", "bedplate serve"),
        ("help serve", "bedplate has no command 'help'", "bedplate serve --help"),
        ("k8s", "bedplate has no command 'k8s'", "bedplate plan MODEL --emit kubernetes -o DIR"),
        ("srve --port 9000", "bedplate has no command 'srve'", "did you mean bedplate serve?"),
        ("8 H100 SXM", "bedplate has no command '8'", 'bedplate plan MODEL --hardware "8 H100 SXM"'),
        ("llama3.1:8b", "bedplate has no command 'llama3.1:8b'", "bedplate run llama3.1:8b"),
        ("qwen3", "bedplate has no command 'qwen3'", "bedplate run qwen3:4b, qwen3:8b or qwen3:14b"),
        ("install llama3.1:8b", "bedplate has no command 'install'", "bedplate pull llama3.1:8b"),
        ("install vllm", "bedplate has no command 'install'", "bedplate engines install ID"),
        ("update", "bedplate has no command 'update'", "uv tool upgrade bedplate"),
        ("plan m --emit k8s", "unknown target 'k8s'", "did you mean kubernetes? choose command, compose"),
        ("plan m --emit comand", "unknown target 'comand'", "did you mean command? choose command, compose"),
        ("plan m --emit helm", "unknown target 'helm'", "choose command, compose, kubernetes, dynamo or ray"),
        ("frobnicate", "bedplate has no command 'frobnicate'", "bedplate --help lists the commands"),
        ("plan --users many", "--users: 'many' is not an integer", "an integer of at least 1, such as --users 10"),
        ("plan --users 0", "--users: 0 is out of range", "an integer of at least 1"),
        ("serve --port 99999", "--port: 99999 is out of range", "an integer from 0 to 65535"),
        ("run m x --temperature nan", "--temperature: 'nan' is not a number", "a number from 0 to 2"),
        ("bench --price-per-hour inf", "--price-per-hour: 'inf' is not a number", "a number of at least 0"),
        ("plan --context 4k", "--context: '4k' is not an integer", "such as --context 4096"),
        ("bench --concurrency a,b", "--concurrency: 'a' is not a positive integer", "such as --concurrency 1,4,16"),
        ("plan --users", "--users needs a value", "bedplate plan --help"),
        ("plan m --hardware 8 H100 SXM", "unexpected argument 'H100 SXM'", '--hardware "8 H100 SXM"'),
        ("serve --prot 3", "bedplate serve has no option --prot", "did you mean --port"),
        ("plan --slo x", "bedplate plan has no option --slo", "--set ttft_ms=500"),
        ("plan --sol x", "bedplate plan has no option --sol", "bedplate plan --help lists the options"),
        ("plan m --hardware H999", "unknown chip “H999”", "docs/chips.md lists the known chips"),
        ("--foo", "bedplate has no option --foo", "bedplate --help"),
        ("stop a b", "bedplate stop: unexpected argument 'b'", "usage: bedplate stop [OPTIONS] [NAME]"),
        ("rm", "bedplate rm needs MODEL...", "usage: bedplate rm [OPTIONS] MODEL..."),
        ("completion", "bedplate completion needs SHELL", "SHELL; choose bash, zsh or fish"),
        ("models --task dance", "--task: 'dance' is not known", "choose generate, embed or classify"),
        ("models --hardware no.json", "cannot read no.json", "bedplate probe --json writes such a file"),
        ("plan -f no.yaml", "cannot read no.yaml", "bedplate init writes such a file"),
        ("plan --engine vlm", "no engine is called 'vlm'", "did you mean vllm"),
        ("plan llama3.1:9b", "llama3.1:9b is not on this machine", "did you mean llama3.1:8b or llama3.1:405b?"),
        ("serve --on mars", "--on: 'mars' is not known", "choose dynamo or ray"),
        ("engines instal vllm", "bedplate engines has no command 'instal'", "did you mean bedplate engines install?"),
        ("prepared rm x", "bedplate prepared has no command 'rm'", "did you mean bedplate prepared remove?"),
        ("keys delete x", "bedplate keys has no command 'delete'", "did you mean bedplate keys revoke?"),
        ("runs frob", "bedplate runs has no command 'frob'", "commands of bedplate runs: "),
    ],
)
def test_a_wrong_command_line_gets_a_hint(line: str, message: str, hint: str) -> None:
    answer = invoke(*line.split())
    assert answer.code == 2 and answer.out == ""
    said, _, hinted = answer.err.rpartition("\n")
    assert message in said and hint in hinted


def test_a_word_unlike_every_engine_suggests_none() -> None:
    answer = invoke("plan", "--engine", "nosuch")
    assert answer.code == 2 and "known: exllamav2" in answer.err and "did you mean" not in answer.err


def test_hardware_in_the_place_of_the_model_gets_a_hint() -> None:
    assert '--hardware "8 H100 SXM"' in invoke("plan", "8 H100 SXM").err


def test_a_file_or_folder_without_a_model_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a slash, which names of known models do not have either."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("hello")
    Path("folder").mkdir()
    for name, message in (("notes.txt", "is not a model file"), ("folder", "contains no model")):
        for verb in ("plan", "serve"):
            answer = invoke(verb, name)
            assert answer.code == 2 and message in answer.err and "expected: a .gguf file" in answer.err


def test_a_path_that_is_no_file_is_not_called_missing(tmp_path: Path) -> None:
    """The hint for a missing file would name the same path."""
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to("nowhere.gguf")
    for name, message in (("pipe.gguf", "is not a regular file"), ("link.gguf", "it points to nowhere.gguf")):
        answer = invoke("inspect", str(tmp_path / name))
        assert answer.code == 2 and message in answer.err and "there is no file" not in answer.err


def test_an_empty_address_does_not_mean_all_addresses() -> None:
    """An empty variable in a script would open the endpoint to the network."""
    answer = invoke("serve", "--host", "", "--port", "0")
    assert answer.code == 2 and "--host is empty" in answer.err and "0.0.0.0" in answer.err


@pytest.mark.parametrize("line", [("plan", ""), ("plan", "--set", "users=many"), ("plan", "--set", "users=[1]")])
def test_an_error_about_a_field_has_a_hint(line: tuple[str, ...]) -> None:
    answer = invoke(*line)
    assert answer.code == 2 and "docs/intent.md describes the fields" in answer.err


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


def test_a_reason_that_applies_to_every_engine_names_none() -> None:
    model, work = inspect("builtin"), Workload(prompt_tokens=10**8)
    with pytest.raises(NotPossible) as raised:
        plan(decide(machine("cpu"), model, work), model, work)
    assert str(raised.value.cause).startswith("requests have ")
