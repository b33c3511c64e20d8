"""Makes lock files: resolves a recipe for each Python version of a platform, and keeps versions and hashes."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bedplate.engines import EnvironmentRecipe
from bedplate.errors import ExternalFailure
from bedplate.run.locks import Lock, compute_recipe_digest
from bedplate.run.uv import find_engine_python, run_uv
from bedplate.run.wheels import normalize_name

TARGETS = {
    "linux-x86_64": ("x86_64-manylinux_2_28", "x86_64-manylinux_2_40"),
    "linux-aarch64": ("aarch64-manylinux_2_28", "aarch64-manylinux_2_40"),
    "macos-arm64": ("aarch64-apple-darwin",),
}
"""uv's names of each platform. Packages that run on an older system are preferred."""
NEWEST_MACOS = "26.0"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_TORCH = "torch"
_PINNED = re.compile(r"^([a-z0-9][a-z0-9-]*)==\S+", re.IGNORECASE)
_PARENT = re.compile(r"^ +# +(?:via )?(\S.*)$")


class LockedPackage(NamedTuple):
    version: str
    hashes: tuple[str, ...]


Resolution = dict[str, LockedPackage]


class LockMaker:
    """Resolves recipes with uv in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_lock(self, recipe: EnvironmentRecipe, where: str) -> Lock:
        """The lock of a recipe for a platform; a lock with a reason if no Python version can be locked."""
        torch = next((one for one in recipe.packages if re.match(r"torch==", one)), None)
        # On Linux, the index has only the CUDA build of PyTorch.
        elsewhere = (torch,) if torch is not None and where.startswith("linux") else ()
        found: dict[str, Resolution] = {}
        failures: list[str] = []
        for python in PYTHONS:
            for target in TARGETS[where]:
                try:
                    found[python] = self._resolve_recipe(recipe, target, python, without_torch=bool(elsewhere))
                    break
                except ExternalFailure as error:
                    failures.append(_shorten(error.cause or error.message))
        digest = compute_recipe_digest(recipe, "cpu" if elsewhere else None)
        if not found:
            return Lock(recipe=digest, reason=failures[-1])
        return Lock(recipe=digest, pythons=tuple(found), elsewhere=elsewhere, requirements=format_requirements(found))

    def _resolve_recipe(
        self, recipe: EnvironmentRecipe, target: str, python: str, *, without_torch: bool
    ) -> Resolution:
        found: Resolution = {}
        if without_torch:
            found = self._resolve_for_cpu_torch(recipe.packages, target, python)
        elif recipe.packages:
            found = self._resolve(recipe.packages, target, python)
        if recipe.bare:
            found |= self._resolve(recipe.bare, target, python, "--no-deps")
        removed = {normalize_name(name) for name in recipe.removes}
        return {name: one for name, one in found.items() if name not in removed}

    def _resolve_for_cpu_torch(self, packages: Sequence[str], target: str, python: str) -> Resolution:
        """The packages that are needed with PyTorch's CPU build, which depends on what its build for macOS does."""
        torch = next(one for one in packages if one.startswith("torch=="))
        on_macos = self._compile([torch], TARGETS["macos-arm64"][0], python, "requirements.txt")
        for_cpu = _list_children(parse_parents(on_macos), _TORCH)
        for_cuda = _list_children(parse_parents(self._compile([torch], target, python, "requirements.txt")), _TORCH)
        for_cuda -= for_cpu
        overrides = self.folder / "overrides.txt"
        # What the recipe itself pins takes precedence over what the CUDA build requires. Some packages require the CPU
        # build by its version, which the index lacks.
        pins = [one for one in packages if _parse_name(one) in {_TORCH, *for_cuda}]
        overrides.write_text("\n".join(pins) + "\n", encoding="utf-8")
        options = ["--overrides", str(overrides)]
        parents = parse_parents(self._compile(packages, target, python, "requirements.txt", *options))
        needed = {_parse_name(one) for one in packages} & parents.keys()
        pending = list(needed)
        while pending:
            parent = pending.pop()
            children = _list_children(parents, parent) - (for_cuda if parent == _TORCH else set())
            pending += children - needed
            needed |= children
        found = self._resolve(packages, target, python, *options)
        return {name: one for name, one in found.items() if name in needed - {_TORCH}}

    def _resolve(self, packages: Sequence[str], target: str, python: str, *options: str) -> Resolution:
        text = self._compile(packages, target, python, "pylock.toml", *options)
        found: Resolution = {}
        for package in tomllib.loads(text)["packages"]:
            hashes = sorted(wheel["hashes"]["sha256"] for wheel in package.get("wheels", ()))
            if not hashes:
                raise ExternalFailure(f"{package['name']} {package['version']} has no wheel with a hash")
            found[normalize_name(package["name"])] = LockedPackage(package["version"], tuple(hashes))
        return found

    def _compile(self, packages: Sequence[str], target: str, python: str, form: str, *options: str) -> str:
        wanted, result = self.folder / "wanted.in", self.folder / f"pylock.{form.removesuffix('.toml')}.toml"
        result.unlink(missing_ok=True)
        wanted.write_text("\n".join(packages) + "\n", encoding="utf-8")
        command = ["pip", "compile", str(wanted), "--format", form, "--output-file", str(result), "--quiet"]
        command += ["--no-header", "--only-binary", ":all:", "--annotation-style", "split", *options]
        command += ["--python", find_engine_python(), "--python-version", python, "--no-python-downloads"]
        run_uv([*command, "--python-platform", target], f"resolving for {target}", self.folder)
        return result.read_text(encoding="utf-8")


def parse_parents(text: str) -> dict[str, set[str]]:
    """For each package of a compiled requirements file, the packages that depend on it."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if pinned := _PINNED.match(line):
            name = normalize_name(pinned[1])
            found[name] = set()
        elif (parent := _PARENT.match(line)) and parent[1] != "via":
            found[name].add(parent[1] if parent[1].startswith("-r ") else normalize_name(parent[1].split("[")[0]))
    return found


def _list_children(parents: dict[str, set[str]], parent: str) -> set[str]:
    return {name for name, found in parents.items() if parent in found}


def _parse_name(requirement: str) -> str:
    return normalize_name(re.split(r"[\[=<>~!; ]", requirement)[0])


def format_requirements(found: dict[str, Resolution]) -> str:
    """A requirements file for several Python versions; a marker where not every version has the same wheels."""
    merged: dict[tuple[str, LockedPackage], list[str]] = defaultdict(list)
    for python, resolution in found.items():
        for name, package in resolution.items():
            merged[name, package].append(python)
    lines: list[str] = []
    for (name, package), pythons in sorted(merged.items(), key=lambda one: (one[0][0], one[1])):
        marker = "" if len(pythons) == len(found) else f" ; {_format_marker(pythons)}"
        hashes = (f"--hash=sha256:{one}" for one in package.hashes)
        lines.append(" \\\n    ".join([f"{name}=={package.version}{marker}", *hashes]))
    return "".join(f"{line}\n" for line in lines)


def _format_marker(pythons: Iterable[str]) -> str:
    return " or ".join(f"python_version == '{python}'" for python in pythons)


def _shorten(cause: str) -> str:
    """The first sentence of uv's explanation, on one line."""
    text = re.sub(r"\{[^}]*\}", "", " ".join(cause.split()))
    text = text.removeprefix("No solution found when resolving dependencies: ").removeprefix("Because ")
    return text.split(" and ")[0].split(", we can conclude")[0][:160]
