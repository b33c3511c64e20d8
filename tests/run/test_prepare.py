"""Preparation: each step runs once and is stored by content, atomically, also when processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
import pytest
from tests.conftest import HANG_S, have_ended, wait_for

from bedplate.engines import Engine, EnvironmentRecipe, KnownFailure
from bedplate.engines.base import get_converted_path
from bedplate.errors import ExternalFailure
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.home import get_home
from bedplate.progress import SilentProgress
from bedplate.run import prepare as module
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment
from bedplate.run.prepare import PreparationRecord, get_prepared_dir, prepare, set_offline
from bedplate.values import Hardware, Plan, Preparation, Settings, Weights, Workload, replace_fields
from bedplate.values.decision import Device

ROOT = Path(__file__).parents[2]
SHIPPED_CHECK = module.CHECK
"""Most tests run a quick one, because Python compiles this one anew each time."""
MAKE = """
import os, pathlib, sys
source, where, *rest = sys.argv[1:]
made = pathlib.Path(where)
made.mkdir()
(made / "weights").write_text(f"{pathlib.Path(source, 'weights' if os.path.isdir(source) else '').read_text()}+")
print("made", where)
"""
BREAK = "import pathlib, sys; pathlib.Path(sys.argv[2]).mkdir(); print('what it did'); sys.exit('no such thing')"
HANG = """
import pathlib, subprocess, sys
pathlib.Path(sys.argv[2]).mkdir()
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
"""
TELL = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[2]).write_text(json.dumps(dict(os.environ)))
"""


class Fake(Engine):
    """An engine whose programs are in a folder."""

    id = "fake"
    name = "Fake"
    version = "1"
    vendors = ("nvidia",)
    recipe: ClassVar[EnvironmentRecipe | None] = EnvironmentRecipe(
        packages=("fake==1",), download_bytes=1, disk_bytes=1, check="", programs=(("own", "transformers_server.py"),)
    )


class Other(Fake):
    id = "other"
    name = "Other"
    recipe = EnvironmentRecipe(
        packages=("other==1",), download_bytes=1, disk_bytes=1, check="", programs=(("unpack", "mlx_server.py"),)
    )


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def make_fake_environment(folder: Path, engine: str = "fake") -> EngineEnvironment:
    """Like an engine's environment: an interpreter, and programs next to it."""
    if not folder.exists():
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        for name, script in {"make": MAKE, "break": BREAK, "hang": HANG, "tell": TELL, "unpack": MAKE}.items():
            (folder / "bin" / name).write_text(script)
    return EngineEnvironment(
        engine=engine, version="1", path=str(folder), packages=(), python="3", made_at="now", disk_bytes=0
    )


def plan_for(source: Path) -> Plan:
    return Plan(
        engine="fake",
        engine_version="1",
        model=replace_fields(read_builtin_facts(), files=(str(source),)),
        workload=Workload(),
        weights=Weights(label="BF16", made="converted", format="safetensors"),
        settings=Settings(slots=1, context_tokens=512),
    )


def step(program: str, source: str | Path, where: str, **more: int) -> Preparation:
    return Preparation(kind="convert", what=where, where=where, argv=(program, str(source), where), **more)  # type: ignore[arg-type]


def list_leftovers() -> list[str]:
    return [path.name for path in get_prepared_dir().glob(".*")] if get_prepared_dir().is_dir() else []


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home of tests"))
    return tmp_path / "home of tests"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "model.gguf"
    path.parent.mkdir()
    path.write_text("bits")
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path) -> EngineEnvironment:
    engines = {"fake": Fake(), "other": Other()}
    monkeypatch.setattr(module, "load_engines", lambda: engines)
    monkeypatch.setattr(module, "engine_by_id", engines.__getitem__)
    monkeypatch.setattr(module, "build_gguf_server_command", lambda own, progress: None)
    (tmp_path / "quick.py").write_text("print('conversion-check: not compared')")
    monkeypatch.setattr(module, "CHECK", str(tmp_path / "quick.py"))
    return make_fake_environment(tmp_path / "env")


def read_record(folder: Path) -> PreparationRecord:
    return msgspec.json.decode((folder / "bedplate.json").read_bytes(), type=PreparationRecord)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(module, "run_child", fail)


class TestOnce:
    def test_steps_see_earlier_results_and_the_launch_sees_all(self, own: EngineEnvironment, source: Path) -> None:
        steps = [step("make", source, "folder"), step("make", "folder", "folder-8-BIT")]
        folder = prepare(plan_for(source), steps, own)
        assert folder is not None and folder.parent == get_prepared_dir()
        assert (folder / "folder" / "weights").read_text() == "bits+"
        assert (folder / "folder-8-BIT" / "weights").read_text() == "bits++"
        assert list_leftovers() == []

    def test_without_steps_there_is_no_folder(self, own: EngineEnvironment, source: Path, own_home: Path) -> None:
        install = Preparation(kind="install", what="fake==1", where="an environment of its own")
        assert prepare(plan_for(source), [install], own) is None
        assert not own_home.exists()

    def test_a_second_call_runs_nothing(
        self, own: EngineEnvironment, source: Path, request: pytest.FixtureRequest
    ) -> None:
        steps = [step("make", source, "folder"), step("make", "folder", "result")]
        first = prepare(plan_for(source), steps, own)
        request.getfixturevalue("nothing_runs")
        assert prepare(plan_for(source), steps, own) == first

    def test_stores_a_record_with_the_result(self, own: EngineEnvironment, source: Path) -> None:
        folder = prepare(plan_for(source), [step("make", source, "folder")], own)
        assert folder is not None
        found = read_record(folder)
        assert (found.what, found.engine, found.version, found.disk_bytes) == ("folder", "fake", "1", 5)

    def test_plans_share_common_steps(self, own: EngineEnvironment, source: Path) -> None:
        first = step("make", source, "folder")
        one = prepare(plan_for(source), [first], own)
        two = prepare(plan_for(source), [first, step("make", "folder", "result")], own)
        assert one is not None and two is not None and one != two
        assert (two / "folder").resolve() == one / "folder"
        assert len(list(get_prepared_dir().glob("*/bedplate.json"))) == 2

    def test_results_depend_on_content_not_on_path(
        self, own: EngineEnvironment, source: Path, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        first = prepare(plan_for(source), [step("make", source, "folder")], own)
        moved = source.rename(tmp_path / "moved.gguf")
        source.write_text("other bits")
        assert prepare(plan_for(source), [step("make", source, "folder")], own) != first
        request.getfixturevalue("nothing_runs")
        assert prepare(plan_for(moved), [step("make", moved, "folder")], own) == first

    def test_all_files_of_a_folder_count(self, own: EngineEnvironment, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        for name in ("weights", "config.json"):
            (tmp_path / "model" / name).write_text(name)
        weights = tmp_path / "model" / "weights"
        model = replace_fields(read_builtin_facts(), files=(str(weights),), format="safetensors")
        plan = replace_fields(plan_for(weights), model=model)
        steps = [step("make", weights.parent, "result")]
        first = prepare(plan, steps, own)
        (tmp_path / "model" / "config.json").write_text("another")
        assert prepare(plan, steps, own) != first

    def test_works_after_home_was_moved(
        self, own: EngineEnvironment, source: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = [step("make", source, "folder"), step("make", "folder", "result")]
        prepare(plan_for(source), steps, own)
        moved = own_home.rename(own_home.with_name("moved"))
        monkeypatch.setenv("BEDPLATE_HOME", str(moved))
        folder = prepare(plan_for(source), steps, own)
        assert folder is not None and folder.is_relative_to(moved)
        assert (folder / "folder" / "weights").read_text() == "bits+"

    def test_changed_program_repeats_the_step(
        self, own: EngineEnvironment, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own_program = Path(own.path) / "bin" / "own"
        own_program.write_text(MAKE)
        first = prepare(plan_for(source), [step("own", source, "folder")], own)
        monkeypatch.setattr(module, "read_shipped", lambda file: b"another")
        assert prepare(plan_for(source), [step("own", source, "folder")], own) != first

    def test_inputs_of_a_finished_step_may_be_removed(
        self, own: EngineEnvironment, source: Path, request: pytest.FixtureRequest
    ) -> None:
        steps = [step("make", source, "folder"), step("make", "folder", "result")]
        folder = prepare(plan_for(source), steps, own)
        assert folder is not None
        shutil.rmtree((folder / "folder").resolve().parent)
        request.getfixturevalue("nothing_runs")
        assert prepare(plan_for(source), steps, own) == folder

    def test_removes_temporary_folders(self, own: EngineEnvironment, source: Path) -> None:
        script = "import pathlib; [pathlib.Path(name).mkdir() for name in ('it', 'it-work')]"
        made = Preparation(kind="convert", what="it", where="it", argv=("python", "-c", script))
        folder = prepare(plan_for(source), [made], own)
        assert folder is not None and {path.name for path in folder.iterdir()} == {"it", "bedplate.json"}

    def test_build_without_result_runs_once(self, own: EngineEnvironment, source: Path, tmp_path: Path) -> None:
        place = tmp_path / "compiled"
        script = f"import os, pathlib; pathlib.Path({str(place)!r}).open('a').write(os.environ['MAX_JOBS'])"
        built = Preparation(
            kind="build", what="it", where="elsewhere", argv=("env", "MAX_JOBS=3", "python", "-c", script)
        )
        for _ in range(2):
            folder = prepare(plan_for(source), [built, step("make", source, "folder")], own)
            assert folder is not None and (folder / "folder" / "weights").read_text() == "bits+"
        assert place.read_text() == "3"


COMPILE = """
import os, pathlib
pathlib.Path("kernels/ext").mkdir(parents=True)
with open({compiled!r}, "a") as file:
    file.write(os.environ["MAX_JOBS"] + " ")
pathlib.Path("kernels/ext/ext.so").write_text(str(os.stat({compiled!r}).st_size))
"""
USE = """
import pathlib, sys
pathlib.Path(sys.argv[2]).mkdir()
pathlib.Path(sys.argv[2], "weights").write_text("made with " + pathlib.Path("kernels/ext/ext.so").read_text())
"""


def make_hardware(name: str) -> Hardware:
    return make_simulated_hardware({"accelerator": name, "count": 2, "ram_gb": 64, "os": "linux"})


ADA, HOPPER = make_hardware("RTX 4090"), make_hardware("H100 SXM")


class Kernels:
    """Plans with compiled kernels, and what the launch and the conversions see of them."""

    def __init__(self, own: EngineEnvironment, tmp_path: Path) -> None:
        self.own, self.log, self.folder = own, tmp_path / "compiled", tmp_path

    def compile(self, jobs: int = 3) -> Preparation:
        script = COMPILE.format(compiled=str(self.log))
        return Preparation(
            kind="build", what="kernels", where="kernels", argv=("env", f"MAX_JOBS={jobs}", "python", "-c", script)
        )

    def served(
        self,
        model: str,
        *,
        converted: bool = True,
        hardware: Hardware = ADA,
        device: Device = "cpu",
        jobs: int = 3,
        **changed: object,
    ) -> Path:
        source = self.folder / f"{model}.gguf"
        source.write_text(model)
        steps = [self.compile(jobs)]
        if converted:
            argv = ("python", "-c", USE, str(source), "result")
            steps.append(Preparation(kind="convert", what="it", where="result", argv=argv))
        own = msgspec.structs.replace(self.own, **changed)
        plan = replace_fields(plan_for(source), settings=Settings(slots=1, context_tokens=512, device=device))
        folder = prepare(plan, steps, own, hardware=hardware)
        assert folder is not None
        return folder

    @property
    def times(self) -> int:
        return len(self.log.read_text().split())


@pytest.fixture
def kernels(own: EngineEnvironment, tmp_path: Path) -> Kernels:
    return Kernels(own, tmp_path)


class TestCompiled:
    def test_compiles_once_for_all_models(self, kernels: Kernels) -> None:
        plain = kernels.served("one", converted=False)
        first, second = kernels.served("one"), kernels.served("two")
        assert len({plain, first, second}) == 3 and kernels.times == 1
        for folder in (first, second):
            assert (folder / "result" / "weights").read_text() == "made with 2"
            assert (folder / "kernels").resolve() == plain / "kernels"
        assert sorted(path.name for path in plain.iterdir()) == ["bedplate.json", "kernels"]

    def test_separate_build_step_precedes_the_conversion(self, kernels: Kernels, source: Path) -> None:
        notes = Notes()
        steps = [step("make", source, "folder"), kernels.compile(), step("make", "folder", "result")]
        folder = prepare(plan_for(source), steps, kernels.own, notes, ADA)
        told = [note.split(" (")[0] for note in notes.notes if " to /" in note]
        assert told == ["converting folder", "building kernels", "converting result"]
        assert folder is not None and {"folder", "kernels", "result"} <= {path.name for path in folder.iterdir()}

    @pytest.mark.parametrize(
        "changed",
        [
            {"hardware": HOPPER},
            {"version": "2"},
            {"packages": ("fake==1", "torch==2.12.0")},
            {"python": "3.13"},
            {"path": "elsewhere"},
        ],
    )
    def test_compiles_again_for_another_gpu_version_torch_or_environment(
        self, kernels: Kernels, own: EngineEnvironment, tmp_path: Path, changed: dict[str, object]
    ) -> None:
        first = kernels.served("one")
        if "path" in changed:
            shutil.copytree(own.path, tmp_path / "elsewhere", symlinks=True)
            changed = {"path": str(tmp_path / "elsewhere")}
        # The weights are unchanged; their folder now links to the other kernels.
        assert kernels.served("one", **changed) == first and kernels.times == 2  # type: ignore[arg-type]
        assert (first / "kernels" / "ext" / "ext.so").read_text() == "4"
        assert (first / "result" / "weights").read_text() == "made with 2"
        assert kernels.served("one") == first and kernels.times == 2
        assert (first / "kernels" / "ext" / "ext.so").read_text() == "2"

    def test_compiles_again_with_another_compiler(
        self, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir()
        monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
        for release, times in (("12.8", 1), ("13.0", 2), ("12.8", 2)):
            nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}\n")
            nvcc.chmod(0o755)
            kernels.served("one", converted=False, device="cuda")
            assert kernels.times == times

    def test_other_packages_and_number_of_jobs_do_not_cause_a_rebuild(
        self, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels.served("one", packages=("fake==1", "numpy==1"))
        kernels.served("two", packages=("fake==1", "numpy==2"), jobs=5)
        assert kernels.log.read_text() == "3 "
        monkeypatch.setenv("MAX_JOBS", "1")
        kernels.served("two", jobs=5, version="2")
        assert kernels.log.read_text() == "3 1 "

    def test_conversion_is_compared_with_weights_not_with_compiled_code(self, kernels: Kernels, checker: Path) -> None:
        assert read_record(kernels.served("one")).checked == ("one.gguf result 16 made with 2",)

    def test_links_compiled_code_for_each_model(self, own: EngineEnvironment, source: Path, tmp_path: Path) -> None:
        script = "open('options', 'w').write('of all')"
        options = Preparation(kind="build", what="options", where="options", argv=("python", "-c", script))
        other = tmp_path / "other.gguf"
        other.write_text("other bits")
        for one, weights in ((source, "bits+"), (other, "other bits+")):
            folder = prepare(plan_for(one), [step("make", one, "result"), options], own)
            assert folder is not None and (folder / "options").read_text() == "of all"
            assert (folder / "result" / "weights").read_text() == weights

    def test_stores_what_code_was_compiled_for(self, kernels: Kernels) -> None:
        folder = kernels.served("one", converted=False, packages=("fake==1", "torch==2.11.0"))
        interpreter = str(kernels.own.interpreter)
        assert read_record(folder).built_for == (interpreter, "1", "Python 3", "fake==1", "torch==2.11.0", "8.9")

    def test_removes_stale_loader_lock_if_not_in_use(self, kernels: Kernels) -> None:
        import fcntl

        folder = kernels.served("one", converted=False)

        def again(lock: Path) -> bool:
            lock.touch()
            for mark in module._held.values():
                os.close(mark)
            module._held.clear()
            kernels.served("one", converted=False)
            return lock.exists()

        assert not again(folder / "kernels" / "ext" / "lock")
        with Path(f"{folder}.use").open() as mark:
            fcntl.flock(mark, fcntl.LOCK_SH)
            assert again(folder / "kernels" / "ext" / "lock")


class TestWhere:
    def test_step_runs_in_the_environment_that_it_names(
        self, own: EngineEnvironment, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = make_fake_environment(tmp_path / "other env", "other")
        (Path(own.path) / "bin" / "make").unlink()
        monkeypatch.setattr(module, "find_environment", lambda engine: other)
        folder = prepare(plan_for(source), [replace_fields(step("make", source, "folder"), within="other")], own)
        assert folder is not None and read_record(folder).engine == "other"

    def test_scripts_import_modules_from_their_folder(
        self, own: EngineEnvironment, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "beside.py").write_text("def make(where): open(where, 'w').write('made')")
        (tmp_path / "tree" / "convert.py").write_text("import sys, beside; beside.make(sys.argv[1])")
        argv = ("python3", str(tmp_path / "tree" / "convert.py"), "it")
        folder = prepare(plan_for(source), [Preparation(kind="convert", what="it", where="it", argv=argv)], own)
        assert folder is not None and (folder / "it").read_text() == "made"

    def test_a_program_of_another_engine_runs_in_its_environment(
        self, own: EngineEnvironment, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (Path(own.path) / "bin" / "unpack").unlink()
        notes = Notes()
        monkeypatch.setattr(module, "find_environment", lambda engine: None)
        monkeypatch.setattr(
            module,
            "make_environment",
            lambda engine, progress: make_fake_environment(tmp_path / "other env", engine.id),
        )
        folder = prepare(plan_for(source), [step("unpack", source, "folder")], own, notes)
        assert folder is not None and (folder / "folder" / "weights").read_text() == "bits+"
        assert any("installing Other to convert the weights" in note for note in notes.notes)

    def test_steps_are_offline_and_get_no_secrets(
        self, own: EngineEnvironment, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "secret")
        folder = prepare(plan_for(source), [step("tell", source, "told")], own)
        assert folder is not None
        told = json.loads((folder / "told").read_text())
        assert told["HF_HUB_OFFLINE"] == "1" and "HF_TOKEN" not in told
        assert Path(told["HF_HUB_CACHE"]).is_dir() and Path(told["HF_HUB_CACHE"]).is_relative_to(get_home())

    def test_creates_hub_cache(self, own_home: Path) -> None:
        assert Path(set_offline({})["HF_HOME"]).is_dir()


RIGHT = """
import pathlib, sys
source, result, _, bits, *_ = sys.argv[1:]
words = " ".join((pathlib.Path(one).name for one in (source, result)))
print(f"conversion-check: {words} {bits} {pathlib.Path(result, 'weights').read_text()}")
print("something that nobody asked for")
"""
WRONG = """
print("conversion-check: token ids: 67 of 67 texts agree with the source")
raise SystemExit("conversion-check: 3 of 40 clear next tokens agree: after …'x' 'y' instead of 'z'")
"""


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the shipped check."""
    program = tmp_path / "checker.py"
    program.write_text(RIGHT)
    monkeypatch.setattr(module, "CHECK", str(program))
    return program


class TestCompared:
    def test_compares_each_conversion_with_its_source(
        self, own: EngineEnvironment, source: Path, checker: Path
    ) -> None:
        plan = replace_fields(plan_for(source), weights=Weights(label="Q4_K_M", made="converted", format="gguf"))
        name = get_converted_path(plan)
        steps = [step("make", source, "folder"), step("make", "folder", name)]
        notes = Notes()
        folder = prepare(plan, steps, own, notes)
        assert folder is not None
        first, last = read_record((folder / "folder").resolve().parent), read_record(folder)
        assert first.checked == ("model.gguf folder 16 bits+",)
        assert last.checked == (f"folder {name} 4.9 bits++",)
        assert set(first.checked + last.checked) <= set(notes.notes)

    def test_discards_wrong_result_and_reports_the_evidence(
        self, own: EngineEnvironment, source: Path, checker: Path
    ) -> None:
        checker.write_text(WRONG)
        with pytest.raises(ExternalFailure) as caught:
            prepare(plan_for(source), [step("make", source, "folder")], own)
        assert caught.value.message == "folder: the result differs from its source and was discarded"
        assert "3 of 40 clear next tokens" in str(caught.value.cause) and "instead of 'z'" in str(caught.value.cause)
        assert list_leftovers() == [] and not list(get_prepared_dir().glob("*/bedplate.json"))

    def test_keeps_result_that_cannot_be_compared_with_a_note(
        self, own: EngineEnvironment, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CHECK", SHIPPED_CHECK)
        folder = prepare(plan_for(source), [step("make", source, "folder")], own)
        assert folder is not None
        (said,) = read_record(folder).checked
        assert said.startswith("not compared: llama.cpp")


class TestFailing:
    def test_failed_step_reports_the_cause_and_leaves_nothing(
        self, own: EngineEnvironment, source: Path, own_home: Path
    ) -> None:
        with pytest.raises(ExternalFailure) as caught:
            prepare(plan_for(source), [step("break", source, "folder")], own)
        assert (caught.value.message, caught.value.cause) == ("converting folder failed", "no such thing")
        log = Path(str(caught.value.hint).rpartition(": ")[2])
        assert log.is_relative_to(own_home) and "what it did" in log.read_text()
        assert list_leftovers() == [] and not list(get_prepared_dir().glob("*/bedplate.json"))

    def test_explains_failure_known_to_the_engine(
        self, own: EngineEnvironment, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = KnownFailure(message="it is too wide", hint="take a narrower one")
        monkeypatch.setattr(Fake, "explain", lambda self, log: known if "what it did" in log else None)
        with pytest.raises(ExternalFailure) as caught:
            prepare(plan_for(source), [step("break", source, "folder")], own)
        assert (caught.value.message, caught.value.cause) == ("converting folder failed", "it is too wide")
        assert str(caught.value.hint).startswith("take a narrower one; log: ")

    def test_step_without_result_is_an_error(self, own: EngineEnvironment, source: Path) -> None:
        idle = Preparation(kind="convert", what="it", where="it", argv=("python", "-c", "print('done')"))
        with pytest.raises(ExternalFailure) as caught:
            prepare(plan_for(source), [idle], own)
        assert caught.value.cause == "it ended without creating it; its last line of output: done"
        assert list_leftovers() == []

    def test_step_without_command_is_an_error(self, own: EngineEnvironment, source: Path) -> None:
        with pytest.raises(ExternalFailure, match="cannot prepare it"):
            prepare(plan_for(source), [Preparation(kind="build", what="it", where="there")], own)

    @pytest.mark.usefixtures("nothing_runs")
    def test_checks_disk_space_before_the_first_step(self, own: EngineEnvironment, source: Path) -> None:
        with pytest.raises(ExternalFailure, match="not enough disk space for the converted weights"):
            prepare(plan_for(source), [step("make", source, "folder", disk_bytes=10**18)], own)

    def test_reports_missing_source_files(self, own: EngineEnvironment, tmp_path: Path) -> None:
        missing = tmp_path / "gone.gguf"
        with pytest.raises(ExternalFailure, match=r"cannot read .*gone\.gguf"):
            prepare(plan_for(missing), [step("make", missing, "folder")], own)


PROCESS = """
import sys
from pathlib import Path
from tests.run.test_prepare import Fake, make_fake_environment, module, plan_for, prepare, step
env, source, program = map(Path, sys.argv[1:])
module.load_engines = lambda: {"fake": Fake()}
module.engine_by_id = lambda engine_id: Fake()
module.build_gguf_server_command = lambda own, progress: None
class Notes(module.SilentProgress):
    def note(self, text): print(text, flush=True)
steps = [step(program.name, source, "folder")]
print(prepare(plan_for(source), steps, make_fake_environment(env), Notes()), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, own: EngineEnvironment, source: Path) -> Iterator[object]:
    running: list[subprocess.Popen[str]] = []

    def one(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, own.path, str(source), program],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield one
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


class TestKilled:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_kill_stops_the_step_and_leaves_no_complete_result(
        self, own: EngineEnvironment, source: Path, start: object, number: signal.Signals
    ) -> None:
        process = start("hang")  # type: ignore[operator]
        wait_for(lambda: list(get_prepared_dir().glob(".making-*/folder")) or None, "the step to be at work")
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.communicate(timeout=HANG_S)
        wait_for(lambda: have_ended(below), "the program to end too")
        assert not list(get_prepared_dir().glob("*/bedplate.json"))
        if number == signal.SIGINT:
            assert list_leftovers() == []
        (Path(own.path) / "bin" / "hang").write_text(MAKE)
        assert prepare(plan_for(source), [step("hang", source, "folder")], own) is not None
        assert list_leftovers() == []

    def test_second_process_waits_for_the_step(self, start: object) -> None:
        both = [start("make") for _ in range(2)]  # type: ignore[operator]
        outputs = [process.communicate(timeout=HANG_S) for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
        printed = [output.splitlines() for output, _ in outputs]
        assert printed[0][-1] == printed[1][-1]
        assert sum(line.startswith("converting") for lines in printed for line in lines) == 1
