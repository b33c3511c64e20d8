"""Times and sizes as people write them."""

from __future__ import annotations

import pytest

from bedplate.errors import BadQuestion
from bedplate.values.units import parsed_bytes, parsed_seconds


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("10m", 600),
        ("10 min", 600),
        ("1h30m", 5400),
        ("2 d", 172800),
        ("250ms", 0.25),
        ("0", 0),
    ],
)
def test_times(text: str, found: float) -> None:
    assert parsed_seconds(text) == pytest.approx(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [("8GiB", 8 << 30), ("8G", 8 << 30), ("8 GB", 8_000_000_000), ("1.5k", 1536), ("900mb", 900_000_000), ("7", 7)],
)
def test_sizes(text: str, found: int) -> None:
    assert parsed_bytes(text) == found


@pytest.mark.parametrize("text", ["", "soon", "10x", "m", "-1", "1h-3m", "1e3"])
def test_neither(text: str) -> None:
    with pytest.raises(BadQuestion, match="--ttl: "):
        parsed_seconds(text, "--ttl")
    with pytest.raises(BadQuestion, match="--memory-budget: "):
        parsed_bytes(text if text != "m" else "mm", "--memory-budget")
