"""Shares of requests as people write them."""

from __future__ import annotations

import re

from bedplate.errors import BadQuestion


def read_share(text: str) -> float:
    """10%, or 0.1; a bare 10 is taken for percent."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(found[1]) if found is not None else 0.0
    share = value / 100 if found is not None and (found[2] or value > 1) else value
    if not 0 < share <= 1:
        raise BadQuestion(f"--share {text!r} is no share", hint="such as 10%")
    return share
