"""One file per engine, found by listing this folder; third-party engines by the entry point `bedplate.engines`."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from pathlib import Path

from bedplate.engines.base import (
    BorrowedLibrary,
    BuildVariant,
    ComputeTarget,
    Engine,
    EngineState,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    OverlayRecipe,
    RegisteredEngine,
    SourceBuild,
)
from bedplate.engines.traits import (
    AdviceFlags,
    ClonedProgram,
    ContainerConversion,
    ContainerImage,
    ContainerTraits,
    DynamoWorker,
    EstimateTraits,
    KnownMistake,
    MetricNames,
    NotedOptions,
    PrivatePort,
    RayWorker,
    ServerFeatures,
    StoreStep,
    TableNames,
)
from bedplate.errors import ExternalFailure, UsageError
from bedplate.values import Plan

__all__ = [
    "AdviceFlags",
    "BorrowedLibrary",
    "BuildVariant",
    "ClonedProgram",
    "ComputeTarget",
    "ContainerConversion",
    "ContainerImage",
    "ContainerTraits",
    "DynamoWorker",
    "Engine",
    "EngineState",
    "EnvironmentRecipe",
    "EstimateTraits",
    "Features",
    "KnownFailure",
    "KnownMistake",
    "MemoryUse",
    "MetricNames",
    "NotedOptions",
    "OverlayRecipe",
    "PrivatePort",
    "RayWorker",
    "RegisteredEngine",
    "ServerFeatures",
    "SourceBuild",
    "StoreStep",
    "TableNames",
    "get_engine",
    "get_plan_engine",
    "get_registered_engine",
    "load_engines",
]  # fmt: skip


SHARED_MODULES = (
    "base", "checks", "knobs", "mistakes", "names", "parsers", "quantizations", "roles", "shared", "shipped", "traits",
    "transformers_models", "visible", "vllm_accelerators",
)  # fmt: skip
"""Modules that are not an engine of their own; every other module of this folder is one."""


ENTRY_POINTS = "bedplate.engines"
"""The group of entry points by which other packages add engines."""


@functools.cache
def load_engines() -> dict[str, Engine]:
    found: dict[str, Engine] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name not in SHARED_MODULES:
            one: Engine = importlib.import_module(f"{__name__}.{module.name}").ENGINE
            found[one.id] = one
    if _has_packages_with_engines():
        found.update(_load_engines_of_packages())
    return found


def _load_engines_of_packages() -> dict[str, Engine]:
    from importlib.metadata import entry_points

    found: dict[str, Engine] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            one = point.load()
        except Exception as error:
            raise ExternalFailure(
                f"the engine {point.name} of the package {point.dist.name if point.dist else '?'} cannot be loaded",
                cause=f"{type(error).__name__}: {error}",
                hint="update or uninstall that package",
            ) from error
        found[one.id] = one
    return found


def _has_packages_with_engines() -> bool:
    """Whether an installed package may have an engine. Without one, `importlib.metadata` is not imported: that takes
    a twentieth of the time of a plan."""
    for folder in map(Path, sys.path):
        if folder.is_file():
            return True  # an archive
        if not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.name.endswith(("-info", ".egg"))]
        for info in found:
            points = info / "entry_points.txt"
            if info.suffix == ".egg" or (points.exists() and ENTRY_POINTS.encode() in points.read_bytes()):
                return True
    return False


@functools.cache
def get_engine(name: str) -> Engine:
    """An engine by its id, or in one version by ID@VERSION."""
    import difflib

    known = load_engines()
    engine_id, at, version = name.partition("@")
    if engine_id in known and not at:
        return known[engine_id]
    if engine_id in known and version:
        return known[engine_id].at_version(version)
    near = difflib.get_close_matches(engine_id, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"no engine is called {name!r}", hint=f"{hint}known: {', '.join(known)}")


@functools.lru_cache(maxsize=32)
def get_registered_engine(engine_id: str, environment: RegisteredEngine) -> Engine:
    """An engine as it is in the user's environment."""
    return load_engines()[engine_id].in_environment(environment)


def get_plan_engine(plan: Plan) -> Engine:
    """The engine of a plan, in the version that the plan was made for."""
    one = get_engine(plan.engine)
    version = one.get_version(plan)
    return (one if version == one.version else get_engine(f"{plan.engine}@{version}")).adapt_to_plan(plan)
