"""MLX: Apple Silicon's own arrays and unified memory."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class Mlx(Engine):
    id = "mlx"
    name = "MLX"
    formats = ("mlx",)
    uses = MemoryUse(
        process_bytes=150_000_000,
        prefill_tokens=2048,
        mlp_copies=0.0,
        hidden_copies=0.0,
        logits_for_all=True,
        spread=0.5,
        source="published peaks of mlx-lm on M4 Max: the logits of one prefill step explain what is left",
    )
    strength = "work that is centred on a Mac"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not hardware.has("apple"):
            return self.refusal("impossible", "needs Apple Silicon", "a Mac with an M-series chip")
        return self.not_run_yet()


ENGINE = Mlx()
