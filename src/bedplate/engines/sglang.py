"""SGLang: shared prefixes, long context and mixtures of experts, at scale."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class Sglang(Engine):
    id = "sglang"
    name = "SGLang"
    formats = ("safetensors",)
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=3_000_000_000,
        prefill_tokens=8192,
        share=0.88,
        spread=0.5,
        source="SGLang: mem_fraction_static and chunked_prefill_size defaults; graphs as its log reports",
    )
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
