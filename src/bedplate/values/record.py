"""The base class of all records: frozen, keyword-only, strict about unknown fields, with JSON in both directions."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from bedplate.errors import UsageError
from bedplate.values.quoting import escape_json_controls

Basis = Literal["measured", "reported", "spec", "estimate"]
"""Where a figure comes from.

measured: measured here. reported: from a driver or a file header. spec: from the vendor. estimate: computed.
"""

R = TypeVar("R", bound="Record")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that packages exchange."""


class Figure(Record, frozen=True, kw_only=True):
    """An inexact figure: its value, its range and its source."""

    value: float
    low: float
    high: float
    basis: Basis
    source: str | None = None


def make_estimate(value: float, spread: float, source: str | None = None) -> Figure:
    """An estimate with a range of ± `spread` (0.1 is 10 %)."""
    return Figure(value=value, low=value * (1 - spread), high=value * (1 + spread), basis="estimate", source=source)


def to_json(value: object, indent: int = 2) -> str:
    """Write JSON that can be printed: control characters in strings are escaped. A negative indent gives one line."""
    return escape_json_controls(msgspec.json.format(msgspec.json.encode(value), indent=indent).decode())


def from_json(kind: type[R], text: str | bytes, origin: str = "input") -> R:
    """Read a record from JSON. An error names the path of the field."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{origin} is not a valid {kind.__name__} for this version of bedplate",
            cause=str(error),
            hint="write the file again with this version; bedplate schema describes the formats",
        ) from error


def replace_fields(record: R, **changes: Any) -> R:
    return msgspec.structs.replace(record, **changes)
