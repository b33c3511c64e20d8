"""SGLang: every word of its command line, its metrics, and what its logs mean."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.engines.argv import parsed, published
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.sglang import PARSERS, Sglang
from bedplate.values import Accelerator, Parallelism, Plan, Workload, replaced

CAPTURES = Path(__file__).parent.parent / "captures" / "sglang"
SGLANG = Sglang()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-R1"


def options(argv: tuple[str, ...]) -> dict[str, object]:
    assert argv[:2] == ("sglang", "serve")
    return parsed("sglang", argv[2:])


class TestLaunch:
    @given(chosen=plans(SGLANG))
    @settings(max_examples=150, deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        said = options(SGLANG.launch(chosen, 8123).argv)
        assert said["--host"] == "127.0.0.1" and said["--port"] == 8123 and said["--enable-metrics"]
        assert "--trust-remote-code" not in said and "--api-key" not in said
        # Its own words: "tp_size must be divisible", and replicas beside attention data parallelism are refused.
        tensor, attention = int(str(said.get("--tp-size", 1))), int(str(said.get("--attn-dp-size", 1)))
        assert tensor % attention == 0 and not (attention > 1 and "--dp-size" in said)

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert published("sglang")["version"] == SGLANG.version

    def test_a_plain_plan(self) -> None:
        said = options(SGLANG.launch(plan(SGLANG, machine("H100 SXM", 1), model(LLAMA)), 8000).argv)
        assert said["--model-path"] == LLAMA and said["--served-model-name"] == "meta-llama/llama-3.1-8b-instruct"
        assert said["--context-length"] == 8192 and said["--max-running-requests"] == 16
        assert said["--tool-call-parser"] == "llama3" and "--mem-fraction-static" not in said

    def test_replicated_attention(self) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8)
        chosen = plan(SGLANG, machine("H200 SXM"), model(DEEPSEEK), layout=layout, workload=Workload(concurrency=100))
        said = options(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--ep-size"], said["--attn-dp-size"]) == (8, 8, 8)
        assert said["--max-running-requests"] == 100 and "--dp-size" not in said
        assert said["--reasoning-parser"] == "deepseek-r1" and said["--tool-call-parser"] == "deepseekv3"

    def test_replicas_of_replicated_attention_become_one_wider_group(self) -> None:
        layout = Parallelism(tensor=8, expert=8, attention_data=8, data=2)
        chosen = plan(SGLANG, machine("H200 SXM", 16), model(DEEPSEEK), layout=layout)
        said = options(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--ep-size"], said["--attn-dp-size"]) == (16, 16, 16)
        assert said["--max-running-requests"] == 2 * chosen.settings.slots

    def test_replicas(self) -> None:
        chosen = plan(SGLANG, machine("H100 SXM"), model(LLAMA), layout=Parallelism(tensor=2, data=4))
        said = options(SGLANG.launch(chosen, 8000).argv)
        assert (said["--tp-size"], said["--dp-size"]) == (2, 4)
        assert said["--max-running-requests"] == chosen.settings.slots

    def test_nodes(self) -> None:
        chosen = plan(SGLANG, machine("H200 SXM", 16), model(DEEPSEEK), layout=Parallelism(tensor=8, pipeline=2))
        said = options(SGLANG.launch_on_node(chosen, 8000, nodes=2, rank=1, leader="10.0.0.1").argv)
        assert (said["--nnodes"], said["--node-rank"], said["--dist-init-addr"]) == (2, 1, "10.0.0.1:25000")

    def test_weights_cache_and_embeddings(self) -> None:
        chosen = plan(SGLANG, machine("H100 SXM", 1), model(LLAMA), label="FP8")
        eight = replaced(chosen, settings=replaced(chosen.settings, kv_type="fp8"))
        said = options(SGLANG.launch(eight, 8000).argv)
        assert said["--quantization"] == "fp8" and said["--kv-cache-dtype"] == "fp8_e4m3"
        work = Workload(task="embed", concurrency=2)
        chosen = plan(SGLANG, machine("H100 SXM", 1), model("Qwen/Qwen3-8B"), workload=work)
        said = options(SGLANG.launch(chosen, 8000).argv)
        assert said["--is-embedding"] and "--reasoning-parser" not in said

    def test_a_conversion_comes_before_the_launch(self) -> None:
        launch = SGLANG.launch(plan(SGLANG, machine("B200", 1), model("Qwen/Qwen3-32B"), label="NVFP4"), 8000)
        assert [step.kind for step in launch.prepare] == ["install", "download", "install", "convert"]
        assert "'NVFP4'" in launch.prepare[-1].argv[-1] and "AWQModifier" not in launch.prepare[-1].argv[-1]
        assert options(launch.argv)["--model-path"] == launch.prepare[-1].where


def test_every_parser_is_in_its_registry() -> None:
    known = {option["names"][0]: option.get("choices") for option in published("sglang")["options"]}
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
    target = SGLANG.target(machine(card))
    assert target is not None
    assert [form.label for form in SGLANG.weights(target, model(name), Workload())] == offered


def test_it_refuses_what_it_has_no_kernels_for() -> None:
    turing = SGLANG.refuse(machine("NVIDIA T4"), model(LLAMA), Workload())
    assert turing is not None and "8.0" in turing.why
    none = SGLANG.refuse(machine("cpu"), model(LLAMA), Workload())
    assert none is not None and none.kind == "impossible"
    card = Accelerator(name="AMD Radeon RX 7900 XTX", vendor="amd", architecture="gfx1100", memory_bytes=24 << 30)
    radeon = SGLANG.refuse(replaced(machine("MI300X"), accelerators=(card,)), model(LLAMA), Workload())
    assert radeon is not None and "gfx1100" in radeon.why
    assert SGLANG.refuse(machine("MI300X"), model(LLAMA), Workload()) is None


def test_metrics() -> None:
    state = SGLANG.read((CAPTURES / "metrics.txt").read_text())
    assert (state.running, state.waiting, state.kv_use, state.preemptions) == (162, 2826, 0.28, 3)
    assert SGLANG.read("").running is None


@pytest.mark.parametrize("case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["says"])
def test_known_failures(case: dict[str, str]) -> None:
    failure = SGLANG.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] != "the private port was taken")


def test_nothing_is_made_up() -> None:
    assert SGLANG.explain("The server is fired up and ready to roll!") is None


@pytest.mark.skipif(
    "BEDPLATE_SGLANG_PYTHON" not in os.environ,
    reason="BEDPLATE_SGLANG_PYTHON does not name the Python of an environment with SGLang",
)
def test_its_own_parser_takes_the_command_lines(tmp_path: Path) -> None:
    chosen = []
    for card in ("H100 SXM", "B200", "MI300X"):
        for name in (LLAMA, DEEPSEEK, "openai/gpt-oss-120b", "Qwen/Qwen3-32B", "zai-org/GLM-4.6"):
            on, which = machine(card), model(name)
            target = SGLANG.target(on)
            assert target is not None
            layout = Parallelism(tensor=8, expert=8, attention_data=8) if which.num_experts else Parallelism(tensor=2)
            for form in SGLANG.weights(target, which, Workload()):
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
        [os.environ["BEDPLATE_SGLANG_PYTHON"], "-c", script, str(lines)], capture_output=True, text=True, timeout=280
    )
    assert "parsed all" in done.stdout, done.stderr[-2000:]
