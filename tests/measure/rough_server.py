"""An HTTP server over real sockets that sends the bytes that a test chooses, valid or not."""

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
    """One received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """Number of the connection, from 0."""

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
"""Writes the response to the socket; returns `False` to close the connection afterwards."""


def make_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def make_event(
    text: str | None = None, finish: str | None = None, usage: dict[str, Any] | None = None, **more: Any
) -> bytes:
    choices = [] if text is None and finish is None else [{"index": 0, "text": text or "", "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage, **more}).encode() + b"\n\n"


def make_stream(*events: bytes, done: bool = True) -> bytes:
    """A complete streamed response."""
    body = b"".join(make_chunk(each) for each in (*events, *([b"data: [DONE]\n\n"] if done else [])))
    return HEAD + body + b"0\r\n\r\n"


def make_response(value: Any, status: str = "200 OK", headers: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def answer_correctly(asked: Asked) -> bytes:
    """The response of a correct endpoint: each word is a token, and it accepts every field."""
    if asked.path != "/v1/completions":
        return make_response({"error": {"message": "no such path"}}, "404 Not Found")
    request = asked.json
    tokens = request["max_tokens"]
    usage = {"prompt_tokens": len(request["prompt"].split()), "completion_tokens": tokens}
    if not request.get("stream"):
        choice = {"index": 0, "text": " x" * tokens, "finish_reason": "length"}
        return make_response({"choices": [choice], "usage": usage})
    texts = [make_event(f" x{index}") for index in range(tokens - 1)]
    return make_stream(*texts, make_event(" last", "length"), make_event(usage=usage))


@contextlib.contextmanager
def serve_rough(script: Script) -> Iterator[Rough]:
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
                return  # the client closed the connection
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
