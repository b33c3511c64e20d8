"""SGLang: every word of its command line, its metrics, and what its logs mean."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from tests.conftest import HANG_S
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

import bedplate.engines
from bedplate.decide import decide
from bedplate.engines.base import HIGHEST_PORT
from bedplate.engines.sglang import CPU_ARCHITECTURES, PARSERS, Sglang
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.supervisor import find_free_port
from bedplate.values import Accelerator, Parallelism, Plan, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "sglang"
SGLANG = Sglang()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-R1"
SHIPPED = Path(bedplate.engines.__file__).parent / "shipped" / "sglang_server.py"


def parse_launch(argv: tuple[str, ...]) -> dict[str, object]:
    assert argv[0] in ("sglang", "sglang-server") and argv[1] == "serve"
    return parse_options("sglang", argv[2:])


class TestLaunch:
    @given(chosen=plans(SGLANG))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        said = parse_launch(SGLANG.launch(chosen, 8123).argv)
        assert said["--host"] == "127.0.0.1" and said["--port"] == 8123 and said["--enable-metrics"]
        assert "--trust-remote-code" not in said and "--api-key" not in said
        # SGLang requires: "tp_size must be divisible", and no replicas together with attention data parallelism.
        tensor, attention = int(str(said.get("--tp-size", 1))), int(str(said.get("--attn-dp-size", 1)))
        assert tensor % attention == 0 and not (attention > 1 and "--dp-size" in said)
        assert ("--device" in said) == (chosen.settings.device == "cpu")

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert read_options("sglang")["version"] == SGLANG.version

    def test_launch_on_one_gpu(self) -> None:
        said = parse_launch(SGLANG.launch(plan(SGLANG, machine("H100 SXM", 1), model(LLAMA)), 8000).argv)
        assert said["--model-path"] == LLAMA and said["--served-model-name"] == "meta-llama/llama-3.1-8b-instruct"
        assert said["--context-length"] == 8192 and said["--max-running-requests"] == 16
        assert said["--tool-call-parser"] == "llama3" and "--mem-fraction-static" not in said

    def test_launch_with_attention_data_parallelism(self) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8)
        chosen = plan(SGLANG, machine("H200 SXM"), model(DEEPSEEK), layout=layout, workload=Workload(concurrency=100))
        said = parse_launch(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--ep-size"], said["--attn-dp-size"]) == (8, 8, 8)
        assert said["--max-running-requests"] == 100 and "--dp-size" not in said
        assert said["--reasoning-parser"] == "deepseek-r1" and said["--tool-call-parser"] == "deepseekv3"

    def test_replicas_of_replicated_attention_become_one_wider_group(self) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8, data=2)
        chosen = plan(SGLANG, machine("H200 SXM", 16), model(DEEPSEEK), layout=layout)
        said = parse_launch(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--ep-size"], said["--attn-dp-size"]) == (16, 16, 16)
        assert said["--max-running-requests"] == 2 * chosen.settings.slots

    def test_launch_with_replicas(self) -> None:
        chosen = plan(SGLANG, machine("H100 SXM"), model(LLAMA), layout=Parallelism(tensor=2, data=4))
        said = parse_launch(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--dp-size"]) == (2, 4)
        assert said["--max-running-requests"] == chosen.settings.slots

    def test_launch_on_several_nodes(self) -> None:
        chosen = plan(SGLANG, machine("H200 SXM", 16), model(DEEPSEEK), layout=Parallelism(tensor=8, pipeline=2))
        said = parse_launch(SGLANG.launch_on_node(chosen, 8000, nodes=2, rank=1, leader="10.0.0.1").argv)
        assert (said["--nnodes"], said["--node-rank"], said["--dist-init-addr"]) == (2, 1, "10.0.0.1:25000")

    def test_options_for_weights_cache_and_embeddings(self) -> None:
        chosen = plan(SGLANG, machine("H100 SXM", 1), model(LLAMA), label="FP8")
        eight = replace_fields(chosen, settings=replace_fields(chosen.settings, kv_type="fp8"))
        said = parse_launch(SGLANG.launch(eight, 8000).argv)
        assert said["--quantization"] == "fp8" and said["--kv-cache-dtype"] == "fp8_e4m3"
        work = Workload(task="embed", concurrency=2)
        chosen = plan(SGLANG, machine("H100 SXM", 1), model("Qwen/Qwen3-8B"), workload=work)
        said = parse_launch(SGLANG.launch(chosen, 8000).argv)
        assert said["--is-embedding"] and "--reasoning-parser" not in said

    def test_a_conversion_comes_before_the_launch(self) -> None:
        launch = SGLANG.launch(plan(SGLANG, machine("B200", 1), model("Qwen/Qwen3-32B"), label="NVFP4"), 8000)
        assert [step.kind for step in launch.prepare] == ["install", "download", "install", "convert"]
        assert "'NVFP4'" in launch.prepare[-1].argv[-1] and "AWQModifier" not in launch.prepare[-1].argv[-1]
        assert parse_launch(launch.argv)["--model-path"] == launch.prepare[-1].where


def test_every_parser_is_in_its_registry() -> None:
    known = {option["names"][0]: option.get("choices") for option in read_options("sglang")["options"]}
    for parsers in PARSERS.values():
        assert parsers.tools is None or parsers.tools in known["--tool-call-parser"]
        assert parsers.reasoning is None or parsers.reasoning in known["--reasoning-parser"]


@pytest.mark.parametrize(
    ("card", "name", "offered"),
    [
        ("H100 SXM", LLAMA, ["BF16", "FP8", "AWQ-INT4"]),
        ("B200", LLAMA, ["BF16", "FP8", "NVFP4", "AWQ-INT4"]),
        ("A100 80GB SXM", "zai-org/GLM-4.6", ["BF16", "AWQ-INT4"]),
        ("H100 SXM", DEEPSEEK, ["FP8"]),
        ("MI300X", "nvidia/DeepSeek-V3.2-NVFP4", []),
    ],
)
def test_weights_by_hardware(card: str, name: str, offered: list[str]) -> None:
    target = SGLANG.find_target(machine(card))
    assert target is not None
    assert [form.label for form in SGLANG.list_weights(target, model(name), Workload())] == offered


def test_refuses_hardware_without_kernels() -> None:
    turing = SGLANG.refuse(machine("NVIDIA T4"), model(LLAMA), Workload())
    assert turing is not None and "8.0" in turing.why
    assert SGLANG.refuse(machine("cpu"), model(LLAMA), Workload()) is None
    card = Accelerator(name="AMD Radeon RX 7900 XTX", vendor="amd", architecture="gfx1100", memory_bytes=24 << 30)
    radeon = SGLANG.refuse(replace_fields(machine("MI300X"), accelerators=(card,)), model(LLAMA), Workload())
    assert radeon is not None and "gfx1100" in radeon.why
    assert SGLANG.refuse(machine("MI300X"), model(LLAMA), Workload()) is None


class TestOnACpu:
    def test_command_on_a_cpu(self) -> None:
        launch = SGLANG.launch(plan(SGLANG, machine("cpu"), model(LLAMA, folder=True), workload=Workload()), 8000)
        said = parse_launch(launch.argv)
        assert launch.argv[0] == "sglang-server" and said["--device"] == "cpu"
        assert said["--attention-backend"] == "torch_native" and said["--disable-overlap-schedule"]
        assert said["--sleep-on-idle"] and said["--max-running-requests"] == 8 and "--mem-fraction-static" not in said
        assert launch.env == {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "96",
        }

    def test_cache_size_follows_the_workload(self) -> None:
        one = plan(SGLANG, machine("cpu"), model(LLAMA), workload=Workload(context_tokens=4096))
        many = Workload(concurrency=10, prompt_tokens=1500, output_tokens=500)
        assert parse_launch(SGLANG.launch(one, 1).argv)["--max-total-tokens"] == round(1.1 * 4096)
        chosen = plan(SGLANG, machine("cpu"), model(LLAMA), workload=many)
        assert parse_launch(SGLANG.launch(chosen, 1).argv)["--max-total-tokens"] == round(1.1 * 10 * 2000)

    def test_is_installed_without_gpu_dependencies(self) -> None:
        first, last = SGLANG.launch(plan(SGLANG, machine("cpu"), model(LLAMA)), 1).prepare
        assert first.argv[:5] == ("uv", "pip", "install", "--torch-backend", "cpu")
        assert last.argv == ("uv", "pip", "install", "--no-deps", f"sglang=={SGLANG.version}")
        named = {word.partition("=")[0] for word in first.argv}
        assert not named & {"sglang-kernel", "torchvision", "torchaudio", "cuda-python", "flashinfer_python"}
        assert first.download_bytes and first.disk_bytes
        assert SGLANG.find_recipe("cpu") is not None and SGLANG.find_recipe("cuda") is None

    def test_weights_are_not_quantized(self) -> None:
        target = SGLANG.find_target(machine("cpu"))
        assert target is not None
        assert [form.label for form in SGLANG.list_weights(target, model(LLAMA), Workload())] == ["BF16"]
        eight = SGLANG.refuse(machine("cpu"), replace_fields(model(LLAMA), quantization="FP8"), Workload())
        assert eight is not None and "FP8 weights on a CPU" in eight.why

    @pytest.mark.parametrize(
        "name", [DEEPSEEK, "Qwen/Qwen3-Coder-Next", "openai/gpt-oss-120b", "google/gemma-4-31B-it"]
    )
    def test_refuses_architectures_not_tested_on_a_cpu(self, name: str) -> None:
        assert model(name).architecture not in CPU_ARCHITECTURES
        refused = SGLANG.refuse(machine("cpu"), model(name), Workload())
        assert refused is not None and refused.kind == "impossible" and "on a CPU" in refused.why
        assert SGLANG.refuse(machine("H200 SXM"), model(name), Workload()) is None

    def test_embeddings_are_refused(self) -> None:
        refused = SGLANG.refuse(machine("cpu"), model(LLAMA), Workload(task="embed"))
        assert refused is not None and "on a CPU" in refused.why

    def test_refuses_arm_without_kernels(self) -> None:
        arm = SGLANG.refuse(
            make_simulated_hardware({"cpu": "Ampere Altra Max", "ram_gb": 64, "os": "linux"}), model(LLAMA), Workload()
        )
        assert arm is not None and arm.kind == "impossible" and "aarch64" in arm.why

    def test_cpu_does_not_replace_a_gpu(self) -> None:
        old = SGLANG.find_target(machine("NVIDIA T4"))
        assert old is None
        many = Workload(users=200, prompt_tokens=5000, shared_prefix_tokens=4000)
        on_paper = decide(machine("H100 SXM", 1), model(LLAMA), many)
        here = decide(machine("H100 SXM", 1), model(LLAMA), many, installable=True)
        assert (on_paper.engine, here.engine) == ("sglang", "vllm")
        why = next(refusal.why for refusal in here.refused if refusal.engine == "sglang")
        assert "cannot install" in why

    def test_engines_for_cpus_are_preferred(self) -> None:
        for work in (Workload(), Workload(users=200, prompt_tokens=5000, shared_prefix_tokens=4000)):
            decision = decide(machine("cpu"), model(LLAMA), work, installable=True)
            assert decision.engine != "sglang"
            assert any(one.engine == "sglang" and one.kind == "unsuitable" for one in decision.refused)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_server", SHIPPED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return module


class TestLauncher:
    def test_placeholder_names_raise_when_called(self, launcher: ModuleType) -> None:
        launcher.add_placeholders("absent_kernels", ending="_cpu")
        from absent_kernels import fill_cpu  # type: ignore[import-not-found]

        with pytest.raises(NotImplementedError, match=r"absent_kernels\.fill_cpu is not available on CPUs"):
            fill_cpu(1, size=2)

    def test_placeholder_has_only_names_with_the_ending(self, launcher: ModuleType) -> None:
        made = launcher.add_placeholders("absent_kernels", ending="_cpu")["absent_kernels"]
        assert not hasattr(made, "rmsnorm") and not hasattr(made, "__version__")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("absent_kernels.allreduce")

    def test_placeholders_of_submodules(self, launcher: ModuleType) -> None:
        launcher.add_placeholders("absent_vision", "absent_vision.transforms")
        import absent_vision.transforms as found  # type: ignore[import-not-found]

        assert found.__name__ == "absent_vision.transforms" and callable(found.Compose)

    def test_installed_modules_are_kept(self, launcher: ModuleType) -> None:
        assert not launcher.is_missing("json") and not launcher.is_missing("msgspec")
        assert launcher.is_missing("absent_kernels")

    def test_placeholders_exist_in_child_processes(self, tmp_path: Path) -> None:
        """With a fake SGLang that imports the same modules and starts a process."""
        for name, text in {
            "sglang/__init__.py": "",
            "sglang/srt/__init__.py": "",
            "sglang/cli/__init__.py": "",
            "sglang/srt/configs.py": "import torchvision.transforms as T\n"
            "from torchvision.transforms.functional import InterpolationMode\n",
            "sglang/cli/main.py": "import importlib.util, multiprocessing\n"
            "def work():\n"
            "    from sgl_kernel import fill_cpu\n"
            "    print('torchvision', importlib.util.find_spec('torchvision'), callable(fill_cpu), flush=True)\n"
            "def main():\n"
            "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    child.start(); child.join(); work()\n"
            "    raise SystemExit(child.exitcode)\n",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        program = tmp_path / "sglang-server"
        program.write_bytes(SHIPPED.read_bytes())
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["torchvision None True"] * 2


def test_reads_metrics() -> None:
    state = SGLANG.read_metrics((CAPTURES / "metrics.txt").read_text())
    assert (state.running, state.waiting, state.kv_use, state.preemptions) == (162, 2826, 0.28, 3)
    assert SGLANG.read_metrics("").running is None


@pytest.mark.parametrize("case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["says"])
def test_known_failures(case: dict[str, str]) -> None:
    failure = SGLANG.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] != "took the engine's private port")


def test_no_reasoning_parser_for_a_template_without_reasoning() -> None:
    def find_parser(template: str | None) -> object:
        facts = replace_fields(model("Qwen/Qwen3-30B-A3B"), chat_template=template)
        return parse_launch(SGLANG.launch(plan(SGLANG, machine("H100 SXM", 1), facts), 8000).argv).get(
            "--reasoning-parser"
        )

    assert find_parser(None) == find_parser("{% if enable_thinking %}<think>{% endif %}") == "qwen3"
    assert find_parser("{{ messages[0].content }}<|im_end|>") is None


def test_unknown_logs_are_not_explained() -> None:
    assert SGLANG.explain("The server is fired up and ready to roll!") is None


@pytest.mark.skipif(
    "BEDPLATE_SGLANG_PYTHON" not in os.environ,
    reason="BEDPLATE_SGLANG_PYTHON does not name the Python of an environment with SGLang",
)
def test_original_parser_accepts_the_command_lines(tmp_path: Path) -> None:
    chosen = []
    chosen += [SGLANG.launch(plan(SGLANG, machine("cpu"), model(LLAMA)), 8000)]
    for card in ("H100 SXM", "B200", "MI300X"):
        for name in (LLAMA, DEEPSEEK, "openai/gpt-oss-120b", "Qwen/Qwen3-32B", "zai-org/GLM-4.6"):
            on, which = machine(card), model(name)
            target = SGLANG.find_target(on)
            assert target is not None
            layout = Parallelism(tensor=8, expert=8, attention_data=8) if which.num_experts else Parallelism(tensor=2)
            for form in SGLANG.list_weights(target, which, Workload()):
                one = plan(SGLANG, on, which, label=form.label, layout=layout)
                chosen += [SGLANG.launch(one, 8000), SGLANG.launch_on_node(one, 8000, nodes=2, rank=1, leader="h")]
    lines = tmp_path / "lines.json"
    lines.write_text(json.dumps([list(launch.argv[2:]) for launch in chosen]))
    script = (
        "import argparse, json, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "ServerArgs.add_cli_args(parser)\n"
        "for line in json.load(open(sys.argv[1])):\n"
        "    assert parser.parse_args(line).model_path, line\n"
        "print('parsed all')\n"
    )
    done = subprocess.run(
        [os.environ["BEDPLATE_SGLANG_PYTHON"], "-c", script, str(lines)], capture_output=True, text=True, timeout=HANG_S
    )
    assert "parsed all" in done.stdout, done.stderr[-2000:]


def test_memory_share_is_given_only_beside_other_processes() -> None:
    """SGLang's default leaves activations and CUDA graphs a part of the free memory, which is too little of little."""
    alone = machine("H100 SXM", 1)
    (card,) = alone.accelerators
    busy = replace_fields(alone, accelerators=(replace_fields(card, free_bytes=12_000_000_000),))
    work = Workload(concurrency=16)
    shares = [SGLANG.settle(one, model("Qwen/Qwen3-0.6B"), work).memory_share for one in (alone, busy)]
    assert shares[0] is None and shares[1] is not None
    left = (1 - shares[1]) * 12_000_000_000
    assert SGLANG.uses.device_bytes * (1 + SGLANG.uses.spread) <= left < 9_000_000_000


def test_the_port_leaves_room_for_that_of_grpc() -> None:
    """SGLang takes PORT + 10000 for gRPC, and ended with `SGLANG_GRPC_PORT (68377) must be between 1 and 65535`."""
    assert all(find_free_port(SGLANG.highest_port) + 10_000 <= HIGHEST_PORT for _ in range(100))
