"""Live: how an endpoint is doing at this moment and did in the last minutes, as its page shows it."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Challenger, Device, Estimate, Reason
from bedplate.values.diagnosis import Limit
from bedplate.values.record import Record
from bedplate.values.service import EngineCondition
from bedplate.values.verdict import Answer
from bedplate.values.workload import LatencyTarget

Eyes = Literal["all", "own"]
"""What the one who looks may see: everything, or its own use alone."""


class Times(Record, frozen=True, kw_only=True):
    """Of the answers that ended in the last minute; `None`: there were none."""

    p50_ms: float | None = None
    p95_ms: float | None = None


class Binding(Record, frozen=True, kw_only=True):
    """What limits a model now, judged by the answers of the last minute."""

    limit: Limit | None = None
    """`None`: not known, or nothing does."""
    text: str
    evidence: tuple[str, ...] = ()
    change: str | None = None
    """What to change first."""


class LiveEngine(Record, frozen=True, kw_only=True):
    """One engine process. What is `None` is not known, or not for the one who looks."""

    id: str
    engine: str
    """Its name, as people know it."""
    version: str
    device: Device
    state: EngineCondition
    reason: str | None = None
    progress: float | None = None
    well: bool = True
    """Whether it is given requests; one that fails again and again rests."""
    share: float | None = None
    """Of its model's requests, 0 to 1."""
    in_flight: int | None = None
    slots: int | None = None
    restarts: int | None = None
    uptime_s: float | None = None
    memory_bytes: int | None = None
    """Of its process tree, as the system counts it."""
    gpu_bytes: int | None = None
    planned_bytes: int | None = None
    kv_use: float | None = None
    """0 to 1, where the engine tells."""


class LiveModel(Record, frozen=True, kw_only=True):
    """One served model."""

    model: str
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"]
    busy: str | None = None
    """What is being done with it: loading, migrating to …; `None`: nothing out of the ordinary."""
    reason: str | None = None
    """Why it is not served, although it should be."""
    task: str = "generate"
    quantization: str | None = None
    context_tokens: int
    why: tuple[Reason, ...] = ()
    challengers: tuple[Challenger, ...] = ()
    engines: tuple[LiveEngine, ...] = ()
    expected: Estimate = Estimate()
    """By the plan, for the work that it was made for."""
    expected_in_flight: int | None = None
    target: LatencyTarget | None = None
    in_flight: int | None = None
    waiting: int | None = None
    slots: int | None = None
    planned_bytes: int | None = None
    ttft: Times = Times()
    tpot: Times = Times()
    output_tok_s: float | None = None
    """Tokens of the answers that ended in the last minute, over that minute; likewise below."""
    ended: int | None = None
    failed: int | None = None
    binding: Binding | None = None


class TenantUse(Record, frozen=True, kw_only=True):
    """What one tenant used since the endpoint was started."""

    name: str
    in_flight: int
    requests: int
    failed: int
    turned_away: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    recent_tokens: int
    """Of prompts and answers, in the last ten minutes."""
    weight: float
    requests_per_minute: int | None = None
    """What it may, likewise below; `None`: no limit."""
    requests_left: int | None = None
    """Of these, at once."""
    tokens_per_minute: int | None = None
    tokens_left: int | None = None
    most_in_flight: int | None = None


class LastVerdict(Record, frozen=True, kw_only=True):
    at: str | None = None
    answer: Answer
    text: str
    would_prove: str | None = None
    incumbent: str
    challenger: str


class Series(Record, frozen=True, kw_only=True):
    """One model, second by second, or one tenant; each tuple is as long as the history's `at_s`."""

    in_flight: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    """In the minute up to there; likewise below."""
    failed: tuple[int, ...] = ()
    turned_away: tuple[int, ...] = ()
    """Beside those that ended; known of tenants only."""
    tokens: tuple[int, ...] = ()
    """Of prompts and answers."""
    output_tok_s: tuple[float, ...] = ()
    ttft_p50_ms: tuple[float | None, ...] = ()
    ttft_p95_ms: tuple[float | None, ...] = ()
    tpot_p50_ms: tuple[float | None, ...] = ()
    tpot_p95_ms: tuple[float | None, ...] = ()
    memory_bytes: tuple[int | None, ...] = ()
    gpu_bytes: tuple[int | None, ...] = ()
    kv_use: tuple[float | None, ...] = ()


class History(Record, frozen=True, kw_only=True):
    at_s: tuple[int, ...] = ()
    """Seconds since 1970, the oldest first."""
    models: dict[str, Series] = msgspec.field(default_factory=dict)
    own: Series | None = None
    """Of the tenant that looks, where that is all it may see."""


class Live(Record, frozen=True, kw_only=True):
    """One endpoint, for one who looks at it."""

    schema: Literal["live/1"] = "live/1"
    name: str
    version: str
    state: Literal["starting", "ready", "stopping"]
    needs_key: bool
    eyes: Eyes
    tenant: str
    """Who looks."""
    at_s: float
    began_s: float
    hardware: str | None = None
    models: tuple[LiveModel, ...] = ()
    tenants: tuple[TenantUse, ...] = ()
    verdict: LastVerdict | None = None
    notes: tuple[str, ...] = ()
    """The last things that happened."""
    history: History = History()
