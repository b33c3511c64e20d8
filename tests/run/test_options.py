"""The options of a launch are checked with the engine's own parser, once for each launch line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from bedplate.engines import Engine
from bedplate.run.environments import EngineEnvironment
from bedplate.run.options import check_options, find_problem, list_missing_options, split_command
from bedplate.values import Launch

PARSER = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--kind", choices=("a", "b"))
parser.parse_args(sys.argv[1:])
"""
HELP = """\
usage: engine [-h] [--port PORT] [--[no-]cache] [-ngl N, --n-gpu-layers N]

  --port PORT           port
  --cache, --no-cache
  -ngl N, --n-gpu-layers N
"""
ATTRIBUTE = """\
Traceback (most recent call last):
  File "<string>", line 8, in <module>
  File "bin/llama-server", line 73, in make_params
    p.hostnames = [options.host]
    ^^^^^^^^^^^
AttributeError: 'xllamacpp.xllamacpp.CommonParams' object has no attribute 'hostnames'
"""
UNKNOWN = """\
usage: api_server.py [-h] [--headless]
api_server.py: error: unrecognized arguments: --attn-dp-size 2
"""


class Parsing(Engine):
    id = "parsing"
    name = "Parsing"
    version = "1.0.0"
    option_check: ClassVar[str | None] = PARSER


def make_environment(folder: Path) -> EngineEnvironment:
    return EngineEnvironment(
        engine="parsing", version="1.0.0", path=str(folder), packages=(), python="3", made_at="now", disk_bytes=0,
        adopted=sys.executable,
    )  # fmt: skip


def test_accepted_options_are_counted(tmp_path: Path) -> None:
    found = check_options(Parsing(), make_environment(tmp_path), Launch(argv=("engine", "--port", "1", "--kind", "a")))
    assert found.accepted and found.text == "its own parser accepts all 2 options"


@pytest.mark.parametrize(
    ("words", "problem"),
    [(("--fast",), "--fast"), (("--kind", "c"), "invalid choice: 'c'"), (("--port", "x"), "invalid int value: 'x'")],
)
def test_rejected_option_is_named(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    found = check_options(Parsing(), make_environment(tmp_path), Launch(argv=("engine", *words)))
    assert not found.accepted and found.problem is not None and problem in found.problem


def test_a_parser_that_was_moved_rejects_nothing(tmp_path: Path) -> None:
    moved = type("Moved", (Parsing,), {"option_check": "from no_such_module import parser"})()
    found = check_options(moved, make_environment(tmp_path), Launch(argv=("engine", "--port", "1")))
    assert found.accepted is None and "No module named 'no_such_module'" in found.text


def test_a_launch_line_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, launch = make_environment(tmp_path), Launch(argv=("engine", "--port", "1"))
    first = check_options(Parsing(), environment, launch)
    monkeypatch.setattr("bedplate.run.options.run_child", lambda *words, **more: pytest.fail("it ran again"))
    assert check_options(Parsing(), environment, launch) == first


def test_without_a_parser_the_help_text_is_read(tmp_path: Path) -> None:
    monkeypatched = type("Helping", (Parsing,), {"option_check": None})()
    program = tmp_path / "programs" / "engine"
    program.parent.mkdir()
    program.write_text(f"print({HELP!r})\n")
    environment = make_environment(tmp_path)
    assert check_options(monkeypatched, environment, Launch(argv=("engine", "--port", "1", "--no-cache"))).accepted
    found = check_options(monkeypatched, environment, Launch(argv=("engine", "--ports", "1")))
    assert found.text == "its help text rejects an option: it has no option --ports"


def test_help_text_names_short_and_negated_options() -> None:
    assert list_missing_options(("--port", "8000", "-ngl", "9", "--no-cache", "-1", "--po", "x"), HELP) == ["--po"]


def test_problem_of_a_parser_is_its_last_error() -> None:
    assert find_problem(ATTRIBUTE) == "'xllamacpp.xllamacpp.CommonParams' object has no attribute 'hostnames'"
    assert find_problem(UNKNOWN) == "--attn-dp-size 2"
    assert find_problem("") == "it gave no reason"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"), 3),
        (("vllm", "serve", "m", "--port", "1"), 2),
        (("llama-server", "-m", "m.gguf"), 1),
    ],
)
def test_program_is_split_from_its_options(argv: tuple[str, ...], words: int) -> None:
    assert split_command(argv) == (argv[:words], argv[words:])
