"""mistral.rs: GGUF and Hugging Face weights in one small binary."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class MistralRs(Engine):
    id = "mistral.rs"
    name = "mistral.rs"
    formats = ("gguf", "safetensors")
    strength = "a small portable binary for one user"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return self.not_run_yet()


ENGINE = MistralRs()
