"""MLX: Apple Silicon's own arrays and unified memory."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class Mlx(Engine):
    id = "mlx"
    name = "MLX"
    formats = ("mlx",)
    strength = "work that is centred on a Mac"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not hardware.has("apple"):
            return self.refusal("impossible", "needs Apple Silicon", "a Mac with an M-series chip")
        return self.not_run_yet()


ENGINE = Mlx()
