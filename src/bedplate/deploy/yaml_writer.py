"""Writes YAML with comments: mappings, lists and scalars, and a comment above each annotated value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bedplate.values.quoting import escape_controls, quote_yaml

WIDTH = 110
Comment = str | Sequence[str]
"""One line, or several. A line break in a text is escaped: only this module ends a comment."""


@dataclass(frozen=True)
class CommentedValue:
    """A value and the comment above it."""

    value: object
    text: Comment


def annotate(value: object, text: Comment) -> CommentedValue:
    return CommentedValue(value, text)


def write_document(value: Mapping[str, object], head: Comment = ()) -> str:
    """Write one document, without entries that are `None`."""
    return "\n".join([*_write_comment(head, ""), *_write_mapping(value, "")]) + "\n"


def write_documents(values: Sequence[Mapping[str, object]], head: Comment = ()) -> str:
    """Write several documents into one file."""
    first = "".join(f"{line}\n" for line in _write_comment(head, ""))
    return first + "---\n".join(write_document(value) for value in values)


def strip_comments(value: object) -> object:
    """Return the data as a parser of the file reads it: without comments and without `None` entries."""
    if isinstance(value, CommentedValue):
        return strip_comments(value.value)
    if isinstance(value, Mapping):
        return {key: strip_comments(inner) for key, inner in value.items() if _unwrap(inner) is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [strip_comments(inner) for inner in value]
    return value


def _unwrap(value: object) -> object:
    return _unwrap(value.value) if isinstance(value, CommentedValue) else value


def _has_entries(mapping: Mapping[str, object]) -> bool:
    return any(_unwrap(inner) is not None for inner in mapping.values())


def _write_comment(text: Comment, indent: str) -> list[str]:
    lines = [escape_controls(line) for line in ([text] if isinstance(text, str) else text)]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH - len(indent)) or [""]]
    return [f"{indent}# {line}".rstrip() for line in wrapped]


def _write_mapping(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, noted in mapping.items():
        value = _unwrap(noted)
        if value is None:
            continue
        if isinstance(noted, CommentedValue):
            yield from _write_comment(noted.text, indent)
        yield from _write_entry(f"{indent}{quote_yaml(key)}:", value, indent)


def _write_entry(start: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and _has_entries(value):
        yield start
        yield from _write_mapping(value, f"{indent}  ")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        yield start
        yield from _write_items(value, f"{indent}  ")
    elif isinstance(value, str) and _is_block(value):
        yield f"{start} {'|' if value.endswith(chr(10)) else '|-'}"
        yield from (f"{indent}  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{start} {_write_scalar(value)}"


def _write_items(items: Sequence[object], indent: str) -> Iterator[str]:
    for noted in items:
        value = _unwrap(noted)
        if isinstance(noted, CommentedValue):
            yield from _write_comment(noted.text, indent)
        if isinstance(value, Mapping) and _has_entries(value):
            yield from _add_dash(list(_write_mapping(value, f"{indent}  ")), indent)
        else:
            yield from _write_entry(f"{indent}-", value, indent)


def _add_dash(lines: list[str], indent: str) -> Iterator[str]:
    """Put the dash on the first line that is not a comment; comments before it stay above."""
    first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (line[2:] for line in lines[:first])
    yield f"{indent}- {lines[first][len(indent) + 2 :]}"
    yield from lines[first + 1 :]


def _write_scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quote_yaml(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _is_block(text: str) -> bool:
    lines = text.removesuffix("\n").split("\n")
    return (
        len(lines) > 1
        and not text.startswith((" ", "\n"))
        and not text.endswith("\n\n")
        and all(line.isprintable() and line == line.rstrip() for line in lines)
    )
