"""Pages other than the streaming APIs: functions from a request to a response."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from bedplate._version import __version__
from bedplate.run.gateway import sse
from bedplate.run.log_text import clean_line
from bedplate.values.tenant import DEFAULT_TENANT

if TYPE_CHECKING:
    from bedplate.run.gateway.heads import ClientRequest
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.server import Gateway
    from bedplate.run.start_phases import StartPhases

_log = logging.getLogger(__name__)
_STARTED = int(time.time())
MODEL_PAGE = "/v1/models/{name}"


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


Page = Callable[[PageRequest], PageResponse | None]
"""A registered page; where it returns `None`, the gateway's own page is shown. Keys are checked before the call."""


def show_page(gateway: Gateway, request: ClientRequest) -> PageResponse:
    """Returns the page at the request's path, or an error in OpenAI's format."""
    path = _decode_path(request.head.path)
    try:
        return _find_page(gateway, path, request)
    except Exception:
        _log.exception("cannot build the page %s", clean_line(path[:200]))
        return _respond_error(500, "internal error in bedplate while building this page", "internal_error")


def _find_page(gateway: Gateway, path: str, request: ClientRequest) -> PageResponse:
    own_page = _find_own_page(path)
    method = request.head.method.decode("latin-1")
    if method in ("GET", "HEAD"):
        visit = _read_page_request(gateway, request)
        registered = gateway.handed.get(path)
        response = registered(visit) if registered is not None else None
        if response is None and own_page is not None:
            response = own_page(gateway, visit)
        if response is not None:
            return response
    elif own_page is not None:
        return _reject_method(path, method, "GET,HEAD")
    if path.encode() in sse.APIS:
        return _reject_method(path, method, "POST")
    return _respond_error(404, f"there is no page at {path}; / lists the endpoints", "not_found")


def _find_own_page(path: str) -> Callable[[Gateway, PageRequest], PageResponse] | None:
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
        return _respond_json({"status": "loading", "models": {}}, 503, {"Retry-After": "1"})
    body = {
        "status": "ok" if unready is None else backend.state if backend is not None else "stopped",
        "models": {route.model: _describe_state(route) for route in _list_visible(gateway, visit)},
    }
    if unready is None:
        return _respond_json(body)
    return _respond_json(body, 503, {"Retry-After": str(backend.retry_after_s if backend is not None else 5)})


def _list_models(gateway: Gateway, visit: PageRequest) -> PageResponse:
    return _respond_json({"object": "list", "data": [_describe_model(one) for one in _list_visible(gateway, visit)]})


def _show_model(gateway: Gateway, visit: PageRequest, *, name: str) -> PageResponse:
    route = gateway.find_route(name)
    if route is None or not _may_use(route, visit):
        return _respond_error(404, f"the model {name!r} is not served here", "model_not_found")
    return _respond_json(_describe_model(route))


def _show_metrics(gateway: Gateway, visit: PageRequest) -> PageResponse:
    if visit.sees_all:
        body = gateway.meters.render_all(gateway.routes, gateway.keeper.lost if gateway.keeper is not None else 0)
    else:
        body = gateway.meters.render_tenant(visit.tenant or "")
    return PageResponse(body, "text/plain; version=0.0.4; charset=utf-8")


def _show_welcome(gateway: Gateway, visit: PageRequest) -> PageResponse:
    if "text/html" in visit.accept:
        return PageResponse(_write_welcome_html(gateway, visit).encode(), "text/html; charset=utf-8")
    return PageResponse(_write_welcome_text(gateway, visit).encode(), "text/plain; charset=utf-8")


OWN_PAGES: dict[str, Callable[[Gateway, PageRequest], PageResponse]] = {
    "/": _show_welcome,
    "/health": _show_health,
    "/metrics": _show_metrics,
    "/models": _list_models,
    "/v1/models": _list_models,
}


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


def write_curl_command(url: str, needs_key: bool) -> str:
    """A complete command; `max_tokens` is set since a small model may not end its answer by itself."""
    key = "-H 'authorization: Bearer YOUR-KEY' " if needs_key else ""
    return (
        f"curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \\\n"
        """     -d '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"max_tokens":100}'"""
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


def _respond_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> PageResponse:
    return PageResponse(msgspec.json.encode(value), "application/json", headers or {}, status)


def _respond_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> PageResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return PageResponse(sse.encode_error(message, kind, code), "application/json", headers or {}, status)


def _reject_method(path: str, method: str, allowed: str) -> PageResponse:
    message = f"{path} does not accept {method}; use {allowed.replace(',', ' or ')}"
    return _respond_error(405, message, "method_not_allowed", {"Allow": allowed})
