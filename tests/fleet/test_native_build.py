"""llama.cpp as this machine's own compiler builds it: about ten minutes on two cores."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Served
from tests.run.test_native import Notes

from bedplate.engines import get_engine
from bedplate.facts.hardware import probe
from bedplate.measure.builds import BuildExaminer
from bedplate.run.environments import EngineEnvironment
from bedplate.run.trials import provide_native_environment

LLAMA = get_engine("llama.cpp")


@pytest.fixture(scope="module")
def native(bedplate_home: Path) -> EngineEnvironment:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, which this machine has not")
    hardware = probe()
    target = LLAMA.find_target(hardware)
    assert target is not None
    return provide_native_environment(LLAMA, hardware, target.device, Notes(), BuildExaminer())


def test_build_was_tested_and_compared(native: EngineEnvironment) -> None:
    assert native.built and native.version == "0.3.36-native"
    assert any("greedy-token agreement with the packaged build" in note for note in native.notes)


def test_only_programs_are_kept_and_each_runs(native: EngineEnvironment) -> None:
    assert native.disk_bytes < 1_000_000_000
    names = sorted(path.name for path in (Path(native.path) / "bin").iterdir())
    assert names == ["llama-bench", "llama-quantize", "llama-server"]
    done = subprocess.run([str(native.server), "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and "version" in done.stdout + done.stderr


def test_build_serves_requests(native: EngineEnvironment, serve: Callable[..., Served]) -> None:
    with_it = serve("--engine", "llama.cpp", "--build", "native")
    assert with_it.endpoint["engine_version"] == "0.3.36-native"


def test_build_quantizes(native: EngineEnvironment, builtin_gguf: Path, tmp_path: Path) -> None:
    made = tmp_path / "small.gguf"
    program = Path(native.path) / "bin" / "llama-quantize"
    argv = [str(program), "--allow-requantize", str(builtin_gguf), str(made), "Q4_0"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert made.stat().st_size < builtin_gguf.stat().st_size
