"""The tables of docs/apis.md match the engines and the clients that are tested."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path

from tests.api_clients import CHECKS
from tests.api_engines import ENGINES

from bedplate.engines import get_engine, load_engines
from bedplate.run.gateway.sse import TRANSLATED
from bedplate.run.gateway.translate.front import NATIVE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "apis.md").read_text(encoding="utf-8")
TESTS = ("e2e/test_api_clients.py", "fleet/test_api_engines.py")
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
        if api == "transcriptions":
            has_task = ["transcribe" in engine.tasks for engine in engines]
            assert cells == ["as it is" if one else "–" for one in has_task], client
            speech = (ROOT / "tests" / "fleet" / "test_speech_real.py").read_text(encoding="utf-8")
            assert "client.audio.transcriptions.create" in speech
            continue
        own = [api == "chat completions" or APIS[api] in engine.requests.apis for engine in engines]
        assert cells == ["as it is" if one else "translated" for one in own], client
    assert {api for _, _, api, *_ in rows} == {"chat completions", "transcriptions", *APIS}
    assert set(NATIVE.values()) == {api for api in APIS.values() if api is not None}


def test_each_row_is_a_check_that_runs_with_each_engine_of_the_table() -> None:
    rows = {(client.strip("`"), api) for client, _, api, *_ in read_rows("client")[1:]}
    assert rows == {*CHECKS, ("openai", "transcriptions")}
    files = [(ROOT / "tests" / name).read_text(encoding="utf-8") for name in TESTS]
    assert all('@pytest.mark.parametrize(("client", "api"), CHECKS)' in text for text in files)
    assert "params=ENGINES" in files[1]


def test_the_versions_of_the_clients_are_those_that_the_tests_install() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["dev"]
    pinned = dict(entry.split("==") for entry in groups if "==" in entry)
    for client, version, *_ in read_rows("client")[1:]:
        name = client.strip("`")
        assert version == pinned[name] == installed_version(name)
