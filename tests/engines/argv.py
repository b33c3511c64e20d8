"""Holds a whole command line, values included, against an engine's published options (tests/engines/options)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "options"
_CHECKS: dict[str, Any] = {"int": int, "float": float, "str": str, "json": json.loads}


def published(engine: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return facts


def parsed(engine: str, words: Sequence[str]) -> dict[str, Any]:
    """What the options say, by their first name; anything that the engine would not take is an AssertionError."""
    facts = published(engine)
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
        assert at < len(words) and not words[at].startswith("--"), f"{word} lacks its value"
        value = words[at]
        at += 1
        if "choices" in option:
            assert value in option["choices"], f"{word} does not take {value!r}"
        found[first] = _CHECKS[option["type"]](value)
        if option["takes"] == "+":
            assert at >= len(words) or words[at].startswith("--"), f"{word} would take {words[at:][0]!r} too"
    assert len(found[""]) == facts["positional"] or not facts["positional"], f"stray words: {found['']}"
    assert facts["positional"] or not found[""], f"stray words: {found['']}"
    return found
