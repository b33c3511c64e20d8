"""Decision and Plan: which engine and why, what was refused, what to expect, and the exact launch."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec

from bedplate.values.fit import Fit
from bedplate.values.model import Model
from bedplate.values.record import Figure, Record
from bedplate.values.workload import Workload

Device = Literal["cpu", "cuda", "rocm", "metal", "xpu", "vulkan"]


class Reason(Record, frozen=True, kw_only=True):
    rule: str
    text: str
    source: str


class Shortage(Record, frozen=True, kw_only=True):
    """The memory that even the smallest weights an engine takes would need on its fullest device."""

    device: str
    """`host`, or what the engine computes on."""
    count: int
    """Devices that need as much each."""
    weights_label: str
    needed_bytes: float
    weights_bytes: float
    cache_bytes: float
    overhead_bytes: float
    """The engine's own memory: runtime, activations, graphs."""
    usable_bytes: int | None
    """Free memory that the engine may use; `None`: unknown."""


class Remedy(Record, frozen=True, kw_only=True):
    """A change with which the model would fit."""

    kind: Literal["quantization", "memory", "cards"]
    most_bits_per_weight: float | None = None
    bits_per_weight: float | None = None
    """Of the weights that did not fit."""
    memory_bytes: float | None = None
    on_cards: bool = False
    """Whether the memory is missing on accelerators alone."""
    cards: int | None = None


class Refusal(Record, frozen=True, kw_only=True):
    """Why an engine is neither chosen nor worth measuring, and what would change that."""

    engine: str
    kind: Literal["impossible", "unsuitable", "outranked"]
    why: str
    hint: str | None = None
    shortage: Shortage | None = None
    """Where the model does not fit: the figures behind `why`."""
    remedies: tuple[Remedy, ...] = ()
    """Where the model does not fit: what would make it fit, the nearest first."""


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
    """What to expect. `None` is not known yet, and is shown as TBD."""

    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    output_tok_s: Figure | None = None
    """Of all requests in flight together."""
    memory_gb: Figure | None = None
    """On the fullest device."""
    cost_per_million_tokens: Figure | None = None
    """Of output, in the currency of the price that was given."""
    kwh_per_million_tokens: Figure | None = None


class Turned(Record, frozen=True, kw_only=True):
    """What tuning found beyond the settings that all engines share, in this engine's own words."""

    knobs: tuple[tuple[str, str], ...] = ()
    """Names and values, for people."""
    options: tuple[str, ...] = ()
    """Of its command line, in the place of those of the same name."""
    without: tuple[str, ...] = ()
    """Options that it is not given."""
    variables: tuple[tuple[str, str], ...] = ()
    native: bool = False
    """In the engine as it was built for this machine, where that is there."""
    own_defaults: bool = False
    """Told nothing but the model and where to listen: what tuning is held against."""


class Settings(Record, frozen=True, kw_only=True):
    """What the plan fixes about the engine, in terms that all engines share."""

    slots: int
    """Requests that are computed at once by one replica; more than that wait in the engine."""
    context_tokens: int
    """The longest request, prompt and answer together."""
    device: Device = "cpu"
    """What it computes on; `cpu` where accelerators stay idle."""
    threads: int | None = None
    gpu_layers: int | None = None
    """Layers on the accelerators, where the rest stays on the host; `None`: all, or there are none."""
    host_expert_layers: int | None = None
    """Layers whose routed experts stay on the host, while all else is on the accelerators."""
    kv_type: Literal["16-bit", "fp8"] = "16-bit"
    batch_tokens: int | None = None
    """Prompt tokens that are computed at once at the most; `None`: the engine's own default."""
    memory_share: float | None = None
    """Of each accelerator's memory, what the engine may take; `None`: it takes what it needs."""
    compute_capability: str | None = None
    """CUDA's, where it decides which package of the engine is installed."""
    turned: Turned | None = None
    """What `bedplate tune` found here; `None`: nothing beyond the above."""


class Weights(Record, frozen=True, kw_only=True):
    """In what form an engine is given a model, and how that form comes about."""

    label: str
    """BF16, FP8, NVFP4, AWQ-INT4, Q4_K_M, 4-BIT (MLX), 4.0BPW (EXL3) …; of files as they are, in their own words."""
    made: Literal["as it is", "while loading", "converted"]
    format: str
    """gguf, safetensors, mlx, exl2, exl3, onnx"""


class Preparation(Record, frozen=True, kw_only=True):
    """A step before the launch: an install, a download, a conversion."""

    kind: Literal["install", "download", "convert", "build"]
    what: str
    where: str
    download_bytes: int | None = None
    disk_bytes: int | None = None
    seconds: Figure | None = None
    argv: tuple[str, ...] = ()
    """The command that does it, where it is one command."""
    within: str | None = None
    """The engine in whose environment it runs, where that is another than the plan's own."""


class Launch(Record, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    prepare: tuple[Preparation, ...] = ()
    health_path: str = "/health"


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
    """Requests at once that this was decided for."""
    settings: Settings | None = None
    memory: Fit | None = None
    estimate: Estimate = Estimate()
    unpacks: bool = False
    """Whether the GGUF that was named is first unpacked to a folder of 16-bit weights, which this engine loads."""
    limit: str | None = None
    """What most of the time of making a token would be spent on."""
    reasons: tuple[Reason, ...] = ()
    refused: tuple[Refusal, ...] = ()
    challengers: tuple[Challenger, ...] = ()
    hints: tuple[str, ...] = ()
    """When nothing fits: the nearest things that would."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what is odd about the question."""
    launch: Launch | None = None


class Plan(Record, frozen=True, kw_only=True):
    """All that `run` needs to put one engine into service."""

    schema: Literal["plan/1"] = "plan/1"
    engine: str
    engine_version: str
    model: Model
    """What the engine is given, before any conversion of its own."""
    source: Model | None = None
    """The GGUF that `model` is unpacked from, where it is."""
    workload: Workload
    weights: Weights
    parallelism: Parallelism = Parallelism()
    settings: Settings
    orchestrator: str | None = None

    @property
    def model_path(self) -> str:
        """What the engine is given: the file or the folder where there is one or will be, else the hub id."""
        if not self.model.files:
            return self.model.short_name if self.model.is_unpacked else self.model.name
        path = self.model.files[0]
        return path if path.endswith(".gguf") else str(PurePath(path).parent)
