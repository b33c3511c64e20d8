"""The tables of docs/apis.md match the engines and the clients that are tested."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
from tests.api_clients import CHECKS
from tests.api_engines import ENGINES

from bedplate.engines import get_engine, load_engines
from bedplate.run.gateway.request_checks import RequestMistake
from bedplate.run.gateway.sse import TRANSLATED
from bedplate.run.gateway.translate.front import NATIVE, Translation
from bedplate.run.gateway.translate.messages import MessagesTranslation
from bedplate.run.gateway.translate.ollama import EmbedTranslation, GenerateTranslation, OllamaTranslation
from bedplate.run.gateway.translate.responses import ResponsesTranslation

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


TRANSLATED_FIELDS = {
    "Anthropic Messages": "max_tokens messages model output_config stop_sequences stream system temperature top_p top_k"
    " tool_choice tools",
    "OpenAI Responses": "input instructions max_output_tokens model parallel_tool_calls reasoning store stream"
    " temperature text tool_choice tools top_p truncation user",
    "Ollama": "format images input dimensions messages model options prompt stream system think tools",
}
TRANSPORT = {"self", "betas", "extra_headers", "extra_query", "extra_body", "timeout"}


def list_fields(api: str) -> dict[str, tuple[Callable[[], Translation], dict[str, Any]]]:
    """The fields that a client can send, each with a translation and a request to which it can be added."""
    import anthropic.resources.beta.messages
    import ollama
    import openai.resources.responses

    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    kinds: dict[str, list[tuple[Any, Callable[[], Translation], dict[str, Any]]]] = {
        "Anthropic Messages": [
            (anthropic.resources.messages.Messages.create, MessagesTranslation, asked),
            (anthropic.resources.beta.messages.Messages.create, MessagesTranslation, asked),
        ],
        "OpenAI Responses": [(openai.resources.responses.Responses.create, ResponsesTranslation, {"input": "hi"})],
        "Ollama": [
            (ollama.Client.embed, EmbedTranslation, {"model": "small", "input": "hi"}),
            (ollama.Client.generate, GenerateTranslation, {"model": "small", "prompt": "hi"}),
            (ollama.Client.chat, OllamaTranslation, asked),
        ],
    }
    return {
        name: (make, body)
        for create, make, body in kinds[api]
        for name in inspect.signature(create).parameters
        if name not in TRANSPORT
    }


@pytest.mark.parametrize("api", TRANSLATED_FIELDS)
def test_every_field_of_the_clients_is_translated_rejected_or_listed_as_ignored(api: str) -> None:
    section = " ".join(PAGE.split(f"## {api}\n")[1].split("\n## ")[0].split())
    listed = set(re.findall(r"`(\w+)`", section.split("Ignored: ")[1].split(". ")[0]))
    rejected, ignored = set(), set()
    for name, (make, body) in list_fields(api).items():
        if name in TRANSLATED_FIELDS[api].split():
            continue
        try:
            made = make().to_chat(json.dumps({**body, name: 1}).encode())
        except RequestMistake as mistake:
            assert (mistake.code, mistake.param) == ("unsupported_parameter", name)
            rejected.add(name)
        else:
            assert made == make().to_chat(json.dumps(body).encode()), name
            ignored.add(name)
    assert ignored - listed == set() and rejected & listed == set()
    assert {name for name in rejected if f"`{name}`" not in section} == set()


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
