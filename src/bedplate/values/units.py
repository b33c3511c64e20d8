"""Formatting and parsing of figures with units."""

from __future__ import annotations

import math
import re

from bedplate.errors import UsageError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
YEAR_S = 366 * 86400.0
_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def format_figure(value: float, digits: int = 3) -> str:
    """A figure with its significant digits and thousands separators, never with an exponent."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    short = f"{value:.{digits}g}"
    return short if "e" not in short else f"{value:.9f}".rstrip("0").rstrip(".")


def format_size(num_bytes: float) -> str:
    """Decimal units for files and weights (98 MB), as on download pages and data sheets."""
    return _format_scaled(num_bytes, 1000.0, ("B", "kB", "MB", "GB", "TB"))


def format_memory(num_bytes: float) -> str:
    """Binary units for RAM (23.4 GiB), as operating systems report it."""
    return _format_scaled(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_seconds(duration_s: float) -> str:
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 90:
        return f"{duration_s:.1f} s"
    minutes, rest = divmod(round(duration_s), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(duration_s / 60), 60)
    return f"{hours} h {minutes:02d} min" if minutes else f"{hours} h"


def format_latency(duration_ms: float) -> str:
    """In milliseconds, as latencies and their targets are stated; from ten seconds on in seconds, minutes or hours."""
    return f"{format_figure(duration_ms)} ms" if duration_ms < 10_000 else format_seconds(duration_ms / 1000)


def _format_scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= step * 0.9995 and power < len(units) - 1:
        value /= step
        power += 1
    digits = f"{value:.0f}" if power == 0 or abs(value) >= 99.5 else f"{value:.3g}"
    return f"{digits} {units[power]}"


def parse_duration(text: str, field: str = "a time", *, positive: bool = False, most_s: float = math.inf) -> float:
    """Parse a duration in seconds: `90`, `10m`, `1h30m`, `1.5 h`. `positive`: 0 is refused."""
    given = text.strip().lower()
    hint = "for example 90s, 10m or 1h30m"
    if re.fullmatch(r"\d+(\.\d+)?", given):
        found = float(given)
    elif re.fullmatch(r"(\d+(\.\d+)?\s*(ms|s|min|m|h|d)\s*)+", given):
        parts = re.findall(r"(\d+(\.\d+)?)\s*(ms|s|min|m|h|d)", given)
        found = sum(float(number) * _SECONDS[unit] for number, _, unit in parts)
    else:
        raise UsageError(f"{field}: {text!r} is not a duration", hint=hint)
    if positive and found <= 0:
        raise UsageError(f"{field}: must be more than 0", hint=hint)
    if found > most_s:
        raise UsageError(f"{field}: {text!r} is longer than {most_s / _SECONDS['d']:g} days", hint=hint)
    return found


def parse_ttl(ttl: str | float | None, field: str) -> float | None:
    """Parse a time to keep or wait, as text or in seconds; `None`: none is stated."""
    if ttl is None:
        return None
    found = parse_duration(ttl, field) if isinstance(ttl, str) else float(ttl)
    if found <= 0:
        raise UsageError(f"{field}: must be more than 0", hint="for example 10m; leave it out to keep the model loaded")
    return found


def parse_size(text: str, field: str = "a size") -> int:
    """Parse a size in bytes: `8GiB`, `8G`, `8 GB`. Only a unit with B and without i is decimal."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None:
        raise UsageError(f"{field}: {text!r} is not a memory size", hint="for example 8GiB or 900MB")
    step: float = 1000 if found[3] == "b" else 1024
    return round(float(found[1]) * float(step ** _STEPS[found[2]]))
