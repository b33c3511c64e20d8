"""Summary: statistics of a cell's samples. They are computed from the cell and never stored."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


class Percentiles(Record, frozen=True, kw_only=True):
    """Percentiles of `count` samples. `None`: too few samples; p99 needs a hundred."""

    count: int
    mean: float
    p50: float
    p90: float | None
    p95: float | None
    p99: float | None
    max: float


class Interval(Record, frozen=True, kw_only=True):
    """Confidence interval of the mean, and the number of independent parts that it is computed from."""

    low: float
    high: float
    over: Literal["repeats", "blocks"]
    """blocks: parts of a single repeat, so the variation between repeats is not included."""
    count: int
    confidence: float = 0.95


class Summary(Record, frozen=True, kw_only=True):
    cell: str
    repeats: int
    seconds: float
    requests: int
    ok: int
    error_share: float | None
    output_tok_s: float | None
    """Sum over all streams; mean over the repeats."""
    interval: Interval | None
    """Interval of `output_tok_s`; `None`: only one short repeat."""
    requests_s: float | None
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    gap_ms: Percentiles | None
    """Time between events. An event may carry several tokens."""
    e2e_ms: Percentiles | None
    tokens_per_event: float | None
    prompt_tokens: float | None
    """Median of the endpoint's counts."""
    output_tokens: float | None
    cached_share: float | None
    """Share of prompt tokens found in a prefix cache, if the endpoint reports it."""
    peak_memory_bytes: int | None
    peak_gpu_bytes: int | None
    energy_j_per_token: float | None


class TurnLatency(Record, frozen=True, kw_only=True):
    """Requests of these turns of all sessions."""

    turns: str
    """A turn, or a range of turns: `5-8`."""
    requests: int
    ttft_ms: float | None
    """Median."""
    prompt_tokens: float | None
    """Median."""
    cached_share: float | None


class SessionSummary(Record, frozen=True, kw_only=True):
    complete: int
    context: int
    """Ended before their planned last turn, because the next request would have exceeded the context."""
    failed: int
    unfinished: int
    duration_s: float | None
    """Median over the sessions that were measured from their first turn to their last."""
    answering_s: float | None
    """Median of the part of it in which a request was in flight."""
    ttft_by_turn: tuple[TurnLatency, ...]
    cached_share: float | None
    """Share of prompt tokens found in a prefix cache, as the answers report it."""
    metrics_share: float | None
    """The same by the engine's metrics."""
    repeated_share: float | None
    """Share of prompt tokens that an earlier request of the session, or the shared system prompt, had already."""


class BenchRow(Record, frozen=True, kw_only=True):
    """One line of a table or CSV file: the columns that the source articles require, then qualifying columns."""

    engine: str
    version: str | None
    model: str
    quantization: str | None
    hardware: str
    concurrency: int | None
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    """Median, like `tpot_ms`, `gap_ms` and `e2e_ms`."""
    tok_per_s: float | None
    peak_mem_gb: float | None
    """Peak memory of the device it computes on, in 10⁹ bytes."""
    notes: str
    tok_per_s_low: float | None
    tok_per_s_high: float | None
    requests_per_s: float | None
    ttft_ms_p90: float | None
    ttft_ms_p95: float | None
    ttft_ms_p99: float | None
    ttft_ms_max: float | None
    tpot_ms: float | None
    tpot_ms_p90: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None
    gap_ms: float | None
    gap_ms_p99: float | None
    e2e_ms: float | None
    e2e_ms_p90: float | None
    e2e_ms_p99: float | None
    requests: int
    error_share: float | None
    repeats: int
    seconds: float
    quality: float | None
    quality_verdict: str
    energy_j_per_token: float | None
    cost_per_million_tokens: float | None
    """Per million output tokens, in the currency of the given price."""
    kwh_per_million_tokens: float | None
    arrivals: str
    offered_per_s: float | None
    seed: int
    valid: bool
    start_s: float | None
    install_gb: float | None
    at: str
    cell: str
    run: str
    machine: str
