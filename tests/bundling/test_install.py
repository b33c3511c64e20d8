"""What install.py says on a machine that lacks something. PyTorch and nvidia-smi are stand-ins, for checks alone."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bedplate.bundling import install
from bedplate.values import to_json
from bedplate.values.bundle import MANIFEST, BundledEngine, BundlePiece, BundleTarget, TargetBundle

PYTHON = str(getattr(sys, "_base_executable", sys.executable))
PIECES = {"piece.000": b"a" * 1000, "piece.001": b"b" * 10}
DECOMPRESSOR = b"not opened by checks"
GPU = "NVIDIA H200, 580.95.05, 9.0"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bundles for a target are for Linux")


class Site:
    """A machine with a bundle, a Python, a PyTorch and a GPU, each as the test wants it."""

    def __init__(self, folder: Path) -> None:
        self.bundle, self.home = folder / "bundle", folder / "home"
        self._packages, self._programs = folder / "packages", folder / "programs"
        for one in (self.bundle, self._packages, self._programs):
            one.mkdir()
        (self.bundle / "install.py").write_bytes(Path(install.__file__).read_bytes())
        (self.bundle / "zstandard.zip").write_bytes(DECOMPRESSOR)
        for name, content in PIECES.items():
            (self.bundle / name).write_bytes(content)
        self.has_gpu(GPU)
        self.has_torch("2.11.0+cu130", "13.0")
        self.needs()

    def needs(self, unpacked_bytes: int = 1000, **target: Any) -> None:
        engine = BundledEngine(
            engine="vllm", name="vLLM", version="0.26.0", path="engines/vllm", place="engines/vllm/0.26.0-x",
            torch="2.11.0", packages=(), environment={}, check="import vllm",
        )  # fmt: skip
        pieces = tuple(
            BundlePiece(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in PIECES.items()
        )
        given: dict[str, Any] = {
            "name": "linux-test-cuda13", "system": "linux", "machine": platform.machine().lower(), "device": "cuda",
            "python": f"{sys.version_info.major}.{sys.version_info.minor}", "glibc": "2.17", "cuda": "13",
            "driver": "580", "capability": "9.0",
        }  # fmt: skip
        bundle = TargetBundle(
            id="abc", bedplate="0.1.0", made_at="2026-11-17T12:00:00+00:00", target=BundleTarget(**(given | target)),
            engines=(engine,), unpacked_bytes=unpacked_bytes, pieces=pieces,
            decompressor=BundlePiece(
                name="zstandard.zip", size_bytes=len(DECOMPRESSOR), sha256=hashlib.sha256(DECOMPRESSOR).hexdigest()
            ),
        )  # fmt: skip
        (self.bundle / MANIFEST).write_text(to_json(bundle))

    def has_torch(self, version: str | None, cuda: str | None = None) -> None:
        folder = self._packages / "torch"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
        if version is None:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    def has_gpu(self, *rows: str) -> None:
        program = self._programs / "nvidia-smi"
        program.unlink(missing_ok=True)
        if rows:
            program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
            program.chmod(0o755)

    def run(self, *options: str) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(
            [PYTHON, "-B", str(self.bundle / "install.py"), "--home", str(self.home), "--json", *options],
            capture_output=True, text=True,
            env={"PATH": f"{self._programs}:/usr/bin:/bin", "PYTHONPATH": str(self._packages), "HOME": str(self.home)},
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def refused(site: Site, code: int, *words: str) -> None:
    """Without --check too, nothing is written."""
    found, said, err = site.run()
    assert found == code, err
    told = "\n".join(said["problems"])
    assert len(said["problems"]) == len(words), told
    for word in words:
        assert word in told and word in err, err
    assert not said["installed"] and said["error"] and not site.home.exists()


def test_a_machine_that_has_everything_passes(site: Site) -> None:
    code, said, err = site.run("--check")
    assert code == 0, err
    assert said["problems"] == [] and not site.home.exists()
    assert said["commands"][0].endswith("serve --engine vllm")


def test_no_pytorch(site: Site) -> None:
    site.has_torch(None)
    refused(site, 1, "PyTorch 2.11.0 for CUDA 13 is needed by vLLM; " + PYTHON + " has none")


def test_another_pytorch(site: Site) -> None:
    site.has_torch("2.12.1+cu130", "13.0")
    refused(site, 1, "is version 2.12.1+cu130")


@pytest.mark.parametrize(("cuda", "words"), [("12.8", "was built for CUDA 12.8"), (None, "was built for no CUDA")])
def test_a_pytorch_for_another_cuda(site: Site, cuda: str | None, words: str) -> None:
    site.has_torch("2.11.0", cuda)
    refused(site, 1, words)


def test_no_gpu(site: Site) -> None:
    site.has_gpu()
    refused(site, 1, "an NVIDIA GPU is needed; nvidia-smi does not run")


def test_an_old_driver(site: Site) -> None:
    site.has_gpu("NVIDIA H200, 570.124.06, 9.0")
    refused(site, 1, "CUDA 13 needs driver 580 or newer; this machine has 570.124.06")


def test_a_gpu_whose_code_was_left_out(site: Site) -> None:
    site.has_gpu(GPU, "NVIDIA B200, 580.95.05, 10.0")
    refused(site, 1, "compute capability 9.0 alone; here are NVIDIA B200 (10.0)")


def test_another_python_machine_and_glibc_are_told_together(site: Site) -> None:
    site.needs(python="3.7", machine="riscv64", glibc="9.99")
    refused(site, 1, "Python 3.7 is needed", "linux on riscv64", "glibc 9.99 or newer is needed")


def test_no_disk_space(site: Site) -> None:
    site.needs(unpacked_bytes=10**18)
    refused(site, 1, "1000000000.2 GB are needed in")


def test_a_missing_and_a_damaged_piece_are_told_with_what_the_machine_lacks(site: Site) -> None:
    (site.bundle / "piece.000").unlink()
    (site.bundle / "piece.001").write_bytes(b"b" * 9 + b"c")
    site.has_torch(None)
    refused(site, 3, "piece.000 is missing", "piece.001 is damaged: it has another sha256", "PyTorch 2.11.0")


def test_a_piece_that_was_cut_short(site: Site) -> None:
    (site.bundle / "piece.000").write_bytes(b"a" * 900)
    (site.bundle / "zstandard.zip").unlink()
    refused(site, 3, "piece.000 has 900 bytes instead of 1000", "zstandard.zip is missing")


def test_no_manifest_and_a_wrong_option(site: Site) -> None:
    (site.bundle / MANIFEST).write_text("{")
    code, said, err = site.run()
    assert code == 3 and MANIFEST in said["error"] and "hint: copy it" in err
    assert site.run("--nonsense")[0] == 2


def test_bedplate_alone_needs_no_gpu(site: Site) -> None:
    manifest = json.loads((site.bundle / MANIFEST).read_text()) | {"engines": []}
    (site.bundle / MANIFEST).write_text(json.dumps(manifest))
    site.has_gpu()
    site.has_torch(None)
    assert site.run("--check")[0] == 0


def test_an_overlay_sees_the_pytorch_below_it_and_its_own_packages_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below, tree = tmp_path / "below", tmp_path / "tree"
    own = tree / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in (below / "torch", below / "shared", own / "shared", own / "engine_of_test"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"from_overlay = {package.is_relative_to(tree)}\n")
    monkeypatch.syspath_prepend(str(below))
    engine = {"torch": "2.11.0", "environment": {"ENGINE_OF_TEST": "0"}}
    install.make_environment(tree, tree, engine)
    code = "import torch, shared, engine_of_test, os, sys; "
    code += "print(torch.from_overlay, shared.from_overlay, os.environ['ENGINE_OF_TEST'], sys.prefix)"

    def run(**variables: str) -> list[str]:
        env = {"PATH": "/usr/bin:/bin", **variables}
        command = [str(tree / "bin" / "python"), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.split()

    assert run() == ["False", "True", "0", str(tree)]
    assert run(ENGINE_OF_TEST="1")[2] == "1", "what the user has set holds"


def test_commands_can_be_pasted_into_a_shell() -> None:
    manifest = {"model_place": "models/bundled/one/a b.gguf", "engines": [{"engine": "vllm"}]}
    (command,) = install.serve_commands(manifest, Path("/a home"))
    place = "'/a home/models/bundled/one/a b.gguf'"
    assert command == f"BEDPLATE_HOME='/a home' '/a home/bin/bedplate' serve {place} --engine vllm"


def test_programs_can_be_started_again_by_a_child(tmp_path: Path) -> None:
    """An engine that spawns its workers imports the program's file again, which must not start a second server."""
    site = tmp_path / "site-packages"
    about = site / "one-1.dist-info"
    about.mkdir(parents=True)
    (about / "entry_points.txt").write_text("[console_scripts]\none = one.cli:app.main\ntwo=one.cli:run [extra]\n")
    programs = tmp_path / "a folder" / "bin"
    programs.mkdir(parents=True)
    install.write_programs(site, programs, Path(sys.executable))
    assert sorted(file.name for file in programs.iterdir()) == ["one", "two"]
    text = (programs / "one").read_text()
    assert "from one.cli import app\nif __name__ == '__main__':\n    sys.exit(app.main())" in text
    assert os.access(programs / "two", os.X_OK)


def test_a_program_runs_from_a_path_that_a_first_line_cannot_hold(tmp_path: Path) -> None:
    site, programs = tmp_path / "site-packages", tmp_path / "bin"
    about = site / "one-1.dist-info"
    about.mkdir(parents=True)
    programs.mkdir()
    (about / "entry_points.txt").write_text("[console_scripts]\nshow = platform:python_version\n")
    python = tmp_path / "with a space" / "python"
    python.parent.mkdir()
    python.symlink_to(PYTHON)
    install.write_programs(site, programs, python)
    done = subprocess.run([str(programs / "show")], capture_output=True, text=True)
    assert platform.python_version() in done.stdout + done.stderr


def test_it_needs_nothing_of_ours_and_starts_on_an_older_python() -> None:
    text = Path(install.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} <= set(sys.stdlib_module_names)
