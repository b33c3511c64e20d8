"""The HTTP endpoints: OpenAI's, and those that bedplate uses (health, metrics, tokens)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .backend import UNLIMITED_TOKENS, Backend, Refused, Request, Text
from .shapes import ChatShape, Fields, Shape, TextShape
from .worker import Answer, Delta, TokenLogprob, Worker

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_TOP_LOGPROBS = 20
MAX_INPUTS = 2048
"""Maximum number of texts in one embeddings request, as in OpenAI's API."""
LONG_TEXT = 16384
"""Text length in characters from which tokenization runs in a thread, to not block the event loop."""
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def json_response(what: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode_json(what), status, headers, "application/json")


def error_response(error: Refused) -> Response:
    headers = {}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # otherwise the rest of the body is still read
    return json_response(error.body(), error.status, headers)


def _encode_json(what: Any) -> bytes:
    return json.dumps(what, ensure_ascii=False).encode("utf-8", "replace")


def _event(what: dict[str, Any]) -> bytes:
    return b"data: " + _encode_json(what) + b"\n\n"


async def read_object(request: HttpRequest) -> dict[str, Any]:
    """The JSON object in a request's body."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:  # chunked transfer has no Content-Length
            raise _too_long()
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused("the body must be a JSON object")
    return found


def _too_long() -> Refused:
    return Refused(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)


async def wait_unless_gone(request: HttpRequest, what: Awaitable[Any]) -> Any:
    """Wait for an awaitable, or until the client closes its connection."""
    task = asyncio.ensure_future(what)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _wait_until_gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. `end` is called whenever the response ends, even before its first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class Endpoints:
    """The ASGI application: endpoints over one worker."""

    def __init__(self, backend: Backend, worker: Worker, name: str, key: str | None) -> None:
        self.backend = backend
        self.worker = worker
        self.name = name
        self.key = key
        self.made_at = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self._with_key(self.models)),
                Route("/v1/models/{name:path}", self._with_key(self.model)),
                *(
                    Route(path, self._with_key(endpoint), methods=["POST"])
                    for path, endpoint in (
                        ("/v1/chat/completions", self.chat),
                        ("/v1/completions", self.complete),
                        ("/v1/embeddings", self.embeddings),
                        ("/classify", self.classify),
                        ("/tokenize", self.tokenize),
                        ("/detokenize", self.detokenize),
                    )
                ),
            ],
            exception_handlers={
                Refused: _answer_refused,
                HTTPException: _answer_unknown,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_failed,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The HTTP parser has already validated the number.
        if int(Headers(scope=scope).get("content-length", "0")) > MAX_BODY_BYTES:
            await error_response(_too_long())(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        await self.app(scope, receive, send)

    def _with_key(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: HttpRequest) -> Response:
            if not self._has_key(request):
                raise Refused("missing or wrong API key", status=401, code="invalid_api_key")
            return await endpoint(request)

        return checked

    def _has_key(self, request: HttpRequest) -> bool:
        if self.key is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self.key.encode())

    def _need(self, task: str, path: str) -> None:
        if self.worker.failed:
            raise Refused("the engine failed and is being restarted", status=500)
        if not self.worker.ready:
            done = round(100 * self.worker.loaded)
            raise Refused(f"the model is loading: {done} %", status=503, code="model_loading")
        if task not in self.backend.tasks:
            supported = " or ".join(sorted(self.backend.tasks))
            raise Refused(f"{path} does not support this model, whose task is {supported}", "model")

    async def health(self, _: HttpRequest) -> Response:
        if self.worker.failed:
            return json_response({"status": "failed"}, 500)
        if not self.worker.ready:
            return json_response({"status": "loading", "progress": round(self.worker.loaded, 3)}, 503)
        return json_response({"status": "ok"})

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.made_at, "owned_by": self.backend.engine}
        return {**card, "max_model_len": self.backend.context_tokens}

    async def models(self, _: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.name:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return json_response(self._card())

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def metrics_text(self) -> str:
        worker = self.worker
        rows: list[tuple[str, str, str, float]] = [
            ("requests_running", "gauge", "", worker.running),
            ("requests_waiting", "gauge", "", worker.waiting),
            ("slots", "gauge", "", self.backend.slots),
            ("prompt_tokens_total", "counter", "", worker.prompt_tokens),
            ("generation_tokens_total", "counter", "", worker.completion_tokens),
        ]
        rows += [("requests_total", "counter", f'{{outcome="{name}"}}', n) for name, n in worker.outcomes.items()]
        if worker.kv_use is not None:
            rows.append(("kv_use_ratio", "gauge", "", worker.kv_use))
        lines, seen = [], set()
        for name, kind, label, value in rows:
            if name not in seen:
                lines.append(f"# TYPE bedplate_engine_{name} {kind}")
                seen.add(name)
            lines.append(f"bedplate_engine_{name}{label} {value:g}")
        return "\n".join(lines) + "\n"

    async def chat(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need("generate", request.scope["path"])
        fields = Fields(body)
        messages = fields.messages()
        if body.get("tools") and body.get("tool_choice") != "none":
            raise Refused(f"{self.backend.engine} does not support tools", "tools")
        more = body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise Refused("chat_template_kwargs must be an object", "chat_template_kwargs")
        text = self._text().chat(messages, None, more)
        # The template already contains the special tokens.
        tokens = await self._encode(text, special=False)
        logprobs = self._logprobs_of_chat(fields)
        asked = self._request(fields, tokens, text, logprobs, messages=messages)
        return await self._generate(request, asked, ChatShape(self.name), fields)

    async def complete(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need("generate", request.scope["path"])
        fields = Fields(body)
        for name in ("suffix", "echo"):
            if body.get(name):
                raise Refused(f"{self.backend.engine} does not support {name}", name)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        tokens = await self._input_tokens(prompt, "prompt")
        text = prompt if isinstance(prompt, str) else self._text().decode(tokens)
        logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        asked = self._request(fields, tokens, text, logprobs)
        return await self._generate(request, asked, TextShape(self.name), fields)

    async def _input_tokens(self, value: Any, name: str) -> list[int]:
        if isinstance(value, str):
            return await self._encode(value, special=True)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        ):
            return value
        raise Refused(f"{name} must be a text or a list of token ids", name)

    def _logprobs_of_chat(self, fields: Fields) -> int | None:
        top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if not fields.flag("logprobs"):
            if top:
                raise Refused("top_logprobs requires logprobs: true", "top_logprobs")
            return None
        return top or 0

    def _request(
        self,
        fields: Fields,
        tokens: list[int],
        text: str,
        logprobs: int | None,
        messages: list[dict[str, Any]] | None = None,
    ) -> Request:
        body = fields.body
        if logprobs is not None and not self.backend.logprobs:
            raise Refused(f"{self.backend.engine} does not support logprobs", "logprobs")
        if (fields.integer("n", 1) or 1) > 1 or (fields.integer("best_of", 1) or 1) > 1:
            raise Refused("n and best_of must be 1: send one request per answer", "n")
        if body.get("logit_bias"):
            raise Refused(f"{self.backend.engine} does not support logit_bias", "logit_bias")
        if not tokens:
            raise Refused("the prompt is empty", "prompt")
        limits = [
            limit for name in ("max_completion_tokens", "max_tokens") if (limit := fields.integer(name, 1)) is not None
        ]
        context = self.backend.context_tokens
        if context is not None:
            available = context - len(tokens)
            if available < 1:
                message = f"the prompt has {len(tokens)} tokens, and the context length is {context} tokens"
                raise Refused(message, "messages" if messages else "prompt", code="context_length_exceeded")
            limits.append(available)
        elif not limits:
            limits.append(UNLIMITED_TOKENS)
        return Request(
            prompt=tokens,
            text=text,
            messages=messages,
            max_tokens=min(limits),
            temperature=fields.number("temperature", 1.0, 0, 100),
            top_p=fields.number("top_p", 1.0, 0, 1),
            top_k=fields.integer("top_k", -1),
            min_p=fields.maybe_number("min_p", 0, 1),
            presence_penalty=fields.number("presence_penalty", 0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
            repetition_penalty=fields.maybe_number("repetition_penalty", 0.01, 100),
            seed=fields.integer("seed", -(1 << 63)),
            stop=fields.stops(),
            logprobs=logprobs,
            schema=self._schema(body.get("response_format")),
            ignore_eos=fields.flag("ignore_eos"),
        )

    def _schema(self, form: Any) -> str | None:
        kind = form.get("type") if isinstance(form, dict) else form
        if kind in (None, "text"):
            return None
        if kind not in ("json_object", "json_schema"):
            raise Refused("response_format.type must be text, json_object or json_schema", "response_format")
        if kind not in self.backend.structured:
            raise Refused(f"{self.backend.engine} does not support response_format {kind}", "response_format")
        if kind == "json_object":
            return '{"type": "object"}'
        schema = (form.get("json_schema") or {}).get("schema") if isinstance(form.get("json_schema"), dict) else None
        if not isinstance(schema, dict):
            raise Refused("response_format.json_schema.schema must be an object", "response_format")
        return json.dumps(schema)

    def _text(self) -> Text:
        if self.backend.text is None:
            raise Refused("this model has no tokenizer", status=500)
        return self.backend.text

    async def _encode(self, text: str, special: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._text().encode(text, special)
        return await asyncio.to_thread(self._text().encode, text, special)

    async def _generate(self, request: HttpRequest, asked: Request, shape: Shape, fields: Fields) -> Response:
        streams = fields.flag("stream")
        options = fields.body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        answer = Answer(asked, self.backend.text, deltas.put_nowait)

        def end() -> None:
            if not answer.done:
                self.worker.cancel(answer)

        self.worker.submit(answer)
        try:
            if not streams:
                return json_response(await wait_unless_gone(request, self._collect(answer, deltas, shape)))
            # A request that the engine rejects at once is answered with an error status instead of a stream.
            first = await wait_unless_gone(request, deltas.get())
            if first.error is not None:
                raise first.error
        except BaseException:
            end()
            raise
        return EventStream(self._events(first, answer, deltas, shape, with_usage), end)

    async def _collect(self, answer: Answer, deltas: asyncio.Queue[Delta], shape: Shape) -> dict[str, Any]:
        text: list[str] = []
        logprobs: list[TokenLogprob] = []
        finish = None
        while finish is None:
            delta = await deltas.get()
            if delta.error is not None:
                raise delta.error
            text.append(delta.text)
            logprobs += delta.logprobs
            finish = delta.finish
        requested = logprobs if answer.request.logprobs is not None else None
        return shape.whole("".join(text), finish, answer.usage(), requested)

    async def _events(
        self, delta: Delta, answer: Answer, deltas: asyncio.Queue[Delta], shape: Shape, with_usage: bool
    ) -> AsyncIterator[bytes]:
        for chunk in shape.opening():
            yield _event(chunk)
        while delta.error is None:
            requested = list(delta.logprobs) if answer.request.logprobs is not None else None
            for chunk in shape.chunks(delta.text, delta.finish, requested):
                yield _event(chunk)
            if delta.finish is not None:
                if with_usage:
                    yield _event(shape.usage(answer.usage()))
                break
            delta = await deltas.get()
        else:
            yield _event(delta.error.body())
        yield b"data: [DONE]\n\n"

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need("embed", request.scope["path"])
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Refused("encoding_format must be float or base64", "encoding_format")
        inputs = await self._inputs(body)
        vectors = await wait_unless_gone(request, self.worker.call(lambda: self.backend.embed(inputs)))
        if body.get("dimensions") is not None:
            vectors = [self._shortened(vector, Fields(body)) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if form == "base64" else vector}
            for index, vector in enumerate(vectors)
        ]
        return json_response({"object": "list", "data": data, "model": self.name, "usage": self._read(inputs)})

    def _shortened(self, vector: list[float], fields: Fields) -> list[float]:
        requested = fields.integer("dimensions", 1, len(vector))
        if requested != len(vector):
            raise Refused(f"the embeddings of this model have {len(vector)} dimensions", "dimensions")
        return vector

    async def classify(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need("classify", request.scope["path"])
        inputs = await self._inputs(body)
        rows = await wait_unless_gone(request, self.worker.call(lambda: self.backend.classify(inputs)))
        data = []
        for index, probabilities in enumerate(rows):
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            label = self.backend.labels[best] if best < len(self.backend.labels) else str(best)
            data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
        return json_response({"object": "list", "data": data, "model": self.name, "usage": self._read(inputs)})

    def _read(self, inputs: list[list[int]]) -> dict[str, int]:
        read = sum(map(len, inputs))
        self.worker.prompt_tokens += read
        self.worker.outcomes["ok"] += 1
        return {"prompt_tokens": read, "total_tokens": read}

    async def _inputs(self, body: dict[str, Any]) -> list[list[int]]:
        value = body.get("input")
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
            value = [value]
        if not isinstance(value, list) or not value:
            raise Refused("input must be a text or a non-empty list of texts", "input")
        if len(value) > MAX_INPUTS:
            raise Refused(f"input may contain at most {MAX_INPUTS} texts", "input")
        inputs = [await self._input_tokens(one, "input") for one in value]
        for place, tokens in enumerate(inputs):
            if self.backend.context_tokens is not None and len(tokens) > self.backend.context_tokens:
                message = f"input[{place}] has {len(tokens)} tokens; the maximum is {self.backend.context_tokens}"
                raise Refused(message, "input", code="context_length_exceeded")
        return inputs

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need(next(iter(self.backend.tasks)), request.scope["path"])
        if "messages" in body:
            special = False
            text: Any = self._text().chat(Fields(body).messages(), None, {})
        else:
            text = body.get("content", body.get("prompt"))
            special = Fields(body).flag("add_special") or Fields(body).flag("add_special_tokens")
        if not isinstance(text, str):
            raise Refused("content or prompt must be a text", "content")
        tokens = await self._encode(text, special)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.backend.context_tokens})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._need(next(iter(self.backend.tasks)), request.scope["path"])
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in tokens):
            raise Refused("tokens must be a list of token ids", "tokens")
        text = self._text().decode(tokens)
        return json_response({"content": text, "prompt": text})


async def _answer_refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101
    return error_response(error)


async def _answer_unknown(request: HttpRequest, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)  # noqa: S101
    path = request.scope["path"]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(Refused(f"unknown path {path}", status=404, code="not_found"))
    methods = sorted({*(error.headers or {}).get("Allow", "").split(", ")} - {"HEAD"})
    message = f"{path} supports {' or '.join(methods)}, not {request.method}"
    return error_response(Refused(message, status=error.status_code))


async def _answer_nobody(_: HttpRequest, __: Exception) -> Response:
    """The client has closed its connection: the server discards this response."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _answer_failed(_: HttpRequest, error: Exception) -> Response:
    """Respond to an internal error, whose traceback the server logs."""
    return error_response(Refused(f"the server failed: {type(error).__name__}", status=500))


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
