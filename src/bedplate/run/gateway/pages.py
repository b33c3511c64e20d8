"""Everything beside the streaming APIs, as ordinary aiohttp handlers."""

from __future__ import annotations

import html
import logging
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from bedplate._version import __version__
from bedplate.run.gateway import sse

if TYPE_CHECKING:
    from bedplate.run.gateway.server import Gateway

_log = logging.getLogger(__name__)
_STARTED = int(time.time())


def pages(gateway: Gateway) -> web.Application:
    app = web.Application(middlewares=[_openai_errors], client_max_size=gateway.max_body_bytes)

    async def health(_: web.Request) -> web.Response:
        unready = next((b for b in gateway.backends if b.state != "ready"), None)
        body = {
            "status": "ok" if unready is None else unready.state,
            "models": {
                b.model: {"engine": b.engine, "state": b.state, "progress": b.progress} for b in gateway.backends
            },
        }
        if unready is None:
            return _json(body)
        return _json(body, 503, {"Retry-After": str(unready.retry_after_s)})

    async def models(request: web.Request) -> web.Response:
        rows = [
            {
                "id": b.model,
                "object": "model",
                "created": _STARTED,
                "owned_by": "bedplate",
                "engine": b.engine,
                "engine_version": b.engine_version,
                "max_model_len": b.context_tokens,
            }
            for b in gateway.backends
        ]
        wanted = request.match_info.get("name")
        if wanted is None:
            return _json({"object": "list", "data": rows})
        backend = gateway.backend_for(wanted)
        if backend is None:
            message = f"the model {wanted!r} is not served here"
            return _error(404, message, "model_not_found")
        return _json(rows[gateway.backends.index(backend)])

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=gateway.meters.text(gateway.backends),
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
    lines += ["", f"OpenAI clients: base_url={gateway.url}/v1", "", curl(gateway.url, gateway.api_key is not None), ""]
    return "\n".join(lines)


def _welcome_html(gateway: Gateway) -> str:
    url = html.escape(gateway.url)
    rows = "".join(
        f"<tr><td><code>{html.escape(b.model)}</code></td><td>{html.escape(f'{b.engine} {b.engine_version}')}</td>"
        f"<td class={b.state}>{b.state}{'' if b.progress is None or b.state == 'ready' else f' {b.progress:.0%}'}</td>"
        f"<td>{'' if b.context_tokens is None else f'{b.context_tokens:,} tokens'}</td></tr>"
        for b in gateway.backends
    )
    first = html.escape(gateway.backends[0].model)
    key = "YOUR-KEY" if gateway.api_key is not None else "none"
    key_note = (
        "<p>This endpoint asks for a key: send it as <code>Authorization: Bearer …</code>.</p>"
        if gateway.api_key
        else ""
    )
    return _PAGE.format(
        version=__version__, rows=rows, url=url, model=first, key=key, key_note=key_note,
        curl=html.escape(curl(gateway.url, gateway.api_key is not None)),
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
