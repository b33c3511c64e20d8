"""Intent: the contents of an intent file. Nothing in it is resolved yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from bedplate.values.cost import Price
from bedplate.values.hardware import OperatingSystem
from bedplate.values.model import Task
from bedplate.values.record import Record
from bedplate.values.tenant import Limit
from bedplate.values.workload import Count, NotNegative, Positive, Workload

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Proportion = Annotated[float, msgspec.Meta(ge=0, le=1)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Routing = Literal["share", "order", "latency", "price", "load"]
"""How requests are divided among the engines and endpoints of one model."""
ModelNamed = str | dict[str, Any]
"""A hub id, a folder or a file; or the facts of a model that cannot be read (`ModelFacts`)."""
MOST_CARDS, MOST_NODE_CARDS, MOST_CORES, MOST_RAM_GB = 16_384, 144, 4_096, 65_536


class DescribedMachine(Record, frozen=True, kw_only=True):
    """Hypothetical hardware. Needs an accelerator or a CPU."""

    accelerator: Name | tuple[Name, ...] | None = None
    """The accelerator: H100 SXM, RTX 4090, Apple M4 Max, p5.48xlarge. A count may stand before it: 8x H100 SXM.
    Different cards of one machine: a list, or names with a plus between them."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_CARDS)] | None = None
    """Accelerators in all nodes together. Default: 1."""
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=MOST_NODE_CARDS)] | None = None
    """Accelerators in one node. Default: 8, or as many as its link connects."""
    link: Literal["nvlink", "xgmi", "pcie"] | None = None
    """What connects the accelerators of one node. Default: what such accelerators always have."""
    network: Name | Positive | None = None
    """What connects the nodes: InfiniBand NDR 400, 8x 400 Gbit/s, 100 GbE, none. A number is in Gbit/s."""
    cpu: Name | None = None
    """The CPU: AMD EPYC 9654, Intel Xeon Gold 6430."""
    cores: Annotated[int, msgspec.Meta(ge=1, le=MOST_CORES)] | None = None
    """CPU cores of one node."""
    ram_gb: Annotated[float, msgspec.Meta(gt=0, le=MOST_RAM_GB)] | None = None
    """Memory of one node in GiB. On unified memory, what CPU and GPU share."""
    os: OperatingSystem | None = None
    """The operating system. Default: linux, or macos on Apple hardware."""
    arch: (
        Literal["x86_64", "arm64", "aarch64", "riscv64", "ppc64le", "s390x", "i686", "armv7l", "loongarch64"] | None
    ) = None
    """The instruction set. Default: that of the named CPU."""


class ModelFacts(Record, frozen=True, kw_only=True):
    """A model whose files cannot be read, described by a few figures."""

    params_b: Annotated[float, msgspec.Meta(gt=0, le=1e5)]
    """Parameters, in billions."""
    name: str | None = None
    """What the plan calls it."""
    task: Task | None = None
    """What it does. Default: generate."""
    active_params_b: Positive | None = None
    """Parameters that compute one token, in billions. Default: all of them."""
    format: Literal["gguf", "onnx", "mlx", "exl2", "exl3", "safetensors", "facts"] | None = None
    """The format of its files. Default: facts, no particular one."""
    quantization: str | None = None
    """The quantization of its files: Q4_K_M, FP8, AWQ-INT4."""
    weight_gb: Positive | None = None
    """Size of its files in units of 10^9 bytes. Default: by parameters and quantization."""
    context: Count | None = None
    """The longest context that it was trained for, in tokens."""
    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """Transformer layers."""
    hidden_size: Count | None = None
    """Width of the hidden state."""
    heads: Count | None = None
    """Attention heads."""
    kv_heads: Count | None = None
    """Key-value heads."""
    head_dim: Count | None = None
    """Width of one attention head."""
    kv_bytes_per_token: Count | None = None
    """KV cache for one token in bytes. Default: by layers, heads and head_dim."""
    experts: Count | None = None
    """Experts of a mixture-of-experts model."""
    experts_active: Count | None = None
    """Experts that compute one token."""


class Operations(Record, frozen=True, kw_only=True):
    """How the service is operated. A field that is left out is not specified, which differs from no."""

    model_changes: Literal["often", "rarely"] | None = None
    """How often the model is replaced. Compiled engines pay off when it is rarely."""
    machinery: Literal["none", "container", "kubernetes", "cluster"] | None = None
    """The most infrastructure that the team will run."""
    portable: bool = False
    """It must run unchanged on hardware of other vendors."""
    ecosystem: Literal["huggingface"] | None = None
    """The ecosystem that the team already uses."""
    incumbent: Name | None = None
    """The engine or orchestrator in service today, in any usual spelling: vLLM 0.10, llama.cpp, TensorRT-LLM."""
    price_per_hour: Positive | None = None
    """Price of one accelerator per hour, or of the machine when it has none."""
    watts: Positive | None = None
    """Power of one accelerator in watts, or of the machine when it has none."""
    electricity_price: Positive | None = None
    """Price of one kWh, in the currency of `price_per_hour`."""

    @property
    def price(self) -> Price:
        return Price(price_per_hour=self.price_per_hour, watts=self.watts, electricity_price=self.electricity_price)


class NodePool(Record, frozen=True, kw_only=True):
    """Nodes of one kind."""

    name: Name
    """The name that services refer to."""
    accelerator: Name | None = None
    """The accelerator: H100 SXM, L4. A pool without one needs `cpu`."""
    cpu: Name | None = None
    """The CPU: AMD EPYC 9654."""
    cores: Count | None = None
    """CPU cores of one node."""
    count: Count = 1
    """Accelerators in the whole pool; of a pool without accelerators, its nodes."""
    gpus_per_node: Count | None = None
    """Accelerators in one node."""
    network: Name | None = None
    """What connects the nodes: InfiniBand NDR 400, 100 GbE, none."""
    ram_gb: Positive | None = None
    """Memory of one node in GiB."""
    node_label: Name | None = None
    """The Kubernetes label of the nodes, as NAME=VALUE. Default: the one that the vendor's discovery sets."""
    os: Literal["linux", "macos", "windows"] = "linux"
    """The operating system of the nodes."""
    arch: Name | None = None
    """The instruction set of the nodes: x86_64, arm64."""
    price_per_hour: Positive | None = None
    """Price of one accelerator per hour, or of one node when it has none."""
    watts: Positive | None = None
    """Power of one accelerator in watts, or of one node when it has none."""

    @property
    def nodes(self) -> int:
        return -(-self.count // (self.gpus_per_node or self.count)) if self.accelerator else self.count


class Service(Record, frozen=True, kw_only=True):
    """One model for one workload."""

    model: ModelNamed
    """A hub id, a folder, a file, or the facts of a model."""
    name: Name | None = None
    """The name of the service. Default: the model's."""
    workload: Workload = Workload(origin="default")
    """What it is asked for."""
    operations: Operations | None = None
    """What differs from the operations of the whole platform."""
    pool: Name | None = None
    """The only pool that it may use. Default: any."""
    tenants: tuple[Name, ...] = ()
    """The tenants that may call it. Default: all."""
    engine: Name | None = None
    """The engine to use. Default: the one that is decided on."""
    replicas: Count = 1
    """Engine processes side by side, each with its part of the machine."""
    ttl: Name | Positive | None = None
    """Load the model at its first request, and unload it after this long without one: 10m, or seconds. On Kubernetes,
    scale it to zero. Default: it stays loaded."""
    preload: bool = False
    """With `ttl`: load the model at the start all the same."""
    url: Name | None = None
    """An OpenAI-compatible endpoint elsewhere that already serves the model: https://gpu-1.example.com/v1. `model` is
    then its name there, and `name` the name here; with the name of another service, both answer its requests."""
    key_env: Name | None = None
    """With `url`: the environment variable that holds the API key of the endpoint."""
    share: Positive | None = None
    """With `url`: its share of the requests, relative to 1 for a local engine. Default: 1."""
    price_per_million_tokens: NotNegative | None = None
    """With `url`: what a million tokens cost there, for `routing: price`. A local engine costs 0."""
    wait: Name | Positive | None = None
    """With `url`: how long a request waits while the endpoint cannot be reached, because it is started on demand: 10m,
    or seconds. Default: the request is rejected."""


class PlatformTenant(Record, frozen=True, kw_only=True):
    """A tenant of the platform."""

    name: Name
    """The name that services and keys refer to."""
    share: Fraction | None = None
    """The part of the platform that it gets while all tenants are busy, from 0 to 1."""
    borrow: Proportion | None = None
    """On Kubernetes: the part of what others do not use that it may borrow, from 0 to 1. Default: all."""
    lend: Proportion | None = None
    """On Kubernetes: the part of its own quota that others may borrow while it is unused, from 0 to 1. Default: all."""
    group: Name | None = None
    """On Kubernetes: the group of users that may work in its namespace. Default: the name of the tenant."""
    requests_per_minute: Limit | None = None
    """Requests per minute; more are rejected (429). Limits apply to `serve` and to the gateway of `deploy.endpoint`."""
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens per minute."""
    in_flight: Limit | None = None
    """Concurrent requests."""


class DeployTarget(Record, frozen=True, kw_only=True):
    """The platform that `plan --emit` writes files for."""

    namespace: Name | None = None
    """The Kubernetes namespace."""
    gateway: Name | None = None
    """A Gateway with the inference extension, as [namespace/]name. Its InferencePool is then written too."""
    endpoint: bool = False
    """Whether to write bedplate's gateway as a Deployment in front of all services, with its usage in PostgreSQL."""
    gateway_provider: Literal["istio", "gke", "agentgateway"] | None = None
    """What implements the Gateway. These need objects or options of their own for the endpoint picker."""
    layout: Literal["aggregated", "disaggregated"] | None = None
    """Whether separate workers compute the prompts. Default: by the estimate."""
    storage_class: Name | None = None
    """The storage class of the volume with the models. Default: that of the cluster."""
    prometheus: Name | None = None
    """The Prometheus address that autoscaling reads its metrics from."""
    prometheus_release: Name | None = None
    """The label `release` of PodMonitors: the Helm release of the Prometheus stack, which reads no others. Default:
    kube-prometheus-stack."""
    registry: Name | None = None
    """The registry that images built from the files are pushed to."""
    rdma: Name | None = None
    """The resource name of a node's RDMA adapters: rdma/ib."""
    mirror: Name | None = None
    """The registry that every image is pulled from, and a path in it: registry.example.com/mirror. An image keeps its
    full name there: registry.example.com/mirror/docker.io/vllm/vllm-openai:v0.32.0."""
    models: Literal["download", "copy"] = "download"
    """How models reach their volumes. copy: nothing is downloaded in the cluster; the Jobs wait until the files were
    copied."""
    revisions: dict[Name, Name] = msgspec.field(default_factory=dict)
    """The commit of each repository of the model hub that is downloaded. Default: the newest."""


class Intent(Record, frozen=True, kw_only=True):
    """What a person wants: hardware, model, workload and operations; or pools, services and tenants."""

    schema: Literal["intent/1"] = "intent/1"
    """The version of this format."""
    hardware: str | dict[str, Any] | None = None
    """A machine by name, a file from `bedplate probe --json`, or a description. Default: this machine."""
    model: ModelNamed | None = None
    """A hub id, a folder, a GGUF file, or the facts of a model. Default: the built-in model."""
    workload: Workload = Workload(origin="default")
    """What the model is asked for."""
    operations: Operations = Operations()
    """How the service is operated."""
    deploy: DeployTarget = DeployTarget()
    """The platform that `plan --emit` writes files for."""
    pools: tuple[NodePool, ...] = ()
    """The nodes of a platform, instead of `hardware`."""
    services: tuple[Service, ...] = ()
    """The models of a platform, instead of `model` and `workload`."""
    tenants: tuple[PlatformTenant, ...] = ()
    """The tenants of the platform."""
    routing: Routing | None = None
    """How `serve` divides requests among the engines and endpoints of one model. share: by share, and a conversation
    stays in one place. order: the first in the file that can answer. latency, price, load: the lowest. Default:
    share."""
    allow_hosts: tuple[Name, ...] = ()
    """Further names of the endpoint of `serve`, for requests without a key: gpu1.example.com, or * for any."""
    allow_origins: tuple[Name, ...] = ()
    """Origins of web pages that may use the endpoint of `serve`: https://chat.example.com, or * for any."""
    notes: tuple[str, ...] = ()
    """Remarks that bedplate adds about unusual values; not for people to write."""
