"""LoRA adapters in the format of PEFT, made by the tests, and the answers that PyTorch computes with them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.conftest import Served, post_json

PROMPT = "The capital of France is"
RANK = 2
REFERENCE = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, adapter, prompt, scale = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt").input_ids
def answer():
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True)
plain = answer()
weights = load_file(adapter + "/adapter_model.safetensors")
for name, low in weights.items():
    if ".lora_A." in name:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        high = weights[name.replace(".lora_A.", ".lora_B.")]
        with torch.no_grad():
            model.get_submodule(path).weight += float(scale) * high @ low
print(json.dumps([plain, answer()]))
"""
"""Merges the adapter into the weights, and computes in float32."""


def make_adapter(
    folder: Path, strength: float, *, layers: int, width: int, rank: int = RANK, alpha: int = RANK, seed: int = 1
) -> Path:
    """A LoRA adapter of the first layers' attention output, which has as many inputs as outputs."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": ["o_proj"],
        "bias": "none", "base_model_name_or_path": "made by a test", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    data = b""
    for layer in range(layers):
        for end, shape in (("A", (rank, width)), ("B", (width, rank))):
            part = random.normal(0, strength, shape).astype("<f4").tobytes()
            name = f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{end}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
            data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bedplate", "adapters", *arguments, "--json"]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def complete(served: Served, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    status, answer = post_json(f"{served.url}/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def compute_answers(python: str, folder: str, adapter: Path, cwd: str | None = None, scale: float = 1.0) -> list[str]:
    """The answers of the model without and with the adapter."""
    made = subprocess.run(
        [python, "-c", REFERENCE, folder, str(adapter), PROMPT, str(scale)],
        cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    found: list[str] = json.loads(made.stdout)
    return found
