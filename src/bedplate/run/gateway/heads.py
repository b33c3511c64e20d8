"""Heads of HTTP messages: what a request's head says, how it is sent to an engine, and heads that repeat. Pure."""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import TYPE_CHECKING

import msgspec

from bedplate.run.gateway import sse

if TYPE_CHECKING:
    from bedplate.engines.traits import RequestTraits
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.tenants import TenantState

# Headers of one hop, headers that the gateway writes itself, and credentials.
_NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade http2-settings"
    b" transfer-encoding content-length server date expect host authorization x-api-key accept-encoding cookie"
    b" content-type content-encoding origin".split()
)
_SENT_HEAD = b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class EngineHead(msgspec.Struct):
    """The head of requests to one engine, up to the value of its last header, Content-Length."""

    backend: GatewayBackend
    key: str | None
    traits: RequestTraits | None
    text: bytes


class RequestHead(msgspec.Struct):
    method: bytes
    target: bytes
    path: bytes
    api: sse.Api | None
    """`None`: a page."""
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    chunked: bool
    """Whether the client supports chunked transfer encoding (HTTP/1.1)."""
    cors: bytes
    """Response headers for a page of another origin that is allowed."""
    _engine_head: EngineHead | None = None
    """For the engine that got the last request with this head."""

    @property
    def content_type(self) -> bytes:
        """JSON, except of forms: some engines reject other types for a JSON body, such as curl's default."""
        if self.api != "transcriptions":
            return b"application/json"
        return next((value for name, value in self.headers if name == b"content-type"), b"")

    def format_request(self, backend: GatewayBackend, body: bytes) -> bytes:
        """The request as the engine gets it."""
        cached = self._engine_head
        if (
            cached is None
            or cached.backend is not backend
            or cached.key is not backend.engine_key
            or cached.traits is not backend.requests
        ):
            text = self._format_engine_head(backend)
            self._engine_head = cached = EngineHead(backend, backend.engine_key, backend.requests, text)
        return b"%b%d\r\n\r\n%b" % (cached.text, len(body), body)

    def _format_engine_head(self, backend: GatewayBackend) -> bytes:
        if backend.remote is not None:
            return backend.remote.format_head(self, backend.engine_key)
        dropped = set(backend.requests.dropped_headers) if backend.requests is not None else set()
        for name, value in self.headers:
            if name == b"connection":  # the headers that it names are for one hop only
                dropped |= {word.strip().lower() for word in value.split(b",")}
        lines = [b"POST ", self.target, _SENT_HEAD, self.content_type, b"\r\n"]
        if key := backend.engine_key:
            lines += (b"authorization: Bearer ", key.encode(), b"\r\n")
        for name, value in self.headers:
            if name not in _NOT_FORWARDED and name not in dropped:
                lines += (name, b": ", value, b"\r\n")
        return b"".join((*lines, b"content-length: "))


class ClientRequest(msgspec.Struct):
    head: RequestHead
    body: bytes
    member: TenantState | None
    """The owner of the key that was sent with it."""


class RepeatedHead:
    """The head of a message that was parsed. The same head before another body is recognized and not parsed again.

    Only the digits of Content-Length may differ: a head of the same bytes has the same meaning. Heads contain keys, so
    they are compared in constant time.
    """

    __slots__ = ("_after", "_before", "_fixed_bytes", "_num_digits")

    def __init__(self, before: bytes, after: bytes) -> None:
        """`before` and `after` are the parts of the head around the digits."""
        self._before = before
        self._after = after
        self._fixed_bytes = len(before) + len(after)
        self._num_digits = 1

    def find_body(self, message: bytes) -> bytes | None:
        """The body of a complete message with this head; `None`: the message must be parsed."""
        length = len(message) - self._fixed_bytes
        digits = b"%d" % (length - self._num_digits)
        if len(digits) != self._num_digits:
            self._num_digits = len(digits)
            digits = b"%d" % (length - self._num_digits)
            if len(digits) != self._num_digits:  # no number fills the rest of the message
                return None
        # The head that a message of this length has, if it is complete and contains nothing else.
        head = self._before + digits + self._after
        body_at = len(head)
        return message[body_at:] if compare_digest(message[:body_at], head) else None


def learn_head(message: bytes) -> RepeatedHead | None:
    """The head of one complete message that was parsed; `None` if its body has no declared length."""
    head = message[: message.find(b"\r\n\r\n") + 4]
    lengths = list(_LENGTH.finditer(head))
    if len(lengths) != 1 or int(lengths[0][1]) != len(message) - len(head) or _CHUNKED.search(head):
        return None
    return RepeatedHead(head[: lengths[0].start(1)], head[lengths[0].end(1) :])
