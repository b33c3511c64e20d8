"""Tools and JSON schemas of generated requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ENUM_WORDS = 32
TOKENS_PER_ITEM = 4
"""A short word in quotes and a comma."""


def _make_tool(name: str, description: str, **parameters: int) -> dict[str, object]:
    """A tool with string parameters of limited length."""
    properties = {key: {"type": "string", "maxLength": length} for key, length in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _make_tool("read_file", "Read a text file.", path=60),
    _make_tool("search_text", "Find a text in all files.", text=60),
    _make_tool("edit_file", "Replace a text in a file.", path=60, old=200, new=200),
    _make_tool("run_command", "Run a shell command and return its output.", command=120),
)
TOOLS_JSON = msgspec.json.encode(TOOLS)


def make_schema_format(output_tokens: int, words: Sequence[str]) -> dict[str, object]:
    """The `response_format` of an answer of about this length: a list of a fixed number of known words."""
    count = max(1, (output_tokens - 6) // TOKENS_PER_ITEM)
    known = list(dict.fromkeys(words))[:ENUM_WORDS]
    items = {"type": "array", "items": {"enum": known}, "minItems": count, "maxItems": count}
    schema = {
        "type": "object", "properties": {"items": items}, "required": ["items"], "additionalProperties": False,
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
