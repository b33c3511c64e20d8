"""The fields of a config.json. The file is untrusted, so every field is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Each limit is well above any published model, and low enough that no product of them takes long or much memory.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 24
MAX_EXPERTS = 1 << 16
MAX_CONTEXT = 1 << 40
MAX_FIGURE = 1 << 62


class InvalidConfig(Exception):
    """The configuration contains an impossible value, or lacks a required one."""


class Weight(NamedTuple):
    """One matrix or vector, or as many equal ones as a layer has experts."""

    name: str
    """The tensor's name in the files, without the prefix that wrappers add."""
    part: str
    rows: int
    cols: int = 1
    copies: int = 1
    used: int | None = None
    """How many of the copies one token uses; None: all."""
    matrix: bool = True
    """Whether it is a linear layer, which quantizers convert. Embeddings, norms and biases are not."""

    @property
    def elements(self) -> int:
        return self.rows * self.cols * self.copies

    @property
    def active_elements(self) -> int:
        return self.rows * self.cols * (self.copies if self.used is None else min(self.used, self.copies))


class Config:
    """A JSON object. Fields are looked up by all names that models use for them."""

    def __init__(self, fields: Mapping[str, Any], parent: Config | None = None) -> None:
        self.fields = fields
        self.parent = parent

    def get(self, *names: str) -> Any:
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                return value
        return None

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def get_count(self, *names: str, most: int = MAX_WIDTH) -> int | None:
        """A count. Some models write a list if all layers are equal; its first entry counts."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, list):
                value = value[0] if value else None
            if value is not None:
                return check_count(name, value, most)
        return None

    def require_count(self, *names: str, most: int = MAX_WIDTH) -> int:
        value = self.get_count(*names, most=most)
        if not value:
            raise InvalidConfig(f"{names[0]} is not in the configuration")
        return value

    def get_number(self, *names: str) -> float | None:
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_FIGURE:
            raise InvalidConfig(f"{names[0]} is {escape_value(value)}")
        return float(value)

    def get_flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names)
        return default if value is None else bool(value)

    def get_text(self, *names: str) -> str | None:
        value = self.get(*names)
        return value if isinstance(value, str) else None

    def get_section(self, *names: str) -> Config | None:
        value = self.get(*names)
        return Config(value, self) if isinstance(value, dict) else None

    def get_per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with an entry per layer. Multi-token-prediction heads may have entries at its end."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            return None
        if len(value) < num_layers:
            raise InvalidConfig(f"{name} has {len(value):,} entries for {num_layers} layers")
        return value[:num_layers]

    def get_layer_count(self, name: str, layer: int, num_layers: int, most: int = MAX_WIDTH) -> int | None:
        """A count that is stated once for all layers, or as a list."""
        values = self.get_per_layer(name, num_layers)
        return check_count(name, values[layer], most) if values is not None else self.get_count(name, most=most)


def check_count(name: str, value: object, most: int = MAX_WIDTH) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidConfig(f"{name} is {escape_value(value)}")
    return value


def escape_value(value: object, most: int = 60) -> str:
    """A value from a file, shortened and escaped for a terminal."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**24 else "a number of more than 24 digits"
    text = repr(value) if isinstance(value, str | float | bool) or value is None else f"a {type(value).__name__}"
    return "".join(char if char.isprintable() else "·" for char in text[:most])


def make_vectors(part: str, layer: str, sizes: Sequence[tuple[str, int]]) -> list[Weight]:
    """Norms and biases, which quantizers do not convert."""
    return [Weight(f"{layer}.{name}", part, size, matrix=False) for name, size in sizes if size]
