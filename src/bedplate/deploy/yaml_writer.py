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
class Why:
    """A value and the comment above it."""

    value: object
    text: str


def why(value: object, text: str) -> Why:
    return Why(value, text)


def document(value: Mapping[str, object], head: str = "") -> str:
    """Write one document, without entries that are `None`."""
    return "\n".join([*_comment(head, ""), *_mapping(value, "")]) + "\n"


def documents(values: Sequence[Mapping[str, object]], head: str = "") -> str:
    """Write several documents into one file."""
    first = "".join(f"{line}\n" for line in _comment(head, ""))
    return first + "---\n".join(document(value) for value in values)


def plain(value: object) -> object:
    """Return the data as a parser of the file reads it: without comments and without `None` entries."""
    if isinstance(value, Why):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items() if _bare(inner) is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return value


def _bare(value: object) -> object:
    return _bare(value.value) if isinstance(value, Why) else value


def _comment(text: str, indent: str) -> list[str]:
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, WIDTH - len(indent)) or [""]]
    return [f"{indent}# {line}".rstrip() for line in lines]


def _mapping(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, noted in mapping.items():
        value = _bare(noted)
        if value is None:
            continue
        if isinstance(noted, Why):
            yield from _comment(noted.text, indent)
        yield from _entry(f"{indent}{_text(key)}:", value, indent)


def _entry(start: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and plain(value):
        yield start
        yield from _mapping(value, f"{indent}  ")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        yield start
        yield from _items(value, f"{indent}  ")
    elif isinstance(value, str) and _is_block(value):
        yield f"{start} {'|' if value.endswith(chr(10)) else '|-'}"
        yield from (f"{indent}  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{start} {_scalar(value)}"


def _items(items: Sequence[object], indent: str) -> Iterator[str]:
    for noted in items:
        value = _bare(noted)
        if isinstance(noted, Why):
            yield from _comment(noted.text, indent)
        if isinstance(value, Mapping) and plain(value):
            yield from _dashed(list(_mapping(value, f"{indent}  ")), indent)
        else:
            yield from _entry(f"{indent}-", value, indent)


def _dashed(lines: list[str], indent: str) -> Iterator[str]:
    """Put the dash on the first line that is not a comment; comments before it stay above."""
    first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (line[2:] for line in lines[:first])
    yield f"{indent}- {lines[first][len(indent) + 2 :]}"
    yield from lines[first + 1 :]


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _text(text: str) -> str:
    if QUANTITY.fullmatch(text) or (PLAIN.fullmatch(text) and text.lower() not in WORDS and text.isprintable()):
        return text
    if text.isprintable() and "'" not in text:
        return f"'{text}'" if '"' in text or "\\" in text else f'"{text}"'
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(letter: str) -> str:
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
