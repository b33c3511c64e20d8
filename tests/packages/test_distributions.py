"""The wheel and the sdist: what they contain, and whether they work in empty environments on every supported Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

pytestmark = pytest.mark.packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [found[1] for one in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]
INSTALLERS = {"3.11": "pip", "3.12": "pipx", "3.13": "uv-tool", "3.14": "uv"}
"""Each installer is tried on one version, since they differ in how they install, not in what."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, which uv builds from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([find_uv_bin(), "build", "--quiet", "--out-dir", folder, ROOT], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def find_python(version: str) -> str | None:
    """An interpreter of this version: what uv finds, or what pyenv has installed."""
    command = [find_uv_bin(), "python", "find", "--no-python-downloads", "--system", version]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(kept.glob(f"{version}.*/bin/python"))), None)


def check(python: str, dist: Path, *options: str) -> str:
    program = Path(__file__).with_name("check_wheel.py")
    env = {**os.environ, "UV": find_uv_bin()}
    done = subprocess.run([python, program, dist, *options], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_contains_the_package_and_its_data(built: tuple[Path, Path]) -> None:
    source = ROOT / "src"
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("needs the repository")
    expected = {Path(name).relative_to("src").as_posix() for name in listed if (source.parent / name).exists()}
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"bedplate", built[0].name.split("-py3")[0] + ".dist-info"}
    assert "License-Expression: Apache-2.0" in metadata and "# bedplate" in metadata


def test_sdist_contains_what_the_tests_and_docs_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"Makefile", "LICENSE", "pyproject.toml", "docs/README.md", "tests/conftest.py"} <= names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name or name.endswith(".pyc")]


def test_every_supported_python_is_tried() -> None:
    assert set(INSTALLERS) == set(VERSIONS) and PROJECT["requires-python"] == f">={min(VERSIONS, key=len)}"


@pytest.mark.parametrize("version", list(INSTALLERS))
def test_wheel_works_in_an_empty_environment(version: str, built: tuple[Path, Path]) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine")
    said = check(python, built[0], "--with", INSTALLERS[version])
    assert f"on Python {version}." in said and "a plan" in said


def test_three_commands_give_a_streamed_answer(built: tuple[Path, Path], tmp_path: Path) -> None:
    program = ROOT / "examples" / "first_answer.sh"
    commands = [line for line in program.read_text().splitlines() if line.startswith(("python3 ", '"$folder/bin/'))]
    assert len(commands) == 3
    env = {**os.environ, "BEDPLATE_HOME": str(tmp_path / "home")}
    command = ["bash", str(program), str(built[0]), "env"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pieces = list(iter(lambda: os.read(process.stdout.fileno(), 4096), b""))  # type: ignore[union-attr]
        error = process.stderr.read().decode() if process.stderr is not None else ""
    assert process.returncode == 0, error
    assert len(pieces) > 5 and b"".join(pieces).strip(), "the answer came in pieces"


def test_sdist_answers_and_has_a_bill_of_materials(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With all that the release workflow asks of the program."""
    said = check(sys.executable, built[1], "--with", "uv", "--answer", "--sbom", str(tmp_path / "bom.json"))
    assert ".gz" in said and '"bomFormat": "CycloneDX"' in (tmp_path / "bom.json").read_text(encoding="utf-8")
