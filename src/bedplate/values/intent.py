"""Intent: the contents of an intent file. Nothing in it is resolved yet."""

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
"""A hub id, a folder or a file; or a mapping with the facts of a model that has no files here."""


class Operations(Record, frozen=True, kw_only=True):
    """How the service is operated. `None` means not specified, which differs from no."""

    model_changes: Literal["often", "rarely"] | None = None
    machinery: Literal["none", "container", "kubernetes", "cluster"] | None = None
    """The most infrastructure that the team will run."""
    portable: bool = False
    """Whether the service must run unchanged on other vendors' hardware."""
    ecosystem: Literal["huggingface"] | None = None
    incumbent: Name | None = None
    """The engine in service today."""
    price_per_hour: Positive | None = None
    """Price of one accelerator, or of the machine if it has none."""
    watts: Positive | None = None
    """Power of one accelerator, or of the machine if it has none."""
    electricity_price: Positive | None = None
    """Price of one kWh, in the currency of `price_per_hour`."""

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
    """Accelerators in the whole pool; in a pool without accelerators, nodes."""
    gpus_per_node: Count | None = None
    network: Name | None = None
    """The network between the nodes, in everyday terms: InfiniBand NDR 400, 100 GbE, none."""
    ram_gb: Positive | None = None
    """Memory of one node."""
    os: Literal["linux", "macos", "windows"] = "linux"
    arch: Name | None = None
    price_per_hour: Positive | None = None
    watts: Positive | None = None

    @property
    def nodes(self) -> int:
        return -(-self.count // (self.gpus_per_node or self.count)) if self.accelerator else self.count


class Service(Record, frozen=True, kw_only=True):
    """One model for one kind of workload."""

    model: ModelNamed
    name: Name | None = None
    workload: Workload = Workload(origin="default")
    operations: Operations | None = None
    """Overrides of the platform's `operations`."""
    pool: Name | None = None
    """The only pool that it may use; if absent, any pool."""
    tenants: tuple[Name, ...] = ()
    """The tenants that may call it; if absent, everyone."""
    engine: Name | None = None
    """The engine to use; if absent, bedplate chooses one."""
    replicas: Count = 1
    """Replicas of that engine, each with its part of the machine."""
    ttl: Name | Positive | None = None
    """Load on the first request and unload after this long without one:

    10m, or seconds. If absent, the model stays loaded.
    """
    preload: bool = False
    """Load at the start even if `ttl` is set."""


class Tenant(Record, frozen=True, kw_only=True):
    name: Name
    share: Fraction | None = None
    """The tenant's share of the platform when all tenants are busy."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    in_flight: Limit | None = None
    """Maximum concurrent requests. `serve` enforces this and the rate limits; `plan` ignores them."""


class Deploy(Record, frozen=True, kw_only=True):
    """The platform that files are written for. Only `plan --emit` uses this."""

    namespace: Name | None = None
    gateway: Name | None = None
    """A Gateway with the inference extension, as [namespace/]name. If set, its InferencePool is written too."""
    layout: Literal["aggregated", "disaggregated"] | None = None
    """Whether separate workers run prefill; if absent, the estimate decides."""
    storage_class: Name | None = None
    """Storage class of the volume with the models; if absent, the cluster's default."""
    prometheus: Name | None = None
    """The Prometheus address that autoscaling reads."""
    registry: Name | None = None
    """The registry for images that are built from the files."""
    rdma: Name | None = None
    """Name of the network adapters as a node resource: rdma/ib."""


class Intent(Record, frozen=True, kw_only=True):
    schema: Literal["intent/1"] = "intent/1"
    hardware: str | dict[str, Any] | None = None
    """A machine in everyday terms, a file from `probe --json`, or a mapping; if absent, this machine."""
    model: ModelNamed | None = None
    workload: Workload = Workload(origin="default")
    operations: Operations = Operations()
    deploy: Deploy = Deploy()
    pools: tuple[Pool, ...] = ()
    services: tuple[Service, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks on unusual but valid input."""
