"""benchmarks/card/measure.py: its commands exist in this version, and a later call continues an interrupted one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from bedplate.cli.app import app

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "card" / "measure.py"


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("card_measure", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*words: str, home: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=True,
        env={"BEDPLATE_HOME": str(home), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.stdout


def test_every_command_exists_in_this_version(tmp_path: Path, program: ModuleType) -> None:
    names = ",".join(step.name for step in program.STEPS)
    said = run("--out", str(tmp_path / "out"), "--steps", names, "--dry-run", home=tmp_path / "home")
    lines = [shlex.split(line) for line in said.splitlines() if " -m bedplate " in line]
    verbs = {words[3] for words in lines}
    assert {"probe", "plan", "serve", "status", "bench", "compare", "migrate", "tune", "doctor"} <= verbs
    command = typer.main.get_command(app)
    for words in lines:
        if words[3] == "--version":
            continue
        verb = command.commands[words[3]]  # type: ignore[attr-defined]
        # Raises if an option or a value is not valid for the command.
        assert verb.make_context(words[3], words[4:]) is not None


def call(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measure.py", *words])
    code: int = program.main()
    return code


def test_a_later_call_runs_the_remaining_steps(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    taken: list[str] = []

    def first(step: object) -> None:
        taken.append("first")

    def second(step: object) -> None:
        taken.append("second")
        if taken.count("second") == 1:
            raise program.OutOfTime

    def third(step: object) -> None:
        taken.append("third")
        raise program.StepFailed("on purpose")

    steps = (
        program.Step("first", "", 0, first), program.Step("second", "", 0, second), program.Step("third", "", 0, third),
        program.Step("long", "", 3600, first), program.Step("engine", "", 0, first, ("vllm",)),
    )  # fmt: skip
    monkeypatch.setattr(program, "STEPS", steps)
    out = tmp_path / "out"
    words = ("--out", str(out), "--steps", "all", "--budget", "1m", "--pack", str(tmp_path / "all.tar.xz"))
    assert call(program, monkeypatch, *words) == 4
    states = {name: one["state"] for name, one in json.loads((out / "state.json").read_text()).items()}
    assert states == {"first": "done", "second": "cut short", "third": "failed"}
    assert taken == ["first", "second", "third"] and (tmp_path / "all.tar.xz").stat().st_size > 0
    manifest = tmp_path / "home" / "engines" / "vllm" / "adopted" / "bedplate.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    assert call(program, monkeypatch, *words) == 1
    assert taken == ["first", "second", "third", "second", "third", "first"]


def test_a_command_over_budget_is_stopped_with_its_children(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets SIGINT first, so that it can write its results."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    held = f"import time; held = open({str(tmp_path / 'alive')!r}, 'w'); time.sleep(600)"
    code = (
        "import subprocess, sys, time, pathlib\n"
        f"subprocess.Popen([sys.executable, '-c', {held!r}])\n"
        "try:\n    time.sleep(600)\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'kept')!r}).write_text('')\n"
    )

    def take(step: object) -> None:
        step.command([sys.executable, "-c", code])  # type: ignore[attr-defined]

    monkeypatch.setattr(program, "STEPS", (program.Step("slow", "", 0, take),))
    out = tmp_path / "out"
    assert call(program, monkeypatch, "--out", str(out), "--steps", "slow", "--budget", "3s") == 1
    assert json.loads((out / "state.json").read_text())["slow"]["state"] == "cut short"
    assert (tmp_path / "kept").exists()
    # Reading ends when the last writer has closed the pipe.
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_conversations_are_a_load_beside_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("card_side_by_side", PROGRAM.parent / "side_by_side.py")
    assert spec is not None and spec.loader is not None
    sides = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, sides)
    spec.loader.exec_module(sides)
    plain, shared = sides.read_load("64"), sides.read_load("64:2048/128/1792")
    assert (plain.prompt_tokens, shared.shared_prefix_tokens, sides.words(shared)) == (512, 1792, "64:2048/128/1792")
    agents = sides.read_load("agent=12", 32_000)
    assert (agents.arrivals, agents.sessions, sides.words(agents)) == ("sessions", 12, "agent=12")
    assert sides.find_longest(agents) <= 32_000 and sides.find_longest(plain) == 640


def test_the_next_steps_are_optional_ones_that_exist(program: ModuleType) -> None:
    chosen = program.chosen_steps("next")
    assert [step.name for step in chosen] == list(program.NEXT)
    assert sum(step.expected_s for step in chosen) < 30 * 60


def test_steps_are_expected_to_take_as_long_as_they_did(program: ModuleType) -> None:
    """A step is begun only if its expected time is left: one that is expected too short is cut short."""
    took: dict[str, float] = {}
    for archive in sorted((PROGRAM.parent / "results").glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            state = tar.extractfile(f"{archive.name.removesuffix('.tar.xz')}/state.json")
            assert state is not None
            for name, one in json.loads(state.read()).items():
                if one["state"] == "done":
                    took[name] = max(took.get(name, 0.0), one["seconds"])
    expected = {step.name: step.expected_s for step in program.STEPS}
    assert len(took) > 15
    assert {name: seconds for name, seconds in took.items() if expected[name] < seconds} == {}


def test_models_are_made_with_functions_that_the_converter_has() -> None:
    """The converter is imported by its path in an engine's environment, where no type checker sees it."""
    from bedplate.engines.shipped import gguf_to_folder

    source = (PROGRAM.parents[1] / "models" / "random_llama.py").read_text()
    used = set(re.findall(r"\bconverter\.(\w+)", source))
    assert len(used) >= 3 and not [name for name in used if not hasattr(gguf_to_folder, name)]
