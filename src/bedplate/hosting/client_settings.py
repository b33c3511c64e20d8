"""The configuration of clients that people use with the endpoint, and whether the endpoint has what they need. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from bedplate.errors import UsageError
from bedplate.values.record import Record

KEY_VARIABLE = "BEDPLATE_API_KEY"
"""Configurations name this variable; a key is never written to a file."""
AGENT_CONTEXT = 65_536
"""Context for coding agents: https://docs.ollama.com/integrations/claude-code and .../codex recommend 64k tokens."""
Api = Literal["chat", "messages", "responses"]
API_PATHS: dict[Api, str] = {"messages": "/v1/messages", "responses": "/v1/responses"}
"""APIs that not every endpoint has."""


class ServedEndpoint(Record, frozen=True, kw_only=True):
    """An endpoint and one of its models, as a client needs them."""

    root: str
    """The address without /v1."""
    model: str
    needs_key: bool = False
    context_tokens: int | None = None
    tools: bool = True
    vision: bool = False
    generation: bool = True
    reports_capabilities: bool = True
    """Otherwise `tools`, `vision` and `generation` are assumed."""
    lacks: tuple[Api, ...] = ()
    """The APIs that it was asked for and does not have."""

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


class ClientSettings(Record, frozen=True, kw_only=True):
    """The configuration of a client."""

    client: str
    name: str
    api: Api
    file: str
    """Where the client reads it, or what to do with it."""
    text: str
    use: str
    """How to start the client with it."""
    source: str


class ClientNeed(Record, frozen=True, kw_only=True):
    need: str
    met: bool
    required: bool
    """Whether the client does not work without it."""
    hint: str = ""
    known: bool = True
    """Whether the endpoint says so; otherwise `met` is assumed."""


class ConnectedClient(Record, frozen=True, kw_only=True):
    """The configuration of a client for an endpoint, and what the client needs of it."""

    schema: Literal["connected/1"] = "connected/1"
    endpoint: ServedEndpoint
    settings: ClientSettings
    needs: tuple[ClientNeed, ...]

    @property
    def works(self) -> bool:
        return all(need.met for need in self.needs if need.required)


class ClientKind(Record, frozen=True, kw_only=True):
    """A client: its API, and what it needs."""

    id: str
    name: str
    api: Api
    file: str
    use: str
    source: str
    agent: bool = False
    """Whether it works by tools, with long prompts."""


def _write_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _quote(text: str) -> str:
    """A string of TOML, YAML or Python."""
    return json.dumps(text, ensure_ascii=False)


def _write_claude_code(at: ServedEndpoint) -> str:
    models = {f"ANTHROPIC_DEFAULT_{name}_MODEL": at.model for name in ("OPUS", "SONNET", "HAIKU")}
    env = {
        "ANTHROPIC_BASE_URL": at.root,
        "ANTHROPIC_MODEL": at.model,
        **models,
        # It changes with each request, so that no prefix of the prompt would be found in the KV cache.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if at.context_tokens is not None:
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(max(1024, at.context_tokens // 4))
    if at.needs_key:
        return _write_json({"apiKeyHelper": f"printenv {KEY_VARIABLE}", "env": env})
    return _write_json({"env": {**env, "ANTHROPIC_AUTH_TOKEN": "none"}})


def _write_codex(at: ServedEndpoint) -> str:
    lines = [f"model = {_quote(at.model)}", 'model_provider = "bedplate"', 'web_search = "disabled"']
    if at.context_tokens is not None:
        lines.append(f"model_context_window = {at.context_tokens}")
    lines += ["", "[model_providers.bedplate]", 'name = "bedplate"', f"base_url = {_quote(at.url)}"]
    lines += ['wire_api = "responses"', *([f'env_key = "{KEY_VARIABLE}"'] if at.needs_key else [])]
    return "\n".join(lines) + "\n"


def _write_open_webui(at: ServedEndpoint) -> str:
    # Docker does not replace variables in this file, so that the command passes the key.
    return f"OPENAI_API_BASE_URL={at.url}\n"


def _write_continue(at: ServedEndpoint) -> str:
    capabilities = [name for name, has in (("tool_use", at.tools), ("image_input", at.vision)) if has]
    lines = ["name: bedplate", "version: 1.0.0", "schema: v1", "models:", f"  - name: {_quote(at.model)}"]
    lines += ["    provider: openai", f"    model: {_quote(at.model)}", f"    apiBase: {_quote(at.url)}"]
    lines.append(f"    apiKey: {'${{ secrets.' + KEY_VARIABLE + ' }}' if at.needs_key else 'none'}")
    lines += ["    roles: [chat, edit, apply]", f"    capabilities: [{', '.join(capabilities)}]"]
    if at.context_tokens is not None:
        lines += ["    defaultCompletionOptions:", f"      contextLength: {at.context_tokens}"]
    return "\n".join(lines) + "\n"


def _write_cline(at: ServedEndpoint) -> str:
    rows = [
        ("API Provider", "OpenAI Compatible"),
        ("Base URL", at.url),
        ("API Key", f"the value of {KEY_VARIABLE}" if at.needs_key else "none"),
        ("Model ID", at.model),
        ("Context Window Size", str(at.context_tokens or "the context of the model")),
        ("Supports Images", "yes" if at.vision else "no"),
    ]
    return "".join(f"{name}: {value}\n" for name, value in rows)


def _write_zed(at: ServedEndpoint) -> str:
    known = {"tools": at.tools, "images": at.vision, "parallel_tool_calls": False, "prompt_cache_key": False}
    model = {"name": at.model, "display_name": at.model, "max_tokens": at.context_tokens or 8192, "capabilities": known}
    provider = {"api_url": at.url, "available_models": [model]}
    return _write_json({"language_models": {"openai_compatible": {"bedplate": provider}}})


def _write_key(at: ServedEndpoint) -> str:
    return f'os.environ["{KEY_VARIABLE}"]' if at.needs_key else '"none"'


def _write_langchain(at: ServedEndpoint) -> str:
    first = "import os\n\n" if at.needs_key else ""
    return (
        f"{first}from langchain_openai import ChatOpenAI\n\n"
        f"model = ChatOpenAI(model={_quote(at.model)}, base_url={_quote(at.url)}, api_key={_write_key(at)})\n"
    )


def _write_litellm(at: ServedEndpoint) -> str:
    key = f"os.environ/{KEY_VARIABLE}" if at.needs_key else "none"
    return (
        f"model_list:\n  - model_name: {_quote(at.model)}\n    litellm_params:\n"
        f"      model: {_quote('openai/' + at.model)}\n      api_base: {_quote(at.url)}\n      api_key: {key}\n"
    )


def _write_llamaindex(at: ServedEndpoint) -> str:
    first = "import os\n\n" if at.needs_key else ""
    context = f"    context_window={at.context_tokens},\n" if at.context_tokens is not None else ""
    return (
        f"{first}from llama_index.llms.openai_like import OpenAILike\n\n"
        f"model = OpenAILike(\n    model={_quote(at.model)},\n    api_base={_quote(at.url)},\n"
        f"    api_key={_write_key(at)},\n    is_chat_model=True,\n"
        f"    is_function_calling_model={at.tools},\n{context})\n"
    )


CLIENTS: dict[str, tuple[ClientKind, Callable[[ServedEndpoint], str]]] = {
    kind.id: (kind, write)
    for kind, write in (
        (
            ClientKind(
                id="claude-code", name="Claude Code", api="messages", agent=True,
                file="~/.claude/settings.json, or any file", use="claude --settings FILE",
                source="https://code.claude.com/docs/en/llm-gateway and .../settings",
            ),
            _write_claude_code,
        ),
        (
            ClientKind(
                id="codex", name="Codex", api="responses", agent=True,
                file="~/.codex/bedplate.config.toml", use="codex --profile bedplate",
                source="https://developers.openai.com/codex/config-reference",
            ),
            _write_codex,
        ),
        (
            ClientKind(
                id="open-webui", name="Open WebUI", api="chat",
                file="the environment of Open WebUI, read at its first start",
                # In the host's network it reaches an endpoint on this machine, and needs another port than 8080.
                use=f'docker run --network host -e PORT=3000 -e OPENAI_API_KEY="${{{KEY_VARIABLE}:-none}}" '
                "--env-file FILE ghcr.io/open-webui/open-webui:main",
                source="https://docs.openwebui.com/getting-started/env-configuration",
            ),
            _write_open_webui,
        ),
        (
            ClientKind(
                id="continue", name="Continue", api="chat", agent=True,
                file="~/.continue/config.yaml", use="reload the editor's window",
                source="https://docs.continue.dev/reference",
            ),
            _write_continue,
        ),
        (
            ClientKind(
                id="cline", name="Cline", api="chat", agent=True,
                file="the settings of the extension", use="enter these values",
                source="https://docs.cline.bot/provider-config/openai-compatible",
            ),
            _write_cline,
        ),
        (
            ClientKind(
                id="zed", name="Zed", api="chat", agent=True,
                file="~/.config/zed/settings.json",
                # crates/language_models/src/provider/open_ai_compatible.rs: without a key it sends no request.
                use=f"start Zed with {KEY_VARIABLE}, of any value if no key is required; choose the model in its panel",
                source="https://zed.dev/docs/ai/use-api-access",
            ),
            _write_zed,
        ),
        (
            ClientKind(
                id="langchain", name="LangChain", api="chat", file="your program", use="model.invoke(\"Hello\")",
                source="https://docs.langchain.com/oss/python/integrations/chat/openai",
            ),
            _write_langchain,
        ),
        (
            ClientKind(
                id="litellm", name="LiteLLM", api="chat", file="config.yaml of the proxy", use="litellm --config FILE",
                source="https://docs.litellm.ai/docs/providers/openai_compatible",
            ),
            _write_litellm,
        ),
        (
            ClientKind(
                id="llamaindex", name="LlamaIndex", api="chat", file="your program", use="model.complete(\"Hello\")",
                source="https://developers.llamaindex.ai/python/framework-api-reference/llms/openai_like",
            ),
            _write_llamaindex,
        ),
    )
}  # fmt: skip


def find_client(client: str) -> str:
    """The id of a client; raises `UsageError` if it is not known."""
    wanted = client.lower().replace("_", "-").replace(" ", "-")
    if wanted not in CLIENTS:
        raise UsageError(f"unknown client {client!r}", hint=f"choose {', '.join(CLIENTS)}")
    return wanted


def connect_client(client: str, endpoint: ServedEndpoint) -> ConnectedClient:
    kind, write = CLIENTS[find_client(client)]
    settings = ClientSettings(
        client=kind.id, name=kind.name, api=kind.api, file=kind.file, text=write(endpoint), use=kind.use,
        source=kind.source,
    )  # fmt: skip
    return ConnectedClient(endpoint=endpoint, settings=settings, needs=tuple(_list_needs(kind, endpoint)))


def _list_needs(kind: ClientKind, at: ServedEndpoint) -> list[ClientNeed]:
    needs = []
    if kind.api in API_PATHS:
        met = kind.api not in at.lacks
        hint = "" if met else f"bedplate serve --endpoint {at.url} has it, and translates requests for this one"
        needs.append(ClientNeed(need=f"the API {API_PATHS[kind.api]}", met=met, required=True, hint=hint))
    known = at.reports_capabilities
    hint = "" if at.generation else "this is not a generation model; serve another one"
    needs.append(_make_need("text generation", at.generation, required=True, hint=hint, known=known))
    if not kind.agent:
        return needs
    hint = "" if at.tools else "serve a model whose chat template has tools, on an engine that supports them"
    needs.append(_make_need("tools", at.tools, required=True, hint=hint, known=known))
    enough = at.context_tokens is None or at.context_tokens >= AGENT_CONTEXT
    hint = "" if enough else f"bedplate serve --context {AGENT_CONTEXT}; long prompts are rejected otherwise"
    need = f"context of {AGENT_CONTEXT:,} tokens"
    needs.append(_make_need(need, enough, required=False, hint=hint, known=at.context_tokens is not None))
    return needs


def _make_need(need: str, met: bool, *, required: bool, hint: str, known: bool) -> ClientNeed:
    shown = hint if known else "not checked: the endpoint does not report it"
    return ClientNeed(need=need, met=met, required=required, hint=shown, known=known)
