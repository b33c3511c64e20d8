"""PyTorch native: no engine at all; the simplest thing for prototypes and one-at-a-time jobs."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class PyTorch(Engine):
    id = "pytorch"
    name = "PyTorch"
    formats = ("safetensors",)
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
