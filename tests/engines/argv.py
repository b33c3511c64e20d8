"""Checks a command line, values included, against an engine's published options (tests/engines/options)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "options"
LISTS = frozenset(["--lora-modules", "--lora-paths", "--adapters"])
"""Options that are given several values."""
_CHECKS: dict[str, Any] = {"int": int, "float": float, "str": str, "json": json.loads}


def read_options(engine: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return facts


def parse_options(engine: str, words: Sequence[str]) -> dict[str, Any]:
    """The values of the options by their first name; AssertionError if the engine does not accept one."""
    facts = read_options(engine)
    known = {name: option for option in facts["options"] for name in option["names"]}
    found: dict[str, Any] = {"": []}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            found[""].append(word)
            continue
        assert word in known, f"{facts['engine']} {facts['version']} has no option {word}"
        option = known[word]
        first = option["names"][0]
        assert first not in found, f"{word} is given twice"
        if option["takes"] == 0:
            found[first] = True
            continue
        assert at < len(words) and not words[at].startswith("--"), f"{word} has no value"
        value = words[at]
        at += 1
        if "choices" in option:
            assert value in option["choices"], f"{word} does not accept {value!r}"
        found[first] = _CHECKS[option["type"]](value)
        if first in LISTS:
            while at < len(words) and not words[at].startswith("--"):
                at += 1
        elif option["takes"] == "+":
            assert at >= len(words) or words[at].startswith("--"), f"{word} would also take {words[at:][0]!r}"
    assert len(found[""]) == facts["positional"] or not facts["positional"], f"unexpected words: {found['']}"
    assert facts["positional"] or not found[""], f"unexpected words: {found['']}"
    return found
