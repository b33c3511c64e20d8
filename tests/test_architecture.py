"""The house is one way: a room imports only from rooms to its left."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bedplate"
ROOMS = [
    "values", "facts", "engines", "decide", "deploy", "run", "measure", "judge", "show", "bundling", "operate", "cli",
]  # fmt: skip
FOUNDATION = ["_version", "errors", "home", "interrupts", "progress", "store"]
"""Left of every room. `home` and `errors` speak in figures, so they may use the units in `values`."""


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, for_types: bool = True) -> set[str]:
    """Every bedplate module that a file imports, also inside of functions; those for a type checker on request."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} uses a relative import"
            if node.module == "bedplate":
                found |= {f"bedplate.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "bedplate"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_to_its_left(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in imports(path):
        other = room_of(module)
        if other in ("", *FOUNDATION):
            continue
        assert other in ROOMS, f"{path}: {other} is no room"
        if own in ROOMS:
            assert ROOMS.index(other) <= ROOMS.index(own), f"{path}: {own} may not import {other}"
        elif own in FOUNDATION:
            assert other == "values", f"{path}: {own} stands left of {other}"


def test_every_room_is_known() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS)


def test_what_is_shipped_into_engine_environments_needs_nothing_of_ours() -> None:
    shipped = [path for path in (SOURCE / "engines" / "shipped").glob("*.py") if path.name != "__init__.py"]
    assert shipped
    for path in shipped:
        assert not imports(path, for_types=False), f"{path} runs in an environment without bedplate"
    assert not imports(SOURCE / "run" / "warden.py")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['bedplate', *{arguments!r}]\ntry:\n import bedplate.cli; bedplate.cli.main()\n"
    code += "except SystemExit: pass\nprint('LOADED', *sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in out.rpartition("LOADED ")[2].split()}
    heavy = {"numpy", "aiohttp", "huggingface_hub", "torch", "gguf", "rich", "msgspec", "psutil", "prometheus_client"}
    assert not loaded & heavy


def test_plan_loads_no_server_and_no_numpy() -> None:
    code = "import sys; sys.argv = ['bedplate', 'plan', '--json']\ntry:\n import bedplate.cli; bedplate.cli.main()\n"
    code += "except SystemExit: pass\nprint('LOADED', *sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in out.rpartition("LOADED ")[2].split()}
    assert not loaded & {"numpy", "aiohttp", "huggingface_hub", "torch", "prometheus_client"}


@pytest.mark.measures
def test_help_takes_little_more_than_its_command_line_library() -> None:
    """At most three times what importing typer takes beyond bare Python, by the best of several runs of each in turn.

    A ratio within one run, since machines differ and may be busy; today it is about two.
    """

    def took(*arguments: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        return time.perf_counter() - began

    took("-m", "bedplate", "--help")  # writes bytecode, where that is allowed
    commands = (("-c", "pass"), ("-c", "import typer"), ("-m", "bedplate", "--help"))
    rounds = [tuple(took(*command) for command in commands) for _ in range(9)]
    bare, library, ours = (min(side) for side in zip(*rounds, strict=True))
    assert ours - bare < 3 * (library - bare)
