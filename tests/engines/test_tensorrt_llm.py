"""TensorRT-LLM: every word of its command line and of its options file, its statistics, and what its logs mean."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.tensorrt_llm import IMAGE, OPTIONS_FILE, PACKAGE, TensorRtLlm
from bedplate.engines.tensorrt_llm import write_options as options_file
from bedplate.values import Parallelism, Plan, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "tensorrt-llm"
TRT = TensorRtLlm()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-R1"


def parse_launch(argv: tuple[str, ...]) -> dict[str, object]:
    assert argv[:2] == ("trtllm-serve", "serve")
    return parse_options("tensorrt_llm", argv[2:])


class TestLaunch:
    @given(chosen=plans(TRT))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        said = parse_launch(TRT.launch(chosen, 8123).argv)
        assert said["--host"] == "127.0.0.1" and said["--port"] == 8123
        assert "--trust_remote_code" not in said
        file = yaml.safe_load(options_file(chosen))
        assert set(file) <= set(read_options("tensorrt_llm")["yaml"])

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert read_options("tensorrt_llm")["version"] == TRT.version
        assert PACKAGE.endswith(f"=={TRT.version}") and IMAGE.endswith(f":{TRT.version}")

    def test_checkpoint_is_served_without_a_build(self) -> None:
        launch = TRT.launch(plan(TRT, machine("H100 SXM", 1), model(LLAMA)), 8000)
        said = parse_launch(launch.argv)
        assert said[""] == [LLAMA] and said["--max_seq_len"] == 8192 and said["--max_batch_size"] == 16
        assert said["--free_gpu_memory_fraction"] == 0.9 and said["--config"] == OPTIONS_FILE
        assert [step.kind for step in launch.prepare] == ["install", "build"]
        assert not any(word.startswith("trtllm-build") for step in launch.prepare for word in step.argv)

    @pytest.mark.parametrize(("chip", "backend"), [("H100 SXM", "TRITON"), ("B200 SXM", "TRTLLM"), ("RTX 5090", None)])
    def test_mxfp4_experts_have_the_kernels_of_the_generation(self, chip: str, backend: str | None) -> None:
        chosen = plan(TRT, machine(chip, 1), model("openai/gpt-oss-20b"))
        assert yaml.safe_load(options_file(chosen)).get("moe_config", {}).get("backend") == backend

    def test_the_options_file_is_written_by_its_step(self, tmp_path: Path) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8)
        work = Workload(concurrency=100, structured_output=True)
        chosen = plan(TRT, machine("H200 SXM"), model(DEEPSEEK), layout=layout, workload=work)
        chosen = replace_fields(chosen, settings=replace_fields(chosen.settings, kv_type="fp8"))
        launch = TRT.launch(chosen, 8000)
        subprocess.run(launch.prepare[-1].argv, cwd=tmp_path, check=True)
        assert yaml.safe_load((tmp_path / OPTIONS_FILE).read_text()) == {
            "enable_chunked_prefill": True, "enable_iter_perf_stats": True, "enable_attention_dp": True,
            "kv_cache_config": {"dtype": "fp8"}, "guided_decoding_backend": "xgrammar",
        }  # fmt: skip
        said = parse_launch(launch.argv)
        assert said["--tensor_parallel_size"] == 8 and said["--moe_expert_parallel_size"] == 8
        assert said["--max_batch_size"] == 13 and said["--reasoning_parser"] == "deepseek-r1"

    def test_a_conversion_comes_before_the_launch(self) -> None:
        launch = TRT.launch(plan(TRT, machine("B200", 1), model("Qwen/Qwen3-32B"), label="NVFP4"), 8000)
        assert [step.kind for step in launch.prepare] == ["install", "download", "convert", "build"]
        convert = launch.prepare[2]
        assert "nvfp4" in convert.argv and parse_launch(launch.argv)[""] == [convert.where]

    def test_nodes_are_started_by_slurm(self) -> None:
        chosen = plan(TRT, machine("H200 SXM", 16), model(DEEPSEEK), layout=Parallelism(tensor=8, pipeline=2))
        argv = TRT.launch_on_node(chosen, 8000, nodes=2, rank=0, leader="a").argv
        assert argv[:7] == ("srun", "--nodes", "2", "--ntasks", "16", "--ntasks-per-node", "8")
        assert argv[7:9] == ("--mpi=pmix", "trtllm-llmapi-launch") and parse_launch(argv[9:])[""] == [DEEPSEEK]


@pytest.mark.parametrize(
    ("card", "name", "offered"),
    [
        ("B200", LLAMA, ["BF16", "FP8", "NVFP4"]),
        ("H100 SXM", LLAMA, ["BF16", "FP8", "AWQ-INT4"]),
        ("A100 80GB SXM", LLAMA, ["BF16", "AWQ-INT4"]),
        ("H100 SXM", DEEPSEEK, ["FP8"]),
        ("A100 80GB SXM", DEEPSEEK, []),
        ("RTX 5090", DEEPSEEK, []),
        ("B200", "nvidia/DeepSeek-V3.2-NVFP4", ["NVFP4"]),
        ("H100 SXM", "nvidia/DeepSeek-V3.2-NVFP4", []),
        ("H100 SXM", "openai/gpt-oss-120b", ["MXFP4"]),
    ],
)
def test_weights_by_generation(card: str, name: str, offered: list[str]) -> None:
    target = TRT.find_target(machine(card))
    assert target is not None
    assert [form.label for form in TRT.list_weights(target, model(name), Workload())] == offered


def test_refuses_other_hardware_and_newer_architectures() -> None:
    work = Workload()
    assert TRT.refuse(machine("H100 SXM"), model(LLAMA), work) is None
    amd = TRT.refuse(machine("MI300X"), model(LLAMA), work)
    assert amd is not None and "NVIDIA" in amd.why
    turing = TRT.refuse(machine("NVIDIA T4"), model(LLAMA), work)
    assert turing is not None and "8.0" in turing.why
    newer = TRT.refuse(machine("H100 SXM"), model("google/gemma-4-31B-it"), work)
    assert newer is not None and "gemma4" in newer.why and newer.kind == "impossible"
    assert TRT.refuse(machine("H100 SXM"), replace_fields(model(LLAMA), architecture="unknown"), work) is None


def test_reads_iteration_statistics() -> None:
    state = TRT.read_metrics((CAPTURES / "metrics.json").read_text())
    assert state.computed == 154
    assert (state.running, state.waiting, state.kv_use) == (1, 0, 3 / 101256)
    for garbled in (
        "",
        "[]",
        "{}",
        "[1]",
        "[{}]",
        '[{"kvCacheStats": {"usedNumBlocks": "x", "maxNumBlocks": 1}}]',
        "trt 1",
    ):
        assert TRT.read_metrics(garbled).running is None


@pytest.mark.parametrize("case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["says"])
def test_known_failures(case: dict[str, str]) -> None:
    failure = TRT.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] != "took the engine's private port")


def test_unknown_logs_are_not_explained() -> None:
    assert TRT.explain("INFO:     Application startup complete.") is None
