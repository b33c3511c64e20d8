"""vLLM: the default for serving many users from data-centre GPUs."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class Vllm(Engine):
    id = "vllm"
    name = "vLLM"
    formats = ("safetensors",)
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
