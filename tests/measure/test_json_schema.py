"""The small schema validator agrees with a complete one on every keyword that the prompts use."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.measure.json_schema import UnknownKeyword, find_mismatch, parse_json
from bedplate.measure.structured_prompts import read_prompts

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 120), st.sampled_from([0.5, 5.0, 49.9]),
    st.sampled_from(["", "a", "open", "EUR", "LH456", "14:35", "2025-03-05", "2025-13-01", "20250305", "positive"]),
)  # fmt: skip
KEYS = st.sampled_from(
    ["name", "age", "price", "currency", "topics", "id", "shape", "radius", "date", "extra", "items"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


def list_schemas() -> list[dict[str, Any]]:
    return [
        *(one.schema for one in read_prompts().prompts if one.schema is not None),
        *(tool.parameters for tool in read_prompts().tools.values()),
        {"enum": [1, "a", None]}, {"const": True}, {"type": "integer", "minimum": 0, "maximum": 5},
        {"type": "number"}, {"type": ["string", "null"], "minLength": 1, "maxLength": 5},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1, "maxItems": 3},
        {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": True},
        {"anyOf": [{"type": "boolean"}, {"type": "object", "required": ["name"]}]},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,4}$"}, {"type": "string", "format": "date"},
    ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(VALUES, st.deferred(lambda: st.sampled_from(list_schemas())))
def test_agrees_with_a_complete_validator(value: Any, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert (find_mismatch(value, schema) is None) == validator.is_valid(value)


def test_names_the_place_of_the_mismatch() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    assert find_mismatch({"a": [1, "2"]}, schema) == "$.a[1] is not of type integer"
    assert find_mismatch({"b": 1}, {**schema, "required": ["a"]}) == "$.a is missing"
    assert find_mismatch({"b": 1}, {**schema, "additionalProperties": False}) == "$.b is not a property"


@pytest.mark.parametrize("schema", [{"oneOf": []}, {"format": "email"}, {"type": "text"}, {"additionalProperties": {}}])
def test_refuses_what_it_does_not_check(schema: dict[str, Any]) -> None:
    """A keyword that is not checked would count every answer as a match."""
    with pytest.raises(UnknownKeyword):
        find_mismatch("a", schema)


@pytest.mark.parametrize("text", ["", "NaN", "{", '{"a": 1} {"a": 1}', '```json\n{"a": 1}\n```', 'Sure! {"a": 1}'])
def test_text_around_json_is_not_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
