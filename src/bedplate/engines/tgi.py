"""TGI: Hugging Face's server; no longer developed, so never a first choice for something new."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class Tgi(Engine):
    id = "tgi"
    name = "TGI"
    formats = ("safetensors",)
    strength = "a team that runs it already"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not (hardware.has("nvidia") or hardware.has("amd")):
            return self.refusal(
                "impossible", "needs a GPU, and comes as a container", "vllm serves the same models and is maintained"
            )
        return self.not_run_yet()


ENGINE = Tgi()
