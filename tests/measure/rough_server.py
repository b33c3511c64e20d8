"""An HTTP server that sends whatever bytes a test says, when it says, over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """Which of the server's connections it came on, counted from 0."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Rough:
    url: str
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    errors: list[BaseException] = field(default_factory=list)


Script = Callable[[socket.socket, Asked], bool | None]
"""Answers on the socket; `False`: closes the connection afterwards."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(
    text: str | None = None, finish: str | None = None, usage: dict[str, Any] | None = None, **more: Any
) -> bytes:
    choices = [] if text is None and finish is None else [{"index": 0, "text": text or "", "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage, **more}).encode() + b"\n\n"


def stream(*events: bytes, done: bool = True) -> bytes:
    """A whole streamed answer."""
    body = b"".join(chunk(each) for each in (*events, *([b"data: [DONE]\n\n"] if done else [])))
    return HEAD + body + b"0\r\n\r\n"


def answer(value: Any, status: str = "200 OK", headers: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def usual(asked: Asked) -> bytes:
    """What an endpoint says that is as it should be: a word is a token, and it takes every field."""
    if asked.path != "/v1/completions":
        return answer({"error": {"message": "no such path"}}, "404 Not Found")
    said = asked.json
    tokens = said["max_tokens"]
    usage = {"prompt_tokens": len(said["prompt"].split()), "completion_tokens": tokens}
    if not said.get("stream"):
        choice = {"index": 0, "text": " x" * tokens, "finish_reason": "length"}
        return answer({"choices": [choice], "usage": usage})
    texts = [event(f" x{index}") for index in range(tokens - 1)]
    return stream(*texts, event(" last", "length"), event(usage=usage))


@contextlib.contextmanager
def rough_server(script: Script) -> Iterator[Rough]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            number, rough.connections = rough.connections, rough.connections + 1
            try:
                with self.request.makefile("rb") as reader:
                    while (asked := read_request(reader, number)) is not None:
                        rough.asked.append(asked)
                        if script(self.request, asked) is False:
                            return
            except OSError:
                return  # the client hung up
            except BaseException as error:
                rough.errors.append(error)
                raise

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    rough = Rough(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield rough
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not rough.errors


def read_request(reader: Any, number: int) -> Asked | None:
    line = reader.readline().decode()
    if not line.strip():
        return None
    method, path, _ = line.split()
    headers: dict[str, str] = {}
    while (line := reader.readline().decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Asked(method, path, headers, reader.read(int(headers.get("content-length", 0))), number)
