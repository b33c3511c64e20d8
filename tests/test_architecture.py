"""The house is one way: a room imports only from rooms to its left."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bedplate.engines import all_engines

SOURCE = Path(__file__).parents[1] / "src" / "bedplate"
ROOMS = [
    "values",
    "facts",
    "engines",
    "decide",
    "published",
    "deploy",
    "run",
    "measure",
    "judge",
    "show",
    "operate",
    "cli",
]
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


ENGINES_NAMED_OUTSIDE = 15
"""At most, outside of engines/: words about files, examples in help, and scripts of published tables remain."""
RULES = ("decide/rules.py", "decide/engine_map.py", "show/rules.py")
"""The decision rules, the cheat sheet of the source articles, and the page about both: they name engines by design."""
STORES = ("facts/library.py",)
"""Where Ollama and LM Studio keep model files: folders on a disk, whichever engine serves from them."""
FORMATS = ("values/model.py", "facts/known_models.py", "facts/model_folder.py", "facts/quantization.py")
"""Where `mlx` is a weight format."""
SHARED_WORDS = frozenset(["exl2", "exl3", "onnx", "torch", "transformers", "ggml"])
"""Spellings of an engine that are first of all the name of a weight format or of a library."""


def engine_words() -> frozenset[str]:
    """Ids, names and spellings of all engines, in small letters without punctuation."""
    own = [one for one in all_engines().values() if type(one).__module__.startswith("bedplate.")]
    words = {re.sub(r"[^a-z0-9]", "", word.lower()) for one in own for word in (one.id, one.name, *one.spellings)}
    return frozenset(words - SHARED_WORDS)


def engines_named(text: str, words: frozenset[str]) -> list[str]:
    """The engines that a text names as whole words: also within a path, an image's name or a metric's."""
    found = []
    for word in re.findall(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", text):
        parts = re.split(r"[._-]", word.lower())
        while parts:
            taken = next((length for length in (3, 2, 1) if "".join(parts[:length]) in words), None)
            found += ["".join(parts[:taken])] if taken else []
            parts = parts[taken or 1 :]
    return found


def string_constants(path: Path) -> list[tuple[int, str]]:
    """The strings of a file with their lines, without docstrings and the examples of the command line's help."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if not node.value.startswith("Examples:")
    ]


def test_an_engine_is_named_in_any_usual_spelling_and_as_a_whole_word() -> None:
    words = engine_words()
    assert engines_named("vllm:num_requests_running", words) == ["vllm"]
    assert engines_named("ghcr.io/ggml-org/llama.cpp:server", words) == ["llamacpp"]
    assert engines_named("TensorRT-LLM and text-generation-inference", words) == [
        "tensorrtllm",
        "textgenerationinference",
    ]
    assert engines_named("collama, vllms, import", words) == []


def test_facts_about_an_engine_are_in_its_own_file() -> None:
    words = engine_words()
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith("engines/") or name in (*RULES, *STORES):
            continue
        known = words - {"mlx"} if name in FORMATS else words
        found += [
            f"{name}:{line}: {engine} in {text[:60]!r}"
            for line, text in string_constants(path)
            for engine in engines_named(text, known)
        ]
    print("\n".join(found))
    assert len(found) <= ENGINES_NAMED_OUTSIDE
