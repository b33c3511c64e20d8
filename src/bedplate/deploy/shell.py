"""A plan as one shell script that runs as it stands: an environment, the preparation, the launch."""

from __future__ import annotations

import importlib.resources
import itertools
import re
import shlex
from collections.abc import Iterator

from bedplate._version import __version__
from bedplate.engines import Engine
from bedplate.engines import engine as engine_by_id
from bedplate.errors import AnswerIsNo
from bedplate.values import Decision, Plan, Preparation
from bedplate.values.units import seconds, size

HEAD = """\
#!/usr/bin/env bash
# {title}
# Made by bedplate {version}. Needs python3 with venv and a package index. What it makes is kept and used again.
# The endpoint: http://127.0.0.1:{port}
set -euo pipefail
"""
ENVIRONMENT = """\
env="${{ENGINE_ENV:-$HOME/.cache/bedplate-scripts/{folder}}}"
export VIRTUAL_ENV="$env" PATH="$env/bin:$PATH"
[ -x "$env/bin/uv" ] || {{ python3 -m venv "$env" && "$env/bin/pip" install --quiet uv; }}
"""
HELPER = """\
# {name} converts weights, in an environment of its own{sizes}.
{variable}="$HOME/.cache/bedplate-scripts/{folder}"
[ -e "${variable}/.installed" ] || {{
    python3 -m venv "${variable}" && "${variable}/bin/pip" install --quiet uv
    "${variable}/bin/uv" pip install --python "${variable}/bin/python" {packages}
    touch "${variable}/.installed"
}}
"""
END_OF_PROGRAM = "END_OF_PROGRAM"


def script(plan: Plan, decision: Decision) -> str:
    """The whole script. Steps whose result is there already are left out when it runs again."""
    engine = engine_by_id(plan.engine)
    launch = decision.launch
    if launch is None:
        raise AnswerIsNo(f"there is nothing to launch: {plan.engine} was not decided for")
    title = f"{plan.model.name} ({decision.quantization}) with {engine.name} {plan.engine_version}"
    parts = [HEAD.format(title=title, version=__version__, port=_port(launch.argv))]
    if not launch.argv[0].startswith("docker"):
        programs = _programs(engine) if engine.recipe_for(plan.settings.device) is not None else ()
        parts += [ENVIRONMENT.format(folder=f"{engine.id}-{plan.engine_version}"), *programs]
    helpers = dict.fromkeys(step.within for step in launch.prepare if step.within not in (None, engine.id))
    for helper in helpers:
        parts += _helper(engine_by_id(str(helper)))
    parts += [_step(number, step, engine) for number, step in enumerate(launch.prepare) if not _is_helper(step, engine)]
    parts += [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    parts.append(f"exec {_wrapped(launch.argv)}")
    return "\n".join(parts) + "\n"


def _programs(engine: Engine, variable: str = "env") -> Iterator[str]:
    """Bedplate's own programs for an engine that has no server, or whose own has faults."""
    for name, file in engine.recipe.programs if engine.recipe is not None else ():
        text = (importlib.resources.files("bedplate.engines") / "shipped" / file).read_text(encoding="utf-8")
        lines = [f"{{ echo \"#!${variable}/bin/python\"; cat <<'{END_OF_PROGRAM}'", text.rstrip(), END_OF_PROGRAM]
        lines += [f'}} > "${variable}/bin/{name}"', f'chmod +x "${variable}/bin/{name}"', ""]
        yield "\n".join(lines)


def _helper(helper: Engine) -> Iterator[str]:
    """The environment of another engine, in which weights are converted."""
    (step,) = helper.installation() or (None,)
    if helper.recipe is None or step is None:
        return
    sizes = f" ({_sizes(step)})" if _sizes(step) else ""
    packages = shlex.join(_packages(helper))
    folder = f"{helper.id}-{helper.version}"
    yield HELPER.format(name=helper.name, sizes=sizes, variable=_variable(helper), folder=folder, packages=packages)
    yield from _programs(helper, _variable(helper))


def _variable(helper: Engine) -> str:
    return re.sub(r"\W", "_", helper.id)


def _is_helper(step: Preparation, engine: Engine) -> bool:
    return step.kind == "install" and step.within not in (None, engine.id)


def _packages(engine: Engine) -> tuple[str, ...]:
    packages = engine.recipe.packages if engine.recipe is not None else ()
    # Without a word on it, torch comes with gigabytes for a GPU, also where there is none.
    torch = any(package.startswith("torch==") for package in packages)
    return (*(("--torch-backend", "auto") if torch else ()), *packages)


def _step(number: int, step: Preparation, engine: Engine) -> str:
    what = f"# {step.kind}: {step.what}{f' ({_sizes(step)})' if _sizes(step) else ''}"
    argv = step.argv
    if step.kind == "install" and not argv and engine.recipe is not None:
        argv = ("uv", "pip", "install", *_packages(engine))
    if not argv:
        return f"{what}, to {step.where}\n"
    if step.kind == "install":
        done = f'"$env/.installed-{number}"'
        return f"{what}\n[ -e {done} ] || {{ {shlex.join(argv)} && touch {done}; }}\n"
    return f"{what}\n[ -e {shlex.quote(step.where)} ] || {_command(step, engine)}\n"


def _command(step: Preparation, engine: Engine) -> str:
    if step.within in (None, engine.id):
        return shlex.join(step.argv)
    variable = _variable(engine_by_id(str(step.within)))
    return f'"${variable}/bin/{step.argv[0]}" {shlex.join(step.argv[1:])}'


def _sizes(step: Preparation) -> str:
    parts = []
    if step.download_bytes:
        parts.append(f"{size(step.download_bytes)} to download")
    if step.disk_bytes:
        parts.append(f"{size(step.disk_bytes)} on disk")
    if step.seconds is not None:
        parts.append(f"about {seconds(step.seconds.value)}")
    return ", ".join(parts)


def _port(argv: tuple[str, ...]) -> str:
    return next((value for option, value in itertools.pairwise(argv) if option in ("--port", "-p")), "8080")


def _wrapped(argv: tuple[str, ...]) -> str:
    """An option a line."""
    lines = [shlex.quote(argv[0])]
    for word in argv[1:]:
        if word.startswith("-") and not word.lstrip("-").isdigit():
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)
