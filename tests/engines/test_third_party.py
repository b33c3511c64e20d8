"""An engine of somebody else's package: installed into a folder of its own, and found by its entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S

ENGINE = """\
from bedplate.engines import Engine
from bedplate.values import Launch, Plan


class Warp(Engine):
    id = "warp"
    name = "Warp"
    version = "1.2.3"
    formats = ("safetensors",)
    vendors = ("nvidia",)
    strength = "being somebody else's"

    def launch(self, plan: Plan, port: int) -> Launch:
        return Launch(argv=("warp-serve", plan.model_path, "--port", str(port)))


ENGINE = Warp()
"""
INTENT = """\
hardware: {accelerator: H100 SXM, ram_gb: 256}
model: Qwen/Qwen3-8B
"""


def installed(folder: Path, source: str, package: str = "bedplate_warp") -> Path:
    """What an installer leaves: the module, and its metadata beside it."""
    metadata = folder / f"{package}-1.2.3.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{package}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.2.3\n")
    (metadata / "entry_points.txt").write_text(f"[bedplate.engines]\nwarp = {package}:ENGINE\n")
    return folder


def bedplate(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site), "BEDPLATE_HOME": str(site / "home"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "bedplate", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_S)


@pytest.fixture
def intent(tmp_path: Path) -> str:
    path = tmp_path / "intent.yaml"
    path.write_text(INTENT)
    return str(path)


def planned(site: Path, *words: str) -> dict[str, Any]:
    done = bedplate(site, "plan", "--json", *words)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_it_is_planned_when_asked_for(tmp_path: Path, intent: str) -> None:
    site = installed(tmp_path / "site", ENGINE)
    decision = planned(site, "-f", intent, "--engine", "warp")
    assert (decision["engine"], decision["engine_version"]) == ("warp", "1.2.3")
    assert decision["launch"]["argv"][:2] == ["warp-serve", "Qwen/Qwen3-8B"]


def test_without_a_rule_it_is_named_and_never_chosen(tmp_path: Path, intent: str) -> None:
    decision = planned(installed(tmp_path / "site", ENGINE), "-f", intent)
    said = {refusal["engine"]: refusal for refusal in decision["refused"]}
    assert decision["engine"] == "vllm" and said["warp"]["kind"] == "outranked"
    assert said["warp"]["hint"] == "being somebody else's"


def test_it_may_replace_one_of_bedplates_own(tmp_path: Path, intent: str) -> None:
    site = installed(tmp_path / "site", ENGINE.replace('id = "warp"', 'id = "tgi"'))
    assert planned(site, "-f", intent, "--engine", "tgi")["launch"]["argv"][0] == "warp-serve"


def test_one_that_cannot_be_loaded_is_named_with_its_package(tmp_path: Path, intent: str) -> None:
    site = installed(tmp_path / "site", "import a_module_that_is_not_there\n")
    done = bedplate(site, "plan", "-f", intent)
    assert done.returncode == 3 and "the engine warp of the package bedplate-warp cannot be loaded" in done.stderr
    assert "a_module_that_is_not_there" in done.stderr and "uninstall that package" in done.stderr
