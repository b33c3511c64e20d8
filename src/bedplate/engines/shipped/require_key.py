"""Runs an engine's own server so that every request must carry a key, on every path.

    python require_key.py PROGRAM ARGUMENT …
    python require_key.py -m MODULE ARGUMENT …

The key is the value of BEDPLATE_ENGINE_KEY; it is never an argument, which every user of the machine can read. The
program runs in this process, as if Python had been started with it. Two kinds of servers are covered: uvicorn, and
Python's http.server. Processes that the program starts with `multiprocessing` run this file again and check as well.

Runs in the engine's environment and depends only on the standard library.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
PROGRAM_VARIABLE = "BEDPLATE_ENGINE_PROGRAM"
"""The program, for processes that `multiprocessing` starts: their arguments are those of the program."""
REFUSAL = json.dumps(
    {"error": {"message": "missing or wrong API key", "type": "authentication_error", "code": "invalid_api_key"}}
).encode()
NOT_FOR_OTHERS = 0o022
"""Without these bits, other users cannot connect to the Unix sockets that an engine's processes share."""


class Program(NamedTuple):
    """What Python would have been started with: a script, or a module after -m."""

    name: str
    is_module: bool


class RequestKey:
    """The key that requests must carry, as a bearer token or in X-Api-Key."""

    def __init__(self, key: str) -> None:
        self.header = f"Bearer {key}"
        self._expected = key.encode()

    def matches(self, authorization: str | None, api_key: str | None) -> bool:
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else api_key or ""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._expected)


class CheckedApplication:
    """An ASGI application that only requests with the key reach."""

    def __init__(self, application: Callable[..., Any], key: RequestKey) -> None:
        self._application = application
        self._key = key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Any) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            # Otherwise the rest of the body is still read.
            headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _has_key(self, scope: MutableMapping[str, Any]) -> bool:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        return self._key.matches(headers.get(b"authorization"), headers.get(b"x-api-key"))


def check_uvicorn(key: RequestKey) -> None:
    """Every application that uvicorn loads in this process is a checked one."""
    if importlib.util.find_spec("uvicorn") is None:
        return
    from uvicorn.config import Config

    load = Config.load

    def load_checked(config: Any) -> None:
        load(config)
        config.loaded_app = CheckedApplication(config.loaded_app, key)
        send_key_to_port(config.port, key)

    setattr(Config, "load", load_checked)  # noqa: B010


def check_http_server(key: RequestKey) -> None:
    """Every handler of http.server in this process answers only requests with the key."""
    from http.server import BaseHTTPRequestHandler

    parse = BaseHTTPRequestHandler.parse_request

    def parse_checked(handler: BaseHTTPRequestHandler) -> bool:
        if not parse(handler):
            return False
        if key.matches(handler.headers.get("authorization"), handler.headers.get("x-api-key")):
            return True
        handler.close_connection = True
        head = f"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: {len(REFUSAL)}\r\n"
        handler.wfile.write(head.encode() + b"Connection: close\r\n\r\n" + REFUSAL)
        return False

    setattr(BaseHTTPRequestHandler, "parse_request", parse_checked)  # noqa: B010


def send_key_to_port(port: int, key: RequestKey) -> None:
    """Requests of this process to its own port carry the key: SGLang's warm-up is such a request."""
    requests = sys.modules.get("requests")
    if requests is None:
        return
    send = requests.Session.send

    def send_with_key(session: Any, request: Any, **options: Any) -> Any:
        target = urlsplit(request.url)
        if target.hostname in ("127.0.0.1", "localhost", "::1") and target.port == port:
            request.headers.setdefault("Authorization", key.header)
        return send(session, request, **options)

    requests.Session.send = send_with_key


def take_program() -> Program:
    """Removes the program from the arguments, so that they are what it expects."""
    if len(sys.argv) > 2 and sys.argv[1] == "-m":
        program = Program(sys.argv[2], is_module=True)
        del sys.argv[1:3]
    elif len(sys.argv) > 1:
        program = Program(sys.argv[1], is_module=False)
        del sys.argv[0]
    else:
        sys.exit("usage: require_key.py PROGRAM ARGUMENT …, or -m MODULE ARGUMENT …")
    os.environ[PROGRAM_VARIABLE] = json.dumps(program)
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        # Python put the folder of this file there.
        sys.path[0] = str(Path.cwd() if program.is_module else Path(program.name).resolve().parent)
    return program


def load_code(program: Program) -> tuple[Any, str | None]:
    """The code of the program, and the package that its relative imports are in."""
    if program.is_module:
        spec = importlib.util.find_spec(program.name)
        if spec is None or spec.loader is None:
            sys.exit(f"require_key.py: there is no module {program.name}")
        sys.argv[0] = spec.origin or program.name
        return spec.loader.get_code(program.name), spec.parent  # type: ignore[attr-defined]
    return compile(Path(program.name).read_bytes(), program.name, "exec"), None


def run_checked(main: dict[str, Any]) -> None:
    """Runs the program in the namespace of `__main__`, with the checks installed."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        sys.exit(f"require_key.py: {KEY_VARIABLE} is not set")
    os.umask(os.umask(NOT_FOR_OTHERS) | NOT_FOR_OTHERS)
    program = take_program() if main["__name__"] == "__main__" else Program(*json.loads(os.environ[PROGRAM_VARIABLE]))
    check_uvicorn(RequestKey(key))
    check_http_server(RequestKey(key))
    code, main["__package__"] = load_code(program)
    exec(code, main)  # noqa: S102


if __name__ in ("__main__", "__mp_main__"):
    # As a module of another name, because the program's names replace those of this one.
    _spec = importlib.util.spec_from_file_location("bedplate_require_key", __file__)
    _module = importlib.util.module_from_spec(_spec)  # type: ignore[arg-type]
    sys.modules["bedplate_require_key"] = _module
    _spec.loader.exec_module(_module)  # type: ignore[union-attr]
    _module.run_checked(globals())
