"""Translates one request: its exchange sees a client of OpenAI's API, its client sees the API that it called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, cast

from bedplate.run.gateway import sse
from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.errors import encode_error
from bedplate.run.gateway.heads import ClientRequest, RequestHead
from bedplate.run.gateway.request_checks import RequestMistake, check_request
from bedplate.run.gateway.translate.messages import CountTranslation, MessagesTranslation
from bedplate.run.gateway.translate.ollama import (
    EmbedTranslation,
    GenerateTranslation,
    OldEmbedTranslation,
    OllamaTranslation,
)
from bedplate.run.gateway.translate.ollama_pages import find_name
from bedplate.run.gateway.translate.responses import ResponsesTranslation

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.exchange import GatewayExchange
    from bedplate.run.gateway.pages import PendingPage
    from bedplate.run.gateway.routes import Route
    from bedplate.run.gateway.tenants import TenantState

_CHAT = b"/v1/chat/completions"
_STREAM_TYPE = b"text/event-stream; charset=utf-8"


class Translation(Protocol):
    """One request of another API, and its answer."""

    content_type: bytes
    """Of a stream."""

    def restart(self) -> None: ...

    def to_chat(self, body: bytes) -> bytes:
        """Raises `RequestMistake` for what has no counterpart."""

    def write_whole(self, body: bytes, usage: sse.TokenUsage) -> bytes: ...

    def write_stream(self, data: bytes) -> bytes: ...

    def write_end(self, usage: sse.TokenUsage) -> bytes: ...

    def write_error(self, status: int, body: bytes) -> bytes: ...


_TRANSLATIONS: dict[bytes, Callable[[], Translation]] = {
    b"/v1/messages": MessagesTranslation,
    b"/v1/messages/count_tokens": CountTranslation,
    b"/v1/responses": ResponsesTranslation,
    b"/api/chat": OllamaTranslation,
    b"/api/generate": GenerateTranslation,
    b"/api/embed": EmbedTranslation,
    b"/api/embeddings": OldEmbedTranslation,
}
NATIVE: dict[bytes, Literal["messages", "responses"]] = {
    b"/v1/messages": "messages",
    b"/v1/messages/count_tokens": "messages",
    b"/v1/responses": "responses",
}
"""The API that an engine must have for requests to pass as they are."""


def answer_translated(connection: ClientConnection, request: ClientRequest) -> None:
    """Answers a request of another API than OpenAI's chat completions."""
    given = request.head
    api = sse.TRANSLATED[given.path]
    head = TranslatedHead(
        given.method, given.path, given.path, api, given.headers, given.keep_alive, given.chunked, given.cors
    )
    client = TranslatedConnection(connection, head, _TRANSLATIONS[given.path](), request)
    try:
        client.answer()
    except Exception as error:  # a bug must not leave the client without an answer
        context = {"message": "internal error while translating a request", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        message = "internal error in bedplate while translating this request"
        client.respond(500, encode_error(api, 500, message, "server_error", "internal_error"))


def has_api(backend: GatewayBackend, path: bytes) -> bool:
    """Whether requests to this path pass as they are. An engine of which nothing is known gets them."""
    api = NATIVE.get(path)
    if api is None:
        return False
    return api not in backend.lacking_apis if backend.requests is None else api in backend.requests.apis


class TranslatedHead(RequestHead):
    """The head of a request that is translated when it is known which engine gets it."""

    client: TranslatedConnection | None = None

    def format_request(self, backend: GatewayBackend, body: bytes) -> bytes:
        self._engine_head = None  # another engine may get another target
        if self.client is not None:
            body = self.client.prepare_for(backend, body)
        return super().format_request(backend, body)


class TranslatedConnection(ClientConnection):
    """The client's connection for one request. It accepts the request, and translates what its exchange answers."""

    __slots__ = ("_api", "_exchange", "_head", "_is_translated", "_ready", "_request", "_stream_head", "_translation",
                 "_wrapped")  # fmt: skip

    def __init__(
        self, wrapped: ClientConnection, head: TranslatedHead, translation: Translation, request: ClientRequest
    ) -> None:
        self._gateway = wrapped._gateway
        self._wrapped = wrapped
        self._head = head
        head.client = self
        self._api = cast("sse.Api", head.api)
        self._translation = translation
        self._request = ClientRequest(head, request.body, request.member)
        self._ready: tuple[bytes, bytes] | None = None
        """A body and its translation."""
        self._is_translated = False
        self._exchange: GatewayExchange | None = None
        self._stream_head = b""
        """The head of a stream whose first event has not been written."""

    def answer(self) -> None:
        if isinstance(self._translation, OllamaTranslation):
            self._answer_ollama(self._translation)
            return
        if (mistake := self._find_mistake()) is not None:
            self._reject_mistake(mistake)
            return
        self._answer(self._request, from_loop=True)

    def _answer_ollama(self, translation: OllamaTranslation) -> None:
        """No engine has this API, except Ollama, which has OpenAI's as well: the request becomes one of OpenAI's."""
        request, head = self._request, self._head
        try:
            request.body = self._translate(request.body)
        except RequestMistake as mistake:
            self._reject_mistake(mistake)
            return
        name = translation.name
        if (route := self._find_route(find_name(name))) is not None and self._find_route(name) is None:
            request.body = sse.set_model(request.body, route.model)
        if self._api == "chat" and not translation.has_prompt and route is not None:
            self.respond(200, translation.write_loaded())
            return
        head.target, head.client, self._is_translated = translation.target, None, True
        self._answer(request, from_loop=True)

    @property
    def _tenant(self) -> TenantState:
        return self._request.member or self._gateway.tenants.default

    def _find_route(self, model: str | None) -> Route | None:
        """The route of a model that this tenant may use: others must look as if they did not exist."""
        route = self._gateway.find_route(model)
        return route if route is not None and route.may_be_used_by(self._tenant) else None

    def _reject_mistake(self, mistake: RequestMistake) -> None:
        member, size = self._tenant, len(self._request.body)
        self._gateway.record_rejection(None, member, self._api, None, size, 400, mistake.code, "refused")
        kind = "invalid_request_error"
        self.respond(400, encode_error(self._api, 400, mistake.message, kind, mistake.code, mistake.param))

    def _find_mistake(self) -> RequestMistake | None:
        """What cannot be translated, if an engine of the model may need it. Other mistakes are found later."""
        try:
            asked = sse.read_request_fields(self._request.body)
            route = self._find_route(asked.model)
            check_request(sse.CHECKED_AS.get(self._head.path, self._api), asked, None)
        except (*sse.UNREADABLE, RequestMistake):
            return None
        if route is None or all(has_api(backend, self._head.path) for backend in route.backends):
            return None
        try:
            self._translate(self._request.body)
        except RequestMistake as mistake:
            return mistake
        return None

    def _translate(self, body: bytes) -> bytes:
        if self._ready is None or self._ready[0] is not body:
            try:
                self._ready = body, self._translation.to_chat(body)
            except sse.UNREADABLE as error:
                raise RequestMistake(f"the request body is not valid: {error}", "bad_body") from None
        return self._ready[1]

    def prepare_for(self, backend: GatewayBackend, body: bytes) -> bytes:
        """The body as this engine gets it."""
        head, path = self._head, self._head.path
        head.target, head.api, self._request.body, self._is_translated = path, self._api, body, False
        if has_api(backend, path):
            return body
        self._translation.restart()
        try:
            body = self._translate(body)
        except RequestMistake:  # it was accepted for an engine that has the API; this one answers with an error
            return body
        counter = backend.requests.counter if backend.requests is not None and self._api == "other" else None
        counts = counter.prompts.get("chat") if counter is not None else None
        head.target = counts.encode() if counts is not None else _CHAT
        head.api, self._request.body, self._is_translated = "chat", body, True
        return body

    # accepting the request: as the wrapped connection does

    @property
    def _current(self) -> GatewayExchange | PendingPage | None:
        return self._wrapped._current

    @_current.setter
    def _current(self, exchange: GatewayExchange | PendingPage | None) -> None:
        self._wrapped._current = exchange
        self._exchange = cast("GatewayExchange | None", exchange)

    # called by the exchange

    @property
    def _usage(self) -> sse.TokenUsage:
        return self._exchange.get_usage() if self._exchange is not None else sse.TokenUsage()

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
        to_head: bool = False,
    ) -> None:
        if status >= 400:
            body = self._translation.write_error(status, body)
        elif self._is_translated:
            content_type = b"application/json"
            try:
                body = self._translation.write_whole(body, self._usage)
            except sse.UNREADABLE as error:
                message = f"the engine's answer does not have the format of its API: {error}"
                status, body = 502, encode_error(self._api, 502, message, "server_error", "bad_answer")
                body = self._translation.write_error(status, body)
        self._wrapped.respond(status, body, content_type=content_type, extra=extra)

    def begin_stream(self, head: bytes, data: bytes) -> Callable[[bytes], None] | None:
        if not self._is_translated:
            return self._wrapped.begin_stream(head, data)
        self._stream_head = head.replace(_STREAM_TYPE, self._translation.content_type)
        self.add_to_stream(data)
        return None

    def add_to_stream(self, data: bytes) -> None:
        self._add(self._translation.write_stream(data) if self._is_translated else data)

    def _add(self, data: bytes) -> None:
        if not data:  # an empty chunk would end the stream
            return
        if self._stream_head:
            head, self._stream_head = self._stream_head, b""
            self._wrapped.begin_stream(head, data)
        else:
            self._wrapped.add_to_stream(data)

    def flush_stream(self) -> None:
        self._wrapped.flush_stream()

    def end_stream(self) -> None:
        if self._is_translated:
            self._add(self._translation.write_end(self._usage))
        self._wrapped.end_stream()
