"""ExLlamaV3: EXL3 weights on one to four RTX cards."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class ExLlamaV3(Engine):
    id = "exllamav3"
    name = "ExLlamaV3"
    formats = ("exl3",)
    uses = MemoryUse(
        process_bytes=1_500_000_000,
        device_bytes=600_000_000,
        prefill_tokens=2048,
        spread=0.6,
        source="ExLlamaV3: max_chunk_size default; context and kernels assumed as for PyTorch",
    )
    strength = "one to four RTX cards, one user"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not hardware.has("nvidia"):
            return self.refusal("impossible", "needs an NVIDIA GPU", "one to four RTX cards")
        return self.not_run_yet()


ENGINE = ExLlamaV3()
