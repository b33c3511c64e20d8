"""Everything beside the streaming APIs, as ordinary aiohttp handlers."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from aiohttp import web

from bedplate._version import __version__
from bedplate.run.gateway import sse
from bedplate.run.gateway.inner import TENANT_HEADER
from bedplate.values.tenant import DEFAULT_TENANT

if TYPE_CHECKING:
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.server import Gateway

_log = logging.getLogger(__name__)
_STARTED = int(time.time())


class Visit(NamedTuple):
    """Who looks at a page that was handed in."""

    tenant: str | None
    """Whose key came with it; nobody's at the paths that need none."""
    sees_all: bool
    """Whether it may see what others use: the operator, an admin, and everybody where no key is asked for."""
    accept: str
    query: Mapping[str, str]


class Shown(NamedTuple):
    body: bytes
    content_type: str
    headers: Mapping[str, str] = {}


Page = Callable[[Visit], Shown | None]
"""A page of somebody else; `None`: the gateway's own is shown in its place. Keys are checked before it is asked."""


def pages(gateway: Gateway) -> web.Application:
    @web.middleware
    async def handed(request: web.Request, handler: web._ABCHandler) -> web.StreamResponse:  # type: ignore[name-defined]
        page = gateway.handed.get(request.path)
        if page is None or request.method not in ("GET", "HEAD"):
            return await handler(request)  # type: ignore[no-any-return]
        shown = page(_visit(gateway, request))
        if shown is None:
            return await handler(request)  # type: ignore[no-any-return]
        return web.Response(body=shown.body, headers={"Content-Type": shown.content_type, **shown.headers})

    app = web.Application(middlewares=[_openai_errors, handed], client_max_size=gateway.max_body_bytes)

    async def health(_: web.Request) -> web.Response:
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

    async def models(request: web.Request) -> web.Response:
        wanted = request.match_info.get("name")
        visit = _visit(gateway, request)
        if wanted is None:
            rows = [_row_of(route) for route in gateway.routes if _may_use(route, visit)]
            return _json({"object": "list", "data": rows})
        route = gateway.route_for(wanted)
        if route is None or not _may_use(route, visit):
            message = f"the model {wanted!r} is not served here"
            return _error(404, message, "model_not_found")
        return _json(_row_of(route))

    async def metrics(request: web.Request) -> web.Response:
        visit = _visit(gateway, request)
        if visit.sees_all:
            body = gateway.meters.text(gateway.routes, gateway.keeper.lost if gateway.keeper is not None else 0)
        else:
            body = gateway.meters.text_of(visit.tenant or "")
        return web.Response(
            body=body,
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def welcome(request: web.Request) -> web.Response:
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(text=_welcome_html(gateway), content_type="text/html")
        return web.Response(text=_welcome_text(gateway))

    app.on_response_prepare.append(_sign)
    app.router.add_get("/", welcome)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/models", models)
    app.router.add_get("/v1/models/{name:.+}", models)
    return app


def _visit(gateway: Gateway, request: web.Request) -> Visit:
    tenants = gateway.tenants
    name = DEFAULT_TENANT if tenants.is_open else request.headers.get(TENANT_HEADER)
    member = tenants.member(name) if name is not None else None
    sees_all = tenants.is_open or (member is not None and member.is_admin)
    return Visit(name, sees_all, request.headers.get("Accept", ""), request.query)


def _may_use(route: Route, visit: Visit) -> bool:
    return visit.sees_all or route.allowed is None or visit.tenant in route.allowed


def _state_of(route: Route) -> dict[str, object]:
    """Of a model with several backends, that of the first one which answers, and then all of them."""
    backends = sorted(route.backends, key=lambda b: not b.takes_new)
    if not backends:
        return {"engine": None, "state": "loading" if route.wanted else "not loaded", "progress": None}
    said: dict[str, object] = {
        "engine": backends[0].engine, "state": backends[0].state, "progress": backends[0].progress,
    }  # fmt: skip
    if len(backends) > 1:
        said["backends"] = [
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
    return said


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
    """A command that works as it stands; short, since a small model on a slow machine may ramble to its last token."""
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
        "<p>This endpoint asks for a key: send it as <code>Authorization: Bearer …</code>.</p>"
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
<h2>Ask it something</h2><pre>{curl}</pre>
<h2>From Python</h2><pre>from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Why is the sky blue?"}}],
)
print(answer.choices[0].message.content)</pre>
<h2>Also here</h2>
<p><a href="/v1/models">/v1/models</a> · <a href="/health">/health</a> · <a href="/metrics">/metrics</a> ·
<code>/v1/chat/completions</code> <code>/v1/completions</code> <code>/v1/responses</code> <code>/v1/messages</code>
<code>/v1/embeddings</code> <code>/tokenize</code>, where the engine has them</p>
</body></html>
"""


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )


def _error(status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = sse.error_body(message, kind, code)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "bedplate"


@web.middleware
async def _openai_errors(request: web.Request, handler: web._ABCHandler) -> web.StreamResponse:  # type: ignore[name-defined]
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status == 404 and request.path.encode() in sse.APIS:
            return _not_allowed(request, "POST")
        if error.status == 404:
            return _error(404, f"there is nothing at {request.path}; see / for what there is", "not_found")
        if error.status == 405:
            return _not_allowed(request, error.headers.get("Allow", ""))
        return _error(error.status, error.reason, None)
    except Exception:
        _log.exception("the page %s failed", request.path)
        return _error(500, "bedplate itself failed on this page", "internal_error")


def _not_allowed(request: web.Request, allowed: str) -> web.Response:
    message = f"{request.path} does not take {request.method}, only {allowed}"
    return _error(405, message, "method_not_allowed", {"Allow": allowed})
