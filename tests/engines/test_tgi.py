"""TGI: every word of its command line, its metrics, and what its logs mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.tgi import IMAGE, Tgi
from bedplate.facts.known_models import apply_label
from bedplate.values import Accelerator, Parallelism, Plan, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "tgi"
TGI = Tgi()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def parse_launch(argv: tuple[str, ...]) -> dict[str, object]:
    """The launcher's options, behind those of the container."""
    assert argv[:2] == ("docker", "run")
    image = next(at for at, word in enumerate(argv) if word.startswith(IMAGE))
    return parse_options("tgi", argv[image + 1 :])


class TestLaunch:
    @given(chosen=plans(TGI))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        said = parse_launch(TGI.launch(chosen, 8123).argv)
        assert said["--hostname"] == "127.0.0.1" and said["--port"] == 8123
        assert "--trust-remote-code" not in said and "--api-key" not in said
        # Its own check: `max_input_tokens` must be < `max_total_tokens`.
        assert 0 < int(str(said["--max-input-tokens"])) < int(str(said["--max-total-tokens"]))
        assert int(str(said["--max-batch-prefill-tokens"])) >= int(str(said["--max-input-tokens"]))

    def test_the_options_are_those_of_the_pinned_version(self) -> None:
        assert read_options("tgi")["version"] == TGI.version and IMAGE.endswith(f":{TGI.version}")

    def test_launch_on_one_gpu(self) -> None:
        launch = TGI.launch(plan(TGI, machine("H100 SXM", 1), model(LLAMA)), 8000)
        said = parse_launch(launch.argv)
        assert said["--model-id"] == LLAMA and said["--max-total-tokens"] == 8192
        assert said["--max-input-tokens"] == 8192 - 256 and "--num-shard" not in said
        assert "--gpus" in launch.argv and launch.prepare[0].argv == ("docker", "pull", IMAGE)

    def test_a_folder_is_mounted(self) -> None:
        argv = TGI.launch(plan(TGI, machine("H100 SXM", 1), model(LLAMA, folder=True)), 8000).argv
        assert argv[argv.index("--volume") + 1] == "/models/it is here:/models/it is here:ro"
        assert parse_launch(argv)["--model-id"] == "/models/it is here"

    def test_options_for_shards_quantization_and_amd(self) -> None:
        chosen = plan(TGI, machine("MI300X"), model(LLAMA), label="FP8", layout=Parallelism(tensor=4))
        argv = TGI.launch(chosen, 8000).argv
        said = parse_launch(argv)
        assert said["--num-shard"] == 4 and said["--quantize"] == "fp8"
        assert f"{IMAGE}-rocm" in argv and "/dev/kfd" in argv and "--gpus" not in argv

    def test_awq_has_the_kernels_of_gptq_on_amd(self) -> None:
        """layers/gptq/__init__.py of v3.3.7 raises an error for AWQ's own kernels on ROCm."""
        packed = apply_label(model(LLAMA), "AWQ-INT4")
        for chip, word in (("MI300X", "gptq"), ("H100 SXM", "awq")):
            chosen = plan(TGI, machine(chip, 1), packed)
            assert parse_launch(TGI.launch(chosen, 8000).argv)["--quantize"] == word

    @pytest.mark.parametrize(
        ("chip", "label", "runs"),
        [
            ("T4", "INT4", False), ("A100 80GB SXM", "INT4", True), ("MI300X", "INT4", False), ("T4", "FP8", False),
            ("MI300X", "FP8", True), ("A100 80GB SXM", "FP8", True), ("T4", "AWQ-INT4", True),
        ],
    )  # fmt: skip
    def test_compressed_tensors_need_marlin_kernels(self, chip: str, label: str, runs: bool) -> None:
        target = TGI.find_target(machine(chip, 1))
        assert target is not None
        assert bool(TGI.list_weights(target, apply_label(model(LLAMA), label), Workload())) == runs

    @pytest.mark.parametrize(("label", "word"), [("INT8", "eetq"), ("NF4", "bitsandbytes-nf4")])
    def test_quantized_while_loading(self, label: str, word: str) -> None:
        chosen = plan(TGI, machine("A100 80GB SXM", 1), model(LLAMA), label=label)
        assert parse_launch(TGI.launch(chosen, 8000).argv)["--quantize"] == word

    def test_no_key_is_on_the_command_line(self) -> None:
        argv = TGI.launch(plan(TGI, machine("H100 SXM", 1), model(LLAMA)), 8000).argv
        assert TGI.key_variable == "API_KEY" and argv[argv.index("API_KEY") - 1] == "--env"


def test_refuses_newer_models_and_hardware() -> None:
    work = Workload()
    assert TGI.refuse(machine("H100 SXM"), model(LLAMA), work) is None
    newer = TGI.refuse(machine("H100 SXM"), model("openai/gpt-oss-20b"), work)
    assert newer is not None and "gpt_oss" in newer.why
    assert TGI.refuse(machine("cpu"), model(LLAMA), work) is not None
    card = Accelerator(name="AMD Radeon RX 7900 XTX", vendor="amd", architecture="gfx1100", memory_bytes=24 << 30)
    radeon = TGI.refuse(replace_fields(machine("MI300X"), accelerators=(card,)), model(LLAMA), work)
    assert radeon is not None and "gfx1100" in radeon.why


def test_reads_metrics() -> None:
    state = TGI.read_metrics((CAPTURES / "metrics.txt").read_text())
    assert (state.running, state.waiting) == (12, 5) and TGI.read_metrics("").running is None
    text = 'tgi_batch_inference_count{method="prefill"} 3\ntgi_batch_inference_count{method="decode"} 40\n'
    assert TGI.read_metrics(text).computed == 43


@pytest.mark.parametrize("case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["says"])
def test_known_failures(case: dict[str, str]) -> None:
    failure = TGI.explain(case["log"])
    assert failure is not None and case["says"] in failure.message


def test_features_say_that_it_is_not_maintained() -> None:
    assert TGI.features is not None and "December 2025" in TGI.features.maintained
