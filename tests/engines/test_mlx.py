"""MLX: every word of its command lines, what it can be given, and what its logs mean."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.conftest import HANG_S
from tests.engines.argv import parse_options
from tests.engines.plans import machine, model, plan, plans

import bedplate.engines
from bedplate.engines.mlx import ARCHITECTURES, FP8_ARCHITECTURES, Mlx
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.values import Hardware, Plan, Settings, Workload, replace_fields

MLX = Mlx()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MAC = make_simulated_hardware({"accelerator": "M4 Max", "ram_gb": 64, "os": "macos"})
SHIPPED = Path(bedplate.engines.__file__).parent / "shipped" / "mlx_server.py"


def list_labels(on: Hardware, name: str, **asked: bool) -> list[tuple[str, str]]:
    target = MLX.find_target(on)
    assert target is not None
    return [(form.label, form.made) for form in MLX.list_weights(target, model(name), Workload(**asked))]  # type: ignore[arg-type]


class TestLaunch:
    @given(chosen=plans(MLX))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_its_version(self, chosen: Plan) -> None:
        launch = MLX.launch(chosen, 8123)
        assert launch.argv[0] == "mlx-server"
        said = parse_options("mlx", launch.argv[1:])
        assert said["--port"] == 8123 and said["--host"] == "127.0.0.1"
        assert said["--decode-concurrency"] == chosen.settings.slots >= said["--prompt-concurrency"]
        assert ("--kv-bits" in said) == (chosen.settings.kv_type == "fp8")
        for step in launch.prepare:
            if step.kind == "convert":
                assert step.argv[0] == "mlx_lm.convert"
                converted = parse_options("mlx_convert", step.argv[1:])
                assert converted["--mlx-path"] == said["--model"] == step.where
                bits = converted.get("--q-bits")
                assert chosen.weights.label == (f"{bits}-BIT" if bits else "F32")
                assert step.disk_bytes and step.seconds and step.seconds.low < step.seconds.high
        assert (chosen.weights.made == "converted") == any(step.kind == "convert" for step in launch.prepare)

    def test_prompt_cache_stays_within_the_plan(self) -> None:
        chosen = plan(MLX, MAC, model(LLAMA), settings=Settings(slots=3, context_tokens=2048, device="metal"))
        said = parse_options("mlx", MLX.launch(chosen, 1).argv[1:])
        assert said["--prompt-cache-bytes"] == 3 * chosen.model.compute_kv_bytes(2048)

    def test_local_models_do_not_use_the_hub(self) -> None:
        assert MLX.launch(plan(MLX, MAC, model(LLAMA, folder=True)), 1).env == {"HF_HUB_OFFLINE": "1"}
        assert MLX.launch(plan(MLX, MAC, model(LLAMA)), 1).env == {}

    def test_cpu_conversion_uses_float32(self) -> None:
        def converted(on: Hardware) -> tuple[str, ...]:
            steps = MLX.launch(plan(MLX, on, model(LLAMA), label="8-BIT"), 1).prepare
            return next(step.argv for step in steps if step.kind == "convert")

        assert "float32" in converted(machine("cpu")) and "float32" not in converted(MAC)


class TestModels:
    def test_16_bits_are_loaded_directly_and_fewer_are_converted(self) -> None:
        made = [("8-BIT", "converted"), ("6-BIT", "converted"), ("4-BIT", "converted")]
        assert list_labels(MAC, LLAMA) == [("BF16", "as it is"), *made]
        assert list_labels(MAC, LLAMA, precision_sensitive=True) == [("BF16", "as it is"), made[0]]

    def test_few_bits_are_not_offered_on_a_cpu(self) -> None:
        assert list_labels(machine("cpu"), LLAMA) == [("F32", "converted"), ("8-BIT", "converted")]
        steps = MLX.launch(plan(MLX, machine("cpu"), model(LLAMA), label="F32"), 1).prepare
        (made,) = [step for step in steps if step.kind == "convert"]
        assert "--quantize" not in made.argv and made.disk_bytes == 4 * model(LLAMA).parameters

    def test_quantizations_of_other_tools_are_loaded_directly(self) -> None:
        assert list_labels(MAC, "openai/gpt-oss-20b") == [("MXFP4", "as it is")]
        assert [label for label, _ in list_labels(MAC, "deepseek-ai/DeepSeek-R1")] == ["8-BIT", "6-BIT", "4-BIT"]
        assert list_labels(MAC, "Qwen/Qwen3-235B-A22B-FP8") == []

    def test_it_runs_on_macs_and_on_linux_but_not_on_windows(self) -> None:
        assert MLX.refuse(MAC, model(LLAMA), Workload()) is None
        assert MLX.refuse(machine("cpu"), model(LLAMA), Workload()) is None
        refused = MLX.refuse(replace_fields(machine("cpu"), os="windows"), model(LLAMA), Workload())
        assert refused is not None and refused.kind == "impossible" and "windows" in refused.why

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("deepseek-ai/DeepSeek-V4-Flash", "does not support the architecture deepseek_v4"),
            ("Qwen/Qwen3-235B-A22B-FP8", "does not load FP8 weights"),
        ],
    )
    def test_refuses_unsupported_models(self, name: str, why: str) -> None:
        refused = MLX.refuse(MAC, model(name), Workload())
        assert refused is not None and why in refused.why

    def test_model_known_by_facts_is_not_refused_for_its_architecture(self) -> None:
        assert MLX.refuse(MAC, replace_fields(model(LLAMA), architecture="unknown"), Workload()) is None

    def test_fp8_architectures_are_supported_architectures(self) -> None:
        assert FP8_ARCHITECTURES <= ARCHITECTURES


@pytest.mark.parametrize(
    ("line", "says", "lasting"),
    [
        # mlx_lm/utils.py of 0.32.2.
        ("ValueError: Model type deepseek_v9 not supported.", "the architecture deepseek_v9", True),
        # ml-explore/mlx, pull request 479.
        (
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command buffer "
            "execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            "not enough memory",
            True,
        ),
        # lmstudio-ai/lmstudio-bug-tracker, issue 2240.
        (
            "RuntimeError: [metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum "
            "allowed buffer size of 30150672384 bytes.",
            "not enough memory",
            True,
        ),
        ("OSError: [Errno 98] Address already in use", "took the engine's private port", False),
        ("OSError: [Errno 48] Address already in use", "took the engine's private port", False),
    ],
)
def test_known_failures(line: str, says: str, lasting: bool) -> None:
    failure = MLX.explain(f"something before\n{line}\nand after")
    assert failure is not None and says in failure.message and failure.lasting is lasting
    assert MLX.explain("2026-11-15 05:56:44,543 - INFO - Starting httpd at 127.0.0.1 on port 8123...") is None


class TestShippedServer:
    def test_adds_the_rope_base_at_the_top_level(self) -> None:
        spec = importlib.util.spec_from_file_location("mlx_server", SHIPPED)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        plain = {"rope_type": "default", "rope_theta": 100000.0}
        assert module.with_rope({"rope_parameters": plain})["rope_theta"] == 100000.0
        assert "rope_scaling" not in module.with_rope({"rope_parameters": plain})
        scaled = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
        assert module.with_rope({"rope_parameters": scaled})["rope_scaling"] == scaled
        for untouched in (
            {"rope_theta": 1e4, "rope_parameters": plain},
            {"rope_parameters": {"full_attention": plain}},
            {"rope_parameters": None},
            {},
        ):
            assert module.with_rope(untouched) == untouched

    @pytest.mark.skipif(
        "BEDPLATE_MLX_PYTHON" not in os.environ,
        reason="BEDPLATE_MLX_PYTHON does not name the Python of an environment with mlx-lm",
    )
    def test_original_parser_accepts_the_command_lines(self, tmp_path: Path) -> None:
        launches = [
            MLX.launch(plan(MLX, on, model(name), label=label, settings=settled), 8000)
            for on, made in ((MAC, ("BF16", "8-BIT", "6-BIT", "4-BIT")), (machine("cpu"), ("F32", "8-BIT")))
            for name in (LLAMA, "Qwen/Qwen3-32B")
            for label in made
            for settled in (None, Settings(slots=7, context_tokens=999, kv_type="fp8", batch_tokens=512))
        ]
        lines = tmp_path / "lines.json"
        converted = [list(step.argv[1:]) for one in launches for step in one.prepare if step.kind == "convert"]
        lines.write_text(json.dumps([[list(one.argv[1:]) for one in launches], converted]))
        # Its server creates the parser in main(); the code after parsing is removed.
        script = (
            "import importlib, json, runpy, sys\n"
            "from mlx_lm import server\n"
            "convert = importlib.import_module('mlx_lm.convert')\n"
            "class Parsed(Exception): pass\n"
            "def parsed(): raise Parsed\n"
            "server.maybe_set_recommended_wired_limit = parsed\n"
            "shipped = runpy.run_path(sys.argv[2])\n"
            "served, converted = json.load(open(sys.argv[1]))\n"
            "for line in served:\n"
            "    sys.argv = ['mlx-server', *line]\n"
            "    try: shipped['main']()\n"
            "    except Parsed: pass\n"
            "    else: raise SystemExit('not parsed')\n"
            "for line in converted: convert.configure_parser().parse_args(line)\n"
            "print('parsed', len(served), len(converted))\n"
        )
        argv = [os.environ["BEDPLATE_MLX_PYTHON"], "-c", script, str(lines), str(SHIPPED)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "HF_HOME": str(tmp_path)}
        )
        assert f"parsed {len(launches)} {len(converted)}" in done.stdout, done.stderr[-2000:]
