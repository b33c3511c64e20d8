"""LMDeploy: every word of its command line, its metrics, and what its logs mean."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.conftest import HANG_S
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines import get_engine
from bedplate.engines.lmdeploy import MAKES_AWQ, PARSERS, PYTORCH, TURBOMIND, LmDeploy
from bedplate.values import Parallelism, Plan, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "lmdeploy"
LMDEPLOY = LmDeploy()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
AWQ = "Qwen/Qwen2.5-72B-Instruct-AWQ"


def parse_launch(argv: tuple[str, ...]) -> dict[str, object]:
    assert argv[:3] == ("lmdeploy", "serve", "api_server")
    return parse_options("lmdeploy", argv[3:])


class TestLaunch:
    @given(chosen=plans(LMDEPLOY))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        launch = LMDEPLOY.launch(chosen, 8123)
        said = parse_launch(launch.argv)
        assert said["--server-name"] == "127.0.0.1" and said["--server-port"] == 8123
        assert "--trust-remote-code" not in said and "--api-keys" not in said
        assert 0 < said["--cache-max-entry-count"] < 1  # type: ignore[operator]
        # TurboMind refuses 8-bit floats in its cache.
        assert said["--backend"] == "pytorch" or said.get("--quant-policy") in (None, "int8")
        for step in launch.prepare:
            if step.kind == "convert":
                assert step.argv[:3] == ("lmdeploy", "lite", "auto_awq")
                made = parse_options("lmdeploy_awq", step.argv[3:])
                assert [made["--work-dir"]] == said[""] and said["--model-format"] == "awq"

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert read_options("lmdeploy")["version"] == read_options("lmdeploy_awq")["version"] == LMDEPLOY.version

    def test_a_plain_plan(self) -> None:
        launch = LMDEPLOY.launch(plan(LMDEPLOY, machine("H100 SXM", 1), model(LLAMA)), 8000)
        said = parse_launch(launch.argv)
        assert said[""] == [LLAMA] and said["--model-name"] == "meta-llama/llama-3.1-8b-instruct"
        assert (said["--backend"], said["--session-len"], said["--max-batch-size"]) == ("turbomind", 8192, 16)
        assert said["--cache-max-entry-count"] == 0.8 and said["--tool-call-parser"] == "llama3"
        assert not {"--tp", "--dtype", "--model-format", "--quant-policy", "--enable-prefix-caching"} & set(said)
        assert launch.health_path == "/health" and "HF_HUB_OFFLINE" not in launch.env

    def test_models_unknown_to_turbomind_run_in_pytorch(self) -> None:
        said = parse_launch(LMDEPLOY.launch(plan(LMDEPLOY, machine("H100 SXM", 1), model(MISTRAL)), 8000).argv)
        assert said["--backend"] == "pytorch"

    def test_8_bit_cache_is_int8_in_turbomind_and_fp8_in_pytorch(self) -> None:
        for name, policy in ((LLAMA, "int8"), (MISTRAL, "fp8")):
            chosen = plan(LMDEPLOY, machine("H100 SXM", 1), model(name))
            chosen = replace_fields(chosen, settings=replace_fields(chosen.settings, kv_type="fp8"))
            assert parse_launch(LMDEPLOY.launch(chosen, 8000).argv)["--quant-policy"] == policy

    def test_tensor_parallel_and_a_shared_prefix(self) -> None:
        work = Workload(concurrency=16, prompt_tokens=4000, shared_prefix_tokens=3000)
        chosen = plan(LMDEPLOY, machine("H100 SXM"), model(LLAMA), layout=Parallelism(tensor=4), workload=work)
        said = parse_launch(LMDEPLOY.launch(chosen, 8000).argv)
        assert said["--tp"] == 4 and said["--enable-prefix-caching"]

    def test_cards_without_bf16_use_f16(self) -> None:
        said = parse_launch(LMDEPLOY.launch(plan(LMDEPLOY, machine("NVIDIA T4", 1), model(LLAMA)), 8000).argv)
        assert said["--dtype"] == "float16"

    def test_a_conversion_comes_before_the_launch(self) -> None:
        chosen = plan(LMDEPLOY, machine("RTX 4090", 1), model("Qwen/Qwen3-32B"), label="AWQ-INT4")
        steps = LMDEPLOY.launch(chosen, 8000).prepare
        assert [step.kind for step in steps] == ["install", "download", "convert"]
        assert steps[-1].argv[3] == steps[1].where == "Qwen3-32B" and steps[-1].where == "Qwen3-32B-AWQ-INT4"


class TestWeights:
    @pytest.mark.parametrize(
        ("card", "name", "offered"),
        [
            ("H100 SXM", LLAMA, ["BF16", "AWQ-INT4"]),
            ("NVIDIA T4", LLAMA, ["F16", "AWQ-INT4"]),
            ("NVIDIA T4", AWQ, ["AWQ-Int4"]),
            ("NVIDIA T4", "openai/gpt-oss-120b", ["MXFP4"]),
            ("A100 80GB SXM", "Qwen/Qwen3-235B-A22B-FP8", ["FP8"]),
            # The engine in PyTorch needs units for it.
            ("A100 80GB SXM", "deepseek-ai/DeepSeek-R1", []),
            ("H100 SXM", "deepseek-ai/DeepSeek-R1", ["FP8"]),
            ("H100 SXM", "moonshotai/Kimi-K2-Thinking", ["INT4"]),
            ("B200", "nvidia/DeepSeek-V3.2-NVFP4", []),
        ],
    )
    def test_weights_by_hardware(self, card: str, name: str, offered: list[str]) -> None:
        target = LMDEPLOY.find_target(machine(card))
        assert target is not None
        assert [form.label for form in LMDEPLOY.list_weights(target, model(name), Workload())] == offered

    def test_precision_sensitive_workloads_are_not_quantized(self) -> None:
        target = LMDEPLOY.find_target(machine("H100 SXM"))
        assert target is not None
        offered = LMDEPLOY.list_weights(target, model(LLAMA), Workload(precision_sensitive=True))
        assert [form.label for form in offered] == ["BF16"]

    def test_unsupported_group_sizes_are_not_offered(self) -> None:
        target, stored = LMDEPLOY.find_target(machine("H100 SXM")), model(AWQ)
        assert target is not None and stored.quantization_details is not None
        odd = replace_fields(stored, quantization_details=replace_fields(stored.quantization_details, group_size=64))
        assert LMDEPLOY.list_weights(target, odd, Workload()) == ()


class TestRefuse:
    def test_refuses_unsupported_models(self) -> None:
        work = Workload()
        assert LMDEPLOY.refuse(machine("H100 SXM"), model(LLAMA), work) is None
        for on, which, task, why in (
            (machine("cpu"), LLAMA, "generate", "needs an NVIDIA GPU"),
            (machine("MI300X"), LLAMA, "generate", "needs an NVIDIA GPU"),
            (replace_fields(machine("H100 SXM"), os="windows"), LLAMA, "generate", "windows"),
            (machine("H100 SXM"), "BAAI/bge-m3", "embed", "embed"),
            (machine("H100 SXM"), "google/gemma-4-31B-it", "generate", "gemma4"),
            (machine("A100 80GB SXM"), "deepseek-ai/DeepSeek-R1", "generate", "FP8"),
        ):
            refused = LMDEPLOY.refuse(on, model(which), Workload(task=task))  # type: ignore[arg-type]
            assert refused is not None and refused.kind == "impossible" and why in refused.why

    def test_refuses_cards_before_volta(self) -> None:
        old = replace_fields(machine("NVIDIA T4", 1).accelerators[0], compute_capability="6.1")
        refused = LMDEPLOY.refuse(
            replace_fields(machine("NVIDIA T4", 1), accelerators=(old,)), model(LLAMA), Workload()
        )
        assert refused is not None and "7.0" in refused.why


def test_every_parser_is_in_its_registry_and_lists_do_not_overlap() -> None:
    known = {option["names"][0]: option.get("choices") for option in read_options("lmdeploy")["options"]}
    for parsers in PARSERS.values():
        assert parsers.tools is None or parsers.tools in known["--tool-call-parser"]
        assert parsers.reasoning is None or parsers.reasoning in known["--reasoning-parser"]
    assert not TURBOMIND & PYTORCH and MAKES_AWQ <= TURBOMIND | PYTORCH


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        (LLAMA, "llama3", None),
        ("Qwen/Qwen3-32B", "qwen3", "default"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2d5", None),
        ("deepseek-ai/DeepSeek-R1", None, "default"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v32", "deepseek-v32"),
        ("openai/gpt-oss-120b", None, None),
        ("zai-org/GLM-4.7-Flash", "glm47", "default"),
    ],
)
def test_parsers_by_model(name: str, tools: str | None, reasoning: str | None) -> None:
    said = parse_launch(LMDEPLOY.launch(plan(LMDEPLOY, machine("H200 SXM"), model(name)), 8000).argv)
    assert (said.get("--tool-call-parser"), said.get("--reasoning-parser")) == (tools, reasoning)


def test_reads_metrics() -> None:
    state = LMDEPLOY.read_metrics((CAPTURES / "metrics.txt").read_text())
    # Those that wait before the engine wait too.
    assert (state.running, state.waiting, state.kv_use, state.preemptions) == (7, 5, 0.25, None)
    nothing = LMDEPLOY.read_metrics("")
    assert nothing.running is None and nothing.waiting is None and nothing.kv_use is None


@pytest.mark.parametrize(
    "case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["log"][:40]
)
def test_known_failures(case: dict[str, str]) -> None:
    failure = LMDEPLOY.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] != "took the engine's private port")


def test_unknown_logs_are_not_explained() -> None:
    assert LMDEPLOY.explain("") is None and LMDEPLOY.explain("HINT:    Please open http://127.0.0.1:8000") is None


@pytest.mark.skipif(
    "BEDPLATE_LMDEPLOY_PYTHON" not in os.environ,
    reason="BEDPLATE_LMDEPLOY_PYTHON does not name the Python of an environment with LMDeploy",
)
def test_original_parser_accepts_the_command_lines(tmp_path: Path) -> None:
    launches = [
        LMDEPLOY.launch(
            plan(LMDEPLOY, machine(card), model(name), label=form.label, layout=Parallelism(tensor=2)), 8000
        )
        for card in ("H100 SXM", "NVIDIA T4")
        for name in (LLAMA, AWQ, MISTRAL, "openai/gpt-oss-120b", "Qwen/Qwen3-32B")
        if (target := LMDEPLOY.find_target(machine(card))) is not None
        for form in LMDEPLOY.list_weights(target, model(name), Workload())
    ]
    converted = [step.argv for launch in launches for step in launch.prepare if step.kind == "convert"]
    lines = tmp_path / "lines.json"
    lines.write_text(json.dumps([list(argv[1:]) for argv in (*(launch.argv for launch in launches), *converted)]))
    script = (
        "import json, sys\n"
        "from lmdeploy.cli.cli import CLI\n"
        "from lmdeploy.cli.lite import SubCliLite\n"
        "from lmdeploy.cli.serve import SubCliServe\n"
        "SubCliServe.add_parser_api_server(); SubCliLite.add_parser_auto_awq()\n"
        "for line in json.load(open(sys.argv[1])):\n"
        "    CLI.parser.parse_args(line)\n"
        "print('parsed all')\n"
    )
    done = subprocess.run(
        [os.environ["BEDPLATE_LMDEPLOY_PYTHON"], "-c", script, str(lines)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert "parsed all" in done.stdout, done.stderr[-2000:]


def test_engine_is_listed() -> None:
    assert get_engine("lmdeploy").version == "0.18.0" and get_engine("lmdeploy").recipe is None
