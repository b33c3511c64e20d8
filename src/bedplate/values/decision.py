"""Decision and Plan: which engine and why, what was refused, what to expect, and the exact launch."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec

from bedplate.values.model import Model
from bedplate.values.record import Figure, Record
from bedplate.values.workload import Workload


Device = Literal["cpu", "cuda", "rocm", "metal", "xpu", "vulkan"]


class Reason(Record, frozen=True, kw_only=True):
    rule: str
    text: str
    source: str


class Refusal(Record, frozen=True, kw_only=True):
    """Why an engine is neither chosen nor worth measuring, and what would change that."""

    engine: str
    kind: Literal["impossible", "unsuitable", "outranked"]
    why: str
    hint: str | None = None


class Challenger(Record, frozen=True, kw_only=True):
    engine: str
    evidence_needed: str


class Parallelism(Record, frozen=True, kw_only=True):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    attention_data: int = 1


class MemoryNeed(Record, frozen=True, kw_only=True):
    """What a plan takes, by what takes it. Weights and cache follow from headers; the rest is the engine's own."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: Figure
    available_bytes: int
    reserved_bytes: int = 0
    """Of what is available, what is left to the system and to whatever else runs."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + round(self.overhead_bytes.value)

    @property
    def high_bytes(self) -> int:
        """The upper end of the band: what must fit."""
        return self.weights_bytes + self.kv_bytes + round(self.overhead_bytes.high)

    @property
    def fits(self) -> bool:
        return self.high_bytes + self.reserved_bytes <= self.available_bytes


class Estimate(Record, frozen=True, kw_only=True):
    """What to expect. `None` is not known yet, and is shown as TBD."""

    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    output_tok_s: Figure | None = None
    memory_gb: Figure | None = None


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


class Weights(Record, frozen=True, kw_only=True):
    """In what form an engine is given a model, and how that form comes about."""

    label: str
    """BF16, FP8, NVFP4, MXFP4, AWQ-INT4, Q4_K_M, 4-BIT (MLX), 4.0BPW (EXL3) …; what the files hold already, as they say it."""
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
    settings: Settings | None = None
    memory: MemoryNeed | None = None
    estimate: Estimate = Estimate()
    reasons: tuple[Reason, ...] = ()
    refused: tuple[Refusal, ...] = ()
    challengers: tuple[Challenger, ...] = ()
    hints: tuple[str, ...] = ()
    """When nothing fits: the nearest things that would."""
    launch: Launch | None = None


class Plan(Record, frozen=True, kw_only=True):
    """All that `run` needs to put one engine into service."""

    schema: Literal["plan/1"] = "plan/1"
    engine: str
    engine_version: str
    model: Model
    workload: Workload
    weights: Weights
    parallelism: Parallelism = Parallelism()
    settings: Settings
    orchestrator: str | None = None

    @property
    def model_path(self) -> str:
        """What the engine is given: the file or the folder where there is one, else the hub id."""
        if not self.model.files:
            return self.model.name
        path = self.model.files[0]
        return path if path.endswith(".gguf") else str(PurePath(path).parent)
