"""Figures as people read them."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Decimal units for files and weights (98 MB), as download pages and vendors' sheets have them."""
    return _scaled(num_bytes, 1000.0, ("B", "kB", "MB", "GB", "TB"))


def memory(num_bytes: float) -> str:
    """Binary units for RAM (23.4 GiB), as operating systems count it."""
    return _scaled(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def seconds(duration_s: float) -> str:
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 90:
        return f"{duration_s:.1f} s"
    minutes, rest = divmod(round(duration_s), 60)
    return f"{minutes} min {rest:02d} s"


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= step * 0.9995 and power < len(units) - 1:
        value /= step
        power += 1
    digits = f"{value:.0f}" if power == 0 or abs(value) >= 99.5 else f"{value:.3g}"
    return f"{digits} {units[power]}"
