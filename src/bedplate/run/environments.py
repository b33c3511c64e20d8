"""Engine environments: each engine is installed in a separate, pinned Python environment, atomically."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.resources
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath

import msgspec

from bedplate.engines import BorrowedLibrary, Engine, EnvironmentRecipe, load_engines
from bedplate.engines.base import NO_VERSION, RELEASE, RegisteredEngine
from bedplate.errors import ExternalFailure, UsageError
from bedplate.home import check_free_space, ensure_writable, get_engines_dir, hold_lock, make_disk_failure
from bedplate.progress import Progress, SilentProgress
from bedplate.run.child import run_child
from bedplate.run.locks import LIBRARIES, FoundLock, find_lock, make_bare_recipe, select_packages
from bedplate.run.uv import (
    build_torch_arguments,
    choose_torch_backend,
    find_engine_python,
    list_build_options,
    list_pinned_packages,
    run_uv,
)
from bedplate.values import Launch
from bedplate.values.decision import Device
from bedplate.values.quoting import join_shell
from bedplate.values.units import format_size

_MANIFEST = "bedplate.json"
"""Written last, in a folder that is then renamed: a folder with a manifest is a finished environment."""
CHECK_LIMIT_S = 900.0
"""Importing a large package from a slow disk takes a while; after this time it is assumed to hang. A first import took
more than 5 minutes on two cores that many other processes used."""

_BORROWED = "borrowed"
"""The folder in an environment for libraries that the system lacks."""
_ADOPTED, _PROGRAMS = "adopted", "programs"
"""The folder with the record of an adopted Python or program, and its subfolder with bedplate's own programs."""


class EngineEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """One installed engine."""

    engine: str
    version: str
    path: str
    packages: tuple[str, ...]
    python: str
    made_at: str
    disk_bytes: int
    adopted: str | None = None
    """The interpreter of the user's environment, which bedplate starts and never changes."""
    program: str | None = None
    """The engine's server if it is not a Python package: the user's program, or a native build."""
    built: bool = False
    """Whether bedplate built it from source."""
    locked: bool = False
    """Whether every package was installed from a lock file, with its hash."""
    notes: tuple[str, ...] = ()
    """Results of the build and its test."""

    @property
    def interpreter(self) -> Path:
        return Path(self.adopted) if self.adopted else _get_interpreter(Path(self.path))

    @property
    def programs(self) -> Path:
        """The folder with bedplate's own programs for the engine."""
        return Path(self.path) / _PROGRAMS if self.adopted else self.interpreter.parent

    @property
    def server(self) -> Path | None:
        """The program to start; its path is relative to the environment if bedplate built it."""
        return Path(self.path) / self.program if self.program else None

    @property
    def adopted_path(self) -> str | None:
        """The user's interpreter or program, if it was adopted."""
        return self.adopted or (self.program if not self.built else None)

    @property
    def is_complete(self) -> bool:
        return (self.server or self.interpreter).exists()


def get_environment_path(engine: Engine, recipe: EnvironmentRecipe, device: Device = "cpu") -> Path:
    """The folder of this recipe's environment. Other pins or another Python have another folder: none is modified."""
    programs = [read_shipped(file) for _, file in recipe.programs]
    python = (sys.version_info[:2], sysconfig.get_platform(), os.environ.get("UV_PYTHON"))
    lock, _ = find_lock(engine.id, recipe, device)
    backend = choose_torch_backend(recipe.packages, device)
    optional = [one for one in (recipe.removes, recipe.bare, backend, lock.digest if lock else None) if one]
    what = repr((recipe.packages, recipe.programs, recipe.libraries, programs, python, *optional))
    return get_engines_dir() / engine.id / f"{engine.version}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


def get_compiled_dir(engine_id: str, version: str) -> Path:
    """The folder for what a version of an engine compiles for its models; it is removed with the engine."""
    return get_engines_dir() / engine_id / "compiled" / version


def find_environment(engine: Engine, device: Device = "cpu") -> EngineEnvironment | None:
    """The engine's environment for a device; an adopted one takes precedence."""
    if adopted := find_adopted(engine):
        return adopted
    recipe = engine.find_recipe(device)
    return read_environment(get_environment_path(engine, recipe, device)) if recipe is not None else None


def make_environment(
    engine: Engine, progress: Progress | None = None, device: Device = "cpu", *, own: bool = False
) -> EngineEnvironment:
    """The engine's environment, installed on the first call; `own`: bedplate's, even if another one was adopted."""
    progress = progress or SilentProgress()
    if not own and (adopted := find_adopted(engine)):
        return adopted
    recipe = _get_recipe(engine, device)
    path = get_environment_path(engine, recipe, device)
    if existing := read_environment(path):
        return existing
    ensure_writable(get_engines_dir())
    try:
        # One lock for all environments of an engine, outside the folder that a removal deletes.
        with hold_lock(get_engines_dir() / engine.id, f"installing {engine.name}", progress.note):
            return read_environment(path) or _install(engine, recipe, path, device, progress)
    except OSError as error:
        raise make_disk_failure(error, path.parent) from error
    except ExternalFailure as error:
        if engine.is_version_named and "unsatisfiable" in (error.cause or "") and (pin := recipe.engine_pin):
            raise _explain_missing_version(engine, pin[0], error) from error
        raise


def _explain_missing_version(engine: Engine, package: str, error: ExternalFailure) -> ExternalFailure:
    """The same error with the newest release that can be installed."""
    from bedplate.run.releases import ask_index

    newest = ask_index([package]).newest.get(package)
    hint = f"the newest release that can be installed here is {engine.id}@{newest}" if newest else error.hint
    return ExternalFailure(f"installing {engine.name} {engine.version} failed", cause=error.cause, hint=hint)


def find_adopted(engine: Engine) -> EngineEnvironment | None:
    """The adopted environment of this engine; bedplate's programs for it are updated to this version."""
    path = _get_adopted_path(engine)
    record = _read_record(path)
    if record is None or (engine.is_version_named and record.version not in (engine.version, *NO_VERSION)):
        return None
    if not record.is_complete:
        what = "program" if record.program else "Python"
        raise ExternalFailure(
            f"the {what} that was registered for {engine.name} does not exist: {record.adopted_path}",
            hint=f"run `bedplate engines forget {engine.id}`, or register another one with `bedplate engines use`",
        )
    if engine.recipe is not None and record.adopted:
        _write_programs(engine.recipe, path / _PROGRAMS)
    return record


def read_registered_engines() -> dict[str, RegisteredEngine]:
    """The engines whose Python or program was registered with `bedplate engines use`."""
    found = (_read_record(manifest.parent) for manifest in sorted(get_engines_dir().glob(f"*/{_ADOPTED}/{_MANIFEST}")))
    return {
        one.engine: RegisteredEngine(one.version, frozenset(_parse_package_name(package) for package in one.packages))
        for one in found
        if one is not None and one.version not in NO_VERSION
    }


def check_version(engine: Engine) -> None:
    """Raises an error for a requested version that is neither registered nor can be installed."""
    if not engine.is_version_named or engine.version == engine.pinned_version or find_adopted(engine) is not None:
        return
    if engine.is_native or any(_is_version_of(recipe, engine) for recipe in map(engine.find_recipe, engine.built_for)):
        return
    registered = _read_record(_get_adopted_path(engine))
    raise UsageError(
        f"{engine.name} {engine.version} is not installed",
        cause=f"{registered.adopted_path} has version {registered.version}" if registered is not None else None,
        hint=f"register an environment that has it: bedplate engines use {engine.id} --python PATH",
    )


def _is_version_of(recipe: EnvironmentRecipe | None, engine: Engine) -> bool:
    """Whether the recipe installs this version of the engine."""
    return recipe is not None and recipe.engine_pin is not None and recipe.engine_pin[1] == engine.version


def adopt_python(engine: Engine, python: Path) -> EngineEnvironment:
    """Registers a Python that has the engine's packages; it is used instead of an environment of bedplate."""
    # Not resolved: Python finds its virtual environment by the path of the link to the interpreter.
    python = python.expanduser().absolute()
    if python.is_dir():
        python = _get_interpreter(python)
    if not python.is_file():
        raise UsageError(f"{python} is not a Python interpreter", hint="give a path such as ~/my-env/bin/python")
    check = engine.recipe.check if engine.recipe is not None else f"import {re.sub(r'[^a-z0-9]', '_', engine.id)}"
    if (why := _run_check(python, check, isolated=False)) is not None:
        raise ExternalFailure(
            f"{engine.name} does not run in {python}", cause=why, hint=_suggest_packages(engine.recipe, python)
        )
    ended = run_child([str(python), "-c", _DESCRIBE], limit_s=CHECK_LIMIT_S)
    version, *packages = ended.output.split() if ended.code == 0 else ["unknown"]
    found = EngineEnvironment(
        engine=engine.id,
        version=_find_version(packages, engine) or "unknown",
        path=str(_get_adopted_path(engine)),
        packages=tuple(packages),
        python=version,
        made_at=format_now(),
        disk_bytes=0,
        adopted=str(python),
    )
    return _write_adopted(engine, found)


def adopt_program(engine: Engine, program: Path) -> EngineEnvironment:
    """Registers a server program of the user, such as one from a package manager."""
    program = program.expanduser().absolute()
    if engine.build is None:
        raise UsageError(
            f"{engine.name} is a Python package, not a separate program",
            hint=f"bedplate engines use {engine.id} --python PATH",
        )
    if program.is_dir():
        program /= engine.build.programs[0]
    if not program.is_file():
        raise UsageError(f"{program} is not a program", hint=f"give a path such as /opt/bin/{engine.build.programs[0]}")
    version, why = read_program_version(program)
    if version is None:
        raise ExternalFailure(f"{program} does not run", cause=why, hint="check that it was built for this machine")
    found = EngineEnvironment(
        engine=engine.id,
        version=version,
        path=str(_get_adopted_path(engine)),
        packages=(),
        python="",
        made_at=format_now(),
        disk_bytes=0,
        program=str(program),
    )
    return _write_adopted(engine, found)


def read_program_version(
    program: Path, env: Mapping[str, str] | None = None, limit_s: float = CHECK_LIMIT_S
) -> tuple[str | None, str]:
    """The version that `--version` prints, or why it fails."""
    try:
        ended = run_child([str(program), "--version"], env=env, limit_s=limit_s)
    except (TimeoutError, OSError) as error:
        return None, str(error)
    if ended.code != 0:
        return None, (ended.output.strip().splitlines() or [describe_exit(ended.code)])[-1]
    return parse_version(ended.output) or "unknown", ""


def parse_version(text: str) -> str | None:
    """Finds the version in the output of `--version`."""
    found = re.search(r"version:?\s+v?(\S+)(?:\s+\((?:[^)]*\b)?(\w+)\))?", text)
    return "-".join(filter(None, found.groups())) if found else None


def _write_adopted(engine: Engine, found: EngineEnvironment) -> EngineEnvironment:
    path = Path(found.path)
    try:
        with hold_lock(path.parent, f"installing {engine.name}"):
            if engine.recipe is not None and found.adopted:
                _write_programs(engine.recipe, path / _PROGRAMS)
            ensure_writable(path)
            _write_atomically(path / _MANIFEST, msgspec.json.encode(found))
    except OSError as error:
        raise make_disk_failure(error, path) from error
    return found


def forget_environment(engine: Engine) -> EngineEnvironment:
    """Removes the record of an adopted Python or program; the Python or program itself is not changed."""
    path = _get_adopted_path(engine)
    record = _read_record(path)
    if record is None:
        raise UsageError(
            f"no Python or program is registered for {engine.name}",
            hint=f"bedplate engines use {engine.id} --python PATH registers one",
        )
    try:
        with hold_lock(path.parent, f"installing {engine.name}"):
            (path / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
    except OSError as error:
        raise make_disk_failure(error, path) from error
    return record


def list_installed() -> list[EngineEnvironment]:
    found = (read_environment(manifest.parent) for manifest in sorted(get_engines_dir().glob(f"*/*/{_MANIFEST}")))
    return [environment for environment in found if environment is not None]


def list_installed_versions(engine_id: str) -> list[str]:
    """The installed versions of an engine, adopted and native ones included."""
    return list(dict.fromkeys(one.version for one in list_installed() if one.engine == engine_id))


def resolve_version(engine_id: str, text: str) -> str:
    """ID@VERSION from what a user wrote after the @: see `Engine.find_version`."""
    version = load_engines()[engine_id].find_version(text.removeprefix("v"), list_installed_versions(engine_id))
    return require_release(engine_id, version)


def require_release(engine_id: str, version: str) -> str:
    """ID@VERSION of a release or an installed version. Of others, the pinned packages would bear their name."""
    build = load_engines()[engine_id].build
    built = build.version if build is not None else None
    if version != built and not RELEASE.fullmatch(version) and version not in list_installed_versions(engine_id):
        raise UsageError(
            f"{engine_id} {version!r} is neither a release nor installed", hint=f"name a release: {engine_id}@1.2.3"
        )
    return f"{engine_id}@{version}"


def uninstall_version(engine_id: str, version: str) -> list[EngineEnvironment]:
    """Removes the environments of one version of an engine; the other versions are not changed."""
    found = [one for one in list_installed() if (one.engine, one.version) == (engine_id, version)]
    if not found:
        there = ", ".join(list_installed_versions(engine_id)) or "none"
        raise UsageError(f"{engine_id} {version} is not installed", hint=f"installed versions: {there}")
    for environment in found:
        if environment.adopted_path is not None:
            hint = f"bedplate engines forget {engine_id} stops using it"
            raise UsageError(f"{engine_id} {version} was not installed by bedplate", hint=hint)
    compiled = get_compiled_dir(engine_id, version)
    _remove_folders(engine_id, [*(Path(one.path) for one in found), *([compiled] if compiled.exists() else [])])
    return found


def uninstall_environment(environment: EngineEnvironment) -> None:
    """Removes one environment that bedplate installed."""
    _remove_folders(environment.engine, [Path(environment.path)])


def _remove_folders(engine_id: str, folders: Sequence[Path]) -> None:
    try:
        with hold_lock(get_engines_dir() / engine_id, f"installing {engine_id}"):
            for folder in folders:
                # The manifest first: an interrupted removal must not leave a part that looks complete.
                (folder / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)
    except OSError as error:
        raise make_disk_failure(error, get_engines_dir() / engine_id) from error


def uninstall_engine(engine_id: str) -> list[EngineEnvironment]:
    """Removes all environments of an engine, including other versions and unfinished ones."""
    folder = get_engines_dir() / engine_id
    if not folder.is_dir():
        raise UsageError(f"{engine_id} is not installed", hint="bedplate engines lists the installed engines")
    try:
        with hold_lock(folder, f"installing {engine_id}"):
            removed = [environment for environment in list_installed() if environment.engine == engine_id]
            for environment in removed:
                # The manifest first: an interrupted removal must not leave a part that looks complete.
                (Path(environment.path) / _MANIFEST).unlink()
            shutil.rmtree(folder)
    except OSError as error:
        raise make_disk_failure(error, folder) from error
    return removed


def build_command(environment: EngineEnvironment, launch: Launch, *, wrapped: bool = False) -> list[str]:
    """The command that executes the launch in this environment; `wrapped`: with a key check in front of its server."""
    program, *arguments = launch.argv
    if (server := environment.server) is not None:
        # A launch may name the program by the folder of a manual build.
        return [str(server.parent / PurePath(program).name), *arguments]
    # -I ignores the working directory and PYTHONPATH, except in the user's own environment.
    python = [str(environment.interpreter), *([] if environment.adopted else ["-I"])]
    if wrapped:
        python.append(str(importlib.resources.files("bedplate.engines.shipped") / "require_key.py"))
    if program == "python":
        return [*python, *arguments]
    # By the interpreter, not by the script's shebang, which cannot contain long paths or spaces.
    script = environment.programs / PurePath(program).name
    if not script.exists():
        script = environment.interpreter.parent / program
    return [*python, str(script), *arguments]


def add_library_path(environment: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with the environment's borrowed libraries in LD_LIBRARY_PATH, if it has any."""
    borrowed = environment / _BORROWED
    if not borrowed.is_dir():
        return dict(given)
    paths = [str(borrowed), *filter(None, [given.get("LD_LIBRARY_PATH")])]
    return {**given, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def list_borrowed_libraries(environment: EngineEnvironment) -> list[Path]:
    """The libraries in an environment that came from another package."""
    return sorted((Path(environment.path) / _BORROWED).glob("*"))


def _get_recipe(engine: Engine, device: Device) -> EnvironmentRecipe:
    recipe = engine.find_recipe(device)
    if recipe is None:
        raise ExternalFailure(
            f"this version of bedplate cannot install {engine.name}",
            hint=f"register an existing installation: bedplate engines use {engine.id} --python PATH",
        )
    return recipe


def _install(
    engine: Engine, recipe: EnvironmentRecipe, path: Path, device: Device, progress: Progress
) -> EngineEnvironment:
    check_free_space(ensure_writable(path.parent), recipe.disk_bytes + recipe.download_bytes, engine.name)
    for leftover in path.parent.glob(".making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    packages = ", ".join(package.partition(";")[0] for package in recipe.packages)
    progress.note(f"installing {engine.name} ({packages}, {format_size(recipe.download_bytes)}) to {path}")
    what = f"installing {engine.name}"
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent, ignore_cleanup_errors=True) as holder:
        staging = Path(holder) / "env"
        with progress.step(what, recipe.disk_bytes) as done:
            run_uv(["venv", "--relocatable", "--python", find_engine_python(), str(staging)], what, path.parent)
            found = find_lock(engine.id, recipe, device, _read_python_version(staging))
            if found.reason is not None and list_pinned_packages(engine.id) is None:
                progress.note(f"{engine.name} is not locked: {found.reason}")
            _install_packages(engine, recipe, staging, device, found, done)
        _write_programs(recipe, _get_interpreter(staging).parent)
        for library in recipe.libraries:
            _copy_borrowed_library(engine, recipe, library, staging, progress)
        _check_installation(engine, recipe, staging)
        environment = EngineEnvironment(
            engine=engine.id,
            version=engine.version or "",
            path=str(path),
            packages=_list_packages(staging),
            python=_read_python_version(staging),
            made_at=format_now(),
            disk_bytes=measure_disk_bytes(staging),
            locked=found.reason is None,
        )
        store_environment(environment, staging)
    return environment


def _install_packages(
    engine: Engine,
    recipe: EnvironmentRecipe,
    staging: Path,
    device: Device,
    found: FoundLock,
    done: Callable[[int], None],
) -> None:
    """Installs the packages of a recipe: those of a bundle, those of its lock, or those that uv resolves."""
    what, folder = f"installing {engine.name}", staging.parent
    install = ["pip", "install", "--python", str(_get_interpreter(staging))]
    backend, python = choose_torch_backend(recipe.packages, device), _read_python_version(staging)
    # A bundle contains the exact packages, and nothing else.
    if (pinned := list_pinned_packages(engine.id)) is not None:
        run_uv([*install, *pinned], what, folder, done)
        return
    install += list_build_options()
    if (lock := found.lock) is not None:
        run_uv([*install, *_write_requirements(lock.requirements, folder)], what, folder, done)
        if lock.elsewhere:
            run_uv([*install, "--no-deps", *build_torch_arguments(lock.elsewhere, backend, python)], what, folder, done)
        return
    run_uv([*install, *build_torch_arguments(recipe.packages, backend, python)], what, folder, done)
    if recipe.bare:
        run_uv([*install, "--no-deps", *recipe.bare], what, folder)
    if recipe.removes:
        run_uv(["pip", "uninstall", *install[2:4], *recipe.removes], what, folder)


def _write_requirements(requirements: str, folder: Path) -> list[str]:
    """Writes a lock into `folder`; returns the arguments of `uv pip install` for it."""
    file = folder / "lock.txt"
    file.write_text(requirements, encoding="utf-8")
    return ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", str(file)]


def install_bare_packages(
    name: str, packages: Sequence[str], target: Path, what: str, only: Collection[str] | None = None
) -> None:
    """Installs packages without dependencies to a folder, from the lock `name` if it has them; `only`: some of them."""
    options = ["pip", "install", "--python", find_engine_python(), "--target", str(target), "--only-binary", ":all:"]
    wanted = [package for package in packages if only is None or package in only]
    lock, _ = find_lock(name, make_bare_recipe(*packages))
    if lock is None:
        run_uv([*options, "--no-deps", *wanted], what, target.parent)
        return
    requirements = select_packages(lock.requirements, map(_parse_package_name, wanted))
    run_uv([*options, *_write_requirements(requirements, target.parent)], what, target.parent)


def store_environment(environment: EngineEnvironment, staging: Path) -> None:
    """Moves an environment from `staging` to its place, atomically."""
    path = Path(environment.path)
    (staging / _MANIFEST).write_bytes(msgspec.json.encode(environment))
    if path.exists():  # left by an interrupted removal, or its Python was uninstalled
        shutil.rmtree(path)
    staging.rename(path)


def _copy_borrowed_library(
    engine: Engine, recipe: EnvironmentRecipe, library: BorrowedLibrary, staging: Path, progress: Progress
) -> None:
    """Copies a library that this system lacks into the environment, from a small package that contains it."""
    if not sys.platform.startswith("linux"):
        return
    load = f"import ctypes; ctypes.CDLL({library.soname!r})"
    if run_child([str(_get_interpreter(staging)), "-I", "-c", load], limit_s=CHECK_LIMIT_S).code == 0:
        return
    progress.note(f"this system has no {library.soname}; using the one in {library.package}")
    holder = staging / "carrier"
    install_libraries(engine, recipe, holder, [library.package])
    carried = next(holder.glob(library.file), None)
    if carried is None:
        raise ExternalFailure(
            f"this system has no {library.soname}, which the engine needs",
            hint="install it with the system's package manager, then try again",
        )
    (staging / _BORROWED).mkdir()
    shutil.copy2(carried, staging / _BORROWED / library.soname)
    shutil.rmtree(holder)


def install_libraries(engine: Engine, recipe: EnvironmentRecipe, target: Path, only: Collection[str]) -> None:
    """Installs packages that contain libraries which an engine's wheel expects from the system."""
    packages = [library.package for library in recipe.libraries]
    install_bare_packages(engine.id + LIBRARIES, packages, target, f"installing {engine.name}", only)


def _check_installation(engine: Engine, recipe: EnvironmentRecipe, staging: Path) -> None:
    why = explain_not_running(staging, recipe)
    if why is not None:
        raise ExternalFailure(
            f"{engine.name} is installed but does not run on this machine",
            cause=why,
            hint="please report this with the output of `bedplate doctor`",
        )


def explain_not_running(environment: Path, recipe: EnvironmentRecipe, limit_s: float | None = None) -> str | None:
    """Why an environment does not run, from a short check in it; `None` if it does."""
    record = _read_record(environment)
    if record is not None and record.server is not None:
        limit_s = CHECK_LIMIT_S if limit_s is None else limit_s
        return read_program_version(record.server, add_library_path(environment, os.environ), limit_s)[1] or None
    if record is not None and record.adopted:
        return _run_check(record.interpreter, recipe.check, isolated=False, limit_s=limit_s)
    env = add_library_path(environment, os.environ)
    return _run_check(_get_interpreter(environment), recipe.check, isolated=True, env=env, limit_s=limit_s)


def _run_check(
    python: Path, check: str, *, isolated: bool, env: Mapping[str, str] | None = None, limit_s: float | None = None
) -> str | None:
    argv = [str(python), *(["-I"] if isolated else []), "-c", check]
    try:
        ended = run_child(argv, env=env, limit_s=CHECK_LIMIT_S if limit_s is None else limit_s)
    except TimeoutError as error:
        return f"its check was {error}; a busy machine or a slow disk may explain that"
    except OSError as error:
        return error.strerror or str(error)
    return (ended.output.strip().splitlines() or [describe_exit(ended.code)])[-1] if ended.code else None


def describe_exit(code: int) -> str:
    """Describes how a child ended, from an exit status as shells report it."""
    if code - 128 in set(signal.Signals):
        return f"it was killed by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def read_environment(path: Path) -> EngineEnvironment | None:
    """Reads the environment at `path`; `None` also if its interpreter was uninstalled."""
    found = _read_record(path)
    return found if found is not None and found.is_complete else None


def _read_record(path: Path) -> EngineEnvironment | None:
    try:
        found = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=EngineEnvironment)
    except (OSError, msgspec.DecodeError):
        return None
    # The current path: BEDPLATE_HOME may have been moved.
    return msgspec.structs.replace(found, path=str(path))


def _get_adopted_path(engine: Engine) -> Path:
    return get_engines_dir() / engine.id / _ADOPTED


_DESCRIBE = """
import importlib.metadata as m, platform
found = {}
for d in m.distributions():  # of two with one name, the first is the one that is imported
    found.setdefault(d.metadata["Name"].lower().replace("_", "-"), d.version)
print(platform.python_version(), *sorted(f"{name}=={version}" for name, version in found.items()))
"""


_LIST_MISSING = """
import importlib.metadata, importlib.util, sys
def has(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:  # built from source, or a build under another name
        return importlib.util.find_spec(name.replace("-", "_")) is not None
print(*[name for name in sys.argv[1:] if not has(name)])
"""


def _suggest_packages(recipe: EnvironmentRecipe | None, python: Path) -> str:
    """Names the missing packages, if the engine itself is installed and others of its recipe are not."""
    wrong_place = "check that this is the environment with its packages"
    if recipe is None:
        return wrong_place
    pins = {_parse_package_name(pin): pin for pin in (*recipe.bare, *recipe.packages)}
    try:
        ended = run_child([str(python), "-c", _LIST_MISSING, *pins], limit_s=CHECK_LIMIT_S)
    except (TimeoutError, OSError):
        return wrong_place
    missing = ended.output.split() if ended.code == 0 else []
    if not missing or next(iter(pins)) in missing:
        return wrong_place
    packages = join_shell(pins[name] for name in missing)
    return f"install the missing packages: uv pip install --python {python} {packages}"


def _find_version(packages: Sequence[str], engine: Engine) -> str | None:
    """The version of the engine's own package: the first of its recipe, or the one named like the engine."""
    pin = engine.recipe.engine_pin if engine.recipe is not None else None
    for name in (*([_normalize_name(pin[0])] if pin is not None else []), _normalize_name(engine.id)):
        for package in packages:
            found, _, version = package.partition("==")
            if _normalize_name(found) == name:
                return version
    return None


def _parse_package_name(requirement: str) -> str:
    return _normalize_name(re.split(r"[\[=<>~; ]", requirement)[0])


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _write_programs(recipe: EnvironmentRecipe, folder: Path) -> None:
    for name, file in recipe.programs:
        content, program = read_shipped(file), folder / name
        if not program.is_file() or program.read_bytes() != content:
            program.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(program, content)
            program.chmod(0o755)


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_bytes(content)
    new.replace(path)


def format_now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _list_packages(environment: Path) -> tuple[str, ...]:
    import importlib.metadata

    folders = [str(folder) for folder in environment.rglob("site-packages") if folder.is_dir()]
    found = importlib.metadata.distributions(path=folders)
    return tuple(sorted({f"{distribution.name}=={distribution.version}" for distribution in found}))


def _read_python_version(environment: Path) -> str:
    for line in (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version_info", "version"):
            return value.strip()
    return "unknown"


def _get_interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def read_shipped(file: str) -> bytes:
    """The content of a program that bedplate installs into environments."""
    return (importlib.resources.files("bedplate.engines") / "shipped" / file).read_bytes()


def measure_disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
