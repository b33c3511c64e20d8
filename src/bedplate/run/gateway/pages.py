"""Pages other than the streaming APIs: functions from a request to a response."""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from bedplate._version import __version__
from bedplate.run.gateway import sse
from bedplate.run.gateway.errors import encode_error_at
from bedplate.run.gateway.translate import ollama_pages
from bedplate.run.log_text import clean_line
from bedplate.values.tenant import DEFAULT_TENANT

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.heads import ClientRequest
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.server import Gateway
    from bedplate.run.start_phases import StartPhases

_log = logging.getLogger(__name__)
_STARTED = int(time.time())
MODEL_PAGE = "/v1/models/{name}"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PageRequest(NamedTuple):
    """A request for a page, after its key was checked."""

    tenant: str | None
    """The owner of the key; `None` at paths that need no key."""
    sees_all: bool
    """Whether all tenants' figures are shown: to an admin, and to everybody where no key is required."""
    accept: str
    query: Mapping[str, str]


class PageResponse(NamedTuple):
    body: bytes
    content_type: str
    headers: Mapping[str, str] = {}
    status: int = 200


PageAnswer = PageResponse | Coroutine[Any, Any, PageResponse]
"""A coroutine where engines are asked."""
Page = Callable[[PageRequest], PageResponse | None]
"""A registered page; where it returns `None`, the gateway's own page is shown. Keys are checked before the call."""
Action = Callable[[PageRequest, bytes], PageResponse]
"""What a POST to a path does, with its body. It checks what the caller may do."""


class PendingPage:
    """A page that waits for engines. It takes the place of an exchange at its connection."""

    def __init__(self, page: Coroutine[Any, Any, PageResponse], send: Callable[[PageResponse], None]) -> None:
        self._send = send
        self._task = asyncio.ensure_future(page)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[PageResponse]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("cannot build a page", exc_info=error)
            self._send(respond_error(500, "internal error in bedplate while building this page", "internal_error"))
        else:
            self._send(task.result())

    def is_at(self, backend: GatewayBackend) -> bool:
        return False

    def pause(self) -> None:
        """The page has not begun, so there is nothing to pause."""

    resume = pause

    def cancel(self) -> None:
        self._task.cancel()

    def stop(self, message: str) -> None:
        self._task.cancel()
        self._send(respond_error(503, message, "shutting_down"))


def show_page(gateway: Gateway, request: ClientRequest) -> PageAnswer:
    """Returns the page at the request's path, or an error in OpenAI's format."""
    path = _decode_path(request.head.path)
    try:
        return _find_page(gateway, path, request)
    except Exception:
        _log.exception("cannot build the page %s", clean_line(path[:200]))
        return respond_error(500, "internal error in bedplate while building this page", "internal_error")


def _find_page(gateway: Gateway, path: str, request: ClientRequest) -> PageAnswer:
    own_page = _find_own_page(path)
    method = request.head.method.decode("latin-1")
    if path == OLLAMA_SHOW and method == "POST":
        return _show_ollama_model(gateway, _read_page_request(gateway, request), request.body)
    if method in ("GET", "HEAD"):
        visit = _read_page_request(gateway, request)
        registered = gateway.handed.get(path)
        response: PageAnswer | None = registered(visit) if registered is not None else None
        if response is None and own_page is not None:
            response = own_page(gateway, visit)
        if response is not None:
            return response
    elif (action := gateway.actions.get(path)) is not None:
        return _reject_method(path, method, "POST") if method != "POST" else _run_action(gateway, action, request)
    elif own_page is not None:
        return _reject_method(path, method, "GET,HEAD")
    known = path.encode()
    if path == OLLAMA_SHOW or path in gateway.actions or known in sse.APIS or known in sse.TRANSLATED:
        return _reject_method(path, method, "POST")
    message = f"there is no page at {path}; / lists the endpoints"
    body = encode_error_at(known, 404, message, "invalid_request_error", "not_found")
    return PageResponse(body, "application/json", {}, 404)


def _run_action(gateway: Gateway, action: Action, request: ClientRequest) -> PageResponse:
    """Only pages of the endpoint itself may act, even where pages of other origins may use the API."""
    headers = dict(request.head.headers)
    origin = headers.get(b"origin", b"")
    if origin and not gateway.origins.is_same_origin(origin, headers.get(b"host", b"")):
        return respond_error(403, "web pages of other origins may not do this", "origin_not_allowed")
    # A form of another page cannot send this type.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        return respond_error(415, "send application/json", "unsupported_media_type")
    return action(_read_page_request(gateway, request), request.body)


def _find_own_page(path: str) -> Callable[[Gateway, PageRequest], PageAnswer] | None:
    name = path.removeprefix(MODEL_PAGE.removesuffix("{name}"))
    return partial(_show_model, name=name) if name and name != path else OWN_PAGES.get(path)


def _read_page_request(gateway: Gateway, request: ClientRequest) -> PageRequest:
    member = request.member
    is_open = gateway.tenants.is_open
    name = DEFAULT_TENANT if is_open else member.name if member is not None else None
    sees_all = is_open or (member is not None and member.is_admin)
    accept = next((value for name, value in request.head.headers if name == b"accept"), b"").decode("latin-1")
    query: dict[str, str] = {}
    for key, value in parse_qsl(request.head.target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True):
        query.setdefault(key, value)
    return PageRequest(name, sees_all, accept, query)


def _decode_path(path: bytes) -> str:
    return unquote_to_bytes(path).decode("utf-8", "replace")


def _show_health(gateway: Gateway, visit: PageRequest) -> PageResponse:
    unready = next((r for r in gateway.routes if not r.is_ready and not r.on_demand and r.held is None), None)
    backend = unready.backends[0] if unready is not None and unready.backends else None
    if not gateway.routes:
        return respond_json({"status": "loading", "models": {}}, 503, {"Retry-After": "1"})
    body = {
        "status": "ok" if unready is None else backend.state if backend is not None else "stopped",
        "models": {route.model: _describe_state(route) for route in _list_visible(gateway, visit)},
    }
    if unready is None:
        return respond_json(body)
    return respond_json(body, 503, {"Retry-After": str(backend.retry_after_s if backend is not None else 5)})


def _show_ready(gateway: Gateway, visit: PageRequest) -> PageResponse:
    """Whether the gateway takes requests, whatever the state of the engines: one that fails must not stop all."""
    if gateway.starting:
        return respond_json({"status": "starting"}, 503, {"Retry-After": "1"})
    return respond_json({"status": "ready"})


def _list_models(gateway: Gateway, visit: PageRequest) -> PageResponse:
    return respond_json({"object": "list", "data": [_describe_model(one) for one in _list_visible(gateway, visit)]})


def _show_model(gateway: Gateway, visit: PageRequest, *, name: str) -> PageResponse:
    route = gateway.find_route(name)
    if route is None or not _may_use(route, visit):
        return respond_error(404, f"the model {name!r} is not served here", "model_not_found")
    return respond_json(_describe_model(route))


def _show_metrics(gateway: Gateway, visit: PageRequest) -> PageResponse:
    if visit.sees_all:
        body = gateway.meters.render_all(gateway.routes, gateway.keeper.lost if gateway.keeper is not None else 0)
    else:
        body = gateway.meters.render_tenant(visit.tenant or "")
    return PageResponse(body, METRICS_TYPE)


def _show_engine_metrics(gateway: Gateway, visit: PageRequest) -> PageAnswer:
    if not visit.sees_all:
        message = (
            "the metrics of engines include all tenants; `bedplate keys set NAME --admin` allows a key to read them"
        )
        return respond_error(403, message, "not_permitted")

    async def collect() -> PageResponse:
        return PageResponse(await gateway.engine_metrics.render(gateway.routes), METRICS_TYPE)

    return collect()


def _show_welcome(gateway: Gateway, visit: PageRequest) -> PageResponse:
    if "text/html" in visit.accept:
        return PageResponse(_write_welcome_html(gateway, visit).encode(), "text/html; charset=utf-8")
    return PageResponse(_write_welcome_text(gateway, visit).encode(), "text/plain; charset=utf-8")


def _list_ollama_models(gateway: Gateway, visit: PageRequest) -> PageResponse:
    return respond_json(ollama_pages.list_models(_list_visible(gateway, visit), _STARTED))


def _list_ollama_running(gateway: Gateway, visit: PageRequest) -> PageResponse:
    return respond_json(ollama_pages.list_running(_list_visible(gateway, visit), _STARTED))


def _show_ollama_version(gateway: Gateway, visit: PageRequest) -> PageResponse:
    return respond_json({"version": ollama_pages.VERSION})


def _show_ollama_model(gateway: Gateway, visit: PageRequest, body: bytes) -> PageResponse:
    try:
        asked = msgspec.json.decode(body, type=dict[str, object])
    except sse.UNREADABLE:
        return respond_json({"error": "the request body is not valid"}, 400)
    name = str(asked.get("model") or asked.get("name") or "")
    route = gateway.find_route(name) or gateway.find_route(ollama_pages.find_name(name))
    if route is None or not _may_use(route, visit):
        return respond_json({"error": f"the model {name!r} is not served here"}, 404)
    return respond_json(ollama_pages.show_model(route, _STARTED))


OWN_PAGES: dict[str, Callable[[Gateway, PageRequest], PageAnswer]] = {
    "/": _show_welcome,
    "/health": _show_health,
    "/ready": _show_ready,
    "/metrics": _show_metrics,
    "/metrics/engines": _show_engine_metrics,
    "/models": _list_models,
    "/v1/models": _list_models,
    "/api/tags": _list_ollama_models,
    "/api/ps": _list_ollama_running,
    "/api/version": _show_ollama_version,
}
OLLAMA_SHOW = "/api/show"
"""The only page that is requested with POST."""


def _may_use(route: Route, visit: PageRequest) -> bool:
    if visit.sees_all:
        return True
    return visit.tenant is not None and (route.allowed is None or visit.tenant in route.allowed)


def _list_visible(gateway: Gateway, visit: PageRequest) -> list[Route]:
    """The models that the visitor may use; none without a key where one is required."""
    return [route for route in gateway.routes if _may_use(route, visit)]


def _describe_state(route: Route) -> dict[str, object]:
    """The state of the first backend that accepts requests, and of each one where there are several."""
    backends = sorted(route.backends, key=lambda b: not b.takes_new)
    if not backends:
        return {"engine": None, "state": "loading" if route.wanted else "not loaded", "progress": None}
    state: dict[str, object] = {
        "engine": backends[0].engine, "state": backends[0].state, "progress": backends[0].progress,
        **_describe_phase(backends[0].phases),
    }  # fmt: skip
    if backends[0].state != "ready" and backends[0].last_exit is not None:
        state["cause"] = backends[0].last_exit.cause
    if len(backends) > 1:
        state["backends"] = [
            {
                "engine": b.engine,
                "state": b.state,
                "progress": b.progress,
                **_describe_phase(b.phases),
                "share": b.share,
                "well": b.health.is_healthy,
                "in_flight": b.in_flight,
                **({"cause": b.last_exit.cause} if b.state != "ready" and b.last_exit is not None else {}),
            }
            for b in route.backends
        ]
    return state


def _describe_phase(phases: StartPhases) -> dict[str, object]:
    """The current phase of a start, for an engine whose log shows phases."""
    if phases.current is None:
        return {}
    return {"phase": phases.current, "phase_s": round(phases.current_s, 1)}


def _describe_model(route: Route) -> dict[str, object]:
    first = min(route.backends, key=lambda b: not b.takes_new, default=None)
    return {
        "id": route.model,
        "object": "model",
        "created": _STARTED,
        "owned_by": "bedplate",
        "engine": first.engine if first is not None else None,
        "engine_version": first.engine_version if first is not None else None,
        "max_model_len": first.context_tokens if first is not None else None,
        "capabilities": route.capabilities,
    }


def write_curl_command(url: str, needs_key: bool, model: str | None = None) -> str:
    """A complete command, in lines that fit a terminal of 80 columns. `max_tokens` is set since a small model may not
    end its answer by itself."""
    named = f'"model":"{model}",\n       ' if model is not None else ""
    key = "  -H 'authorization: Bearer YOUR-KEY' \\\n" if needs_key else ""
    return (
        f"curl {url}/v1/chat/completions \\\n{key}"
        "  -H 'content-type: application/json' \\\n"
        f"""  -d '{{{named}"messages":[{{"role":"user","content":"Why is the sky blue?"}}],\n"""
        """       "max_tokens":100}'"""
    )


def _write_welcome_text(gateway: Gateway, visit: PageRequest) -> str:
    lines = [f"bedplate {__version__}", ""]
    backends = [backend for route in _list_visible(gateway, visit) for backend in route.backends]
    lines += [f"{b.model} is served by {b.engine} {b.engine_version} ({b.state})" for b in backends]
    lines += [
        "",
        f"OpenAI clients: base_url={gateway.url}/v1",
        "",
        write_curl_command(gateway.url, gateway.needs_key),
        "",
    ]
    return "\n".join(lines)


def _write_welcome_html(gateway: Gateway, visit: PageRequest) -> str:
    visible = _list_visible(gateway, visit)
    url = html.escape(gateway.url)
    rows = "".join(
        f"<tr><td><code>{html.escape(b.model)}</code></td><td>{html.escape(f'{b.engine} {b.engine_version}')}</td>"
        f"<td class={b.state}>{b.state}{'' if b.progress is None or b.state == 'ready' else f' {b.progress:.0%}'}</td>"
        f"<td>{'' if b.context_tokens is None else f'{b.context_tokens:,} tokens'}</td></tr>"
        for b in (backend for route in visible for backend in route.backends)
    )
    first = html.escape(visible[0].model if visible else "MODEL")
    key = "YOUR-KEY" if gateway.needs_key else "none"
    key_note = (
        "<p>This endpoint requires an API key. Send it as <code>Authorization: Bearer KEY</code>.</p>"
        if gateway.needs_key
        else ""
    )
    return _PAGE.format(
        version=__version__, rows=rows, url=url, model=first, key=key, key_note=key_note,
        curl=html.escape(write_curl_command(gateway.url, gateway.needs_key)),
    )  # fmt: skip


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>bedplate</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 3rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h1 small {{ font-weight: normal; opacity: .6; }} h2 {{ font-size: 1rem; margin-top: 2rem; }}
pre {{ padding: .8rem 1rem; overflow-x: auto; border-radius: .4rem;
  background: color-mix(in srgb, currentColor 8%, transparent); }}
code, pre {{ font-family: ui-monospace, monospace; font-size: .875rem; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; }}
th {{ font-weight: normal; opacity: .6; }}
.ready {{ color: light-dark(#116329, #4ac26b); }} .failed {{ color: light-dark(#a40e26, #ff7b72); }}
</style></head><body>
<h1>bedplate <small>{version}</small></h1>
<table><tr><th>model<th>engine<th>state<th>context</tr>{rows}</table>{key_note}
<h2>Send a request</h2><pre>{curl}</pre>
<h2>Use the Python client</h2><pre>from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Why is the sky blue?"}}],
)
print(answer.choices[0].message.content)</pre>
<h2>Endpoints</h2>
<p><a href="/v1/models">/v1/models</a> · <a href="/health">/health</a> · <a href="/metrics">/metrics</a> ·
<code>/v1/chat/completions</code> <code>/v1/completions</code> <code>/v1/responses</code> <code>/v1/messages</code>
<code>/v1/embeddings</code> <code>/tokenize</code>, if the engine supports them</p>
</body></html>
"""


def respond_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> PageResponse:
    return PageResponse(msgspec.json.encode(value), "application/json", headers or {}, status)


def respond_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> PageResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return PageResponse(sse.encode_error(message, kind, code), "application/json", headers or {}, status)


def _reject_method(path: str, method: str, allowed: str) -> PageResponse:
    message = f"{path} does not accept {method}; use {allowed.replace(',', ' or ')}"
    return respond_error(405, message, "method_not_allowed", {"Allow": allowed})
