"""One proxied request, from the last byte of the request to the last byte of the answer."""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import TYPE_CHECKING, Literal

import msgspec

from bedplate.run.gateway import sse, upstream
from bedplate.run.gateway.answers import AnswerText
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.run.gateway.counting import CountJob
from bedplate.run.gateway.demand import list_prompts
from bedplate.run.gateway.errors import encode_error, read_engine_error
from bedplate.run.gateway.recorder import RequestContent
from bedplate.run.gateway.shapes import PREFIX_BYTES, hash_conversation, hash_prefixes
from bedplate.run.gateway.transcriptions import format_answer, set_form_model
from bedplate.values.traffic import ServedRequest

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.client import ClientConnection
    from bedplate.run.gateway.errors import EngineError
    from bedplate.run.gateway.fair import TenantQueue
    from bedplate.run.gateway.heads import ClientRequest, RequestHead
    from bedplate.run.gateway.model_name import Renaming
    from bedplate.run.gateway.routes import BackendLink, Route
    from bedplate.run.gateway.server import Gateway
    from bedplate.run.gateway.tenants import Demand, Rejection, TenantState
    from bedplate.run.gateway.upstream import EngineConnection
    from bedplate.run.gateway.watch import EngineMeter
    from bedplate.values.capabilities import Feature

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: bedplate\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
MAX_EVENT_BYTES = 16_000_000
MAX_ANSWER_BYTES = 256_000_000
"""Limit of an answer that is not streamed."""
NUM_LAST = 3
"""The finish reason is in one of so many last chunks: a chunk with the usage and the end of the stream may follow."""
GENERATING: frozenset[sse.Api] = frozenset(["chat", "completions", "responses", "messages"])
Outcome = Literal["ok", "refused", "failed", "cancelled"]


RequestEnd = tuple[Outcome, "GatewayBackend | None", float]
"""How the request ended, which engine had it, and when."""


class GatewayExchange(msgspec.Struct, eq=False):
    """Owns one request. It runs in callbacks of the two connections, without a task, and buffers at most one
    incomplete event of a stream. A `Struct`, because it has many fields and most requests change few of them."""

    _client: ClientConnection
    _request: ClientRequest
    _api: sse.Api
    _asked: sse.RequestFields
    _gateway: Gateway
    _route: Route
    member: TenantState
    line: TenantQueue[GatewayExchange]
    cost_tokens: float
    """The expected cost that it was charged when it was accepted."""
    _max_tokens: int | None
    _demand: Demand
    sequences: int
    _meter: EngineMeter
    _started: float
    joined_at: float
    sent_at: float
    features: tuple[Feature, ...]
    """What it asks for in addition to text."""
    num_bytes: int
    _body: bytes
    streams: bool
    _keeps_content: bool
    """Whether all of the answer is kept, for `--log-content` and shadow runs."""
    _asked_usage: bool = False
    _reason: str | None = None
    _by_client: bool = False
    _suspects: list[tuple[GatewayBackend, FinishedRequest]] | None = None
    """Backends that answered with an error whose cause is not known."""
    _limits: bytes = b""
    _reserving: bool = False
    """Whether it waits until limits that several gateways share are checked."""
    _reserved: bool = False
    _link: BackendLink | None = None
    _affinity: int | None = None
    _connection: EngineConnection | None = None
    _first: float | None = None
    tried_again: bool = False
    """Whether this is the second attempt, which uses a new connection instead of an idle one."""
    tried: tuple[GatewayBackend, ...] = ()
    """Backends that failed to answer it."""
    over: bool = False
    prefilling: bool = False
    """Whether an engine has it and has not sent the first token."""
    sent_on: list[bytes] = []
    """What was sent to the client, or the end of it; some with the framing of its chunk."""
    _text: AnswerText | None = None
    """The text of what is no longer in `sent_on`."""
    _usage_adds: bool = False
    """Whether each sequence reports its own usage."""
    _uncounted: bool = False
    """Whether its tokens are counted after its end, since the engine did not report all of them."""
    # the answer of one engine
    _status: int = 0
    _type: bytes = b""
    _streaming: bool = False
    _answer: list[bytes] = []
    _answer_bytes: int = 0
    held: bytes = b""
    """The beginning of an event whose end has not arrived."""
    _before_last: tuple[bytes, ...] = ()
    """The last chunks before those in `sent_on`."""
    last_events: bytes = b""
    _finish_reason: str | None = None
    _renaming: Renaming | None = None
    _usage: sse.TokenUsage = msgspec.field(default_factory=sse.TokenUsage)

    def _forget_answer(self) -> None:
        """Before the request is sent to another engine."""
        self._status = 0
        self._type = b""
        self._streaming = False
        self._answer = []
        self._answer_bytes = 0
        self.held = b""
        self.last_events = b""
        self._finish_reason = None
        self._renaming = None
        self._usage = sse.TokenUsage()

    def start(self) -> None:
        member, asked = self.member, self._asked
        self._meter.in_flight += 1
        member.in_flight += self.sequences
        shared = member.shared if member.is_limited else None
        if member.has_limits and shared is None:
            member.charge(self.cost_tokens, self._started)
        if self.streams:
            self._asked_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            if not self._asked_usage and (self._api == "chat" or self._api == "completions"):
                self._body = sse.add_usage_option(self._body, asked)
        if shared is not None:
            self._reserving = True
            shared.reserve(member, self.cost_tokens, self.sequences, self._begin_reserved)
            return
        self._route.take(self)
        if member.has_limits:  # while the engine works
            self._limits = member.format_limit_headers()

    def _begin_reserved(self, why: Rejection | None) -> None:
        """Continues when the limits that several gateways share were checked."""
        member, shared = self.member, self.member.shared
        if shared is None:
            raise RuntimeError("the limits of this tenant are not shared")
        if self.over:  # the client has disconnected
            if why is None:
                shared.release(member.name, self.sequences)
                shared.correct(member.name, -self.cost_tokens)
            return
        self._reserving = False
        if why is None:
            self._reserved = True
            self._route.take(self)
            if member.has_limits:
                self._limits = member.format_limit_headers()
            return
        self.over = True
        self._meter.in_flight -= 1
        member.in_flight -= self.sequences
        self._client.reject_with_retry(self._route, member, self._api, self._asked, self.num_bytes, why)

    # called by its route

    @property
    def affinity(self) -> int | None:
        """The same number for all requests of a conversation."""
        if self._affinity is None:
            self._affinity = hash_conversation(self._asked, self._gateway.tenants.salt)
        return self._affinity

    @property
    def head(self) -> RequestHead:
        return self._request.head

    @property
    def first_at(self) -> float | None:
        """When the first event of its stream arrived."""
        return self._first

    def mark_sent(self, link: BackendLink, now: float) -> None:
        self._link = link
        self.sent_at = now
        if link.meter is not self._meter:
            self._meter.in_flight -= 1
            self._meter = link.meter
            self._meter.in_flight += 1

    def is_at(self, backend: GatewayBackend) -> bool:
        return self._link is not None and self._link.backend is backend

    def reject(self, why: Rejection) -> None:
        """Answers a request that was accepted and cannot be sent any more."""
        if not self.over:
            self._status, self._reason = why.status, why.code
            record = self._finish("refused")
            self._client.respond(why.status, why.encode(self._api), extra=why.format_retry_header())
            self._keep_record(record)

    def reject_unserved(self, message: str, code: str, retry_after_s: int) -> None:
        """Answers with 503: no engine can answer the request in time."""
        if not self.over:
            self._fail(message, code, status=503, retry_after_s=retry_after_s)

    # called by the client's connection

    def cancel(self) -> None:
        if self.over:
            return
        outcome: Outcome = "cancelled"
        begun = self._first is not None and self._api in GENERATING
        if begun and not self.held.strip() and sse.is_complete(self._api, self.last_events):
            # Clients may leave after the last event. The end of the HTTP message can arrive later, for example from
            # another machine.
            self._backend.health.record_success()
            outcome = "ok"
        record = self._finish(outcome)
        self._abandon()
        self._keep_record(record)

    def pause(self) -> None:
        """Called when the client reads more slowly than the engine writes."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def stop(self, message: str) -> None:
        """Ends the exchange with an error because the gateway or the engine is being stopped."""
        if not self.over:
            self._abandon()
            self._fail(message, "shutting_down", status=503)

    # called by the engine's connection

    def send_to_engine(self, connection: EngineConnection) -> None:
        self._connection = connection
        body, backend = self._body, connection.pool.backend
        if backend.wants_name and (backend.body_fields or self._asked.model != backend.sent_name):
            if self._api == "transcriptions":
                body = set_form_model(self._request.head.content_type, body, backend.sent_name)
            else:
                body = backend.address_body(body)
        if self.sequences > 1:
            traits = backend.requests
            self._usage_adds = traits is not None and traits.usage_per_sequence
        connection.send(self, self._request.head.format_request(backend, body))

    def receive_head(self, status: int, content_type: bytes) -> None:
        self._status = status
        self._type = content_type
        # The head is sent with the first event: one packet instead of two, and when the engine dies before its first
        # token the client still gets a proper status.
        self._streaming = status == 200 and sse.is_stream(content_type)

    def receive_whole(self, content_type: bytes, body: bytes) -> None:
        """Receives a complete answer with status 200 that is no stream."""
        self._connection = None
        self._status = 200
        self._type = content_type
        self._answer_whole(body)

    def receive_body(self, data: bytes) -> None:
        if not self._streaming:
            self._answer.append(data)
            self._answer_bytes += len(data)
            if self._answer_bytes > MAX_ANSWER_BYTES:
                self._abort_oversized(f"answered with more than {MAX_ANSWER_BYTES:,} bytes")
            return
        if self.held:
            data = self.held + data
            self.held = b""
        complete_bytes = sse.measure_complete_events(data)
        if complete_bytes < len(data):
            self.held = data[complete_bytes:]
            data = data[:complete_bytes]
            if len(self.held) > MAX_EVENT_BYTES:
                self._abort_oversized(f"sent an event of more than {MAX_EVENT_BYTES:,} bytes")
                return
        if not data:
            return
        self.last_events = data
        if sse.may_have_usage(data):
            data = sse.read_usage(data, self._usage, drop=not self._asked_usage, adds=self._usage_adds)
            if not data:
                return
        if self._first is None:
            self._renaming = self._route.served_name.find_renaming(data)
        self._send_on(data)

    def flush(self) -> None:
        if self._first is not None:
            self._client.flush_stream()

    def _send_on(self, data: bytes) -> None:
        """Sends events to the client: the first at once, others when all that have arrived with them are read."""
        if self._renaming is not None:
            data = data.replace(*self._renaming)
        sent = self.sent_on
        sent.append(data)
        if len(sent) == upstream.KEPT_CHUNKS and not self._keeps_content:
            self._keep_text()
        if self._first is not None:
            self._client.add_to_stream(data)
            return
        self._first = monotonic()
        self._backend.worked = True
        self._route.end_prefill(self)
        write_chunk = self._client.begin_stream(_STREAM_HEAD + self._limits, data)
        if write_chunk is not None and self._connection is not None and not self._keeps_content:
            self._connection.relay_chunks(self, write_chunk, self._renaming)

    def complete_answer(self) -> None:
        self._connection = None
        if not self._streaming:
            self._answer_whole(self._answer[0] if len(self._answer) == 1 else b"".join(self._answer))
            return
        if self.held.strip():
            # At the end of the stream, an event without its blank line is complete.
            held, self.held = self.held, b""
            self.receive_body(held + b"\n\n")
        backend = self._backend
        if sse.is_complete(self._api, self.last_events) and self._first is not None:
            backend.health.record_success()
            record = self._finish("ok")
            self._client.end_stream()
            self._keep_record(record)
        else:
            self._record_engine_failure(backend, f"{backend.engine} ended the stream before the answer was complete")

    def handle_lost_engine(self, how: str, reused: bool) -> None:
        self._connection = None
        if self.over:
            return
        backend = self._backend
        if reused and not self.tried_again and self._status == 0:
            # The engine may close an idle connection at the moment when we write to it. No part of the answer has
            # arrived, so the request is sent again on a new connection.
            self.tried_again = True
            self._leave_engine()
            self._route.retry(self)
            return
        self._record_engine_failure(backend, f"{backend.engine} stopped before the answer was complete: {how}")

    def handle_absent_engine(self) -> None:
        """Called when the engine has no address any more: it stopped after the request was accepted."""
        if self.over:
            return
        backend = self._backend
        if self._retry_elsewhere(backend):
            return
        if not backend.is_asleep:
            self._fail_stopped(backend)
            return
        self._leave_engine()
        self._forget_answer()
        self.tried = ()
        self._route.wait_for_endpoint(self)

    def _fail_stopped(self, backend: GatewayBackend) -> None:
        """Answers with 503: the engine was stopped, and the client may try again."""
        if backend.state == "ready":  # it has been started again, or is being replaced
            self._fail(f"{backend.engine} was stopped before it answered", "engine_stopped", status=503)
        else:
            self._fail(backend.explain_unavailable(), f"engine_{backend.state}", status=503)

    def _abort_oversized(self, what: str) -> None:
        """Ends an answer that exceeds a limit, so that it cannot fill the memory."""
        backend = self._backend
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pool.abandon(connection)
        self._answer, self.held = [], b""
        self._record_engine_failure(backend, f"{backend.engine} {what}")

    def _record_engine_failure(self, backend: GatewayBackend, message: str) -> None:
        backend.health.record_failure(monotonic())
        if self._retry_elsewhere(backend):
            return
        if backend.has_hung:
            self._fail(f"{backend.explain_unavailable()}: it made no progress", "engine_hung", status=504)
        else:
            self._fail(message, "engine_stopped")

    def _retry_elsewhere(self, backend: GatewayBackend, *, suspected: bool = False) -> bool:
        """Sends the request to another backend, unless the client has already received a part of the answer.

        `suspected`: whether it is the backend's failure or the request's depends on the answer of the other one.
        """
        self.tried = (*self.tried, backend)
        if self._first is not None or not self._route.has_untried_backend(self.tried):
            return False
        if suspected:
            backend.health.record_inconclusive()
            self._suspects = [*(self._suspects or ()), (backend, self._describe_end("failed"))]
        elif backend.on_end is not None:
            backend.on_end(self._describe_end("failed"))
        self._leave_engine()
        self._forget_answer()
        self.tried_again = False
        self._route.retry(self)
        return True

    @property
    def _backend(self) -> GatewayBackend:
        if self._link is None:
            raise RuntimeError("the request has not been sent to an engine")
        return self._link.backend

    @property
    def _engine_api(self) -> sse.Api:
        """The API of the request that the engine got, which is another one if the request was translated."""
        return self._request.head.api or self._api

    def get_usage(self) -> sse.TokenUsage:
        return self._usage

    def _abandon(self) -> None:
        """Cancels the request: closes the engine's connection, or leaves the queue."""
        if self._connection is not None:
            self._connection.pool.abandon(self._connection)
        elif not self._reserving:
            self._route.remove_waiting(self)

    def _leave_engine(self) -> None:
        """Frees the engine's slot, before the request is sent to another one."""
        link, self._link = self._link, None
        if link is not None:
            self._route.release_for_retry(self, link)

    def _describe_end(self, outcome: Outcome) -> FinishedRequest:
        usage, first = self._usage, self._first
        return FinishedRequest(
            outcome="mistaken" if self._by_client else outcome,
            begun=first is not None,
            ttft_s=first - self.sent_at if first is not None else None,
            duration_s=monotonic() - self.sent_at,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            target=self._request.head.target,
            body=self._request.body,
        )

    def _keep_text(self) -> AnswerText:
        """Keeps the text of the chunks sent so far instead of the chunks."""
        if self._text is None:
            self._text = AnswerText()
        self._text.read_events(self._engine_api, b"".join(self.sent_on))
        if not self._keeps_content:
            self._before_last = tuple(self.sent_on[-NUM_LAST:])
            self.sent_on = []
        return self._text

    # the end of the request

    def _answer_whole(self, body: bytes) -> None:
        link = self._link
        if link is None:
            raise RuntimeError("the request has not been sent to an engine")
        backend = link.backend
        backend.worked = True
        outcome: Outcome = "ok"
        if self._status == 503:
            backend.mark_unreachable("it answers with status 503")
            if backend.is_asleep:
                self.handle_absent_engine()
                return
        if self._status >= 500 and (link.removed or backend.state != "ready"):
            # An engine that is being stopped answers its last requests with 500. That is not the request's failure.
            if not self._retry_elsewhere(backend):
                self._fail_stopped(backend)
            return
        if self._status >= 300:
            error = read_engine_error(self._status, body, self._request.head.path, backend.find_mistake)
            error = backend.translate_error(error)
            self._status = error.status
            if self._judge_error(backend, error):
                return
            outcome = "refused" if error.status < 500 else "failed"
            self._reason = error.reason
            body = encode_error(self._api, error.status, error.message, error.kind, error.code, error.param)
            self._type = b"application/json"
        else:
            if backend.health.failures:
                backend.health.record_success()
            if (renaming := self._route.served_name.find_renaming(body)) is not None:
                body = body.replace(*renaming)
            if self._api == "transcriptions":
                body, self._type = format_answer(body, self._asked.response_format, self._usage) or (body, self._type)
            else:
                self._finish_reason = sse.read_body_usage(body, self._usage)
            self.last_events = body
        if self._keeps_content:
            self.sent_on.append(body)
        record = self._finish(outcome)
        self._client.respond(self._status, body, content_type=self._type or b"application/json", extra=self._limits)
        self._keep_record(record)

    def _judge_error(self, backend: GatewayBackend, error: EngineError) -> bool:
        """Decides whose failure an engine's error is; returns whether another engine gets the request."""
        if error.status < 500:
            # A prompt that is too long for this engine alone is not the client's mistake.
            others = (other.context_tokens or 0 for other in self._route.backends)
            is_shorter = (backend.context_tokens or 0) < max(others, default=0)
            self._by_client = error.by_client and not (error.code == "context_length_exceeded" and is_shorter)
            backend.health.record_success()
            return False
        if self._retry_elsewhere(backend, suspected=True):
            return True
        if self._suspects:
            # Every engine answered it with an error, so the request is the cause.
            self._by_client = True
            backend.health.record_inconclusive()
        else:
            backend.health.record_failure(monotonic())
        return False

    def _settle_suspects(self, outcome: Outcome) -> None:
        """Counts the errors of earlier engines as their failures, unless the others refused the request too."""
        suspects, self._suspects = self._suspects, None
        failed = not self._by_client and outcome != "refused"
        for backend, ended in suspects or ():
            if failed:
                backend.health.record_failure(monotonic())
            if backend.on_end is not None:
                backend.on_end(ended if failed else ended._replace(outcome="mistaken"))

    def _fail(self, message: str, code: str, status: int = 502, retry_after_s: int | None = None) -> None:
        self._status = status
        self._reason = code
        if retry_after_s is None:
            retry_after_s = self._link.backend.retry_after_s if self._link is not None else 1
        record = self._finish("failed")
        if self._first is None:
            retry = b"retry-after: %d\r\n" % retry_after_s
            self._client.respond(status, encode_error(self._api, status, message, "server_error", code), extra=retry)
        else:
            self._client.add_to_stream(
                sse.encode_error_event(self._api, message, "server_error", code, self.last_events)
            )
            self._client.end_stream()
        self._keep_record(record)

    def _finish(self, outcome: Outcome) -> RequestEnd:
        """Frees the slot before the client can send its next request. The record is written after the answer."""
        self.over = True
        ended = monotonic()
        link, self._link = self._link, None
        try:
            self._settle(outcome, link, ended)
        except Exception as error:  # a bug in the accounting must not leave the client without its answer
            context = {"message": "internal error while accounting for a request", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        return outcome, link.backend if link is not None else None, ended

    def _settle(self, outcome: Outcome, link: BackendLink | None, ended: float) -> None:
        """Frees the slot, corrects the charges and counts the request."""
        usage, member, meter = self._usage, self.member, self._meter
        used = None
        try:
            if link is None or outcome == "failed" or outcome == "refused":
                used = 0
            elif outcome == "ok" and usage.completion_tokens is not None and not self._usage_adds:
                used = (usage.prompt_tokens or 0) + usage.completion_tokens
            else:
                used = self._settle_usage(outcome)
            if link is not None and link.backend.on_end is not None:
                link.backend.on_end(self._describe_end(outcome))
        finally:
            member.in_flight -= self.sequences
            if self._reserved and member.shared is not None:
                member.shared.release(member.name, self.sequences)
            meter.in_flight -= 1
            if link is not None:
                if outcome == "cancelled":
                    link.backend.health.record_inconclusive()
                self._route.release_slot(self, link, used, ended)
        if used is not None and not self._reserving:
            member.correct_charge(self.cost_tokens, used, usage.completion_tokens, ended, self.sequences)
        counted = sse.TokenUsage() if self._uncounted else usage
        meter.record(self._api, outcome, self._started, self._first, ended, counted, self.sequences)
        own = member.meter
        if own is None:
            own = member.meter = self._gateway.meters.get_tenant_meter(member.name)
        own.record(outcome, counted)
        if self._reason is not None:
            self._gateway.meters.count_reason(self._reason, self._route.model, member.name)
        if self._suspects is not None:
            self._settle_suspects(outcome)

    def _is_counted(self, outcome: Outcome) -> bool:
        """Whether the engine reported the tokens of all sequences."""
        usage = self._usage
        if usage.prompt_tokens is None and usage.completion_tokens is None:
            return False
        if self._usage_adds and usage.reports < self.sequences:
            return False
        # The first event of a stream of the Messages API already reports usage.
        return outcome == "ok" or self._engine_api != "messages" or usage.reports > 1

    def _settle_usage(self, outcome: Outcome) -> int | None:
        """The tokens of the request; `None` while the expected charge remains, since they are not known yet."""
        if outcome == "cancelled" and self._connection is None:
            return 0  # it was never sent
        if not self._is_counted(outcome):
            self._uncounted = self._api in GENERATING or self._api == "embeddings"
            if self._uncounted:
                return None
            self._usage.prompt_tokens = self._demand.prompt_tokens  # an estimate: no tokenizer counts these requests
            return self._usage.prompt_tokens
        usage, choices = self._usage, self._demand.choices
        if self._usage_adds and choices > 1:  # a prompt is processed once for all of its choices
            usage.prompt_tokens = (usage.prompt_tokens or 0) // choices
            usage.cached_tokens = (usage.cached_tokens or 0) // choices
        return (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)

    def _keep_record(self, end: RequestEnd) -> None:
        if self._uncounted:
            self._uncounted = False
            self._gateway.counting.submit(self._build_count_job(end))
            return
        keeper, observer = self._gateway.keeper, self._gateway.seen
        if keeper is None and observer is None:
            return
        row = self._build_record(end)
        words = None
        if self._keeps_content:
            words = RequestContent(self._request.head.target, self._request.body, b"".join(self.sent_on))
        if keeper is not None:
            keeper.add(row)
            if keeper.content is not None and words is not None:
                keeper.add_content(row, words)
        if observer is not None and words is not None:
            try:
                observer(row, words)
            except Exception as error:  # a bug in the observer must not affect the client
                context = {"message": "the observer of requests failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _build_count_job(self, end: RequestEnd) -> CountJob:
        """What the engine did not report: the prompts and the text of the answers, or what is missing of them."""
        outcome, backend, ended = end
        if backend is None:
            raise RuntimeError("the request has not been sent to an engine")
        asked, usage = self._asked, self._usage
        job = CountJob(backend, self._engine_api, lambda prompt, output: self._record_count(end, prompt, output))
        if self._api in ("completions", "embeddings"):
            job.prompts = list_prompts(asked.prompt if self._api == "completions" else asked.input)
        elif usage.prompt_tokens is not None:  # of one prompt, however many of its choices have reported it
            job.prompt_tokens = usage.prompt_tokens // (usage.reports if self._usage_adds else 1)
        else:
            job.body, job.body_text_bytes = self._request.body, asked.get_prompt_text(0)[1]
        if self.last_events and not self._streaming:
            text = AnswerText()
            text.read_body(self.last_events)
            reported = {0} if usage.completion_tokens is not None else set()  # the first choice, and its prompt
            job.texts = [one for index, one in text.texts.items() if index not in reported]
            job.output_tokens = (usage.completion_tokens or 0) + len(text.stopped - reported)
            if job.prompts and usage.prompt_tokens is not None:
                job.prompts[0], job.prompt_tokens = 0, usage.prompt_tokens
        elif self.streams:
            text = self._keep_text()
            texts = text.texts
            job.texts = list(texts.values())
            job.output_tokens = len(text.stopped)
            if outcome == "cancelled":
                traits = backend.requests
                unsent = traits.unsent_tokens if traits is not None else 1
                job.output_tokens += len(texts.keys() - text.finished) * unsent
        elif self._api in GENERATING:
            job.output_tokens = self.sequences * self._estimate_unseen_tokens(ended)
        return job

    def _estimate_unseen_tokens(self, ended: float) -> int:
        """How many tokens of an answer that is not streamed were generated for each sequence until it was aborted."""
        tokens = self._route.estimate_progress(ended - self.sent_at) * self.member.mean_output
        limit = self._max_tokens
        return int(tokens if limit is None else min(tokens, limit))

    def _record_count(self, end: RequestEnd, prompt_tokens: int, output_tokens: int) -> None:
        """Charges and records the tokens that were counted after the end of the request."""
        usage, member, now = self._usage, self.member, monotonic()
        usage.prompt_tokens = prompt_tokens
        usage.completion_tokens = output_tokens if self._api in GENERATING else None
        used = prompt_tokens + output_tokens
        self._route.waiting.correct_charge(self.line, self.cost_tokens, used, self.sequences)
        member.correct_charge(self.cost_tokens, used, usage.completion_tokens, now, self.sequences)
        self._meter.add_tokens(usage)
        self._gateway.meters.get_tenant_meter(member.name).add_tokens(usage)
        self._keep_record(end)

    def _find_finish_reason(self) -> str | None:
        return sse.find_finish_reason(*self._before_last, *self.sent_on[-NUM_LAST:], self.last_events)

    def _build_record(self, end: RequestEnd) -> ServedRequest:
        outcome, backend, ended = end
        engine = backend.engine if backend is not None else None
        usage, asked, started = self._usage, self._asked, self._started
        text, text_bytes = asked.get_prompt_text(PREFIX_BYTES)
        return ServedRequest(
            at_s=time() - (monotonic() - started),
            tenant=self.member.name,
            model=self._route.model,
            engine=engine,
            api=self._api,
            stream=bool(asked.stream),
            outcome=outcome,
            status=self._status,
            body_bytes=self.num_bytes,
            max_tokens=self._max_tokens,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            wait_ms=1000 * (self.sent_at - started) if engine is not None else None,
            ttft_ms=1000 * (self._first - started) if self._first is not None else None,
            duration_ms=1000 * (ended - started),
            finish=(self._finish_reason or self._find_finish_reason()) if outcome == "ok" else None,
            prefix_hashes=hash_prefixes(text, self._gateway.tenants.salt),
            text_bytes=text_bytes,
            reason=self._reason,
            features=self.features,
        )
