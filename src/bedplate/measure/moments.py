"""When something was measured, as it is written, and the name of a run that begins now."""

from __future__ import annotations

import datetime as dt
import secrets


def now_text(*, milliseconds: bool = False) -> str:
    """Such as 2026-11-15T17:18:54Z."""
    now = dt.datetime.now(dt.UTC)
    return now.isoformat(timespec="milliseconds" if milliseconds else "seconds").replace("+00:00", "Z")


def new_run_id() -> str:
    return f"{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
