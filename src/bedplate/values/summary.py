"""Summary: what a cell's samples come to; everything here follows from the cell and is never stored for itself."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


class Percentiles(Record, frozen=True, kw_only=True):
    """Of so many samples. A percentile that so few cannot show is `None`: the 99th needs a hundred."""

    count: int
    mean: float
    p50: float
    p90: float | None
    p95: float | None
    p99: float | None
    max: float


class Interval(Record, frozen=True, kw_only=True):
    """In which the true mean lies with the given confidence, and from how many independent parts that is known."""

    low: float
    high: float
    over: Literal["repeats", "blocks"]
    """blocks: of one repeat only, so that what differs from one repeat to the next is not in it."""
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
    """Of all streams together; the mean of the repeats."""
    interval: Interval | None
    """Of `output_tok_s`; `None` where one short repeat is all there is."""
    requests_s: float | None
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    gap_ms: Percentiles | None
    """Between events, each of which may carry several tokens."""
    e2e_ms: Percentiles | None
    tokens_per_event: float | None
    prompt_tokens: float | None
    """The median of what the endpoint counted."""
    output_tokens: float | None
    cached_share: float | None
    """Of the prompts' tokens, what a prefix cache held already, where the endpoint says so."""
    peak_memory_bytes: int | None
    peak_gpu_bytes: int | None
    energy_j_per_token: float | None


class Row(Record, frozen=True, kw_only=True):
    """One line of a table or a CSV file: the columns that the source articles ask for, then those that qualify them."""

    engine: str
    version: str | None
    model: str
    quantization: str | None
    hardware: str
    concurrency: int | None
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    """The median, like `tpot_ms`, `gap_ms` and `e2e_ms`."""
    tok_per_s: float | None
    peak_mem_gb: float | None
    """Of the device that it computes on, in units of 10⁹ bytes."""
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
    """Of output, in the currency of the price that was given."""
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
