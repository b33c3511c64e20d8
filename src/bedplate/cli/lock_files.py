"""Writes the lock files of engine environments: `python -m bedplate.cli.lock_files [--all] [NAME ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import bedplate.engines
from bedplate.engines import EnvironmentRecipe, load_engines
from bedplate.hosting.on_dynamo import DynamoPackages
from bedplate.hosting.on_ray import RayPackages
from bedplate.run.lock_maker import NEWEST_MACOS, LockMaker
from bedplate.run.locks import (
    BUILD_TOOLS,
    LIBRARIES,
    PLATFORMS,
    compute_recipe_digest,
    format_lock,
    make_bare_recipe,
    parse_lock,
)
from bedplate.run.native import CMAKE_PACKAGES

FOLDER = Path(bedplate.engines.__file__).parent / "locks"


class LockRequest(NamedTuple):
    """A recipe that gets a lock file for a platform."""

    name: str
    where: str
    recipe: EnvironmentRecipe

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}-{self.where}.txt"

    @property
    def digest(self) -> str:
        torch = self.where.startswith("linux") and any(one.startswith("torch==") for one in self.recipe.packages)
        return compute_recipe_digest(self.recipe, "cpu" if torch else None)

    @property
    def is_current(self) -> bool:
        return self.path.is_file() and parse_lock(self.path.read_text(encoding="utf-8")).recipe == self.digest


def list_requests() -> Iterator[LockRequest]:
    """Every recipe for a CPU or an Apple GPU. The build of PyTorch for other GPUs depends on the driver."""
    recipes: list[tuple[str, EnvironmentRecipe | None, tuple[str, ...]]] = []
    for engine in load_engines().values():
        if engine.cpu:
            recipes.append((engine.id, engine.find_recipe("cpu"), tuple(engine.systems)))
        if engine.recipe is not None and (packages := [library.package for library in engine.recipe.libraries]):
            recipes.append((engine.id + LIBRARIES, make_bare_recipe(*packages), ("linux",)))
    recipes += [
        ("ray", RayPackages().find_recipe("cpu"), ("linux", "macos")),
        ("dynamo", DynamoPackages(real=False).find_recipe("cpu"), ("linux",)),
        ("dynamo+workers", DynamoPackages(real=True).find_recipe("cpu"), ("linux",)),
        (BUILD_TOOLS, make_bare_recipe(*CMAKE_PACKAGES), ("linux", "macos")),
    ]
    for name, recipe, systems in recipes:
        for where in PLATFORMS:
            if recipe is not None and where.split("-")[0] in systems:
                yield LockRequest(name, where, recipe)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lock_files", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these locks, even if they are current")
    parser.add_argument("--all", action="store_true", help="resolve every lock again, with the newest dependencies")
    asked = parser.parse_args(arguments)
    # Only the index counts: a local folder may contain packages that others do not have.
    for variable in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_TORCH_BACKEND"):
        os.environ.pop(variable, None)
    os.environ["MACOSX_DEPLOYMENT_TARGET"] = NEWEST_MACOS  # wheels for older versions are kept as well
    FOLDER.mkdir(exist_ok=True)
    requests = list(list_requests())
    for stale in set(FOLDER.glob("*.txt")) - {request.path for request in requests}:
        stale.unlink()
    with tempfile.TemporaryDirectory() as folder:
        maker = LockMaker(Path(folder))
        for request in requests:
            if request.name not in asked.names if asked.names else request.is_current and not asked.all:
                continue
            lock = maker.make_lock(request.recipe, request.where)
            title = f"Locked packages: {request.name} on {request.where}"
            request.path.write_text(format_lock(title, lock), encoding="utf-8")
            state = lock.reason or f"Python {', '.join(lock.pythons)}"
            print(f"{request.path.name}: {state}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
