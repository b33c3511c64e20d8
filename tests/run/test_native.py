"""Native builds: a small cmake project instead of an engine's source, with the real cmake and compiler."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S, wait_for
from tests.run.test_environments import list_leftovers, own_home

from bedplate.engines import BuildVariant, Engine, SourceBuild, get_engine
from bedplate.errors import ExternalFailure, UsageError
from bedplate.facts.hardware import probe
from bedplate.progress import SilentProgress
from bedplate.run import native
from bedplate.run.environments import (
    EngineEnvironment,
    build_command,
    explain_not_running,
    list_installed,
    uninstall_engine,
)
from bedplate.run.native import (
    BuildNotUsable,
    BuildTestResult,
    Toolchain,
    build_environment,
    choose_jobs,
    extract_tree,
    find_first_error,
    find_gpu_compiler,
    find_local_archive,
    find_native_build,
    find_toolchain,
    get_build_path,
    parse_build_progress,
    parse_cmake_version,
)
from bedplate.values import Hardware, Launch, replace_fields
from bedplate.values.decision import Device

__all__ = ["own_home"]
HARDWARE = probe()
TOOLS = [name for name in ("cmake", "c++") if shutil.which(name) is None]
needs_tools = pytest.mark.skipif(bool(TOOLS), reason=f"needs {' and '.join(TOOLS)}, which this machine has not")
CMAKE = """
cmake_minimum_required(VERSION 3.14)
set(CMAKE_CXX_COMPILER_FORCED 1) # no trial programs, which take longer than this one
project(tiny CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(tiny-server main.cpp)
target_compile_definitions(tiny-server PRIVATE KIND="${KIND}")
"""
MAIN = """
#include <cstdio>
int main() { std::printf("version: 7 (%s)\\n", KIND); return 0; }
"""
ARCHIVE = "bedplate_tiny_source-1.0.tar.gz"
TREE = "bedplate_tiny_source-1.0/vendor/tiny"


BUILD = SourceBuild(
    package="bedplate-tiny-source==1.0",
    archive=ARCHIVE,
    sha256="0" * 64,
    tree=TREE,
    programs=("tiny-server",),
    version="1.0-native",
    download_bytes=1000,
    disk_bytes=1_000_000,
    gpu_disk_bytes=1_000_000,
    core_seconds=60,
    gpu_core_seconds=600,
    basis="guessed",
)


class Built(Engine):
    """An engine of one C++ file."""

    id = "built"
    name = "Built"
    version = "1.0"
    build: ClassVar[SourceBuild | None] = BUILD

    def list_variants(self, hardware: Hardware, device: Device) -> tuple[BuildVariant, ...]:
        return (BuildVariant(options=("-DKIND=fast",)), BuildVariant(name="LUCK", options=("-DKIND=safe",)))


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def make_archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            opened.addfile(member, io.BytesIO(text.encode()))
    return path


def make_source(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    everything = {"CMakeLists.txt": CMAKE, "main.cpp": MAIN, **files}
    return make_archive(folder / ARCHIVE, {f"{TREE}/{name}": text for name, text in everything.items()})


@pytest.fixture
def sources(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the source package, as on an air-gapped site."""
    folder = tmp_path / "links"
    make_source(folder)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return folder


def run_version(environment: EngineEnvironment) -> str:
    argv = build_command(environment, Launch(argv=("tiny-server", "--version")))
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def accept_build(environment: EngineEnvironment) -> BuildTestResult:
    return BuildTestResult(runs=True, right=True, why=f"it says {run_version(environment)}")


def build(
    trial: Callable[[EngineEnvironment], BuildTestResult] = accept_build, notes: Notes | None = None
) -> EngineEnvironment:
    return build_environment(Built(), HARDWARE, "cpu", trial, notes)


@needs_tools
class TestBuilding:
    def test_builds_from_a_local_folder(self, sources: Path, own_home: Path) -> None:
        notes = Notes()
        found = build(notes=notes)
        assert run_version(found) == "version: 7 (fast)"
        assert found.built and found.version == "1.0-native" and found.packages == ("bedplate-tiny-source==1.0",)
        assert list_installed() == [found] and find_native_build(Built(), HARDWARE, "cpu") == found
        assert build_command(found, Launch(argv=("made/by/hand/bin/tiny-server", "--port", "1"))) == [
            f"{found.path}/bin/tiny-server", "--port", "1",
        ]  # fmt: skip
        assert explain_not_running(Path(found.path), get_engine("llama.cpp").recipe) is None  # type: ignore[arg-type]
        assert any("not the published file" in note for note in notes.said)
        assert any("about" in note and "estimate: guessed" in note for note in notes.said)

    def test_keeps_only_the_programs(self, sources: Path, own_home: Path) -> None:
        found = build()
        assert sorted(path.name for path in Path(found.path).rglob("*")) == ["bedplate.json", "bin", "tiny-server"]
        assert list_leftovers(own_home) == []
        assert found.disk_bytes == (Path(found.path) / "bin" / "tiny-server").stat().st_size

    def test_a_second_call_builds_nothing(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = build()
        monkeypatch.setattr(native, "provide_source", None)
        assert build() == first

    def test_accepts_published_file_without_a_note(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Published(Built):
            build = msgspec.structs.replace(BUILD, sha256=hashlib.sha256((sources / ARCHIVE).read_bytes()).hexdigest())

        notes = Notes()
        build_environment(Published(), HARDWARE, "cpu", accept_build, notes)
        assert not any("not the published file" in note for note in notes.said)

    def test_native_build_is_removed_with_the_engine(self, sources: Path, own_home: Path) -> None:
        build()
        assert len(uninstall_engine("built")) == 1
        assert list_installed() == [] and find_native_build(Built(), HARDWARE, "cpu") is None

    def test_builds_with_make_without_ninja(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if shutil.which("make") is None:
            pytest.skip("needs make, which this machine has not")
        whole = find_toolchain("Built", "cpu", os.environ)
        lacking = msgspec.structs.replace(whole, ninja=None)
        monkeypatch.setattr(native, "find_toolchain", lambda *_: lacking)
        assert run_version(build()) == "version: 7 (fast)"


@needs_tools
def test_installs_missing_cmake_and_ninja(sources: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_OFFLINE")
    whole = find_toolchain("Built", "cpu", os.environ)
    lacking = msgspec.structs.replace(whole, cmake=None, ninja=None, make=None)
    monkeypatch.setattr(native, "find_toolchain", lambda *_: lacking)
    notes = Notes()
    assert run_version(build(notes=notes)) == "version: 7 (fast)"
    assert any("cmake==" in note and "ninja==" in note for note in notes.said)
    assert list_leftovers(own_home) == []


@needs_tools
class TestFetching:
    """From a package index of local files."""

    @pytest.fixture(autouse=True)
    def index(self, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "simple" / "bedplate-tiny-source"
        folder.mkdir(parents=True)
        top = TREE.partition("/")[0]
        self.file = make_archive(
            folder / ARCHIVE,
            {
                f"{top}/pyproject.toml": '[build-system]\nrequires = ["scikit-build-core"]\n'
                'build-backend = "scikit_build_core.build"\n'
                '[project]\nname = "bedplate_tiny_source"\ndynamic = ["version"]\n',
                f"{top}/PKG-INFO": "Metadata-Version: 2.1\nName: bedplate_tiny_source\nVersion: 1.0\n",
                f"{TREE}/CMakeLists.txt": CMAKE,
                f"{TREE}/main.cpp": MAIN,
            },
        )
        (folder / "index.html").write_text(f'<a href="{ARCHIVE}">{ARCHIVE}</a>')
        for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"file://{tmp_path}/simple")

    def pinned(self, sha256: str) -> Engine:
        class Pinned(Built):
            build = msgspec.structs.replace(BUILD, sha256=sha256)

        return Pinned()

    def test_builds_pinned_source_package(self, own_home: Path) -> None:
        engine = self.pinned(hashlib.sha256(self.file.read_bytes()).hexdigest())
        assert run_version(build_environment(engine, HARDWARE, "cpu", accept_build)) == "version: 7 (fast)"
        assert list_leftovers(own_home) == []

    def test_rejects_source_package_with_another_hash(self, own_home: Path) -> None:
        with pytest.raises(ExternalFailure, match="fetching bedplate-tiny-source") as caught:
            build_environment(self.pinned("0" * 64), HARDWARE, "cpu", accept_build)
        assert "ash mismatch" in str(caught.value.cause)
        assert list_leftovers(own_home) == []


@needs_tools
class TestTrials:
    def test_rebuilds_without_the_instruction_set_that_crashed(self, sources: Path) -> None:
        notes = Notes()

        def dies(environment: EngineEnvironment) -> BuildTestResult:
            if "fast" in run_version(environment):
                return BuildTestResult(runs=False, right=False, why="it met an illegal instruction")
            return BuildTestResult(runs=True, right=True, why="fine")

        found = build(dies, notes)
        assert run_version(found) == "version: 7 (safe)"
        assert "without LUCK" in found.notes and "fine" in found.notes
        assert any("illegal instruction" in note and "without LUCK" in note for note in notes.said)
        assert build(accept_build) == found  # without the first variant, which is known to crash

    def test_build_that_never_runs_is_not_repeated(
        self, sources: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[str] = []

        def dies(environment: EngineEnvironment) -> BuildTestResult:
            tried.append(run_version(environment))
            return BuildTestResult(runs=False, right=False, why=f"death {len(tried)}")

        with pytest.raises(BuildNotUsable, match="death 2"):
            build(dies)
        assert tried == ["version: 7 (fast)", "version: 7 (safe)"]
        assert list_installed() == []
        monkeypatch.setattr(native, "provide_source", None)
        with pytest.raises(BuildNotUsable, match="an earlier build failed its test: death 2"):
            build(dies)

    def test_wrong_answers_do_not_cause_another_variant(self, sources: Path) -> None:
        tried: list[str] = []

        def wrong(environment: EngineEnvironment) -> BuildTestResult:
            tried.append(run_version(environment))
            return BuildTestResult(runs=True, right=False, why="nonsense", evidence=("after 'a' it says 'b'",))

        for _ in range(2):
            with pytest.raises(BuildNotUsable, match="nonsense") as caught:
                build(wrong)
            assert caught.value.evidence == ("after 'a' it says 'b'",)
        assert len(tried) == 1 and list_installed() == []

    def test_build_is_tested_before_it_is_stored(self, sources: Path) -> None:
        def looks(environment: EngineEnvironment) -> BuildTestResult:
            assert list_installed() == [] and run_version(environment)
            return BuildTestResult(runs=True, right=True, why="")

        found = build(looks)
        assert list_installed() == [found]


@needs_tools
class TestFailing:
    def test_reports_source_that_does_not_compile(self, sources: Path, own_home: Path) -> None:
        make_source(sources, **{"main.cpp": "int main() { return nothing; }\n"})
        with pytest.raises(ExternalFailure, match="building Built failed") as caught:
            build()
        assert "nothing" in str(caught.value.cause) and "error" in str(caught.value.cause)
        log = Path(str(caught.value.hint).partition(": ")[2])
        assert "main.cpp" in log.read_text()
        assert list_leftovers(own_home) == [] and list_installed() == []

    def test_reports_source_that_cannot_be_configured(self, sources: Path, own_home: Path) -> None:
        make_source(
            sources, **{"CMakeLists.txt": "cmake_minimum_required(VERSION 3.14)\nmessage(FATAL_ERROR no-luck)\n"}
        )
        with pytest.raises(ExternalFailure, match="configuring Built failed") as caught:
            build()
        assert "no-luck" in str(caught.value.cause)
        assert list_leftovers(own_home) == []

    def test_reports_truncated_source_archive(self, sources: Path, own_home: Path) -> None:
        whole = (sources / ARCHIVE).read_bytes()
        (sources / ARCHIVE).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ExternalFailure, match="cannot extract"):
            build()
        assert list_leftovers(own_home) == []

    def test_reports_missing_source(self, sources: Path, own_home: Path) -> None:
        (sources / ARCHIVE).unlink()
        with pytest.raises(ExternalFailure, match=r"fetching bedplate-tiny-source==1\.0 failed"):
            build()
        assert list_leftovers(own_home) == []

    def test_checks_disk_space_before_the_build(self, sources: Path) -> None:
        class Huge(Built):
            build = msgspec.structs.replace(BUILD, disk_bytes=1 << 60)

        with pytest.raises(ExternalFailure, match="not enough disk space for building Built"):
            build_environment(Huge(), HARDWARE, "cpu", accept_build)

    def test_rejects_engine_without_source_build(self, own_home: Path) -> None:
        with pytest.raises(UsageError, match="does not build"):
            build_environment(get_engine("vllm"), HARDWARE, "cpu", accept_build)


INTERRUPTED = """
import sys
from tests.run.test_native import Built, HARDWARE, accept_build
from bedplate.run.native import build_environment
build_environment(Built(), HARDWARE, "cpu", accept_build)
"""
SLOW = """
cmake_minimum_required(VERSION 3.14)
project(tiny CXX)
add_custom_target(tiny-server COMMAND ${CMAKE_COMMAND} -E sleep 600)
"""


@needs_tools
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_stops_the_build_and_leaves_nothing(sources: Path, own_home: Path, number: signal.Signals) -> None:
    make_source(sources, **{"CMakeLists.txt": SLOW})
    argv, here = [sys.executable, "-c", INTERRUPTED], Path(__file__).parents[2]
    process = subprocess.Popen(argv, cwd=here, stderr=subprocess.PIPE)
    sleeping: list[psutil.Process] = []

    def compiles() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        below = psutil.Process(process.pid).children(recursive=True)
        sleeping[:] = [one for one in below if "sleep" in " ".join(_read_cmdline(one))]
        return bool(sleeping)

    wait_for(compiles, "the build to be under way")
    process.send_signal(number)
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(one.is_running() for one in sleeping), "its processes to end")
    assert list_installed() == []
    if number == signal.SIGINT:
        assert list_leftovers(own_home) == []
    else:  # the killed process could not clean up; the next build does
        make_source(sources)
        build()
        assert list_leftovers(own_home) == []


def _read_cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class TestTools:
    def test_reports_missing_compiler(self, tmp_path: Path) -> None:
        with pytest.raises(ExternalFailure, match=r"needs a C\+\+ compiler") as caught:
            find_toolchain("llama.cpp", "cpu", {"PATH": str(tmp_path)})
        assert "apt install g++" in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("device", "program", "kit"),
        [("cuda", "nvcc", "CUDA toolkit"), ("rocm", "hipcc", "ROCm"), ("xpu", "glslc", "Vulkan")],
    )
    def test_reports_missing_gpu_compiler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device, program: str, kit: str
    ) -> None:
        self.program(tmp_path / "c++", "echo 'g++ 12.2'")
        monkeypatch.setattr(native, "find_gpu_compiler", lambda *_: None)
        with pytest.raises(ExternalFailure, match=f"needs {program}") as caught:
            find_toolchain("llama.cpp", device, {"PATH": str(tmp_path)})
        assert kit in str(caught.value.hint)

    def test_finds_cuda_outside_the_path(self, tmp_path: Path) -> None:
        nvcc = tmp_path / "cuda-13" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        self.program(nvcc, "echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'Build cuda_13.0.r13.0'")
        assert find_gpu_compiler("cuda", {"PATH": "", "CUDA_HOME": str(tmp_path / "cuda-13")}) == nvcc
        assert find_gpu_compiler("cuda", {"PATH": str(nvcc.parent)}) == nvcc
        self.program(tmp_path / "c++", "echo 'g++ 12.2'")
        found = find_toolchain("llama.cpp", "cuda", {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda-13")})
        assert found.gpu == str(nvcc) and found.gpu_version == "Build cuda_13.0.r13.0"

    def test_ignores_old_cmake(self, tmp_path: Path) -> None:
        self.program(tmp_path / "c++", "echo 'g++ 12.2'")
        self.program(tmp_path / "cmake", "echo 'cmake version 3.10.2'")
        found = find_toolchain("llama.cpp", "cpu", {"PATH": str(tmp_path)})
        assert found.cmake is None and found.compiler_version == "g++ 12.2" and found.ninja is found.make is None

    def program(self, path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    @pytest.mark.parametrize(
        ("line", "version"), [("cmake version 3.25.1", (3, 25)), ("cmake3 version 4.4.4-rc1", (3, 4)), ("", (0, 0))]
    )
    def test_parses_cmake_versions(self, line: str, version: tuple[int, int]) -> None:
        if line.startswith("cmake3"):
            line, version = line.replace("cmake3", "cmake"), (4, 4)
        assert parse_cmake_version(line) == version

    def test_memory_limits_the_number_of_jobs(self) -> None:
        memory = replace_fields(HARDWARE.memory, available_bytes=5_000_000_000)
        cpu = replace_fields(HARDWARE.cpu, allowed_cores=16.0)
        assert choose_jobs(replace_fields(HARDWARE, memory=memory, cpu=cpu)) == 2
        assert choose_jobs(replace_fields(HARDWARE, memory=replace_fields(memory, available_bytes=1))) == 1


class TestKey:
    TOOLS = Toolchain(compiler="/usr/bin/c++", compiler_version="g++ 12.2")

    def path(self, variant: BuildVariant | None = None, hardware: Hardware = HARDWARE, **tools: str) -> Path:
        with_tools = msgspec.structs.replace(self.TOOLS, **tools)
        return get_build_path(Built(), BUILD, variant or BuildVariant(), with_tools, hardware, "cpu")

    def test_build_path_depends_on_compiler_flags_and_cpu(self) -> None:
        other_cpu = replace_fields(HARDWARE, cpu=replace_fields(HARDWARE.cpu, instruction_sets=("avx2",)))
        paths = [
            self.path(),
            self.path(BuildVariant(options=("-DX=1",))),
            self.path(compiler_version="g++ 14.1"),
            self.path(hardware=other_cpu),
        ]
        assert len(set(paths)) == len(paths)
        assert self.path(compiler="/opt/bin/c++", make="/usr/bin/make") == self.path()


class TestProgress:
    @pytest.mark.parametrize(
        ("text", "share"),
        [
            ("[1/214] Building C object a.o\n[107/214] Building CXX object b.o\n", 0.5),
            ("[  5%] Building CXX object\n[ 50%] Linking\n", 0.5),
            ("-- The CXX compiler identification is GNU 12.2.0\n", None),
            ("[3/0] nothing\n", None),
            ("", None),
        ],
    )
    def test_reads_progress_of_ninja_and_make(self, text: str, share: float | None) -> None:
        assert parse_build_progress(text) == share

    @given(st.text(alphabet="[]/% \n0123456789ab"))
    def test_progress_is_valid_for_any_output(self, text: str) -> None:
        share = parse_build_progress(text)
        assert share is None or 0 <= share <= 1

    def test_the_first_error_is_the_cause(self) -> None:
        text = "[1/2] c++ a.o\n/x/a.cpp:1:8: error: 'foo' was not declared\n/x/a.cpp:9: error: later\nninja: stopped\n"
        assert find_first_error(text) == "/x/a.cpp:1:8: error: 'foo' was not declared"
        assert "Killed" in find_first_error("c++: fatal error: Killed signal terminated program cc1plus\n")
        assert find_first_error("") == "it printed nothing"


class TestUnpacking:
    def test_extracts_one_folder(self, tmp_path: Path) -> None:
        path = make_archive(
            tmp_path / "a.tar.gz", {"p/vendor/x/CMakeLists.txt": "1", "p/vendor/x/s/f": "2", "p/other": "3"}
        )
        extract_tree(path, "p/vendor/x", tmp_path / "to")
        assert sorted(file.name for file in (tmp_path / "to").rglob("*")) == ["CMakeLists.txt", "f", "s"]

    def test_keeps_what_is_executable(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as archive:
            for name, mode in (("p/CMakeLists.txt", 0o666), ("p/configure", 0o4777)):
                member = tarfile.TarInfo(name)
                member.mode = mode
                archive.addfile(member)
        extract_tree(path, "p", tmp_path / "to")
        modes = {file.name: file.stat().st_mode & 0o7777 for file in (tmp_path / "to").iterdir()}
        assert modes == {"CMakeLists.txt": 0o644, "configure": 0o755}

    @pytest.mark.parametrize(
        ("kind", "link"), [(tarfile.SYMTYPE, "/etc"), (tarfile.LNKTYPE, "/etc/passwd"), (tarfile.FIFOTYPE, "")]
    )
    def test_refuses_what_is_not_a_plain_file(self, tmp_path: Path, kind: bytes, link: str) -> None:
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo("p/x/CMakeLists.txt")
            member.type, member.linkname = kind, link
            archive.addfile(member)
        with pytest.raises(ExternalFailure, match="cannot extract"):
            extract_tree(path, "p/x", tmp_path / "to")
        assert not list((tmp_path / "to").iterdir())

    @pytest.mark.parametrize("name", ["p/../../evil", "/evil", "p/x/../../../evil"])
    def test_extracts_nothing_outside_the_target(self, tmp_path: Path, name: str) -> None:
        path = make_archive(tmp_path / "a.tar.gz", {"p/x/CMakeLists.txt": "1", name: "2"})
        with contextlib.suppress(ExternalFailure):
            extract_tree(path, "p/x", tmp_path / "deep" / "to")
        assert not (tmp_path / "evil").exists() and not Path("/evil").exists() and not (tmp_path / "deep/evil").exists()

    def test_rejects_archive_of_another_package(self, tmp_path: Path) -> None:
        path = make_archive(tmp_path / "a.tar.gz", {"q/setup.py": ""})
        with pytest.raises(ExternalFailure, match="does not contain"):
            extract_tree(path, "p/x", tmp_path / "to")

    def test_searches_folders_of_uv_and_pip(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / ARCHIVE).write_text("")
        links = f"https://example.com/links,{tmp_path}/a,file://{tmp_path}/b"
        assert find_local_archive(ARCHIVE, {"UV_FIND_LINKS": links}) == tmp_path / "b" / ARCHIVE
        assert find_local_archive(ARCHIVE, {}) is None
