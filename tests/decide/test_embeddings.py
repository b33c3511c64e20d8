"""Embedding and reranking models: half precision and batches on GPUs, for every engine that serves them."""

from __future__ import annotations

import argparse
import asyncio
import functools
import threading
from typing import Any

import pytest
from tests.decide.plan_cases import list_chips, make_machine

from bedplate.decide import decide
from bedplate.decide.case import SMALL_PARAMETERS
from bedplate.decide.planning import plan
from bedplate.decide.verify import list_faults
from bedplate.engines.shipped.openai_server.backend import BackendError
from bedplate.engines.shipped.openai_server.worker import EngineWorker
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model, list_known_names
from bedplate.values import Decision, Hardware, Workload, replace_fields

L4 = {"accelerator": "L4", "ram_gb": 64}
LOADS = (Workload(), Workload(concurrency=64, prompt_tokens=256), Workload(requests_per_s=100, prompt_tokens=128))
QUICK = 120
HALF = ("BF16", "F16")


@functools.cache
def list_pooling_models() -> tuple[str, ...]:
    return tuple(name for name in list_known_names() if find_model(name).task in ("embed", "classify"))


def decide_here(hardware: Hardware | dict[str, Any], name: str, work: Workload, engine: str | None = None) -> Decision:
    on = make_simulated_hardware(hardware) if isinstance(hardware, dict) else hardware
    return decide(on, find_model(name), work, engine)


def get_option(found: Decision, name: str) -> str:
    assert found.launch is not None
    return found.launch.argv[found.launch.argv.index(name) + 1]


def test_generated_plans_on_gpus_are_in_half_precision_and_batched() -> None:
    planned, names = 0, list_pooling_models()
    chips = [chip for chip in list_chips() if chip.kind != "cpu" and chip.vendor in ("nvidia", "amd")]
    for number in range(QUICK):
        name, work = names[number % len(names)], LOADS[number % len(LOADS)]
        machine = make_machine(chips[(7 * number) % len(chips)].name, 1 + number % 2)
        if machine is None:
            continue
        found = decide_here(machine, name, work)
        if found.launch is None or found.settings is None or found.settings.device == "cpu":
            continue
        planned += 1
        label = f"{name} on {machine.accelerators[0].name}: {found.engine}, {found.quantization}"
        small = find_model(name).parameters < SMALL_PARAMETERS
        # A model of the size of an LLM may need fewer bits, or leave memory for one request only.
        assert found.quantization in HALF or not small, label
        assert found.settings.slots > 1 or not small, label
        assert found.quantization != "F32", label
        assert list_faults(plan(found, find_model(name), work), found.launch, machine) == (), label
    assert planned > QUICK / 2


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "onnxruntime"])
def test_each_engine_has_half_precision_and_a_slot_for_each_request(engine: str) -> None:
    found = decide_here(L4, "BAAI/bge-large-en-v1.5", Workload(concurrency=32, prompt_tokens=256), engine)
    assert found.engine == engine and found.quantization in HALF
    assert found.settings is not None and found.settings.slots == 32


def test_a_step_of_vllm_holds_the_longest_input_of_an_encoder() -> None:
    found = decide_here(L4, "BAAI/bge-m3", Workload(concurrency=32, prompt_tokens=512, context_tokens=8192), "vllm")
    assert int(get_option(found, "--max-num-batched-tokens")) >= int(get_option(found, "--max-model-len")) == 8192
    assert get_option(found, "--runner") == "pooling"


def test_a_micro_batch_of_llama_cpp_holds_the_longest_input() -> None:
    found = decide_here(L4, "BAAI/bge-m3", Workload(prompt_tokens=4096), "llama.cpp")
    assert get_option(found, "--ubatch-size") == get_option(found, "--batch-size") == "8192"


def test_a_reranker_that_generates_is_read_as_a_classifier() -> None:
    found = decide_here(L4, "Qwen/Qwen3-Reranker-0.6B", Workload(concurrency=8), "vllm")
    assert "is_original_qwen3_reranker" in get_option(found, "--hf-overrides")
    other = decide_here(L4, "BAAI/bge-reranker-v2-m3", Workload(concurrency=8), "vllm")
    assert other.launch is not None and "--hf-overrides" not in other.launch.argv


def test_an_encoder_that_vllm_lacks_is_exported_in_half_precision() -> None:
    found = decide_here(L4, "sentence-transformers/all-mpnet-base-v2", Workload(concurrency=16))
    assert (found.engine, found.quantization) == ("onnxruntime", "F16")
    assert found.launch is not None
    (step,) = (step for step in found.launch.prepare if step.kind == "convert")
    assert step.argv[-2:] == ("--precision", "fp16")
    precise = decide_here(L4, "sentence-transformers/all-mpnet-base-v2", Workload(precision_sensitive=True))
    assert precise.quantization == "F32"


def test_a_cpu_keeps_32_bits() -> None:
    found = decide_here({"cpu": "AMD EPYC 9654", "ram_gb": 64}, "BAAI/bge-base-en-v1.5", Workload())
    assert (found.engine, found.quantization) == ("onnxruntime", "F32")


def test_a_graph_that_is_published_as_onnx_stays_with_onnx_runtime() -> None:
    model = replace_fields(find_model("BAAI/bge-base-en-v1.5"), format="onnx", quantization="F32")
    found = decide(make_simulated_hardware(L4), model, Workload(concurrency=8))
    assert (found.engine, found.quantization) == ("onnxruntime", "F32")


class FakeEncoder:
    """Holds back until all requests wait; fails on empty texts."""

    slots = 8

    def __init__(self) -> None:
        self.all_wait, self.batches = threading.Event(), [0][:0]

    def load(self, options: argparse.Namespace, progress: Any) -> None:
        self.all_wait.wait()

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        if [] in inputs:
            raise BackendError("an empty text")
        self.batches.append(len(inputs))
        return [[float(sum(one))] for one in inputs]


def run_requests(backend: FakeEncoder, asked: list[list[list[int]]]) -> list[Any]:
    async def run() -> list[Any]:
        worker = EngineWorker(backend, argparse.Namespace(), asyncio.get_running_loop())  # type: ignore[arg-type]
        worker.start()
        futures = [worker.compute("embed", inputs) for inputs in asked]
        backend.all_wait.set()
        return await asyncio.gather(*futures, return_exceptions=True)

    return asyncio.run(run())


def test_requests_that_wait_together_are_one_batch() -> None:
    backend = FakeEncoder()
    assert run_requests(backend, [[[1, 2]], [[3], [4]], [[5]]]) == [[[3.0]], [[3.0], [4.0]], [[5.0]]]
    assert backend.batches == [4]


def test_a_request_that_fails_does_not_affect_the_others() -> None:
    backend = FakeEncoder()
    first, second, third = run_requests(backend, [[[1]], [[]], [[2]]])
    assert (first, third) == ([[1.0]], [[2.0]]) and isinstance(second, BackendError)


def test_llama_cpp_does_not_convert_encoders_that_its_converter_lacks() -> None:
    """MLX serves no embeddings and llama.cpp has no class for MPNet: what is left exports the model."""
    mac = make_simulated_hardware({"accelerator": "M3 Max", "ram_gb": 64})
    found = decide(mac, find_model("sentence-transformers/all-mpnet-base-v2"), Workload())
    (refused,) = [one for one in found.refused if one.engine == "llama.cpp"]
    assert refused.why == "its converter does not support the architecture mpnet"
    assert found.engine != "llama.cpp"
    other = decide(mac, find_model("BAAI/bge-m3"), Workload())
    assert other.engine == "llama.cpp"
    assert other.reasons[0].text.endswith("; MLX does not support the task embed")
