"""vLLM: every word of its command line, its real metrics, and what its logs mean."""

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
from bedplate.engines.knobs import apply_values, with_engine_defaults
from bedplate.engines.vllm import PARSERS, Vllm
from bedplate.values import Accelerator, Parallelism, Settings, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "vllm"
VLLM = Vllm()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-R1"


def parse_launch(argv: tuple[str, ...]) -> dict[str, object]:
    """The command line without its program, as a whole."""
    if argv[:2] == ("vllm", "serve"):
        return parse_options("vllm", argv[2:])
    assert argv[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")
    words = list(argv[3:])
    assert words[0] == "--model"
    return parse_options("vllm", words[1:])


class TestLaunch:
    @given(chosen=plans(VLLM))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: object) -> None:
        launch = VLLM.launch(chosen, 8123)  # type: ignore[arg-type]
        said = parse_launch(launch.argv)
        assert said["--host"] == "127.0.0.1" and said["--port"] == 8123
        assert "--trust-remote-code" not in said and "--api-key" not in said
        assert said["--max-num-batched-tokens"] >= said["--max-num-seqs"]  # type: ignore[operator]

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert read_options("vllm")["version"] == VLLM.version

    def test_launch_on_one_gpu(self) -> None:
        launch = VLLM.launch(plan(VLLM, machine("H100 SXM", 1), model(LLAMA)), 8000)
        said = parse_launch(launch.argv)
        assert said[""] == [LLAMA] and said["--served-model-name"] == "meta-llama/llama-3.1-8b-instruct"
        assert said["--max-model-len"] == 8192 and said["--max-num-seqs"] == 16
        assert said["--gpu-memory-utilization"] == 0.92
        assert said["--tool-call-parser"] == "llama3_json" and said["--enable-auto-tool-choice"]
        assert "--quantization" not in said and "--tensor-parallel-size" not in said
        assert launch.health_path == "/health" and "HF_HUB_OFFLINE" not in launch.env

    def test_few_sequences_do_not_leave_prompts_without_cuda_graphs(self) -> None:
        def find_largest_graph(slots: int, gpu: str = "H100 SXM") -> object:
            chosen = plan(VLLM, machine(gpu, 1), model(LLAMA), workload=Workload(concurrency=slots))
            return parse_launch(VLLM.launch(chosen, 8000).argv).get("--max-cudagraph-capture-size")

        assert find_largest_graph(64) == 512
        assert find_largest_graph(256) is None, "vLLM captures graphs of up to 512 tokens by itself"
        assert find_largest_graph(64, "AMD Instinct MI300X") is None, "not measured there"

    def test_local_folder_needs_no_network(self) -> None:
        launch = VLLM.launch(plan(VLLM, machine("H100 SXM", 1), model(LLAMA, folder=True)), 8000)
        assert parse_launch(launch.argv)[""] == ["/models/it is here"] and launch.env["HF_HUB_OFFLINE"] == "1"

    def test_quantized_while_loading(self) -> None:
        said = parse_launch(VLLM.launch(plan(VLLM, machine("H100 SXM", 1), model(LLAMA), label="FP8"), 8000).argv)
        assert said["--quantization"] == "fp8_per_channel"

    def test_cards_without_bf16_use_f16(self) -> None:
        said = parse_launch(VLLM.launch(plan(VLLM, machine("NVIDIA T4", 1), model(LLAMA)), 8000).argv)
        assert said["--dtype"] == "half"

    def test_32_bit_weights_are_loaded_in_16_bits(self) -> None:
        wide = replace_fields(model(LLAMA), quantization="F32")
        chosen = plan(VLLM, machine("H100 SXM", 1), wide)
        assert (chosen.weights.label, chosen.weights.made) == ("BF16", "while loading")
        assert parse_launch(VLLM.launch(chosen, 8000).argv)["--dtype"] == "bfloat16"

    def test_replicated_attention_becomes_data_parallel_ranks_that_share_experts(self) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8)
        chosen = plan(VLLM, machine("H200 SXM"), model(DEEPSEEK), layout=layout, workload=Workload(concurrency=100))
        said = parse_launch(VLLM.launch(chosen, 8000).argv)
        assert said["--data-parallel-size"] == 8 and said["--enable-expert-parallel"]
        assert "--tensor-parallel-size" not in said
        # Each rank has an eighth of the requests.
        assert said["--max-num-seqs"] == 13
        assert said["--reasoning-parser"] == "deepseek_r1" and said["--tool-call-parser"] == "deepseek_v3"

    def test_options_for_tensor_pipeline_and_replicas(self) -> None:
        layout = Parallelism(tensor=4, pipeline=2, data=2)
        said = parse_launch(VLLM.launch(plan(VLLM, machine("H100 SXM", 16), model(LLAMA), layout=layout), 8000).argv)
        assert (said["--tensor-parallel-size"], said["--pipeline-parallel-size"]) == (4, 2)
        assert said["--data-parallel-size"] == 2 and "--enable-expert-parallel" not in said

    def test_launch_on_several_nodes(self) -> None:
        layout = Parallelism(tensor=8, pipeline=2)
        chosen = plan(VLLM, machine("H100 SXM", 16), model(LLAMA), layout=layout)
        first, second = (VLLM.launch_on_node(chosen, 8000, nodes=2, rank=rank, leader="10.0.0.1") for rank in (0, 1))
        assert parse_launch(first.argv)["--node-rank"] == 0 and "--headless" not in first.argv
        said = parse_launch(second.argv)
        assert said["--nnodes"] == 2 and said["--node-rank"] == 1 and said["--headless"]
        assert said["--master-addr"] == "10.0.0.1"

    def test_cpu_launch_uses_the_module_and_a_fixed_cache(self) -> None:
        chosen = plan(VLLM, machine("cpu"), model(LLAMA), workload=Workload(concurrency=2, context_tokens=4096))
        launch = VLLM.launch(chosen, 8000)
        said = parse_launch(launch.argv)
        assert said["--enforce-eager"] and "--gpu-memory-utilization" not in said
        # Two requests of 4096 tokens of 128 KiB each, and a tenth.
        assert int(str(said["--kv-cache-memory-bytes"])) == round(1.1 * 2 * 4096 * 131072)

    def test_launch_for_embeddings(self) -> None:
        work = Workload(task="embed", concurrency=4)
        chosen = plan(VLLM, machine("H100 SXM", 1), model("BAAI/bge-m3"), workload=work)
        said = parse_launch(VLLM.launch(chosen, 8000).argv)
        assert said["--runner"] == "pooling" and "--tool-call-parser" not in said

    @pytest.mark.parametrize(
        ("card", "dtype"), [("cpu", "float32"), ("H100 SXM", "half"), ("NVIDIA T4", "half"), ("MI300X", "half")]
    )
    def test_pooling_models_in_32_bits_are_not_loaded_in_bf16(self, card: str, dtype: str) -> None:
        """By itself vLLM loads them in F16, on a CPU too."""
        which = replace_fields(model("BAAI/bge-m3"), quantization="F32")
        for task in ("embed", "classify"):
            chosen = plan(VLLM, machine(card, 1), which, workload=Workload(task=task, concurrency=4))
            said = parse_launch(VLLM.launch(chosen, 8000).argv)
            assert said["--dtype"] == dtype and said["--runner"] == "pooling"

    def test_a_conversion_comes_before_the_launch(self) -> None:
        launch = VLLM.launch(plan(VLLM, machine("RTX 4090", 1), model("Qwen/Qwen3-32B"), label="AWQ-INT4"), 8000)
        assert [step.kind for step in launch.prepare] == ["install", "download", "install", "convert"]
        convert = launch.prepare[-1]
        compile(convert.argv[-1], "recipe", "exec")
        assert convert.where == "Qwen3-32B-AWQ-INT4" and parse_launch(launch.argv)[""] == [convert.where]
        assert convert.seconds is not None and convert.seconds.low < convert.seconds.value < convert.seconds.high


class TestParsers:
    def test_every_parser_is_in_its_registry(self) -> None:
        known = {option["names"][0]: option.get("choices") for option in read_options("vllm")["options"]}
        for parsers in PARSERS.values():
            assert parsers.tools is None or parsers.tools in known["--tool-call-parser"]
            assert parsers.reasoning is None or parsers.reasoning in known["--reasoning-parser"]

    @pytest.mark.parametrize(
        ("name", "tools", "reasoning"),
        [
            (LLAMA, "llama3_json", None),
            ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic", None),
            ("Qwen/Qwen2.5-7B-Instruct", "hermes", None),
            ("Qwen/QwQ-32B", "hermes", "deepseek_r1"),
            ("Qwen/Qwen3-8B", "hermes", "qwen3"),
            ("Qwen/Qwen3-235B-A22B-Instruct-2507", "hermes", None),
            ("Qwen/Qwen3-Coder-Next", "qwen3_coder", None),
            ("Qwen/Qwen3.5-27B", "qwen3_coder", "qwen3"),
            (DEEPSEEK, "deepseek_v3", "deepseek_r1"),
            ("deepseek-ai/DeepSeek-V3", "deepseek_v3", None),
            ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
            ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "deepseek_v3"),
            ("openai/gpt-oss-20b", "openai", "openai_gptoss"),
            ("openai/gpt-oss-safeguard-20b", "openai", "openai_gptoss"),
            ("mistralai/Mistral-7B-Instruct-v0.3", "mistral", None),
            ("mistralai/Mistral-7B-v0.3", None, None),
            ("zai-org/GLM-4.5", "glm45", "glm45"),
            ("zai-org/GLM-4.7-Flash", "glm47", "glm47"),
            ("moonshotai/Kimi-K2-Instruct", "kimi_k2", None),
            ("moonshotai/Kimi-K2-Base", None, None),
            ("moonshotai/Kimi-K2-Thinking", "kimi_k2", "kimi_k2"),
            ("MiniMaxAI/MiniMax-M2", "minimax_m2", "minimax_m2"),
            ("HuggingFaceTB/SmolLM2-135M", None, None),
        ],
    )
    def test_parsers_by_model(self, name: str, tools: str | None, reasoning: str | None) -> None:
        said = parse_launch(VLLM.launch(plan(VLLM, machine("B200"), model(name)), 8000).argv)
        assert (said.get("--tool-call-parser"), said.get("--reasoning-parser")) == (tools, reasoning)
        assert ("--enable-auto-tool-choice" in said) == (tools is not None)


class TestWeights:
    @pytest.mark.parametrize(
        ("card", "name", "offered"),
        [
            ("H100 SXM", LLAMA, ["BF16", "FP8", "AWQ-INT4"]),
            ("B200", LLAMA, ["BF16", "FP8", "NVFP4", "AWQ-INT4"]),
            ("A100 80GB SXM", LLAMA, ["BF16", "FP8", "AWQ-INT4"]),
            ("A100 80GB SXM", "zai-org/GLM-4.6", ["BF16", "AWQ-INT4"]),
            ("MI300X", LLAMA, ["BF16", "FP8", "AWQ-INT4"]),
            ("NVIDIA T4", LLAMA, ["F16", "AWQ-INT4"]),
            ("cpu", LLAMA, ["BF16"]),
            ("H100 SXM", DEEPSEEK, ["FP8"]),
            ("H100 SXM", "openai/gpt-oss-120b", ["MXFP4"]),
            ("NVIDIA T4", "openai/gpt-oss-120b", []),
            ("B200", "nvidia/DeepSeek-V3.2-NVFP4", ["NVFP4"]),
            ("MI300X", "nvidia/DeepSeek-V3.2-NVFP4", []),
            ("cpu", DEEPSEEK, []),
        ],
    )
    def test_weights_by_hardware(self, card: str, name: str, offered: list[str]) -> None:
        target = VLLM.find_target(machine(card))
        assert target is not None
        assert [form.label for form in VLLM.list_weights(target, model(name), Workload())] == offered

    @pytest.mark.parametrize(
        ("sets", "label", "said"),
        [
            (("neon", "dotprod"), "F32", ("--dtype", "float32")),
            (("neon", "dotprod", "bf16"), "BF16", ()),
            (("avx2",), "BF16", ()),
        ],
    )
    def test_arm_cpu_without_bf16_computes_in_32_bits(
        self, sets: tuple[str, ...], label: str, said: tuple[str, ...]
    ) -> None:
        """Seen on a Neoverse N1: vLLM 0.32.0 dies of its first request in BF16."""
        here = machine("cpu")
        here = replace_fields(here, cpu=replace_fields(here.cpu, instruction_sets=sets))
        chosen = plan(VLLM, here, model(LLAMA))
        argv = VLLM.launch(chosen, 1).argv
        at = argv.index("--dtype") if "--dtype" in argv else len(argv)
        assert chosen.weights.label == label and argv[at : at + 2] == said

    @pytest.mark.parametrize(("cores", "said"), [(1, None), (2, "0"), (4, "0"), (8, None)])
    def test_few_cores_are_all_used_for_compute(self, cores: int, said: str | None) -> None:
        here = machine("cpu")
        here = replace_fields(here, cpu=replace_fields(here.cpu, allowed_physical_cores=cores))
        chosen = plan(VLLM, here, model(LLAMA))
        name = "VLLM_CPU_NUM_OF_RESERVED_CPU"
        assert VLLM.launch(chosen, 1).env.get(name) == said
        assert name not in VLLM.launch(with_engine_defaults(chosen), 1).env
        knob = next(one for one in VLLM.list_settings(here, chosen) if one.name == "threads")
        assert knob.now == ("all" if said == "0" else "all but one")
        less = apply_values(chosen, (knob,), {"threads": "all but one"})
        assert VLLM.launch(less, 1).env.get(name) == ("1" if said == "0" else None)

    def test_precision_sensitive_workloads_get_8_bits_or_more(self) -> None:
        target = VLLM.find_target(machine("B200"))
        assert target is not None
        offered = VLLM.list_weights(target, model(LLAMA), Workload(precision_sensitive=True))
        assert [form.label for form in offered] == ["BF16", "FP8"]


class TestRefuse:
    def test_refuses_old_cards_windows_and_other_formats(self) -> None:
        work = Workload()
        assert VLLM.refuse(machine("H100 SXM"), model(LLAMA), work) is None
        windows = replace_fields(machine("H100 SXM"), os="windows")
        assert "windows" in VLLM.refuse(windows, model(LLAMA), work).why  # type: ignore[union-attr]
        gguf = replace_fields(model(LLAMA), format="gguf")
        assert "gguf" in VLLM.refuse(machine("H100 SXM"), gguf, work).why  # type: ignore[union-attr]
        bits = VLLM.refuse(machine("NVIDIA T4"), model("openai/gpt-oss-120b"), work)
        assert bits is not None and bits.kind == "impossible" and "MXFP4" in bits.why

    def test_refuses_amd_card_without_kernels(self) -> None:
        card = Accelerator(name="AMD Radeon VII", vendor="amd", architecture="gfx900", memory_bytes=16 << 30)
        refused = VLLM.refuse(replace_fields(machine("MI300X"), accelerators=(card,)), model(LLAMA), Workload())
        assert refused is not None and "gfx900" in refused.why
        refused = VLLM.refuse(machine("MI50 32GB"), model(LLAMA), Workload())
        assert refused is not None and "gfx906" in refused.why

    def test_uses_the_cpu_if_the_card_is_too_old(self) -> None:
        old = VLLM.find_target(machine("NVIDIA V100 32GB SXM2"))
        assert old is not None and old.device == "cpu"


class TestSettle:
    def test_default_context_holds_a_conversation(self) -> None:
        settled = VLLM.settle(machine("H100 SXM"), model(LLAMA), Workload())
        assert settled.context_tokens == 8192 and settled.slots == 256 and settled.batch_tokens == 8192
        assert VLLM.settle(machine("RTX 4090"), model(LLAMA), Workload()).batch_tokens == 2048

    def test_requested_context_is_kept(self) -> None:
        asked = Workload(concurrency=3, context_tokens=2000, prompt_tokens=100, output_tokens=100)
        settled = VLLM.settle(machine("H100 SXM"), model(LLAMA), asked)
        assert (settled.slots, settled.context_tokens) == (3, 2000)
        longest = VLLM.settle(machine("H100 SXM"), model(LLAMA), Workload(context_tokens=10**9))
        assert longest.context_tokens == model(LLAMA).max_context


def test_metrics_of_a_real_server() -> None:
    idle, busy = (VLLM.read_metrics((CAPTURES / f"metrics-{name}.txt").read_text()) for name in ("idle", "busy"))
    assert (idle.running, idle.waiting, idle.kv_use, idle.preemptions) == (0, 0, 0, 0)
    assert (busy.running, busy.waiting, busy.preemptions) == (2, 2, 0)
    assert busy.kv_use is not None and 0 < busy.kv_use < 0.1
    assert (idle.computed, busy.computed) == (0, 266)
    assert (
        VLLM.read_metrics("").running is None and VLLM.read_metrics("vllm:num_requests_running NaN\n").running is None
    )


def test_metrics_of_several_ranks_are_summed() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    text += 'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    assert VLLM.read_metrics(text).running == 7 and VLLM.read_metrics(text).kv_use == 0.5


FAILURES = json.loads((CAPTURES / "failures.json").read_text())


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case["says"])
def test_known_failures(case: dict[str, str]) -> None:
    failure = VLLM.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] not in ("took the engine's private port", "its engine core process died"))


def test_unknown_logs_are_not_explained() -> None:
    assert VLLM.explain("") is None and VLLM.explain((CAPTURES / "started.txt").read_text()) is None


def test_parses_loading_progress() -> None:
    line = "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10,  5.1s/it]"
    assert VLLM.read_progress(line) == 0.5 and VLLM.read_progress("INFO 11-15 06:04:12 ready") is None


@pytest.mark.skipif(
    "BEDPLATE_VLLM_PYTHON" not in os.environ,
    reason="BEDPLATE_VLLM_PYTHON does not name the Python of an environment with vLLM",
)
def test_original_parser_accepts_the_command_lines(tmp_path: Path) -> None:
    chosen = []
    for card in ("H100 SXM", "B200", "MI300X", "NVIDIA T4", "cpu"):
        for name in (LLAMA, DEEPSEEK, "openai/gpt-oss-120b", "Qwen/Qwen3-32B", "zai-org/GLM-4.6"):
            on, which = machine(card), model(name)
            target = VLLM.find_target(on)
            assert target is not None
            for form in VLLM.list_weights(target, which, Workload()):
                layout = (
                    Parallelism(tensor=8, expert=8, attention_data=8) if which.num_experts else Parallelism(tensor=2)
                )
                for settled in (None, Settings(slots=7, context_tokens=999, device=target.device, kv_type="fp8")):
                    one = plan(VLLM, on, which, label=form.label, layout=layout, settings=settled)
                    chosen += [VLLM.launch(one, 8000), VLLM.launch_on_node(one, 8000, nodes=2, rank=1, leader="h")]
    lines = tmp_path / "lines.json"
    lines.write_text(json.dumps([list(launch.argv[2 if launch.argv[0] == "vllm" else 3 :]) for launch in chosen]))
    script = (
        "import json, sys\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "for line in json.load(open(sys.argv[1])):\n"
        "    said = parser.parse_args(line)\n"
        "    assert (said.model_tag or said.model) and said.served_model_name and said.max_model_len, line\n"
        "print('parsed all')\n"
    )
    done = subprocess.run(
        [os.environ["BEDPLATE_VLLM_PYTHON"], "-c", script, str(lines)], capture_output=True, text=True, timeout=HANG_S
    )
    assert "parsed all" in done.stdout, done.stderr[-2000:]


def test_engine_is_listed() -> None:
    assert get_engine("vllm").version == "0.32.0"


def test_memory_share_leaves_what_other_processes_hold() -> None:
    """vLLM counts its share from all of the GPU's memory, and refuses to start if less than that is free."""
    alone = machine("H100 SXM", 1)
    (card,) = alone.accelerators
    assert card.memory_bytes is not None
    busy = replace_fields(alone, accelerators=(replace_fields(card, free_bytes=card.memory_bytes * 45 // 100),))
    shares = [VLLM.settle(one, model("Qwen/Qwen3-8B"), Workload(concurrency=16)).memory_share for one in (alone, busy)]
    assert shares == [0.92, 0.41]
