"""Lock files: the exact packages of an engine environment, with hashes, for one platform.

They are requirements files in `engines/locks`, written by `make locks`. They name no package index.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import platform
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import msgspec

from bedplate.engines import EnvironmentRecipe
from bedplate.run.uv import choose_torch_backend, read_sysconfig
from bedplate.values.decision import Device

PLATFORMS = ("linux-x86_64", "linux-aarch64", "macos-arm64")
"""The platforms that have lock files."""
IGNORE_VARIABLE = "BEDPLATE_IGNORE_LOCKS"
LIBRARIES = ".libraries"
"""Ends the name of the lock of the packages that contain libraries that a system may lack."""
BUILD_TOOLS = "build-tools"
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_BLOCK = re.compile(r"^\S.*\n(?:[ \t].*\n)*", re.MULTILINE)
_HEADER = re.compile(r"^# (recipe|python|elsewhere|reason): (.*)$", re.MULTILINE)


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """One lock file."""

    recipe: str
    """The digest of the requirements that were resolved."""
    pythons: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Packages that the package index does not have, and that the lock therefore lacks."""
    reason: str | None = None
    """Why nothing is locked."""
    requirements: str = ""
    """The content of a requirements file."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.requirements.encode()).hexdigest()


class FoundLock(NamedTuple):
    """The lock of a recipe on this platform."""

    lock: Lock | None
    """The lock to install from. It may lack some packages: see `reason`."""
    reason: str | None = None
    """Why not every package is locked; `None`: every package is."""


def find_lock(name: str, recipe: EnvironmentRecipe, device: Device = "cpu", python: str | None = None) -> FoundLock:
    """The lock of an engine's recipe for this platform and for a Python version such as 3.12.4."""
    if os.environ.get(IGNORE_VARIABLE):
        return FoundLock(None, f"{IGNORE_VARIABLE} is set")
    backend = choose_torch_backend(recipe.packages, device)
    if backend not in (None, "cpu"):
        return FoundLock(None, "the build of torch depends on the GPU and its driver")
    where = find_platform()
    if where not in PLATFORMS:
        return FoundLock(None, f"there is no lock for {where}")
    digest = compute_recipe_digest(recipe, backend)
    lock = next((one for one in _read_locks(name, where) if one.recipe == digest), None)
    if lock is None:
        return FoundLock(None, f"there is no lock for these packages on {where}")
    if lock.reason is not None:
        return FoundLock(None, lock.reason)
    version = ".".join((python or _guess_python_version()).split(".")[:2])
    if version not in lock.pythons:
        return FoundLock(None, f"there is no lock for Python {version}; there is one for {', '.join(lock.pythons)}")
    missing = f"the package index lacks the CPU build of {', '.join(lock.elsewhere)}; the other packages are locked"
    return FoundLock(lock, missing if lock.elsewhere else None)


def _guess_python_version() -> str:
    """The version of the Python that environments get: the one that `UV_PYTHON` names, else bedplate's own."""
    named = re.search(r"\d\.\d+", os.environ.get("UV_PYTHON", ""))
    return named[0] if named else platform.python_version()


def find_platform() -> str:
    """This platform as lock files name it; other platforms have names too, but no lock files."""
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower()
    if system == "linux":
        machine = _MACHINES.get(machine, machine)
        if platform.libc_ver()[0] != "glibc":
            system = "linux without glibc"
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} on {system}-{machine}"
    if read_sysconfig().get("Py_GIL_DISABLED"):
        return f"free-threaded Python on {system}-{machine}"
    return f"{system}-{machine}"


def make_bare_recipe(*packages: str) -> EnvironmentRecipe:
    """A recipe of packages without their dependencies."""
    return EnvironmentRecipe(packages=(), bare=packages, download_bytes=0, disk_bytes=0, check="")


def compute_recipe_digest(recipe: EnvironmentRecipe, backend: str | None) -> str:
    """A digest of what decides which packages an environment has."""
    what = repr((recipe.packages, recipe.bare, recipe.removes, backend))
    return hashlib.sha256(what.encode()).hexdigest()[:16]


@cache
def _read_locks(name: str, where: str) -> tuple[Lock, ...]:
    """The locks of one engine for one platform; an engine may have several recipes."""
    folder = importlib.resources.files("bedplate.engines") / "locks"
    files = [
        file
        for file in folder.iterdir()
        if file.name == f"{name}-{where}.txt" or re.fullmatch(rf"{re.escape(name)}\+.*-{where}\.txt", file.name)
    ]
    return tuple(parse_lock(file.read_text(encoding="utf-8")) for file in sorted(files, key=lambda one: one.name))


def parse_lock(text: str) -> Lock:
    found = dict(_HEADER.findall(text))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return Lock(
        recipe=found.get("recipe", ""),
        pythons=tuple(found.get("python", "").split()),
        elsewhere=tuple(found.get("elsewhere", "").split()),
        reason=found.get("reason"),
        requirements="".join(f"{line}\n" for line in lines),
    )


def format_lock(title: str, lock: Lock) -> str:
    lines = [f"# {title}. Written by `make locks`.", f"# recipe: {lock.recipe}"]
    if lock.pythons:
        lines.append(f"# python: {' '.join(lock.pythons)}")
    if lock.elsewhere:
        lines.append(f"# elsewhere: {' '.join(lock.elsewhere)}")
    if lock.reason is not None:
        lines.append(f"# reason: {lock.reason}")
    return "\n".join(lines) + "\n" + lock.requirements


def select_packages(requirements: str, names: Iterable[str]) -> str:
    """The part of a requirements file that is about these packages."""
    wanted = set(names)
    blocks = _BLOCK.findall(requirements)
    return "".join(block for block in blocks if block.partition("==")[0] in wanted)


def list_hashes(requirements: str, python: str) -> dict[str, tuple[str, ...]]:
    """The hashes of each `name==version` in a lock that a Python version installs."""
    version = ".".join(python.split(".")[:2])
    found: dict[str, tuple[str, ...]] = {}
    for block in _BLOCK.findall(requirements):
        pythons = re.findall(r"python_version == '([\d.]+)'", block)
        if not pythons or version in pythons:
            found[block.split(maxsplit=1)[0]] = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", block))
    return found


def list_all_locks(name: str) -> tuple[Lock, ...]:
    """Every lock of an engine for this platform, whichever recipe it is for."""
    where = find_platform()
    return _read_locks(name, where) if where in PLATFORMS else ()
