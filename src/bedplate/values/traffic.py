"""Traffic: what an endpoint was asked, one shape for each request, and how much of it each tenant used."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record

Outcome = Literal["ok", "refused", "failed", "cancelled", "turned_away"]
"""How a request ended: with an answer; with the engine's no; with an error; by its client; before it was accepted."""
PREFIX_BLOCK_BYTES = 512
"""Of what a model reads, about 128 tokens."""
UsageBy = Literal["tenant", "model", "engine", "day"]


class ServedRequest(Record, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One request as the gateway saw it: its shape, never its content."""

    at_s: float
    """When its last byte had arrived, in seconds since 1970."""
    tenant: str
    model: str
    engine: str | None = None
    """Which engine had it; none when none did."""
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
    """Until it went to the engine."""
    ttft_ms: float | None = None
    duration_ms: float
    finish: str | None = None
    """Why the answer ended, in the engine's word."""
    prefix_hashes: tuple[int, ...] = ()
    """Salted hashes of the beginning of what the model reads, one for each block, each of all up to there."""
    text_bytes: int = 0
    """The length of what the model reads, as JSON."""


class UsageRow(Record, frozen=True, kw_only=True):
    """What one tenant, model, engine or day used."""

    key: str
    requests: int
    failed: int
    """Of these, how many got an error of ours or the engine's."""
    turned_away: int
    """Beside these, how many were not accepted."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageReport(Record, frozen=True, kw_only=True):
    schema: Literal["usage/1"] = "usage/1"
    since: str | None
    until: str
    by: UsageBy
    tenant: str | None = None
    rows: tuple[UsageRow, ...]
    total: UsageRow
