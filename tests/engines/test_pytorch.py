"""PyTorch native: every word of its command line, what it can be given, and what its logs mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.conftest import HANG_S
from tests.engines.argv import parse_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.pytorch import PyTorch
from bedplate.engines.shipped.transformers_adapters import AdapterMistake, compute_scale, read_config, take_options
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.values import Hardware, Parallelism, Plan, Settings, Workload, replace_fields

TORCH = PyTorch()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MAC = make_simulated_hardware({"accelerator": "M4 Max", "ram_gb": 64, "os": "macos"})


def list_labels(on: Hardware, name: str, **asked: bool) -> list[tuple[str, str]]:
    target = TORCH.find_target(on)
    assert target is not None
    return [(form.label, form.made) for form in TORCH.list_weights(target, model(name), Workload(**asked))]  # type: ignore[arg-type]


class TestLaunch:
    @given(chosen=plans(TORCH))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        launch = TORCH.launch(chosen, 8123)
        assert launch.argv[:2] == ("transformers-server", "serve")
        said = parse_options("pytorch", launch.argv[2:])
        assert said[""] == [chosen.model_path] and said["--port"] == 8123
        assert ("--continuous-batching" in said) == (chosen.settings.slots > 1) == ("--cb-num-blocks" in said)
        assert ("--quantization" in said) == (chosen.weights.label in ("INT8", "NF4"))
        assert said["--device"] == ("auto" if chosen.parallelism.pipeline > 1 else said["--device"])

    @pytest.mark.parametrize(
        ("on", "device"),
        [
            (machine("cpu"), "cpu"),
            (machine("H100 SXM"), "cuda"),
            (machine("MI300X"), "cuda"),
            (MAC, "mps"),
        ],
    )
    def test_devices_are_named_as_in_pytorch(self, on: Hardware, device: str) -> None:
        assert parse_options("pytorch", TORCH.launch(plan(TORCH, on, model(LLAMA)), 1).argv[2:])["--device"] == device

    def test_several_cards_are_the_first_ones(self) -> None:
        for card, name in (("H100 SXM", "CUDA_VISIBLE_DEVICES"), ("MI300X", "HIP_VISIBLE_DEVICES")):
            chosen = plan(TORCH, machine(card), model(LLAMA), layout=Parallelism(pipeline=2))
            assert TORCH.launch(chosen, 1).env[name] == "0,1"

    def test_page_pool_holds_all_requests_at_maximum_length(self) -> None:
        settled = Settings(slots=3, context_tokens=1000, device="cuda")
        said = parse_options(
            "pytorch", TORCH.launch(plan(TORCH, machine("H100 SXM"), model(LLAMA), settings=settled), 1).argv[2:]
        )
        assert said["--cb-num-blocks"] == 3 * 4

    def test_cpu_launch_uses_one_thread_per_core(self) -> None:
        on = machine("cpu")
        assert TORCH.launch(plan(TORCH, on, model(LLAMA)), 1).env["OMP_NUM_THREADS"] == str(
            on.cpu.allowed_physical_cores
        )


class TestAdapters:
    def test_server_takes_its_own_options_from_the_command_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = Workload(concurrency=4, lora_adapters=("/adapters/sql", "/adapters/a=b"))
        with_adapters = TORCH.launch(plan(TORCH, machine("cpu"), model(LLAMA), workload=work), 1).argv
        monkeypatch.setattr("sys.argv", list(with_adapters))
        options = take_options()
        assert (options.max_loras, options.max_lora_rank) == (2, 16)
        assert options.lora_modules == ["sql=/adapters/sql", "a-b=/adapters/a=b"]
        without = TORCH.launch(plan(TORCH, machine("cpu"), model(LLAMA), workload=Workload(concurrency=1)), 1).argv
        assert tuple(sys.argv) == without

    @pytest.mark.parametrize(
        ("config", "scale"),
        [
            ({"lora_alpha": 32}, 4.0),
            ({}, 1.0),
            ({"lora_alpha": 32, "use_rslora": True}, 32 / 8**0.5),
            ({"lora_alpha": 32, "alpha_pattern": {"mlp.up_proj": 1, "self_attn.o_proj": 16}}, 2.0),
            ({"lora_alpha": 32, "alpha_pattern": {"proj": 16}}, 4.0),
        ],
    )
    def test_scale_is_that_of_peft(self, config: dict[str, object], scale: float) -> None:
        assert compute_scale(config, "model.layers.0.self_attn.o_proj", 8) == pytest.approx(scale)

    @pytest.mark.parametrize(
        ("config", "says"),
        [
            ("[", "cannot be read"),
            ("[]", "peft_type is not LORA"),
            ({"peft_type": "LORA", "use_dora": True}, "use_dora"),
            ({"peft_type": "LORA", "bias": "all"}, 'bias in adapter_config.json is not supported: "all"'),
            ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ],
    )
    def test_adapters_that_are_more_than_two_matrices_are_refused(
        self, tmp_path: Path, config: str | dict[str, object], says: str
    ) -> None:
        (tmp_path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        with pytest.raises(AdapterMistake, match=says):
            read_config(tmp_path)

    def test_usual_settings_are_accepted(self, tmp_path: Path) -> None:
        config = {"peft_type": "LORA", "bias": "none", "use_dora": False, "init_lora_weights": "gaussian"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        assert read_config(tmp_path) == config


class TestModels:
    def test_16_bits_and_bitsandbytes_on_nvidia(self) -> None:
        assert list_labels(machine("cpu"), LLAMA) == [("BF16", "as it is")]
        on = machine("H100 SXM")
        assert list_labels(on, LLAMA) == [("BF16", "as it is"), ("INT8", "while loading"), ("NF4", "while loading")]
        assert list_labels(on, LLAMA, precision_sensitive=True) == [("BF16", "as it is"), ("INT8", "while loading")]

    @pytest.mark.parametrize(
        ("sets", "offered", "said"),
        [
            (("neon", "dotprod"), [("F32", "while loading")], "float32"),
            (("neon", "dotprod", "bf16"), [("BF16", "as it is")], "auto"),
            (("avx2",), [("BF16", "as it is")], "auto"),
        ],
    )
    def test_arm_cpu_without_bf16_computes_in_32_bits(
        self, sets: tuple[str, ...], offered: list[tuple[str, str]], said: str
    ) -> None:
        """Seen on a Neoverse N1: in BF16 it takes minutes where 32 bits take seconds."""
        here = machine("cpu")
        here = replace_fields(here, cpu=replace_fields(here.cpu, instruction_sets=sets))
        chosen = plan(TORCH, here, model(LLAMA))
        assert list_labels(here, LLAMA) == offered
        assert parse_options("pytorch", TORCH.launch(chosen, 1).argv[2:])["--dtype"] == said
        dtype = next(knob for knob in TORCH.list_settings(here, chosen) if knob.name == "dtype")
        assert dtype.now == said and dtype.prior == (0.7 if sets == ("avx2",) else 0.15)

    def test_fp8_needs_fp8_units(self) -> None:
        assert list_labels(machine("H100 SXM"), "deepseek-ai/DeepSeek-R1") == [("FP8", "as it is")]
        assert list_labels(machine("A100 80GB SXM"), "deepseek-ai/DeepSeek-R1") == []

    def test_mxfp4_is_dequantized(self) -> None:
        assert list_labels(machine("H100 SXM"), "openai/gpt-oss-20b") == [("BF16", "while loading")]

    @pytest.mark.parametrize("name", ["nvidia/DeepSeek-V3.2-NVFP4", "moonshotai/Kimi-K2-Thinking"])
    def test_refuses_unsupported_quantizations(self, name: str) -> None:
        refused = TORCH.refuse(machine("B200"), model(name), Workload())
        assert refused is not None and refused.kind == "impossible" and "weights on this device" in refused.why

    def test_refuses_embeddings(self) -> None:
        refused = TORCH.refuse(machine("cpu"), model(LLAMA), Workload(task="embed"))
        assert refused is not None and "embed" in refused.why


@pytest.mark.parametrize(
    ("line", "says", "lasting"),
    [
        # transformers 5.22.2 with a second server on the same port, as it was printed.
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8124): "
            "address already in use",
            "took the engine's private port",
            False,
        ),
        # The words of configuration_auto.py in 5.22.2.
        (
            "ValueError: The checkpoint you are trying to load has model type `deepseek_v9` but Transformers does not "
            "recognize this architecture. This could be because of an issue with the checkpoint",
            "the architecture deepseek_v9",
            True,
        ),
        # transformers 5.22.2 in an environment without bitsandbytes, as it was printed on an H200.
        (
            "ImportError: Using `bitsandbytes` 4-bit quantization requires bitsandbytes: "
            "`pip install -U bitsandbytes>=0.46.1`",
            "not in the engine's environment",
            True,
        ),
        # transformers_adapters.py, as it was printed.
        (
            "bedplate-engine: the LoRA adapter narrow cannot be loaded: the matrices of "
            "model.layers.0.self_attn.o_proj are [2, 64] and [64, 2], and the layer has 128 × 128",
            "the LoRA adapter narrow cannot be loaded: the matrices of",
            True,
        ),
        # sp-uhh/sgmse, issue 36; the class has since moved to torch.OutOfMemoryError.
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 27.47 GiB. GPU 0 has a total capacty "
            "of 16.00 GiB of which 9.66 GiB is free.",
            "not enough memory",
            True,
        ),
    ],
)
def test_known_failures(line: str, says: str, lasting: bool) -> None:
    failure = TORCH.explain(f"something before\n{line}\nand after")
    assert failure is not None and says in failure.message and failure.lasting is lasting
    assert TORCH.explain("INFO:     Uvicorn running on http://127.0.0.1:8124 (Press CTRL+C to quit)") is None


def test_parses_loading_progress() -> None:
    printed = (
        "Loading weights:   0%|          | 0/272 [00:00<?, ?it/s]\r"
        "Loading weights:  97%|█████████▋| 263/272 [00:00<00:00, 2547.30it/s]"
    )
    assert TORCH.read_progress(printed) == 0.97
    assert TORCH.read_progress("INFO:     Application startup complete.") is None


@pytest.mark.skipif(
    "BEDPLATE_TRANSFORMERS_PYTHON" not in os.environ,
    reason="BEDPLATE_TRANSFORMERS_PYTHON does not name the Python of an environment with transformers[serving]",
)
def test_original_parser_accepts_the_command_lines(tmp_path: Path) -> None:
    launches = [
        TORCH.launch(plan(TORCH, on, model(LLAMA), label=label, layout=layout, settings=settled), 8000)
        for on, label, layout in (
            (machine("cpu"), "BF16", None),
            (MAC, "BF16", None),
            (machine("H100 SXM"), "NF4", None),
            (machine("H100 SXM"), "INT8", Parallelism(pipeline=4)),
        )
        for settled in (None, Settings(slots=7, context_tokens=999, device="cuda", batch_tokens=512))
    ]
    lines = tmp_path / "lines.json"
    lines.write_text(json.dumps([list(one.argv[1:]) for one in launches]))
    script = (
        "import json, sys, typer\n"
        "from transformers.cli.transformers import app\n"
        "command = app if hasattr(app, 'resolve_command') else typer.main.get_command(app)\n"
        "for line in json.load(open(sys.argv[1])):\n"
        "    name, serve, rest = command.resolve_command(command.make_context('t', [], resilient_parsing=True), line)\n"
        "    said = serve.make_context(name, rest)\n"
        "    assert said.params['force_model'] == line[1], said.params\n"
        "print('parsed all')\n"
    )
    argv = [os.environ["BEDPLATE_TRANSFORMERS_PYTHON"], "-c", script, str(lines)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
    assert "parsed all" in done.stdout, done.stderr[-2000:]
