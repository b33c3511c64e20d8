"""A Python of the user that already has an engine's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.run.test_environments import Tiny, own_home

from bedplate.engines import EnvironmentRecipe, get_engine
from bedplate.engines.shipped import SERVER_PACKAGES
from bedplate.errors import ExternalFailure, UsageError
from bedplate.run import environments
from bedplate.run.environments import (
    adopt_program,
    adopt_python,
    build_command,
    explain_not_running,
    find_environment,
    forget_environment,
    list_installed,
    make_environment,
    parse_version,
    read_shipped,
    uninstall_engine,
)
from bedplate.values import Launch

__all__ = ["own_home"]
pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A virtual environment with Tiny's package, and a program."""
    folder = tmp_path / "their env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "bedplate_tiny_engine.py").write_text("answer = 42\n")
    info = packages / "bedplate_tiny_engine-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bedplate-tiny-engine\nVersion: 1.5\n")
    (folder / "bin" / "their-program").write_text("import bedplate_tiny_engine as e; print(e.answer)")
    return folder


def list_files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in str(path)}


class TestAdopting:
    @pytest.mark.parametrize("below", ["bin/python", "."])
    def test_uses_adopted_environment_without_changing_it(self, theirs: Path, below: str, own_home: Path) -> None:
        before = list_files(theirs)
        found = adopt_python(Tiny(), theirs / below)
        assert found.version == "1.5" and "bedplate-tiny-engine==1.5" in found.packages
        assert found.python == ".".join(map(str, sys.version_info[:3]))
        assert found.interpreter == theirs / "bin" / "python" and found.disk_bytes == 0
        assert make_environment(Tiny()) == found == find_environment(Tiny())
        assert list_installed() == [found]
        assert Path(found.path).is_relative_to(own_home)
        assert list_files(theirs) == before

    def test_programs_of_bedplate_and_of_the_environment_run_in_it(self, theirs: Path) -> None:
        found = adopt_python(Tiny(), theirs)
        assert build_command(found, Launch(argv=("tiny", "--port", "1"))) == [
            str(theirs / "bin" / "python"), str(found.programs / "tiny"), "--port", "1",
        ]  # fmt: skip
        own = build_command(found, Launch(argv=("their-program",)))
        assert subprocess.run(own, capture_output=True, text=True, check=True).stdout == "42\n"
        assert (found.programs / "tiny").read_bytes() == read_shipped("llama_server.py")

    def test_updates_bedplates_programs_to_this_version(self, theirs: Path) -> None:
        found = adopt_python(Tiny(), theirs)
        (found.programs / "tiny").write_text("of an older bedplate")
        assert make_environment(Tiny()) == found
        assert (found.programs / "tiny").read_bytes() == read_shipped("llama_server.py")

    def test_accepts_relative_path(self, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(theirs.parent)
        assert adopt_python(Tiny(), Path("their env/bin/python")).interpreter == theirs / "bin" / "python"

    def test_checks_environment_with_the_same_options_as_a_start(
        self, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The user's PYTHONPATH applies, since the engine may be there."""
        (package,) = theirs.glob("lib/*/site-packages/bedplate_tiny_engine.py")
        (tmp_path / "elsewhere").mkdir()
        package.rename(tmp_path / "elsewhere" / package.name)
        with pytest.raises(ExternalFailure, match="Tiny does not run in"):
            adopt_python(Tiny(), theirs)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
        assert adopt_python(Tiny(), theirs).adopted

    def test_hint_names_missing_packages(self, theirs: Path) -> None:
        class WithServer(Tiny):
            recipe = EnvironmentRecipe(
                packages=("bedplate-tiny-engine==1.0", "bedplate-none==1.2", *SERVER_PACKAGES),
                download_bytes=1,
                disk_bytes=1,
                check="import bedplate_tiny_engine, uvicorn",
            )

        (packages,) = theirs.glob("lib/*/site-packages")
        (packages / "bedplate_none.py").touch()  # as after a build from source
        with pytest.raises(ExternalFailure, match="does not run in") as caught:
            adopt_python(WithServer(), theirs)
        python = theirs / "bin" / "python"
        assert caught.value.hint == (
            f"install the missing packages: uv pip install --python {python} uvicorn==0.54.0 starlette==1.10.0"
        )
        (packages / "bedplate_tiny_engine.py").unlink()
        (packages / "bedplate_tiny_engine-1.5.dist-info" / "METADATA").unlink()
        (packages / "bedplate_tiny_engine-1.5.dist-info").rmdir()
        with pytest.raises(ExternalFailure) as caught:
            adopt_python(WithServer(), theirs)
        assert caught.value.hint == "check that this is the environment with its packages"

    def test_adopts_engine_that_bedplate_cannot_install(self, theirs: Path) -> None:
        class Planned(Tiny):
            id = "bedplate-tiny-engine"
            recipe = None

        with pytest.raises(ExternalFailure, match="cannot install Tiny") as caught:
            make_environment(Planned())
        assert "bedplate engines use" in str(caught.value.hint)
        assert adopt_python(Planned(), theirs).version == "1.5"
        assert make_environment(Planned()).adopted == str(theirs / "bin" / "python")

    def test_doctor_checks_adopted_environment(self, theirs: Path) -> None:
        found = adopt_python(Tiny(), theirs)
        recipe = EnvironmentRecipe(packages=(), download_bytes=1, disk_bytes=1, check="import bedplate_tiny_engine")
        assert explain_not_running(Path(found.path), recipe) is None
        (package,) = theirs.glob("lib/*/site-packages/bedplate_tiny_engine.py")
        package.unlink()
        assert "No module named" in str(explain_not_running(Path(found.path), recipe))


class TestRefusing:
    def test_rejects_path_that_is_not_a_python(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is not a Python interpreter"):
            adopt_python(Tiny(), tmp_path / "nothing")
        (tmp_path / "file").write_text("#!/bin/false\n")
        os.chmod(tmp_path / "file", 0o755)  # noqa: PTH101
        with pytest.raises(ExternalFailure, match="does not run in"):
            adopt_python(Tiny(), tmp_path / "file")
        assert list_installed() == []

    def test_rejects_python_without_the_packages(self) -> None:
        with pytest.raises(ExternalFailure) as caught:
            adopt_python(Tiny(), Path(sys.executable))
        assert "bedplate_tiny_engine" in str(caught.value.cause)
        assert list_installed() == []

    def test_missing_adopted_python_is_an_error(self, theirs: Path) -> None:
        adopt_python(Tiny(), theirs)
        theirs.rename(theirs.with_name("moved"))
        with pytest.raises(ExternalFailure, match="does not exist") as caught:
            make_environment(Tiny())
        assert "bedplate engines forget tiny" in str(caught.value.hint)
        forget_environment(Tiny())


class TestForgetting:
    def test_forget_removes_only_the_record(self, theirs: Path) -> None:
        adopt_python(Tiny(), theirs)
        before = list_files(theirs)
        assert forget_environment(Tiny()).adopted == str(theirs / "bin" / "python")
        assert list_files(theirs) == before and list_installed() == []
        with pytest.raises(UsageError, match="no Python or program is registered for Tiny"):
            forget_environment(Tiny())

    def test_removing_the_engine_forgets_the_adopted_environment(self, theirs: Path) -> None:
        adopt_python(Tiny(), theirs)
        before = list_files(theirs)
        uninstall_engine("tiny")
        assert list_files(theirs) == before and list_installed() == []
        with pytest.raises(UsageError):
            forget_environment(Tiny())

    def test_own_environment_is_used_again_after_forget(self, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        adopted = adopt_python(Tiny(), theirs)
        own = msgspec.structs.replace(adopted, adopted=None)
        forget_environment(Tiny())
        monkeypatch.setattr(environments, "_install", lambda *_: own)
        assert make_environment(Tiny()) == own


LLAMA = get_engine("llama.cpp")


@pytest.fixture
def their_server(tmp_path: Path) -> Path:
    """A llama-server of a package manager that only prints its version."""
    program = tmp_path / "their bin" / "llama-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'version: 6123 (79c1160b)' >&2\necho 'built with Apple clang' >&2\n")
    program.chmod(0o755)
    return program


class TestPrograms:
    @pytest.mark.parametrize("below", ["llama-server", "."])
    def test_starts_adopted_program(self, their_server: Path, below: str) -> None:
        found = adopt_program(LLAMA, their_server.parent / below)
        assert found.version == "6123-79c1160b" and found.adopted_path == str(their_server) and found.disk_bytes == 0
        assert make_environment(LLAMA) == found == find_environment(LLAMA)
        assert list_installed() == [found]
        for name in ("llama-server", "llama.cpp-build/bin/llama-server"):
            assert build_command(found, Launch(argv=(name, "--port", "1"))) == [str(their_server), "--port", "1"]
        assert LLAMA.recipe is not None and explain_not_running(Path(found.path), LLAMA.recipe) is None

    def test_rejects_program_that_does_not_run(self, their_server: Path) -> None:
        their_server.write_text("#!/bin/sh\necho 'cannot execute: exec format error' >&2\nexit 126\n")
        with pytest.raises(ExternalFailure, match="does not run") as caught:
            adopt_program(LLAMA, their_server)
        assert "exec format error" in str(caught.value.cause) and list_installed() == []

    def test_doctor_reports_program_that_no_longer_runs(self, their_server: Path) -> None:
        found = adopt_program(LLAMA, their_server)
        their_server.write_text("#!/bin/sh\nkill -ILL $$\n")
        assert LLAMA.recipe is not None and "SIGILL" in str(explain_not_running(Path(found.path), LLAMA.recipe))

    def test_rejects_non_programs_and_engines_without_programs(self, tmp_path: Path, their_server: Path) -> None:
        with pytest.raises(UsageError, match="is not a program"):
            adopt_program(LLAMA, tmp_path / "nothing")
        with pytest.raises(UsageError, match="not a separate program") as caught:
            adopt_program(get_engine("vllm"), their_server)
        assert "--python" in str(caught.value.hint)

    def test_missing_program_is_an_error_until_forgotten(self, their_server: Path) -> None:
        adopt_program(LLAMA, their_server)
        their_server.rename(their_server.with_name("moved"))
        with pytest.raises(ExternalFailure, match=r"the program that was registered for llama\.cpp does not exist"):
            make_environment(LLAMA)
        assert forget_environment(LLAMA).adopted_path == str(their_server)
        assert list_installed() == []

    @pytest.mark.parametrize(
        ("text", "version"),
        [
            ("version: 6123 (79c1160b)\nbuilt with Apple clang", "6123-79c1160b"),
            (
                "version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with GNU 12.2.0 for Linux x86_64",
                "0.5.0-dev-0c1e570",
            ),
            ("ollama version 0.12.1", "0.12.1"),
            ("usage: something else", None),
        ],
    )
    def test_parses_versions(self, text: str, version: str | None) -> None:
        """The second is the output of a native build."""
        assert parse_version(text) == version
