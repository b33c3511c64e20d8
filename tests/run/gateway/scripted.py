"""A scripted engine, a raw HTTP client, and the gateway between them."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from bedplate.run.gateway import Gateway, GatewayBackend
from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.upstream import EngineConnection

T = TypeVar("T")
PATIENCE_S = 240.0
"""How long a test waits for an expected event."""

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'

PROBLEMS: list[str] = []
"""Errors that the event loop reported: exceptions in callbacks, and failed tasks whose result was never read."""


async def wait_within(what: Awaitable[T], seconds: float = PATIENCE_S) -> T:
    # Not wait_for, which before Python 3.12 loses a cancellation that coincides with the result.
    async with asyncio.timeout(seconds):
        return await what


async def wait_until(look: Callable[[], object], what: str) -> None:
    """Runs the event loop until the condition holds."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not look():
        assert asyncio.get_running_loop().time() < deadline, f"waited {PATIENCE_S} s for {what}"
        await asyncio.sleep(0.001)


# answers of an engine, as bytes


def make_answer(body: bytes | dict[str, Any], status: str = "200 OK", kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"
ANSWER = {"object": "chat.completion", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def make_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def make_delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


def make_stream(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(make_chunk(event) for event in events) + STREAM_END


# the engine


class End(enum.Enum):
    CLOSE = enum.auto()
    RESET = enum.auto()


Step = bytes | asyncio.Event | End


@dataclass(eq=False)
class ReceivedRequest:
    """One request as the engine received it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    line: int
    """The number of its connection, from 0."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its connection is closed."""

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


class Engine:
    """Answers each request with the next list of steps: sends bytes, waits for events."""

    def __init__(self) -> None:
        self.seen: list[ReceivedRequest] = []
        self.lines: list[ScriptedConnection] = []
        self.otherwise: tuple[Step, ...] = (make_answer(ANSWER),)
        """The answer after the end of the script."""
        self.port = 0
        self._answers: deque[tuple[Step, ...]] = deque()
        self._server: asyncio.Server | None = None

    def answer(self, *steps: Step) -> None:
        self._answers.append(steps)

    def take_next_answer(self) -> tuple[Step, ...]:
        return self._answers.popleft() if self._answers else self.otherwise

    async def request(self, number: int = 0) -> ReceivedRequest:
        await wait_until(lambda: len(self.seen) > number, f"request {number} at the engine")
        return self.seen[number]

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ScriptedConnection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends like a killed process: stops listening and closes every connection."""
        if self._server is not None:
            self._server.close()
        for _ in range(3):  # turns of the loop until a connection that was accepted has its transport
            await asyncio.sleep(0)
        for line in self.lines:
            line.end(End.CLOSE)
        await wait_until(lambda: all(line.lost for line in self.lines), "the engine's connections to close")


class ScriptedConnection(asyncio.Protocol):
    """One connection to the scripted engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.number = len(engine.lines)
        self.lost = False
        self._buffer = b""
        self._current: ReceivedRequest | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._play: asyncio.Task[None] | None = None
        engine.lines.append(self)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.lost else self.transport.get_write_buffer_size()

    def end(self, how: End) -> None:
        if how is End.RESET:
            pipe = self.transport.get_extra_info("socket")
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._writable.set()
        if self._current is not None:
            self._current.gone.set()
        if self._play is not None:
            self._play.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._play is None:
            self._take()

    def _take(self) -> None:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = int(dict(headers).get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._current = seen = ReceivedRequest(method, target, headers, rest[:length], self.number)
        self.engine.seen.append(seen)
        self._play = asyncio.get_running_loop().create_task(self._perform(self.engine.take_next_answer()))

    async def _perform(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, End):
                self.end(step)
                return
            if isinstance(step, bytes):
                self.transport.write(step)
                await self._writable.wait()
                await asyncio.sleep(0)
            else:
                await step.wait()
        self._play = None
        self._current = None
        self._take()


# the client


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object, checked for its fields."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert self.headers["content-type"].startswith("application/json")
        return error


def request(path: str, body: bytes | dict[str, Any] | None = None, method: str = "", **headers: str) -> bytes:
    """The bytes of a request. Underscores in header names become dashes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def make_chat_body(stream: bool = False, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **({"stream": True} if stream else {}), **fields}


class Client:
    """Sends and reads raw HTTP/1.1 on its own socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await wait_within(self.writer.drain())

    async def get(self, path: str, **headers: str) -> Answer:
        await self.send(request(path, None, **headers))
        return await self.answer()

    async def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Answer:
        await self.send(request(path, body, **headers))
        return await self.answer()

    async def head(self) -> Answer:
        first, *lines = (await wait_within(self.reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")[:-2]
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} comes twice"
            headers[name.lower()] = value
        return Answer(int(status), headers)

    async def answer(self) -> Answer:
        answer = await self.head()
        if answer.headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.chunk():
                pieces.append(piece)
            answer.body = b"".join(pieces)
        elif "content-length" in answer.headers:
            answer.body = await wait_within(self.reader.readexactly(int(answer.headers["content-length"])))
        else:
            answer.body = await wait_within(self.reader.read())
        return answer

    async def chunk(self) -> bytes:
        """The next chunk; empty at the end of the stream."""
        size = int(await wait_within(self.reader.readuntil(b"\r\n")), 16)
        data = await wait_within(self.reader.readexactly(size + 2))
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def is_closed(self) -> bool:
        """Whether the gateway closes the connection without sending more data."""
        return await wait_within(self.reader.read(1)) == b""

    def reset(self) -> None:
        pipe = self.writer.get_extra_info("socket")
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await wait_within(self.writer.wait_closed())


# the gateway between them


@dataclass
class Setup:
    gateway: Gateway
    engine: Engine
    backend: GatewayBackend
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await wait_within(asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)))
        self.clients.append(client)
        return client

    def count_active(self) -> int:
        return sum(link.pool.active for route in self.gateway.routes for link in route.links)

    def count_waiting(self) -> int:
        return sum(self.gateway.count_waiting(model) for model in self.gateway.models)

    def read_metric(self, name: str, **labels: str) -> float | None:
        labels = {"model": self.backend.model, "engine": self.backend.engine, **labels}
        return self.gateway.meters.registry.get_sample_value(f"bedplate_{name}", labels)

    def count_outcome(self, outcome: str, api: str = "chat", **labels: str) -> float:
        return self.read_metric("requests_total", api=api, outcome=outcome, **labels) or 0.0

    def is_at_rest(self) -> bool:
        return self.count_active() == 0 and self.read_metric("requests_in_flight") == 0


def make_backend(port: int, model: str = "small", engine: str = "llama.cpp", **more: Any) -> GatewayBackend:
    backend = GatewayBackend(model, engine, "b1", aliases=("Small Model", "small.gguf"))
    backend.address = ("127.0.0.1", port)
    backend.state = "ready"
    for name, value in more.items():
        setattr(backend, name, value)
    return backend


@contextlib.asynccontextmanager
async def start_gateway(*others: GatewayBackend, api_key: str | None = None, **options: Any) -> AsyncIterator[Setup]:
    """A gateway before a scripted engine. `max_body_bytes`, `keeper` and `origins` are its own.

    Other options are set on the backend.
    Whatever a test does, at its end nothing may be in flight, and no connection may be left.
    """
    limit = {name: options.pop(name) for name in ("max_body_bytes", "keeper", "origins") if name in options}
    engine = Engine()
    await engine.start()
    backend = make_backend(engine.port, **options)
    gateway = Gateway([backend, *others], api_key=api_key, **limit)
    setup = Setup(gateway, engine, backend, await gateway.start("127.0.0.1", 0))
    try:
        yield setup
        for client in setup.clients:
            await client.close()
        await wait_until(setup.is_at_rest, "requests to end")
        await wait_until(lambda: not gateway.connections, "connections to close")
    finally:
        await wait_within(gateway.stop(0))
        await engine.stop()
        for client in setup.clients:
            await client.close()
    assert setup.count_active() == 0
    assert gateway.arriving_bytes == 0


# without sockets, to check each write


class Wire(asyncio.Transport):
    """A transport that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False


class Bench:
    """A client connection and an engine connection of one gateway, fed by the test. Needs a running loop."""

    def __init__(self) -> None:
        self.backend = make_backend(1)
        self.gateway = Gateway([self.backend])
        self.client = ClientConnection(self.gateway)
        self.to_client = Wire()
        self.client.connection_made(self.to_client)
        ((link,),) = (route.links for route in self.gateway.routes)
        self.pool = link.pool
        self.engine = EngineConnection(self.pool, ("127.0.0.1", 1))
        self.to_engine = Wire()
        self.engine.connection_made(self.to_engine)
        self.pool.give_back(self.engine, reusable=True, was_active=False)

    def tokens(self, kind: str) -> float | None:
        labels = {"model": "small", "engine": "llama.cpp", "kind": kind}
        return self.gateway.meters.registry.get_sample_value("bedplate_tokens_total", labels)


def decode_chunks(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Splits a chunked answer into head, body and rest."""
    head, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            return head, body, rest
