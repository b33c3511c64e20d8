"""The live page: one self-contained HTML file and its Content-Security-Policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

TEMPLATE = Path(__file__).parent / "templates" / "live.html"


class LivePage(NamedTuple):
    body: bytes
    headers: dict[str, str]


@functools.cache
def load_live_page() -> LivePage:
    """The page holds no data; its script requests the data with the user's key."""
    body = TEMPLATE.read_bytes()
    return LivePage(
        body,
        {
            "Content-Security-Policy": write_policy(body.decode()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def write_policy(html: str) -> str:
    """Allow only this script and style and requests to this endpoint; forbid turning text into markup."""
    scripts, styles = (
        " ".join(map(_hash_source, re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL))) for tag in _INLINE
    )
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


_INLINE = ("script", "style")


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
