"""Ray's classes read the emitted configuration, in a Python that has them (BEDPLATE_RAY_PYTHON)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.conftest import HANG_S
from tests.deploy.intents import WITH_RAY, emit_files

READS = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
for path in sys.argv[1:]:
    tree = yaml.safe_load(open(path))
    read = ServeDeploySchema(**tree)
    assert read.applications[0].args["llm_configs"], path
    try:
        from ray.serve.llm import LLMConfig
    except ImportError as error:
        print("without ray.serve.llm:", error)
        continue
    for config in tree["applications"][0]["args"]["llm_configs"]:
        made = LLMConfig(**config)
        print("LLMConfig", made.model_id, made.accelerator_type)
print("read", len(sys.argv) - 1)
"""


def collect_configurations() -> dict[str, str]:
    return {
        f"{name}-{Path(path).name}": text
        for name in sorted(WITH_RAY)
        for path, text in emit_files(name, "ray").items()
        if path.startswith("serve/")
    }


def test_ray_service_contains_the_serve_configuration() -> None:
    files = emit_files("h100-chat", "ray")
    alone = yaml.safe_load(files["serve/meta-llama-3-1-70b.yaml"])
    service = next(
        tree for tree in yaml.safe_load_all(files["meta-llama-3-1-70b.yaml"]) if tree["kind"] == "RayService"
    )
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["applications"] == alone["applications"]
    kwargs = alone["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    cards = worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert kwargs["tensor_parallel_size"] == cards and "host" not in kwargs and "data_parallel_size" not in kwargs


def test_ray_reads_every_serve_configuration(tmp_path: Path) -> None:
    python = os.environ.get("BEDPLATE_RAY_PYTHON")
    if not python:
        pytest.skip("BEDPLATE_RAY_PYTHON names no Python with ray[serve]")
    paths = []
    for name, text in collect_configurations().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        paths.append(str(tmp_path / name))
    done = subprocess.run([python, "-c", READS, *paths], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"read {len(paths)}" in done.stdout and len(paths) >= 5
