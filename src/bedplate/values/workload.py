"""Workload: the shape of the work that is asked for, or that was observed."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from bedplate.values.model import Task
from bedplate.values.record import Basis, Record

Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
TraceFormat = Literal["azure", "mooncake", "sharegpt", "bedplate"]
DEFAULT_THINK_TIME_S = 30.0


def in_flight_by_littles_law(requests_per_s: float, request_s: float) -> float:
    """What is in flight on average is how fast requests come times how long each stays."""
    return requests_per_s * request_s


def rate_by_littles_law(concurrency: float, request_s: float) -> float:
    """The same law backwards: the requests per second that so many in flight sustain."""
    return concurrency / request_s


class LatencyTarget(Record, frozen=True, kw_only=True):
    """The latency that requests must meet."""

    ttft_ms: Positive | None = None
    """Time to the first token, in milliseconds."""
    tpot_ms: Positive | None = None
    """Time per output token after the first, in milliseconds."""

    def overrun(self, ttft_ms: float | None, tpot_ms: float | None) -> float:
        """How many times as long as wanted the worse of the two is, up to 1 where both are kept; what is wanted and not
        known is the worst."""
        pairs = ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms))
        times = (math.inf if took is None else took / limit for took, limit in pairs if limit is not None)
        return max(times, default=0.0)


class Workload(Record, frozen=True, kw_only=True):
    """The requests that are asked for, or were observed."""

    schema: Literal["workload/1"] = "workload/1"
    """The version of this format."""
    users: Count = 1
    """People who may be active at once."""
    concurrency: Count | None = None
    """Concurrent requests. Default: by Little's law from the arrival rate or the users."""
    requests_per_s: Positive | None = None
    """Arrival rate, in requests per second."""
    think_time_s: Positive | None = None
    """Seconds between an answer and the same person's next request. Default: 30."""
    prompt_tokens: Count = 512
    """Tokens of a usual prompt."""
    output_tokens: Count = 256
    """Tokens of a usual answer."""
    context_tokens: Count | None = None
    """The longest request, prompt and answer, in tokens. Default: prompt_tokens + output_tokens."""
    shared_prefix_tokens: Tokens = 0
    """Prompt tokens at the beginning that requests have in common."""
    structured_output: bool = False
    """Answers must follow a grammar or a JSON schema."""
    precision_sensitive: bool = False
    """Excludes 4-bit weights."""
    task: Task = "generate"
    """What the model is used for. Default: the model's own task."""
    volume: Literal["normal", "extreme"] = "normal"
    """extreme: so much traffic that the last percent of throughput pays for more effort."""
    latency: LatencyTarget | None = None
    """The latency that requests must meet."""
    origin: Literal["default", "asked", "observed"] = "asked"
    """Where the workload comes from; written by bedplate."""

    @property
    def request_tokens(self) -> int:
        """The length that one request may have when it ends."""
        return max(self.usual_tokens, self.context_tokens or 0)

    @property
    def usual_tokens(self) -> int:
        """The length that requests have when they end. What embeds or classifies makes no tokens."""
        return self.prompt_tokens + (0 if self.task in ("embed", "classify") else self.output_tokens)

    def in_flight(self, request_s: float | None = None) -> int:
        """Requests in flight: as stated, else by Little's law from the arrival rate, or from users who think.

        Without a known request time everyone is taken to be active at once: an upper bound, never too small a plan.
        """
        if self.concurrency is not None:
            return self.concurrency
        if request_s is None:
            return self.users
        # Rounded first, so that 50 requests stay 50 when the division left a trace behind.
        return max(1, math.ceil(round(in_flight_by_littles_law(self.arrivals_per_s(request_s), request_s), 6)))

    def arrivals_per_s(self, request_s: float) -> float:
        """Requests per second: as stated, else what the concurrency sustains, or what users who think send."""
        if self.requests_per_s is not None:
            return self.requests_per_s
        if self.concurrency is not None:
            return rate_by_littles_law(self.concurrency, request_s)
        return rate_by_littles_law(self.users, request_s + (self.think_time_s or DEFAULT_THINK_TIME_S))


class RequestShape(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag="request/1"):
    """One request of a log: its shape, never its content. One JSON object a line is bedplate's own request log."""

    started_s: float | None = None
    """When it arrived; seconds since 1970, or since any one moment that all lines of a log share."""
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    """Prompt tokens that a prefix cache held already, as the engine counted them."""
    ttft_ms: NotNegative | None = None
    duration_ms: NotNegative | None = None
    """From the request's arrival to its last byte."""
    prefix_hashes: tuple[int | str, ...] = ()
    """One for each block of the prompt, each standing for the prompt up to and with that block."""
    prefix_block_tokens: Count | None = None
    tenant: str | None = None
    model: str | None = None
    outcome: Literal["ok", "error", "cancelled", "refused"] = "ok"


class Spread(Record, frozen=True, kw_only=True):
    """How a figure is spread: over requests, or over time."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class LengthBin(Record, frozen=True, kw_only=True):
    from_tokens: int
    to_tokens: int
    requests: int


class Lengths(Record, frozen=True, kw_only=True):
    """Tokens for each request; exact counts of what the trace says, whose basis says how far to trust it."""

    spread: Spread
    total_tokens: int
    bins: tuple[LengthBin, ...]
    """Requests by powers of two of their length."""
    basis: Basis
    error: Share | None = None
    """How far an estimate may be off, 0.25 is a quarter; nothing when the trace states token counts."""


class Arrivals(Record, frozen=True, kw_only=True):
    span_s: float
    """From the first request to the last."""
    requests_per_s: float | None
    """The mean; nothing when all requests came at one moment."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 is chance (Poisson), 0 a metronome."""
    peak_to_mean_1s: float | None
    """The busiest second's rate over the mean rate."""
    peak_to_mean_10s: float | None
    peak_to_mean_60s: float | None
    same_moment: Share
    """Requests whose timestamp equals the one before; many mean that the trace's clock is coarse."""
    series: tuple[float, ...]
    """Requests per second in equal parts of the span, oldest first."""


class InFlight(Record, frozen=True, kw_only=True):
    """Requests in flight, over time."""

    spread: Spread
    basis: Basis
    assumption: str | None = None
    """What was assumed about the time that a request takes, when the trace does not say."""
    request_s: float
    """Mean time of a request, measured or assumed."""


class CacheSize(Record, frozen=True, kw_only=True):
    """A prefix cache of this size that forgets what was used longest ago, and the prompt tokens that it saves."""

    tokens: int
    saved_share: Share


class PrefixReuse(Record, frozen=True, kw_only=True):
    """How much of the prompts had been seen before: what a prefix cache would not compute again."""

    saved_share: Share
    """Of all prompt tokens: with a cache that never forgets, or, where the basis is `reported`, with the engine's."""
    by_cache: tuple[CacheSize, ...] = ()
    """The same with caches of limited size, the smallest first."""
    block_tokens: int | None = None
    sharing_requests: Share
    """Requests that share any beginning with an earlier one."""
    typical_tokens: int
    """The median of what such a request shares."""
    saved_tokens_per_request: float
    """The mean over all requests, with the smallest cache in `by_cache` where there is one."""
    basis: Basis
    how: str


class TraceSummary(Record, frozen=True, kw_only=True):
    """What a trace says about the work, without any of its content."""

    schema: Literal["trace/1"] = "trace/1"
    source: str
    format: TraceFormat
    requests: int
    bad_rows: int = 0
    bad_examples: tuple[str, ...] = ()
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that did not end well, by how; only logs that say so."""
    tenants: int | None = None
    models: tuple[str, ...] = ()
    prompt: Lengths
    output: Lengths
    total: Lengths
    """Prompt and output of one request together: what its cache must hold at its end."""
    arrivals: Arrivals | None = None
    in_flight: InFlight | None = None
    prefix: PrefixReuse | None = None
    notes: tuple[str, ...] = ()
