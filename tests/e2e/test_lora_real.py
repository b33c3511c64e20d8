"""LoRA adapters as models: llama.cpp with adapters that the test makes for the built-in model."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import yaml
from tests.conftest import Served, post_json

MODEL = "smollm2-135m-instruct"
WIDTH = 576
PROMPT = "The capital of France is"


def make_adapter(path: Path, strength: float) -> Path:
    """A LoRA adapter of rank 2 for the first layers' attention output, as llama.cpp's converter writes it."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    for layer in range(8):
        for end, shape in (("a", (2, WIDTH)), ("b", (WIDTH, 2))):
            data = random.normal(0, strength, shape).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.attn_output.weight.lora_{end}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def complete(served: Served, model: str, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "seed": 1, **more}
    return post_json(f"{served.url}/completions", body)


def change(*arguments: str) -> dict[str, str]:
    """The states of the adapters after `bedplate adapters …`."""
    argv = [sys.executable, "-m", "bedplate", "adapters", *arguments, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return {one["name"]: one["state"] for one in json.loads(done.stdout)["adapters"]}


def test_adapters_are_models_of_their_own(serve: Callable[..., Served], own_home: Path, tmp_path: Path) -> None:
    none, strong = make_adapter(tmp_path / "none.gguf", 0.0), make_adapter(tmp_path / "strong.gguf", 0.6)
    file = tmp_path / "lora.yaml"
    adapters = [{"path": str(none), "rank": 2}, {"path": str(strong), "name": "pirate", "rank": 2}]
    service = {"model": "builtin", "engine": "llama.cpp", "workload": {"lora_adapters": adapters}}
    file.write_text(yaml.safe_dump({"services": [service]}))
    served = serve("-f", str(file), "--name", "lora")
    with urllib.request.urlopen(f"{served.url}/models") as listed:
        assert [one["id"] for one in json.load(listed)["data"]] == [MODEL, "none", "pirate"]
    texts: dict[str, str] = {}
    for model in (MODEL, "none", "pirate", MODEL):  # the adapter of one request does not affect the next
        status, answer = complete(served, model)
        assert status == 200 and answer["model"] == model, answer
        assert texts.setdefault(model, answer["choices"][0]["text"]) == answer["choices"][0]["text"]
    assert texts[MODEL] == texts["none"] != texts["pirate"]
    assert change("unload", "pirate") == {"none": "loaded", "pirate": "unloaded"}
    status, answer = complete(served, "pirate")
    assert status == 404 and answer["error"]["message"].endswith(f"served: {MODEL}, none")
    assert complete(served, MODEL)[1]["choices"][0]["text"] == texts[MODEL]
    assert change("load", "pirate") == {"none": "loaded", "pirate": "loaded"}
    assert complete(served, "pirate")[1]["choices"][0]["text"] == texts["pirate"]
    with urllib.request.urlopen(f"{served.root}/metrics") as metrics:
        text = metrics.read().decode()
    assert 'bedplate_tokens_total{engine="llama.cpp",kind="completion",model="pirate"} 8.0' in text, "two answers"
    status, answer = complete(served, "absent")
    assert status == 404 and "pirate" in answer["error"]["message"]


def test_single_adapter_leaves_the_model_as_it_is_and_belongs_to_its_tenant(
    serve: Callable[..., Served], own_home: Path, tmp_path: Path
) -> None:
    strong = make_adapter(tmp_path / "strong.gguf", 0.6)
    file = tmp_path / "lora.yaml"
    adapters = [{"path": str(strong), "name": "pirate", "rank": 2, "tenants": ["red"]}]
    service = {"model": "builtin", "engine": "llama.cpp", "workload": {"lora_adapters": adapters}}
    file.write_text(yaml.safe_dump({"services": [service], "tenants": [{"name": "red"}, {"name": "blue"}]}))
    keys = {}
    for tenant in ("red", "blue"):
        made = subprocess.run(
            [sys.executable, "-m", "bedplate", "keys", "add", tenant, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        keys[tenant] = json.loads(made.stdout)["key"]
    served = serve("-f", str(file), "--name", "lora")

    def ask(tenant: str, model: str) -> tuple[int, Any]:
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {keys[tenant]}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{served.url}/completions", body, headers)) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["error"]["message"]

    status, plain = ask("red", MODEL)
    assert status == 200 and ask("blue", MODEL) == (200, plain)
    status, changed = ask("red", "pirate")
    assert status == 200 and changed != plain
    assert ask("red", MODEL) == (200, plain), "the adapter applies to its own requests alone"
    status, message = ask("blue", "pirate")
    assert status == 404 and message.endswith(f"served: {MODEL}")
