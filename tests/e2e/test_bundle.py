"""A bundle of the real engine and the real model, served without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Answer, run
from tests.conftest import HANG_S
from tests.contract.documents import check_document

from bedplate.run.environments import EngineEnvironment
from bedplate.values import from_json
from bedplate.values.bundle import MANIFEST, TOP, Bundle

CUT_OFF = Path(__file__).with_name("cut_off.py")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def quiet_cores(one_core: None) -> None:
    """Idle threads block instead of spinning, since other processes use the machine, too."""


@pytest.fixture(scope="module")
def archive(builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "chat.tar"
    answer = run("bundle", "--context", "512", "--concurrency", "1", "--engine", "llama.cpp", "-o", str(path), "--json")
    assert answer.code == 0, answer.err
    packed = check_document("packed", answer.out)
    assert packed["path"] == str(path) and packed["size_bytes"] == path.stat().st_size
    assert "at most" in answer.err, "how large it will be is said before"
    assert [one.name for one in path.parent.iterdir()] == ["chat.tar"], "nothing is left beside it"
    return path


@pytest.fixture
def unpacked(archive: Path, tmp_path: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path)  # of our own making
    return tmp_path / TOP


def build_environment(home: Path) -> dict[str, str]:
    """The environment of another machine: an empty home and cache, and an unreachable package index."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "BEDPLATE_"))}
    nowhere = dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE)
    return env | nowhere | {
        "BEDPLATE_HOME": str(home / "home"),
        "UV_CACHE_DIR": str(home / "cache"),
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }  # fmt: skip


def cut_off(home: Path, *command: str, env: dict[str, str] | None = None) -> tuple[Answer, dict[str, Any]]:
    """Runs it in a separate network namespace if the system allows that."""
    namespace = ["unshare", "-rn"]
    allowed = shutil.which("unshare") and subprocess.run([*namespace, "true"], capture_output=True).returncode == 0
    done = subprocess.run(
        [*(namespace if allowed else []), sys.executable, str(CUT_OFF), *command],
        capture_output=True, text=True, env={**build_environment(home), **(env or {})}, timeout=HANG_S,
    )  # fmt: skip
    said = json.loads(done.stdout) if done.stdout.strip() else {}
    if said and allowed:
        assert said["cut_off"], "this namespace has a way out, so the test shows nothing"
    return Answer(done.returncode, done.stdout, done.stderr), said


def build_serve_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "bedplate", "serve", "--bundle", str(path), "--json", "--port", "0", "--no-check"]


def test_serves_bundle_folder_offline_and_again_without_installing(unpacked: Path, tmp_path: Path) -> None:
    answer, said = cut_off(tmp_path, *build_serve_command(unpacked))
    assert answer.code == 0, answer.err
    assert said["endpoint"]["engine"] == "llama.cpp" and said["endpoint"]["model"] == "smollm2-135m-instruct"
    assert said["answer"]["choices"][0]["message"]["content"] and said["answer"]["usage"]["completion_tokens"] > 0
    assert "installing llama.cpp" in answer.err

    again, said = cut_off(tmp_path, *build_serve_command(unpacked))
    assert again.code == 0 and said["answer"]["choices"], again.err
    assert "installing llama.cpp" not in again.err


def test_bundle_program_serves_with_only_a_python(unpacked: Path, tmp_path: Path) -> None:
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    assert (unpacked / "serve").stat().st_mode & 0o111
    options = ["--json", "--port", "0", "--no-check"]
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "UV_PYTHON": str(python)}
    answer, said = cut_off(tmp_path, "sh", str(unpacked / "serve"), *options, env=env)
    assert answer.code == 0, answer.err
    assert said["answer"]["choices"][0]["message"]["content"], answer.err
    assert not list((tmp_path / "home" / "bundles").glob(".making-*"))


def test_extracts_archive_once_and_serves_it(archive: Path, tmp_path: Path) -> None:
    answer, said = cut_off(tmp_path, *build_serve_command(archive))
    assert answer.code == 0, answer.err
    assert said["answer"]["choices"] and "unpacking" in answer.err
    kept = [one for one in (tmp_path / "home" / "bundles").iterdir() if one.is_dir()]
    assert len(kept) == 1 and (kept[0] / MANIFEST).is_file()


def test_check_reports_complete_bundle_and_its_content(archive: Path) -> None:
    answer = run("bundle", "--check", str(archive))
    assert answer.code == 0, answer.err
    told = " ".join(answer.out.split())  # line breaks depend on the folder's name
    assert "unchanged since" in told and "llama.cpp" in told


def test_checksum_files_are_valid_without_bedplate(unpacked: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("this system has no sha256sum")
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=unpacked, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    listed = {line.split("  ", 1)[1] for line in (unpacked / "SHA256SUMS").read_text().splitlines()}
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert listed == there - {"SHA256SUMS"}


def test_detects_one_changed_byte_before_installing(unpacked: Path, tmp_path: Path) -> None:
    model = next((unpacked / "model").iterdir())
    with model.open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    answer, _ = cut_off(tmp_path, *build_serve_command(unpacked))
    assert answer.code == 3 and "damaged: 1 of" in answer.err, answer.err
    assert f"model/{model.name} has a different sha256" in answer.err and "hint: copy it" in answer.err
    assert not (tmp_path / "home" / "engines").exists()


def test_reports_truncated_archive(archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    with archive.open("rb") as source, cut.open("wb") as out:
        out.write(source.read(archive.stat().st_size // 2))
    answer = run("serve", "--bundle", str(cut), "--port", "0")
    assert answer.code == 3 and "incomplete" in answer.err and "copy it again" in answer.err


def test_manifest_lists_requirements_of_the_site(unpacked: Path) -> None:
    bundle = from_json(Bundle, (unpacked / MANIFEST).read_bytes())
    assert bundle.site.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert any(pin.startswith("xllamacpp==") for pin in bundle.packages)
    assert {pin.partition("==")[0] for pin in bundle.own_packages} >= {"bedplate", "uv", "msgspec", "aiohttp"}
    assert not any(pin.startswith("pytest==") for pin in bundle.own_packages)
    readme = (unpacked / "README.txt").read_text()
    assert f"Python {bundle.site.python}" in readme and "./serve" in readme
    listed = {file.path for file in bundle.files}
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert there - listed == {MANIFEST, "SHA256SUMS"}


@pytest.mark.skipif(
    not os.environ.get("BEDPLATE_FLEET"), reason="makes an environment with pip, which takes long: set BEDPLATE_FLEET=1"
)
def test_pip_installs_bedplate_from_the_bundle(unpacked: Path, tmp_path: Path) -> None:
    """As README.txt describes, for users who want their own environment."""
    env = build_environment(tmp_path)
    made = subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "own")], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"this Python makes no environments with pip: {made.stdout.strip().splitlines()[-1:]}")
    python = tmp_path / "own" / "bin" / "python"
    words = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(unpacked / "wheels"), "bedplate"]
    done = subprocess.run([str(python), *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([str(python.with_name("bedplate")), "--version"], capture_output=True, text=True, env=env)
    assert shown.stdout.startswith("bedplate "), shown.stderr
