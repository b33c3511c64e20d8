"""A minimal streaming proxy on aiohttp and uvloop."""

import sys

import aiohttp
import uvloop
from aiohttp import web

UPSTREAM, PORT = sys.argv[1], int(sys.argv[2])
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def open_session(app: web.Application) -> None:
    """Open the upstream pool, without aiohttp's default limits."""
    app[SESSION] = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    )


async def proxy(request: web.Request) -> web.StreamResponse:
    """Forward one request and stream the answer back."""
    kept = {"content-type": request.headers.get("content-type", "application/json")}
    body = await request.read()
    async with request.app[SESSION].request(request.method, UPSTREAM + request.path_qs, data=body, headers=kept) as got:
        response = web.StreamResponse(status=got.status, headers={"content-type": got.headers["content-type"]})
        response.content_length = got.content_length
        await response.prepare(request)
        async for chunk in got.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def main() -> None:
    """Serve on 127.0.0.1."""
    uvloop.install()
    app = web.Application()
    app.on_startup.append(open_session)
    app.router.add_route("*", "/{path:.*}", proxy)
    web.run_app(app, host="127.0.0.1", port=PORT, access_log=None, print=None, backlog=4096)


if __name__ == "__main__":
    main()
