"""Ollama: its variables, its Modelfile and the import, against what its source reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.conftest import HANG_S
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines import EngineState, get_engine
from bedplate.engines.llama_cpp import LlamaCpp
from bedplate.engines.ollama import Ollama, make_create_command, make_model_name, write_modelfile
from bedplate.values import Model, Parallelism, Plan, Workload, replace_fields

CAPTURES = Path(__file__).parent.parent / "captures" / "ollama"
OLLAMA = Ollama()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
KINDS: dict[str, Callable[[str], bool]] = {
    "int": lambda text: int(text) >= 0,
    "bool": lambda text: text in ("0", "1", "true", "false"),
    "duration": lambda text: bool(int(text)),
    "host": lambda text: text.startswith("127.0.0.1:") and text.removeprefix("127.0.0.1:").isdigit(),
    "str": lambda text: bool(text),
}


def check_variables(env: dict[str, str]) -> None:
    known = {variable["name"]: variable for variable in read_options("ollama")["variables"]}
    for name, value in env.items():
        assert name in known, f"{name} is not read by this version"
        assert KINDS[known[name]["type"]](value) and value in known[name].get("choices", [value]), (name, value)


def make_gguf_model(*files: str) -> Model:
    return replace_fields(model(LLAMA), format="gguf", quantization="Q4_K_M", files=files)


class TestLaunch:
    @given(chosen=plans(OLLAMA))
    @settings(deadline=None)
    def test_every_option_variable_and_parameter_exists(self, chosen: Plan) -> None:
        launch, facts = OLLAMA.launch(chosen, 8123), read_options("ollama")
        assert launch.argv == ("ollama", "serve") and "serve" in facts["commands"]
        check_variables(launch.env)
        assert launch.env["OLLAMA_HOST"] == "127.0.0.1:8123"
        program, command, *words = make_create_command(chosen)
        said = parse_options("ollama", words)
        assert program == "ollama" and command in facts["commands"] and said[""] == [make_model_name(chosen.model)]
        for line in write_modelfile(chosen).splitlines():
            keyword, _, rest = line.partition(" ")
            assert keyword in ("FROM", "ADAPTER", "PARAMETER")
            assert keyword in ("FROM", "ADAPTER") or rest.split()[0] in facts["parameters"]

    def test_recorded_options_are_of_the_pinned_version(self) -> None:
        assert read_options("ollama")["version"] == OLLAMA.version

    def test_launch_of_a_file_on_a_cpu(self) -> None:
        work = Workload(concurrency=2, context_tokens=4096)
        chosen = plan(OLLAMA, machine("cpu"), make_gguf_model("/models/it is here/x.gguf"), workload=work)
        launch = OLLAMA.launch(chosen, 8000)
        assert (launch.env["OLLAMA_NUM_PARALLEL"], launch.env["OLLAMA_CONTEXT_LENGTH"]) == ("2", "4096")
        assert launch.env["OLLAMA_KEEP_ALIVE"] == "-1" and launch.env["OLLAMA_MAX_LOADED_MODELS"] == "1"
        assert "OLLAMA_KV_CACHE_TYPE" not in launch.env and "OLLAMA_SCHED_SPREAD" not in launch.env
        assert write_modelfile(chosen) == "FROM /models/it is here/x.gguf\nPARAMETER num_thread 96\n"
        assert [step.kind for step in launch.prepare] == ["install", "build"]
        assert launch.health_path == "/api/version"

    def test_modelfile_names_all_parts_of_a_split_file(self) -> None:
        parts = ("/m/x-00001-of-00002.gguf", "/m/x-00002-of-00002.gguf")
        lines = write_modelfile(plan(OLLAMA, machine("RTX 4090", 1), make_gguf_model(*parts))).splitlines()
        assert lines == [f"FROM {part}" for part in parts]

    def test_an_eight_bit_cache_needs_flash_attention(self) -> None:
        chosen = plan(OLLAMA, machine("RTX 4090", 1), make_gguf_model("/m/x.gguf"))
        env = OLLAMA.launch(replace_fields(chosen, settings=replace_fields(chosen.settings, kv_type="fp8")), 8000).env
        assert (env["OLLAMA_KV_CACHE_TYPE"], env["OLLAMA_FLASH_ATTENTION"]) == ("q8_0", "1")

    def test_several_cards_spread_the_model(self) -> None:
        chosen = plan(OLLAMA, machine("RTX 4090"), make_gguf_model("/m/x.gguf"), layout=Parallelism(pipeline=2))
        assert OLLAMA.launch(chosen, 8000).env["OLLAMA_SCHED_SPREAD"] == "1"

    def test_modelfile_limits_layers_on_the_card(self) -> None:
        chosen = plan(OLLAMA, machine("RTX 4090", 1), make_gguf_model("/m/x.gguf"))
        part = replace_fields(chosen, settings=replace_fields(chosen.settings, gpu_layers=10))
        assert "PARAMETER num_gpu 10" in write_modelfile(part)
        # All of them is what it does by itself, and of experts its own fit knows better.
        experts = replace_fields(chosen, settings=replace_fields(chosen.settings, gpu_layers=10, host_expert_layers=5))
        assert "num_gpu" not in write_modelfile(chosen) and "num_gpu" not in write_modelfile(experts)

    def test_original_weights_are_imported_and_quantized(self) -> None:
        chosen = plan(OLLAMA, machine("cpu"), model(LLAMA), label="Q4_K_M")
        assert make_create_command(chosen)[-2:] == ("--quantize", "q4_K_M") and "--file" in make_create_command(chosen)
        assert write_modelfile(chosen).startswith("FROM ./Llama-3.1-8B-Instruct\n")
        steps = OLLAMA.launch(chosen, 8000).prepare
        assert [step.kind for step in steps] == ["install", "download", "convert"]
        assert steps[1].where == "Llama-3.1-8B-Instruct" and steps[-1].seconds is not None
        whole = plan(OLLAMA, machine("cpu"), model(LLAMA), label="F16")
        assert "--quantize" not in make_create_command(whole)

    @pytest.mark.parametrize(
        ("name", "taken"),
        [
            ("SmolLM2 135M Instruct", "smollm2-135m-instruct"),
            ("meta-llama/Llama-3.1-8B", "meta-llama/llama-3.1-8b"),
            ("01.ai/Yi (34B)", "01-ai/yi--34b-"),
            ("llama3.2:1b", "llama3.2:1b"),
            ("hf.co/bartowski/x:Q4_K_M", "bartowski/x:q4_k_m"),
            ("-", "model"),
        ],
    )
    def test_model_names_follow_its_rules(self, name: str, taken: str) -> None:
        assert make_model_name(replace_fields(model(LLAMA), name=name)) == taken


FAKE = """\
import http.server, json, os, sys, urllib.request
host, port = os.environ["OLLAMA_HOST"].split(":")
log = open(os.environ["FAKE_LOG"], "a")
if sys.argv[1] == "serve":
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/version" else 404)
            self.end_headers()
    http.server.HTTPServer((host, int(port)), Answer).serve_forever()
with urllib.request.urlopen(f"http://{host}:{port}/api/version") as answer:
    said = [sys.argv[1:], answer.status, open(sys.argv[sys.argv.index("--file") + 1]).read()]
log.write(json.dumps(said))
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script with a first line that names its interpreter")
class TestImport:
    """The real steps with a fake `ollama` program that responds and records its calls."""

    def run(self, folder: Path, port: int, **env: str) -> tuple[list[int], Path]:
        program = folder / "bin" / "ollama"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\n{FAKE}")
        program.chmod(0o755)
        log = folder / "log.json"
        path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        steps = OLLAMA.launch(plan(OLLAMA, machine("cpu"), make_gguf_model("/m/x.gguf")), port).prepare
        surroundings = {**os.environ, "PATH": path, "FAKE_LOG": str(log), **env}
        codes = [
            subprocess.run([sys.executable, *step.argv[1:]], cwd=folder, env=surroundings, timeout=HANG_S).returncode
            for step in steps
            if step.argv
        ]
        return codes, log

    def test_server_runs_only_during_the_import(self, tmp_path: Path, free_port: int) -> None:
        codes, log = self.run(tmp_path, free_port)
        assert codes == [0]
        words, status, text = json.loads(log.read_text())
        assert words[:2] == ["create", "meta-llama/llama-3.1-8b-instruct"] and status == 200
        assert text.startswith("FROM /m/x.gguf\n")
        with pytest.raises(OSError):
            import urllib.request

            urllib.request.urlopen(f"http://127.0.0.1:{free_port}/api/version", timeout=5)

    def test_failed_import_fails_the_step(self, tmp_path: Path, free_port: int) -> None:
        codes, _ = self.run(tmp_path, free_port, FAKE_CODE="1")
        assert codes == [1]


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class TestWeightsAndRefusals:
    def test_weight_formats(self) -> None:
        target = OLLAMA.find_target(machine("cpu"))
        assert target is not None
        made = [form.label for form in OLLAMA.list_weights(target, model(LLAMA), Workload())]
        assert made == ["F16", "Q8_0", "Q4_K_M"]
        exact = OLLAMA.list_weights(target, model(LLAMA), Workload(precision_sensitive=True))
        assert [form.label for form in exact] == ["F16", "Q8_0"]
        kept = OLLAMA.list_weights(target, model("openai/gpt-oss-120b"), Workload())
        assert [(form.label, form.made) for form in kept] == [("MXFP4", "converted")]
        assert [form.made for form in OLLAMA.list_weights(target, make_gguf_model("/m/x.gguf"), Workload())] == [
            "as it is"
        ]

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "Qwen/Qwen2.5-72B-Instruct-AWQ"])
    def test_refuses_architectures_that_it_cannot_import(self, name: str) -> None:
        refused = OLLAMA.refuse(machine("cpu"), model(name), Workload())
        assert refused is not None and refused.kind == "impossible" and model(name).architecture in refused.why
        assert refused.hint == "a GGUF file of the same model"

    def test_supports_every_system_and_no_classifiers(self) -> None:
        for system in ("linux", "macos", "windows"):
            assert (
                OLLAMA.refuse(replace_fields(machine("cpu"), os=system), make_gguf_model("/m/x.gguf"), Workload())
                is None
            )
        assert OLLAMA.refuse(machine("cpu"), make_gguf_model("/m/x.gguf"), Workload(task="classify")) is not None


class TestSettle:
    def test_settings_are_those_of_llama_cpp(self) -> None:
        on, which, work = machine("RTX 4090", 1), make_gguf_model("/m/x.gguf"), Workload(concurrency=8)
        assert OLLAMA.settle(on, which, work) == replace_fields(LlamaCpp().settle(on, which, work), batch_tokens=None)

    @pytest.mark.parametrize("architecture", ["qwen3_5", "qwen35moe", "lfm2", "nemotron_h", "qwen3_next"])
    def test_some_architectures_have_one_slot(self, architecture: str) -> None:
        which = replace_fields(make_gguf_model("/m/x.gguf"), architecture=architecture)
        assert OLLAMA.settle(machine("cpu"), which, Workload(concurrency=8)).slots == 1

    def test_embedding_models_have_one_slot(self) -> None:
        assert (
            OLLAMA.settle(machine("cpu"), make_gguf_model("/m/x.gguf"), Workload(task="embed", concurrency=8)).slots
            == 1
        )


@pytest.mark.parametrize(
    "case", json.loads((CAPTURES / "failures.json").read_text()), ids=lambda case: case["log"][:40]
)
def test_known_failures(case: dict[str, str]) -> None:
    failure = OLLAMA.explain(case["log"])
    assert failure is not None and case["says"] in failure.message
    assert failure.lasting is (case["says"] != "took the engine's private port")


def test_unknown_logs_are_not_explained() -> None:
    assert OLLAMA.explain('level=INFO msg="Listening on 127.0.0.1:11434 (version 0.32.15)"') is None
    assert OLLAMA.read_metrics("llamacpp:requests_processing 3\n") == EngineState()


def test_engine_is_listed() -> None:
    assert get_engine("ollama").version == "0.32.15" and get_engine("ollama").recipe is None
