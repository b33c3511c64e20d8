"""A third-party engine, found by its entry point, appears wherever built-in engines do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S
from tests.judge.made_engine import MadeEngine

from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.run import Run, RunEnvironment

WARP = Path(__file__).parent / "warp"
ENGINE = (WARP / "bedplate_warp.py").read_text()
INTENT = """\
hardware: {accelerator: H100 SXM, ram_gb: 256}
model: Qwen/Qwen3-8B
"""


def install_package(folder: Path, source: str = ENGINE, package: str = "bedplate_warp") -> Path:
    """Write what an installer writes: the module and its metadata."""
    metadata = folder / f"{package}-1.2.3.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{package}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.2.3\n")
    (metadata / "entry_points.txt").write_text(f"[bedplate.engines]\nwarp = {package}:ENGINE\n")
    return folder


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the engine, as on a package index."""
    folder.mkdir()
    info = "warp_engine-1.2.3.dist-info"
    files = {
        "warp_engine.py": (WARP / "warp_engine.py").read_text(),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: warp-engine\nVersion: 1.2.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nwarp-serve = warp_engine:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / "warp_engine-1.2.3-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return folder


def bedplate(site: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"PYTHONPATH": os.pathsep.join(paths), "BEDPLATE_HOME": str(site / "home"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "bedplate", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **given, **(env or {})}, timeout=HANG_S
    )


def read_output(site: Path, *words: str, env: dict[str, str] | None = None) -> str:
    done = bedplate(site, *words, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return install_package(tmp_path / "site")


@pytest.fixture
def intent(tmp_path: Path) -> str:
    path = tmp_path / "intent.yaml"
    path.write_text(INTENT)
    return str(path)


def read_plan(site: Path, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(read_output(site, "plan", "--json", *words))
    return answer


def test_engine_is_listed(site: Path) -> None:
    listed = json.loads(read_output(site, "engines", "--json"))
    assert "warp" in {one["engine"] for one in listed["engines"]}
    assert "a fixed number of lanes" in read_output(site, "engines", "show", "Warp-Engine 1.2")


def test_engine_is_planned_on_request(site: Path, intent: str) -> None:
    decision = read_plan(site, "-f", intent, "--engine", "warp")
    assert (decision["engine"], decision["engine_version"]) == ("warp", "1.2.3")
    assert decision["launch"]["argv"][:2] == ["warp-serve", "Qwen/Qwen3-8B"]
    assert decision["estimate"]["output_tok_s"]["value"] > 0


def test_engine_without_a_rule_is_never_chosen(site: Path, intent: str) -> None:
    decision = read_plan(site, "-f", intent)
    said = {refusal["engine"]: refusal for refusal in decision["refused"]}
    assert decision["engine"] == "vllm" and said["warp"]["kind"] == "outranked"
    assert said["warp"]["hint"] == "tests of third-party engines"


def test_why_not_accepts_any_spelling(site: Path, intent: str) -> None:
    said = read_output(site, "plan", "-f", intent, "--why-not", "warp_serve")
    assert "warp" in said and "vllm" in said


def test_intent_may_name_it_as_incumbent(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "incumbent.yaml"
    path.write_text(f"{INTENT}operations: {{incumbent: WarpEngine}}\n")
    assert read_plan(site, "-f", str(path))["engine"] == "warp"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("command", ["uv pip install warp-engine==1.2.3", "exec warp-serve"]),
        ("compose", ["image: registry.example/warp:1.2.3", "WARP_KEY"]),
        ("kubernetes", ["image: registry.example/warp:1.2.3", "kind: PodMonitor", "--lanes"]),
        ("dynamo", ["registry.example/dynamo/warp:", "dynamo.warp", "--max-lanes=", "--warp-role=worker"]),
        ("ray", ["registry.example/ray-warp:", "lanes:"]),
    ],
)
def test_engine_is_emitted_for_every_target(site: Path, intent: str, target: str, words: list[str]) -> None:
    text = read_output(site, "plan", "-f", intent, "--engine", "warp", "--emit", target)
    assert [word for word in words if word not in text] == []


def test_settings_are_listed_for_tuning(site: Path, builtin_gguf: Path) -> None:
    listed = json.loads(read_output(site, "tune", str(builtin_gguf), "--engine", "warp", "--list", "--json"))
    assert [(knob["name"], knob["source"]) for knob in listed] == [("slots", "warp-serve --help")]


def test_advice_names_the_option_of_the_engine(site: Path, tmp_path: Path) -> None:
    cells = [
        replace_fields(cell, subject=replace_fields(cell.subject, engine="warp"))
        for cell in MadeEngine(slots=4).cells(1, 4, 8)
    ]
    environment = RunEnvironment(bedplate="0", python="3.11", system="Linux", hardware="a machine", machine="0")
    run = Run(id="20261101-aa", at=cells[0].at, environment=environment, cells=tuple(cells), finished=True)
    path = tmp_path / "run.json"
    path.write_text(to_json(run))
    found = json.loads(read_output(site, "diagnose", str(path), "--json"))
    changes = found["bottlenecks"][0]["changes"]
    assert changes[0]["flag"] == "--lanes 8"


@pytest.mark.engine
def test_engine_is_installed_and_measured(site: Path, tmp_path: Path, builtin_gguf: Path) -> None:
    env = {"UV_FIND_LINKS": str(write_wheel(tmp_path / "wheels")), "UV_OFFLINE": "1"}
    loads = ("--concurrency", "1,2", "--prompt-tokens", "24", "--output-tokens", "8")
    short = ("--seconds", "0.5", "--repeats", "1", "--no-quality")
    run = from_json(
        Run, read_output(site, "bench", str(builtin_gguf), "--engines", "warp", *loads, *short, "--json", env=env)
    )
    assert [(cell.subject.engine, cell.subject.engine_version) for cell in run.cells] == [("warp", "1.2.3")] * 2
    for cell in run.cells:
        samples = [sample for repeat in cell.repeats for sample in repeat.samples]
        assert samples and all(sample.outcome == "ok" and sample.output_tokens == 8 for sample in samples)
        assert cell.repeats[0].engine is not None and cell.repeats[0].engine.running_max is not None


def test_may_replace_a_built_in_engine(tmp_path: Path, intent: str) -> None:
    site = install_package(tmp_path / "site", ENGINE.replace('id = "warp"', 'id = "tgi"'))
    assert read_plan(site, "-f", intent, "--engine", "tgi")["launch"]["argv"][0] == "warp-serve"


def test_load_error_names_the_package(tmp_path: Path, intent: str) -> None:
    site = install_package(tmp_path / "site", "import a_module_that_is_not_there\n")
    done = bedplate(site, "plan", "-f", intent)
    assert done.returncode == 3 and "the engine warp of the package bedplate-warp cannot be loaded" in done.stderr
    assert "a_module_that_is_not_there" in done.stderr and "uninstall that package" in done.stderr
