"""ExLlamaV2: its converter's options, our server's options, and what its logs mean."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from tests.engines.argv import parse_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.exllamav2 import BPW, ExLlamaV2
from bedplate.values import Parallelism, Plan, Workload, replace_fields

EXL = ExLlamaV2()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
RTX = machine("RTX 4090", 2)


@pytest.fixture(autouse=True)
def provide_server_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's environment the server package is next to the program."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    monkeypatch.setitem(sys.modules, "openai_server", core)


def parse_server_options(argv: tuple[str, ...]) -> Any:
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    program = importlib.import_module("bedplate.engines.shipped.exllamav2_server")
    assert argv[0] == "exllamav2-server"
    return core.make_parser(program.ExLlamaV2Backend).parse_args(argv[1:])


@given(chosen=plans(EXL))
@settings(deadline=None)
def test_every_option_of_a_launch_exists(chosen: Plan) -> None:
    launch = EXL.launch(chosen, 8123)
    said = parse_server_options(launch.argv)
    assert said.port == 8123 and said.slots == 1 == chosen.settings.slots
    assert said.cache_bits == (8 if chosen.settings.kv_type == "fp8" else None)
    for step in launch.prepare:
        if step.kind == "convert":
            assert step.argv[:2] == ("python", "-c")
            assert '"exllamav2-kernels"' in step.argv[2] and '"exllamav2.conversion.convert_exl2"' in step.argv[2]
            assert 'os.environ["EXLLAMA_NO_SDPA"] = "1"; import runpy' in step.argv[2]
            options = parse_options("exllamav2", step.argv[3:])
            assert options["-cf"] == said.model == step.where and f"{options['-b']}BPW" == chosen.weights.label
    assert (chosen.weights.made == "converted") == any(step.kind == "convert" for step in launch.prepare)


def test_several_cards_are_the_first_ones() -> None:
    chosen = plan(EXL, RTX, model(LLAMA), layout=Parallelism(pipeline=2))
    assert EXL.launch(chosen, 1).env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_weight_formats() -> None:
    target = EXL.find_target(RTX)
    assert target is not None

    def list_labels(which: Any, **asked: bool) -> list[tuple[str, str]]:
        return [(form.label, form.made) for form in EXL.list_weights(target, which, Workload(**asked))]  # type: ignore[arg-type]

    assert list_labels(model(LLAMA)) == [(one, "converted") for one in BPW]
    assert list_labels(model(LLAMA), precision_sensitive=True) == [("8.0BPW", "converted")]
    assert list_labels(replace_fields(model(LLAMA), quantization="GPTQ-INT4")) == [("GPTQ-INT4", "as it is")]
    assert list_labels(replace_fields(model(LLAMA), format="exl2", quantization="4.0BPW")) == [("4.0BPW", "as it is")]
    assert list_labels(model("Qwen/Qwen3-32B-FP8")) == []


@pytest.mark.parametrize(
    ("card", "name", "why"),
    [
        ("cpu", LLAMA, "needs an NVIDIA GPU"),
        ("RTX 4090", "openai/gpt-oss-20b", "does not support the architecture gpt_oss"),
        ("RTX 4090", "Qwen/Qwen3-32B-FP8", "not FP8"),
    ],
)
def test_refuses_unsupported_models_and_hardware(card: str, name: str, why: str) -> None:
    refused = EXL.refuse(machine(card), model(name), Workload())
    assert refused is not None and refused.kind == "impossible" and why in refused.why


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        # SmolLM2-135M, whose width ExLlamaV3 does not take.
        ({"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "intermediate_size": 1536}, None),
        ({"hidden_size": 4544, "head_dim": None, "num_heads": 71}, None),
        ({"hidden_size": 560}, "a hidden size of 560"),
        ({"intermediate_size": 11000}, "an MLP size of 11000"),
        ({"head_dim": 80, "num_heads": 33}, "a query size of 2640"),
        ({"head_dim": 80, "num_kv_heads": 1}, "a key size of 80"),
        ({"hidden_size": None, "intermediate_size": None, "num_heads": None, "num_kv_heads": None}, None),
    ],
)
def test_refuses_layer_sizes_that_are_not_multiples_of_32(shape: dict[str, int | None], why: str | None) -> None:
    refused = EXL.refuse(machine("RTX 4090"), replace_fields(model(LLAMA), **shape), Workload())
    assert (refused.why.partition("this model has ")[2] if refused is not None else None) == why


class Tokens:
    """As much of a tensor as the server looks at."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def flatten(self) -> Tokens:
        return self

    def tolist(self) -> list[int]:
        return self.ids


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"eos": False, "token_ids": Tokens(5, 6)}, [(5, None), (6, None)]),
        ({"eos": True, "eos_reason": "max_new_tokens", "token_ids": Tokens(5, 6)}, [(5, None), (6, "length")]),
        ({"eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": 2}, [(2, "stop")]),
    ],
)
def test_generator_results_become_pieces(result: dict[str, Any], expected: list[tuple[int, str | None]]) -> None:
    """In the form that generator/dynamic.py of 0.3.2 gives them (constructed)."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    program = importlib.import_module("bedplate.engines.shipped.exllamav2_server")
    assert [(one.token, one.finish) for one in program._make_pieces(core.GenerationRequest(), result)] == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        # turboderp-org/exllamav2, issue 383.
        ("RuntimeError: Insufficient VRAM for model and cache", "not enough GPU memory"),
        # exllamav2/config.py of 0.3.2.
        ("ValueError:  ## Could not find model.layers.0.mlp.* in model", "are missing from the folder"),
        ("RuntimeError: Error building extension 'exllamav2_ext'", "compilation of its kernels failed"),
    ],
)
def test_known_failures(line: str, says: str) -> None:
    failure = EXL.explain(f"something before\n{line}\nand after")
    assert failure is not None and says in failure.message and failure.lasting
    assert EXL.explain("all is well") is None


def test_backend_computes_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the names that 0.3.2 has; the package itself computes on a GPU only."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    program = importlib.import_module("bedplate.engines.shipped.exllamav2_server")
    jobs: list[Any] = []
    cancelled: list[Any] = []
    kept: dict[str, Any] = {}
    results = [
        [{"stage": "prefill", "eos": False}],
        [{"stage": "streaming", "eos": False, "token_ids": Tokens(5)}],
        [{"stage": "streaming", "eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": 2}],
        [{"stage": "streaming", "eos": False, "token_ids": Tokens(6)}],
    ]

    def generator(**given: Any) -> Any:
        kept.update(given)
        answer = lambda: [{**one, "job": jobs[-1]} for one in results.pop(0)]  # noqa: E731
        return SimpleNamespace(enqueue=jobs.append, iterate=answer, cancel=cancelled.append)

    config = SimpleNamespace(eos_token_id=2, arch_compat_overrides=lambda: None, max_seq_len=None)
    package = SimpleNamespace(
        ExLlamaV2Config=lambda folder: config,
        ExLlamaV2=lambda config: SimpleNamespace(load_autosplit=lambda cache, callback: callback(1, 2)),
        ExLlamaV2Cache_Q8=lambda model, max_seq_len, lazy: ("q8", max_seq_len, lazy),
        ExLlamaV2Tokenizer=lambda config: SimpleNamespace(eos_token_id=2),
    )
    inside = SimpleNamespace(
        ExLlamaV2DynamicGenerator=generator,
        ExLlamaV2DynamicJob=lambda **given: SimpleNamespace(**given),
        ExLlamaV2Sampler=SimpleNamespace(Settings=SimpleNamespace(greedy=lambda **given: ("greedy", given))),
    )
    monkeypatch.setitem(sys.modules, "exllamav2", package)
    monkeypatch.setitem(sys.modules, "exllamav2.generator", inside)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(tensor=lambda rows, dtype: rows, long="long"))
    monkeypatch.setattr(program, "HuggingFaceText", lambda folder: None)
    backend = program.ExLlamaV2Backend()
    done: list[float] = []
    (tmp_path / "config.json").write_text('{"rope_parameters": {"rope_theta": 100000.0}}')
    argv = ("exllamav2-server", "--model", str(tmp_path), "--context", "1000", "--cache-bits", "8")
    backend.load(parse_server_options(argv), done.append)
    assert kept["cache"] == ("q8", 1024, True) and kept["paged"] is False and config.max_seq_len == 1024
    assert done == [0.45, 1.0] and config.rotary_embedding_base == 100000.0
    assert config.no_sdpa, "its version gives PyTorch's attention no mask"

    one = core.GenerationRequest(prompt=[1, 2], max_tokens=9, temperature=0)
    backend.admit(one)
    assert [(piece.token, piece.finish) for piece in (*backend.step(), *backend.step())] == [(5, None), (2, "stop")]
    assert jobs[0].input_ids == [[1, 2]] and jobs[0].stop_conditions == [2] and cancelled == []
    two = core.GenerationRequest(prompt=[3], max_tokens=9, temperature=0)
    backend.admit(two)
    assert [piece.token for piece in backend.step()] == [6]
    backend.cancel(two)
    assert cancelled == [jobs[1]]


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}, 100000.0),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}}, None),
        ({}, None),
    ],
)
def test_reads_the_rope_base_of_transformers_5(config: dict[str, Any], base: float | None, tmp_path: Path) -> None:
    """Written by Transformers 5; where ExLlamaV2 finds its own word, that is as good."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = importlib.import_module("bedplate.engines.shipped.exllamav2_server")
    assert program._read_rope_base(str(tmp_path)) == base
