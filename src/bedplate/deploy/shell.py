"""A plan as one shell script that runs as it stands: install, prepare, launch."""

from __future__ import annotations

import itertools
import shlex

from bedplate._version import __version__
from bedplate.engines import engine as engine_by_id
from bedplate.errors import AnswerIsNo
from bedplate.values import Decision, Plan
from bedplate.values.units import size

HEAD = """#!/usr/bin/env bash
# {title}
# Made by bedplate {version}. Run it where the model is to be served; the endpoint is http://127.0.0.1:{port}.
set -euo pipefail
"""


def script(plan: Plan, decision: Decision) -> str:
    engine = engine_by_id(plan.engine)
    launch = decision.launch
    if launch is None:
        raise AnswerIsNo(f"there is nothing to launch: {plan.engine} was not decided for")
    title = f"{plan.model.name} ({decision.quantization}) with {engine.name} {plan.engine_version}"
    lines = [HEAD.format(title=title, version=__version__, port=_port(launch.argv))]
    if engine.recipe is not None and not engine.recipe.programs:
        packages = shlex.join(engine.recipe.packages)
        lines += [
            f"# {engine.name}: {size(engine.recipe.download_bytes)} to download, {size(engine.recipe.disk_bytes)} on disk",
            f'env="${{ENGINE_ENV:-$HOME/.cache/bedplate-{engine.id}-{plan.engine_version}}}"',
            f'[ -d "$env" ] || {{ python3 -m venv "$env" && "$env/bin/pip" install {packages}; }}',
            'PATH="$env/bin:$PATH"',
            "",
        ]
    for step in launch.prepare:
        if step.argv:
            lines += [f"# {step.kind}: {step.what}", shlex.join(step.argv), ""]
        elif step.kind != "install" or engine.recipe is None:
            lines += [f"# {step.kind} {step.what} to {step.where}", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    lines.append(f"exec {_wrapped(launch.argv)}")
    return "\n".join(lines) + "\n"


def _port(argv: tuple[str, ...]) -> str:
    for option, value in itertools.pairwise(argv):
        if option in ("--port", "-p"):
            return value
    return "8080"


def _wrapped(argv: tuple[str, ...]) -> str:
    """An option a line."""
    lines = [shlex.quote(argv[0])]
    for word in argv[1:]:
        if word.startswith("-") and not word.lstrip("-").isdigit():
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)
