"""A keep-alive HTTP/1.1 connection. Each socket read gets its timestamp before its bytes are parsed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

import httptools

from bedplate.measure.load.target import LoadTarget

if TYPE_CHECKING:
    from bedplate.measure.load.answers import StreamedAnswer
    from bedplate.measure.load.sessions import Conversation

CONNECT_LIMIT_S = 10.0
BODY_LIMIT_BYTES = 512 << 20
"""Limit of one response, far above any stream of text."""


class HttpExchange:
    """One request and its raw response, which is parsed after the measurement."""

    __slots__ = (
        "answer",
        "content_type",
        "due_ns",
        "end_ns",
        "error",
        "fresh",
        "index",
        "measured",
        "output_tokens",
        "pieces",
        "prompt_tokens",
        "sent_ns",
        "session",
        "size",
        "stamps",
        "status",
        "timed_out",
        "tried_ns",
        "turn",
        "whole",
    )

    def __init__(self, index: int, due_ns: int, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.index = index
        self.due_ns = due_ns
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tried_ns = 0
        """When the client was ready to send it, before a connection was opened for it."""
        self.sent_ns = 0
        self.end_ns = 0
        self.status = 0
        self.content_type = b""
        self.stamps: list[int] = []
        """Timestamps of the reads, one for each piece."""
        self.pieces: list[bytes] = []
        self.size = 0
        self.whole = False
        """Whether the response is complete according to HTTP."""
        self.measured = False
        self.timed_out = False
        self.fresh = False
        """Whether a new connection was opened for it."""
        self.error: str | None = None
        self.session: Conversation | None = None
        self.turn = 0
        self.answer: StreamedAnswer | None = None
        """Parsed during the measurement if the next request of its session contains it."""


class LoadConnection(asyncio.Protocol):
    """Sends one request at a time, and calls `over` when its exchange has ended."""

    def __init__(self, over: Callable[[LoadConnection, HttpExchange], None]) -> None:
        self._over = over
        self._transport: asyncio.Transport | None = None
        self._exchange: HttpExchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._stamp_ns = 0
        self._ends_at_close = False
        self._complete = False
        self._kept = True
        self.used = 0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def exchange(self) -> HttpExchange | None:
        return self._exchange

    def send(self, exchange: HttpExchange, request: bytes) -> None:
        """Takes the timestamp, then writes."""
        transport = self._transport
        self._exchange = exchange
        self._complete = self._ends_at_close = False
        self.used += 1
        exchange.sent_ns = monotonic_ns()
        if transport is not None:
            transport.write(request)

    def cut(self) -> None:
        """Closes the connection, which tells the endpoint to cancel the request. `over` is not called."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._stamp_ns = monotonic_ns()
        if self._exchange is None:
            self.cut()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP/1.1: {error}")
            return
        if self._complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        exchange = self._exchange
        if exchange is None:
            return
        self._stamp_ns = monotonic_ns()
        if self._ends_at_close and exc is None and exchange.status:
            exchange.whole = True
        else:
            exchange.error = "the connection was lost" + (f": {exc}" if exc else "")
        self._finish()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._ends_at_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_at_close = False
        elif name == b"content-type" and self._exchange is not None:
            self._exchange.content_type = value.lower()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._exchange is not None and status >= 200:
            self._exchange.status = status
            self._kept = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.stamps.append(self._stamp_ns)
        exchange.pieces.append(body)
        exchange.size += len(body)
        if exchange.size > BODY_LIMIT_BYTES:
            self._fail("the response is too long to be text")

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status >= 200:
            self._complete = True

    # the end

    def _finish(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._exchange = None
        exchange.end_ns = self._stamp_ns
        if self._complete:
            exchange.whole = True
            if not self._kept and self._transport is not None:
                self._transport.abort()
        self._over(self, exchange)

    def _fail(self, why: str) -> None:
        exchange = self._exchange
        self.cut()
        if exchange is not None:
            exchange.error = why
            exchange.end_ns = self._stamp_ns
            self._over(self, exchange)


@functools.lru_cache(maxsize=1)
def make_tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


async def connect(target: LoadTarget, over: Callable[[LoadConnection, HttpExchange], None]) -> LoadConnection:
    """Opens a connection. Raises OSError, including TimeoutError."""
    loop = asyncio.get_running_loop()
    secure = target.scheme == "https"
    async with asyncio.timeout(CONNECT_LIMIT_S):
        transport, connection = await loop.create_connection(
            lambda: LoadConnection(over),
            target.host,
            target.port,
            ssl=make_tls_context() if secure else None,
            server_hostname=target.host if secure else None,
        )
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


async def ask(target: LoadTarget, request: bytes, limit_s: float) -> HttpExchange:
    """Sends one request on a new connection, not as part of a measurement. Raises OSError, including TimeoutError."""
    ended: asyncio.Future[HttpExchange] = asyncio.get_running_loop().create_future()

    def finish(_connection: LoadConnection, exchange: HttpExchange) -> None:
        if not ended.done():
            ended.set_result(exchange)

    connection = await connect(target, finish)
    try:
        async with asyncio.timeout(limit_s):
            connection.send(HttpExchange(0, monotonic_ns()), request)
            exchange = await ended
    finally:
        connection.cut()
    if exchange.error is not None and not exchange.pieces:
        raise OSError(exchange.error)
    return exchange
