"""Workload: the shape of the requested or observed workload."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Annotated, Literal

import msgspec

from bedplate.values.arrival import DEFAULT_THINK_TIME_S, ArrivalProcess, RequestLoad
from bedplate.values.model import Task
from bedplate.values.record import Basis, Record

Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
TraceFormat = Literal["azure", "mooncake", "sharegpt", "bedplate", "burstgpt", "bailian", "copilot"]
ASSUMED_TTFT_S, ASSUMED_TPOT_S = 0.5, 0.03
"""Latency that is assumed before there is an estimate, and if there is none."""
AUDIO_WINDOW_S = 30
"""Seconds of audio that Whisper reads at once; shorter audio is padded, and longer audio is divided."""
DEFAULT_LORA_RANK = 16
"""Rank of a LoRA adapter if none is specified."""


def apply_littles_law(requests_per_s: float, request_s: float) -> float:
    """Mean requests in flight: arrival rate times request time."""
    return requests_per_s * request_s


def invert_littles_law(concurrency: float, request_s: float) -> float:
    """Little's law inverted: the request rate that this concurrency sustains."""
    return concurrency / request_s


class LatencyTarget(Record, frozen=True, kw_only=True):
    """The latency that requests must meet."""

    ttft_ms: Positive | None = None
    """Time to the first token, in milliseconds."""
    tpot_ms: Positive | None = None
    """Time per output token after the first, in milliseconds."""

    def compute_overrun(self, ttft_ms: float | None, tpot_ms: float | None) -> float:
        """The larger ratio of latency to target; at most 1 if both targets are met.

        Infinite if a latency with a target is unknown.
        """
        pairs = ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms))
        times = (math.inf if took is None else took / limit for took, limit in pairs if limit is not None)
        return max(times, default=0.0)


class LoraAdapter(Record, frozen=True, kw_only=True):
    """A LoRA adapter that requests may name."""

    path: Text
    """A folder, a GGUF file, or a hub id (owner/name)."""
    name: Text | None = None
    """The name that requests use. Default: the last part of the path."""
    rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    """Its rank. Default: 16."""
    tenants: tuple[Text, ...] = ()
    """The tenants that may use it. Default: those of the model."""

    @property
    def served_name(self) -> str:
        """The name that requests use, without characters that separate names in an engine's option."""
        last = PurePath(self.path.replace("\\", "/")).name.removesuffix(".gguf")
        return re.sub(r"[\s=,:@]+", "-", self.name or last).strip("-") or "adapter"

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is owner/name, and not that of a file."""
        return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", self.path) is not None and not self.path.endswith(".gguf")


AdapterCount = Annotated[int, msgspec.Meta(ge=1, le=1000)]
AdapterList = Annotated[tuple[Text | LoraAdapter, ...], msgspec.Meta(min_length=1, max_length=1000)]


class Workload(Record, frozen=True, kw_only=True):
    """The requests that are asked for, or were observed."""

    schema: Literal["workload/1"] = "workload/1"
    """The version of this format."""
    users: Count = 1
    """People who each send a request, read the answer, think, and send the next one."""
    concurrency: Count | None = None
    """Requests in flight. Default: by Little's law from the arrival rate or the users and their think time."""
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
    session_prefix_tokens: Tokens = 0
    """Prompt tokens that repeat earlier turns of the same conversation, without the shared prefix."""
    structured_output: bool = False
    """Answers must follow a grammar or a JSON schema."""
    precision_sensitive: bool = False
    """Excludes 4-bit weights."""
    batch: bool = False
    """Nobody waits for the answers: throughput matters, and without stated targets latency does not."""
    task: Task = "generate"
    """What the model is used for. Default: the model's own task."""
    volume: Literal["normal", "extreme"] = "normal"
    """extreme: so much traffic that the last percent of throughput pays for more effort."""
    latency: LatencyTarget | None = None
    """The latency that requests must meet."""
    lora_adapters: AdapterCount | AdapterList | None = None
    """LoRA adapters that requests choose from: their number, or a list of paths (or of path, name and rank)."""
    origin: Literal["default", "asked", "observed"] = "asked"
    """Where the workload comes from; written by bedplate."""
    load: RequestLoad | None = None
    """The load on the deployment that was planned for it; written by bedplate."""

    @property
    def repeated_prefix_tokens(self) -> int:
        """Prompt tokens that a prefix cache may hold; at most those before the last token of the prompt."""
        return min(self.shared_prefix_tokens + self.session_prefix_tokens, max(0, self.prompt_tokens - 1))

    @property
    def adapters(self) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters; if only their number is specified, with placeholder paths."""
        given = self.lora_adapters or ()
        if isinstance(given, int):
            return tuple(LoraAdapter(path=f"adapter-{number}") for number in range(1, given + 1))
        return tuple(one if isinstance(one, LoraAdapter) else LoraAdapter(path=one) for one in given)

    @property
    def adapter_rank(self) -> int:
        """The highest rank of the LoRA adapters."""
        return max((one.rank or DEFAULT_LORA_RANK for one in self.adapters), default=DEFAULT_LORA_RANK)

    @property
    def names_adapters(self) -> bool:
        """Whether the LoRA adapters are listed, and not only counted."""
        return isinstance(self.lora_adapters, tuple)

    @property
    def request_tokens(self) -> int:
        """Maximum length of a request when it ends."""
        return max(self.usual_tokens, self.context_tokens or 0)

    @property
    def usual_tokens(self) -> int:
        """Usual length of a request when it ends. Embedding and classification generate no tokens. Audio takes no
        tokens of the context: it has a cache of its own."""
        prompt = 0 if self.task == "transcribe" else self.prompt_tokens
        return prompt + (0 if self.task in ("embed", "classify") else self.output_tokens)

    @property
    def is_chat(self) -> bool:
        """Whether someone reads the text while it is generated."""
        return self.task == "generate" and not self.batch

    @property
    def states_load(self) -> bool:
        """Whether anything says how many requests there are; a default workload is one user."""
        given = (self.concurrency, self.requests_per_s, self.think_time_s)
        return self.users > 1 or any(one is not None for one in given)

    @property
    def arrival(self) -> ArrivalProcess:
        """How its requests arrive: at the stated rate, in a closed loop, or from users with think time."""
        if self.requests_per_s is not None:
            return ArrivalProcess.POISSON
        return ArrivalProcess.CLOSED if self.concurrency is not None else ArrivalProcess.USERS

    @property
    def assumed_request_s(self) -> float:
        """Request time that is assumed before there is an estimate, and if there is none."""
        output = self.usual_tokens - self.prompt_tokens
        return ASSUMED_TTFT_S + ASSUMED_TPOT_S * output

    @property
    def depends_on_latency(self) -> bool:
        """Whether the number of requests in flight depends on their latency."""
        return self.concurrency is None and (self.requests_per_s is not None or self.users > 1)

    def compute_in_flight(self, request_s: float | None = None) -> int:
        """Requests in flight: as specified, else by Little's law from the arrival rate or from users with think time.

        Without a request time it is that of the computed load. If there is none either, all users count as active at
        once, which is an upper bound.
        """
        if self.concurrency is not None:
            return self.concurrency
        if request_s is None:
            return self.load.in_flight if self.load is not None else self.users
        # Round first: the division may leave an error, and 50 requests must stay 50.
        return max(1, math.ceil(round(apply_littles_law(self.compute_arrivals_per_s(request_s), request_s), 6)))

    def compute_most_in_flight(self) -> int:
        """Requests that an engine has slots for: one for each user, who may all be active at the same time."""
        if self.concurrency is None and self.arrival is ArrivalProcess.USERS:
            return self.users
        return self.compute_peak_in_flight()

    def compute_peak_in_flight(self) -> int:
        """Requests in flight that are exceeded 1 % of the time; a stated concurrency is never exceeded."""
        if self.concurrency is not None or self.load is None:
            return self.compute_in_flight()
        return self.load.peak_in_flight

    def compute_arrivals_per_s(self, request_s: float) -> float:
        """Requests per second: as specified, else what the concurrency sustains, or what users with think time send."""
        if self.requests_per_s is not None:
            return self.requests_per_s
        if self.concurrency is not None:
            return invert_littles_law(self.concurrency, request_s)
        return invert_littles_law(self.users, request_s + (self.think_time_s or DEFAULT_THINK_TIME_S))

    def make_load(self, request_s: float | None = None, in_flight: int | None = None) -> RequestLoad:
        """The load if a request takes `request_s`; `in_flight` replaces the number that follows from it."""
        took_s = self.assumed_request_s if request_s is None else request_s
        by_users = self.arrival is ArrivalProcess.USERS
        return RequestLoad(
            arrival=self.arrival,
            users=self.users if by_users else None,
            think_time_s=(self.think_time_s or DEFAULT_THINK_TIME_S) if by_users else None,
            think_time_assumed=by_users and self.think_time_s is None,
            requests_per_s=self.compute_arrivals_per_s(took_s),
            in_flight=self.compute_in_flight(took_s) if in_flight is None else in_flight,
            request_s=took_s,
            request_time_assumed=request_s is None,
        )


class RequestShape(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag="request/1"):
    """One request of a log: its shape, never its content. bedplate's request log has one such JSON object per line."""

    started_s: float | None = None
    """Arrival time in seconds since 1970, or since any other moment that all lines share."""
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    """Prompt tokens found in a prefix cache, as the engine counted them."""
    ttft_ms: NotNegative | None = None
    duration_ms: NotNegative | None = None
    """From the request's arrival to its last byte."""
    prefix_hashes: tuple[int | str, ...] = ()
    """One hash per block of the prompt. Each covers the prompt up to the end of its block."""
    prefix_block_tokens: Count | None = None
    session: str | None = None
    """The conversation that it belongs to; each request contains the earlier ones and their answers."""
    wait_s: NotNegative | None = None
    """Seconds after the previous answer of its session, if the trace has no arrival time for it."""
    after_tool: bool = False
    """Whether it returns the result of a tool in its session."""
    tenant: str | None = None
    model: str | None = None
    outcome: Literal["ok", "error", "cancelled", "refused"] = "ok"


class Spread(Record, frozen=True, kw_only=True):
    """Distribution of a figure over requests or over time."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class LengthBin(Record, frozen=True, kw_only=True):
    from_tokens: int
    to_tokens: int
    requests: int


class LengthDistribution(Record, frozen=True, kw_only=True):
    """Exact token counts per request as the trace states them. `basis` says how reliable they are."""

    spread: Spread
    total_tokens: int
    bins: tuple[LengthBin, ...]
    """Requests by length, in powers of two."""
    basis: Basis
    error: Share | None = None
    """Maximum error of an estimate (0.25 is a quarter); `None`: the trace states token counts."""


class Arrivals(Record, frozen=True, kw_only=True):
    span_s: float
    """From the first request to the last."""
    requests_per_s: float | None
    """Mean rate; `None`: all requests came at the same moment."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 is Poisson, 0 is perfectly regular."""
    peak_to_mean_1s: float | None
    """Rate in the busiest second, divided by the mean rate."""
    peak_to_mean_10s: float | None
    peak_to_mean_60s: float | None
    same_moment: Share
    """Share of requests with the same timestamp as the one before. A large share means a coarse clock."""
    series: tuple[float, ...]
    """Requests per second in equal parts of the span, oldest first."""


class InFlight(Record, frozen=True, kw_only=True):
    """Requests in flight, over time."""

    spread: Spread
    basis: Basis
    assumption: str | None = None
    """Assumption about the request time if the trace does not state it."""
    request_s: float
    """Mean request time, measured or assumed."""


class CacheSize(Record, frozen=True, kw_only=True):
    """A prefix cache of this size with LRU eviction, and the share of prompt tokens that it saves."""

    tokens: int
    saved_share: Share


class PrefixReuse(Record, frozen=True, kw_only=True):
    """How much of the prompts a prefix cache would not compute again."""

    saved_share: Share
    """Share of all prompt tokens, with an unlimited cache; if the basis is `reported`, with the engine's cache."""
    by_cache: tuple[CacheSize, ...] = ()
    """The same with caches of limited size, smallest first."""
    block_tokens: int | None = None
    sharing_requests: Share
    """Requests that share a prefix with an earlier one."""
    typical_tokens: int
    """Median length of the shared prefix."""
    saved_tokens_per_request: float
    """Mean over all requests, with the smallest cache in `by_cache` if there is one."""
    basis: Basis
    how: str


class TraceSummary(Record, frozen=True, kw_only=True):
    """What a trace says about the workload, without any of its content."""

    schema: Literal["trace/1"] = "trace/1"
    source: str
    format: TraceFormat
    requests: int
    bad_rows: int = 0
    bad_examples: tuple[str, ...] = ()
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed requests by outcome, if the log states outcomes."""
    tenants: int | None = None
    models: tuple[str, ...] = ()
    prompt: LengthDistribution
    output: LengthDistribution
    total: LengthDistribution
    """Prompt and output of one request together: the cache that it needs at its end."""
    arrivals: Arrivals | None = None
    in_flight: InFlight | None = None
    prefix: PrefixReuse | None = None
    notes: tuple[str, ...] = ()
