"""Decision and Plan: the chosen engine and the reasons, the refused engines, the estimate and the launch command."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

import msgspec

from bedplate.values.arrival import RequestLoad
from bedplate.values.fit import Fit
from bedplate.values.model import Model
from bedplate.values.record import Figure, Record
from bedplate.values.workload import Workload

Device = Literal["cpu", "cuda", "rocm", "metal", "xpu", "vulkan", "hpu", "tt"]
CacheType = Literal["16-bit", "fp8"]
HintKind = Literal[
    "would-fit", "unsupported-hardware", "unsupported-model", "idle-cards", "idle-sockets", "idle-nodes",
    "missed-target", "unknown-target", "unusable-speed", "growing-queue", "waiting-requests", "ignored-field",
    "few-bits", "memory-limit",
]  # fmt: skip
HintCause = Literal[
    "engine", "enough", "layout", "vendor", "other-field", "missing-field", "task", "weights", "hardware",
    "orchestrator", "unknown-speed", "length", "one-node",
]  # fmt: skip


class Reason(Record, frozen=True, kw_only=True):
    rule: str
    text: str
    source: str


class Shortage(Record, frozen=True, kw_only=True):
    """Memory needed on the fullest device with the smallest weights that the engine accepts."""

    device: str
    """`host`, or the device that the engine computes on."""
    count: int
    """Number of devices that each need this much."""
    weights_label: str
    needed_bytes: float
    weights_bytes: float
    cache_bytes: float
    overhead_bytes: float
    """The engine's own memory: runtime, activations, CUDA graphs."""
    usable_bytes: int | None
    """Free memory that the engine may use; `None`: unknown."""


class Remedy(Record, frozen=True, kw_only=True):
    """A change that would make the model fit."""

    kind: Literal["quantization", "memory", "cards"]
    most_bits_per_weight: float | None = None
    bits_per_weight: float | None = None
    """Bits per weight of the weights that did not fit."""
    memory_bytes: float | None = None
    on_cards: bool = False
    """Whether only accelerator memory is missing."""
    cards: int | None = None


class Hint(Record, frozen=True, kw_only=True):
    """What a decision leaves idle, misses or ignores, or what would make the model fit: the figures of one hint."""

    kind: HintKind
    device: str | None = None
    """Name of the idle or unsupported card or CPU."""
    used: int | None = None
    total: int | None = None
    """Cards, sockets, nodes or requests: those that are used, and all."""
    cause: HintCause | None = None
    """engine: it does not use them, or has no such feature. enough: the used ones meet the workload. layout: more of
    them are not expected to be faster. vendor: one process computes on the cards of one vendor. length: all requests of
    the usual length run, but not as many of the longest. one-node: the engine has no replicas and no launch for
    several nodes."""
    engines: tuple[str, ...] = ()
    """Engines that would use the hardware."""
    cpu_engines: tuple[str, ...] = ()
    """Engines that would run the model on the CPU of the host, beside idle accelerators."""
    projects: tuple[str, ...] = ()
    """Software for the hardware that bedplate does not plan."""
    original: str | None = None
    """The model that the quantized weights were made from."""
    field: str | None = None
    """The field of the intent that is ignored."""
    other_field: str | None = None
    """The field that is used instead."""
    metric: Literal["ttft_ms", "tpot_ms"] | None = None
    expected_ms: float | None = None
    target_ms: float | None = None
    is_default: bool = False
    """Whether the target is a default, because the intent has none."""
    bottleneck: str | None = None
    request_s: float | None = None
    """Time of one request."""
    requests_per_s: float | None = None
    answered_per_s: float | None = None
    """Requests that arrive and that are answered."""
    machines: int | None = None
    """Machines of this kind that would be enough."""
    most_tokens: int | None = None
    """The longest request that the model supports, or that the workload states."""
    remedy: Remedy | None = None
    quantization: str | None = None
    """Weights of fewer than 4 bits, or those that a higher memory limit would allow."""
    limit_bytes: int | None = None
    raised_bytes: int | None = None
    """Memory that the GPU may use now, and after the setting is changed."""


class Refusal(Record, frozen=True, kw_only=True):
    """Why an engine is neither chosen nor a challenger, and what would change that."""

    engine: str
    kind: Literal["impossible", "unsuitable", "outranked"]
    why: str
    hint: str | None = None
    shortage: Shortage | None = None
    """Set if the model does not fit: the figures behind `why`."""
    remedies: tuple[Remedy, ...] = ()
    """Set if the model does not fit: the changes that would make it fit, smallest first."""
    cause: Literal["several-nodes"] | None = None
    """several-nodes: the model needs more than one node, and the engine has no launch for several."""


class Challenger(Record, frozen=True, kw_only=True):
    engine: str
    evidence_needed: str


class Parallelism(Record, frozen=True, kw_only=True):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    attention_data: int = 1


class Estimate(Record, frozen=True, kw_only=True):
    """Expected performance. `None`: not known, shown as TBD."""

    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    output_tok_s: Figure | None = None
    """Sum over all concurrent requests."""
    memory_gb: Figure | None = None
    """Memory on the fullest device."""
    cost_per_million_tokens: Figure | None = None
    """Per million output tokens, in the currency of the given price."""
    kwh_per_million_tokens: Figure | None = None


class TunedSettings(Record, frozen=True, kw_only=True):
    """Engine-specific settings that tuning found, beyond the settings that all engines share."""

    knobs: tuple[tuple[str, str], ...] = ()
    """Names and values of the changed settings, for display."""
    options: tuple[str, ...] = ()
    """Command-line options. An option replaces the plan's option of the same name."""
    without: tuple[str, ...] = ()
    """Options to remove from the plan's command line."""
    variables: tuple[tuple[str, str], ...] = ()
    native: bool = False
    """Use the build that was compiled on this machine, if there is one."""
    own_defaults: bool = False
    """Pass only the model and the address: the engine defaults that tuning is compared with."""


class Settings(Record, frozen=True, kw_only=True):
    """The settings that the plan fixes, in terms that all engines share."""

    slots: int
    """Concurrent requests in one replica. Further requests wait in the engine's queue."""
    context_tokens: int
    """Maximum length of a request: prompt and output together."""
    device: Device = "cpu"
    """The device to compute on; `cpu` if accelerators stay idle."""
    cards: tuple[int, ...] = ()
    """Indexes of the accelerators that it uses, in the order of its ranks, if those of the machine differ; empty: the
    first ones."""
    threads: int | None = None
    sockets: int | None = None
    """CPU sockets that its threads run on, if there are several."""
    gpu_layers: int | None = None
    """Layers on the accelerators if the others stay on the host; `None`: all layers, or no accelerator."""
    host_expert_layers: int | None = None
    """Layers whose routed experts stay on the host, while everything else is on the accelerators."""
    kv_type: CacheType = "16-bit"
    """fp8: the engine's 8-bit cache, which for some engines has integers."""
    batch_tokens: int | None = None
    """Prefill chunk size: the most prompt tokens in one batch; `None`: the engine default."""
    graph_tokens: int | None = None
    """Tokens of the largest step that is captured as a CUDA graph; `None`: as usual for the engine."""
    memory_share: float | None = None
    """Share of each accelerator's memory that the engine may use; `None`: as much as it needs."""
    compute_capability: str | None = None
    """CUDA compute capability, if the package that is installed or the options depend on it."""
    board: str | None = None
    """The accelerator board or the GPU, if it decides what is built and started: n300, gfx1032."""
    turned: TunedSettings | None = None
    """The settings that `bedplate tune` found on this machine; `None`: none."""


def list_part_names(file: str) -> tuple[str, ...]:
    """All parts of a split GGUF file, given the first one; or the file itself."""
    found = re.search(r"-00001-of-(\d{5})\.gguf$", file)
    if found is None:
        return (file,)
    stem = file[: found.start()]
    return tuple(f"{stem}-{part:05}-of-{found[1]}.gguf" for part in range(1, int(found[1]) + 1))


class PublishedWeights(Record, frozen=True, kw_only=True):
    """Weights that a repository of the hub has in the planned quantization, so that nothing is converted."""

    repository: str
    """owner/name"""
    file: str | None = None
    """The GGUF file, or its first part; `None`: all files of the repository."""
    revision: str | None = None
    """The branch; `None`: the default branch."""
    size_bytes: int
    size_basis: Literal["reported", "computed"]
    """reported: by a source. computed: from the model's shape and the bits of the format."""
    sources: tuple[str, ...]
    """Addresses of the pages and files in which this was read."""

    @property
    def folder(self) -> str:
        """The local folder for a download."""
        name = self.repository.rpartition("/")[2]
        return f"{name}-{self.revision}" if self.revision is not None else name

    @property
    def path(self) -> str:
        """The name that an engine is given: a GGUF file or a branch is downloaded first, other weights by hub id."""
        if self.file is not None:
            return f"{self.folder}/{self.file}"
        return self.folder if self.revision is not None else self.repository

    @property
    def parts(self) -> int:
        """The number of files that a GGUF model is split into."""
        return len(list_part_names(self.file)) if self.file is not None else 1


class Weights(Record, frozen=True, kw_only=True):
    """The format of the weights that an engine loads, and how they get into it."""

    label: str
    """BF16, FP8, NVFP4, AWQ-INT4, Q4_K_M, 4-BIT (MLX), 4.0BPW (EXL3) …; existing files keep their own label."""
    made: Literal["as it is", "while loading", "converted"]
    format: str
    """gguf, safetensors, mlx, exl2, exl3, onnx"""
    published: PublishedWeights | None = None
    """The repository to fetch, if the weights are neither the given model's own nor made from them."""

    @property
    def is_chosen(self) -> bool:
        """Whether bedplate chose this quantization; otherwise it is that of the given model."""
        return self.made != "as it is" or self.published is not None


class Preparation(Record, frozen=True, kw_only=True):
    """A step before the launch: an install, a download, a conversion or a build."""

    kind: Literal["install", "download", "convert", "build"]
    what: str
    where: str
    download_bytes: int | None = None
    disk_bytes: int | None = None
    seconds: Figure | None = None
    argv: tuple[str, ...] = ()
    """The command, if the step is one command."""
    within: str | None = None
    """The engine whose environment runs the step, if it is not the plan's engine."""


class Launch(Record, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    prepare: tuple[Preparation, ...] = ()
    health_path: str = "/health"


class NodeLaunch(Record, frozen=True, kw_only=True):
    """One of several commands of a plan, after the preparations of the launch: for several nodes, or for replicas."""

    node: int
    """The node that it is run on, from 0; the same for replicas that share a node. Commands write the address of node N
    as NODE_N_ADDRESS."""
    starts: int = 1
    """Nodes on which this command starts processes; 2 if Slurm starts those of node 1 too."""
    replica: int = 0
    """The first replica that runs on this node."""
    serves: bool = True
    """Whether the endpoint of a replica is on this node."""
    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)


class Alternative(Record, frozen=True, kw_only=True):
    """A plan that was not chosen, and why not."""

    engine: str
    quantization: str | None = None
    parallelism: Parallelism = Parallelism()
    settings: Settings | None = None
    """`None`: it does not fit with any settings."""
    estimate: Estimate = Estimate()
    fits: bool
    """Whether it fits, and the engine would serve it."""
    why_not: str
    rule: str | None = None
    """The rule that excludes it although the order of plans prefers it; `None`: the order prefers the chosen plan."""


class Decision(Record, frozen=True, kw_only=True):
    schema: Literal["decision/1"] = "decision/1"
    engine: str | None
    engine_version: str | None = None
    orchestrator: str | None = None
    model: str
    quantization: str | None = None
    parallelism: Parallelism = Parallelism()
    fits: bool
    max_concurrency: int
    weights: Weights | None = None
    in_flight: int = 1
    """Concurrent requests that the decision was made for."""
    load: RequestLoad | None = None
    """How requests arrive, their rate, and how many are in flight; `None` if no engine fits."""
    settings: Settings | None = None
    memory: Fit | None = None
    estimate: Estimate = Estimate()
    unpacks: bool = False
    """Whether the given GGUF file is first dequantized to a folder of 16-bit weights, which this engine loads."""
    limit: str | None = None
    """The expected bottleneck: where most of the time per token would be spent."""
    reasons: tuple[Reason, ...] = ()
    refused: tuple[Refusal, ...] = ()
    challengers: tuple[Challenger, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """The other plans that were estimated, the best first: of each engine, quantization and cache type the best layout,
    and of the chosen ones every layout."""
    hints: tuple[str, ...] = ()
    """If nothing fits, the smallest changes that would make something fit; otherwise what is idle, missed or ignored,
    with what would help."""
    hint_details: tuple[Hint, ...] = ()
    """Kind and figures of each hint, in the order of `hints`."""
    notes: tuple[str, ...] = ()
    """Assumptions, and remarks on unusual input."""
    launch: Launch | None = None
    """The preparations and the engine's command, without the options for several nodes."""
    node_launches: tuple[NodeLaunch, ...] = ()
    """The commands to run instead of that of `launch`, if the plan uses several nodes, or a server for each replica."""


class Plan(Record, frozen=True, kw_only=True):
    """Everything that `run` needs to put one engine into service."""

    schema: Literal["plan/1"] = "plan/1"
    engine: str
    engine_version: str
    model: Model
    """The model that the engine is given, before any conversion of its own."""
    source: Model | None = None
    """The GGUF file that `model` is dequantized from, if it is."""
    workload: Workload
    weights: Weights
    parallelism: Parallelism = Parallelism()
    settings: Settings
    orchestrator: str | None = None

    @property
    def model_path(self) -> str:
        """The path of the file or folder that the engine is given, else the hub id, of published weights if planned."""
        if not self.model.files and self.weights.published is not None:
            return self.weights.published.path
        if not self.model.files:
            return self.model.short_name if self.model.is_unpacked else self.model.name
        path = self.model.files[0]
        return path if path.endswith(".gguf") else str(PurePath(path).parent)
