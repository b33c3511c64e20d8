"""Timestamps and run ids."""

from __future__ import annotations

import datetime as dt
import secrets


def format_now(*, milliseconds: bool = False) -> str:
    """The current time, as in 2026-11-15T17:18:54Z."""
    now = dt.datetime.now(dt.UTC)
    return now.isoformat(timespec="milliseconds" if milliseconds else "seconds").replace("+00:00", "Z")


def make_run_id() -> str:
    return f"{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
