"""install.py reports what a machine lacks. PyTorch and nvidia-smi are stand-ins, used only by the checks."""

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
BUNDLE_ID = hashlib.sha256(
    "".join(hashlib.sha256(content).hexdigest() for content in PIECES.values()).encode()
).hexdigest()[:10]
DECOMPRESSOR = b"not opened by checks"
GPU = "NVIDIA H200, 580.95.05, 9.0"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bundles for a target are for Linux")


class Site:
    """A machine with a bundle, Python, PyTorch and GPU that the test configures."""

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
            engine="vllm", name="vLLM", version="0.26.0", path="engines/vllm", place=f"engines/vllm/0.26.0-{BUNDLE_ID}",
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
            id=BUNDLE_ID, bedplate="0.1.0", made_at="2026-11-17T12:00:00+00:00",
            target=BundleTarget(**(given | target)),
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


def check_refusal(site: Site, code: int, *words: str) -> None:
    """Run the installation and check that it reports these problems and writes nothing."""
    found, result, err = site.run()
    assert found == code, err
    problems = "\n".join(result["problems"])
    assert len(result["problems"]) == len(words), problems
    for word in words:
        assert word in problems and word in err, err
    assert not result["installed"] and result["error"] and not site.home.exists()


def test_check_passes_on_a_machine_that_meets_all_requirements(site: Site) -> None:
    code, said, err = site.run("--check")
    assert code == 0, err
    assert said["problems"] == [] and not site.home.exists()
    assert said["commands"][0].endswith("serve --engine vllm")


def test_reports_missing_pytorch(site: Site) -> None:
    site.has_torch(None)
    check_refusal(site, 1, "vLLM requires PyTorch 2.11.0 for CUDA 13; " + PYTHON + " has none")


def test_reports_another_version_of_pytorch(site: Site) -> None:
    site.has_torch("2.12.1+cu130", "13.0")
    check_refusal(site, 1, "is version 2.12.1+cu130")


@pytest.mark.parametrize(("cuda", "words"), [("12.8", "was built for CUDA 12.8"), (None, "was built for no CUDA")])
def test_reports_pytorch_for_another_cuda(site: Site, cuda: str | None, words: str) -> None:
    site.has_torch("2.11.0", cuda)
    check_refusal(site, 1, words)


def test_reports_missing_gpu(site: Site) -> None:
    site.has_gpu()
    check_refusal(site, 1, "an NVIDIA GPU is required, but nvidia-smi cannot run")


def test_reports_old_driver(site: Site) -> None:
    site.has_gpu("NVIDIA H200, 570.124.06, 9.0")
    check_refusal(site, 1, "CUDA 13 requires driver 580 or newer; this machine has 570.124.06")


def test_reports_gpu_without_packed_code(site: Site) -> None:
    site.has_gpu(GPU, "NVIDIA B200, 580.95.05, 10.0")
    check_refusal(site, 1, "compute capability 9.0; this machine has NVIDIA B200 (10.0)")


def test_reports_python_machine_and_glibc_together(site: Site) -> None:
    site.needs(python="3.7", machine="riscv64", glibc="9.99")
    check_refusal(site, 1, "Python 3.7 is required", "linux on riscv64", "glibc 9.99 or newer is required")


def test_reports_missing_disk_space(site: Site) -> None:
    site.needs(unpacked_bytes=10**18)
    check_refusal(site, 1, "1000000000.2 GB of disk space is required in")


def test_reports_bad_pieces_together_with_missing_requirements(site: Site) -> None:
    (site.bundle / "piece.000").unlink()
    (site.bundle / "piece.001").write_bytes(b"b" * 9 + b"c")
    site.has_torch(None)
    check_refusal(site, 3, "piece.000 is missing", "piece.001 is damaged: its sha256 differs", "PyTorch 2.11.0")


def test_reports_truncated_piece(site: Site) -> None:
    (site.bundle / "piece.000").write_bytes(b"a" * 900)
    (site.bundle / "zstandard.zip").unlink()
    check_refusal(site, 3, "piece.000 has 900 bytes instead of 1000", "zstandard.zip is missing")


def test_reports_invalid_manifest_and_unknown_option(site: Site) -> None:
    (site.bundle / MANIFEST).write_text("{")
    code, said, err = site.run()
    assert code == 3 and MANIFEST in said["error"] and "hint: copy it" in err
    assert site.run("--nonsense")[0] == 2


def test_bundle_without_engine_needs_no_gpu(site: Site) -> None:
    manifest = json.loads((site.bundle / MANIFEST).read_text()) | {"engines": []}
    (site.bundle / MANIFEST).write_text(json.dumps(manifest))
    site.has_gpu()
    site.has_torch(None)
    assert site.run("--check")[0] == 0


def test_overlay_imports_its_own_packages_before_those_of_the_target(
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
    assert run(ENGINE_OF_TEST="1")[2] == "1", "a variable that the user set keeps its value"


def test_packages_have_bytecode_even_if_the_environment_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it, each process of an engine would compile its packages at each start."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one.py").write_text("x = 1\n")
    (tmp_path / "lib" / "other.py").write_text("not valid for this Python\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    install.compile_bytecode(tmp_path, install.ProgressLines())
    assert [file.name.partition(".")[0] for file in (tmp_path / "lib" / "__pycache__").iterdir()] == ["one"]
    assert "not compiled" not in capsys.readouterr().err


def test_printed_commands_are_quoted_for_a_shell() -> None:
    manifest = {"model_place": "models/bundled/one/a b.gguf", "engines": [{"engine": "vllm"}]}
    (command,) = install.list_serve_commands(manifest, Path("/a home"))
    place = "'/a home/models/bundled/one/a b.gguf'"
    assert command == f"BEDPLATE_HOME='/a home' '/a home/bin/bedplate' serve {place} --engine vllm"


def test_console_scripts_guard_against_reimport(tmp_path: Path) -> None:
    """A spawned worker imports the script again, which must not start a second server."""
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


def test_console_script_runs_with_a_path_that_a_shebang_cannot_hold(tmp_path: Path) -> None:
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


def test_installer_imports_only_the_standard_library_and_parses_on_python_3_7() -> None:
    text = Path(install.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} <= set(sys.stdlib_module_names)
