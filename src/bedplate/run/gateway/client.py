"""Client connections: HTTP/1.1 parsed at protocol level, one request at a time for each connection."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING

import httptools

from bedplate.run.gateway import sse
from bedplate.run.gateway.demand import is_plain, read_demand
from bedplate.run.gateway.errors import encode_error, encode_error_at
from bedplate.run.gateway.exchange import GatewayExchange
from bedplate.run.gateway.heads import ClientRequest, RequestHead, learn_head
from bedplate.run.gateway.origins import write_cors_headers, write_preflight_headers
from bedplate.run.gateway.pages import PageResponse, PendingPage, show_page
from bedplate.run.gateway.request_checks import RequestMistake, check_request
from bedplate.run.gateway.tasks import TASK_APIS, read_task
from bedplate.run.gateway.tenants import ONE_SEQUENCE, Rejection
from bedplate.run.gateway.transcriptions import read_transcription

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.heads import RepeatedHead
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.server import Gateway
    from bedplate.run.gateway.tenants import TenantState, VerifiedKey
    from bedplate.values.traffic import Outcome

MAX_HEAD_BYTES = 64 * 1024
REQUEST_TIMEOUT_S = 30.0
"""How long a request may take from its first byte to its last, in addition to the time that its body takes at
`MIN_BODY_BYTES_S`. A client may also not pause for longer than this."""
MIN_BODY_BYTES_S = 32_000
"""Bodies that arrive more slowly are rejected (408). At 256 kbit/s the largest body of 32 MB takes a quarter of an
hour."""
KEEP_ALIVE_S = 75.0
STALLED_READER_S = 300.0
"""How long a client may stop reading its answer before the connection is closed and its slot freed."""
LINGER_S = 5.0
"""How long a client whose request was rejected may pause in sending the rest of it."""
MAX_LINGER_S = 60.0
MAX_PIPELINED = 16
MAX_NAME_SHOWN = 200
MAX_ARRIVING_BYTES = 1_000_000_000
"""Limit of all incomplete request bodies together."""
OPEN_PATHS = frozenset([b"/", b"/health", b"/ready", b"/favicon.ico"])
"""Paths that need no key. They show that the endpoint runs and how to call it, never an answer of the model."""

_IDLE, _IN_HEAD, _IN_BODY = range(3)
"""How much of the current request has arrived."""

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %s\r\nserver: bedplate\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_READ_HEADERS = frozenset([b"authorization", b"content-length", b"expect", b"host", b"origin", b"x-api-key"])
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """One client's connection. Requests that arrive while another is being answered wait in order."""

    __slots__ = (
        "_answer_cors", "_arrived_bytes", "_body", "_body_bytes", "_chunked", "_closing", "_cors", "_current",
        "_discarding", "_fed", "_gateway", "_head_bytes", "_head_pieces_bytes", "_headers", "_host", "_keep_alive",
        "_key", "_last_head", "_linger_until", "_member", "_num_begun", "_owes_continue", "_parser", "_paused",
        "_rejection", "_repeated", "_request_began", "_stage", "_target", "_transport", "_unsent", "_waiting",
        "deadline",
    )  # fmt: skip

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._current: GatewayExchange | PendingPage | None = None
        self._key: VerifiedKey | None = None
        """The last valid key on this connection."""
        self._member: TenantState | None = None
        self._host = b""
        """The last accepted Host header on this connection."""
        self._cors = b""
        self._answer_cors = b""
        self._request_began: float | None = None
        """When an incomplete request began to arrive, or the answer before it ended."""
        self._keep_alive = False
        self._chunked = True
        self._waiting: deque[ClientRequest] = deque()
        self._last_head: RequestHead | None = None
        """The head of the last complete request that the parser has read."""
        self._repeated: RepeatedHead | None = None
        """Recognizes `_last_head`, if that request arrived in one piece."""
        self._num_begun = 0
        """Requests that began in the data that is being read."""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._arrived_bytes = 0
        self._fed = 0
        self._head_bytes = 0
        self._head_pieces_bytes = 0
        self._stage = _IDLE
        self._owes_continue = False
        self._unsent: list[bytes] = []
        """Chunks of the current stream that have not been written."""
        self._paused = False
        self._discarding = False
        self._rejection: bytes | None = None
        self._linger_until: float | None = None
        self._closing = False
        self.deadline: float | None = None

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._set_deadline(REQUEST_TIMEOUT_S)
        self._gateway.add_connection(self, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.drop_connection(self)
        self._transport = None
        self._forget_waiting()
        current, self._current = self._current, None
        if current is not None:
            current.cancel()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            if self._linger_until is not None:
                self._set_deadline(LINGER_S)
                self.deadline = min(self.deadline or 0.0, self._linger_until)
            return
        repeated = self._repeated
        if (
            repeated is not None
            and self._stage == _IDLE
            and self._current is None
            and not self._waiting
            and not self._paused
            and (body := repeated.find_body(data)) is not None
            and len(body) <= self._gateway.max_body_bytes
            and self._is_key_still_valid()
            and self._last_head is not None
        ):
            try:
                self._answer(ClientRequest(self._last_head, body, self._member))
            except Exception as error:  # a bug must not leave the client without an answer
                self._handle_internal_error(error)
            return
        began_in, self._num_begun, self._repeated = self._stage, 0, None
        self._fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            self._handle_internal_error(error)
        except httptools.HttpParserError as error:
            self._reject(400, f"the request is not valid HTTP: {error}", "bad_http")
        if self._num_begun == 1 and self._stage == began_in == _IDLE and not self._discarding and self._last_head:
            if self._last_head.api is not None:
                self._repeated = learn_head(data)
        elif self._stage == _IN_HEAD:
            if began_in == _IN_HEAD:
                # The parser reports a header only when it is complete, whatever its length.
                self._head_pieces_bytes += len(data)
                if self._head_pieces_bytes > MAX_HEAD_BYTES:
                    self._reject_head()
            else:
                self._head_bytes = len(data)  # an upper bound: it may contain the end of another request
        if self._stage != _IDLE and self._current is None and not self._paused and not self._discarding:
            self._set_request_deadline()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._set_deadline(STALLED_READER_S)
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._current is not None:
            self.deadline = None
            self._current.resume()
        elif self._waiting:
            self._answer_next()
        elif self._rejection is not None:
            self._send_rejection()
        elif not self._discarding:
            self._set_idle_deadline()

    # called by httptools

    def on_message_begin(self) -> None:
        self._stage = _IN_HEAD
        self._num_begun += 1
        self._last_head = None
        self._target = b""
        self._headers = []
        self._body = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._head_pieces_bytes = 0
        self._request_began = None
        self._cors = b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage == _IN_HEAD:
            self._headers.append((name.lower(), value))
            return
        # A trailer: counted, and ignored.
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject_head()

    def on_headers_complete(self) -> None:
        if self._discarding or self._parser.should_upgrade():
            return
        self._stage = _IN_BODY
        if self._head_bytes + self._head_pieces_bytes + self._fed > MAX_HEAD_BYTES:  # otherwise it cannot be too large
            self._head_bytes = len(self._target) + sum(len(name) + len(value) for name, value in self._headers)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject_head()
                return
        if self._target[:1] != b"/":
            self._target = _to_origin_form(self._target)
        given = by_name = length = host = origin = b""
        expects = False
        for name, value in self._headers:
            if name not in _READ_HEADERS:
                continue
            if name == b"content-length":  # the parser ensures that there is one, of digits only
                length = value
            elif name == b"authorization":
                if value[:7].lower() == b"bearer ":
                    given = value[7:].strip()
            elif name == b"x-api-key":
                by_name = by_name or value.strip()
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"expect":
                expects = value.lower() == b"100-continue"
        if (origin or host != self._host) and not self._check_origin(host, origin):
            return
        if not self._gateway.tenants.is_open and not self._has_access(given or by_name):
            self._reject(
                401,
                "the API key is missing or invalid; send it as 'Authorization: Bearer KEY'",
                "invalid_api_key",
                kind="authentication_error",
                extra=b"www-authenticate: Bearer\r\n",
            )
            return
        if length and int(length) > self._gateway.max_body_bytes:
            self._reject_body()
            return
        if expects and self._parser.get_http_version() == "1.1":
            if self._transport is not None and self._is_free():
                self._transport.write(_CONTINUE)
            else:
                self._owes_continue = True

    def on_body(self, body: bytes) -> None:
        if self._discarding:
            return
        size = len(body)
        self._body_bytes += size
        self._arrived_bytes += size
        self._gateway.arriving_bytes += size
        if self._body_bytes > self._gateway.max_body_bytes:
            self._reject_body()
        elif self._gateway.arriving_bytes > MAX_ARRIVING_BYTES:
            self._reject(
                503,
                f"the incomplete requests of all clients exceed {MAX_ARRIVING_BYTES:,} bytes; retry later",
                "overloaded",
                kind="server_error",
                extra=b"retry-after: 5\r\n",
            )
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._discarding or self._parser.should_upgrade():
            return
        self._stage = _IDLE
        self._owes_continue = False
        parser, target, body = self._parser, self._target, self._body
        modern = parser.get_http_version() == "1.1"
        method = parser.get_method()
        path = target.partition(b"?")[0]
        api = sse.APIS.get(path) if method == b"POST" else None
        if api is not None:
            # Without its query: no API has one, and an engine might read parameters there that were not checked.
            target = sse.OPENAI_TARGETS.get(path, path)
        self._last_head = head = RequestHead(
            method, target, path, api, self._headers, modern and parser.should_keep_alive(), modern, self._cors
        )
        request = ClientRequest(head, body[0] if len(body) == 1 else b"".join(body), self._member)
        self._body = []
        self._discarding = not head.keep_alive
        if self._current is None and not self._waiting and not self._paused:
            self._count_arrived(-len(request.body))
            self._answer(request)
            return
        self._waiting.append(request)
        if self._transport is not None and (
            len(self._waiting) >= MAX_PIPELINED
            or sum(len(r.body) for r in self._waiting) > self._gateway.max_body_bytes
        ):
            self._transport.pause_reading()

    # called by an exchange

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
        to_head: bool = False,
    ) -> None:
        """Sends a complete response; `to_head`: without its body."""
        if self._transport is None:
            return
        if not self._keep_alive or self._closing:
            extra += b"connection: close\r\n"
        if self._answer_cors:
            extra += self._answer_cors
        self._transport.write(
            b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (
                _STATUS_LINES.get(status) or _format_status_line(status),
                self._gateway.date,
                content_type,
                len(body),
                extra,
                b"" if to_head else body,
            )
        )
        self._finish_answer()

    def begin_stream(self, head: bytes, data: bytes) -> Callable[[bytes], None] | None:
        """Sends the head and the first events; returns what writes further chunks, if the client supports chunks."""
        if self._transport is None:
            return None
        date = self._gateway.date + self._answer_cors
        if not self._chunked:
            self._transport.write(b"%b%bconnection: close\r\n\r\n%b" % (head, date, data))
            return None
        close = b"" if self._will_stay_open() else b"connection: close\r\n"
        self._transport.write(
            b"%b%btransfer-encoding: chunked\r\n%b\r\n%x\r\n%b\r\n" % (head, date, close, len(data), data)
        )
        return self._transport.write

    def add_to_stream(self, data: bytes) -> None:
        """Adds events to the stream; `flush_stream` or `end_stream` sends them. An engine often sends its last events
        together, and the client then gets one packet instead of one for each."""
        self._unsent.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def flush_stream(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            if self._transport is not None:
                self._transport.write(data)

    def end_stream(self) -> None:
        """Sends the last events together with the end of the stream."""
        if self._chunked:
            self._unsent.append(b"0\r\n\r\n")
        self.flush_stream()
        if self._transport is not None:
            self._finish_answer()

    # called by the gateway

    def close_when_idle(self) -> bool:
        """Closes the connection if no request is being answered; returns whether it did."""
        self._closing = True
        if self._current is None:
            self._close()
        return self._current is None

    def stop(self, message: str) -> None:
        self._closing = True
        if self._current is not None:
            self._current.stop(message)
        else:
            self._close()

    def stop_at(self, backend: GatewayBackend, message: str) -> None:
        """Ends the current exchange if this backend answers it."""
        if self._current is not None and self._current.is_at(backend):
            self._current.stop(message)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_ending(self) -> bool:
        """Whether it is being closed and nothing delays that."""
        transport = self._transport
        return transport is not None and transport.is_closing() and not transport.get_write_buffer_size()

    def rank_for_eviction(self) -> tuple[int, float] | None:
        """Orders connections that may be closed when descriptors are scarce, the first one first; `None`: it is in use.

        Idle ones come first, then incomplete requests, then clients that do not read their last answer.
        """
        if self._transport is None or self._transport.is_closing() or self._current is not None or self._waiting:
            return None
        return 2 if self._paused else 0 if self._stage == _IDLE else 1, self.deadline or 0.0

    def handle_timeout(self) -> None:
        self.deadline = None
        if self._transport is None:
            return
        if self._current is not None or self._transport.is_closing() or self._transport.get_write_buffer_size():
            # The client does not read, so an orderly close would never complete.
            self._transport.abort()
            return
        if self._stage != _IDLE and not self._discarding:
            message = (
                f"the request is incomplete: it must arrive within {REQUEST_TIMEOUT_S:g} s, plus 1 s for each "
                f"{MIN_BODY_BYTES_S:,} bytes of its body, without a pause of {REQUEST_TIMEOUT_S:g} s"
            )
            self._reject(408, message, "request_timeout")
        self._close()

    # internals

    def _is_key_still_valid(self) -> bool:
        """Whether the key of the last request, if one is required, has not expired and no key has changed since."""
        tenants, key = self._gateway.tenants, self._key
        if key is None:
            return tenants.is_open
        return key.turn is tenants.turn and (key.expires_s is None or not key.has_expired)

    def _answer(self, request: ClientRequest, *, from_loop: bool = False) -> None:
        """`from_loop`: called by the event loop, not by the parser, which may have more requests."""
        head = request.head
        api = head.api
        size = len(request.body)
        if api is None and not from_loop:
            # A page is built synchronously: through the loop, so that a client that pipelines many blocks no others.
            self._count_arrived(size)
            self._waiting.append(request)
            asyncio.get_running_loop().call_soon(self._answer_next)
            return
        gateway = self._gateway
        self.deadline = None
        self._keep_alive = head.keep_alive
        self._chunked = head.chunked
        self._answer_cors = head.cors
        if api is None:
            self._show_page(request)
            return
        member = request.member or gateway.tenants.default
        audio = None
        body = request.body
        try:
            if api == "transcriptions":
                audio = read_transcription(head.content_type, body)
                asked, body = audio.asked, audio.body
            else:
                asked = sse.read_request_fields(body)
        except sse.UNREADABLE as error:
            message = f"the request body is not valid: {error}"
            self._gateway.record_rejection(None, member, api, None, size, 400, "bad_body", "refused")
            self.respond(400, encode_error(api, 400, message, "invalid_request_error", "bad_body"))
            return
        except RequestMistake as mistake:
            self._gateway.record_rejection(None, member, api, None, size, 400, mistake.code, "refused")
            kind = "invalid_request_error"
            self.respond(400, encode_error(api, 400, mistake.message, kind, mistake.code, mistake.param))
            return
        route = gateway.find_route(asked.model)
        if route is None or (route.allowed is not None and not route.may_be_used_by(member)):
            self._reject_model(asked, member, api, size)
            return
        checked_as = sse.CHECKED_AS.get(request.head.path, api) if api == "other" else api
        is_simple = asked.is_simple()
        try:
            features = check_request(checked_as, asked, route.capabilities, is_simple)
        except RequestMistake as mistake:
            self._gateway.record_rejection(route, member, api, asked, size, 400, mistake.code, "refused")
            kind = "invalid_request_error"
            self.respond(400, encode_error(checked_as, 400, mistake.message, kind, mistake.code, mistake.param))
            return
        now = monotonic()
        demand = ONE_SEQUENCE
        if audio is not None:
            demand = audio.demand
        elif not (is_simple and api == "chat") and (api in TASK_APIS or not is_plain(api, asked)):
            if api in TASK_APIS:
                read = read_task(api, request.body, route.capabilities)
            else:
                read = read_demand(api, asked, route.request_fields, route.request_limits)
            if isinstance(read, Rejection):
                self.reject_with_retry(route, member, api, asked, size, read)
                return
            demand = read
        max_tokens = asked.max_answer_tokens
        # Tokenization generates nothing; it is charged for its length.
        cost_tokens = member.estimate_cost_tokens(size, max_tokens if api != "other" else 0, demand)
        sequences = 1 if demand is ONE_SEQUENCE else demand.sequences
        line = route.waiting.get_queue(member.name, member.weight)
        why = None
        if member.is_limited and member.shared is None:  # otherwise the exchange reserves it first
            why = member.check_limits(cost_tokens, now, sequences)
        if why is None and (route.waiting.count or route.held is not None or not route.is_ready):
            why = route.check_admission(line, size)
        if why is None and sequences > 1:
            why = route.check_sequences(line, sequences)
        if why is not None:
            self.reject_with_retry(route, member, api, asked, size, why)
            return
        self._current = exchange = gateway.exchange_type(
            self, request, api, asked, gateway, route, member, line, cost_tokens, max_tokens, demand, sequences,
            route.links[0].meter if route.links else route.get_meter_without_engine(), now, now, now, features, size,
            body, bool(asked.stream), gateway.keeps_content and audio is None,
        )  # fmt: skip
        exchange.start()

    def _reject_model(self, asked: sse.RequestFields, member: TenantState, api: sse.Api, num_bytes: int) -> None:
        """Rejects a model that is not served, or not for this tenant. Both get the same response."""
        if self._gateway.starting:
            message = "bedplate is starting and has not registered all of its models yet"
            self._gateway.record_rejection(None, member, api, asked, num_bytes, 503, "engine_loading")
            body = encode_error(api, 503, message, "server_error", "engine_loading")
            self.respond(503, body, extra=b"retry-after: 1\r\n")
            return
        served = ", ".join(route.model for route in self._gateway.routes if route.may_be_used_by(member))
        model = asked.model
        shown = repr(model if model is None or len(model) <= MAX_NAME_SHOWN else model[:MAX_NAME_SHOWN] + "…")
        message = f"the model {shown} is not served here; served: {served or 'none'}"
        self._gateway.record_rejection(None, member, api, asked, num_bytes, 404, "model_not_found", "refused")
        self.respond(404, encode_error(api, 404, message, "invalid_request_error", "model_not_found", "model"))

    def _show_page(self, request: ClientRequest) -> None:
        """Answers what is not one of OpenAI's streaming APIs: a page, or a request that is translated."""
        head = request.head
        if head.method == b"POST" and head.path in sse.TRANSLATED:
            self._gateway.answer_translated(self, request)
            return
        if head.cors and head.method == b"OPTIONS":
            self.respond(200, b"", extra=write_preflight_headers(head.headers))
            return
        response = show_page(self._gateway, request)
        if isinstance(response, PageResponse):
            self._send_page(head, response)
        else:
            self._current = PendingPage(response, functools.partial(self._send_page, head))

    def _send_page(self, head: RequestHead, response: PageResponse) -> None:
        extra = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in response.headers.items())
        content_type, to_head = response.content_type.encode(), head.method == b"HEAD"
        self.respond(response.status, response.body, content_type=content_type, extra=extra, to_head=to_head)

    def reject_with_retry(
        self, route: Route, member: TenantState, api: sse.Api, asked: sse.RequestFields, num_bytes: int, why: Rejection
    ) -> None:
        """Rejects a request that a tenant's limit or the route does not accept, with Retry-After if it may be later."""
        outcome: Outcome = "refused" if why.status == 400 else "turned_away"
        self._gateway.record_rejection(route, member, api, asked, num_bytes, why.status, why.code, outcome)
        self.respond(why.status, why.encode(api), extra=why.format_retry_header() + member.format_limit_headers())

    def _finish_answer(self) -> None:
        self._current = None
        if self._transport is None:
            return
        if not self._keep_alive or self._closing:
            self._close()
        elif self._waiting:
            self._transport.resume_reading()
            # Through the loop, so that a client that pipelines many requests cannot cause a deep stack.
            asyncio.get_running_loop().call_soon(self._answer_next)
        elif self._rejection is not None:
            self._send_rejection()
        else:
            if self._owes_continue:
                self._owes_continue = False
                self._transport.write(_CONTINUE)
            if not self._paused:
                self._set_idle_deadline()

    def _answer_next(self) -> None:
        if self._transport is not None and self._current is None and self._waiting and not self._paused:
            request = self._waiting.popleft()
            self._count_arrived(-len(request.body))
            self._answer(request, from_loop=True)

    def _is_free(self) -> bool:
        """Whether an answer may begin now. Not while the client has not read the last one: it would fill the memory."""
        return self._current is None and not self._waiting and not self._paused

    def _will_stay_open(self) -> bool:
        return self._keep_alive and not self._closing

    def _close(self) -> None:
        """Closes after everything is written, or when the client has stopped reading for too long."""
        self._discarding = True
        self._forget_waiting()
        if self._transport is not None:
            self._transport.close()
            self._set_deadline(STALLED_READER_S)

    def _check_origin(self, host: bytes, origin: bytes) -> bool:
        """Whether the request may come from where it comes from; otherwise rejects it."""
        policy = self._gateway.origins
        if origin and policy.allows_origin(origin):
            self._cors = write_cors_headers(origin)
        if not self._gateway.tenants.is_open:  # a page of another site has no key
            return True
        if host != self._host:
            if not policy.accepts_host(host):
                message = "this endpoint does not have the name in the Host header; --allow-host NAME of serve adds it"
                self._reject(403, message, "host_not_allowed", kind="permission_error")
                return False
            self._host = host
        if origin and not self._cors and not policy.is_same_origin(origin, host):
            message = "web pages of this origin may not use this endpoint; --allow-origin ORIGIN of serve allows them"
            self._reject(403, message, "origin_not_allowed", kind="permission_error")
            return False
        return True

    def _has_access(self, given: bytes) -> bool:
        tenants, key = self._gateway.tenants, self._key
        if key is None or not key.is_valid_for(given, tenants.turn):
            self._key = key = tenants.find(given)
        if key is not None:
            self._member = key.member
            return True
        self._member = None
        if self._cors and self._parser.get_method() == b"OPTIONS":  # a browser's preflight never has the key
            return True
        return self._target.partition(b"?")[0] in OPEN_PATHS

    def _count_arrived(self, num_bytes: int) -> None:
        """Counts bodies that have arrived and were not sent to an engine yet."""
        self._arrived_bytes += num_bytes
        self._gateway.arriving_bytes += num_bytes

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._body = []
        self._count_arrived(-self._arrived_bytes)

    def _reject_head(self) -> None:
        message = f"the request line and headers are larger than {MAX_HEAD_BYTES:,} bytes"
        self._reject(431, message, "head_too_large")

    def _reject_body(self) -> None:
        limit = self._gateway.max_body_bytes
        self._reject(
            413, f"the request body is larger than {limit:,} bytes; --max-body-mb sets the limit", "body_too_large"
        )

    def _decline_upgrade(self, rest: bytes) -> None:
        """Handles a request that offers a protocol upgrade, as `curl --http2` does, as if it had no such header.

        The parser treats what follows such a head as another protocol, so it gets the head again without the header.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._reject(405, "this server is not a proxy", "method_not_allowed")
            return
        headers = b"".join(b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade")
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (
            method, self._target, self._parser.get_http_version().encode(), headers,
        )  # fmt: skip
        self._parser = httptools.HttpRequestParser(self)
        self._stage = _IDLE
        self.data_received(head + rest)

    def _handle_internal_error(self, error: Exception) -> None:
        """Answers with 500 after a bug, so that the client does not wait forever."""
        cause = (error.__context__ or error) if isinstance(error, httptools.HttpParserCallbackError) else error
        context = {"message": "internal error while reading a request", "exception": cause, "protocol": self}
        asyncio.get_running_loop().call_exception_handler(context)
        current, self._current = self._current, None
        if current is not None:
            current.cancel()
        self._forget_waiting()
        self._discarding = False
        message = "internal error in bedplate while reading this request"
        self._reject(500, message, "internal_error", kind="server_error")

    def _reject(
        self, status: int, message: str, code: str, *, kind: str = "invalid_request_error", extra: bytes = b""
    ) -> None:
        """Rejects a request that will not be read to its end, after the requests before it are answered."""
        if self._discarding:
            return
        self._discarding = True
        self._body = []
        self._count_arrived(sum(len(request.body) for request in self._waiting) - self._arrived_bytes)
        self._gateway.meters.count_reason(code)
        body = encode_error_at(self._target.partition(b"?")[0], status, message, kind, code)
        self._rejection = (
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
            % (_format_status_line(status), self._gateway.date, len(body), extra + self._cors, body)
        )
        if self._is_free():
            self._send_rejection()

    def _send_rejection(self) -> None:
        """Sends the response, then reads and discards the rest of the request.

        Closing at once would reset the connection, and the client would never receive the response.
        """
        if self._transport is None or self._rejection is None:
            return
        self._transport.write(self._rejection)
        # uvloop closes it at once if the client has disconnected.
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()
        self._rejection = None
        self._closing = True
        self._set_deadline(LINGER_S)
        self._linger_until = monotonic() + MAX_LINGER_S

    def _set_deadline(self, duration_s: float) -> None:
        self.deadline = monotonic() + duration_s

    def _set_request_deadline(self) -> None:
        """Limits the whole request: a client that sends a byte at a time does not extend it."""
        now = monotonic()
        if self._request_began is None:
            self._request_began = now
        self.deadline = min(now, self._request_began + self._body_bytes / MIN_BODY_BYTES_S) + REQUEST_TIMEOUT_S

    def _set_idle_deadline(self) -> None:
        if self._stage == _IDLE:
            self.deadline = monotonic() + KEEP_ALIVE_S
        else:
            self._set_request_deadline()


def _to_origin_form(target: bytes) -> bytes:
    """Returns `/path?query` of a target in absolute form, which clients send to proxies."""
    scheme, mark, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if mark and scheme.lower() == b"http" else target


def _format_status_line(status: int) -> bytes:
    """The status line, also for a non-standard status of an engine."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\nserver: bedplate\r\n" % status
