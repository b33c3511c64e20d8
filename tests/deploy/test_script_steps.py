"""The helper that emitted scripts call: each step is done once, and a step that failed is done again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bedplate.deploy import script_steps

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for bash")


@pytest.fixture(autouse=True)
def work_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def count_runs() -> int:
    return Path("runs").read_text().count("x") if Path("runs").exists() else 0


def run_step(kind: str, name: str, command: str) -> int:
    return script_steps.main([kind, name, "sh", "-c", f"printf x >> runs; {command}"])


def test_command_runs_once_until_it_or_its_result_changes() -> None:
    assert run_step("once", "model", "mkdir -p model") == 0
    assert run_step("once", "model", "mkdir -p model") == 0 and count_runs() == 1
    Path("model").rmdir()
    assert run_step("once", "model", "mkdir -p model") == 0 and count_runs() == 2
    assert run_step("once", "model", "mkdir -p model; true") == 0 and count_runs() == 3


def test_failed_command_runs_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_step("once", "model", "mkdir -p model") == 0
    assert run_step("once", "model", "exit 7") == 7
    error = capfd.readouterr().err
    assert error.startswith("error: exit code 7: sh -c ") and "hint: start the script again" in error
    assert run_step("once", "model", "mkdir -p model") == 0 and count_runs() == 3


def test_result_has_its_name_only_when_it_is_complete() -> None:
    assert run_step("write", "model", "mkdir model.part; exit 3") == 3
    assert not Path("model").exists() and Path("model.part").exists()
    assert run_step("write", "model", "mkdir model.part && touch model.part/weights") == 0
    assert [path.name for path in Path("model").iterdir()] == ["weights"] and not Path("model.part").exists()
    assert run_step("write", "model", "exit 1") == 0 and count_runs() == 2


def test_partial_file_is_removed_first() -> None:
    Path("model.part").write_text("rest of an interrupted run")
    assert run_step("write", "model", "[ ! -e model.part ] && printf new > model.part") == 0
    assert Path("model").read_text() == "new"


def test_signal_is_reported_as_a_shell_does() -> None:
    assert run_step("once", "model", "kill -TERM $$") == 128 + 15


def test_missing_program_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert script_steps.main(["once", "model", "no-such-program"]) == 1
    assert "no-such-program" in capsys.readouterr().err


def test_step_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert script_steps.main(["twice", "a", "b"]) == 2 and "script_steps.py once NAME" in capsys.readouterr().err


def test_programs_run_with_the_environment_and_packages_are_whole(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    assert (
        script_steps.main(["programs", "env", "llama-quantize=llama_quantize.py", "openai_server=openai_server"]) == 0
    )
    done = subprocess.run([tmp_path / "env" / "bin" / "llama-quantize", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr
    shipped = script_steps.SHIPPED / "openai_server"
    assert {path.name for path in shipped.glob("*.py")} <= {
        path.name for path in (tmp_path / "env" / "bin" / "openai_server").iterdir()
    }


def test_environment_is_made_again_for_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools").mkdir()
    uv = tmp_path / "tools" / "uv"
    uv.write_text('#!/bin/sh\nprintf x >> runs\n[ "$1" = pip ] || mkdir -p converter\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    for packages, runs in ((["a==1"], 2), (["a==1"], 2), (["a==2"], 4)):
        assert script_steps.main(["environment", "converter", *packages]) == 0 and count_runs() == runs


def test_helper_needs_nothing_but_python() -> None:
    done = subprocess.run(
        [sys.executable, "-ISE", script_steps.__file__, "once", "model", "mkdir", "model"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and Path("model").is_dir(), done.stderr
