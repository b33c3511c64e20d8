"""Engines live apart: each in an environment of its own, pinned, and either whole or not there."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import importlib.resources
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import msgspec

from bedplate.engines import BorrowedLibrary, Engine, Recipe
from bedplate.engines.base import NO_VERSION
from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.home import disk_failure, engines_dir, locked, need_free, writable
from bedplate.progress import Progress, Silent
from bedplate.run.child import run_child
from bedplate.run.uv import pinned_packages, python_for_engines, run_uv, torch_arguments, torch_backend
from bedplate.values import Launch
from bedplate.values.decision import Device
from bedplate.values.units import size

_MANIFEST = "bedplate.json"
"""Written last, inside of a folder that is then renamed: whoever sees it sees a finished environment."""
CHECK_LIMIT_S = 300.0
"""Importing a large package from a slow disk takes a while; after this it hangs."""


_BORROWED = "borrowed"
"""The folder in an environment for libraries that the system lacks."""
_ADOPTED, _PROGRAMS = "adopted", "programs"
"""In the place of a version: the record of a Python that is not ours, and bedplate's programs for the engine in it."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One installed engine."""

    engine: str
    version: str
    path: str
    packages: tuple[str, ...]
    python: str
    made_at: str
    disk_bytes: int
    adopted: str | None = None
    """The interpreter of somebody else's environment, which bedplate starts and never changes."""
    program: str | None = None
    """The engine's server where it is no Python's: a program of somebody else's, or one that was built here."""
    built: bool = False
    """Whether bedplate built it here, from its source."""
    notes: tuple[str, ...] = ()
    """What was found when it was built."""

    @property
    def interpreter(self) -> Path:
        return Path(self.adopted) if self.adopted else _interpreter(Path(self.path))

    @property
    def programs(self) -> Path:
        """Where bedplate's own programs for the engine are."""
        return Path(self.path) / _PROGRAMS if self.adopted else self.interpreter.parent

    @property
    def server(self) -> Path | None:
        """The program that is started as it is; relative to the environment where it is bedplate's own."""
        return Path(self.path) / self.program if self.program else None

    @property
    def theirs(self) -> str | None:
        """What of somebody else's it is, if it is."""
        return self.adopted or (self.program if not self.built else None)

    @property
    def whole(self) -> bool:
        return (self.server or self.interpreter).exists()


def environment_path(engine: Engine, recipe: Recipe, device: Device = "cpu") -> Path:
    """Where this recipe's environment is. Another pin or Python is another folder: none is changed in place."""
    programs = [shipped(file) for _, file in recipe.programs]
    python = (sys.version_info[:2], sysconfig.get_platform(), os.environ.get("UV_PYTHON"))
    more = [one for one in (recipe.removes, recipe.bare, torch_backend(recipe.packages, device)) if one]
    what = repr((recipe.packages, recipe.programs, recipe.libraries, programs, python, *more))
    return engines_dir() / engine.id / f"{engine.version}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


def compiled_dir(engine_id: str, version: str) -> Path:
    """Where a version of an engine keeps what it compiles for its models; it goes with the engine."""
    return engines_dir() / engine_id / "compiled" / version


def find_environment(engine: Engine, device: Device = "cpu") -> Environment | None:
    """The engine's environment for what it is to compute on; one that was adopted goes before bedplate's own."""
    if adopted := find_adopted(engine):
        return adopted
    recipe = engine.recipe_for(device)
    return read(environment_path(engine, recipe, device)) if recipe is not None else None


def make_environment(
    engine: Engine, progress: Progress | None = None, device: Device = "cpu", *, own: bool = False
) -> Environment:
    """The engine's environment, installed on the first call; bedplate's `own` even where another was adopted."""
    progress = progress or Silent()
    if not own and (adopted := find_adopted(engine)):
        return adopted
    recipe = _recipe(engine, device)
    path = environment_path(engine, recipe, device)
    if there := read(path):
        return there
    writable(engines_dir())
    try:
        # One lock for all environments of an engine, outside of the folder that `remove` takes away.
        with locked(engines_dir() / engine.id, f"installing {engine.name}", progress.note):
            return read(path) or _install(engine, recipe, path, device, progress)
    except OSError as error:
        raise disk_failure(error, path.parent) from error


def find_adopted(engine: Engine) -> Environment | None:
    """What was named for this engine; a Python has bedplate's programs for it as they are in this version."""
    path = _adopted_path(engine)
    record = _record(path)
    if record is None or (engine.is_version_named and record.version not in (engine.version, *NO_VERSION)):
        return None
    if not record.whole:
        what = "program" if record.program else "Python"
        raise OutsideFailed(
            f"the {what} that was given for {engine.name} is gone: {record.theirs}",
            hint=f"bedplate engines forget {engine.id}, or name another with bedplate engines use",
        )
    if engine.recipe is not None and record.adopted:
        _put_programs(engine.recipe, path / _PROGRAMS)
    return record


def registered_versions() -> dict[str, str]:
    """The version of each engine whose Python or program was named with `bedplate engines use`."""
    found = (_record(manifest.parent) for manifest in sorted(engines_dir().glob(f"*/{_ADOPTED}/{_MANIFEST}")))
    return {one.engine: one.version for one in found if one is not None and one.version not in NO_VERSION}


def check_version(engine: Engine) -> None:
    """Raises where a version is asked for that is neither registered nor the one that bedplate installs."""
    if not engine.is_version_named or engine.version == engine.pinned_version or find_adopted(engine) is not None:
        return
    there = _record(_adopted_path(engine))
    raise BadQuestion(
        f"{engine.name} {engine.version} is not installed here",
        cause=f"{there.theirs} has version {there.version}" if there is not None else None,
        hint=f"bedplate engines use {engine.id} --python PATH takes one that has it; without a version, "
        f"{engine.pinned_version if there is None else there.version} is used",
    )


def adopt(engine: Engine, python: Path) -> Environment:
    """Takes a Python that has the engine's packages, instead of an environment of bedplate's own."""
    # As it is written: a virtual environment is known by the path of its link to an interpreter.
    python = python.expanduser().absolute()
    if python.is_dir():
        python = _interpreter(python)
    if not python.is_file():
        raise BadQuestion(f"{python} is no Python", hint="name an interpreter, such as ~/my-env/bin/python")
    check = engine.recipe.check if engine.recipe is not None else f"import {re.sub(r'[^a-z0-9]', '_', engine.id)}"
    if (why := _fails(python, check, isolated=False)) is not None:
        raise OutsideFailed(
            f"{engine.name} does not run in {python}", cause=why, hint=_hint_for_adopting(engine.recipe, python)
        )
    ended = run_child([str(python), "-c", _DESCRIBE], limit_s=CHECK_LIMIT_S)
    version, *packages = ended.output.split() if ended.code == 0 else ["unknown"]
    found = Environment(
        engine=engine.id,
        version=_version_among(packages, engine) or "unknown",
        path=str(_adopted_path(engine)),
        packages=tuple(packages),
        python=version,
        made_at=now(),
        disk_bytes=0,
        adopted=str(python),
    )
    return _adopted(engine, found)


def adopt_program(engine: Engine, program: Path) -> Environment:
    """Takes a server program of the user's own, such as one of a package manager, as it is."""
    program = program.expanduser().absolute()
    if engine.build is None:
        raise BadQuestion(
            f"{engine.name} is started in a Python, and is no program by itself",
            hint=f"bedplate engines use {engine.id} --python PATH",
        )
    if program.is_dir():
        program /= engine.build.programs[0]
    if not program.is_file():
        raise BadQuestion(
            f"{program} is no program", hint=f"name the file, such as /opt/bin/{engine.build.programs[0]}"
        )
    version, why = program_version(program)
    if version is None:
        raise OutsideFailed(f"{program} does not run", cause=why, hint="was it built for this machine?")
    found = Environment(
        engine=engine.id,
        version=version,
        path=str(_adopted_path(engine)),
        packages=(),
        python="",
        made_at=now(),
        disk_bytes=0,
        program=str(program),
    )
    return _adopted(engine, found)


def program_version(
    program: Path, env: Mapping[str, str] | None = None, limit_s: float = CHECK_LIMIT_S
) -> tuple[str | None, str]:
    """What `--version` says in one word, or why it says nothing."""
    try:
        ended = run_child([str(program), "--version"], env=env, limit_s=limit_s)
    except (TimeoutError, OSError) as error:
        return None, str(error)
    if ended.code != 0:
        return None, (ended.output.strip().splitlines() or [exit_words(ended.code)])[-1]
    return read_version(ended.output) or "unknown", ""


def read_version(text: str) -> str | None:
    """The version in what a program prints about itself."""
    found = re.search(r"version:?\s+v?(\S+)(?:\s+\((?:[^)]*\b)?(\w+)\))?", text)
    return "-".join(filter(None, found.groups())) if found else None


def _adopted(engine: Engine, found: Environment) -> Environment:
    path = Path(found.path)
    try:
        with locked(path.parent, f"installing {engine.name}"):
            if engine.recipe is not None and found.adopted:
                _put_programs(engine.recipe, path / _PROGRAMS)
            writable(path)
            _replace(path / _MANIFEST, msgspec.json.encode(found))
    except OSError as error:
        raise disk_failure(error, path) from error
    return found


def forget(engine: Engine) -> Environment:
    """Drops the record of an adopted Python or program; what belongs to its owner stays as it is."""
    path = _adopted_path(engine)
    record = _record(path)
    if record is None:
        raise BadQuestion(
            f"no Python was adopted for {engine.name}", hint=f"bedplate engines use {engine.id} --python PATH adopts"
        )
    try:
        with locked(path.parent, f"installing {engine.name}"):
            (path / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
    except OSError as error:
        raise disk_failure(error, path) from error
    return record


def installed() -> list[Environment]:
    found = (read(manifest.parent) for manifest in sorted(engines_dir().glob(f"*/*/{_MANIFEST}")))
    return [environment for environment in found if environment is not None]


def remove(engine_id: str) -> list[Environment]:
    """Removes all environments of an engine, those of other versions and unfinished ones too."""
    folder = engines_dir() / engine_id
    if not folder.is_dir():
        raise BadQuestion(f"{engine_id} is not installed", hint="bedplate engines lists what is")
    try:
        with locked(folder, f"installing {engine_id}"):
            gone = [environment for environment in installed() if environment.engine == engine_id]
            for environment in gone:
                # The manifest goes first: a removal that is cut short must not leave half an environment.
                (Path(environment.path) / _MANIFEST).unlink()
            shutil.rmtree(folder)
    except OSError as error:
        raise disk_failure(error, folder) from error
    return gone


def command(environment: Environment, launch: Launch) -> list[str]:
    """The launch as it must be executed in this environment."""
    program, *arguments = launch.argv
    if (server := environment.server) is not None:
        # A launch for whoever builds by hand names it by the folder that it is built in.
        return [str(server.parent / PurePath(program).name), *arguments]
    # Nothing of where the user stands or of their PYTHONPATH gets in, but for an environment of their own.
    python = [str(environment.interpreter), *([] if environment.adopted else ["-I"])]
    if program == "python":
        return [*python, *arguments]
    # Through the interpreter and not by the script's first line, which cannot hold long paths or spaces.
    script = environment.programs / PurePath(program).name
    if not script.exists():
        script = environment.interpreter.parent / program
    return [*python, str(script), *arguments]


def variables(environment: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with the environment's borrowed libraries found where there are any."""
    borrowed = environment / _BORROWED
    if not borrowed.is_dir():
        return dict(given)
    paths = [str(borrowed), *filter(None, [given.get("LD_LIBRARY_PATH")])]
    return {**given, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _recipe(engine: Engine, device: Device) -> Recipe:
    recipe = engine.recipe_for(device)
    if recipe is None:
        raise OutsideFailed(
            f"this version of bedplate cannot install {engine.name}",
            hint=f"bedplate engines use {engine.id} --python PATH takes one that is here",
        )
    return recipe


def _install(engine: Engine, recipe: Recipe, path: Path, device: Device, progress: Progress) -> Environment:
    need_free(writable(path.parent), recipe.disk_bytes + recipe.download_bytes, engine.name)
    for leftover in path.parent.glob(".making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    packages = ", ".join(package.partition(";")[0] for package in recipe.packages)
    progress.note(f"installing {engine.name} ({packages}, {size(recipe.download_bytes)}) to {path}")
    what = f"installing {engine.name}"
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent, ignore_cleanup_errors=True) as holder:
        staging = Path(holder) / "env"
        with progress.step(what, recipe.disk_bytes) as done:
            run_uv(["venv", "--relocatable", "--python", python_for_engines(), str(staging)], what, path.parent)
            python = str(_interpreter(staging))
            # A bundle has what all of this came to where it was made, and no more.
            pinned = pinned_packages(engine.id)
            backend = torch_backend(recipe.packages, device)
            wanted = pinned or torch_arguments(recipe.packages, backend, _python_version(staging))
            run_uv(["pip", "install", "--python", python, *wanted], what, path.parent, done)
            if recipe.bare and not pinned:
                run_uv(["pip", "install", "--python", python, "--no-deps", *recipe.bare], what, path.parent)
            if recipe.removes and not pinned:
                run_uv(["pip", "uninstall", "--python", python, *recipe.removes], what, path.parent)
        _put_programs(recipe, _interpreter(staging).parent)
        for library in recipe.libraries:
            _borrow(library, staging, what, progress)
        _check(engine, recipe, staging)
        environment = Environment(
            engine=engine.id,
            version=engine.version or "",
            path=str(path),
            packages=_packages(staging),
            python=_python_version(staging),
            made_at=now(),
            disk_bytes=disk_bytes(staging),
        )
        keep(environment, staging)
    return environment


def keep(environment: Environment, staging: Path) -> None:
    """Puts what was made in `staging` into its place, all of it at once."""
    path = Path(environment.path)
    (staging / _MANIFEST).write_bytes(msgspec.json.encode(environment))
    if path.exists():  # what a cut-short removal left behind, or one whose Python is gone
        shutil.rmtree(path)
    staging.rename(path)


def _borrow(library: BorrowedLibrary, staging: Path, what: str, progress: Progress) -> None:
    """Puts a library that this system lacks into the environment, out of a small package that carries it."""
    if not sys.platform.startswith("linux"):
        return
    load = f"import ctypes; ctypes.CDLL({library.soname!r})"
    if run_child([str(_interpreter(staging)), "-I", "-c", load], limit_s=CHECK_LIMIT_S).code == 0:
        return
    progress.note(f"this system has no {library.soname}: taking the one that {library.package} carries")
    holder = staging / "carrier"
    arguments = ["pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(holder), library.package]
    run_uv(arguments, what, staging)
    carried = next(holder.glob(library.file), None)
    if carried is None:
        raise OutsideFailed(
            f"this system has no {library.soname}, which the engine needs",
            hint="install it with the system's package manager, then start again",
        )
    (staging / _BORROWED).mkdir()
    shutil.copy2(carried, staging / _BORROWED / library.soname)
    shutil.rmtree(holder)


def _check(engine: Engine, recipe: Recipe, staging: Path) -> None:
    why = why_not(staging, recipe)
    if why is not None:
        raise OutsideFailed(
            f"{engine.name} was installed but does not run on this machine",
            cause=why,
            hint="please report this with the output of `bedplate doctor`",
        )


def why_not(environment: Path, recipe: Recipe, limit_s: float | None = None) -> str | None:
    """Why an environment does not run, by a few lines of Python in it; `None` when it does."""
    record = _record(environment)
    if record is not None and record.server is not None:
        limit_s = CHECK_LIMIT_S if limit_s is None else limit_s
        return program_version(record.server, variables(environment, os.environ), limit_s)[1] or None
    if record is not None and record.adopted:
        return _fails(record.interpreter, recipe.check, isolated=False, limit_s=limit_s)
    env = variables(environment, os.environ)
    return _fails(_interpreter(environment), recipe.check, isolated=True, env=env, limit_s=limit_s)


def _fails(
    python: Path, check: str, *, isolated: bool, env: Mapping[str, str] | None = None, limit_s: float | None = None
) -> str | None:
    argv = [str(python), *(["-I"] if isolated else []), "-c", check]
    try:
        ended = run_child(argv, env=env, limit_s=CHECK_LIMIT_S if limit_s is None else limit_s)
    except TimeoutError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return (ended.output.strip().splitlines() or [exit_words(ended.code)])[-1] if ended.code else None


def exit_words(code: int) -> str:
    """How a child ended, by its exit status as a shell has it."""
    if code - 128 in set(signal.Signals):
        return f"it was ended by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def read(path: Path) -> Environment | None:
    """What is installed there; `None` also for one whose interpreter was uninstalled from under it."""
    found = _record(path)
    return found if found is not None and found.whole else None


def _record(path: Path) -> Environment | None:
    try:
        found = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Environment)
    except (OSError, msgspec.DecodeError):
        return None
    # Where it is now: BEDPLATE_HOME may have been moved since.
    return msgspec.structs.replace(found, path=str(path))


def _adopted_path(engine: Engine) -> Path:
    return engines_dir() / engine.id / _ADOPTED


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


def _hint_for_adopting(recipe: Recipe | None, python: Path) -> str:
    """Which packages to install, where the engine itself is there and others of its recipe are not."""
    wrong_place = "is that the environment that has its packages?"
    if recipe is None:
        return wrong_place
    pins = {_package_name(pin): pin for pin in (*recipe.bare, *recipe.packages)}
    try:
        ended = run_child([str(python), "-c", _LIST_MISSING, *pins], limit_s=CHECK_LIMIT_S)
    except (TimeoutError, OSError):
        return wrong_place
    missing = ended.output.split() if ended.code == 0 else []
    if not missing or next(iter(pins)) in missing:
        return wrong_place
    return f"install what it lacks: uv pip install --python {python} {shlex.join(pins[name] for name in missing)}"


def _version_among(packages: Sequence[str], engine: Engine) -> str | None:
    """The version of the engine's own package: the first of its recipe, or the one of its name."""
    named = (engine.recipe.bare or engine.recipe.packages)[:1] if engine.recipe is not None else ()
    for wanted in (*named, engine.id):
        name = _package_name(wanted)
        for package in packages:
            found, _, version = package.partition("==")
            if _normal(found) == name:
                return version
    return None


def _package_name(requirement: str) -> str:
    return _normal(re.split(r"[\[=<>~; ]", requirement)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _put_programs(recipe: Recipe, folder: Path) -> None:
    for name, file in recipe.programs:
        content, program = shipped(file), folder / name
        if not program.is_file() or program.read_bytes() != content:
            program.parent.mkdir(parents=True, exist_ok=True)
            _replace(program, content)
            program.chmod(0o755)


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, also for those who read it in this moment."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_bytes(content)
    new.replace(path)


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _packages(environment: Path) -> tuple[str, ...]:
    folders = [str(folder) for folder in environment.rglob("site-packages") if folder.is_dir()]
    found = importlib.metadata.distributions(path=folders)
    return tuple(sorted({f"{distribution.name}=={distribution.version}" for distribution in found}))


def _python_version(environment: Path) -> str:
    for line in (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version_info", "version"):
            return value.strip()
    return "unknown"


def _interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def shipped(file: str) -> bytes:
    """A program that bedplate ships into environments."""
    return (importlib.resources.files("bedplate.engines") / "shipped" / file).read_bytes()


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
