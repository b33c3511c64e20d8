"""SGLang: shared prefixes, long context and mixtures of experts, at scale."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class Sglang(Engine):
    id = "sglang"
    name = "SGLang"
    formats = ("safetensors",)
    strength = "shared prefixes, structured output, long context or MoE at scale"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not (hardware.has("nvidia") or hardware.has("amd")):
            return self.refusal(
                "unsuitable",
                "built for CUDA and ROCm clusters; there is no GPU here",
                "GPUs, and shared prefixes or MoE with long context",
            )
        return self.not_run_yet()


ENGINE = Sglang()
