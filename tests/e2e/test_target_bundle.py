"""A bundle for a named platform, in pieces, installed and served without a network."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import run
from tests.e2e.test_bundle import build_environment, cut_off

from bedplate.run.environments import EngineEnvironment
from bedplate.values import from_json
from bedplate.values.bundle import MANIFEST, TargetBundle

PYTHON = str(getattr(sys, "_base_executable", sys.executable))
PIECE_BYTES = 32 << 20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"),
    reason="bundles for a target are for Linux on x86_64 and aarch64",
)


@pytest.fixture(autouse=True)
def quiet_cores(one_core: None) -> None:
    """Idle threads block instead of spinning, since other processes use the machine, too."""


@pytest.fixture(scope="module")
def made(builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "chat"
    answer = run(
        "bundle", "--for", f"linux-{platform.machine()}-cpu", "--engine", "llama.cpp", "--pieces", "32M",
        "-o", str(folder), "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["path"] == str(folder)
    assert [one.name for one in folder.parent.iterdir()] == ["chat"], "nothing is left beside it"
    return folder


def install(folder: Path, home: Path) -> tuple[int, dict[str, object], str]:
    namespace = ["unshare", "-rn"]
    allowed = shutil.which("unshare") and subprocess.run([*namespace, "true"], capture_output=True).returncode == 0
    done = subprocess.run(
        [*(namespace if allowed else []), PYTHON, str(folder / "install.py"), "--json"],
        capture_output=True, text=True, env=build_environment(home) | {"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


def test_target_bundle_installs_offline_and_serves(made: Path, tmp_path: Path) -> None:
    code, said, err = install(made, tmp_path)
    assert code == 0 and said["installed"], err
    home = tmp_path / "home"
    assert said["commands"] == [f"BEDPLATE_HOME={home} {home}/bin/bedplate serve --engine llama.cpp"]
    assert "unpacking" in err and "registering llama.cpp" in err
    assert not list(home.glob(".installing-*"))

    words = ["serve", "--engine", "llama.cpp", "--context", "512", "--json", "--port", "0", "--no-check"]
    answer, served = cut_off(tmp_path, str(home / "bin" / "bedplate"), *words)
    assert answer.code == 0, answer.err
    assert served["endpoint"]["engine"] == "llama.cpp"
    assert served["answer"]["choices"][0]["message"]["content"], answer.err

    code, said, err = install(made, tmp_path)
    assert code == 0 and "is already unpacked" in err


def test_manifest_lists_pieces(made: Path) -> None:
    bundle = from_json(TargetBundle, (made / MANIFEST).read_bytes())
    assert [engine.engine for engine in bundle.engines] == ["llama.cpp"] and bundle.model == "SmolLM2-135M-Instruct"
    assert len(bundle.pieces) > 1 and all(piece.size_bytes <= PIECE_BYTES for piece in bundle.pieces)
    assert {pin.partition("==")[0] for pin in bundle.own_packages} >= {"bedplate", "uv", "msgspec", "aiohttp"}
    names = {"install.py", MANIFEST, "README.txt", "zstandard.zip", *(piece.name for piece in bundle.pieces)}
    assert {file.name for file in made.iterdir()} == names
    assert "python3 install.py" in (made / "README.txt").read_text()
    answer = run("bundle", "--check", str(made))
    assert answer.code == 0 and "unchanged since" in " ".join(answer.out.split()), answer.err
    answer = run("serve", "--bundle", str(made))
    assert answer.code == 1 and "install.py" in answer.err


def test_both_sides_detect_one_changed_byte_before_extracting(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    with (copy / "piece.001").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    answer = run("bundle", "--check", str(copy))
    assert answer.code == 3 and "piece.001 has a different sha256" in answer.err
    code, said, _ = install(copy, tmp_path)
    assert code == 3 and said["problems"] == ["piece.001 is damaged: its sha256 differs"]
    assert not (tmp_path / "home").exists()
