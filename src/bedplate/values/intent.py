"""Intent: what a person wants, as one file says it; nothing in it is resolved yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from bedplate.values.cost import Price
from bedplate.values.record import Record
from bedplate.values.tenant import Limit
from bedplate.values.workload import Count, Positive, Workload

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
ModelNamed = str | dict[str, Any]
"""A hub id, a folder or a file; or the facts of a model that is nowhere to be read."""


class Operations(Record, frozen=True, kw_only=True):
    """How the service is kept. `None` is not said, which is not the same as no."""

    model_changes: Literal["often", "rarely"] | None = None
    machinery: Literal["none", "container", "kubernetes", "cluster"] | None = None
    """The most that the team will run."""
    portable: bool = False
    """It must run unchanged on other vendors' hardware."""
    ecosystem: Literal["huggingface"] | None = None
    incumbent: Name | None = None
    """The engine in service today."""
    price_per_hour: Positive | None = None
    """Of one accelerator, or of the machine when it has none."""
    watts: Positive | None = None
    """Of one accelerator, or of the machine when it has none."""
    electricity_price: Positive | None = None
    """Of one kWh, in the currency of `price_per_hour`."""

    @property
    def price(self) -> Price:
        return Price(price_per_hour=self.price_per_hour, watts=self.watts, electricity_price=self.electricity_price)


class Pool(Record, frozen=True, kw_only=True):
    """Nodes of one kind."""

    name: Name
    accelerator: Name | None = None
    cpu: Name | None = None
    cores: Count | None = None
    count: Count = 1
    """Accelerators in the whole pool; of a pool without any, its nodes."""
    gpus_per_node: Count | None = None
    network: Name | None = None
    """What connects the nodes, as people write it: InfiniBand NDR 400, 100 GbE, none."""
    ram_gb: Positive | None = None
    """Of one node."""
    os: Literal["linux", "macos", "windows"] = "linux"
    arch: Name | None = None
    price_per_hour: Positive | None = None
    watts: Positive | None = None

    @property
    def nodes(self) -> int:
        return -(-self.count // (self.gpus_per_node or self.count)) if self.accelerator else self.count


class Service(Record, frozen=True, kw_only=True):
    """One model for one kind of work."""

    model: ModelNamed
    name: Name | None = None
    workload: Workload = Workload(origin="default")
    operations: Operations | None = None
    """What differs from the platform's own."""
    pool: Name | None = None
    """The only pool that it may use; when absent, any."""
    tenants: tuple[Name, ...] = ()
    """Who may call it; when absent, everyone."""
    engine: Name | None = None
    """The engine that is asked for; when absent, the one that is decided on."""
    replicas: Count = 1
    """Of that engine, each with its part of the machine."""
    ttl: Name | Positive | None = None
    """Loaded when its first request comes, unloaded after this long without one: 10m, or seconds. Absent: it stays."""
    preload: bool = False
    """Loaded at the start all the same."""


class Tenant(Record, frozen=True, kw_only=True):
    name: Name
    share: Fraction | None = None
    """The part of the platform that is theirs when all are busy."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None
    """Requests that they may have under way at once. Limits are those of `serve`; a plan does not ask for them."""


class Deploy(Record, frozen=True, kw_only=True):
    """What a platform is like that files are written for; only `plan --emit` asks."""

    namespace: Name | None = None
    gateway: Name | None = None
    """A Gateway with the inference extension, as [namespace/]name: then its InferencePool is written too."""
    layout: Literal["aggregated", "disaggregated"] | None = None
    """Whether prompts are computed by workers of their own; when absent, by the estimate."""
    storage_class: Name | None = None
    """Of the volume with the models; when absent, the cluster's default."""
    prometheus: Name | None = None
    """Where autoscaling reads its metrics."""
    registry: Name | None = None
    """Where images are pushed that are built from the files."""
    rdma: Name | None = None
    """What the network adapters are called as a resource of a node: rdma/ib."""


class Intent(Record, frozen=True, kw_only=True):
    schema: Literal["intent/1"] = "intent/1"
    hardware: str | dict[str, Any] | None = None
    """A machine as people name it, a file from `probe --json`, or a mapping; when absent, this machine."""
    model: ModelNamed | None = None
    workload: Workload = Workload(origin="default")
    operations: Operations = Operations()
    deploy: Deploy = Deploy()
    pools: tuple[Pool, ...] = ()
    services: tuple[Service, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    notes: tuple[str, ...] = ()
    """What is odd about it without being wrong."""
