"""ONNX Runtime: portable across vendors, and for models that are no language models."""

from __future__ import annotations

from bedplate.engines.base import Engine
from bedplate.values import Hardware, Model, Refusal, Workload


class OnnxRuntime(Engine):
    id = "onnxruntime"
    name = "ONNX Runtime"
    formats = ("onnx",)
    strength = "hardware of several vendors, or models that are no LLMs"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if workload.task == "generate" and model.format == "gguf":
            return self.refusal(
                "unsuitable",
                "built for portability and for models that are no LLMs",
                "the same model must run on several vendors' hardware",
            )
        return self.not_run_yet()


ENGINE = OnnxRuntime()
