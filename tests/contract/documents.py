"""Validates documents against the JSON Schemas that bedplate publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from bedplate.cli.schema import DOCUMENTS, Document, locate_schema

BY_NAME = {document.name: document for document in DOCUMENTS}


def read_schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(locate_schema(name).read_text(encoding="utf-8"))
    return found


def check_document(name: str, text: str) -> Any:
    """Check `text` against a schema without additional keys, and return the parsed document."""
    document = BY_NAME[name]
    parts = [json.loads(line) for line in text.splitlines()] if document.form == "lines" else [json.loads(text)]
    assert parts
    for part in parts:
        errors = [
            f"{error.json_path}: {error.message[:300]}" for error in _make_strict_validator(name).iter_errors(part)
        ]
        assert not errors, errors
    return parts if document.form == "lines" else parts[0]


@cache
def _make_strict_validator(name: str) -> Draft202012Validator:
    """Forbid additional keys, which published output schemas allow for later versions."""
    return Draft202012Validator(_forbid_additional_keys(read_schema(name)))


def _forbid_additional_keys(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_forbid_additional_keys(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _forbid_additional_keys(value) for key, value in schema.items()}
    named = isinstance(closed.get("properties"), dict) and closed.get("type") == "object"
    return {**closed, "additionalProperties": False} if named else closed


def list_keys(document: Document) -> Iterator[str]:
    """Every key of a document with its type, one per line. Embedded documents are listed under their own names."""
    schema = read_schema(document.name)
    yield from _lines(document.name, schema, schema, top=True)


def _lines(path: str, part: dict[str, Any], schema: dict[str, Any], *, top: bool = False) -> Iterator[str]:
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        for choice in part["anyOf"]:
            yield from _lines(path, choice, schema)
    elif isinstance(part.get("properties"), dict):
        version = part["properties"].get("schema", {}).get("enum", [None])[0]
        if version is not None and not top:
            yield f"{path}: {version}"
            return
        for key, value in part["properties"].items():
            yield from _lines(f"{path}.{key}", value, schema)
    elif part.get("type") == "array":
        items = part.get("prefixItems") or [part.get("items", {})]
        for number, item in enumerate(items):
            yield from _lines(f"{path}[{number if 'prefixItems' in part else ''}]", item, schema)
    elif isinstance(part.get("additionalProperties"), dict):
        yield from _lines(f"{path}.*", part["additionalProperties"], schema)
    elif "enum" in part:
        yield from (f"{path}: {value!r}" for value in part["enum"])
    else:
        yield f"{path}: {part.get('type', 'any')}"
