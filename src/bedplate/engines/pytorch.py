"""PyTorch native: no engine at all; the simplest thing for prototypes and one-at-a-time jobs."""

from __future__ import annotations

from bedplate.engines.base import Engine, MemoryUse
from bedplate.values import Hardware, Model, Refusal, Workload


class PyTorch(Engine):
    id = "pytorch"
    name = "PyTorch"
    formats = ("safetensors",)
    uses = MemoryUse(
        process_bytes=1_500_000_000,
        device_bytes=40_000_000,
        spread=0.5,
        source="published peaks of Transformers on A100 and H20; the driver's own context is not in them",
    )
    strength = "prototypes, and jobs that take one item at a time"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if not hardware.accelerators:
            return self.refusal(
                "unsuitable",
                "no batching and no memory management: for prototypes, not for serving",
                "a prototype, or a job that takes one item at a time",
            )
        return self.not_run_yet()


ENGINE = PyTorch()
