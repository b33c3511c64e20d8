"""What the package index has of the engines that bedplate installs. uv asks, with the user's own settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from bedplate.engines import Engine
from bedplate.run.uv import environment, uv_binary

ASK_LIMIT_S = 60.0
QUIETLY = ("--no-deps", "--no-header", "--no-annotate", "--quiet")


def package_of(engine: Engine) -> tuple[str, str] | None:
    """The package that an engine comes in, and the version that bedplate has pinned; `None`: in no package."""
    for text in engine.recipe.packages if engine.recipe is not None else ():
        found = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^;\s]+)(?:\s*;.*)?", text)
        if found is not None:
            return found[1], found[2]
    return None


def newest(packages: Iterable[str]) -> dict[str, str]:
    """The newest release of each that runs here; what the index does not have, or no index, is left out."""
    found: dict[str, str] = {}
    for package in packages:
        command = [uv_binary(), "pip", "compile", "-", *QUIETLY, "--refresh-package", package]
        try:
            done = subprocess.run(
                command, input=package, capture_output=True, text=True, timeout=ASK_LIMIT_S,
                env=environment(os.environ), check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            continue
        found |= parse(done.stdout) if done.returncode == 0 else {}
    return found


def parse(text: str) -> dict[str, str]:
    """Lines of a compiled requirements file, by the package's name."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;#\\]+)", line):
            found[match[1]] = match[2]
    return found
