"""The tables of docs/apis.md match the engines and the clients that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.api_engines import ENGINES

from bedplate.engines import get_engine, load_engines
from bedplate.run.gateway.sse import TRANSLATED
from bedplate.run.gateway.translate.front import NATIVE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "apis.md").read_text(encoding="utf-8")
APIS = {"Messages": "messages", "Responses": "responses", "Ollama": None}


def read_rows(first: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, with the headings."""
    table = re.search(rf"^\| {first} \|.*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return [rows[0], *rows[2:]]


def test_the_page_lists_the_paths_and_the_engines_that_have_an_api() -> None:
    _, *rows = read_rows("API")
    pages = {"/api/tags", "/api/show", "/api/ps", "/api/version"}
    assert {path for row in rows for path in re.findall(r"`([^`]+)`", row[1])} == pages | {
        path.decode() for path in TRANSLATED
    }
    for row in rows[:2]:
        api = APIS[row[0].split()[-1]]
        has = {engine.name for engine in load_engines().values() if api in engine.requests.apis}
        assert set(row[2].split(", ")) == has


def test_the_table_of_clients_has_the_versions_of_the_engines_and_how_requests_reach_them() -> None:
    heads, *rows = read_rows("client")
    engines = [get_engine(id) for id in ("llama.cpp", *ENGINES)]
    assert heads[3:] == [f"{engine.name} {engine.version}" for engine in engines]
    for client, _, api, *cells in rows:
        own = [api == "chat completions" or APIS[api] in engine.requests.apis for engine in engines]
        assert cells == ["as it is" if one else "translated" for one in own], client
    assert {api for _, _, api, *_ in rows} == {"chat completions", *APIS}
    assert set(NATIVE.values()) == {api for api in APIS.values() if api is not None}


def test_the_clients_of_the_table_are_those_that_the_tests_install() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["dev"]
    least = dict(entry.split(">=") for entry in groups if ">=" in entry)
    for client, version, *_ in read_rows("client")[1:]:
        numbers = [int(part) for part in version.split(".")]
        assert numbers >= [int(part) for part in least[client.strip("`")].split(".")], client
