"""A plan as one shell script that runs as it stands: an environment, the preparation, the launch."""

from __future__ import annotations

import importlib.resources
import itertools
import re
import shlex
from collections.abc import Iterator

from bedplate._version import __version__
from bedplate.deploy.images import HUB_PACKAGE
from bedplate.engines import ClonedProgram, Engine, Recipe
from bedplate.engines import engine as engine_by_id
from bedplate.engines.shared import COMPRESSOR
from bedplate.errors import AnswerIsNo
from bedplate.values import Decision, Launch, Plan, Preparation
from bedplate.values.units import seconds, size

# In bash, `test || { a && b; }` goes on when `a` fails, whatever `set -e` says: commands stand one below the other.
HEAD = """\
#!/usr/bin/env bash
# {title}
# Made by bedplate {version}. Needs {needs}. What it makes is kept and used again.
# The endpoint: http://127.0.0.1:{port}
set -euo pipefail
for program in {programs}; do
    command -v "$program" > /dev/null || {{ echo "this script needs $program" >&2; exit 1; }}
done
"""
STEPS = """\
# once NAME COMMAND: left out where the same command has ended well before, and what it made is still there.
once() {
    local name="$1"
    shift
    if [ ! -e "$name" ] || [ "$(cat "$name.done" 2> /dev/null)" != "$*" ]; then
        rm -f "$name.done"
        "$@"
        printf '%s\\n' "$*" > "$name.done"
    fi
}
# whole NAME COMMAND: the command writes NAME.part, which is called NAME when it is all there.
whole() {
    local name="$1"
    shift
    if [ ! -e "$name" ]; then
        rm -rf "$name.part"
        "$@"
        mv "$name.part" "$name"
    fi
}
"""
ENVIRONMENT = """\
env="${{ENGINE_ENV:-$HOME/.cache/bedplate-scripts/{folder}}}"
[ -x "$env/bin/uv" ] || {{
    python3 -m venv "$env"
    "$env/bin/pip" install --quiet uv
}}
export VIRTUAL_ENV="$env" PATH="$env/bin:$PATH"
"""
HELPER = """\
# {name} converts weights, in an environment of its own{sizes}.
{variable}="$HOME/.cache/bedplate-scripts/{folder}"
[ -e "${variable}/.installed" ] || {{
    python3 -m venv "${variable}"
    "${variable}/bin/pip" install --quiet uv
    "${variable}/bin/uv" pip install --python "${variable}/bin/python" {packages}
    touch "${variable}/.installed"
}}
"""
UNLOCKED = """\
# A loader that was killed leaves its lock behind, and every later one would wait for it.
rm -f {folder}/*/lock
"""
END_OF_PROGRAM = "END_OF_PROGRAM"
HUB_CLIENT = ("uvx", "--from", HUB_PACKAGE)
"""`hf` is in the environments of some engines alone."""
CLONE = "modelopt"
"""The folder of a conversion program's repository."""
TOOLKITS = {"cuda": "the CUDA toolkit", "rocm": "ROCm with its compiler", "vulkan": "Vulkan's headers and glslc",
            "xpu": "the oneAPI toolkit"}  # fmt: skip


def script(plan: Plan, decision: Decision) -> str:
    """The whole script. Steps whose result is there already are left out when it runs again."""
    engine = engine_by_id(plan.engine)
    launch = decision.launch
    if launch is None:
        raise AnswerIsNo(f"there is nothing to launch: {plan.engine} was not decided for")
    device = plan.settings.device
    recipe = engine.recipe_for(device)
    title = f"{plan.model.name} ({decision.quantization}) with {engine.name} {plan.engine_version}"
    needs = _needs(plan, launch, engine)
    parts = [
        HEAD.format(
            title=title,
            version=__version__,
            needs=_listed([words for _, words in needs]),
            programs=shlex.join(dict.fromkeys(program for program, _ in needs if program)),
            port=_port(launch.argv),
        )
    ]
    if not _in_container(launch):
        own = any(step.kind == "install" and _is_own(step, engine) for step in launch.prepare)
        # Packages for one kind of device stand in the way of those for another.
        folder = f"{engine.id}-{plan.engine_version}{'' if device == 'cpu' else f'-{device}'}"
        parts += [ENVIRONMENT.format(folder=folder), *(_programs(recipe) if recipe is not None and own else ())]
    for helper in dict.fromkeys(step.within for step in launch.prepare if step.within not in (None, engine.id)):
        parts += _helper(engine_by_id(str(helper)))
    steps = [step for step in launch.prepare if step.kind != "install" or _is_own(step, engine)]
    if any(step.kind != "install" for step in steps) and not _in_container(launch):
        parts.append(STEPS)
    for number, step in enumerate(steps):
        install = step.kind == "install"
        parts.append(_install(number, step, recipe, launch.argv[0]) if install else _step(step, engine))
    parts += [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    parts.append(f"exec {_wrapped(launch.argv)}")
    return "\n".join(parts) + "\n"


def _needs(plan: Plan, launch: Launch, engine: Engine) -> list[tuple[str | None, str]]:
    """What the script finds on the machine and does not bring: (program, in words)."""
    if _in_container(launch):
        return [("docker", "docker that may use the GPUs")]
    found: list[tuple[str | None, str]] = [("python3", "python3 with venv"), (None, "a package index")]
    recipe = engine.recipe_for(plan.settings.device)
    for step in launch.prepare:
        if step.kind == "install" and _is_own(step, engine) and not step.argv:
            if recipe is None:
                found.append((None, step.what))
            elif plan.settings.device == "cpu":
                found += [(None, library.soname) for library in recipe.libraries]
        elif step.argv[:1] == ("tar",):
            found.append(("tar", "tar"))
        elif step.argv[:2] == ("cmake", "-S"):
            found += [("cmake", "cmake"), (None, "a C++ compiler")]
            found += [(None, TOOLKITS[plan.settings.device])] if plan.settings.device in TOOLKITS else []
        elif _is_cloned(step, engine):
            found.append(("git", "git"))
    if engine.compiles_kernels:
        found += [(None, "a C++ compiler"), (None, TOOLKITS["cuda"])]
    return found


def _in_container(launch: Launch) -> bool:
    return launch.argv[0] == "docker"


def _is_own(step: Preparation, engine: Engine) -> bool:
    return step.within in (None, engine.id)


def _is_cloned(step: Preparation, engine: Engine) -> bool:
    return engine.cloned is not None and engine.cloned.program in step.argv


def _programs(recipe: Recipe, variable: str = "env") -> Iterator[str]:
    """Bedplate's own programs for an engine that has no server, or whose own has faults."""
    for name, file in recipe.programs:
        text = (importlib.resources.files("bedplate.engines") / "shipped" / file).read_text(encoding="utf-8")
        lines = [f'mkdir -p "${variable}/bin/{folder}"'] if (folder := name.rpartition("/")[0]) else []
        lines += [f"{{ echo \"#!${variable}/bin/python\"; cat <<'{END_OF_PROGRAM}'", text.rstrip(), END_OF_PROGRAM]
        lines += [f'}} > "${variable}/bin/{name}"', f'chmod +x "${variable}/bin/{name}"', ""]
        yield "\n".join(lines)


def _helper(helper: Engine) -> Iterator[str]:
    """The environment of another engine, in which weights are converted."""
    (step,) = helper.installation() or (None,)
    if helper.recipe is None or step is None:
        return
    sizes = f" ({_sizes(step)})" if _sizes(step) else ""
    packages = shlex.join(_packages(helper.recipe))
    folder = f"{helper.id}-{helper.version}"
    yield HELPER.format(name=helper.name, sizes=sizes, variable=_variable(helper), folder=folder, packages=packages)
    yield from _programs(helper.recipe, _variable(helper))


def _variable(helper: Engine) -> str:
    return re.sub(r"\W", "_", helper.id)


def _packages(recipe: Recipe) -> tuple[str, ...]:
    # Without a word on it, torch comes with gigabytes for a GPU, also where there is none.
    torch = any(package.startswith("torch==") for package in recipe.packages)
    return (*(("--torch-backend", "auto") if torch else ()), *recipe.packages)


def _what(step: Preparation) -> str:
    return f"# {step.kind}: {step.what}{f' ({_sizes(step)})' if _sizes(step) else ''}\n"


def _step(step: Preparation, engine: Engine) -> str:
    what = _what(step)
    if not step.argv:
        return f"{what.rstrip()}, to {step.where}\n"
    if step.argv[:2] == ("docker", "pull"):
        # Once it is here, nobody need be asked for it.
        image = shlex.quote(step.argv[2])
        return f"{what}docker image inspect {image} > /dev/null 2>&1 || {shlex.join(step.argv)}\n"
    name, words = shlex.quote(step.where), _in_part(step)
    if step.kind == "convert" and words != step.argv:
        before = _clone(engine.cloned) if engine.cloned is not None and _is_cloned(step, engine) else ""
        return f"{what}{before}whole {name} {_command(step, words, engine)}\n"
    command = _command(step, step.argv, engine)
    if " " in step.where:
        # No file, but a store that may be told the same thing again.
        return f"{what}{command}\n"
    before = UNLOCKED.format(folder=name) if step.kind == "build" and engine.compiles_kernels else ""
    return f"{what}{before}once {name} {command}\n"


def _install(number: int, step: Preparation, recipe: Recipe | None, program: str) -> str:
    if step.what == COMPRESSOR:
        # Beside the engine it would change the versions of what both need.
        packages = shlex.join(("--torch-backend", "auto", COMPRESSOR))
        folder = COMPRESSOR.replace("==", "-")
        return HELPER.format(name="LLM Compressor", sizes="", variable="compressor", folder=folder, packages=packages)
    argv = step.argv
    if not argv and recipe is not None:
        argv = ("uv", "pip", "install", *_packages(recipe))
    if not argv:
        missing = f"{{ echo {shlex.quote(f'this script needs {step.what}')} >&2; exit 1; }}"
        return f"# Not installed here: {step.what}\ncommand -v {shlex.quote(program)} > /dev/null || {missing}\n"
    done = f'"$env/.installed-{number}"'
    return f"{_what(step)}[ -e {done} ] || {{\n    {shlex.join(argv)}\n    touch {done}\n}}\n"


def _in_part(step: Preparation) -> tuple[str, ...]:
    """The command, with another name for what it makes; Python's code has it as a literal."""
    part = f"{step.where}.part"
    return tuple(part if word == step.where else word.replace(repr(step.where), repr(part)) for word in step.argv)


def _clone(program: ClonedProgram) -> str:
    return f"whole {CLONE} git clone --depth 1 --branch {program.tag} {program.repository} {CLONE}.part\n"


def _command(step: Preparation, words: tuple[str, ...], engine: Engine) -> str:
    """With each program where it is found: some are in another environment than the engine's."""
    if not _is_own(step, engine):
        return f'"${_variable(engine_by_id(str(step.within)))}/bin/{words[0]}" {shlex.join(words[1:])}'
    if words[0] == "hf":
        words = (*HUB_CLIENT, *words)
    elif engine.cloned is not None and _is_cloned(step, engine):
        program = engine.cloned.program
        words = tuple(f"{CLONE}/{engine.cloned.path}/{program}" if word == program else word for word in words)
    elif words[0] == "python" and "from llmcompressor import" in " ".join(words):
        return f'"$compressor/bin/python" {shlex.join(words[1:])}'
    return shlex.join(words)


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
    return next((value for option, value in itertools.pairwise(argv) if option in ("--port", "--server-port")), "8080")


def _wrapped(argv: tuple[str, ...]) -> str:
    """An option a line."""
    lines = [shlex.quote(argv[0])]
    for word in argv[1:]:
        if word.startswith("-") and not word.lstrip("-").isdigit():
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)


def _listed(words: list[str]) -> str:
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} and {last}" if most else last
