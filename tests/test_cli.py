"""The command line: help, versions, and JSON that other programs can rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import invoke

import bedplate
from bedplate.run.environments import EngineEnvironment
from bedplate.values import Decision, Hardware, Model, from_json


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bedplate", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )


def test_version_is_printed() -> None:
    assert run("--version").stdout == f"bedplate {bedplate.__version__}\n"


def test_no_arguments_show_the_help() -> None:
    answer = invoke()
    assert "Usage: bedplate" in answer.out + answer.err


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert run("frobnicate").returncode == 2


def test_probe_json_is_a_hardware() -> None:
    hardware = from_json(Hardware, invoke("probe", "--json").out)
    assert hardware.cpu.allowed_physical_cores <= len(os.sched_getaffinity(0))
    assert hardware.disk is not None and hardware.disk.free_bytes > 0


def test_inspect_json_is_a_model(builtin_gguf: Path) -> None:
    model = from_json(Model, invoke("inspect", str(builtin_gguf), "--json").out)
    assert (model.num_layers, model.num_kv_heads, model.kv_bytes_per_token) == (30, 3, 23040)


def test_plan_json_is_a_decision_with_a_launch(builtin_gguf: Path) -> None:
    answer = invoke("plan", str(builtin_gguf), "--concurrency", "3", "--context", "2048", "--json")
    decision = from_json(Decision, answer.out)
    assert decision.engine == "llama.cpp" and decision.fits and decision.launch is not None
    argv = decision.launch.argv
    assert argv[argv.index("--parallel") + 1] == "3" and argv[argv.index("--ctx-size") + 1] == str(3 * 2048)


def test_plan_needs_no_download(tmp_path: Path) -> None:
    nowhere = {"BEDPLATE_HOME": str(tmp_path), "UV_OFFLINE": "1"}
    assert run("plan", env=nowhere).returncode == 0
    assert not list(tmp_path.iterdir())


def test_pages_contain_the_main_facts(builtin_gguf: Path) -> None:
    page = invoke("plan", str(builtin_gguf)).out
    for word in ("llama.cpp", "hardware.cpu", "needs an NVIDIA GPU", "--threads", "Expect"):
        assert word in page
    assert "22.5 KiB per token" in invoke("inspect", str(builtin_gguf)).out
    assert "cores allowed" in invoke("probe").out


def test_output_to_a_pipe_has_no_colours(builtin_gguf: Path) -> None:
    assert "\x1b[" not in run("plan", str(builtin_gguf)).stdout + run("inspect", "nothing.gguf").stderr


@pytest.mark.parametrize(
    ("module", "where", "name"), [("bedplate", "bedplate.cli", "main"), ("bedplate.cli.background", "json", "decode")]
)
def test_a_caught_interrupt_keeps_the_exit_code(module: str, where: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "around.py").write_text(f"""
import runpy, sys
import bedplate.cli, bedplate.cli.background
from msgspec import json
def interrupted(*_, **__):
    try:
        exec("raise KeyboardInterrupt")  # as where it comes while a dataclass is made
    except KeyboardInterrupt:
        sys.exit(130)
{where}.{name} = interrupted
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
""")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "around"], stdin=subprocess.DEVNULL, capture_output=True, env=env)
    assert done.returncode == 130, done


PLAN = ("plan", "Qwen/Qwen3-8B", "--hardware", "RTX 4090")


PRINTED = [
    (PLAN, ""),
    ((*PLAN, "--json"), "1"),
    *((words, mode) for words in (("--version",), ("--help",)) for mode in ("", "1")),
]
"""What rich prints, what is printed as it is, and what click prints, with and without a buffer."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("arguments", "unbuffered"), PRINTED)
def test_a_full_disk_is_an_external_failure(arguments: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bedplate", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 3 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "error: cannot write the output\ncaused by: No space left on device\nhint: " in done.stderr


@pytest.mark.parametrize(("arguments", "unbuffered"), PRINTED)
def test_a_closed_pipe_prints_no_error(arguments: tuple[str, ...], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", *arguments],
        stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writer)
    assert done.returncode != 0 and done.stderr == ""


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_unsupported_characters_are_replaced(env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-m", "bedplate", *PLAN], capture_output=True, env={**os.environ, **env})
    assert done.returncode == 0 and not done.stderr
    assert b"512 + 256 tokens ? " in done.stdout, "the arrow is replaced"


def list_environments(printed: str) -> list[str]:
    return [there["engine"] for engine in json.loads(printed)["engines"] for there in engine["installed"]]


def test_engines_lists_installed_environments_and_removes_them(
    llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    assert "llama.cpp" in list_environments(run("engines", "--json").stdout)
    assert "installed" in run("engines").stdout
    elsewhere = {"BEDPLATE_HOME": str(tmp_path)}
    assert list_environments(run("engines", "--json", env=elsewhere).stdout) == []
    removed = run("engines", "remove", "llama.cpp", env=elsewhere)
    assert removed.returncode == 2 and "not installed" in removed.stderr


def test_the_package_exports_its_public_functions() -> None:
    import bedplate.decide.memory

    assert bedplate.__all__ == sorted(bedplate.__all__)
    for name in bedplate.__all__[1:]:
        assert callable(getattr(bedplate, name))
