"""Newest releases of engine packages on the package index, read with uv and the user's own settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from bedplate.engines import Engine
from bedplate.run.transport import refuse_plain_indexes
from bedplate.run.uv import build_uv_environment, find_uv

ASK_LIMIT_S = 60.0
QUIETLY = ("--no-deps", "--no-header", "--no-annotate", "--quiet")


def find_package(engine: Engine) -> tuple[str, str] | None:
    """The package of an engine and the version that bedplate pins; None if it has no package."""
    for text in engine.recipe.packages if engine.recipe is not None else ():
        found = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^;\s]+)(?:\s*;.*)?", text)
        if found is not None:
            return found[1], found[2]
    return None


def find_newest(packages: Iterable[str]) -> dict[str, str]:
    """The newest release of each package that can be installed here. Packages that cannot be resolved are left out."""
    found: dict[str, str] = {}
    env = build_uv_environment(os.environ)
    refuse_plain_indexes(env)
    for package in packages:
        command = [find_uv(), "pip", "compile", "-", *QUIETLY, "--refresh-package", package]
        try:
            done = subprocess.run(
                command, input=package, capture_output=True, text=True, timeout=ASK_LIMIT_S,
                env=env, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            continue
        found |= parse_requirements(done.stdout) if done.returncode == 0 else {}
    return found


def parse_requirements(text: str) -> dict[str, str]:
    """Versions in a compiled requirements file, by package name."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;#\\]+)", line):
            found[match[1]] = match[2]
    return found
