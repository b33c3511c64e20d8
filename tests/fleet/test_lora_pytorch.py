"""LoRA adapters with PyTorch's server, for a tiny model: as models, loaded and unloaded while it runs.

The answers must be those of transformers with the adapter merged into the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import yaml
from tests.conftest import Served, have_ended, start_serve, wait_for
from tests.fleet.lora import PROMPT, RANK, change, change_config, complete, compute_answers, make_adapter

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment, make_environment

pytestmark = pytest.mark.engine
STORED = Path(__file__).parents[1] / "models" / "llama"
MODEL = "tiny-llama"
SHAPE = {"layers": 3, "width": 128}
STRENGTH = 0.6
WIDEN = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="module")
def pytorch(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("pytorch"))


@pytest.fixture(scope="module")
def model(pytorch: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32, so that each way of computing it chooses the same tokens."""
    folder = tmp_path_factory.mktemp("lora") / MODEL
    shutil.copytree(STORED, folder)
    argv = [str(pytorch.interpreter), "-c", WIDEN, str(STORED), str(folder)]
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[object], Served]]:
    running: list[Served] = []

    def start_one(adapters: object) -> Served:
        file = tmp_path / "lora.yaml"
        service = {"model": str(model), "engine": "pytorch", "workload": {"lora_adapters": adapters}}
        file.write_text(yaml.safe_dump({"services": [service]}))
        running.append(start_serve("-f", str(file)))
        return running[-1]

    yield start_one
    for served in running:
        below = served.list_descendants()
        served.stop()
        wait_for(lambda below=below: have_ended(below), "the engine's processes to end")  # type: ignore[misc]


def test_pytorch_loads_and_unloads_adapters_while_it_runs(
    start: Callable[[object], Served], pytorch: EngineEnvironment, model: Path, tmp_path: Path
) -> None:
    pirate = make_adapter(tmp_path / "pirate", STRENGTH, **SHAPE)
    poet = make_adapter(tmp_path / "poet", STRENGTH, **SHAPE, alpha=2 * RANK, seed=2)
    plain, of_pirate = compute_answers(str(pytorch.interpreter), str(model), pirate)
    _, of_poet = compute_answers(str(pytorch.interpreter), str(model), poet, scale=2.0)
    assert len({plain, of_pirate, of_poet}) == 3
    served = start(2)
    assert served.endpoint, "".join(served.stderr)
    assert complete(served, MODEL) == (200, plain) and complete(served, "pirate")[0] == 404
    for name, folder in (("pirate", pirate), ("poet", poet)):
        done = change("load", name, str(folder))
        assert done.returncode == 0, done.stderr
    known = {MODEL: plain, "pirate": of_pirate, "poet": of_poet}
    with ThreadPoolExecutor(6) as pool:
        asked = [*known] * 4
        answers = list(pool.map(lambda name: complete(served, name), asked))
    assert answers == [(200, known[name]) for name in asked], "requests at the same time do not disturb each other"
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    stream = client.completions.create(model="poet", prompt=PROMPT, max_tokens=4, temperature=0, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in chunks) == of_poet

    full = change("load", "third", str(pirate))
    assert full.returncode == 1 and "--max-loras" in full.stderr
    commands = {one: one.cmdline() for one in served.list_descendants()}
    server = next(one for one, words in commands.items() if "serve" in words and "/engines/pytorch/" in words[0])
    server.send_signal(signal.SIGKILL)
    wait_for(lambda: complete(served, "pirate") == (200, of_pirate), "the restarted engine with the adapter")
    assert change("unload", "pirate").returncode == 0
    assert complete(served, "pirate")[0] == 404
    assert complete(served, MODEL) == (200, plain) and complete(served, "poet") == (200, of_poet)
    done = change("load", "third", str(pirate))
    assert done.returncode == 0 and complete(served, "third") == (200, of_pirate)


def test_broken_adapters_are_refused_and_the_model_goes_on(start: Callable[[object], Served], tmp_path: Path) -> None:
    served = start(1)
    assert served.endpoint, "".join(served.stderr)
    _, plain = complete(served, MODEL)
    cut, pickled = (make_adapter(tmp_path / name, STRENGTH, **SHAPE) for name in ("cut", "pickled"))
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    dora, other = (make_adapter(tmp_path / name, STRENGTH, **SHAPE) for name in ("dora", "other"))
    change_config(dora, use_dora=True)
    change_config(other, peft_type="IA3")
    narrow = make_adapter(tmp_path / "narrow", STRENGTH, layers=3, width=64)
    deep = make_adapter(tmp_path / "deep", STRENGTH, layers=4, width=128)
    large = make_adapter(tmp_path / "large", STRENGTH, **SHAPE, rank=32)
    infinite = make_adapter(tmp_path / "infinite", float("inf"), **SHAPE)
    for folder, says in (
        (cut, "adapter_model.safetensors cannot be read"),
        (pickled, "a pickle can run code"),
        (dora, "use_dora in adapter_config.json is not supported"),
        (other, "peft_type is not LORA"),
        (narrow, "[2, 64] and [64, 2]"),
        (deep, "no linear layer model.layers.3.self_attn.o_proj"),
        (large, "its rank is 32"),
        (infinite, "not finite"),
    ):
        done = change("load", "broken", str(folder))
        # The terminal may wrap lines.
        assert done.returncode == 1 and says in " ".join(done.stderr.split()), done.stderr
        assert complete(served, "broken")[0] == 404 and complete(served, MODEL) == (200, plain)


def test_listed_adapters_are_models_from_the_start(start: Callable[[object], Served], tmp_path: Path) -> None:
    none, strong = make_adapter(tmp_path / "none", 0.0, **SHAPE), make_adapter(tmp_path / "strong", STRENGTH, **SHAPE)
    served = start([{"path": str(none), "rank": RANK}, {"path": str(strong), "name": "pirate", "rank": RANK}])
    assert served.endpoint, "".join(served.stderr)
    with urllib.request.urlopen(f"{served.url}/models") as listed:
        assert [one["id"] for one in json.load(listed)["data"]] == [MODEL, "none", "pirate"]
    (_, plain), (_, same), (_, changed) = (complete(served, name) for name in (MODEL, "none", "pirate"))
    assert plain == same != changed and complete(served, MODEL) == (200, plain)
    assert change("unload", "pirate").returncode == 0 and complete(served, "pirate")[0] == 404
    assert change("load", "pirate").returncode == 0 and complete(served, "pirate") == (200, changed)


def test_a_broken_listed_adapter_ends_the_start_with_its_reason(
    start: Callable[[object], Served], tmp_path: Path
) -> None:
    narrow = make_adapter(tmp_path / "narrow", STRENGTH, layers=3, width=64)
    served = start([str(narrow)])
    assert served.endpoint is None or not served.endpoint
    assert served.process.wait() != 0
    served.reader.join()
    assert "the LoRA adapter narrow cannot be loaded: the matrices of" in " ".join("".join(served.stderr).split())
