"""Builds an engine from its published source for this machine, and keeps a build that runs and answers correctly."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from bedplate.engines import BuildVariant, Engine, SourceBuild
from bedplate.engines.base import find_cards
from bedplate.errors import BedplateError, ExternalFailure, UsageError
from bedplate.home import (
    check_free_space,
    ensure_writable,
    get_engines_dir,
    get_logs_dir,
    hold_lock,
    make_disk_failure,
    open_private,
)
from bedplate.progress import Progress, SilentProgress
from bedplate.run.child import run_child
from bedplate.run.environments import (
    EngineEnvironment,
    format_now,
    install_bare_packages,
    measure_disk_bytes,
    read_environment,
    store_environment,
)
from bedplate.run.locks import BUILD_TOOLS
from bedplate.run.uv import build_uv_environment as uv_environment
from bedplate.run.uv import find_engine_python, run_uv
from bedplate.values import Hardware
from bedplate.values.decision import Device
from bedplate.values.units import format_seconds, format_size

CMAKE_PACKAGES = ("cmake==4.4.4", "ninja==1.13.2")
"""Installed on machines that have a compiler but lack these."""
LEAST_CMAKE = (3, 18)
"""The first version with CMAKE_CUDA_ARCHITECTURES."""
BYTES_PER_JOB = 2_000_000_000
"""Memory of a compiler for the largest files. It limits the number of jobs."""
NATIVE_GPUS: dict[Device, tuple[str, ...]] = {"cuda": ("nvidia",), "rocm": ("amd",), "xpu": ("intel",)}
INSTALL_A_COMPILER = (
    "install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), xcode-select --install (macOS); "
    "or omit --build native to use the packaged engine"
)
GPU_COMPILERS: dict[Device, tuple[str, str, str]] = {
    "cuda": ("nvcc", "NVIDIA GPUs", "the CUDA toolkit"),
    "rocm": ("hipcc", "AMD GPUs", "ROCm's HIP SDK"),
    "xpu": ("glslc", "Intel GPUs (through Vulkan)", "the Vulkan SDK"),
    "vulkan": ("glslc", "GPUs (through Vulkan)", "the Vulkan SDK"),
}
_HOME_VARIABLES = {"nvcc": ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"), "hipcc": ("ROCM_PATH",), "glslc": ("VULKAN_SDK",)}
_HOMES = {"nvcc": ("usr/local/cuda", "usr/local/cuda-*", "opt/cuda"), "hipcc": ("opt/rocm", "opt/rocm-*"), "glslc": ()}
BIN = "bin"
_REFUSED = "refused.json"
"""Written instead of a manifest for a build that does not run or gives wrong answers."""
_STEP = re.compile(r"^\[ *(\d+)(?:/(\d+)|%)\]", re.MULTILINE)
_ERRORS = re.compile(
    r"^(?:CMake Error[^\n]*(?:\n+ +[^\n]+)?"
    # The source is not a git checkout, which is not an error.
    r"|.*(?:\berror:|\bfatal\b(?!: not a git repository)|Killed signal|No space left)[^\n]*)$",
    re.MULTILINE | re.IGNORECASE,
)
TAIL_BYTES = 4096


class Toolchain(msgspec.Struct, frozen=True, kw_only=True):
    """The build tools of this machine. `None`: it lacks the tool, which is then installed from the package index."""

    compiler: str
    compiler_version: str
    cmake: str | None = None
    ninja: str | None = None
    make: str | None = None
    gpu: str | None = None
    """The compiler for GPU code."""
    gpu_version: str | None = None


class BuildTestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the test of a build."""

    runs: bool
    right: bool
    why: str
    """The reason for the result, as a clause."""
    evidence: tuple[str, ...] = ()


class BuildNotUsable(Exception):
    """No build of this source works here; only the packaged engine remains."""

    def __init__(self, why: str, evidence: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why = why
        self.evidence = evidence


Trial = Callable[[EngineEnvironment], BuildTestResult]
"""Runs a build and checks its answers."""


def get_source_build(engine: Engine) -> SourceBuild:
    if engine.build is None:
        raise UsageError(f"bedplate does not build {engine.name} from source", hint="omit --build native")
    return engine.build


def build_environment(
    engine: Engine,
    hardware: Hardware,
    device: Device,
    trial: Trial,
    progress: Progress | None = None,
) -> EngineEnvironment:
    """The native build of the engine; built on the first call. Raises `BuildNotUsable`."""
    progress = progress or SilentProgress()
    build = get_source_build(engine)
    tools, paths = _list_build_paths(engine, build, hardware, device)
    if existing := _find_build(paths):
        return existing
    ensure_writable(get_engines_dir())
    try:
        with hold_lock(get_engines_dir() / engine.id, f"installing {engine.name}", progress.note):
            return _find_build(paths) or _build(engine, build, tools, hardware, device, paths, trial, progress)
    except OSError as error:
        raise make_disk_failure(error, get_engines_dir()) from error


def find_native_build(engine: Engine, hardware: Hardware, device: Device) -> EngineEnvironment | None:
    """The native build, if there is one. Raises `BuildNotUsable` if it was built and failed its test."""
    return _find_build(_list_build_paths(engine, get_source_build(engine), hardware, device)[1])


def find_usable_build(engine: Engine, hardware: Hardware, device: Device) -> EngineEnvironment | None:
    """The native build, if there is one that passed its test; otherwise `None`."""
    if engine.build is None:
        return None
    try:
        return find_native_build(engine, hardware, device)
    except (BedplateError, BuildNotUsable):
        return None


def _list_build_paths(
    engine: Engine, build: SourceBuild, hardware: Hardware, device: Device
) -> tuple[Toolchain, list[tuple[BuildVariant, Path]]]:
    variants = engine.list_variants(hardware, device)
    if not variants:
        raise UsageError(f"{engine.name} cannot be built for {device}", hint="omit --build native")
    tools = find_toolchain(engine.name, device, os.environ)
    return tools, [(one, get_build_path(engine, build, one, tools, hardware, device)) for one in variants]


def _find_build(paths: Sequence[tuple[BuildVariant, Path]]) -> EngineEnvironment | None:
    """The first variant that was built. Later variants count only if all before them were tested and failed."""
    for variant, path in paths:
        if existing := read_environment(path):
            return existing
        if (refused := _read_refused(path)) is None:
            return None
        if variant is paths[-1][0] or refused.runs:
            raise BuildNotUsable(f"an earlier build failed its test: {refused.why}", refused.evidence)
    return None


def _read_refused(path: Path) -> BuildTestResult | None:
    try:
        return msgspec.json.decode((path / _REFUSED).read_bytes(), type=BuildTestResult)
    except (OSError, msgspec.DecodeError):
        return None


def get_build_path(
    engine: Engine, build: SourceBuild, variant: BuildVariant, tools: Toolchain, hardware: Hardware, device: Device
) -> Path:
    """The folder of a build; it depends on the source, flags, compiler, CPU and GPUs."""
    cards = sorted(
        {(card.name, card.compute_capability or "") for card in find_cards(hardware, NATIVE_GPUS.get(device, ()))}
    )
    machine = (hardware.cpu.name, hardware.cpu.arch, hardware.cpu.instruction_sets, cards)
    made_with = (tools.compiler_version, tools.gpu_version)
    what = repr((build.package, build.sha256, build.programs, variant.options, made_with, machine))
    return get_engines_dir() / engine.id / f"{build.version}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


# build tools


def find_toolchain(name: str, device: Device, environ: Mapping[str, str]) -> Toolchain:
    """Finds the build tools. Raises an error for a missing one that the package index does not have."""
    path = environ.get("PATH")
    compiler = next(
        (
            found
            for one in (environ.get("CXX"), "c++", "g++", "clang++")
            if one and (found := shutil.which(one, path=path))
        ),
        None,
    )
    if compiler is None:
        raise ExternalFailure(f"building {name} needs a C++ compiler, and none was found", hint=INSTALL_A_COMPILER)
    gpu = None
    if device in GPU_COMPILERS:
        gpu = find_gpu_compiler(device, environ)
        if gpu is None:
            program, whose, kit = GPU_COMPILERS[device]
            raise ExternalFailure(
                f"building {name} for {whose} needs {program}, which was not found",
                hint=f"install {kit}, with {program} on the PATH; or omit --build native to use the CPU",
            )
    cmake = shutil.which("cmake", path=path)
    return Toolchain(
        compiler=compiler,
        compiler_version=_read_first_line(compiler, "--version"),
        cmake=cmake if cmake and parse_cmake_version(_read_first_line(cmake, "--version")) >= LEAST_CMAKE else None,
        ninja=shutil.which("ninja", path=path) or shutil.which("ninja-build", path=path),
        make=shutil.which("make", path=path),
        gpu=str(gpu) if gpu else None,
        gpu_version=_read_last_line(str(gpu), "--version") if gpu else None,
    )


def find_gpu_compiler(device: Device, environ: Mapping[str, str]) -> Path | None:
    """Finds the compiler for GPU code, which installers often put outside the PATH."""
    program = GPU_COMPILERS[device][0]
    if found := shutil.which(program, path=environ.get("PATH", "")):
        return Path(found).resolve()
    homes = [Path(home) for name in _HOME_VARIABLES[program] if (home := environ.get(name))]
    for place in _HOMES[program]:
        homes += sorted(Path("/").glob(place), key=_parse_numbers, reverse=True)
    return next((path.resolve() for home in homes if (path := home / BIN / program).is_file()), None)


def describe_gpu_compiler(device: Device, environ: Mapping[str, str]) -> str:
    """Its path and version; empty if there is none, or the device needs none."""
    found = find_gpu_compiler(device, environ) if device in GPU_COMPILERS else None
    return f"{found} {_read_last_line(str(found), '--version')}".strip() if found else ""


def _parse_numbers(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.name)))


def parse_cmake_version(line: str) -> tuple[int, int]:
    found = re.search(r"(\d+)\.(\d+)", line)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _read_first_line(*argv: str) -> str:
    return (_read_output(argv) or [""])[0]


def _read_last_line(*argv: str) -> str:
    return (_read_output(argv) or [""])[-1]


def _read_output(argv: Iterable[str]) -> list[str]:
    try:
        ended = run_child(list(argv), limit_s=60)
    except (TimeoutError, OSError):
        return []
    return [line.strip() for line in ended.output.splitlines() if line.strip()] if ended.code == 0 else []


def choose_jobs(hardware: Hardware) -> int:
    """The number of concurrent compilers: limited by cores and memory."""
    return max(1, min(int(hardware.cpu.allowed_cores), hardware.memory.available_bytes // BYTES_PER_JOB))


# building


def _build(
    engine: Engine,
    build: SourceBuild,
    tools: Toolchain,
    hardware: Hardware,
    device: Device,
    paths: Sequence[tuple[BuildVariant, Path]],
    trial: Trial,
    progress: Progress,
) -> EngineEnvironment:
    folder = ensure_writable(paths[0][1].parent)
    cpu_only = device in ("cpu", "metal")
    needed_bytes = build.disk_bytes if cpu_only else build.gpu_disk_bytes
    check_free_space(folder, needed_bytes + build.download_bytes, f"building {engine.name}")
    for leftover in folder.glob(".making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    jobs = choose_jobs(hardware)
    took_s = (build.core_seconds if cpu_only else build.gpu_core_seconds) / jobs
    progress.note(
        f"building {engine.name} for {'this CPU' if cpu_only else f'the GPU ({device})'} from {build.package} with "
        f"{tools.compiler_version}: about {format_seconds(took_s)} on {jobs} core{'s' if jobs > 1 else ''} "
        f"(estimate: {build.basis}), {format_size(needed_bytes)} of temporary disk space; Ctrl-C removes everything"
    )
    log = ensure_writable(get_logs_dir()) / f"build-{engine.id}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder, ignore_cleanup_errors=True) as holder:
        work = Path(holder)
        provide_source(build, work, progress)
        maker = BuildRunner(
            engine.name, build, _install_missing_tools(tools, work, progress), jobs, work, log, progress
        )
        last: BuildTestResult | None = None
        for number, (variant, path) in enumerate(paths):
            without = paths[number + 1][0].name if number + 1 < len(paths) else None
            if (earlier := _read_refused(path)) is not None:
                last = earlier
                progress.note(f"an earlier build did not run ({earlier.why}); building without {without}")
                continue
            began = time.monotonic()
            staging = maker.build_variant(variant)
            environment = EngineEnvironment(
                engine=engine.id,
                version=build.version,
                path=str(staging),
                packages=(build.package,),
                python="",
                made_at=format_now(),
                disk_bytes=measure_disk_bytes(staging),
                program=f"{BIN}/{build.programs[0]}",
                built=True,
                notes=_write_notes(variant, tools, time.monotonic() - began, jobs),
            )
            last = trial(environment)
            if last.right:
                progress.note(f"the native build passed its test: {last.why}")
                environment = msgspec.structs.replace(environment, path=str(path), notes=(*environment.notes, last.why))
                store_environment(environment, staging)
                return environment
            _write_refused(path, last)
            if last.runs:  # wrong answers are not fixed by omitting an instruction set
                break
            if without is not None:
                progress.note(f"the native build does not run ({last.why}); building again without {without}")
    raise BuildNotUsable(last.why if last else "nothing was built", last.evidence if last else ())


def _write_notes(variant: BuildVariant, tools: Toolchain, took_s: float, jobs: int) -> tuple[str, ...]:
    compilers = tools.compiler_version + (f", {tools.gpu_version}" if tools.gpu_version else "")
    omitted = (f"without {variant.name}",) if variant.name else ()
    return (f"built in {format_seconds(took_s)} with {jobs} jobs, {compilers}", *omitted)


def _write_refused(path: Path, verdict: BuildTestResult) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / _REFUSED).write_bytes(msgspec.json.encode(verdict))


class BuildRunner:
    """Configures and compiles in one folder, so that a second variant compiles only what differs."""

    def __init__(
        self, name: str, build: SourceBuild, tools: Toolchain, jobs: int, work: Path, log: Path, progress: Progress
    ) -> None:
        self.name, self.build, self.tools, self.jobs = name, build, tools, jobs
        self.source, self.folder, self.work = work / "source", work / "build", work
        self.log, self.progress = log, progress
        self._made = 0

    def build_variant(self, variant: BuildVariant) -> Path:
        """Builds a variant and returns a folder with its programs in bin/."""
        tools = self.tools
        env = self._build_environment()
        configure = [str(tools.cmake), "-S", str(self.source), "-B", str(self.folder), *self._choose_generator()]
        configure += [*self._list_compiler_options(), *variant.options]
        self._run(configure, env, f"configuring {self.name}")
        compile_all = [str(tools.cmake), "--build", str(self.folder), "--config", "Release"]
        compile_all += ["--parallel", str(self.jobs), "--target", *self.build.programs]
        self._run(compile_all, env, f"building {self.name}", 100)
        self._made += 1
        staging = self.work / f"env{self._made}"
        (staging / BIN).mkdir(parents=True)
        for program in self.build.programs:
            made = next((path for path in (self.folder / BIN / program, self.folder / program) if path.is_file()), None)
            if made is None:
                raise ExternalFailure(f"building {self.name} did not create {program}", hint=f"log: {self.log}")
            shutil.copy2(made, staging / BIN / program)
        return staging

    def _choose_generator(self) -> list[str]:
        if self.tools.ninja is not None:
            return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={self.tools.ninja}"]
        return ["-G", "Unix Makefiles"]

    def _list_compiler_options(self) -> list[str]:
        if self.tools.gpu is None or Path(self.tools.gpu).name != "nvcc":
            return []
        # The program loads CUDA's libraries from where they were at build time.
        home = Path(self.tools.gpu).parent.parent
        libraries = next((folder for name in ("lib64", "lib") if (folder := home / name).is_dir()), home / "lib64")
        compiler, root = f"-DCMAKE_CUDA_COMPILER={self.tools.gpu}", f"-DCUDAToolkit_ROOT={home}"
        return [compiler, root, f"-DCMAKE_BUILD_RPATH={libraries}"]

    def _build_environment(self) -> dict[str, str]:
        # git must not look at repositories in parent folders.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.work), "NINJA_STATUS": "[%f/%t] "}
        env.pop("MAKEFLAGS", None)
        env.pop("SOURCE_DATE_EPOCH", None)  # ggml then builds for generic CPUs
        if self.tools.gpu is not None and Path(self.tools.gpu).name == "hipcc":
            home = Path(self.tools.gpu).parent.parent
            env.setdefault("HIP_PATH", str(home))
            if (clang := home / "llvm" / BIN / "clang").is_file():
                env.setdefault("HIPCXX", str(clang))
        return env

    def _run(self, argv: list[str], env: Mapping[str, str], what: str, total: int | None = None) -> None:
        with open_private(self.log, "ab") as file:
            file.write(f"# {' '.join(argv)}\n".encode())
        with self.progress.step(what, total) as done:

            def update_progress(_: int) -> None:
                share = parse_build_progress(_read_tail(self.log))
                if total is not None and share is not None:
                    done(round(total * share))

            try:
                ended = run_child(argv, env=env, tick=update_progress, log=self.log)
            except OSError as error:
                raise ExternalFailure(f"{what} failed", cause=str(error)) from error
        if ended.code != 0:
            text = self.log.read_text(encoding="utf-8", errors="replace").rpartition("\n# ")[2]
            raise ExternalFailure(f"{what} failed", cause=find_first_error(text), hint=f"log: {self.log}")


def _read_tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def parse_build_progress(text: str) -> float | None:
    """The progress from the last line that shows it: ninja's [12/214], or make's [ 5%]."""
    found = list(_STEP.finditer(text))
    if not found:
        return None
    last = found[-1]
    total = int(last[2]) if last[2] is not None else 100
    return min(1.0, int(last[1]) / total) if total else None


def find_first_error(text: str) -> str:
    """The first error in a build's output; later ones usually follow from it."""
    found = _ERRORS.search(text)
    lines = text.strip().splitlines()
    error = found[0] if found else lines[-1] if lines else "it printed nothing"
    return " ".join(error.split())[:600]


# the source


def provide_source(build: SourceBuild, work: Path, progress: Progress) -> None:
    """Puts the source tree into `work`/source: from a folder in UV_FIND_LINKS, otherwise from the package index."""
    if (local := find_local_archive(build.archive, uv_environment(os.environ))) is not None:
        found = _compute_sha256(local)
        if found == build.sha256:
            progress.note(f"using the source in {local}")
        else:
            progress.note(f"using the source in {local}, although it is not the published file (sha256 {found[:12]}…)")
        extract_tree(local, build.tree, work / "source")
        return
    fetch_source(build, work, progress)


def find_local_archive(name: str, env: Mapping[str, str]) -> Path | None:
    """The file in one of the folders of UV_FIND_LINKS."""
    for folder in env.get("UV_FIND_LINKS", "").split(","):
        path = Path(folder.strip().removeprefix("file://")).expanduser() / name
        if folder.strip() and path.is_file():
            return path
    return None


def extract_tree(archive: Path, tree: str, target: Path) -> None:
    """Extracts one folder of an archive, as plain files; nothing is written outside the target.

    The filters of `tarfile` are not used: Python has them since 3.11.4 only, and Debian 12 brings 3.11.2.
    """
    try:
        with tarfile.open(archive) as opened:
            target.mkdir(parents=True)
            for member in opened:
                path = PurePosixPath(member.name)
                if not path.is_relative_to(tree) or member.isdir():
                    continue
                inside = path.relative_to(tree)
                content = opened.extractfile(member) if member.isreg() else None
                if content is None or ".." in inside.parts or not inside.parts:
                    raise tarfile.ReadError(f"{member.name} is not a plain file inside {tree}")
                file = target / inside
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("xb") as out:
                    shutil.copyfileobj(content, out)
                file.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, OSError) as error:
        hint = "check that the file is complete"
        raise ExternalFailure(f"cannot extract {archive}", cause=str(error), hint=hint) from error
    if not (target / "CMakeLists.txt").is_file():
        raise ExternalFailure(
            f"{archive} does not contain {tree}/CMakeLists.txt", hint="check that it is the published source package"
        )


_TAKER = '''\
"""Replaces the package's build backend: it moves the extracted source instead of building it."""
import os, shutil, zipfile
NAME, VERSION, TREE, TARGET = {values!r}
INFO = f"{{NAME}}-{{VERSION}}.dist-info"
METADATA = f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n"

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.makedirs(os.path.join(folder, INFO))
    with open(os.path.join(folder, INFO, "METADATA"), "w") as file:
        file.write(METADATA)
    return INFO

def build_wheel(folder, config_settings=None, metadata_directory=None):
    shutil.move(TREE, TARGET)
    name = f"{{NAME}}-{{VERSION}}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr(f"{{INFO}}/METADATA", METADATA)
        wheel.writestr(f"{{INFO}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{{INFO}}/RECORD", "")
    return name
'''
_BACKENDS = ("scikit_build_core", "build")


def fetch_source(build: SourceBuild, work: Path, progress: Progress) -> None:
    """Downloads the source with uv, which uses the user's index settings, checks the hash and extracts it.

    uv has no command that only downloads a source package. So it builds the package with a backend that only moves the
    source. A temporary cache folder keeps the result of that backend out of the user's cache.
    """
    name, _, version = build.package.partition("==")
    what = f"fetching {build.package}"
    taker = work / "taker"
    run_uv(["venv", "--python", find_engine_python(), str(taker)], what, work)
    packages = next(taker.rglob("site-packages"))
    package, module = _BACKENDS
    (packages / package).mkdir()
    (packages / package / "__init__.py").write_text("")
    tree = str(PurePosixPath(*PurePosixPath(build.tree).parts[1:]))
    values = (name.replace("-", "_"), version, tree, str(work / "source"))
    (packages / package / f"{module}.py").write_text(_TAKER.format(values=values))
    pinned = work / "pinned.txt"
    pinned.write_text(f"{build.package} --hash=sha256:{build.sha256}\n")
    python = taker / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    arguments = ["pip", "install", "--no-deps", "--no-build-isolation", "--no-binary", name, "--require-hashes"]
    arguments += ["--python", str(python), "--target", str(work / "nothing"), "--cache-dir", str(work / "uv-cache")]
    with progress.step(what, build.download_bytes) as done:
        run_uv([*arguments, "--requirement", str(pinned)], what, work, done)
    if not (work / "source" / "CMakeLists.txt").is_file():
        raise ExternalFailure(
            f"{build.package} does not contain {build.tree}/CMakeLists.txt", hint="please report this"
        )
    for leftover in (taker, work / "uv-cache", work / "nothing"):
        shutil.rmtree(leftover, ignore_errors=True)


def _install_missing_tools(tools: Toolchain, work: Path, progress: Progress) -> Toolchain:
    """Installs cmake and ninja from the package index if they are missing."""
    builder = tools.ninja or tools.make
    if tools.cmake is not None and builder is not None:
        return tools
    missing_packages = [
        package
        for package, missing in zip(CMAKE_PACKAGES, (tools.cmake is None, builder is None), strict=True)
        if missing
    ]
    names = " and ".join(missing_packages)
    progress.note(f"installing {names} from the package index for this build, since this machine lacks them")
    target = work / "tools"
    install_bare_packages(BUILD_TOOLS, CMAKE_PACKAGES, target, f"fetching {names}", missing_packages)
    changes: dict[str, Any] = {}
    for name in ("cmake", "ninja"):
        found = next(
            (path for path in (target / name / "data" / BIN / name, target / BIN / name) if path.is_file()), None
        )
        if found is not None:
            found.chmod(0o755)
            changes[name] = str(found)
    return msgspec.structs.replace(tools, **changes)


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
