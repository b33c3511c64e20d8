"""The HTTP endpoints: OpenAI's, and those that bedplate uses (health, metrics, tokens)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Any

from h11 import LocalProtocolError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .backend import UNLIMITED_TOKENS, BackendError, EngineBackend, GenerationRequest, Text
from .shapes import BodyFields, ChatFormat, CompletionFormat, ResponseFormat
from .tools import decode_arguments, read_tools
from .worker import AnswerStream, Delta, EngineWorker, TokenLogprob

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_TOP_LOGPROBS = 20
MAX_TOP_K = (1 << 31) - 1
"""Engines have integers of 32 bits."""
MAX_INPUTS = 2048
"""Maximum number of texts in one embeddings request, as in OpenAI's API."""
LONG_TEXT = 16384
"""Text length in characters from which tokenization runs in a thread, to not block the event loop."""


def make_json_response(what: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode_json(what), status, headers, "application/json")


def make_error_response(error: BackendError) -> Response:
    headers = {}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        headers["Connection"] = "close"  # otherwise the rest of the body is still read
    return make_json_response(error.to_body(), error.status, headers)


def _encode_json(what: Any) -> bytes:
    return json.dumps(what, ensure_ascii=False).encode("utf-8", "replace")


def _encode_event(what: dict[str, Any]) -> bytes:
    return b"data: " + _encode_json(what) + b"\n\n"


async def read_object(request: HttpRequest) -> dict[str, Any]:
    """The JSON object in a request's body."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:  # chunked transfer has no Content-Length
            raise _make_too_long_error()
    try:
        found = json.loads(body)
        if b"\\u" in body:  # half of a surrogate pair is not text, and tokenizers fail on it
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BackendError("the body contains half of a surrogate pair, which is not text") from error
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BackendError("the body must be a JSON object")
    return found


def _make_too_long_error() -> BackendError:
    return BackendError(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)


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

    def __init__(
        self,
        backend: EngineBackend,
        worker: EngineWorker,
        name: str,
        key: str | None,
        open_paths: Collection[str] = (),
    ) -> None:
        self.backend = backend
        self.worker = worker
        self.name = name
        self.key = key
        self.open_paths = open_paths
        """Paths that need no key."""
        self.made_at = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                *(
                    Route(path, endpoint, methods=["POST"])
                    for path, endpoint in (
                        ("/v1/chat/completions", self.chat),
                        ("/v1/completions", self.complete),
                        ("/v1/embeddings", self.embeddings),
                        ("/classify", self.classify),
                        ("/v1/rerank", self.rerank),
                        ("/score", self.score),
                        ("/tokenize", self.tokenize),
                        ("/detokenize", self.detokenize),
                    )
                ),
            ],
            exception_handlers={
                BackendError: _answer_refused,
                HTTPException: _answer_unknown,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_failed,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scope["path"] = scope["path"].rstrip("/") or "/"
        refusal = None
        if scope["path"] not in self.open_paths and not self._has_key(headers):
            refusal = BackendError("missing or wrong API key", status=401, code="invalid_api_key")
        elif int(headers.get("content-length", "0")) > MAX_BODY_BYTES:  # the HTTP parser has validated the number
            refusal = _make_too_long_error()
        try:
            await (self.app if refusal is None else make_error_response(refusal))(scope, receive, send)
        except LocalProtocolError:
            # The body was not HTTP after all. The server has answered with 400 and takes no second response.
            return

    def _has_key(self, headers: Headers) -> bool:
        if self.key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self.key.encode())

    def _check_task(self, task: str, path: str) -> None:
        if self.worker.failed:
            raise BackendError("the engine failed and is being restarted", status=500)
        if not self.worker.ready:
            done = round(100 * self.worker.loaded)
            raise BackendError(f"the model is loading: {done} %", status=503, code="model_loading")
        if task not in self.backend.tasks:
            supported = " or ".join(sorted(self.backend.tasks))
            raise BackendError(f"{path} does not support this model, whose task is {supported}", "model")

    async def health(self, _: HttpRequest) -> Response:
        if self.worker.failed:
            return make_json_response({"status": "failed"}, 500)
        if not self.worker.ready:
            return make_json_response({"status": "loading", "progress": round(self.worker.loaded, 3)}, 503)
        return make_json_response({"status": "ok"})

    def _make_model_entry(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.made_at, "owned_by": self.backend.engine}
        return {**card, "max_model_len": self.backend.context_tokens}

    async def models(self, _: HttpRequest) -> Response:
        return make_json_response({"object": "list", "data": [self._make_model_entry()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.name:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return make_json_response(self._make_model_entry())

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.write_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def write_metrics(self) -> str:
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
        self._check_task("generate", request.scope["path"])
        fields = BodyFields(body)
        messages = decode_arguments(fields.read_messages())
        tools = read_tools(body, self._get_text().tool_format, can_force="json_schema" in self.backend.structured)
        more = body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise BackendError("chat_template_kwargs must be an object", "chat_template_kwargs")
        text = self._get_text().chat(messages, tools.tools if tools else None, more)
        text += tools.opening if tools else ""
        # The template already contains the special tokens.
        tokens = await self._encode(text, special=False)
        logprobs = self._read_chat_logprobs(fields)
        schema = tools.make_schema() if tools else None
        asked = self._make_request(fields, tokens, text, logprobs, messages=messages, schema=schema)
        return await self._generate(
            request, asked, ChatFormat(self.name, tools.make_parser() if tools else None), fields
        )

    async def complete(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._check_task("generate", request.scope["path"])
        fields = BodyFields(body)
        for name in ("suffix", "echo"):
            if body.get(name):
                raise BackendError(f"{self.backend.engine} does not support {name}", name)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        tokens = await self._read_tokens(prompt, "prompt")
        text = prompt if isinstance(prompt, str) else self._get_text().decode(tokens)
        logprobs = fields.read_integer("logprobs", 0, MAX_TOP_LOGPROBS)
        asked = self._make_request(fields, tokens, text, logprobs)
        return await self._generate(request, asked, CompletionFormat(self.name), fields)

    async def _read_tokens(self, value: Any, name: str) -> list[int]:
        if isinstance(value, str):
            return await self._encode(value, special=True)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        ):
            if not 0 <= min(value) <= max(value) <= self._get_text().max_token:
                raise BackendError(f"{name} contains a token id that is not in the vocabulary", name)
            return value
        raise BackendError(f"{name} must be a text or a list of token ids", name)

    def _read_chat_logprobs(self, fields: BodyFields) -> int | None:
        top = fields.read_integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if not fields.read_flag("logprobs"):
            if top:
                raise BackendError("top_logprobs requires logprobs: true", "top_logprobs")
            return None
        return top or 0

    def _make_request(
        self,
        fields: BodyFields,
        tokens: list[int],
        text: str,
        logprobs: int | None,
        messages: list[dict[str, Any]] | None = None,
        schema: str | None = None,
    ) -> GenerationRequest:
        body = fields.body
        if logprobs is not None and not self.backend.logprobs:
            raise BackendError(f"{self.backend.engine} does not support logprobs", "logprobs")
        if (fields.read_integer("n", 1) or 1) > 1 or (fields.read_integer("best_of", 1) or 1) > 1:
            raise BackendError("n and best_of must be 1: send one request per answer", "n")
        if body.get("logit_bias"):
            raise BackendError(f"{self.backend.engine} does not support logit_bias", "logit_bias")
        if not tokens:
            raise BackendError("the prompt is empty", "prompt")
        limits = [
            limit
            for name in ("max_completion_tokens", "max_tokens")
            if (limit := fields.read_integer(name, 1)) is not None
        ]
        context = self.backend.context_tokens
        if context is not None:
            available = context - len(tokens)
            if available < 1:
                message = f"the prompt has {len(tokens)} tokens, and the context length is {context} tokens"
                raise BackendError(message, "messages" if messages else "prompt", code="context_length_exceeded")
            limits.append(available)
        elif not limits:
            limits.append(UNLIMITED_TOKENS)
        return GenerationRequest(
            prompt=tokens,
            text=text,
            messages=messages,
            max_tokens=min(limits),
            temperature=fields.read_number("temperature", 1.0, 0, 100),
            top_p=fields.read_number("top_p", 1.0, 0, 1),
            top_k=self._read_top_k(fields),
            min_p=fields.read_optional_number("min_p", 0, 1),
            presence_penalty=fields.read_number("presence_penalty", 0, -2, 2),
            frequency_penalty=fields.read_number("frequency_penalty", 0, -2, 2),
            repetition_penalty=fields.read_optional_number("repetition_penalty", 0.01, 100),
            seed=fields.read_integer("seed", -(1 << 63)),
            stop=fields.read_stops(),
            logprobs=logprobs,
            schema=schema or self._read_schema(body.get("response_format")),
            ignore_eos=fields.read_flag("ignore_eos"),
        )

    def _read_top_k(self, fields: BodyFields) -> int | None:
        """At most the size of the vocabulary: a larger number means the same."""
        top_k = fields.read_integer("top_k", -1)
        return top_k if top_k is None else min(top_k, self._get_text().max_token + 1, MAX_TOP_K)

    def _read_schema(self, form: Any) -> str | None:
        kind = form.get("type") if isinstance(form, dict) else form
        if kind in (None, "text"):
            return None
        if kind not in ("json_object", "json_schema"):
            raise BackendError("response_format.type must be text, json_object or json_schema", "response_format")
        if kind not in self.backend.structured:
            raise BackendError(f"{self.backend.engine} does not support response_format {kind}", "response_format")
        if kind == "json_object":
            return '{"type": "object"}'
        schema = (form.get("json_schema") or {}).get("schema") if isinstance(form.get("json_schema"), dict) else None
        if not isinstance(schema, dict):
            raise BackendError("response_format.json_schema.schema must be an object", "response_format")
        return json.dumps(schema)

    def _get_text(self) -> Text:
        if self.backend.text is None:
            raise BackendError("this model has no tokenizer", status=500)
        return self.backend.text

    async def _encode(self, text: str, special: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._get_text().encode(text, special)
        return await asyncio.to_thread(self._get_text().encode, text, special)

    async def _generate(
        self, request: HttpRequest, asked: GenerationRequest, shape: ResponseFormat, fields: BodyFields
    ) -> Response:
        streams = fields.read_flag("stream")
        options = fields.body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        answer = AnswerStream(asked, self.backend.text, deltas.put_nowait)

        def end() -> None:
            if not answer.done:
                self.worker.cancel(answer)

        self.worker.submit(answer)
        try:
            if not streams:
                return make_json_response(await wait_unless_gone(request, self._collect(answer, deltas, shape)))
            # A request that the engine rejects at once is answered with an error status instead of a stream.
            first = await wait_unless_gone(request, deltas.get())
            if first.error is not None:
                raise first.error
        except BaseException:
            end()
            raise
        return EventStream(self._encode_events(first, answer, deltas, shape, with_usage), end)

    async def _collect(
        self, answer: AnswerStream, deltas: asyncio.Queue[Delta], shape: ResponseFormat
    ) -> dict[str, Any]:
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
        return shape.make_response("".join(text), finish, answer.count_usage(), requested)

    async def _encode_events(
        self, delta: Delta, answer: AnswerStream, deltas: asyncio.Queue[Delta], shape: ResponseFormat, with_usage: bool
    ) -> AsyncIterator[bytes]:
        for chunk in shape.make_opening():
            yield _encode_event(chunk)
        while delta.error is None:
            requested = list(delta.logprobs) if answer.request.logprobs is not None else None
            for chunk in shape.make_chunks(delta.text, delta.finish, requested):
                yield _encode_event(chunk)
            if delta.finish is not None:
                if with_usage:
                    yield _encode_event(shape.make_usage_chunk(answer.count_usage()))
                break
            delta = await deltas.get()
        else:
            yield _encode_event(delta.error.to_body())
        yield b"data: [DONE]\n\n"

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._check_task("embed", request.scope["path"])
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise BackendError("encoding_format must be float or base64", "encoding_format")
        inputs = await self._read_inputs(body)
        vectors = await wait_unless_gone(request, self.worker.compute("embed", inputs))
        if body.get("dimensions") is not None:
            vectors = [self._check_dimensions(vector, BodyFields(body)) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": _encode_base64(vector) if form == "base64" else vector}
            for index, vector in enumerate(vectors)
        ]
        return make_json_response(
            {"object": "list", "data": data, "model": self.name, "usage": self._count_usage(inputs)}
        )

    def _check_dimensions(self, vector: list[float], fields: BodyFields) -> list[float]:
        requested = fields.read_integer("dimensions", 1, len(vector))
        if requested != len(vector):
            raise BackendError(f"the embeddings of this model have {len(vector)} dimensions", "dimensions")
        return vector

    async def classify(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._check_task("classify", request.scope["path"])
        inputs = await self._read_inputs(body)
        rows = await wait_unless_gone(request, self.worker.compute("classify", inputs))
        data = []
        for index, probabilities in enumerate(rows):
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            label = self.backend.labels[best] if best < len(self.backend.labels) else str(best)
            data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
        return make_json_response(
            {"object": "list", "data": data, "model": self.name, "usage": self._count_usage(inputs)}
        )

    async def rerank(self, request: HttpRequest) -> Response:
        """The documents in the order of their relevance to the query, as in the APIs of Cohere, Jina and vLLM."""
        body = await read_object(request)
        self._check_relevance(request.scope["path"])
        query, documents = body.get("query"), body.get("documents")
        if not isinstance(query, str):
            raise BackendError("query must be a text", "query")
        if not isinstance(documents, list) or not 0 < len(documents) <= MAX_INPUTS:
            raise BackendError(f"documents must be a list of 1 to {MAX_INPUTS} texts", "documents")
        found = [one.get("text") if isinstance(one, dict) else one for one in documents]
        texts = [one for one in found if isinstance(one, str)]
        if len(texts) < len(found):
            raise BackendError("documents must be texts, or objects with a text", "documents")
        most = BodyFields(body).read_integer("top_n", 1)
        scores, usage = await self._relate(request, [(query, text) for text in texts])
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[:most]
        shown = body.get("return_documents", True)
        results = [
            {"index": at, "relevance_score": scores[at], **({"document": {"text": texts[at]}} if shown else {})}
            for at in order
        ]
        return make_json_response(
            {"id": f"rerank-{uuid.uuid4().hex}", "model": self.name, "results": results, "usage": usage}
        )

    async def score(self, request: HttpRequest) -> Response:
        """The relevance of texts to one text, or to one each, as in vLLM's API."""
        body = await read_object(request)
        self._check_relevance(request.scope["path"])
        first, second = (self._read_texts(body, name) for name in ("text_1", "text_2"))
        if len(first) not in (1, len(second)):
            raise BackendError("text_1 must be one text, or as many as text_2", "text_1")
        firsts = first * len(second) if len(first) == 1 else first
        scores, usage = await self._relate(request, list(zip(firsts, second, strict=True)))
        data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
        return make_json_response({"object": "list", "model": self.name, "data": data, "usage": usage})

    def _read_texts(self, body: dict[str, Any], name: str) -> list[str]:
        value = body.get(name)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not 0 < len(texts) <= MAX_INPUTS:
            raise BackendError(f"{name} must be a text or a list of 1 to {MAX_INPUTS} texts", name)
        if not all(isinstance(one, str) for one in texts):
            raise BackendError(f"{name} must contain texts", name)
        return texts

    def _check_relevance(self, path: str) -> None:
        """Rerankers read both texts together; of embedding models, the vectors are compared."""
        self._check_task("embed" if "embed" in self.backend.tasks else "classify", path)
        if "embed" not in self.backend.tasks and len(self.backend.labels) > 1:
            message = f"{path} needs a reranker with one label; this classifier has {len(self.backend.labels)}"
            raise BackendError(message, "model")

    async def _relate(self, request: HttpRequest, pairs: list[tuple[str, str]]) -> tuple[list[float], dict[str, int]]:
        if "embed" in self.backend.tasks:
            places = {text: index for index, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            inputs = [await self._encode(text, special=True) for text in places]
            self._check_lengths(inputs, "documents")
            vectors = await wait_unless_gone(request, self.worker.compute("embed", inputs))
            found = [_compare(vectors[places[first]], vectors[places[second]]) for first, second in pairs]
            return found, self._count_usage(inputs)
        encode = self._get_text().encode_pair
        joined: list[list[int]] = [await asyncio.to_thread(encode, *pair) for pair in pairs]
        self._check_lengths(joined, "documents")
        rows = await wait_unless_gone(request, self.worker.compute("classify", joined))
        return [row[0] for row in rows], self._count_usage(joined)

    def _count_usage(self, inputs: list[list[int]]) -> dict[str, int]:
        read = sum(map(len, inputs))
        self.worker.prompt_tokens += read
        self.worker.outcomes["ok"] += 1
        return {"prompt_tokens": read, "total_tokens": read}

    async def _read_inputs(self, body: dict[str, Any]) -> list[list[int]]:
        value = body.get("input")
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
            value = [value]
        if not isinstance(value, list) or not value:
            raise BackendError("input must be a text or a non-empty list of texts", "input")
        if len(value) > MAX_INPUTS:
            raise BackendError(f"input may contain at most {MAX_INPUTS} texts", "input")
        inputs = [await self._read_tokens(one, "input") for one in value]
        self._check_lengths(inputs, "input")
        return inputs

    def _check_lengths(self, inputs: list[list[int]], name: str) -> None:
        for place, tokens in enumerate(inputs):
            if self.backend.context_tokens is not None and len(tokens) > self.backend.context_tokens:
                message = f"{name}[{place}] has {len(tokens)} tokens; the maximum is {self.backend.context_tokens}"
                raise BackendError(message, name, code="context_length_exceeded")

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._check_task(next(iter(self.backend.tasks)), request.scope["path"])
        if "messages" in body:
            special = False
            tools = read_tools(body, self._get_text().tool_format, can_force=True)
            messages = decode_arguments(BodyFields(body).read_messages())
            text: Any = self._get_text().chat(messages, tools.tools if tools else None, {})
        else:
            text = body.get("content", body.get("prompt"))
            special = BodyFields(body).read_flag("add_special") or BodyFields(body).read_flag("add_special_tokens")
        if not isinstance(text, str):
            raise BackendError("content or prompt must be a text", "content")
        tokens = await self._encode(text, special)
        return make_json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.backend.context_tokens}
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await read_object(request)
        self._check_task(next(iter(self.backend.tasks)), request.scope["path"])
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in tokens):
            raise BackendError("tokens must be a list of token ids", "tokens")
        text = self._get_text().decode(tokens)
        return make_json_response({"content": text, "prompt": text})


async def _answer_refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BackendError)  # noqa: S101
    return make_error_response(error)


async def _answer_unknown(request: HttpRequest, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)  # noqa: S101
    path = request.scope["path"]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return make_error_response(BackendError(f"unknown path {path}", status=404, code="not_found"))
    methods = sorted({*(error.headers or {}).get("Allow", "").split(", ")} - {"HEAD"})
    message = f"{path} supports {' or '.join(methods)}, not {request.method}"
    return make_error_response(BackendError(message, status=error.status_code))


async def _answer_nobody(_: HttpRequest, __: Exception) -> Response:
    """The client has closed its connection: the server discards this response."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _answer_failed(_: HttpRequest, error: Exception) -> Response:
    """Respond to an internal error, whose traceback the server logs."""
    return make_error_response(BackendError(f"the server failed: {type(error).__name__}", status=500))


def _compare(first: list[float], second: list[float]) -> float:
    """The cosine of the angle between two vectors."""
    lengths = math.sqrt(math.fsum(a * a for a in first) * math.fsum(b * b for b in second))
    return math.fsum(a * b for a, b in zip(first, second, strict=True)) / max(lengths, 1e-12)


def _encode_base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
