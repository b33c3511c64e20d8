"""Installs a wheel or sdist of bedplate into an empty environment and tries it. It needs only the Python that runs it.

    python check_wheel.py DIST [--with pip|uv|pipx|uv-tool] [--answer] [--sbom FILE]

The environment has the Python that runs this program. `--answer` also asks the built-in model, for which it installs
llama.cpp.
`--sbom` writes the bill of materials of the installation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

IMPORT_ALL = """
import importlib, pkgutil, bedplate, sys
parts = ("bedplate.engines.shipped.", "bedplate.facts.measured.")  # programs, which run in other environments
names = [one.name for one in pkgutil.walk_packages(bedplate.__path__, "bedplate.") if not one.name.startswith(parts)]
for name in names:
    if name != "bedplate.__main__" and not (sys.platform == "win32" and "warden" in name):
        importlib.import_module(name)
print(len(names))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--with", dest="installer", default="pip", choices=["pip", "uv", "pipx", "uv-tool"])
    parser.add_argument("--answer", action="store_true")
    parser.add_argument("--sbom", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bedplate-wheel-") as folder:
        check(given.dist.resolve(), Path(folder), given)
    return 0


def check(dist: Path, folder: Path, given: argparse.Namespace) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env |= {"BEDPLATE_HOME": str(folder / "home"), "NO_COLOR": "1"}
    program, python = install(dist, given.installer, folder, env)

    def run(*words: str | Path) -> str:
        done = subprocess.run(list(words), cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {words}\n{done.stdout}{done.stderr}")
        return done.stdout

    version = run(program, "--version").strip()
    modules = run(python, "-c", IMPORT_ALL).strip()
    decision = json.loads(run(program, "plan", "Qwen/Qwen3-8B", "--hardware", "RTX 4090", "--json"))
    assert decision["engine"] and decision["launch"]["argv"], decision
    assert json.loads(run(program, "schema", "intent"))["title"]
    assert "bedplate serve" in run(program, "--help") or "serve" in run(program, "--help")
    script = run(program, "plan", "Qwen/Qwen3-8B", "--hardware", "RTX 4090", "--emit", "command")
    assert script.startswith("#!/usr/bin/env bash\n")
    assert run(program, "completion", "bash")
    if given.answer:
        question = "What is the capital of France? Answer in one word."
        answer = json.loads(run(program, "run", "builtin", question, "--temperature", "0", "--json"))
        assert "Paris" in answer["text"], answer
    if given.sbom:
        given.sbom.write_text(run(program, "doctor", "--sbom"), encoding="utf-8")
    print(f"{version} on Python {sys.version.split()[0]}, {given.installer}, {dist.suffix}: {modules} modules, a plan")


def install(dist: Path, installer: str, folder: Path, env: dict[str, str]) -> tuple[Path, Path]:
    """Install in the way that a user would; return the program, and the Python of its environment."""
    scripts, suffix = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
    tools, home = folder / "tools", folder / "environments"
    env |= {"PIPX_HOME": str(home), "PIPX_BIN_DIR": str(tools), "UV_TOOL_DIR": str(home), "UV_TOOL_BIN_DIR": str(tools)}
    place = {"pipx": home / "venvs" / "bedplate", "uv-tool": home / "bedplate"}.get(installer, folder / "env")
    python = place / scripts / f"python{suffix}"
    uv = find_uv()
    commands: list[list[str | Path]]
    if installer == "pip":
        venv.create(place, with_pip=True)
        commands = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", dist]]
    elif installer == "uv":
        commands = [[*uv, "venv", "--quiet", "--python", sys.executable, place]]
        commands += [[*uv, "pip", "install", "--quiet", "--python", python, dist]]
    elif installer == "uv-tool":
        commands = [[*uv, "tool", "install", "--quiet", "--python", sys.executable, dist]]
    else:
        commands = [[*uv, "tool", "run", "--quiet", "pipx", "install", "--quiet", "--python", sys.executable, dist]]
    for command in commands:
        subprocess.run(command, check=True, env=env, cwd=folder, stdout=sys.stderr)
    program = (tools if installer in ("pipx", "uv-tool") else place / scripts) / f"bedplate{suffix}"
    return program, python


def find_uv() -> list[str]:
    """The uv of the environment that this runs in, or the one on the PATH."""
    beside = Path(sys.executable).with_name("uv")
    return [os.environ.get("UV") or (str(beside) if beside.exists() else "uv")]


if __name__ == "__main__":
    sys.exit(main())
