"""From the command line to a server that listens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .backend import Backend

KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
SUPERVISED_VARIABLE = "BEDPLATE_ENGINE_SUPERVISED"
"""Set by the supervisor, which holds our stdin open: when it closes, we end."""
MAX_HEAD_BYTES = 65536
KEEP_ALIVE_S = 24 * 3600
"""Of an idle connection. The gateway keeps its connections open for longer than uvicorn's default of 5 s."""


def parser_for(backend: type[Backend]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"An OpenAI-compatible server around {backend.engine}. "
        f"Clients must send the key that {KEY_VARIABLE} holds, where it is set.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="the model's file or folder")
    parser.add_argument("--served-name", help="the name that the API calls the model by")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=1, help="requests that are computed at once")
    parser.add_argument("--context", type=int, help="tokens of the longest request, prompt and answer together")
    backend.add_options(parser)
    return parser


def serve(backend: Backend, arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop. The one call of a backend's file."""
    options = parser_for(type(backend)).parse_args(arguments)
    options.served_name = options.served_name or Path(options.model).name
    if os.environ.get(SUPERVISED_VARIABLE):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Threads in the middle of a computation would hold up an ordinary exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        import starlette
        import uvicorn

        del starlette, uvicorn
    except ImportError as error:
        _fail(f"{sys.executable} lacks {error.name}")
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        why = "port is in use" if error.errno == errno.EADDRINUSE else str(error)
        _fail(f"cannot listen on {options.host}:{options.port}: {why}")
    asyncio.run(_serve(backend, options, listening))


async def _serve(backend: Backend, options: argparse.Namespace, listening: socket.socket) -> None:
    import uvicorn

    from .endpoints import Endpoints
    from .worker import Worker

    class HttpServer(uvicorn.Server):
        def handle_exit(self, *_: object) -> None:
            os._exit(0)

    worker = Worker(backend, options, asyncio.get_running_loop())
    endpoints = Endpoints(backend, worker, options.served_name, os.environ.pop(KEY_VARIABLE, None) or None)
    config = uvicorn.Config(
        endpoints,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=1024,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    worker.start()
    await HttpServer(config).serve(sockets=[listening])


def _fail(why: str) -> NoReturn:
    print(f"bedplate-engine: {why}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os._exit(0)
