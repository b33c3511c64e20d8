"""Durations and sizes are parsed and formatted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.values.units import format_figure, parse_duration, parse_size


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
def test_durations_are_parsed(text: str, found: float) -> None:
    assert parse_duration(text) == pytest.approx(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [("8GiB", 8 << 30), ("8G", 8 << 30), ("8 GB", 8_000_000_000), ("1.5k", 1536), ("900mb", 900_000_000), ("7", 7)],
)
def test_memory_sizes_are_parsed(text: str, found: int) -> None:
    assert parse_size(text) == found


@pytest.mark.parametrize("text", ["", "soon", "10x", "m", "-1", "1h-3m", "1e3"])
def test_invalid_amounts_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="--ttl: "):
        parse_duration(text, "--ttl")
    with pytest.raises(UsageError, match="--memory-budget: "):
        parse_size(text if text != "m" else "mm", "--memory-budget")


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(4567.8, 3, "4,568"), (999.4, 3, "999"), (99.96, 3, "100"), (9.824, 3, "9.82"), (0.5, 3, "0.5"), (0, 3, "0"),
     (0.00001234, 3, "0.00001234"), (1234567, 3, "1,234,567"), (123.4, 2, "123"), (9.87, 2, "9.9"),
     (-4567.8, 3, "-4,568")],
)  # fmt: skip
def test_figures_are_formatted(value: float, digits: int, shown: str) -> None:
    assert format_figure(value, digits) == shown


@given(st.floats(min_value=1e-6, max_value=1e12), st.integers(1, 5))
def test_a_formatted_figure_has_no_exponent_and_keeps_the_value(value: float, digits: int) -> None:
    shown = format_figure(value, digits)
    assert "e" not in shown
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.6 * 10 ** (1 - digits))
