"""Check a JSON value against a JSON schema, for the keywords that bedplate's own prompts use."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
ANNOTATIONS = frozenset(["title", "description", "default", "examples"])


class UnknownKeyword(ValueError):
    """A schema uses a keyword that is not checked here."""


def parse_json(text: str) -> Any:
    """Raises ValueError for anything but one JSON value; NaN and Infinity are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def find_mismatch(value: Any, schema: Schema, path: str = "$") -> str | None:
    """The first mismatch, with its path; `None` if the value matches. Raises UnknownKeyword."""
    return next(list_mismatches(value, schema, path), None)


def list_mismatches(value: Any, schema: Schema, path: str = "$") -> Iterator[str]:
    unknown = sorted(set(schema) - CHECKS.keys() - ANNOTATIONS)
    if unknown:
        raise UnknownKeyword(f"{path}: the keyword {unknown[0]} is not checked")
    for keyword, wanted in schema.items():
        if keyword in CHECKS:
            yield from CHECKS[keyword](value, wanted, schema, path)


def is_equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1, and 1.0 is 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_type(value: Any, name: str) -> bool:
    if name == "integer":
        return is_number(value) and math.isfinite(value) and value == int(value)
    if name == "number":
        return is_number(value)
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str, "boolean": bool, "array": list, "object": dict, "null": type(None),
    }  # fmt: skip
    if name not in kinds:
        raise UnknownKeyword(f"the type {name} is not known")
    return isinstance(value, kinds[name])


# keywords


def _check_type(value: Any, wanted: str | list[str], schema: Schema, path: str) -> Iterator[str]:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not any(_is_of_type(value, name) for name in names):
        yield f"{path} is not of type {' or '.join(names)}"


def _check_enum(value: Any, wanted: list[Any], schema: Schema, path: str) -> Iterator[str]:
    if not any(is_equal(value, one) for one in wanted):
        yield f"{path} is not one of {', '.join(map(str, wanted))}"


def _check_const(value: Any, wanted: Any, schema: Schema, path: str) -> Iterator[str]:
    if not is_equal(value, wanted):
        yield f"{path} is not {wanted}"


def _check_properties(value: Any, wanted: Mapping[str, Schema], schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in wanted.items():
            if name in value:
                yield from list_mismatches(value[name], part, f"{path}.{name}")


def _check_required(value: Any, wanted: list[str], schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{path}.{name} is missing" for name in wanted if name not in value)


def _check_additional(value: Any, wanted: bool, schema: Schema, path: str) -> Iterator[str]:
    if not isinstance(wanted, bool):
        raise UnknownKeyword(f"{path}: additionalProperties is only checked as true or false")
    if isinstance(value, dict) and not wanted:
        yield from (f"{path}.{name} is not a property" for name in value if name not in schema.get("properties", {}))


def _check_items(value: Any, wanted: Schema, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from list_mismatches(item, wanted, f"{path}[{number}]")


def _check_unique(value: Any, wanted: bool, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, list) and wanted:
        for number, item in enumerate(value):
            if any(is_equal(item, other) for other in value[:number]):
                yield f"{path}[{number}] is not unique"


def _check_any_of(value: Any, wanted: list[Schema], schema: Schema, path: str) -> Iterator[str]:
    if all(find_mismatch(value, one, path) for one in wanted):
        yield f"{path} matches none of {len(wanted)} alternatives"


def _check_minimum(value: Any, wanted: float, schema: Schema, path: str) -> Iterator[str]:
    if is_number(value) and value < wanted:
        yield f"{path} is below {wanted}"


def _check_maximum(value: Any, wanted: float, schema: Schema, path: str) -> Iterator[str]:
    if is_number(value) and value > wanted:
        yield f"{path} is above {wanted}"


def _check_min_length(value: Any, wanted: int, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, str) and len(value) < wanted:
        yield f"{path} has fewer than {wanted} characters"


def _check_max_length(value: Any, wanted: int, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, str) and len(value) > wanted:
        yield f"{path} has more than {wanted} characters"


def _check_min_items(value: Any, wanted: int, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, list) and len(value) < wanted:
        yield f"{path} has fewer than {wanted} items"


def _check_max_items(value: Any, wanted: int, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, list) and len(value) > wanted:
        yield f"{path} has more than {wanted} items"


def _check_pattern(value: Any, wanted: str, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, str) and re.search(wanted, value) is None:
        yield f"{path} does not match {wanted}"


def _check_format(value: Any, wanted: str, schema: Schema, path: str) -> Iterator[str]:
    if wanted != "date":
        raise UnknownKeyword(f"{path}: the format {wanted} is not checked")
    if isinstance(value, str) and not _is_date(value):
        yield f"{path} is not a date"


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII) is not None


CHECKS = {
    "type": _check_type, "enum": _check_enum, "const": _check_const, "properties": _check_properties,
    "required": _check_required, "additionalProperties": _check_additional, "items": _check_items,
    "uniqueItems": _check_unique, "anyOf": _check_any_of, "minimum": _check_minimum, "maximum": _check_maximum,
    "minLength": _check_min_length, "maxLength": _check_max_length, "minItems": _check_min_items,
    "maxItems": _check_max_items, "pattern": _check_pattern, "format": _check_format,
}  # fmt: skip
