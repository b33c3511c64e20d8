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
from bedplate.values.tenant import DEFAULT_TENANT

if TYPE_CHECKING:
    from bedplate.run.gateway.client import Request
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.server import Gateway

_log = logging.getLogger(__name__)
_STARTED = int(time.time())
MODEL_PAGE = "/v1/models/{name}"


class Visit(NamedTuple):
    """A request for a page, after its key was checked."""

    tenant: str | None
    """The owner of the key; `None` at paths that need no key."""
    sees_all: bool
    """Whether all tenants' figures are shown: to an admin, and to everybody where no key is required."""
    accept: str
    query: Mapping[str, str]


class Shown(NamedTuple):
    body: bytes
    content_type: str
    headers: Mapping[str, str] = {}
    status: int = 200


Page = Callable[[Visit], Shown | None]
"""A registered page; where it returns `None`, the gateway's own page is shown. Keys are checked before the call."""


def show_page(gateway: Gateway, request: Request) -> Shown:
    """Returns the page at the request's path, or an error in OpenAI's format."""
    path = _decoded(request.path)
    try:
        return _page_at(gateway, path, request)
    except Exception:
        _log.exception("cannot build the page %s", path)
        return _error(500, "internal error in bedplate while building this page", "internal_error")


def _page_at(gateway: Gateway, path: str, request: Request) -> Shown:
    own_page = _own_page(path)
    method = request.method.decode("latin-1")
    if method in ("GET", "HEAD"):
        visit = _visit(gateway, request)
        registered = gateway.handed.get(path)
        response = registered(visit) if registered is not None else None
        if response is None and own_page is not None:
            response = own_page(gateway, visit)
        if response is not None:
            return response
    elif own_page is not None:
        return _not_allowed(path, method, "GET,HEAD")
    if path.encode() in sse.APIS:
        return _not_allowed(path, method, "POST")
    return _error(404, f"there is no page at {path}; / lists the endpoints", "not_found")


def _own_page(path: str) -> Callable[[Gateway, Visit], Shown] | None:
    name = path.removeprefix(MODEL_PAGE.removesuffix("{name}"))
    return partial(_model, name=name) if name and name != path else OWN_PAGES.get(path)


def _visit(gateway: Gateway, request: Request) -> Visit:
    member = request.member
    is_open = gateway.tenants.is_open
    name = DEFAULT_TENANT if is_open else member.name if member is not None else None
    sees_all = is_open or (member is not None and member.is_admin)
    accept = next((value for name, value in request.headers if name == b"accept"), b"").decode("latin-1")
    query: dict[str, str] = {}
    for key, value in parse_qsl(request.target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True):
        query.setdefault(key, value)
    return Visit(name, sees_all, accept, query)


def _decoded(path: bytes) -> str:
    return unquote_to_bytes(path).decode("utf-8", "replace")


def _health(gateway: Gateway, _: Visit) -> Shown:
    unready = next((r for r in gateway.routes if not r.is_ready and not r.on_demand and r.held is None), None)
    backend = unready.backends[0] if unready is not None and unready.backends else None
    if not gateway.routes:
        return _json({"status": "loading", "models": {}}, 503, {"Retry-After": "1"})
    body = {
        "status": "ok" if unready is None else backend.state if backend is not None else "stopped",
        "models": {route.model: _state_of(route) for route in gateway.routes},
    }
    if unready is None:
        return _json(body)
    return _json(body, 503, {"Retry-After": str(backend.retry_after_s if backend is not None else 5)})


def _models(gateway: Gateway, visit: Visit) -> Shown:
    rows = [_row_of(route) for route in gateway.routes if _may_use(route, visit)]
    return _json({"object": "list", "data": rows})


def _model(gateway: Gateway, visit: Visit, *, name: str) -> Shown:
    route = gateway.route_for(name)
    if route is None or not _may_use(route, visit):
        return _error(404, f"the model {name!r} is not served here", "model_not_found")
    return _json(_row_of(route))


def _metrics(gateway: Gateway, visit: Visit) -> Shown:
    if visit.sees_all:
        body = gateway.meters.text(gateway.routes, gateway.keeper.lost if gateway.keeper is not None else 0)
    else:
        body = gateway.meters.text_of(visit.tenant or "")
    return Shown(body, "text/plain; version=0.0.4; charset=utf-8")


def _welcome(gateway: Gateway, visit: Visit) -> Shown:
    if "text/html" in visit.accept:
        return Shown(_welcome_html(gateway).encode(), "text/html; charset=utf-8")
    return Shown(_welcome_text(gateway).encode(), "text/plain; charset=utf-8")


OWN_PAGES: dict[str, Callable[[Gateway, Visit], Shown]] = {
    "/": _welcome,
    "/health": _health,
    "/metrics": _metrics,
    "/models": _models,
    "/v1/models": _models,
}


def _may_use(route: Route, visit: Visit) -> bool:
    return visit.sees_all or route.allowed is None or visit.tenant in route.allowed


def _state_of(route: Route) -> dict[str, object]:
    """The state of the first backend that accepts requests, and of each one where there are several."""
    backends = sorted(route.backends, key=lambda b: not b.takes_new)
    if not backends:
        return {"engine": None, "state": "loading" if route.wanted else "not loaded", "progress": None}
    state: dict[str, object] = {
        "engine": backends[0].engine, "state": backends[0].state, "progress": backends[0].progress,
    }  # fmt: skip
    if len(backends) > 1:
        state["backends"] = [
            {
                "engine": b.engine,
                "state": b.state,
                "progress": b.progress,
                "share": b.share,
                "well": b.health.is_well,
                "in_flight": b.in_flight,
            }
            for b in route.backends
        ]
    return state


def _row_of(route: Route) -> dict[str, object]:
    first = min(route.backends, key=lambda b: not b.takes_new, default=None)
    return {
        "id": route.model,
        "object": "model",
        "created": _STARTED,
        "owned_by": "bedplate",
        "engine": first.engine if first is not None else None,
        "engine_version": first.engine_version if first is not None else None,
        "max_model_len": first.context_tokens if first is not None else None,
    }


def curl(url: str, needs_key: bool) -> str:
    """A complete command; `max_tokens` is set since a small model may not end its answer by itself."""
    key = "-H 'authorization: Bearer YOUR-KEY' " if needs_key else ""
    return (
        f"curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \\\n"
        """     -d '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"max_tokens":100}'"""
    )


def _welcome_text(gateway: Gateway) -> str:
    lines = [f"bedplate {__version__}", ""]
    lines += [f"{b.model} is served by {b.engine} {b.engine_version} ({b.state})" for b in gateway.backends]
    lines += ["", f"OpenAI clients: base_url={gateway.url}/v1", "", curl(gateway.url, gateway.needs_key), ""]
    return "\n".join(lines)


def _welcome_html(gateway: Gateway) -> str:
    url = html.escape(gateway.url)
    rows = "".join(
        f"<tr><td><code>{html.escape(b.model)}</code></td><td>{html.escape(f'{b.engine} {b.engine_version}')}</td>"
        f"<td class={b.state}>{b.state}{'' if b.progress is None or b.state == 'ready' else f' {b.progress:.0%}'}</td>"
        f"<td>{'' if b.context_tokens is None else f'{b.context_tokens:,} tokens'}</td></tr>"
        for b in gateway.backends
    )
    first = html.escape(gateway.models[0] if gateway.models else "MODEL")
    key = "YOUR-KEY" if gateway.needs_key else "none"
    key_note = (
        "<p>This endpoint requires an API key. Send it as <code>Authorization: Bearer KEY</code>.</p>"
        if gateway.needs_key
        else ""
    )
    return _PAGE.format(
        version=__version__, rows=rows, url=url, model=first, key=key, key_note=key_note,
        curl=html.escape(curl(gateway.url, gateway.needs_key)),
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


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Shown:
    return Shown(msgspec.json.encode(value), "application/json", headers or {}, status)


def _error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Shown:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Shown(sse.error_body(message, kind, code), "application/json", headers or {}, status)


def _not_allowed(path: str, method: str, allowed: str) -> Shown:
    message = f"{path} does not accept {method}; use {allowed.replace(',', ' or ')}"
    return _error(405, message, "method_not_allowed", {"Allow": allowed})
