"""The wrapper that checks the key of each request to an engine's own server: real servers, without a model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.conftest import HANG_S, wait_for

from bedplate.engines.shipped import require_key
from bedplate.engines.shipped.require_key import RequestKey
from bedplate.run.supervisor import find_free_port

WRAPPER = Path(require_key.__file__)
KEY = "1f0d-key"

UVICORN = """
import json, os, sys, uvicorn

begun = []

async def application(scope, receive, send):
    if scope["type"] == "lifespan":
        begun.append((await receive())["type"])
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = json.dumps([begun, sys.argv, __name__, sys.path[0], os.umask(0)]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})

if __name__ == "__main__":
    uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

HTTP_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_PUT = do_OPTIONS = do_HEAD = do_GET
    def log_message(self, *_): pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

CHILD = f"""
import multiprocessing, sys
if __name__ == "__main__":
    exec({UVICORN!r}.partition("if __name__")[0])
    def serve():
        uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
    process = multiprocessing.get_context("spawn").Process(target=serve)
    process.start()
    process.join()
else:
    exec({UVICORN!r}.partition("if __name__")[0])
    def serve():
        uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

OWN_REQUEST = f"""
import requests, threading
exec({UVICORN!r}.partition("if __name__")[0])

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        threading.Thread(target=ask).start()

def ask():
    urls = [f"http://{{host}}:{{sys.argv[1]}}/warm-up" for host in ("127.0.0.1", "localhost")]
    print(json.dumps([requests.get(url).status_code for url in urls]), flush=True)

Server(uvicorn.Config(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")).run()
"""


@dataclass
class Wrapped:
    process: subprocess.Popen[bytes]
    port: int

    def ask(self, method: str = "GET", path: str = "/", **headers: str) -> int:
        return self.read(method, path, **headers)[0]

    def read(self, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        with contextlib.closing(connection):
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, b"{}" if method in ("POST", "PUT") else None, given)
            answer = connection.getresponse()
            return answer.status, answer.read()


Start = Callable[..., Wrapped]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Wrapped] = []

    def begin(program: str, *, module: bool = False, isolated: bool = True) -> Wrapped:
        (tmp_path / "engine_server.py").write_text(program)
        port = find_free_port()
        target = ["-m", "engine_server"] if module else [str(tmp_path / "engine_server.py")]
        process = subprocess.Popen(
            [sys.executable, *(["-I"] if isolated else []), str(WRAPPER), *target, str(port)],
            env={**os.environ, require_key.KEY_VARIABLE: KEY},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            umask=0,
        )
        one = Wrapped(process, port)
        running.append(one)

        def listens() -> bool:
            assert process.poll() is None
            with contextlib.suppress(OSError):
                return one.ask() > 0
            return False

        wait_for(listens, "the server")
        return one

    yield begin
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(one.process.pid).children(recursive=True):
                child.kill()
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("authorization", "api_key", "matches"),
    [
        (f"Bearer {KEY}", None, True),
        (f"bearer  {KEY} ", None, True),
        (None, KEY, True),
        ("", KEY, True),
        (None, None, False),
        ("Bearer", None, False),
        ("Bearer ", None, False),
        (KEY, None, False),
        (f"Basic {KEY}", None, False),
        (f"Bearer {KEY[:-1]}", None, False),
        (f"Bearer {KEY}x", None, False),
        ("Bearer wrong", KEY, False),
        ("Bearer \xff\udcff", None, False),
    ],
)
def test_key_is_a_bearer_token_or_an_api_key(authorization: str | None, api_key: str | None, matches: bool) -> None:
    assert RequestKey(KEY).matches(authorization, api_key) is matches


@pytest.mark.parametrize("program", [UVICORN, HTTP_SERVER], ids=["uvicorn", "http.server"])
def test_every_path_and_method_needs_the_key(start: Start, program: str) -> None:
    one = start(program)
    for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
        for path in ("/", "/health", "/metrics", "/v1/models", "//health", "/health?x=1"):
            assert one.ask(method, path) == 401
            assert one.ask(method, path, authorization="Bearer wrong") == 401
            assert one.ask(method, path, authorization=f"Bearer {KEY}") == 200
    assert one.ask(x_api_key=KEY) == 200
    body = one.read()[1]
    assert json.loads(body)["error"]["code"] == "invalid_api_key" and KEY.encode() not in body


@pytest.mark.parametrize("program", [UVICORN, HTTP_SERVER], ids=["uvicorn", "http.server"])
def test_refused_body_is_not_read_as_the_next_request(start: Start, program: str) -> None:
    one = start(program)
    inner = f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", one.port), timeout=HANG_S) as line:
        line.sendall((head + inner).encode())
        received = b"".join(iter(lambda: line.recv(65536), b""))
    assert received.count(b"HTTP/1.1") == 1 and received.startswith(b"HTTP/1.1 401")


def test_program_runs_as_if_python_had_been_started_with_it(start: Start, tmp_path: Path) -> None:
    one = start(UVICORN)
    begun, argv, name, _, mask = json.loads(one.read(authorization=f"Bearer {KEY}")[1])
    assert begun == ["lifespan.startup"] and name == "__main__"
    assert argv == [str(tmp_path / "engine_server.py"), str(one.port)]
    assert mask == 0o022  # other users cannot open the Unix sockets that it makes
    assert KEY not in " ".join(psutil.Process(one.process.pid).cmdline())


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_imports_are_from_the_programs_folder_and_not_the_wrappers(start: Start, tmp_path: Path, module: bool) -> None:
    one = start(UVICORN, module=module, isolated=False)
    _, argv, _, first, _ = json.loads(one.read(authorization=f"Bearer {KEY}")[1])
    assert first == str(tmp_path) and argv == [str(tmp_path / "engine_server.py"), str(one.port)]


def test_servers_in_child_processes_need_the_key_too(start: Start) -> None:
    one = start(CHILD)
    (child,) = [
        process
        for process in psutil.Process(one.process.pid).children()
        if any(port.laddr.port == one.port for port in process.net_connections("tcp"))
    ]
    assert one.ask() == 401 and one.ask(authorization=f"Bearer {KEY}") == 200
    assert KEY not in " ".join(child.cmdline())


def test_server_can_send_requests_to_itself(start: Start) -> None:
    one = start(OWN_REQUEST)
    assert one.process.stdout is not None
    assert json.loads(one.process.stdout.readline()) == [200, 200]
    assert one.ask() == 401


def test_nothing_starts_without_a_key(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('started')")
    given = {name: value for name, value in os.environ.items() if name != require_key.KEY_VARIABLE}
    done = subprocess.run([sys.executable, str(WRAPPER), str(program)], env=given, capture_output=True, text=True)
    assert done.returncode == 1 and "BEDPLATE_ENGINE_KEY is not set" in done.stderr and not done.stdout
