"""Engine environments are installed atomically, also when processes are killed, and errors have hints."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from tests.conftest import HANG_S, has_no_new_children, have_ended, wait_for

from bedplate.engines import Engine, EnvironmentRecipe, get_engine
from bedplate.errors import ExternalFailure, UsageError
from bedplate.run import environments
from bedplate.run.environments import (
    EngineEnvironment,
    build_command,
    find_environment,
    get_compiled_dir,
    get_environment_path,
    list_installed,
    list_installed_versions,
    make_environment,
    uninstall_engine,
    uninstall_version,
)
from bedplate.values import Launch

UNREACHABLE = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
INSTALL = """
from bedplate.engines import get_engine
from bedplate.run.environments import make_environment
from bedplate.progress import SilentProgress
class Notes(SilentProgress):
    def note(self, text): print(text, flush=True)
print("path", make_environment(get_engine("llama.cpp"), Notes()).path, flush=True)
"""


class Tiny(Engine):
    """An engine of one file, which the tests pack into a wheel."""

    id = "tiny"
    name = "Tiny"
    version = "1.0"
    recipe: ClassVar[EnvironmentRecipe | None] = EnvironmentRecipe(
        packages=("bedplate-tiny-engine==1.0",),
        programs=(("tiny", "llama_server.py"),),
        download_bytes=1000,
        disk_bytes=10_000,
        check="import bedplate_tiny_engine",
    )


class Wanting(Tiny):
    """An engine whose package exists in no index."""

    id = "wanting"
    name = "Wanting"
    recipe = EnvironmentRecipe(packages=("no-such-engine-of-bedplate==1",), download_bytes=1, disk_bytes=1, check="")


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes]) -> Path:
    """A minimal wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{name.replace('-', '_')}-{version}"
    info = f"{base}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    everything = {**files, **metadata}
    record = "".join(f"{path},,\n" for path in (*everything, f"{info}/RECORD"))
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**everything, f"{info}/RECORD": record}.items():
            archive.writestr(file, content)
    return path


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty BEDPLATE_HOME, for this process and those it starts."""
    home = tmp_path / "home of tests"
    monkeypatch.setenv("BEDPLATE_HOME", str(home))
    return home


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Tiny's wheel, as the only source of packages."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "bedplate-tiny-engine", "1.0", {"bedplate_tiny_engine.py": "answer = 42\n"})
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def list_leftovers(home: Path) -> list[str]:
    """All files that are not environments or locks."""
    engines = home / "engines"
    odd = [path for path in engines.glob("*/*") if not (path / "bedplate.json").is_file()]
    return [str(path.relative_to(home)) for path in (*odd, *engines.glob("**/.writable*"))]


def install_process(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INSTALL],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestMaking:
    def test_installs_a_real_engine(self, llama_environment: EngineEnvironment) -> None:
        assert llama_environment.packages == ("xllamacpp==2026.10.11549",)
        assert llama_environment.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert 50_000_000 < llama_environment.disk_bytes < 200_000_000
        assert find_environment(get_engine("llama.cpp")) == llama_environment
        done = subprocess.run(
            build_command(llama_environment, Launch(argv=("llama-server", "--help"))), capture_output=True, text=True
        )
        assert done.returncode == 0 and "--ctx-size" in done.stdout

    def test_a_second_call_runs_nothing(self, wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = make_environment(Tiny())

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("something was started")

        monkeypatch.setattr(environments, "run_uv", fail)
        monkeypatch.setattr(environments, "run_child", fail)
        assert make_environment(Tiny()) == first == find_environment(Tiny())

    def test_works_after_home_was_moved(self, wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_environment(Tiny())
        moved = own_home.rename(own_home.with_name("moved"))
        monkeypatch.setenv("BEDPLATE_HOME", str(moved))
        found = find_environment(Tiny())
        assert found is not None and Path(found.path).is_relative_to(moved)
        code = "import bedplate_tiny_engine; print(bedplate_tiny_engine.answer)"
        done = subprocess.run([found.interpreter, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "42\n"

    def test_reinstalls_environment_without_its_python(self, wheels: Path, own_home: Path) -> None:
        first = make_environment(Tiny())
        first.interpreter.unlink()
        first.interpreter.symlink_to(own_home / "uninstalled")
        assert find_environment(Tiny()) is None and list_installed() == []
        again = make_environment(Tiny())
        assert again.path == first.path and again.interpreter.exists()

    def test_another_version_has_another_environment(self, wheels: Path, own_home: Path) -> None:
        class Newer(Tiny):
            version = "1.1"
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==1.1",), download_bytes=1, disk_bytes=1, check="import sys"
            )

        make_wheel(wheels, "bedplate-tiny-engine", "1.1", {"bedplate_tiny_engine.py": ""})
        old, new = make_environment(Tiny()), make_environment(Newer())
        assert old.path != new.path
        assert {environment.packages[0] for environment in list_installed()} == {
            "bedplate-tiny-engine==1.0",
            "bedplate-tiny-engine==1.1",
        }
        assert [environment.version for environment in uninstall_engine("tiny")] == ["1.0", "1.1"]
        assert list_installed() == [] and not (own_home / "engines" / "tiny").exists()

    def test_versions_are_side_by_side_and_removed_one_by_one(self, wheels: Path, own_home: Path) -> None:
        make_wheel(wheels, "bedplate-tiny-engine", "1.1", {"bedplate_tiny_engine.py": "answer = 43\n"})
        newer = Tiny().at_version("1.1")
        assert find_environment(newer) is None
        new, old = make_environment(newer), make_environment(Tiny())
        assert new.path != old.path and (new.version, old.version) == ("1.1", "1.0")
        assert "bedplate-tiny-engine==1.1" in new.packages and not new.locked
        assert list_installed_versions("tiny") == ["1.0", "1.1"]
        compiled = get_compiled_dir("tiny", "1.1")
        compiled.mkdir(parents=True)
        assert [one.version for one in uninstall_version("tiny", "1.1")] == ["1.1"]
        assert find_environment(newer) is None and not Path(new.path).exists() and not compiled.exists()
        assert find_environment(Tiny()) == old
        with pytest.raises(UsageError, match=r"tiny 1\.1 is not installed") as caught:
            uninstall_version("tiny", "1.1")
        assert caught.value.hint == "installed versions: 1.0"

    def test_missing_version_names_the_newest_release(self, wheels: Path, own_home: Path) -> None:
        with pytest.raises(ExternalFailure, match=r"installing Tiny 7\.0 failed") as caught:
            make_environment(Tiny().at_version("7.0"))
        assert caught.value.hint == "the newest release that can be installed here is tiny@1.0"

    def test_removing_an_engine_that_is_not_installed_is_a_usage_error(self, own_home: Path) -> None:
        with pytest.raises(UsageError, match="tiny is not installed"):
            uninstall_engine("tiny")

    def test_interrupted_removal_leaves_no_complete_environment(
        self, wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_environment(Tiny())

        def killed(path: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shutil, "rmtree", killed)
            uninstall_engine("tiny")
        assert find_environment(Tiny()) is None and list_installed() == []
        assert make_environment(Tiny()) == find_environment(Tiny())

    def test_uses_pip_settings(self, wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UV_FIND_LINKS")
        monkeypatch.delenv("UV_OFFLINE")
        for name, value in UNREACHABLE.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"{wheels.parent} {wheels}")
        assert make_environment(Tiny()).packages == ("bedplate-tiny-engine==1.0",)

    def test_ignores_project_in_the_working_directory(
        self, wheels: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "project").mkdir()
        (tmp_path / "project" / "uv.toml").write_text('constraint-dependencies = ["bedplate-tiny-engine<1"]\n')
        monkeypatch.chdir(tmp_path / "project")
        monkeypatch.setenv("UV_FIND_LINKS", "../wheels")  # relative to the working directory
        assert make_environment(Tiny()).packages == ("bedplate-tiny-engine==1.0",)


class TestKilled:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_kill_at_any_moment_leaves_no_incomplete_environment(
        self, own_home: Path, number: signal.Signals, llama_environment: EngineEnvironment
    ) -> None:
        began = time.monotonic()
        with install_process() as process:
            process.communicate()
        whole_s = time.monotonic() - began
        uninstall_engine("llama.cpp")
        dice = random.Random(number)
        for moment in sorted(dice.uniform(0.1, 1.0) for _ in range(5)):
            with install_process() as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=moment * whole_s)
                below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
                process.send_signal(number)
                process.communicate()
            wait_for(lambda below=below: have_ended(below), "uv to end too")  # type: ignore[misc]
            found = find_environment(get_engine("llama.cpp"))
            if found is not None:
                check = [str(found.interpreter), "-I", "-c", "import xllamacpp; xllamacpp.CommonParams()"]
                subprocess.run(check, check=True)
                uninstall_engine("llama.cpp")
        make_environment(get_engine("llama.cpp"))
        assert find_environment(get_engine("llama.cpp")) is not None
        assert list_leftovers(own_home) == []

    def test_ctrl_c_leaves_nothing(self, own_home: Path) -> None:
        with install_process() as process:
            assert process.stdout is not None and process.stdout.readline().startswith("installing llama.cpp")
            wait_for(lambda: list(own_home.glob("engines/*/.making-*/env")) or None, "uv to be at work")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG_S)
        assert "KeyboardInterrupt" in errors
        assert list_leftovers(own_home) == [] and list_installed() == []


def test_second_process_waits_for_the_installation(own_home: Path) -> None:
    both = [install_process() for _ in range(2)]
    outputs = [process.communicate(timeout=HANG_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    printed = [output.splitlines() for output, _ in outputs]
    assert len({lines[-1] for lines in printed}) == 1
    assert sum(line.startswith("installing") for lines in printed for line in lines) == 1
    assert len(list_installed()) == 1 and list_leftovers(own_home) == []


class TestFailing:
    @pytest.mark.parametrize(
        ("settings", "cause", "hint"),
        [
            (UNREACHABLE, "127.0.0.1:9", "UV_DEFAULT_INDEX to a mirror"),
            ({"UV_OFFLINE": "1"}, "was not found in the cache", "UV_FIND_LINKS to a folder with the wheels"),
            ({}, "no-such-engine-of-bedplate", "the package index has no such package"),
        ],
        ids=["index unreachable", "offline", "no such package"],
    )
    def test_explains_missing_packages(
        self,
        own_home: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        settings: dict[str, str],
        cause: str,
        hint: str,
    ) -> None:
        if settings:
            monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ExternalFailure) as caught:
            make_environment(Wanting())
        assert caught.value.exit_code == 3
        assert caught.value.message == "installing Wanting failed"
        assert cause in str(caught.value.cause) and hint in str(caught.value.hint)
        assert list_leftovers(own_home) == [] and find_environment(Wanting()) is None

    def test_discards_engine_that_does_not_run(self, wheels: Path, own_home: Path) -> None:
        class Broken(Tiny):
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==1.0",), download_bytes=1, disk_bytes=1, check="import tiny_missing"
            )

        class Crashing(Tiny):
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==1.0",),
                download_bytes=1,
                disk_bytes=1,
                check="import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            )

        for kind, cause in ((Broken(), "No module named 'tiny_missing'"), (Crashing(), "killed by SIGILL")):
            with pytest.raises(ExternalFailure, match="does not run on this machine") as caught:
                make_environment(kind)
            assert cause in str(caught.value.cause)
            assert list_leftovers(own_home) == [] and list_installed() == []

    def test_stops_a_hanging_check(self, wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Hanging(Tiny):
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==1.0",),
                download_bytes=1,
                disk_bytes=1,
                check="import time; time.sleep(600)",
            )

        monkeypatch.setattr(environments, "CHECK_LIMIT_S", 0.5)
        with pytest.raises(ExternalFailure, match="does not run on this machine") as caught:
            make_environment(Hanging())
        assert "not done after" in str(caught.value.cause)
        wait_for(lambda: has_no_new_children([]), "uv to end")
        assert list_leftovers(own_home) == []

    def test_unwritable_home_is_named_in_the_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        for home in (tmp_path / "file", tmp_path / "file" / "below"):
            monkeypatch.setenv("BEDPLATE_HOME", str(home))
            with pytest.raises(ExternalFailure) as caught:
                make_environment(Tiny())
            assert str(home) in caught.value.message and "BEDPLATE_HOME" in str(caught.value.hint)
            assert caught.value.exit_code == 3

    def test_reports_read_only_home(self, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        monkeypatch.setenv("BEDPLATE_HOME", str(small_disk))
        with pytest.raises(ExternalFailure) as caught:
            make_environment(Tiny())
        assert caught.value.cause == "Read-only file system"

    def test_checks_disk_space_before_the_download(self, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(small_disk))
        with pytest.raises(ExternalFailure, match=r"not enough disk space for llama\.cpp: 161 MB needed") as caught:
            make_environment(get_engine("llama.cpp"))
        assert "BEDPLATE_HOME" in str(caught.value.hint)
        assert list_leftovers(small_disk) == []

    def test_full_disk_during_installation_leaves_nothing(
        self, wheels: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Fat(Tiny):
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==2.0",), download_bytes=1, disk_bytes=1, check=""
            )

        fat: dict[str, str | bytes] = {"bedplate_tiny_engine.py": "", "bedplate_tiny_data.bin": bytes(20_000_000)}
        make_wheel(wheels, "bedplate-tiny-engine", "2.0", fat)
        monkeypatch.setenv("BEDPLATE_HOME", str(small_disk))
        with pytest.raises(ExternalFailure) as caught:
            make_environment(Fat())
        assert "No space left on device" in str(caught.value.cause)
        assert "free some space" in str(caught.value.hint)
        assert list_leftovers(small_disk) == [] and shutil.disk_usage(small_disk).used < 100_000

    def test_reports_full_disk(self, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        monkeypatch.setenv("BEDPLATE_HOME", str(small_disk / "home"))
        with pytest.raises(ExternalFailure) as caught:
            make_environment(Tiny())
        assert caught.value.cause == "No space left on device" and "free some space" in str(caught.value.hint)
        assert list_leftovers(small_disk / "home") == []

    def test_an_engine_without_a_recipe_cannot_be_installed(self) -> None:
        class Planned(Tiny):
            recipe = None

        with pytest.raises(ExternalFailure, match="cannot install Tiny"):
            make_environment(Planned())


def test_folder_depends_on_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tiny.recipe is not None
    paths = {get_environment_path(Tiny(), Tiny.recipe)}
    paths.add(
        get_environment_path(Tiny(), EnvironmentRecipe(packages=("a",), download_bytes=1, disk_bytes=1, check=""))
    )
    monkeypatch.setenv("UV_PYTHON", "3.12")
    paths.add(get_environment_path(Tiny(), Tiny.recipe))
    assert len(paths) == 3
