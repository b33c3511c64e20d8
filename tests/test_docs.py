"""The docs match the source: links, commands, options, exit codes, rules, paths and metrics."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.commands import command_tree

from bedplate.engines import Engine
from bedplate.errors import BedplateError
from bedplate.run.gateway import BackendState
from bedplate.run.gateway.pages import MODEL_PAGE, OLLAMA_SHOW, OWN_PAGES
from bedplate.run.gateway.sse import APIS, TRANSLATED
from bedplate.run.gateway.watch import GatewayMetrics
from bedplate.show.rules import write_rules_page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bedplate"
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def remove_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def read_rows(text: str, section: str | None = None) -> list[list[str]]:
    """The cells of all table rows without headings; with `section`, only below that heading."""
    if section is not None:
        found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert found, f"no section is called {section}"
        text = found[1]
    found_rows: list[list[str]] = []
    for line in remove_fences(text).splitlines():
        if re.match(r"\|[\s|:-]+\|$", line):
            found_rows.pop()  # what stands above the line is the head
        elif line.startswith("|"):
            found_rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return found_rows


def read_first_codes(table: list[list[str]], column: int = 0) -> list[str]:
    """The code at the beginning of each cell of a column."""
    return [found[1] for row in table if len(row) > column and (found := re.match(r"`([^`]+)`", row[column]))]


# links


def list_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings on GitHub."""
    titles = re.findall(r"^#+ (.+)$", remove_fences(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def find_broken_links(text: str, page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", remove_fences(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in list_anchors(there)):
            broken.append(target)
    return broken


@every_page
def test_every_relative_link_resolves(page: Path) -> None:
    assert not find_broken_links(page.read_text(encoding="utf-8"), page)


def test_a_broken_link_is_found() -> None:
    page = ROOT / "README.md"
    assert find_broken_links("[a](docs/nowhere.md) [b](LICENSE) [c](https://example.org/x)", page) == [
        "docs/nowhere.md"
    ]
    assert find_broken_links("[a](docs/serve.md#metrics) [b](docs/serve.md#nothing)", page) == ["docs/serve.md#nothing"]


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index]
    assert not missing


# commands


def list_options(command: Any) -> set[str]:
    found = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {option for option in found if option.startswith("-")} | {"--help", "-h"}


def takes_value(command: Any, word: str) -> bool:
    """Whether a word is an option of the command that a value follows."""
    options = [one for one in command.params if not getattr(one, "is_flag", True)]
    return any(word in (*one.opts, *one.secondary_opts) for one in options)


def list_shell_lines(text: str) -> Iterator[str]:
    """Command lines in code blocks and in running text."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if re.match(r"(?:[A-Z_]+=\S* )*(?:bedplate [a-z-]|make )", line):
                yield line
    for code in re.findall(r"`([^`\n]+)`", remove_fences(text)):
        if re.match(r"(?:[A-Z_]+=\S* )*(?:bedplate|make) ", code):
            yield code


def find_wrong_commands(text: str) -> list[str]:
    """Lines that name a verb or an option that does not exist."""
    root = command_tree()
    wrong = []
    for line in list_shell_lines(text):
        words = shlex.split(re.split(r" [|>#] | && ", line)[0])
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words[0] == "make":
            arguments = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            if words[1:2] != ["serve"] or not arguments:
                continue
            words = ["bedplate", "serve", *shlex.split(arguments[0])]
        command, before = root, ""
        for word in words[1:]:
            if word == "VERB":
                break
            is_value, before = takes_value(command, before), word
            if is_value:
                continue
            verbs = getattr(command, "commands", None)
            if word.startswith("-"):
                if word.partition("=")[0] not in list_options(command):
                    wrong.append(line)
            elif verbs is not None:
                if word not in verbs:
                    wrong.append(line)
                    break
                command = verbs[word]
    return wrong


@every_page
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    assert not find_wrong_commands(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "bedplate paint",
        "bedplate serve --no-such-option",
        "bedplate engines purge",
        "bedplate plan m.gguf --port 1",
        'make serve ARGS="--nope"',
        "BEDPLATE_API_KEY=a bedplate serve --kee",
    ],
)
def test_a_nonexistent_command_is_found(line: str) -> None:
    assert find_wrong_commands(f"Say `{line}`.") == [line]
    assert find_wrong_commands(f"```console\n$ {line}\n```\n") == [line]


def test_commands_are_found_on_the_pages() -> None:
    lines = [line for page in PAGES for line in list_shell_lines(page.read_text(encoding="utf-8"))]
    assert len(lines) > 40 and "bedplate engines remove ID" in lines


def list_verb_pages() -> dict[str, Path]:
    titles = ((page.read_text(encoding="utf-8").splitlines()[0], page) for page in DOCS.glob("*.md"))
    return {title.removeprefix("# bedplate "): page for title, page in titles if title.startswith("# bedplate ")}


def test_every_verb_has_exactly_one_page() -> None:
    verbs = set(command_tree().commands)
    assert set(list_verb_pages()) == verbs
    assert {page.stem for page in list_verb_pages().values()} == verbs
    listed = read_first_codes(read_rows((ROOT / "README.md").read_text(encoding="utf-8"), "Verbs"))
    assert {cell.split()[1] for cell in listed} == verbs


@pytest.mark.parametrize("verb", sorted(command_tree().commands))
def test_the_page_of_a_verb_lists_exactly_its_options(verb: str) -> None:
    table = read_rows(list_verb_pages()[verb].read_text(encoding="utf-8"))
    listed = {code for row in table if row[0].startswith("`-") for code in re.findall(r"`(-[^`]+)`", row[0])}
    assert sorted(listed) == sorted(list_options(command_tree().commands[verb]) - {"--help", "-h"})


# exit codes


def list_exit_codes(kind: type[BedplateError] = BedplateError) -> set[int]:
    return {kind.exit_code}.union(*(list_exit_codes(below) for below in kind.__subclasses__()))


def test_readme_lists_the_exit_codes_of_the_errors() -> None:
    table = read_rows((ROOT / "README.md").read_text(encoding="utf-8"), "Exit codes")
    assert [int(row[0]) for row in table] == sorted({0} | list_exit_codes())


# rules


def read_sources(*packages: str) -> Iterator[str]:
    for package in packages:
        for path in sorted((SOURCE / package).glob("*.py")):
            yield path.read_text(encoding="utf-8")


def test_the_rules_page_is_generated_from_the_rules() -> None:
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == write_rules_page(), "run `make docs`"


@pytest.mark.parametrize(
    "text", read_sources("decide"), ids=[path.name for path in sorted((SOURCE / "decide").glob("*.py"))]
)
def test_doc_pages_named_in_rules_exist(text: str) -> None:
    for page in re.findall(r"\bdocs/[\w-]+\.md", text):
        assert (ROOT / page).exists(), page


# the endpoint


def test_serve_page_lists_the_paths_of_the_gateway() -> None:
    table = read_first_codes(read_rows((DOCS / "serve.md").read_text(encoding="utf-8"), "Paths"))
    listed = {(method, path) for method, path in (cell.split() for cell in table)}
    there = {("POST", path.decode()) for path in (*APIS, *TRANSLATED, OLLAMA_SHOW.encode())} | {
        ("GET", path) for path in (*OWN_PAGES, MODEL_PAGE)
    }
    assert listed == there


def test_serve_page_lists_the_metrics_of_the_gateway() -> None:
    listed = read_first_codes(read_rows((DOCS / "serve.md").read_text(encoding="utf-8"), "Metrics"))
    there = {
        family.name + ("_total" if family.type == "counter" else "") for family in GatewayMetrics().registry.collect()
    }
    assert sorted(listed) == sorted(there)


def test_serve_page_lists_error_codes_of_the_gateway() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (SOURCE / "run" / "gateway").glob("*.py"))
    listed = set(read_first_codes(read_rows((DOCS / "serve.md").read_text(encoding="utf-8"), "Errors"), column=1))
    there = {code for code in listed if f'"{code}"' in source}
    there |= {f"engine_{state}" for state in get_args(BackendState)}
    assert len(listed) > 10 and listed <= there


# the skeleton of an engine


def test_the_engine_skeleton_implements_the_interface() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "add-an-engine.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    made: dict[str, Any] = {"__name__": "skeleton"}
    exec(compile(blocks[0], "add-an-engine.md", "exec"), made)
    one = made["ENGINE"]
    assert isinstance(one, Engine) and one.recipe is not None
    for name, member in vars(type(one)).items():
        if inspect.isfunction(member):
            assert inspect.signature(member) == inspect.signature(getattr(Engine, name)), name
    required = {name for name, member in vars(Engine).items() if "NotImplementedError" in _read_source(member)}
    assert required and required <= vars(type(one)).keys()


def _read_source(member: object) -> str:
    return inspect.getsource(member) if inspect.isfunction(member) else ""


def test_the_engine_page_lists_every_member_of_the_interface() -> None:
    cells = [row[0] for row in read_rows((DOCS / "add-an-engine.md").read_text(encoding="utf-8"), "The interface")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)(?:\(\))?`", cell)}
    there = {name for name in (*vars(Engine), *Engine.__annotations__) if not name.startswith("_")}
    assert listed == there - {"make_refusal"}  # which helps to write an engine, and is not for it to write
