"""TensorRT-LLM: the most that NVIDIA hardware gives, for a model that rarely changes."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class TensorRtLlm(Engine):
    id = "tensorrt-llm"
    name = "TensorRT-LLM"
    formats = ("safetensors",)
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=3_000_000_000,
        prefill_tokens=8192,
        share=0.90,
        spread=0.5,
        source="TensorRT-LLM: free_gpu_memory_fraction and max_num_tokens defaults",
    )
    strength = "extreme volume on NVIDIA, a model that rarely changes"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not hardware.has("nvidia"):
            return self.refusal(
                "impossible",
                "needs an NVIDIA GPU",
                "data-centre NVIDIA, extreme volume, and a model that rarely changes",
            )
        return self.not_run_yet()


ENGINE = TensorRtLlm()
