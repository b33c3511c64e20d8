"""Imports go one way: a package imports only from packages to its left."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.sources import parse_source

from bedplate.engines import load_engines

SOURCE = Path(__file__).parents[1] / "src" / "bedplate"
SERVER = SOURCE / "engines" / "shipped" / "openai_server"
"""Imported under another name in engine environments, so its modules import one another relatively."""
PACKAGES = [
    "values", "facts", "engines", "decide", "published", "deploy", "run", "measure", "judge", "tuning", "show",
    "bundling", "hosting", "changing", "page", "serving", "cli",
]  # fmt: skip
FOUNDATION = [
    "_version", "errors", "home", "interrupts", "postgres_store", "progress", "store", "unsent_usage", "usage_store",
]  # fmt: skip
"""Left of every package. `home` and `errors` print figures, so they may use the units in `values`."""


def find_package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def parse(text: str) -> ast.Module:
    """Parse once for all tests, which do not change the tree."""
    return parse_source(text)


@functools.cache
def list_nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of the tree, listed once for all tests."""
    return tuple(ast.walk(parse(text)))


@functools.cache
def list_import_nodes(text: str, for_types: bool) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Every import of a file, also in functions; with `for_types` also those for type checkers."""
    found: list[ast.Import | ast.ImportFrom] = []
    pending: list[ast.AST] = [parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            pending += node.orelse
        elif not isinstance(node, ast.expr):  # an expression imports nothing
            pending += ast.iter_child_nodes(node)
    return tuple(found)


def list_imports(path: Path, for_types: bool = True) -> set[str]:
    """Every bedplate module that a file imports, also in functions; with `for_types` also those for type checkers."""
    found: set[str] = set()
    for node in list_import_nodes(path.read_text(), for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            if node.level == 1 and path.parent == SERVER:
                continue
            assert node.level == 0, f"{path} uses a relative import"
            if node.module == "bedplate":
                found |= {f"bedplate.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "bedplate"}


@pytest.mark.parametrize("own", [*PACKAGES, *FOUNDATION])
def test_a_package_imports_only_from_packages_to_its_left(own: str) -> None:
    paths = sorted((SOURCE / own).rglob("*.py")) if own in PACKAGES else [SOURCE / f"{own}.py"]
    assert paths
    for path in paths:
        for module in list_imports(path):
            other = find_package(module)
            if other in ("", *FOUNDATION):
                continue
            assert other in PACKAGES, f"{path}: {other} is not a package"
            if own in PACKAGES:
                assert PACKAGES.index(other) <= PACKAGES.index(own), f"{path}: {own} may not import {other}"
            else:
                assert other == "values", f"{path}: {own} is left of {other}"


def build_module_graph(source: Path) -> dict[str, set[str]]:
    """Each module with the modules of the same package that it imports, also in functions, but not for types only."""

    def name_of(path: Path) -> str:
        return ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")

    paths = {name_of(path): path for path in source.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        found = set()
        for node in list_import_nodes(path.read_text(), False):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {one if one in paths else node.module for one in inside}
        graph[name] = found & paths.keys() - {name}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """An import cycle; its first module is repeated at the end."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return None
        for other in sorted(graph[name]):
            if (found := visit(other, [*path, name])) is not None:
                return found
        finished.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name, [])) is not None), None)


def test_modules_have_no_import_cycle() -> None:
    cycle = find_cycle(build_module_graph(SOURCE))
    assert cycle is None, " → ".join(cycle or ())


def test_a_cycle_is_found_in_functions_and_not_among_types(tmp_path: Path) -> None:
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from made.second import two\n")
    (package / "second.py").write_text("def two():\n    from made import first\n")
    assert find_cycle(build_module_graph(package)) == ["made.first", "made.second", "made.first"]
    (package / "second.py").write_text("if TYPE_CHECKING:\n    from made.first import one\n")
    assert find_cycle(build_module_graph(package)) is None


def build_package_graph() -> dict[str, set[str]]:
    """Each package and the packages that it imports."""
    graph: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0]
        if own in graph:
            graph[own] |= {find_package(module) for module in list_imports(path)} & graph.keys() - {own}
    return graph


def remove_implied_arrows(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows of a graph without those that follow from longer paths."""

    def reached(name: str) -> set[str]:
        return graph[name].union(*(reached(other) for other in graph[name]))

    return {
        (name, other)
        for name, others in graph.items()
        for other in others
        if not any(other in reached(between) for between in others - {other})
    }


def test_architecture_page_shows_the_packages_and_their_imports() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == PACKAGES
    drawn = re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE)
    arrows = sorted(
        remove_implied_arrows(build_package_graph()), key=lambda arrow: [PACKAGES.index(one) for one in arrow]
    )
    wanted = "\n".join(f"    {one} --> {other}" for one, other in arrows)
    assert drawn == arrows, f"the diagram should be\n{wanted}"


PROGRAMS = {
    "bundling/install.py", "facts/measured/worker.py", "facts/measured/execute.py", "measure/load/null_server.py",
    "run/warden.py", "deploy/script_steps.py",
}  # fmt: skip
"""Separate programs: people run the first without bedplate, and bedplate talks to the others through their streams."""


def dotted(node: ast.expr) -> str:
    """`sys.stdout` of such an expression; nothing of one that is not a name with at most one attribute."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_only_the_command_line_prints() -> None:
    """Other code raises, returns, renders, or writes to a given console."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(("cli/", "engines/shipped/")) or name in PROGRAMS:
            continue
        for node in list_nodes(path.read_text()):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            stream = dotted(node) if isinstance(node, ast.Attribute) else ""
            if called in ("print", "rich.print", "Console", "typer.echo") or stream in ("sys.stdout", "sys.stderr"):
                found.append(f"{name}:{node.lineno}: {called or stream}")  # type: ignore[attr-defined]
    assert not found


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages
    assert packages <= set(PACKAGES)


def test_code_for_engine_environments_does_not_import_bedplate() -> None:
    folder = SOURCE / "engines" / "shipped"
    shipped = [path for path in folder.rglob("*.py") if path != folder / "__init__.py"]
    assert shipped
    for path in shipped:
        assert not list_imports(path, for_types=False), f"{path} runs in an environment without bedplate"
    assert not list_imports(SOURCE / "run" / "warden.py")


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
    modules = set(out.rpartition("LOADED ")[2].split())
    loaded = {name.split(".")[0] for name in modules}
    assert not loaded & {"numpy", "aiohttp", "huggingface_hub", "torch", "prometheus_client", "rich"}
    assert "importlib.metadata" not in modules  # only for engines of other packages


@pytest.mark.nightly
@pytest.mark.measures
def test_help_starts_in_at_most_twice_the_import_of_typer(tmp_path: Path) -> None:
    """At most twice what importing typer takes beyond bare Python, by the best of several interleaved runs.

    A ratio within one run, because machines differ and may be busy. It is about 1.2. The bytecode of all three is
    written first, to a folder of the test, because an environment can forbid to write it beside the code.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def took(*arguments: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
        return time.perf_counter() - began

    commands = (("-c", "pass"), ("-c", "import typer"), ("-m", "bedplate", "--help"))
    for command in commands:
        took(*command)
    rounds = [tuple(took(*command) for command in commands) for _ in range(9)]
    bare, library, ours = (min(side) for side in zip(*rounds, strict=True))
    assert ours - bare < 2 * (library - bare)


ENGINES_NAMED_OUTSIDE = 15
"""At most, outside of engines/: words about files, examples in help, and scripts of published tables remain."""
RULES = ("decide/rules.py", "decide/engine_map.py", "show/rules.py")
"""The decision rules, the cheat sheet of the source articles, and the page about both: they name engines by design."""
STORES = ("facts/library.py",)
"""Where Ollama and LM Studio keep model files: folders on a disk, whichever engine serves from them."""
FORMATS = (
    "values/model.py", "facts/known_models.py", "facts/model_folder.py", "facts/published_weights.py",
    "facts/quantization.py",
)  # fmt: skip
"""Where `mlx` is a weight format."""
OVERLAYS = ("bundling/for_target.py", "bundling/install.py", "bundling/texts.py", "cli/bundle.py", "show/bundle.py")
"""Where PyTorch is the library of the target that an overlay is installed over."""
SHARED_WORDS = frozenset(["exl2", "exl3", "onnx", "torch", "transformers", "ggml"])
"""Spellings of an engine that are first of all the name of a weight format or of a library."""


def list_engine_words() -> frozenset[str]:
    """Ids, names and spellings of all engines, in lower case without punctuation."""
    own = [one for one in load_engines().values() if type(one).__module__.startswith("bedplate.")]
    words = {re.sub(r"[^a-z0-9]", "", word.lower()) for one in own for word in (one.id, one.name, *one.spellings)}
    return frozenset(words - SHARED_WORDS)


def find_engine_names(text: str, words: frozenset[str]) -> list[str]:
    """The engines that a text names as whole words, also in a path, an image name or a metric name."""
    found = []
    for word in re.findall(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", text):
        parts = re.split(r"[._-]", word.lower())
        while parts:
            taken = next((length for length in (3, 2, 1) if "".join(parts[:length]) in words), None)
            found += ["".join(parts[:taken])] if taken else []
            parts = parts[taken or 1 :]
    return found


def list_string_constants(path: Path) -> list[tuple[int, str]]:
    """The strings of a file with their lines, without docstrings and the examples in help texts."""
    nodes = list_nodes(path.read_text())
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if not node.value.startswith("Examples:")
    ]


def test_engine_names_are_found_in_any_spelling_as_whole_words() -> None:
    words = list_engine_words()
    assert find_engine_names("vllm:num_requests_running", words) == ["vllm"]
    assert find_engine_names("ghcr.io/ggml-org/llama.cpp:server", words) == ["llamacpp"]
    assert find_engine_names("TensorRT-LLM and text-generation-inference", words) == [
        "tensorrtllm",
        "textgenerationinference",
    ]
    assert find_engine_names("collama, vllms, import", words) == []


def test_facts_about_an_engine_are_in_its_own_file() -> None:
    words = list_engine_words()
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith("engines/") or name in (*RULES, *STORES):
            continue
        known = words - {"mlx"} if name in FORMATS else words - {"pytorch"} if name in OVERLAYS else words
        found += [
            f"{name}:{line}: {engine} in {text[:60]!r}"
            for line, text in list_string_constants(path)
            for engine in find_engine_names(text, known)
        ]
    print("\n".join(found))
    assert len(found) <= ENGINES_NAMED_OUTSIDE


# names


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in list_nodes(path.read_text()):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


VERBS_IN_ED = {"embed", "feed"}


def test_no_function_is_named_by_a_bare_participle() -> None:
    """`replace_fields`, not `replaced`. The name of a `bedplate` command is that of its function."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "cli":
            continue
        for node in list_nodes(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
                name = node.name.strip("_")
                if re.fullmatch(r"[a-z]+ed", name) and name not in VERBS_IN_ED:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}")
    assert found == []


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(one) for one in node.decorator_list)
