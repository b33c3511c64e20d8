"""Engine connections: pooled, and parsed at protocol level."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import httptools

from bedplate.run.gateway import sse
from bedplate.run.gateway.heads import RepeatedHead, learn_head

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.exchange import GatewayExchange
    from bedplate.run.gateway.model_name import Renaming

CONNECT_TIMEOUT_S = 10.0
_INVALID = (httptools.HttpParserError, httptools.HttpParserUpgrade)
KEPT_CHUNKS = 1024
"""So many chunks of a stream are kept as they came, to count their tokens if the client disconnects. Of longer streams
only the text is kept."""
_MOST_RELAYED_BYTES = 4096
"""Larger chunks are parsed."""
_END_OF_EVENTS = b"\n\n\r\n"
"""How a chunk ends that contains complete events only."""


def _list_chunk_heads(most_bytes: int) -> list[bytes | tuple[()]]:
    """The line with the size of a chunk, by the length of the whole chunk; `()`: it is too short for an event."""
    heads: list[bytes | tuple[()]] = [()] * most_bytes
    for size in range(2, most_bytes):
        head = b"%x\r\n" % size
        if (length := len(head) + size + 2) < most_bytes:
            heads[length] = head
    return heads


_CHUNK_HEADS = _list_chunk_heads(_MOST_RELAYED_BYTES)


def _discard(chunk: bytes) -> None:
    """Where chunks of no stream would go."""


class EngineExchange(Protocol):
    """One request to an engine and its answer."""

    over: bool
    tried_again: bool
    """Whether it must use a new connection instead of an idle one."""

    def send_to_engine(self, connection: EngineConnection) -> None: ...
    def receive_whole(self, content_type: bytes, body: bytes) -> None: ...
    def receive_head(self, status: int, content_type: bytes) -> None: ...
    def receive_body(self, data: bytes) -> None: ...
    def flush(self) -> None:
        """Called when everything that has arrived was received."""

    def complete_answer(self) -> None: ...
    def handle_lost_engine(self, how: str, reused: bool) -> None: ...
    def handle_absent_engine(self) -> None: ...


class EngineConnection(asyncio.Protocol):
    """One keep-alive connection to the engine; carries one exchange at a time."""

    __slots__ = (
        "_backend", "_ends_at_close", "_has_end", "_is_between_answers", "_is_chunk_complete", "_num_begun", "_parser",
        "_relays", "_renaming", "_repeated", "_status", "_stream", "_type", "_write_chunk", "address", "exchange",
        "is_paused", "pool", "transport", "used",
    )  # fmt: skip

    def __init__(self, pool: EnginePool, address: tuple[str, int]) -> None:
        self.pool = pool
        self.address = address
        self._backend = pool.backend
        self.exchange: EngineExchange | None = None
        self._stream: GatewayExchange | None = None
        """The exchange, once its client may get the chunks of the engine as they come."""
        self._write_chunk: Callable[[bytes], None] = _discard
        self._renaming: Renaming | None = None
        self._relays = False
        """Whether `_stream` is set and the next byte is the first one of a chunk and of an event."""
        self.transport: asyncio.Transport | None = None
        self.used = False
        self._parser = httptools.HttpResponseParser(self)
        self._type = b""
        self._status = 0
        self._has_end = False
        """Whether the answer has a Content-Length or is chunked."""
        self._ends_at_close = False
        self.is_paused = False
        self._is_between_answers = True
        self._is_chunk_complete = False
        """Whether a chunk has ended and nothing of the body has arrived since then."""
        self._num_begun = 0
        """Answers that began in the data that is being read."""
        self._repeated: RepeatedHead | None = None
        """Recognizes the head of the last answer, if that arrived in one piece and is no stream; `_type` is its."""

    def send(self, exchange: EngineExchange, request: bytes) -> None:
        self.exchange = exchange
        if self.transport is not None:
            self.transport.write(request)

    def relay_chunks(self, stream: GatewayExchange, write: Callable[[bytes], None], renaming: Renaming | None) -> None:
        """From now on, chunks of complete events without usage are written to the client with their framing."""
        self._stream = stream
        self._write_chunk = write
        self._renaming = renaming

    def _end_relay(self) -> None:
        self._stream = None
        self._relays = False
        self._write_chunk = _discard  # nothing of the client is kept

    def pause(self) -> None:
        if self.transport is not None and not self.is_paused:
            self._set_paused(True)
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused and self.transport is not None:
            self._set_paused(False)
            self.transport.resume_reading()

    def _set_paused(self, paused: bool) -> None:
        if paused != self.is_paused:
            self.is_paused = paused
            self.pool.backend.unread += 1 if paused else -1

    def drop(self) -> None:
        """Closes the connection, so that the engine cancels the request."""
        self.exchange = None
        self._end_relay()
        self._set_paused(False)
        if self.transport is not None:
            self.transport.abort()

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._backend.received += 1
        if (
            self._relays
            and (stream := self._stream) is not None
            and (length := len(data)) < _MOST_RELAYED_BYTES
            and data.startswith(head := _CHUNK_HEADS[length])
            and data.endswith(_END_OF_EVENTS)
            and (data.find(b'"usage":') < 0 or not sse.may_have_usage(data))
            and len(sent := stream.sent_on) < KEPT_CHUNKS - 1
        ):
            # The usual case: one chunk of complete events in the middle of a stream. The client gets the same chunk.
            stream.last_events = data
            if (renaming := self._renaming) is not None:
                old, new = renaming
                events = data[len(head) : -2].replace(old, new)
                data = b"%x\r\n%b\r\n" % (len(events), events)
            sent.append(data)
            self._write_chunk(data)
            return
        exchange = self.exchange
        if exchange is None:
            self.drop()  # data without a request: the connection is out of sync
            return
        was_between = self._is_between_answers
        if was_between:
            if self._repeated is not None and (body := self._repeated.find_body(data)) is not None:
                self._release_exchange(reusable=True)
                try:
                    exchange.receive_whole(self._type, body)
                except Exception as error:  # a bug must not leave the client without an answer
                    self._handle_invalid_answer(exchange, error)
                return
            self._repeated, self._num_begun = None, 0
        try:
            self._parser.feed_data(data)
        except _INVALID as error:
            self._handle_invalid_answer(exchange, error)
            return
        if self.exchange is not None:
            self.exchange.flush()
        # After a complete chunk there can only be the beginning of the next one, which does not end like this.
        stream = self._stream
        is_at_chunk = self._is_chunk_complete and data.endswith(_END_OF_EVENTS)
        self._relays = is_at_chunk and stream is not None and not stream.held
        if was_between and self._num_begun == 1 and self._is_between_answers and self._status == 200:
            self._repeated = learn_head(data) if not sse.is_stream(self._type) else None

    def connection_lost(self, exc: Exception | None) -> None:
        ended_well = self._ends_at_close and exc is None
        reused = self.used
        exchange = self._release_exchange(reusable=False)
        self._set_paused(False)
        self.transport = None
        self.pool.connections.discard(self)
        if exchange is None:
            return
        if ended_well:
            exchange.complete_answer()
        else:
            exchange.handle_lost_engine("it closed the connection", reused)

    # called by httptools

    def on_message_begin(self) -> None:
        self._is_between_answers = False
        self._num_begun += 1
        self._type = b""
        self._has_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._type = value
        elif name == b"content-length" or name == b"transfer-encoding":
            self._has_end = True

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response such as "100 Continue"
        self._ends_at_close = not self._has_end
        if self.exchange is not None:
            self.exchange.receive_head(status, self._type)

    def on_chunk_complete(self) -> None:
        self._is_chunk_complete = True

    def on_body(self, body: bytes) -> None:
        self._is_chunk_complete = False
        if self.exchange is not None:
            self.exchange.receive_body(body)

    def on_message_complete(self) -> None:
        if self._status < 200:
            return
        self._is_between_answers = keep_alive = self._parser.should_keep_alive()
        if exchange := self._release_exchange(reusable=keep_alive):
            exchange.complete_answer()

    def _handle_invalid_answer(self, exchange: EngineExchange, error: Exception) -> None:
        how = f"its answer is not valid HTTP ({error})"
        if isinstance(error, httptools.HttpParserCallbackError) or not isinstance(error, _INVALID):
            how = "internal error in bedplate while forwarding the answer"
            context = {"message": "internal error while forwarding an answer", "exception": error.__context__ or error}
            asyncio.get_running_loop().call_exception_handler(context)
        reused = self.used
        # The invalid data may follow a complete answer, when the connection already carries the next exchange.
        following = self._release_exchange(reusable=False)
        exchange.handle_lost_engine(how, reused)
        if following is not None and following is not exchange:
            following.handle_lost_engine(how, reused)

    def lose_engine(self, how: str) -> None:
        """Ends the exchange as if the engine had closed the connection."""
        exchange = self._release_exchange(reusable=False)
        if exchange is not None:
            exchange.handle_lost_engine(how, False)

    def _release_exchange(self, *, reusable: bool) -> EngineExchange | None:
        exchange, self.exchange = self.exchange, None
        if self._stream is not None:
            self._end_relay()
        self.used = True
        self._ends_at_close = False
        self.pool.give_back(self, reusable=reusable, was_active=exchange is not None)
        return exchange


class EnginePool:
    """Connections to one backend."""

    def __init__(self, backend: GatewayBackend) -> None:
        self.backend = backend
        self.freed: Callable[[], None] = lambda: None
        """Called when a connection has become free."""
        self._idle: list[EngineConnection] = []
        self.active = 0
        """Connections that carry an exchange, or are being opened for one."""
        self._connecting: set[asyncio.Task[None]] = set()
        self.connections: set[EngineConnection] = set()
        """All open connections."""

    def take(self, exchange: EngineExchange) -> None:
        """Gives the exchange an idle connection, or opens one."""
        fresh = exchange.tried_again
        self.active += 1
        address = self.backend.address
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.address == address and connection.transport and not connection.transport.is_closing():
                exchange.send_to_engine(connection)
                return
            connection.drop()
        task = asyncio.get_running_loop().create_task(self._connect(exchange, address))
        self._connecting.add(task)
        task.add_done_callback(self._finish_connecting)

    def give_back(self, connection: EngineConnection, *, reusable: bool, was_active: bool) -> None:
        if reusable and connection.transport is not None and not connection.transport.is_closing():
            # Reading may be paused for a slow client of the last answer; the next exchange must not wait for that.
            if connection.is_paused:
                connection.resume()
            self._idle.append(connection)
        else:
            with contextlib.suppress(ValueError):
                self._idle.remove(connection)
            if connection.transport is not None:
                connection.transport.abort()
        if was_active:
            self.active -= 1
            self.freed()

    def abandon(self, connection: EngineConnection) -> None:
        """Ends an exchange whose answer is no longer needed; the engine sees the connection close."""
        connection.drop()
        self._release()

    def drop_requests(self) -> None:
        """Ends all exchanges at once: the engine will not answer them."""
        for connection in [one for one in self.connections if one.exchange is not None]:
            connection.lose_engine("it made no progress")

    def close(self) -> None:
        for task in list(self._connecting):
            task.cancel()
        while self._idle:
            self._idle.pop().drop()

    async def _connect(self, exchange: EngineExchange, address: tuple[str, int] | None) -> None:
        if address is None:
            self._release()
            exchange.handle_absent_engine()
            return
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(self, address), *address, **self.backend.connect_options
                )
        except (OSError, TimeoutError) as error:
            self._release()
            self.backend.mark_unreachable(f"it does not accept connections ({error})")
            # It was stopped meanwhile, and may have another address now; or it is started on demand.
            if self.backend.address != address or self.backend.is_asleep:
                exchange.handle_absent_engine()
                return
            exchange.handle_lost_engine(f"it does not accept connections ({error})", False)
            return
        if exchange.over:
            connection.drop()
            self._release()
        elif connection.transport is None or connection.transport.is_closing():
            self._release()
            exchange.handle_lost_engine("it closed the connection", False)
        else:
            exchange.send_to_engine(connection)

    def _finish_connecting(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            self._release()

    def _release(self) -> None:
        self.active -= 1
        self.freed()
