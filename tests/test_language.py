"""The phrases in tests/phrases.txt, which also lists replacements, are not used."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.sources import parse_source

ROOT = Path(__file__).parents[1]
PHRASES = ROOT / "tests" / "phrases.txt"

STORED = {"own defaults", "made of the same weights"}
"""Values in files that earlier versions wrote. They are compared, so they cannot be reworded."""


# reading


@cache
def read_phrases() -> tuple[str, ...]:
    lines = PHRASES.read_text(encoding="utf-8").splitlines()
    return tuple(line.lower() for line in lines if line.strip() and not line.startswith("#"))


def find_phrases(text: str) -> list[str]:
    """The phrases in a text, in any case and across line breaks; names in backquotes do not count."""
    flat = " ".join(re.sub(r"`[^`]*`", "``", text).lower().split())
    return [one for one in read_phrases() if one in flat and re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", flat)]


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def extract_python_text(source: str) -> str:
    """All strings of a module, docstrings included. A string without a space is a name: an option, a key, a metric."""
    strings = (node.value for node in ast.walk(parse_source(source)) if isinstance(node, ast.Constant))
    return "\n\0\n".join(one for one in strings if isinstance(one, str) and " " in one and one not in STORED)


def extract_notebook_text(source: str) -> str:
    cells = json.loads(source)["cells"]
    return "\n\0\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def list_texts() -> Iterator[tuple[str, str]]:
    """Path and text of everything to check; the fenced blocks of a page, which show output, are separate."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8")
        yield make_name(page), FENCED.sub("\0", text)
        yield f"{make_name(page)}#examples", "\n\0\n".join(FENCED.findall(text)).replace("`", "'")
    for notebook in sorted(ROOT.glob("docs/**/*.ipynb")):
        yield make_name(notebook), extract_notebook_text(notebook.read_text(encoding="utf-8"))
    for module in sorted(ROOT.glob("src/bedplate/**/*.py")):
        yield make_name(module), extract_python_text(module.read_text(encoding="utf-8"))


def make_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def find_all_phrases() -> dict[str, list[str]]:
    return {path: those for path, text in list_texts() if (those := find_phrases(text))}


# tests


def test_no_listed_phrase_is_used() -> None:
    assert not find_all_phrases(), "tests/phrases.txt says what to write instead"


@pytest.mark.parametrize("text", ["The engine's own defaults.", "Its OWN\n  Defaults", "own defaults:"])
def test_a_phrase_is_found_in_any_case_and_across_lines(text: str) -> None:
    assert find_phrases(text) == ["own defaults"]


@pytest.mark.parametrize(
    "text", ["`own defaults`", "--own-defaults", "own_defaults", "unown defaults", "own defaultsx"]
)
def test_names_and_parts_of_words_are_not_phrases(text: str) -> None:
    assert find_phrases(text) == []


def test_the_strings_of_a_module_are_read_and_its_names_are_not() -> None:
    source = '''"""Which limit\n    binds."""\nnames = {"in-turns": f"{1} are in " "turns"}\n'''
    assert find_phrases(extract_python_text(source)) == ["which limit binds", "in turns"]


def test_each_phrase_is_listed_once_in_lower_case_form() -> None:
    assert len(read_phrases()) > 100 and len(set(read_phrases())) == len(read_phrases())
    assert all(one == " ".join(one.split()) for one in read_phrases())
