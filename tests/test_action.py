"""The GitHub Action: its entry point with a real process in place of bedplate, its inputs, and the example workflow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.test_help import COMMANDS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "action" / "run_gate.py"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEP = ACTION["runs"]["steps"][-1]


def run_entry(tmp_path: Path, code: int, **given: str) -> tuple[int, list[str], dict[str, str], str]:
    """Exit code, arguments of the gate, outputs and summary. A small program stands in for bedplate: it exits with
    `code`, since a real gate measures for minutes."""
    program = tmp_path / "bedplate"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\npathlib.Path('arguments').write_text('\\n'.join(sys.argv[1:]))\n"
        f"pathlib.Path('gate.md').write_text('### page\\n')\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    files = {name: tmp_path / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    defaults = {"GATE_BEDPLATE": str(program), "GATE_BASELINE": "base.json", "GATE_MARKDOWN": "gate.md"}
    inputs = {f"GATE_{name.upper()}": value for name, value in given.items()}
    env = {**os.environ, **defaults, **inputs, **{name: str(path) for name, path in files.items()}}
    done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True)
    read = {name: path.read_text() if path.exists() else "" for name, path in files.items()}
    outputs = dict(line.split("=", 1) for line in read["GITHUB_OUTPUT"].splitlines())
    arguments = tmp_path / "arguments"
    words = arguments.read_text().splitlines() if arguments.exists() else []
    return done.returncode, words, outputs, read["GITHUB_STEP_SUMMARY"]


@pytest.mark.parametrize(
    ("code", "fail_on", "expected", "outcome"),
    [
        (0, "worse", 0, "no-regression"),
        (10, "worse", 0, "better"),
        (20, "worse", 0, "not-proven"),
        (20, "not-proven", 20, "not-proven"),
        (30, "worse", 30, "worse"),
        (30, "never", 0, "worse"),
        (3, "never", 3, "error"),
    ],
)
def test_outcome_and_exit_code(tmp_path: Path, code: int, fail_on: str, expected: int, outcome: str) -> None:
    exited, _, outputs, summary = run_entry(tmp_path, code, fail_on=fail_on)
    assert exited == expected and outputs == {"outcome": outcome, "exit-code": str(code), "markdown": "gate.md"}
    assert summary == ("### page\n" if code != 3 else "")


def test_inputs_become_options_without_a_shell(tmp_path: Path) -> None:
    _, words, _, _ = run_entry(
        tmp_path, 0, baseline="a b; touch x.json", metric="tok_s, ttft_p95", rounds="5", junit="g.xml",
        arguments="--slo 'ttft_ms=500' --no-quality",
    )  # fmt: skip
    assert words == [
        "gate", "a b; touch x.json", "--rounds", "5", "--junit", "g.xml", "--markdown", "gate.md", "--metric", "tok_s",
        "--metric", "ttft_p95", "--slo", "ttft_ms=500", "--no-quality",
    ]  # fmt: skip
    assert not (tmp_path / "x.json").exists()
    known = {option for parameter in COMMANDS["gate"].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known | {"--no-quality"}


@pytest.mark.parametrize("given", [{"baseline": " "}, {"fail_on": "sometimes"}])
def test_wrong_inputs_are_errors(tmp_path: Path, given: dict[str, str]) -> None:
    code, words, _, _ = run_entry(tmp_path, 0, **given)
    assert code == 2 and not words


def test_every_input_reaches_the_entry_point() -> None:
    passed = {value.split("inputs.")[1].split(" ")[0] for value in STEP["env"].values() if "inputs." in value}
    assert passed | {"bedplate"} == set(ACTION["inputs"])
    source = SCRIPT.read_text()
    assert all(f'"{name.removeprefix("GATE_").lower()}"' in source or f'"{name}"' in source for name in STEP["env"])
    assert STEP["run"].split("/", 1)[1].rstrip('"') == SCRIPT.relative_to(ROOT).as_posix()
    assert set(ACTION["outputs"]) == {"outcome", "exit-code", "markdown"}


def test_the_example_workflow_uses_existing_inputs_and_outputs() -> None:
    text = (ROOT / "examples" / "gate.yml").read_text()
    (step,) = [one for one in yaml.safe_load(text)["jobs"]["gate"]["steps"] if one.get("id") == "gate"]
    assert step["with"].keys() <= ACTION["inputs"].keys() and step["with"].keys() >= {"baseline"}
    assert "steps.gate.outputs.markdown" in text
