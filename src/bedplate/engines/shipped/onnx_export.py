#!/usr/bin/env python3
"""Exports a Hugging Face encoder to an ONNX folder; GenAI's builder does this for models that generate text.

Runs in the engine's environment: torch, transformers and onnx. The result is compared with PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXTS = ("A cat sits on the mat.", "Inference engines differ, but the numbers should not: 3.14159, naïve, 猫.")
MOST_OFF = 1e-3
"""Maximum difference to PyTorch in any output that is attributed to rounding."""
MOST_OFF_HALF = 5e-2
"""The same with 16-bit weights, whose outputs have three digits."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="onnx-export", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with config.json, tokenizer and .safetensors")
    parser.add_argument("--output", required=True, help="folder to create")
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32", help="type of the weights")
    options = parser.parse_args(arguments)
    source, output = Path(options.model), Path(options.output)
    if output.exists():
        sys.exit(f"onnx-export: {output} already exists")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".making-") as holder:
        staging = Path(holder) / "model"
        shutil.copytree(source, staging, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "onnx", "openvino"))
        off = export(source, staging, half=options.precision == "fp16")
        if off > (MOST_OFF_HALF if options.precision == "fp16" else MOST_OFF):
            sys.exit(f"onnx-export: the result differs from PyTorch by {off:g}, and was deleted")
        staging.rename(output)
    print(f"onnx-export: {output}, maximum difference to PyTorch {off:.1e}")  # noqa: T201


def convert_to_half(path: Path) -> None:
    """Convert the weights of a model to 16 bits; its inputs and outputs keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(path))


def export(source: Path, output: Path, *, half: bool = False) -> float:
    """Write model.onnx, and return its maximum difference to PyTorch."""
    import numpy as np
    import onnxruntime
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    names = AutoConfig.from_pretrained(source).architectures or []
    classifies = any(name.endswith("ForSequenceClassification") for name in names)
    loader = AutoModelForSequenceClassification if classifies else AutoModel
    model = loader.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    sample = _tokenize_texts(tokenizer, TEXTS)
    made = "logits" if classifies else "last_hidden_state"

    class Plain(torch.nn.Module):  # type: ignore[misc]
        """Returns one tensor instead of a record."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, **more)[made]

    any_size = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        # Not by tracing, which exports wrong attention masks in this version.
        torch.onnx.export(
            Plain(),
            (),
            str(output / "model.onnx"),
            kwargs=sample,
            input_names=list(sample),
            output_names=[made],
            dynamic_shapes={name: {0: any_size, 1: any_size} for name in sample},
            opset_version=18,
            external_data=False,
            dynamo=True,
            verbose=False,
        )
        if half:
            convert_to_half(output / "model.onnx")
        session = onnxruntime.InferenceSession(str(output / "model.onnx"), providers=["CPUExecutionProvider"])
        off = 0.0
        for texts in (TEXTS, TEXTS[:1]):  # also with other shapes than those of the export
            given = _tokenize_texts(tokenizer, texts)
            (found,) = session.run([made], {name: value.numpy() for name, value in given.items()})
            wrong = np.abs(found - model(**given)[made].numpy())
            if not classifies:  # outputs at padding are never used
                wrong = wrong * given["attention_mask"].numpy()[:, :, None]
            off = max(off, float(wrong.max()))
    return off


def _tokenize_texts(tokenizer: Any, texts: tuple[str, ...]) -> dict[str, Any]:
    found = tokenizer(list(texts), padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in found}


if __name__ == "__main__":
    main()
