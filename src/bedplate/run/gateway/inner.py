"""Joins a client's connection to the web framework without a socket between them.

Only the streaming APIs are worth protocol-level code. Every other page is an ordinary aiohttp handler, reached through
a transport that lives in memory, so that one public port serves both and keep-alive connections may mix them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httptools

if TYPE_CHECKING:
    from bedplate.run.gateway.client import ClientConnection, Request


# What belongs to one hop, is written anew, or is nobody's business behind the door where keys are checked.
_NOT_PASSED = frozenset(
    b"content-length transfer-encoding expect connection upgrade http2-settings authorization x-api-key cookie"
    b" x-bedplate-tenant".split()
)
TENANT_HEADER = "X-Bedplate-Tenant"
"""How a handler learns whose key came with a request; a client that sends it itself is not heard."""


class InnerConnection(asyncio.Transport):
    """The transport that an aiohttp request handler believes to be a client, one for each client connection."""

    def __init__(self, client: ClientConnection, handler: asyncio.Protocol) -> None:
        super().__init__()
        self._client = client
        self._handler = handler
        self._closed = False
        self._paused = False
        self._answering_head = False
        self._parser = httptools.HttpResponseParser(self)
        handler.connection_made(self)

    def send(self, request: Request) -> None:
        self._answering_head = request.method == b"HEAD"
        self._parser = httptools.HttpResponseParser(self)
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method, request.target)]
        host = b"localhost"  # HTTP/1.0 needs none, aiohttp does
        for name, value in request.headers:
            if name == b"host":
                host = value or host
            elif name not in _NOT_PASSED:
                lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(b"host: %b\r\n" % host)
        if request.member is not None:
            lines.append(b"%b: %b\r\n" % (TENANT_HEADER.encode(), request.member.name.encode()))
        if not request.keep_alive:
            lines.append(b"connection: close\r\n")
        if request.body:
            lines.append(b"content-length: %d\r\n" % len(request.body))
        self._handler.data_received(b"".join(lines) + b"\r\n" + request.body)

    # the client's side

    def client_gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._handler.connection_lost(None)

    def pause(self) -> None:
        self._paused = True
        self._handler.pause_writing()

    def resume(self) -> None:
        """Also when the page has been written meanwhile, for the next one uses the same handler."""
        if self._paused:
            self._paused = False
            self._handler.resume_writing()

    # the handler's side

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._closed:
            return
        raw = bytes(data)
        self._client.write_raw(raw)
        self._parser.feed_data(raw)

    def on_headers_complete(self) -> None:
        if self._answering_head:
            self._client.answered_raw(self, keep_alive=self._parser.should_keep_alive())

    def on_message_complete(self) -> None:
        if not self._answering_head:
            self._client.answered_raw(self, keep_alive=self._parser.should_keep_alive())

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.answered_raw(self, keep_alive=False)
            asyncio.get_running_loop().call_soon(self._handler.connection_lost, None)

    def is_closing(self) -> bool:
        return self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        """A request is already whole when it comes here, so there is nothing to hold back."""

    def resume_reading(self) -> None:
        """See `pause_reading`."""

    def is_reading(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The client's own connection has the buffer."""

    def get_write_buffer_size(self) -> int:
        return 0
