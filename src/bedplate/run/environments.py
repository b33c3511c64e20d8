"""Engines live apart: each in an environment of its own, pinned, and either whole or not there."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import importlib.resources
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bedplate.engines import BorrowedLibrary, Engine, Recipe
from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.home import disk_failure, engines_dir, locked, need_free, writable
from bedplate.run.child import run_child
from bedplate.run.progress import Progress, Silent
from bedplate.run.uv import python_for_engines, run_uv
from bedplate.values import Launch
from bedplate.values.units import size

_MANIFEST = "bedplate.json"
"""Written last, inside of a folder that is then renamed: whoever sees it sees a finished environment."""
CHECK_LIMIT_S = 300.0
"""Importing a large package from a slow disk takes a while; after this it hangs."""


_BORROWED = "borrowed"
"""The folder in an environment for libraries that the system lacks."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One installed engine."""

    engine: str
    version: str
    path: str
    packages: tuple[str, ...]
    python: str
    made_at: str
    disk_bytes: int

    @property
    def interpreter(self) -> Path:
        return _interpreter(Path(self.path))


def environment_path(engine: Engine, recipe: Recipe) -> Path:
    """Where this recipe's environment is. Another pin or Python is another folder: none is changed in place."""
    shipped = [_shipped(file).read_bytes() for _, file in recipe.programs]
    python = (sys.version_info[:2], sysconfig.get_platform(), os.environ.get("UV_PYTHON"))
    what = repr((recipe.packages, recipe.programs, recipe.libraries, shipped, python))
    return engines_dir() / engine.id / f"{engine.version}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


def find_environment(engine: Engine) -> Environment | None:
    return _read(environment_path(engine, _recipe(engine)))


def make_environment(engine: Engine, progress: Progress | None = None) -> Environment:
    """The engine's environment, installed on the first call."""
    progress = progress or Silent()
    recipe = _recipe(engine)
    path = environment_path(engine, recipe)
    if there := _read(path):
        return there
    writable(engines_dir())
    try:
        # One lock for all environments of an engine, outside of the folder that `remove` takes away.
        with locked(engines_dir() / engine.id, f"installing {engine.name}", progress.note):
            return _read(path) or _install(engine, recipe, path, progress)
    except OSError as error:
        raise disk_failure(error, path.parent) from error


def installed() -> list[Environment]:
    found = (_read(manifest.parent) for manifest in sorted(engines_dir().glob(f"*/*/{_MANIFEST}")))
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
    bin_folder = environment.interpreter.parent
    program, *arguments = launch.argv
    # Through the interpreter and not by the script's first line, which cannot hold long paths or spaces.
    return [str(environment.interpreter), "-I", str(bin_folder / program), *arguments]


def variables(environment: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with the environment's borrowed libraries found where there are any."""
    borrowed = environment / _BORROWED
    if not borrowed.is_dir():
        return dict(given)
    paths = [str(borrowed), *filter(None, [given.get("LD_LIBRARY_PATH")])]
    return {**given, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _recipe(engine: Engine) -> Recipe:
    if engine.recipe is None:
        raise OutsideFailed(
            f"this version of bedplate cannot install {engine.name}", hint="bedplate engines lists what it can"
        )
    return engine.recipe


def _install(engine: Engine, recipe: Recipe, path: Path, progress: Progress) -> Environment:
    need_free(writable(path.parent), recipe.disk_bytes + recipe.download_bytes, engine.name)
    for leftover in path.parent.glob(".making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    progress.note(f"installing {engine.name} ({', '.join(recipe.packages)}, {size(recipe.download_bytes)}) to {path}")
    what = f"installing {engine.name}"
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent, ignore_cleanup_errors=True) as holder:
        staging = Path(holder) / "env"
        with progress.step(what, recipe.disk_bytes) as done:
            run_uv(["venv", "--relocatable", "--python", python_for_engines(), str(staging)], what, path.parent)
            python = str(_interpreter(staging))
            run_uv(["pip", "install", "--python", python, *recipe.packages], what, path.parent, done)
        for name, file in recipe.programs:
            program = _interpreter(staging).parent / name
            program.write_bytes(_shipped(file).read_bytes())
            program.chmod(0o755)
        for library in recipe.libraries:
            _borrow(library, staging, what, progress)
        _check(engine, recipe, staging)
        environment = Environment(
            engine=engine.id,
            version=engine.version or "",
            path=str(path),
            packages=_packages(staging),
            python=_python_version(staging),
            made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            disk_bytes=_disk_bytes(staging),
        )
        (staging / _MANIFEST).write_bytes(msgspec.json.encode(environment))
        if path.exists():  # what a cut-short removal left behind, or one whose Python is gone
            shutil.rmtree(path)
        staging.rename(path)
    return environment


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
    try:
        ended = run_child(
            [str(_interpreter(environment)), "-I", "-c", recipe.check],
            env=variables(environment, os.environ),
            limit_s=CHECK_LIMIT_S if limit_s is None else limit_s,
        )
    except TimeoutError as error:
        return str(error)
    return (ended.output.strip().splitlines() or [_status(ended.code)])[-1] if ended.code else None


def _status(code: int) -> str:
    if code - 128 in set(signal.Signals):
        return f"it was ended by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def _read(path: Path) -> Environment | None:
    """What is installed there; `None` also for one whose interpreter was uninstalled from under it."""
    try:
        found = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Environment)
    except (OSError, msgspec.DecodeError):
        return None
    # Where it is now: BEDPLATE_HOME may have been moved since.
    return msgspec.structs.replace(found, path=str(path)) if _interpreter(path).exists() else None


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


def _shipped(file: str) -> importlib.resources.abc.Traversable:
    return importlib.resources.files("bedplate.engines") / "shipped" / file


def _disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
