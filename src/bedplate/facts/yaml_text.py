"""The YAML of intents: plain scalars only, limited in size, with the line of each field.

This is a separate module because loading PyYAML takes longer than most plans.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from bedplate.errors import UsageError

MAX_CHARACTERS = 256 * 1024
MAX_NODES = 20_000
"""Keys and values after expanding aliases, because a few lines with aliases can expand to billions."""
MAX_DEPTH = 20
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
HINT = "docs/intent.md has examples; bedplate init writes an intent file"


class _Loader(yaml.SafeLoader):
    """Only YAML 1.2's plain scalars: `no` is text, 010 is not eight, 1:30 is not ninety, and 1e3 is a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Stop reading where the nesting is too deep: PyYAML takes seconds for some thousand levels."""
        if parent is not None and self.depth > MAX_DEPTH:
            raise UsageError(f"line {parent.start_mark.line + 1}: {TOO_DEEP}", hint=HINT)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
    "-+.0123456789",
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<")


def parse_yaml(text: str, origin: str) -> tuple[object, dict[str, int], str]:
    """The data, the line of each field, and the name of the source."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"{origin} has {len(text):,} characters; an intent may have at most {MAX_CHARACTERS:,}")
    if text.lstrip().startswith("{"):
        # JSON may be indented with tabs, which YAML forbids. A JSON string never contains a bare tab.
        text = text.replace("\t", " ")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            lines = _check_size(node, origin)
            data = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UsageError(f"{origin} is not YAML", cause=_describe_error(error), hint=HINT) from error
    except (RecursionError, ValueError, TypeError) as error:
        cause = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{origin} cannot be read", cause=cause, hint=HINT) from error
    return data, lines, origin


def _check_size(root: yaml.Node | None, origin: str) -> dict[str, int]:
    """Check the size of the expanded document before it is built. Returns the line of each field."""
    lines: dict[str, int] = {}
    if root is None:
        return lines
    visited = 0
    pending = [(root, "", 0)]
    while pending:
        node, path, depth = pending.pop()
        visited += 1
        if visited > MAX_NODES:
            raise UsageError(f"{origin} expands to more than {MAX_NODES:,} values through its aliases", hint=HINT)
        if depth > MAX_DEPTH:
            raise UsageError(f"{path}: {TOO_DEEP}", hint=HINT)
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            pending += [(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise UsageError(f"{path or 'a field'}: field names must be text", cause=f"line {line}")
                name = f"{path}.{key.value}" if path else str(key.value)
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise UsageError(f"{name}: given twice, in lines {seen[key.value]} and {line} of {origin}")
                seen[key.value] = line
                lines.setdefault(name, line)
                pending.append((value, name, depth + 1))
    return lines


def _describe_error(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())[:200]
