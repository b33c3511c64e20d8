"""Parses shares of requests."""

from __future__ import annotations

import re

from bedplate.errors import UsageError


def parse_share(text: str) -> float:
    """Parse `10%` or `0.1`. Numbers above 1 without a unit are percentages."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(found[1]) if found is not None else 0.0
    share = value / 100 if found is not None and (found[2] or value > 1) else value
    if not 0 < share <= 1:
        raise UsageError(f"--share {text!r} is not a share of requests", hint="for example 10%")
    return share
