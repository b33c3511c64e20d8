"""The configurations of clients are valid, name no key, and the endpoint is checked for what clients need."""

from __future__ import annotations

import ast
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from tests.commands import invoke

from bedplate.errors import UsageError
from bedplate.hosting.client_settings import AGENT_CONTEXT, CLIENTS, ServedEndpoint, connect_client
from bedplate.values.record import replace_fields

AT = ServedEndpoint(root="http://127.0.0.1:8080", model='a "b"/c', context_tokens=AGENT_CONTEXT)
LOCKED = ServedEndpoint(root="https://box", model="m", needs_key=True, context_tokens=4096, tools=False)


def read(client: str, at: ServedEndpoint) -> Any:
    """The configuration as its format is parsed."""
    text = connect_client(client, at).settings.text
    if client in ("claude-code", "zed"):
        return json.loads(text)
    if client == "codex":
        return tomllib.loads(text)
    if client in ("continue", "litellm"):
        return yaml.safe_load(text)
    if client in ("langchain", "llamaindex"):
        call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        return {word.arg: ast.unparse(word.value) for word in call.keywords}
    return dict(re.findall(r"^([\w ]+)[=:] ?(.*)$", text, re.MULTILINE))


def test_every_client_gets_the_address_and_the_model() -> None:
    assert read("claude-code", AT)["env"]["ANTHROPIC_BASE_URL"] == AT.root
    assert read("claude-code", AT)["env"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == AT.model
    codex = read("codex", AT)
    assert (codex["model"], codex["model_context_window"]) == (AT.model, AGENT_CONTEXT)
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == AT.url
    assert codex["model_providers"]["bedplate"]["wire_api"] == "responses"
    assert read("open-webui", AT)["OPENAI_API_BASE_URL"] == AT.url
    (entry,) = read("continue", AT)["models"]
    assert (entry["model"], entry["apiBase"], entry["capabilities"]) == (AT.model, AT.url, ["tool_use"])
    assert read("cline", AT)["Base URL"] == AT.url and read("cline", AT)["Model ID"] == AT.model
    provider = read("zed", AT)["language_models"]["openai_compatible"]["bedplate"]
    assert provider["api_url"] == AT.url and provider["available_models"][0]["capabilities"]["tools"]
    assert ast.literal_eval(read("langchain", AT)["model"]) == AT.model
    (litellm,) = read("litellm", AT)["model_list"]
    assert litellm["litellm_params"]["model"] == f"openai/{AT.model}"
    assert read("llamaindex", AT)["context_window"] == str(AGENT_CONTEXT)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_required_key_is_named_and_not_written(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_API_KEY", "sk-very-secret")
    settings = connect_client(client, LOCKED).settings
    read(client, LOCKED)
    assert "sk-very-secret" not in settings.text
    # Zed reads the variable that belongs to the name of the provider; Docker replaces no variables in a file.
    place = settings.use if client in ("zed", "open-webui") else settings.text
    assert "BEDPLATE_API_KEY" in place
    assert "BEDPLATE_API_KEY" not in connect_client(client, AT).settings.text


def test_agents_need_tools_and_should_have_a_long_context() -> None:
    agents = {client for client in CLIENTS if not connect_client(client, LOCKED).works}
    assert agents == {"claude-code", "codex", "continue", "cline", "zed"}
    found = connect_client("Claude Code", LOCKED)
    assert [(need.met, need.required) for need in found.needs[1:]] == [(True, True), (False, True), (False, False)]
    assert connect_client("claude-code", AT).works
    with pytest.raises(UsageError, match="emacs"):
        connect_client("emacs", AT)


def test_the_page_lists_the_clients() -> None:
    page = (Path(__file__).parents[2] / "docs" / "connect.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\w ]+) \| `([\w-]+)` \| ([\w ]+) \| (.*?) ?\| \[[^]]+\]\(([^)]+)\)", page, re.MULTILINE)
    apis = {"chat": "chat completions", "messages": "Messages", "responses": "Responses"}
    assert [(name, id, api, bool(needs)) for name, id, api, needs, _ in listed] == [
        (kind.name, kind.id, apis[kind.api], kind.agent) for kind, _ in CLIENTS.values()
    ]


def test_what_an_endpoint_does_not_report_is_not_called_met() -> None:
    silent = ServedEndpoint(root="https://box", model="m", reports_capabilities=False)
    found = connect_client("cline", silent)
    assert found.works and not any(need.known for need in found.needs)
    assert all("does not report" in need.hint for need in found.needs)
    without = replace_fields(silent, lacks=("messages",))
    needs = connect_client("claude-code", without).needs
    assert not needs[0].met and needs[0].known and "--endpoint https://box/v1" in needs[0].hint
    assert not connect_client("claude-code", without).works and connect_client("codex", without).works


class _Models(BaseHTTPRequestHandler):
    key: str | None = None
    capabilities: ClassVar[dict[str, Any] | None] = {"tools": "none", "vision": True}

    def do_GET(self) -> None:
        allowed = self.key is None or self.headers.get("authorization") == f"Bearer {self.key}"
        rows = [{"id": "small", "max_model_len": 2048, "capabilities": self.capabilities}]
        body = json.dumps({"data": rows} if allowed else {"error": {}}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        has = self.path == "/v1/responses" and json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(400 if has == {"model": "small"} else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[_Models]]]:
    class Handler(_Models):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_command_reads_the_endpoint(
    endpoint: tuple[str, type[_Models]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = endpoint
    done = invoke("connect", "zed", "--url", f"{url}/v1")
    assert done.code == 1 and "✗ tools" in done.err and "! context" in done.err
    made = json.loads(done.out)["language_models"]["openai_compatible"]["bedplate"]["available_models"][0]
    assert (made["name"], made["max_tokens"]) == ("small", 2048) and made["capabilities"]["images"]
    handler.key = "secret"
    monkeypatch.setenv("BEDPLATE_API_KEY", "secret")
    file = tmp_path / "new" / "settings.json"
    done = invoke("connect", "langchain", "--url", url, "-o", str(file))
    assert done.code == 0 and "BEDPLATE_API_KEY" in file.read_text() and "secret" not in file.read_text()
    again = invoke("connect", "langchain", "--url", url, "-o", str(file))
    assert again.code == 2 and "exists" in again.err
    monkeypatch.delenv("BEDPLATE_API_KEY")
    assert invoke("connect", "langchain", "--url", url).code == 2  # its models are not known
    assert invoke("connect", "emacs", "--url", url).code == 2
    assert invoke("connect", "zed", "--url", "http://127.0.0.1:1").code == 3


def test_the_command_asks_another_endpoint_for_the_api_of_the_client(endpoint: tuple[str, type[_Models]]) -> None:
    url, handler = endpoint
    assert "✓ the API /v1/messages" in invoke("connect", "claude-code", "--url", url).err, "a bedplate has it"
    handler.capabilities = None
    done = invoke("connect", "claude-code", "--url", url)
    assert done.code == 1 and "✗ the API /v1/messages" in done.err and "? tools" in done.err
    done = invoke("connect", "codex", "--url", url)
    assert done.code == 0 and "✓ the API /v1/responses" in done.err
