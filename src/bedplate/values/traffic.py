"""Traffic: the shape of each request to an endpoint, and the usage by tenant."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.record import Record

Outcome = Literal["ok", "refused", "failed", "cancelled", "turned_away"]
"""How a request ended.

ok: answered. refused: the client's mistake, found by the gateway or the engine. failed: an error of the engine or of
bedplate. cancelled: by the client. turned_away: rejected before it was accepted, mostly by a limit (429).
"""
PREFIX_BLOCK_BYTES = 512
"""Bytes of prompt text per hash, about 128 tokens."""
UsageBy = Literal["tenant", "model", "engine", "day"]


class ServedRequest(Record, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One request as the gateway saw it: its shape, never its content."""

    at_s: float
    """When its last byte arrived, in seconds since 1970."""
    tenant: str
    model: str
    engine: str | None = None
    """The engine that processed it; `None`: none did."""
    api: str
    stream: bool = False
    outcome: Outcome
    status: int
    body_bytes: int
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    wait_ms: float | None = None
    """Time until it was sent to the engine."""
    ttft_ms: float | None = None
    duration_ms: float
    finish: str | None = None
    """Finish reason, as the engine reports it."""
    prefix_hashes: tuple[int, ...] = ()
    """Salted hashes of the beginning of the prompt text, one per block. Each covers everything up to its block."""
    text_bytes: int = 0
    """Length of the prompt text as JSON."""
    reason: str | None = None
    """Why it was refused, rejected or failed: the code of its error."""
    features: tuple[str, ...] = ()
    """What it asked for in addition to text: tools, json_schema …"""


class UsageRow(Record, frozen=True, kw_only=True):
    """Usage of one tenant, model, engine or day."""

    key: str
    requests: int
    failed: int
    """How many of `requests` ended with an error of bedplate or the engine."""
    turned_away: int
    """Requests rejected before they were accepted, which `requests` does not include."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    """Refused, rejected and failed requests by the code of their error."""


class UsageReport(Record, frozen=True, kw_only=True):
    schema: Literal["usage/1"] = "usage/1"
    since: str | None
    until: str
    by: UsageBy
    tenant: str | None = None
    rows: tuple[UsageRow, ...]
    total: UsageRow
