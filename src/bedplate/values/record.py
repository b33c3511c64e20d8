"""What every value has in common: frozen, keyword-only, strict about unknown fields, and JSON both ways."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from bedplate.errors import BadQuestion

Basis = Literal["measured", "reported", "spec", "estimate"]
"""Where a figure comes from: measured here, said by a driver or a file header, the vendor's word, or computed."""

R = TypeVar("R", bound="Record")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that rooms hand to each other."""


class Figure(Record, frozen=True, kw_only=True):
    """A figure that is not exact: its value, its band and where it comes from."""

    value: float
    low: float
    high: float
    basis: Basis
    source: str | None = None


def estimate(value: float, spread: float, source: str | None = None) -> Figure:
    """An estimate with a band of ± `spread` (0.1 is ten percent)."""
    return Figure(value=value, low=value * (1 - spread), high=value * (1 + spread), basis="estimate", source=source)


def to_json(value: object, indent: int = 2) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def from_json(kind: type[R], text: str | bytes, origin: str = "input") -> R:
    """Reads a record; what is wrong with it is said with the field's path."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadQuestion(f"{origin} is not a {kind.__name__} of this version of bedplate", cause=str(error)) from error


def replaced(record: R, **changes: Any) -> R:
    return msgspec.structs.replace(record, **changes)
