"""TensorRT-LLM: the most that NVIDIA hardware gives, for a model that rarely changes."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class TensorRtLlm(Engine):
    id = "tensorrt-llm"
    name = "TensorRT-LLM"
    formats = ("safetensors",)
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
