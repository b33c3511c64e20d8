"""Decision and Plan: the chosen engine and the reasons, the refused engines, the estimate and the launch command."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec

from bedplate.values.arrival import RequestLoad
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
    threads: int | None = None
    gpu_layers: int | None = None
    """Layers on the accelerators if the others stay on the host; `None`: all layers, or no accelerator."""
    host_expert_layers: int | None = None
    """Layers whose routed experts stay on the host, while everything else is on the accelerators."""
    kv_type: Literal["16-bit", "fp8"] = "16-bit"
    batch_tokens: int | None = None
    """Prefill chunk size: the most prompt tokens in one batch; `None`: the engine default."""
    memory_share: float | None = None
    """Share of each accelerator's memory that the engine may use; `None`: as much as it needs."""
    compute_capability: str | None = None
    """CUDA compute capability, if it decides which package of the engine is installed."""
    turned: TunedSettings | None = None
    """The settings that `bedplate tune` found on this machine; `None`: none."""


class Weights(Record, frozen=True, kw_only=True):
    """The format of the weights that an engine loads, and how they get into it."""

    label: str
    """BF16, FP8, NVFP4, AWQ-INT4, Q4_K_M, 4-BIT (MLX), 4.0BPW (EXL3) …; existing files keep their own label."""
    made: Literal["as it is", "while loading", "converted"]
    format: str
    """gguf, safetensors, mlx, exl2, exl3, onnx"""


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
    hints: tuple[str, ...] = ()
    """Set if nothing fits: the smallest changes that would make something fit."""
    notes: tuple[str, ...] = ()
    """Assumptions, and remarks on unusual input."""
    launch: Launch | None = None


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
        """The path of the file or folder that the engine is given, else the hub id."""
        if not self.model.files:
            return self.model.short_name if self.model.is_unpacked else self.model.name
        path = self.model.files[0]
        return path if path.endswith(".gguf") else str(PurePath(path).parent)
