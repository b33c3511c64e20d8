"""Services: what a host is asked to serve, how other commands find it, and its status."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Device
from bedplate.values.endpoint import EndpointOrchestrator, Orchestrator, StartPhase, StartPhaseTime
from bedplate.values.intent import Name, Operations, Routing
from bedplate.values.record import Record
from bedplate.values.tenant import DeclaredTenant
from bedplate.values.workload import Count, NotNegative, Positive, Workload

Build = Literal["packages", "native"]
"""The engine build to use: packages installs published packages, native compiles the source on this machine."""
EngineCondition = Literal["loading", "ready", "restarting", "failed", "stopped"]
ExitCause = Literal["not started", "not ready", "exited", "killed", "hung"]
"""Why an engine process ended. not ready: it was stopped, since it did not become ready in time. killed: by a signal
that bedplate did not send. hung: it was stopped, since it made no progress."""


class ModelOrder(Record, frozen=True, kw_only=True):
    """One model to serve."""

    model: str | None = None
    """`None`: the built-in model."""
    workload: Workload = Workload(origin="default")
    operations: Operations = Operations()
    engine: Name | None = None
    """The requested engine; `None`: bedplate chooses one."""
    replicas: Count = 1
    ttl_s: Positive | None = None
    """Load on demand and unload after this long without a request; `None`: stay loaded."""
    preload: bool = False
    """Load at the start even if `ttl_s` is set."""
    untuned: bool = False
    """Ignore the settings that `bedplate tune` found here."""
    tenants: tuple[Name, ...] = ()
    """Tenants that may use it, besides the operator; empty: everybody."""

    rank: int = 0
    """Its position among the services, for `routing: order`."""

    @property
    def is_on_demand(self) -> bool:
        return self.ttl_s is not None


class EndpointOrder(Record, frozen=True, kw_only=True):
    """An endpoint elsewhere that serves a model. Its key stays in the environment."""

    url: Name
    model: Name | None = None
    """The model's name there; `None`: the name here."""
    name: Name | None = None
    """The name here; `None`: `model`, or the first local model."""
    key_env: Name | None = None
    share: Positive = 1.0
    price_per_million_tokens: NotNegative = 0.0
    rank: int = 0
    tenants: tuple[Name, ...] = ()
    wait_s: Positive | None = None
    """How long a request waits while it cannot be reached; `None`: the request is rejected."""


class Order(Record, frozen=True, kw_only=True):
    """What one host is asked to serve: one endpoint and the models behind it."""

    schema: Literal["order/1"] = "order/1"
    services: tuple[ModelOrder, ...] = (ModelOrder(),)
    endpoints: tuple[EndpointOrder, ...] = ()
    """Endpoints elsewhere that answer requests too."""
    routing: Routing | None = None
    """`None`: by share."""
    name: Name | None = None
    """Name for `ps` and `stop`; `None`: derived from the model."""
    host: str = "127.0.0.1"
    port: int = 8080
    any_port: bool = False
    """Whether any free port will do if `port` is in use."""
    api_key: str | None = None
    allow_hosts: tuple[Name, ...] = ()
    """Further names of the endpoint that requests without a key may use."""
    allow_origins: tuple[Name, ...] = ()
    """Origins of web pages that may use the endpoint."""
    max_body_bytes: Count | None = None
    grace_s: NotNegative = 5.0
    """How long running requests may continue when the service is stopped."""
    build: Build = "packages"
    check: bool = True
    """Whether to compare a few answers with a reference."""
    log_content: str | None = None
    """Folder that stores requests and answers; `None`: no content is stored."""
    memory_budget_bytes: Count | None = None
    """Memory limit of all engines together; `None`: the free memory."""
    tenants: tuple[DeclaredTenant, ...] = ()
    """Tenants of the endpoint; empty: everyone with a key."""
    bundle: str | None = None
    """The folder or archive that everything comes from. If set, bedplate does not access the network."""
    bundle_sha256: str | None = None
    """The hash that the bundle's manifest must have; `None`: any."""
    on: Orchestrator | None = None
    """The orchestrator that runs the engines; `None`: bedplate itself."""
    otlp_endpoint: str | None = None
    """The OpenTelemetry collector that gets a span for each request; `None`: there are no traces."""
    log_format: Literal["text", "json"] = "text"


class ServiceRecord(Record, frozen=True, kw_only=True):
    """The file that describes one running host, through which other commands find it."""

    schema: Literal["service/1"] = "service/1"
    name: str
    pid: int
    birth: str
    """The process's start time as the system reports it. It tells a later process with the same pid apart."""
    state: Literal["starting", "ready", "stopping"] = "starting"
    socket: str
    """Control socket for `status`, `stop` and similar commands."""
    log: str
    version: str
    started_at: str
    detached: bool = False
    url: str | None = None
    models: tuple[str, ...] = ()
    requested: tuple[str, ...] = ()
    """The names by which the models were requested, in the same order."""


class LastExit(Record, frozen=True, kw_only=True):
    """How the last process of an engine ended."""

    cause: ExitCause
    text: str


class EngineStatus(Record, frozen=True, kw_only=True):
    """One engine process."""

    id: str
    engine: str
    version: str
    state: EngineCondition
    reason: str | None = None
    """Why it is not ready."""
    progress: float | None = None
    phase: StartPhase | None = None
    """The current phase of its start; `None`: it is ready, or its log does not show phases."""
    phases: tuple[StartPhaseTime, ...] = ()
    """How long each phase of its last start took, so far."""
    pid: int | None = None
    device: Device
    threads: int | None = None
    slots: int
    share: float
    """Share of its model's requests; 0: none."""
    in_flight: int
    restarts: int
    last_exit: LastExit | None = None
    """Why it was last restarted; `None`: never."""
    uptime_s: float | None = None
    """Time since it became ready."""
    memory_bytes: int | None = None
    """Current memory as the operating system reports it."""
    planned_bytes: int
    """The upper bound from the fit arithmetic."""
    log: str
    part: str | None = None
    """Its role in an orchestrator; `None`: bedplate runs the engine itself."""


class RemoteEndpointStatus(Record, frozen=True, kw_only=True):
    """One endpoint elsewhere."""

    url: str
    model: str
    """The name of the model here."""
    remote_model: str
    """The name of the model there."""
    state: EngineCondition
    reason: str | None = None
    """Why it is not ready."""
    ejected: bool = False
    """Whether it gets no requests for a while because several failed in a row."""
    share: float
    price_per_million_tokens: float
    in_flight: int
    sent: int
    """Requests that were sent to it."""
    ttft_ms: float | None = None
    """Its recent time to first token, where it was measured."""


class ModelStatus(Record, frozen=True, kw_only=True):
    """One served model."""

    model: str
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"]
    why: tuple[str, ...] = ()
    """The reasons for its engine. The first is the rule that chose it."""
    busy: str | None = None
    """The operation in progress: loading, migrating to …; `None`: none."""
    reason: str | None = None
    """Why it is not loaded although it should be."""
    quantization: str | None = None
    context_tokens: int
    replicas: int
    ttl_s: float | None = None
    idle_s: float | None = None
    planned_bytes: int
    workload: Workload
    """The workload that the plan assumed."""
    drift: str | None = None
    """How the observed workload differs from the plan's, and what that implies."""
    engines: tuple[EngineStatus, ...] = ()
    on: EndpointOrchestrator | None = None
    """The orchestrator of its engines."""


class HostStatus(Record, frozen=True, kw_only=True):
    """One running host."""

    schema: Literal["host/1"] = "host/1"
    name: str
    pid: int
    version: str
    state: Literal["starting", "ready", "stopping"]
    url: str | None
    needs_key: bool
    detached: bool
    started_at: str
    uptime_s: float
    in_flight: int
    memory_bytes: int | None = None
    """Current memory of all engines, as the operating system reports it."""
    budget_bytes: int | None = None
    """`None`: the free memory."""
    room_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    """Memory that engines may use on each device, by the fit arithmetic."""
    log: str
    models: tuple[ModelStatus, ...] = ()
    endpoints: tuple[RemoteEndpointStatus, ...] = ()
    """Endpoints elsewhere."""
    notes: tuple[str, ...] = ()
    """The latest events."""
