"""One proxied request, from the client's last byte in to the answer's last byte out."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from bedplate.run.gateway import sse

if TYPE_CHECKING:
    from bedplate.run.gateway.client import ClientConnection, Request
    from bedplate.run.gateway.upstream import EngineConnection, EnginePool
    from bedplate.run.gateway.watch import Meter

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: bedplate\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
# What belongs to one hop, to the engine's own server, or is written anew here.
_NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade http2-settings"
    b" transfer-encoding content-length server date expect host authorization x-api-key accept-encoding cookie"
    b" content-type".split()
)
_SENT_HEAD = b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
"""The body was read as JSON; some engines refuse it under another name, as curl gives it one by itself."""


class Exchange:
    """Owns one request, in callbacks of the two connections. It has no task, and holds back no more than an event that
    has not arrived whole."""

    __slots__ = (
        "_answer", "_api", "_asked_usage", "_body", "_client", "_connection", "_first", "_held", "_last_events",
        "_meter", "_pool", "_request", "_started", "_status", "_streaming", "_type", "_usage", "over", "tried_again",
    )  # fmt: skip

    def __init__(
        self, client: ClientConnection, request: Request, api: sse.Api, asked: sse.Asked, pool: EnginePool, meter: Meter
    ) -> None:
        self._client = client
        self._request = request
        self._api = api
        self._pool = pool
        self._meter = meter
        self._connection: EngineConnection | None = None
        self._started = monotonic()
        self._first: float | None = None
        self._status = 0
        self._type = b""
        self._streaming = False
        self._answer: list[bytes] = []
        self._held = b""
        self._last_events = b""
        self._usage = sse.Usage()
        self.tried_again = False
        """Whether this is the second attempt, which does not trust to a connection that has been idle."""
        self.over = False
        self._asked_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        self._body = request.body
        if asked.stream and api in ("chat", "completions") and not self._asked_usage:
            self._body = sse.with_usage_asked(request.body, asked)

    def start(self) -> None:
        self._meter.in_flight.inc()
        self._pool.take(self)

    # from the client's connection

    def client_gone(self) -> None:
        if not self.over:
            self._finish("cancelled")
            if self._connection is not None:
                self._pool.abandon(self._connection)
            else:
                self._pool.forget(self)

    def pause(self) -> None:
        """The client reads more slowly than the engine writes."""
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.resume_reading()

    def stop(self, message: str) -> None:
        """Ends the exchange because the endpoint itself goes away."""
        if not self.over:
            if self._connection is not None:
                self._pool.abandon(self._connection)
            else:
                self._pool.forget(self)
            self._fail(message, "shutting_down", status=503)

    # from the engine's connection

    def engine_ready(self, connection: EngineConnection) -> None:
        self._connection = connection
        request = self._request
        head = [b"POST ", request.target, _SENT_HEAD % len(self._body)]
        if key := self._pool.backend.engine_key:
            head += (b"authorization: Bearer ", key.encode(), b"\r\n")
        not_forwarded = _NOT_FORWARDED
        for name, value in request.headers:
            if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                not_forwarded = not_forwarded.union(word.strip().lower() for word in value.split(b","))
        for name, value in request.headers:
            if name not in not_forwarded:
                head += (name, b": ", value, b"\r\n")
        head += (b"\r\n", self._body)
        connection.send(self, b"".join(head))

    def engine_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        for name, value in headers:
            if name == b"content-type":
                self._type = value
        # The head waits for the first event: one packet instead of two, and an engine that dies before its first
        # token can still be answered with a proper status.
        self._streaming = status == 200 and self._type[:17].lower() == b"text/event-stream"

    def engine_body(self, data: bytes) -> None:
        if not self._streaming:
            self._answer.append(data)
            return
        if self._held:
            data = self._held + data
            self._held = b""
        whole = sse.whole_events(data)
        if whole < len(data):
            self._held = data[whole:]
            data = data[:whole]
        if not data:
            return
        self._last_events = data
        if sse.may_have_usage(data):
            data = sse.read_usage(data, self._usage, drop=not self._asked_usage)
            if not data:
                return
        if self._first is None:
            self._first = monotonic()
            self._pool.backend.worked = True
            self._client.begin_stream(_STREAM_HEAD, data)
        else:
            self._client.write_stream(data)

    def engine_done(self) -> None:
        self._connection = None
        if not self._streaming:
            self._answer_whole()
            return
        if self._held.strip():
            # An event without its blank line is still an event for readers that are at the end of the stream.
            held, self._held = self._held, b""
            self.engine_body(held + b"\n\n")
        if sse.is_whole(self._api, self._last_events) and self._first is not None:
            self._finish("ok")
            self._client.end_stream()
        else:
            self._fail(f"{self._pool.backend.engine} ended the stream before the answer was complete", "engine_stopped")

    def engine_lost(self, how: str, reused: bool) -> None:
        self._connection = None
        if self.over:
            return
        if reused and not self.tried_again and self._status == 0:
            # An idle connection can be closed by the engine in the very moment we write to it. Nothing of the answer
            # has been seen, so the same request goes out once more on a connection of its own.
            self.tried_again = True
            self._pool.take(self)
            return
        backend = self._pool.backend
        self._fail(f"{backend.engine} stopped before the answer was complete: {how}", "engine_stopped")

    def engine_away(self) -> None:
        """There is nothing to connect to: the engine went away after the request was taken."""
        backend = self._pool.backend
        if not self.over:
            self._fail(backend.unavailable(), f"engine_{backend.state}", status=503)

    # the end, one way or the other

    def _answer_whole(self) -> None:
        self._pool.backend.worked = True
        body = b"".join(self._answer)
        if self._status >= 400:
            body = sse.as_openai_error(self._status, body)
            self._type = b"application/json"
        else:
            sse.read_body_usage(body, self._usage)
        self._finish("ok" if self._status < 400 else "refused")
        self._client.respond(self._status, body, content_type=self._type or b"application/json")

    def _fail(self, message: str, code: str, status: int = 502) -> None:
        self._status = status
        self._finish("failed")
        if self._first is None:
            retry = b"retry-after: %d\r\n" % self._pool.backend.retry_after_s
            self._client.respond(status, sse.error_body(message, "server_error", code), extra=retry)
        else:
            self._client.write_stream(sse.error_event(self._api, message, "server_error", code, self._last_events))
            self._client.end_stream()

    def _finish(self, outcome: str) -> None:
        self.over = True
        self._meter.in_flight.dec()
        self._meter.record(self._api, outcome, self._started, self._first, monotonic(), self._usage)
