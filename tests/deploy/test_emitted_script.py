"""Runs emitted scripts with stand-ins for the programs they install; each must exist when the script calls it."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S
from tests.deploy.intents import make_platform
from tests.deploy.walk import iterate_pods, read_manifests

from bedplate.decide import decide, plan
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.deploy import script_steps
from bedplate.deploy.emit import emit_target
from bedplate.deploy.shell import write_script
from bedplate.engines import load_engines
from bedplate.run.models import find_intended_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the interpreter is itself a script, which needs Linux")

XEON = {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128}
MAC = {"accelerator": "Apple M3 Max 40-core", "ram_gb": 64, "os": "macos"}
QWEN, LLAMA = "Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.2-3B-Instruct"
LARGE, MIDDLE = "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen3-32B-Base"
"""Of the base models, no published quantizations are known, so that they are converted."""
COMMON = ("bash", "env", "mv", "rm", "sh", "touch")
"""Programs of every system, in addition to those that the script declares."""


def describe_gpus(name: str, count: int = 1) -> dict[str, Any]:
    return {"accelerator": name, "count": count, "ram_gb": 128}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "exllamav2": (QWEN, describe_gpus("RTX 3090", 2), "exllamav2"),
    "exllamav3": (QWEN, describe_gpus("RTX 3090", 2), "exllamav3"),
    "llama.cpp built": (QWEN, describe_gpus("RTX 3090", 2), "llama.cpp"),
    "llama.cpp built, quantized": (QWEN, describe_gpus("RTX 3070"), "llama.cpp"),
    "llama.cpp": (QWEN, XEON, "llama.cpp"),
    "lmdeploy": (QWEN, describe_gpus("L40S", 2), "lmdeploy"),
    "lmdeploy, quantized": (MIDDLE, describe_gpus("RTX 5090"), "lmdeploy"),
    "mistral.rs": (QWEN, XEON, "mistral.rs"),
    "mlx": (QWEN, MAC, "mlx"),
    "ollama": (LLAMA, XEON, "ollama"),
    "onnxruntime": (QWEN, XEON, "onnxruntime"),
    "onnxruntime on a card": (QWEN, describe_gpus("RTX 3090", 2), "onnxruntime"),
    "an encoder": ("BAAI/bge-m3", describe_gpus("RTX 4090"), "onnxruntime"),
    "pytorch": (QWEN, XEON, "pytorch"),
    "sglang": (QWEN, describe_gpus("L40S", 2), "sglang"),
    "sglang on a CPU": (LLAMA, XEON, "sglang"),
    "sglang for ROCm": (QWEN, describe_gpus("MI300X"), "sglang"),
    "sglang, quantized": (MIDDLE, describe_gpus("RTX 5090"), "sglang"),
    "tensorrt-llm": (QWEN, describe_gpus("H100 SXM"), "tensorrt-llm"),
    "tensorrt-llm, quantized": (LARGE, describe_gpus("H100 SXM"), "tensorrt-llm"),
    "tgi": (QWEN, describe_gpus("H100 SXM"), "tgi"),
    "vllm": (QWEN, describe_gpus("L40S", 2), "vllm"),
    "vllm on a CPU": (QWEN, XEON, "vllm"),
    "vllm for ROCm": (QWEN, describe_gpus("MI300X"), "vllm"),
    "vllm, quantized": (MIDDLE, describe_gpus("RTX 5090"), "vllm"),
}
NODES = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8, "network": "InfiniBand NDR 400", "ram_gb": 640}
ON_NODES = {
    "vllm on nodes": ("deepseek-ai/DeepSeek-R1", NODES, "vllm"),
    "sglang on nodes": ("deepseek-ai/DeepSeek-R1", NODES, "sglang"),
}
CASES |= ON_NODES


@functools.cache
def emit_script(name: str) -> str:
    model, hardware, engine = CASES[name]
    intent = to_intent({"hardware": hardware, "model": model})
    facts = find_intended_model(intent.model)
    decision = decide(resolve_hardware(intent), facts, intent.workload, engine)
    assert decision.launch is not None, decision.refused
    return write_script(plan(decision, facts, intent.workload), decision)


@dataclass
class Machine:
    """A PATH with only the programs that a script declares."""

    folder: Path
    text: str
    source: str

    @classmethod
    def create(cls, folder: Path, name: str) -> Machine:
        text = emit_script(name)
        tools = folder / "tools"
        tools.mkdir()
        for program in COMMON:
            (tools / program).symlink_to(str(shutil.which(program)))
        stand_in = folder / "stand-in"
        code = Path(__file__).with_name("stand_in.py").read_text()
        stand_in.write_text(f"#!{sys.executable} -IS\n{code}")
        stand_in.chmod(0o755)
        (listed,) = [line for line in text.splitlines() if line.startswith("for program in ")]
        needed = listed.removeprefix("for program in ").removesuffix("; do").split()
        assert set(needed) <= {"python3", "tar", "cmake", "git", "docker"}
        if "\n# Not installed here: " in text:
            needed.append(CASES[name][2])
        for program in needed:
            (tools / program).symlink_to(stand_in)
        (folder / "serve.sh").write_text(text)
        (folder / "here").mkdir()
        return cls(folder, text, CASES[name][0].rpartition("/")[2])

    def run(self, breaks: str = "never", **variables: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "calls").unlink(missing_ok=True)
        env = {"PATH": str(self.folder / "tools"), "HOME": str(self.folder), "SOURCE": self.source, "BREAKS": breaks}
        env |= {
            "STEPS": script_steps.__file__,
            "CALLS": str(self.folder / "calls"),
            "SELF": str(self.folder / "stand-in"),
            **variables,
        }
        command = [str(self.folder / "tools" / "bash"), str(self.folder / "serve.sh")]
        return subprocess.run(
            command, env=env, cwd=self.folder / "here", capture_output=True, text=True, timeout=HANG_S
        )

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_NODES])
def test_script_reaches_the_server_with_only_its_declared_programs(name: str, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, name)
    done = machine.run()
    assert done.returncode == 0 and not done.stderr, done.stderr
    first = machine.calls()
    launched = machine.text[machine.text.rindex("\nexec ") + 6 :].split()
    assert "quantized" not in name or "\nstep write " in machine.text
    assert first[-1][0] == Path(launched[0]).name and "127.0.0.1" in machine.text
    assert not list((tmp_path / "here").rglob("*.part"))


@pytest.mark.parametrize(("name", "asked"), [("llama.cpp built, quantized", []), ("ollama", ["python"])])
def test_second_run_repeats_no_step(name: str, asked: list[str], tmp_path: Path) -> None:
    """Only Ollama's store is asked again."""
    machine = Machine.create(tmp_path, name)
    assert machine.run().returncode == 0 and machine.run().returncode == 0
    assert [call[0] for call in machine.calls()[:-1]] == asked


@pytest.mark.parametrize("name", list(ON_NODES))
def test_script_starts_the_rank_of_its_node(name: str, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, name)
    without = machine.run(NODE_RANK="0")
    assert without.returncode and "NODE_0_ADDRESS" in without.stderr and not machine.calls()
    for rank in ("0", "1"):
        done = machine.run(NODE_RANK=rank, NODE_0_ADDRESS="10.1.2.3", HOST="10.1.2.4")
        assert done.returncode == 0 and not done.stderr, done.stderr
        launched = machine.calls()[-1]
        assert launched[launched.index("--node-rank") + 1] == rank
        assert launched[launched.index("--host") + 1] == "10.1.2.4"
        assert any(word in ("10.1.2.3", "10.1.2.3:25000") for word in launched)
    unknown = machine.run(NODE_RANK="2", NODE_0_ADDRESS="10.1.2.3")
    assert unknown.returncode == 2 and "nodes 0 to 1" in unknown.stderr


def test_every_engine_has_a_script_case() -> None:
    assert {engine for _, _, engine in CASES.values()} == set(load_engines())


def test_interrupted_step_runs_again(tmp_path: Path) -> None:
    """In a script with an installation, a download and a conversion."""
    machine = Machine.create(tmp_path, "an encoder")
    machine.run()
    steps = [call for call in machine.calls()[:-1] if call[0] != "pip" and call[1:3] != ["-m", "venv"]]
    assert len(steps) > 2
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "here").mkdir()
    shutil.rmtree(tmp_path / ".cache")
    for number, step in enumerate(steps):
        broken = machine.run(breaks=" ".join(step))
        assert broken.returncode == 1 and machine.calls()[-1] == step, (step, broken.stderr)
        # Of the earlier steps, only the one that was interrupted last time.
        assert [call for call in machine.calls()[:-1] if call in steps] == steps[max(0, number - 1) : number]
    assert machine.run().returncode == 0 and [call for call in machine.calls() if call in steps] == steps[-1:]
    assert machine.run().returncode == 0 and not [call for call in machine.calls() if call in steps]


def test_gpu_script_has_its_own_packages_and_environment(tmp_path: Path) -> None:
    on_card, on_cpu = emit_script("onnxruntime on a card"), emit_script("onnxruntime")
    install = on_card[on_card.index("\n    uv pip install ", on_card.index("# install: ")) :].splitlines()[1]
    assert " onnxruntime-genai-cuda==" in install and " onnxruntime-gpu==" in install
    assert " onnxruntime==" not in install and " onnxruntime-genai==" not in install
    folder = "bedplate-scripts/onnxruntime-0.18.0"
    assert f"{folder}-cuda}}" in on_card and f"{folder}}}" in on_cpu


def test_local_image_is_not_pulled(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "tgi")
    machine.run()
    assert [call[1] for call in machine.calls()] == ["image", "run"]
    machine.run(breaks="image inspect")
    assert [call[1] for call in machine.calls()] == ["image", "pull", "run"]


def test_script_reports_missing_program_before_it_starts(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "llama.cpp built")
    (tmp_path / "tools" / "cmake").unlink()
    done = machine.run()
    assert done.returncode == 1 and done.stderr == "this script needs cmake\n" and not machine.calls()
    head = machine.text.splitlines()[2]
    assert "Needs python3 with venv, a package index, tar, cmake, a C++ compiler and the CUDA toolkit." in head


def test_script_reports_engine_that_it_cannot_install(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "vllm for ROCm")
    (tmp_path / "tools" / "vllm").unlink()
    done = machine.run()
    assert done.returncode == 1 and done.stderr.startswith("this script needs vllm==") and "ROCm" in done.stderr


def test_existing_converted_weights_are_used(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "an encoder")
    (tmp_path / "here" / "bge-m3-F16").mkdir()
    assert machine.run().returncode == 0
    assert not [call for call in machine.calls() if call[0] == "onnx-export"]


@pytest.mark.parametrize(
    ("name", "engine"),
    [("llama.cpp", "llama.cpp"), ("llama.cpp built, quantized", "llama.cpp"), ("exllamav3", "exllamav3"),
     ("an encoder", "onnxruntime"), ("vllm, quantized", "vllm"), ("tensorrt-llm, quantized", "tensorrt-llm")],
)  # fmt: skip
def test_conversion_on_kubernetes_is_atomic(name: str, engine: str) -> None:
    model, hardware, _ = CASES[name]
    files = emit_target(make_platform({"hardware": hardware, "model": model}, engine), "kubernetes")
    pods = [pod for tree in read_manifests(files) if tree["kind"] == "Job" for _, pod in iterate_pods(tree)]
    (step,) = [one for pod in pods for one in pod["initContainers"] if one["name"] == "convert"]
    command = " ".join([*step.get("command", []), *step.get("args", [])])
    made = command[command.index("[ -e ") + 5 : command.index(" ] || (rm -rf ")]
    assert made.startswith("/models/") and command.endswith(f" && mv {made}.part {made})")
    assert command.count(f"{made}.part") == 3, "removed before, written, renamed"
    assert subprocess.run(["sh", "-n", "-c", command[command.index("[ -e ") :]]).returncode == 0


def test_gpu_image_has_gpu_packages() -> None:
    model, hardware, _ = CASES["an encoder"]
    files = emit_target(make_platform({"hardware": hardware, "model": model}, "onnxruntime"), "kubernetes")
    text = files["images/onnxruntime/Dockerfile"]
    assert " onnxruntime-gpu==" in text and " onnxruntime==" not in text


def test_image_has_the_wheel_for_the_compute_capability() -> None:
    model, hardware = "Qwen/Qwen3-4B", {"accelerator": "RTX 4090"}
    files = emit_target(make_platform({"hardware": hardware, "model": model}, "mistral.rs"), "kubernetes")
    assert "/v0.9.5 mistralrs==0.9.5+cuda128.sm89 " in files["images/mistral.rs/Dockerfile"]
    assert any(":0.9.5-sm89" in text for name, text in files.items() if name.endswith(".yaml"))


def test_servers_of_one_node_start_together_and_end_together(tmp_path: Path) -> None:
    """Replicas of a mixture in vLLM: each has its own GPU and port, and none outlives the script."""
    hardware = {"accelerator": "B200 SXM", "count": 4, "ram_gb": 512}
    intent = to_intent({"hardware": hardware, "model": "Qwen/Qwen3-30B-A3B-FP8", "workload": {"concurrency": 1024}})
    facts = find_intended_model(intent.model)
    decision = decide(resolve_hardware(intent), facts, intent.workload, "vllm")
    assert len(decision.node_launches) == 4
    text = write_script(plan(decision, facts, intent.workload), decision)
    assert text.index("    trap ") < text.index(" &\n"), "a server that starts before would outlive the script"
    (tmp_path / "serve.sh").write_text(text)
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    os.mkfifo(tmp_path / "started")
    server = 'exec 3> "$STARTED"\necho "$CUDA_VISIBLE_DEVICES $*" >&3\nexec sleep 1000\n'
    for name, code in (("uv", "exit 1\n"), ("vllm", server)):
        (programs / name).write_text(f"#!/bin/bash\n{code}")
        (programs / name).chmod(0o755)
    (tmp_path / "env" / ".installed-0").touch()
    env = {"PATH": os.environ["PATH"], "ENGINE_ENV": str(tmp_path / "env"), "STARTED": str(tmp_path / "started")}
    command = ["bash", str(tmp_path / "serve.sh")]
    for number in (1, 4):  # stopped while it starts them, and afterwards
        with subprocess.Popen(command, env=env, cwd=tmp_path) as script, (tmp_path / "started").open() as started:
            lines = [started.readline().split() for _ in range(number)]
            script.terminate()
            others = started.read()  # the pipe ends when the last of the servers does
            assert script.wait(HANG_S) == 143 and (number == 1 or not others)
    assert sorted(line[0] for line in lines) == ["0", "1", "2", "3"]
    assert sorted(line[line.index("--port") + 1] for line in lines) == ["8080", "8081", "8082", "8083"]
