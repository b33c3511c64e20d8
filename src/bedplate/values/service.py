"""Services: what one host is asked to serve, how it is found again, and how it is doing."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Device
from bedplate.values.endpoint import Above, Orchestrator
from bedplate.values.intent import Name, Operations
from bedplate.values.record import Record
from bedplate.values.tenant import Declared
from bedplate.values.workload import Count, Positive, Workload

Build = Literal["packages", "native"]
"""Whose build of an engine: the one that its packages carry, or one that is made here of its source."""
EngineCondition = Literal["loading", "ready", "restarting", "failed", "stopped"]


class Wanted(Record, frozen=True, kw_only=True):
    """One model that is to be served."""

    model: str | None = None
    """`None`: the built-in one."""
    workload: Workload = Workload(origin="default")
    operations: Operations = Operations()
    engine: Name | None = None
    """The one that is asked for; `None`: decided."""
    replicas: Count = 1
    ttl_s: Positive | None = None
    """Loaded on demand, and unloaded after this long without a request; `None`: it stays loaded."""
    preload: bool = False
    """Loaded at the start, although it may be unloaded later."""
    untuned: bool = False
    """Without what `bedplate tune` found here."""
    tenants: tuple[Name, ...] = ()
    """Who may use it, beside the operator; none named: everybody."""

    @property
    def on_demand(self) -> bool:
        return self.ttl_s is not None


class Order(Record, frozen=True, kw_only=True):
    """All that one host is asked for: one endpoint, and the models behind it."""

    schema: Literal["order/1"] = "order/1"
    services: tuple[Wanted, ...] = (Wanted(),)
    name: Name | None = None
    """What `ps` and `stop` know it by; `None`: found when the model is known."""
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    max_body_bytes: Count | None = None
    build: Build = "packages"
    check: bool = True
    """Whether a few answers are compared with a reference."""
    log_content: str | None = None
    """A folder for what is asked and answered; `None`: none of it is kept."""
    memory_budget_bytes: Count | None = None
    """The most that all engines may take together; `None`: what is free."""
    tenants: tuple[Declared, ...] = ()
    """Who the endpoint is for; none named: whoever has a key."""
    bundle: str | None = None
    """The folder or archive that everything comes from; nothing outside is reached then."""
    on: Orchestrator | None = None
    """What runs the engines; `None`: bedplate itself."""


class ServiceRecord(Record, frozen=True, kw_only=True):
    """One running host, as its file says: how it is found, asked and told from others."""

    schema: Literal["service/1"] = "service/1"
    name: str
    pid: int
    birth: str
    """When that process was born, in the system's own terms: a later one with the same number has another."""
    state: Literal["starting", "ready", "stopping"] = "starting"
    socket: str
    """Where it takes requests of `status`, `stop` and the like."""
    log: str
    version: str
    started_at: str
    detached: bool = False
    url: str | None = None
    models: tuple[str, ...] = ()


class EngineStatus(Record, frozen=True, kw_only=True):
    """One engine process."""

    id: str
    engine: str
    version: str
    state: EngineCondition
    reason: str | None = None
    """Why it is not ready."""
    progress: float | None = None
    pid: int | None = None
    device: Device
    threads: int | None = None
    slots: int
    share: float
    """Its part of its model's requests; 0: it gets none."""
    in_flight: int
    restarts: int
    uptime_s: float | None = None
    """Since it became ready."""
    memory_bytes: int | None = None
    """As the system counts it now."""
    planned_bytes: int
    """What the fit arithmetic counts it for, at the most."""
    log: str
    part: str | None = None
    """What it is within an orchestrator; `None`: an engine that bedplate runs itself."""


class ModelStatus(Record, frozen=True, kw_only=True):
    """One served model."""

    model: str
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"]
    why: tuple[str, ...] = ()
    """The reasons for its engine, the first of them the rule that chose it."""
    busy: str | None = None
    """What is being done with it: loading, migrating to …; `None`: nothing out of the ordinary."""
    reason: str | None = None
    """Why it is not loaded, where that is not what was asked for."""
    quantization: str | None = None
    context_tokens: int
    replicas: int
    ttl_s: float | None = None
    idle_s: float | None = None
    planned_bytes: int
    workload: Workload
    """What the plan assumed."""
    drift: str | None = None
    """How the observed work differs from that, and what it would mean."""
    engines: tuple[EngineStatus, ...] = ()
    on: Above | None = None
    """What stands above its engines."""


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
    """Of all engines, as the system counts it now."""
    budget_bytes: int | None = None
    """`None`: what is free."""
    room_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    """What engines may take on each device, by the fit arithmetic."""
    log: str
    models: tuple[ModelStatus, ...] = ()
    notes: tuple[str, ...] = ()
    """The last things that happened."""
