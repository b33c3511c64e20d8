"""The command line, and the start of the HTTP server."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .backend import EngineBackend

if TYPE_CHECKING:
    import argparse

KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
SUPERVISED_VARIABLE = "BEDPLATE_ENGINE_SUPERVISED"
"""Set by the supervisor, which keeps stdin open: the server exits when stdin closes."""
MAX_HEAD_BYTES = 65536
KEEP_ALIVE_S = 24 * 3600
"""Timeout of idle connections. The gateway keeps connections open for longer than uvicorn's default of 5 s."""


def make_parser(backend: type[EngineBackend]) -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        description=f"An OpenAI-compatible server for {backend.engine}. "
        f"If {KEY_VARIABLE} is set, clients must send its value as API key, except for /health and /metrics.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="model file or folder")
    parser.add_argument("--served-name", help="model name in the API")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=1, help="maximum number of concurrent requests")
    parser.add_argument("--context", type=int, help="maximum tokens of a request, prompt and output together")
    backend.add_options(parser)
    return parser


def serve(backend: EngineBackend, arguments: Sequence[str] | None = None) -> None:
    """Run the server until it receives a signal. The main function of a backend."""
    options = make_parser(type(backend)).parse_args(arguments)
    options.served_name = options.served_name or Path(options.model).name
    if os.environ.get(SUPERVISED_VARIABLE):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Threads that are computing would delay a normal exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    import asyncio

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
        reason = "port is in use" if error.errno == errno.EADDRINUSE else str(error)
        _fail(f"cannot listen on {options.host}:{options.port}: {reason}")
    asyncio.run(_serve(backend, options, listening))


async def _serve(backend: EngineBackend, options: argparse.Namespace, listening: socket.socket) -> None:
    import asyncio

    import uvicorn

    from .connections import HttpProtocol
    from .endpoints import Endpoints
    from .worker import EngineWorker

    class HttpServer(uvicorn.Server):
        def handle_exit(self, *_: object) -> None:
            os._exit(0)

    worker = EngineWorker(backend, options, asyncio.get_running_loop())
    endpoints = Endpoints(
        backend,
        worker,
        options.served_name,
        os.environ.pop(KEY_VARIABLE, None) or None,
        # Probes and monitors in a container have no key; the supervisor has one.
        open_paths=() if os.environ.get(SUPERVISED_VARIABLE) else ("/health", "/metrics"),
    )
    config = uvicorn.Config(
        endpoints,
        http=HttpProtocol,
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


def _fail(reason: str) -> NoReturn:
    print(f"bedplate-engine: {reason}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os._exit(0)
