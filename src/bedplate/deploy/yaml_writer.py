"""Writes YAML with comments: mappings, lists and scalars, and a comment above each annotated value."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH = 110
WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "inf", "nan"])
"""Words that some YAML parsers do not read as strings."""
PLAIN = re.compile(r"(?:--?)?[A-Za-z/_](?:[^\s#:\"'`\\]|:(?=\S)|(?<=\S) (?=\S)|(?<=[^\s])#)*")
QUANTITY = re.compile(r"(?:0|[1-9][0-9]*)(?:[KMGT]i|m|s|h)")


@dataclass(frozen=True)
class CommentedValue:
    """A value and the comment above it."""

    value: object
    text: str


def annotate(value: object, text: str) -> CommentedValue:
    return CommentedValue(value, text)


def write_document(value: Mapping[str, object], head: str = "") -> str:
    """Write one document, without entries that are `None`."""
    return "\n".join([*_write_comment(head, ""), *_write_mapping(value, "")]) + "\n"


def write_documents(values: Sequence[Mapping[str, object]], head: str = "") -> str:
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


def _write_comment(text: str, indent: str) -> list[str]:
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, WIDTH - len(indent)) or [""]]
    return [f"{indent}# {line}".rstrip() for line in lines]


def _write_mapping(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, noted in mapping.items():
        value = _unwrap(noted)
        if value is None:
            continue
        if isinstance(noted, CommentedValue):
            yield from _write_comment(noted.text, indent)
        yield from _write_entry(f"{indent}{_write_text(key)}:", value, indent)


def _write_entry(start: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and strip_comments(value):
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
        if isinstance(value, Mapping) and strip_comments(value):
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
        return _write_text(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _write_text(text: str) -> str:
    if QUANTITY.fullmatch(text) or (PLAIN.fullmatch(text) and text.lower() not in WORDS and text.isprintable()):
        return text
    if text.isprintable() and "'" not in text:
        return f"'{text}'" if '"' in text or "\\" in text else f'"{text}"'
    return f'"{"".join(map(_escape, text))}"'


def _escape(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return "\\n" if letter == "\n" else f"\\U{ord(letter):08X}"


def _is_block(text: str) -> bool:
    lines = text.removesuffix("\n").split("\n")
    return (
        len(lines) > 1
        and not text.startswith((" ", "\n"))
        and not text.endswith("\n\n")
        and all(line.isprintable() and line == line.rstrip() for line in lines)
    )
