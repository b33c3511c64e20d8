"""LoRA adapters that vLLM loads while it runs, made by the test; its answers are compared with PyTorch's."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tests.conftest import Served, have_ended, post_json, start_serve, wait_for

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
LAYERS, WIDTH, RANK = 8, 576, 2
REFERENCE = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, adapter, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt").input_ids
def answer():
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1]:])
plain = answer()
weights = load_file(adapter + "/adapter_model.safetensors")
for name, low in weights.items():
    if ".lora_A." in name:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        high = weights[name.replace(".lora_A.", ".lora_B.")]
        with torch.no_grad():
            model.get_submodule(path).weight += high @ low  # alpha is the rank: a scale of 1
print(json.dumps([plain, answer()]))
"""


def make_adapter(folder: Path, strength: float) -> Path:
    """A LoRA adapter of the first layers' attention output, in the format of PEFT."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"],
        "bias": "none", "base_model_name_or_path": MODEL, "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(1)
    header: dict[str, Any] = {}
    data = b""
    for layer in range(LAYERS):
        for end, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK))):
            part = random.normal(0, strength, shape).astype("<f4").tobytes()
            name = f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{end}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
            data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def change(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bedplate", "adapters", *arguments, "--json"]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def complete(served: Served, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    status, answer = post_json(f"{served.url}/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def test_vllm_loads_and_unloads_adapters_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "lora.yaml"
    service = {"model": "builtin", "engine": "vllm", "workload": {"lora_adapters": 2}}
    file.write_text(yaml.safe_dump({"services": [service]}))
    strong, large = make_adapter(tmp_path / "strong", 0.6), make_adapter(tmp_path / "large", 0.0)
    config = json.loads((large / "adapter_config.json").read_text())
    (large / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))
    served = start_serve("-f", str(file))
    assert served.endpoint, "".join(served.stderr)
    try:
        status, plain = complete(served, MODEL)
        assert status == 200 and complete(served, "pirate")[0] == 404
        done = change("load", "pirate", str(strong))
        assert done.returncode == 0, done.stderr
        assert [(one["name"], one["state"]) for one in json.loads(done.stdout)["adapters"]] == [("pirate", "loaded")]
        status, changed = complete(served, "pirate")
        assert status == 200 and changed != plain == complete(served, MODEL)[1]
        refused = change("load", "large", str(large))
        assert refused.returncode == 1 and "rank" in refused.stderr and complete(served, "large")[0] == 404

        commands = {one: one.cmdline() for one in served.list_descendants()}
        server = next(one for one, words in commands.items() if words and "/engines/vllm/" in words[0])
        python, folder = commands[server][0], commands[server][commands[server].index("--model") + 1]
        made = subprocess.run(
            [python, "-c", REFERENCE, folder, str(strong), PROMPT],
            cwd=server.cwd(), capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout) == [plain, changed], "as PyTorch in float32 with the adapter merged"

        server.send_signal(signal.SIGKILL)
        wait_for(lambda: complete(served, "pirate") == (200, changed), "the restarted engine with the adapter")
        assert change("unload", "pirate").returncode == 0
        assert complete(served, "pirate")[0] == 404 and complete(served, MODEL) == (200, plain)
    finally:
        below = served.list_descendants()
        assert served.stop() == 0
        wait_for(lambda: have_ended(below), "the engine's processes to end")
