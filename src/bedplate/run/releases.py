"""Releases of engine packages on the package index, read with uv and the user's own settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from bedplate.engines import Engine
from bedplate.engines.base import parse_version
from bedplate.errors import BedplateError
from bedplate.run.transport import refuse_plain_indexes
from bedplate.run.uv import (
    build_uv_environment,
    find_engine_python,
    find_uv,
    is_network_failure,
    list_build_options,
    parse_reasons,
)
from bedplate.values.decision import Device

ASK_LIMIT_S = 60.0
QUIETLY = ("--no-deps", "--no-header", "--no-annotate", "--quiet", "--color", "never")


class IndexAnswer(NamedTuple):
    """What the package index says about some packages."""

    newest: dict[str, str]
    """The newest release of each package that can be installed here."""
    failed: dict[str, str]
    """Why a package has no answer."""


def find_package(engine: Engine, device: Device = "cpu") -> tuple[str, str] | None:
    """The package of an engine and the version that bedplate pins; None if it has no package."""
    recipe = engine.find_pinned_recipe(device) or engine.recipe
    return recipe.engine_pin if recipe is not None else None


def ask_index(packages: Iterable[str]) -> IndexAnswer:
    """Asks the package index, with the settings of uv and pip. A failure is part of the answer."""
    newest: dict[str, str] = {}
    failed: dict[str, str] = {}
    for package in packages:
        try:
            newest |= _find_newest(package)
        except BedplateError as error:
            failed[package] = error.summary
        except (OSError, subprocess.SubprocessError) as error:
            failed[package] = str(error)
        except LookupError as error:
            failed[package] = str(error.args[0])
    return IndexAnswer(newest, failed)


def _find_newest(package: str) -> dict[str, str]:
    env = build_uv_environment(os.environ)
    refuse_plain_indexes(env)
    command = [find_uv(), "pip", "compile", "-", *QUIETLY, *list_build_options(), "--python", find_engine_python()]
    if env.get("UV_OFFLINE", "").lower() not in ("1", "true", "yes", "on"):  # uv refuses both together
        command += ["--refresh-package", package]
    done = subprocess.run(
        command, input=package, capture_output=True, text=True, timeout=ASK_LIMIT_S, env=env, check=False
    )
    if done.returncode == 0:
        return parse_requirements(done.stdout)
    raise LookupError(explain_no_answer(done.stderr))


def explain_no_answer(output: str) -> str:
    """Why uv found no release, in a few words."""
    if is_network_failure(output):
        return "the package index cannot be reached"
    return next(iter(parse_reasons(output)), "uv gave no reason")


def parse_requirements(text: str) -> dict[str, str]:
    """Versions in a compiled requirements file, by package name."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;#\\]+)", line):
            found[match[1]] = match[2]
    return found


def is_newer(version: str, present: str) -> bool:
    """Whether a release is newer than another; local labels such as +cpu do not count."""
    return parse_version(version.partition("+")[0]) > parse_version(present.partition("+")[0])
