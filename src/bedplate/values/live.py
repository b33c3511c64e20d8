"""Live: the state of an endpoint now and in the last minutes, as the live page shows it."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Challenger, Device, Estimate, Reason
from bedplate.values.diagnosis import Limit
from bedplate.values.record import Record
from bedplate.values.service import EngineCondition, LastExit
from bedplate.values.traffic import Outcome
from bedplate.values.verdict import Answer
from bedplate.values.workload import LatencyTarget

Eyes = Literal["all", "own"]
"""What the viewer may see: everything, or only the viewer's own use."""


class RecentLatency(Record, frozen=True, kw_only=True):
    """Over the answers that ended in the last minute; `None`: there were none."""

    p50_ms: float | None = None
    p95_ms: float | None = None


class LiveBottleneck(Record, frozen=True, kw_only=True):
    """The bottleneck of a model now, judged by the answers of the last minute."""

    limit: Limit | None = None
    """`None`: unknown, or there is none."""
    text: str
    evidence: tuple[str, ...] = ()
    change: str | None = None
    """What to change first."""


LiveFigure = Literal["load", "ttft", "tpot", "output", "requests", "memory", "kv"]


class Deviation(Record, frozen=True, kw_only=True):
    """A figure that is worse than the plan or the target."""

    figure: LiveFigure
    text: str


class LiveEngine(Record, frozen=True, kw_only=True):
    """One engine process. `None`: unknown, or not visible to this viewer."""

    id: str
    engine: str
    """Display name of the engine."""
    version: str
    device: Device
    state: EngineCondition
    reason: str | None = None
    progress: float | None = None
    well: bool = True
    """Whether the gateway sends it requests. It gets none for a while after repeated failures."""
    share: float | None = None
    """Share of its model's requests, 0 to 1."""
    in_flight: int | None = None
    slots: int | None = None
    restarts: int | None = None
    last_exit: LastExit | None = None
    """Why it was last restarted."""
    uptime_s: float | None = None
    memory_bytes: int | None = None
    """Resident memory of its process tree, as the operating system reports it."""
    gpu_bytes: int | None = None
    planned_bytes: int | None = None
    kv_use: float | None = None
    """KV cache utilization, 0 to 1, if the engine reports it."""


class LiveModel(Record, frozen=True, kw_only=True):
    """One served model."""

    model: str
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"]
    busy: str | None = None
    """The operation in progress: loading, migrating to …; `None`: none."""
    reason: str | None = None
    """Why it is not served although it should be."""
    task: str = "generate"
    quantization: str | None = None
    context_tokens: int
    why: tuple[Reason, ...] = ()
    challengers: tuple[Challenger, ...] = ()
    engines: tuple[LiveEngine, ...] = ()
    expected: Estimate = Estimate()
    """The plan's estimate, for the workload that it was made for."""
    expected_in_flight: int | None = None
    target: LatencyTarget | None = None
    in_flight: int | None = None
    waiting: int | None = None
    slots: int | None = None
    planned_bytes: int | None = None
    ttft: RecentLatency = RecentLatency()
    tpot: RecentLatency = RecentLatency()
    output_tok_s: float | None = None
    """Output tokens of the answers that ended in the last minute, per second. The fields below use the same minute."""
    ended: int | None = None
    failed: int | None = None
    deviations: tuple[Deviation, ...] = ()
    binding: LiveBottleneck | None = None
    targets: tuple[str, ...] = ()
    """Engines that the model could be migrated to, the best first. Empty where the viewer may not change anything."""


class TenantUse(Record, frozen=True, kw_only=True):
    """What one tenant used since the endpoint started."""

    name: str
    in_flight: int
    requests: int
    failed: int
    turned_away: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    recent_tokens: int
    """Prompt and output tokens in the last ten minutes."""
    weight: float
    requests_per_minute: int | None = None
    """The tenant's limits; `None`: no limit."""
    requests_left: int | None = None
    """Requests left of the limit now."""
    tokens_per_minute: int | None = None
    tokens_left: int | None = None
    most_in_flight: int | None = None
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    """Refused, rejected and failed requests by the code of their error, the most frequent first."""


class RecentRequest(Record, frozen=True, kw_only=True):
    """The shape of one request that has ended, never its content."""

    at_s: float
    tenant: str
    model: str
    engine: str | None = None
    api: str
    stream: bool = False
    outcome: Outcome
    status: int
    reason: str | None = None
    """Why it was refused, rejected or failed: the code of its error."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    wait_ms: float | None = None
    ttft_ms: float | None = None
    duration_ms: float


class ActionReport(Record, frozen=True, kw_only=True):
    """The last action that was requested on the page."""

    do: str
    model: str | None = None
    state: Literal["running", "done", "failed"]
    text: str


class LastVerdict(Record, frozen=True, kw_only=True):
    at: str | None = None
    answer: Answer
    text: str
    would_prove: str | None = None
    incumbent: str
    challenger: str


class LiveSeries(Record, frozen=True, kw_only=True):
    """One model or one tenant, second by second. Each tuple is as long as the history's `at_s`."""

    in_flight: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    """In the minute up to each point. This also holds for the fields below."""
    failed: tuple[int, ...] = ()
    turned_away: tuple[int, ...] = ()
    """Rejected requests (429), not included in `ended`. Known for tenants only."""
    tokens: tuple[int, ...] = ()
    """Prompt and output tokens."""
    output_tok_s: tuple[float, ...] = ()
    prompt_tok_s: tuple[float, ...] = ()
    cached_share: tuple[float | None, ...] = ()
    """Share of the prompt tokens that were in the engine's prefix cache; `None`: no prompt tokens."""
    wait_p50_ms: tuple[float | None, ...] = ()
    """Time that requests waited for a slot before they were sent to the engine."""
    wait_p95_ms: tuple[float | None, ...] = ()
    ttft_p50_ms: tuple[float | None, ...] = ()
    ttft_p95_ms: tuple[float | None, ...] = ()
    tpot_p50_ms: tuple[float | None, ...] = ()
    tpot_p95_ms: tuple[float | None, ...] = ()
    memory_bytes: tuple[int | None, ...] = ()
    gpu_bytes: tuple[int | None, ...] = ()
    kv_use: tuple[float | None, ...] = ()
    cpu_share: tuple[float | None, ...] = ()
    """CPU time of the engines as a share of the cores that this machine allows, 0 to 1."""
    gpu_share: tuple[float | None, ...] = ()
    """GPU utilization as the driver reports it, 0 to 1."""


class History(Record, frozen=True, kw_only=True):
    at_s: tuple[int, ...] = ()
    """Seconds since 1970, oldest first."""
    models: dict[str, LiveSeries] = msgspec.field(default_factory=dict)
    own: LiveSeries | None = None
    """The viewer's own series, if the viewer may see nothing else."""


class Live(Record, frozen=True, kw_only=True):
    """One endpoint, as one viewer may see it."""

    schema: Literal["live/1"] = "live/1"
    name: str
    version: str
    state: Literal["starting", "ready", "stopping"]
    needs_key: bool
    eyes: Eyes
    tenant: str
    """The tenant of the viewer."""
    at_s: float
    began_s: float
    hardware: str | None = None
    models: tuple[LiveModel, ...] = ()
    tenants: tuple[TenantUse, ...] = ()
    verdict: LastVerdict | None = None
    notes: tuple[str, ...] = ()
    """The latest events."""
    statuses: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that ended in the last ten minutes, by HTTP status code."""
    requests: tuple[RecentRequest, ...] = ()
    """The latest requests, newest first."""
    logs: tuple[str, ...] = ()
    """Names of the logs that the viewer may read: of the service, then of its engines."""
    may_act: bool = False
    """Whether the viewer may load, unload and migrate models."""
    action: ActionReport | None = None
    history: History = History()
