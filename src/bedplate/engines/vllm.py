"""vLLM: the default for serving many users from data-centre GPUs."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class Vllm(Engine):
    id = "vllm"
    name = "vLLM"
    formats = ("safetensors",)
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=2_500_000_000,
        prefill_tokens=8192,
        share=0.92,
        spread=0.5,
        source="vLLM: defaults of gpu_memory_utilization and max_num_batched_tokens; graphs as its log reports",
    )
    strength = "many users over an API on data-centre GPUs"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not (hardware.has("nvidia") or hardware.has("amd")):
            return self.refusal(
                "unsuitable",
                "built to serve many users from GPUs; there is none here",
                "an NVIDIA or AMD GPU, and many users",
            )
        return self.not_run_yet()


ENGINE = Vllm()
