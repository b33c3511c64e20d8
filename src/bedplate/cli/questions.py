"""What people write for times and shares, read. Pure."""

from __future__ import annotations

import re

from bedplate.errors import BadQuestion

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
LONGEST_S = 366 * 86_400.0


def read_time(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in SECONDS or not 0 < float(found[1]) * SECONDS[found[2]] <= LONGEST_S:
        raise BadQuestion(f"{option} {text!r} is no time", hint="such as 90s, 10m, 24h or 7d")
    return float(found[1]) * SECONDS[found[2]]


def read_share(text: str) -> float:
    """10%, or 0.1; a bare 10 is taken for percent."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(found[1]) if found is not None else 0.0
    share = value / 100 if found is not None and (found[2] or value > 1) else value
    if not 0 < share <= 1:
        raise BadQuestion(f"--share {text!r} is no share", hint="such as 10%")
    return share
