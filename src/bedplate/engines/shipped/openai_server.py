"""A small OpenAI-compatible server for engines that bring none of their own.

Runs inside of an engine's environment, so it depends on the standard library alone (jinja2 and tokenizers only where a
backend asks for `HuggingFaceText`). A backend is one file beside this one: it subclasses `Backend` and calls `serve`.

One thread owns the engine and does nothing but compute; one event loop owns all connections. They meet in `Worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import errno
import hmac
import json
import math
import os
import signal
import struct
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Literal

KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
SUPERVISED_VARIABLE = "BEDPLATE_ENGINE_SUPERVISED"
"""Set by whoever holds our stdin: when it closes, we end."""
PROGRESS_MARK = "bedplate-engine: loading "
MAX_HEAD_BYTES = 65536
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_INPUTS = 2048
"""Texts in one request for embeddings, as OpenAI has it."""
UNLIMITED_TOKENS = 1 << 30
LONG_TEXT = 16384
"""Characters from which tokenizing would hold up the event loop for longer than handing it to a thread takes."""
Finish = Literal["stop", "length"]


class Refused(Exception):
    """A request that cannot be answered, and why, in OpenAI's words."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a backend is asked for. Equal only to itself, so that it can be a key."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt: list[int] = field(default_factory=list)
    """Token ids, special tokens included."""
    text: str = ""
    """The prompt as text, the chat template applied."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int = UNLIMITED_TOKENS
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """How many alternatives to each token; `None`: no logprobs at all."""
    schema: str | None = None
    """A JSON schema that the answer must fit."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class Piece:
    """What one step added to one answer."""

    request: Request
    _: KW_ONLY
    token: int | None = None
    text: str | None = None
    """`None`: the server makes it from `token`."""
    tokens: int = 1
    finish: Finish | None = None
    error: str | None = None
    """The engine gave up this one request, and no other."""
    logprob: float | None = None
    top: tuple[tuple[int | str, float], ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Text:
    """A model's tokenizer and chat template."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids. Special tokens that stand in the text are taken for such; `special` adds the usual ones around."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens."""
        raise NotImplementedError

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        raise NotImplementedError


class Backend:
    """What an engine is to the server. The worker thread alone calls its methods, one at a time."""

    engine: ClassVar[str]
    tasks: frozenset[str] = frozenset(["generate"])
    """generate, embed, classify"""
    slots: int = 1
    """Requests that are computed at once; the others wait in front."""
    context_tokens: int | None = None
    text: Text | None = None
    logprobs: bool = False
    structured: frozenset[str] = frozenset()
    """json_schema, json_object: what kinds of answers it can be held to."""
    labels: tuple[str, ...] = ()
    """Of a classifier."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Its own options, beside --model and the like."""

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        """Starts to compute a request."""
        raise NotImplementedError

    def step(self) -> list[Piece]:
        """One step of all that was admitted."""
        raise NotImplementedError

    def cancel(self, request: Request) -> None:
        """Forgets an admitted request."""
        raise NotImplementedError

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        raise NotImplementedError

    def classify(self, inputs: list[list[int]]) -> list[list[float]]:
        """The probability of each label."""
        raise NotImplementedError

    def kv_use(self) -> float | None:
        return None


class OneByOne(Backend):
    """An engine that computes one request at a time, as an iterator of pieces."""

    def __init__(self) -> None:
        self._streams: dict[Request, Iterator[Piece]] = {}

    def stream(self, request: Request) -> Iterator[Piece]:
        """The pieces of one answer. Closed when nobody wants it any more."""
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        self._streams[request] = self.stream(request)

    def step(self) -> list[Piece]:
        pieces = []
        for request, stream in list(self._streams.items()):
            piece = next(stream, None) or Piece(request, text="", tokens=0, finish="stop")
            pieces.append(piece)
            if piece.finish or piece.error:
                self.cancel(request)
        return pieces

    def cancel(self, request: Request) -> None:
        stream = self._streams.pop(request, None)
        if stream is not None and hasattr(stream, "close"):
            stream.close()


class HuggingFaceText(Text):
    """The tokenizer and chat template of a folder as Hugging Face has it."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").exists():
            raise Refused(f"{self.folder} has no tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        # Some folders ask for every text to be cut or filled up, which is for training.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.config = read_json(self.folder / "tokenizer_config.json")
        self.template = ChatTemplate(template_of(self.folder, self.config), special_tokens(self.config))

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        return self.template.render(messages, tools, more)


class ChatTemplate:
    """A model's own template, rendered as Hugging Face renders it."""

    def __init__(self, source: str | None, tokens: dict[str, str]) -> None:
        self.source = source
        self.tokens = tokens
        self._compiled: Any = None

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        if self.source is None:
            raise Refused("this model has no chat template; ask /v1/completions", "messages")
        from jinja2 import TemplateError

        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            values = {**more, **self.tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
            return str(self._compiled.render(values))
        except TemplateError as error:
            raise Refused(f"the model's chat template refused these messages: {error}", "messages") from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise Refused(f"the model's chat template cannot render these messages: {error}", "messages") from error


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # Unlike jinja's own filter: nothing is escaped for HTML.
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """A folder's chat template, which different times have put into different places."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {
            one["name"]: one["template"] for one in found if isinstance(one, dict) and {"name", "template"} <= set(one)
        }
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


class Detokenizer:
    """Tokens to text as they come: a character may need several, and their text depends on what is before."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._shown = 0

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        # A few tokens stay as context: whether a space stands before a word may depend on them.
        self._start, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left when no more tokens come."""
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]


class StopWatch:
    """Cuts a text at the first of its stop strings, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.found = False
        self._held = ""

    def feed(self, text: str) -> str:
        if not self.stops:
            return text
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            out, self._held = self._held[: min(places)], ""
            return out
        keep = max(_overlap(self._held, stop) for stop in self.stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def rest(self) -> str:
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What goes to a client next."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: Refused | None = None


class Answer:
    """One request on its way through the worker: pieces in, text out, and exact counts."""

    def __init__(self, request: Request, text: Text | None, put: Callable[[Delta], None]) -> None:
        self.request = request
        self.put = put
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self.cancelled = False
        self.done = False
        self._text = text
        self._detokenizer = Detokenizer(text.decode) if text is not None else None
        self._stop = StopWatch(request.stop)

    def feed(self, piece: Piece) -> Delta:
        """Takes one piece. When the answer ends with it, `done` is set."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens
        if piece.error is not None:
            self.done = True
            return Delta(error=Refused(piece.error, status=500))
        self.completion_tokens += piece.tokens
        text = piece.text
        if text is None:
            text = self._detokenizer.feed(piece.token) if self._detokenizer and piece.token is not None else ""
        finish = piece.finish
        if finish is None and self.completion_tokens >= self.request.max_tokens:
            finish = "length"
        if finish is not None and self._detokenizer is not None and piece.text is None:
            text += self._detokenizer.rest()
        text = self._stop.feed(text)
        if self._stop.found:
            finish = "stop"
        elif finish is not None:
            text += self._stop.rest()
        self.done = finish is not None
        return Delta(text=text, logprobs=self._logprobs(piece), finish=finish)

    def _logprobs(self, piece: Piece) -> tuple[TokenLogprob, ...]:
        if self.request.logprobs is None or piece.logprob is None:
            return ()
        top = tuple((self._name(token), logprob) for token, logprob in piece.top[: self.request.logprobs])
        text = self._name(piece.token) if piece.token is not None else piece.text or ""
        return (TokenLogprob(text=text, logprob=piece.logprob, top=top),)

    def _name(self, token: int | str) -> str:
        if isinstance(token, str):
            return token
        return self._text.decode([token]) if self._text is not None else str(token)

    def usage(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            said["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return said


class Worker:
    """The engine's thread, and the queue in front of it."""

    def __init__(self, backend: Backend, options: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> None:
        self.backend = backend
        self.loaded = 0.0
        self.ready = False
        self.failed = False
        self.running = self.waiting = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.outcomes = {"ok": 0, "cancelled": 0, "error": 0}
        self.kv_use: float | None = None
        self._options = options
        self._loop = loop
        self._changed = threading.Condition()
        self._queue: deque[Answer] = deque()
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._active: dict[Request, Answer] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, answer: Answer) -> None:
        with self._changed:
            self._queue.append(answer)
            self.waiting = len(self._queue)
            self._changed.notify()

    def cancel(self, answer: Answer) -> None:
        with self._changed:
            answer.cancelled = True
            if answer in self._queue:
                self._queue.remove(answer)
                self.waiting = len(self._queue)
                self.outcomes["cancelled"] += 1
            self._changed.notify()

    def call(self, what: Callable[[], Any]) -> asyncio.Future[Any]:
        """Has the engine's thread do something between two steps."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            self._calls.append((what, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        try:
            self.backend.load(self._options, self._tell)
            self._tell(1.0)
            self.ready = True
            while True:
                self._once()
        except BaseException as error:
            if isinstance(error, Refused):  # a model that it cannot load: the reason is in plain words
                print(f"bedplate-engine: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
            else:
                traceback.print_exc()
                sys.stderr.flush()
            self.failed = True
            # The engine is in no known state. Clients are told; then whoever supervises us starts it anew.
            self._later(self._give_up)

    def _tell(self, share: float) -> None:
        self.loaded = min(max(share, self.loaded), 1.0)
        print(f"{PROGRESS_MARK}{self.loaded:.3f}", flush=True)  # noqa: T201

    def _once(self) -> None:
        with self._changed:
            while not (self._queue or self._calls or self._active):
                self._changed.wait()
            calls, self._calls = self._calls, deque()
        for what, future in calls:
            self._do(what, future)
        for answer in [answer for answer in self._active.values() if answer.cancelled]:
            self.backend.cancel(answer.request)
            self._end(answer, "cancelled")
        self._admit()
        if self._active:
            pieces = self.backend.step()
            ended = {piece.request for piece in pieces if piece.finish or piece.error}
            for piece in pieces:
                self._deliver(piece, piece.request in ended)
            self.kv_use = self.backend.kv_use()

    def _admit(self) -> None:
        while len(self._active) < self.backend.slots:
            with self._changed:
                if not self._queue:
                    return
                answer = self._queue.popleft()
                self.waiting = len(self._queue)
            if answer.cancelled:
                self.outcomes["cancelled"] += 1
                continue
            try:
                self.backend.admit(answer.request)
            except Refused as error:
                self.outcomes["error"] += 1
                self._later(answer.put, Delta(error=error))
                continue
            self._active[answer.request] = answer
            self.running = len(self._active)

    def _deliver(self, piece: Piece, ended: bool) -> None:
        """`ended`: the engine itself has ended this request with this step."""
        answer = self._active.get(piece.request)
        if answer is None:  # a limit or a stop string has ended it within this very step
            return
        before = answer.completion_tokens
        delta = answer.feed(piece)
        self.completion_tokens += answer.completion_tokens - before
        if answer.done:
            if not ended:
                self.backend.cancel(answer.request)
            self._end(answer, "error" if delta.error else "ok")
        if delta.text or delta.logprobs or answer.done:
            self._later(answer.put, delta)

    def _end(self, answer: Answer, outcome: str) -> None:
        del self._active[answer.request]
        self.running = len(self._active)
        self.prompt_tokens += answer.prompt_tokens
        self.outcomes[outcome] += 1

    def _do(self, what: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = what()
        except Refused as error:
            self._later(_settle, future, None, error)
        except Exception as error:
            traceback.print_exc()
            self._later(_settle, future, None, Refused(f"the engine failed: {error}", status=500))
        else:
            self._later(_settle, future, result, None)

    def _later(self, what: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending
            self._loop.call_soon_threadsafe(what, *arguments)

    def _give_up(self) -> None:
        error = Refused("the engine failed; it is started again", status=500)
        for answer in [*self._active.values(), *self._queue]:
            answer.put(Delta(error=error))
        for _, future in self._calls:
            _settle(future, None, error)
        # A moment for these last answers to be written.
        self._loop.call_later(0.2, os._exit, 1)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class Fields:
    """A request's JSON object, read with care: a wrong type is said, not guessed away."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(f"{name} must be a number", name)
        if not low <= value <= high:
            raise Refused(f"{name} must be from {low:g} to {high:g}, not {value:g}", name)
        return float(value)

    def maybe_number(self, name: str, low: float, high: float) -> float | None:
        return None if self.body.get(name) is None else self.number(name, low, low, high)

    def integer(self, name: str, low: int, high: int = 1 << 63) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            raise Refused(f"{name} must be a whole number", name)
        if not low <= value <= high:
            raise Refused(f"{name} must be {low} or more" if value < low else f"{name} is too large", name)
        return int(value)

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise Refused(f"{name} must be true or false", name)
        return value

    def stops(self) -> tuple[str, ...]:
        value = self.body.get("stop")
        stops = [value] if isinstance(value, str) else value or []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise Refused("stop must be a string or a list of strings", "stop")
        if len(stops) > MAX_STOPS:
            raise Refused(f"stop may hold {MAX_STOPS} strings at the most", "stop")
        return tuple(stop for stop in stops if stop)

    def messages(self) -> list[dict[str, Any]]:
        value = self.body.get("messages")
        if not isinstance(value, list) or not value:
            raise Refused("messages must be a list that is not empty", "messages")
        return [self._message(message, place) for place, message in enumerate(value)]

    def _message(self, message: Any, place: int) -> dict[str, Any]:
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(f"{where} must be an object with a role", where)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(self._part(part, where) for part in content)
        if content is not None and not isinstance(content, str):
            raise Refused(f"{where}.content must be text", where)
        if content is None and not message.get("tool_calls"):
            raise Refused(f"{where} has no content", where)
        return {**message, "content": content}

    def _part(self, part: Any, where: str) -> str:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise Refused(f"{where} holds {kind}: this server takes text only", where)


class Server:
    """Endpoints over one worker."""

    def __init__(self, backend: Backend, worker: Worker, name: str, key: str | None) -> None:
        self.backend = backend
        self.worker = worker
        self.name = name
        self.key = key
        self.made_at = int(time.time())
        self.routes: dict[str, dict[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/health": {"GET": self.health},
            "/v1/models": {"GET": self.models},
            f"/v1/models/{name}": {"GET": self.model},
            "/v1/chat/completions": {"POST": self.chat},
            "/v1/completions": {"POST": self.complete},
            "/v1/embeddings": {"POST": self.embeddings},
            "/classify": {"POST": self.classify},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": self.detokenize},
            "/metrics": {"GET": self.metrics},
        }

    async def answer(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except Refused as error:
            if exchange.began:
                raise ConnectionError(error.message) from error
            headers = {"Retry-After": "1"} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
            await exchange.json(error.body(), error.status, headers)

    async def _route(self, exchange: Exchange) -> None:
        methods = self.routes.get(exchange.path)
        if methods is None:
            raise Refused(f"there is no {exchange.path} here", status=404, code="not_found")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in methods:
            raise Refused(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method}", status=405)
        if exchange.path not in ("/health", "/metrics") and not self._may(exchange):
            raise Refused("wrong or no API key", status=401, code="invalid_api_key")
        await methods[method](exchange)

    def _may(self, exchange: Exchange) -> bool:
        if self.key is None:
            return True
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else exchange.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self.key.encode())

    def _need(self, task: str, path: str) -> None:
        if self.worker.failed:
            raise Refused("the engine failed; it is started again", status=500)
        if not self.worker.ready:
            done = round(100 * self.worker.loaded)
            raise Refused(f"the model is loading: {done} %", status=503, code="model_loading")
        if task not in self.backend.tasks:
            does = " or ".join(sorted(self.backend.tasks))
            raise Refused(f"{path} is not for this model, which can {does}", "model")

    async def health(self, exchange: Exchange) -> None:
        if self.worker.failed:
            await exchange.json({"status": "failed"}, 500)
        elif not self.worker.ready:
            await exchange.json({"status": "loading", "progress": round(self.worker.loaded, 3)}, 503)
        else:
            await exchange.json({"status": "ok"})

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.made_at, "owned_by": self.backend.engine}
        return {**card, "max_model_len": self.backend.context_tokens}

    async def models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._card()]})

    async def model(self, exchange: Exchange) -> None:
        await exchange.json(self._card())

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.send(self.metrics_text().encode(), "text/plain; version=0.0.4; charset=utf-8")

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

    async def chat(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need("generate", exchange.path)
        fields = Fields(body)
        messages = fields.messages()
        if body.get("tools") and body.get("tool_choice") != "none":
            raise Refused(f"{self.backend.engine} does not call tools here", "tools")
        more = body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise Refused("chat_template_kwargs must be an object", "chat_template_kwargs")
        text = self._text().chat(messages, None, more)
        # The template has written the special tokens already.
        tokens = await self._encode(text, special=False)
        asked = self._logprobs_of_chat(fields)
        request = self._request(fields, tokens, text, asked, messages=messages)
        await self._generate(exchange, request, ChatShape(self.name), fields)

    async def complete(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need("generate", exchange.path)
        fields = Fields(body)
        for name in ("suffix", "echo"):
            if body.get(name):
                raise Refused(f"{self.backend.engine} does not take {name} here", name)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        tokens = await self._input_tokens(prompt, "prompt")
        text = prompt if isinstance(prompt, str) else self._text().decode(tokens)
        asked = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        request = self._request(fields, tokens, text, asked)
        await self._generate(exchange, request, TextShape(self.name), fields)

    async def _input_tokens(self, value: Any, name: str) -> list[int]:
        if isinstance(value, str):
            return await self._encode(value, special=True)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        ):
            return value
        raise Refused(f"{name} must be one text or one list of token ids", name)

    def _logprobs_of_chat(self, fields: Fields) -> int | None:
        top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if not fields.flag("logprobs"):
            if top:
                raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
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
            raise Refused(f"{self.backend.engine} does not give logprobs", "logprobs")
        if (fields.integer("n", 1) or 1) > 1 or (fields.integer("best_of", 1) or 1) > 1:
            raise Refused("one answer to a request: ask again for another", "n")
        if body.get("logit_bias"):
            raise Refused(f"{self.backend.engine} does not take logit_bias here", "logit_bias")
        if not tokens:
            raise Refused("the prompt is empty", "prompt")
        limits = [
            limit for name in ("max_completion_tokens", "max_tokens") if (limit := fields.integer(name, 1)) is not None
        ]
        context = self.backend.context_tokens
        if context is not None:
            room = context - len(tokens)
            if room < 1:
                message = f"the prompt has {len(tokens)} tokens, and the context is {context} tokens long"
                raise Refused(message, "messages" if messages else "prompt", code="context_length_exceeded")
            limits.append(room)
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
            raise Refused(f"{self.backend.engine} cannot be held to {kind} here", "response_format")
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

    async def _generate(self, exchange: Exchange, request: Request, shape: Shape, fields: Fields) -> None:
        stream = fields.flag("stream")
        options = fields.body.get("stream_options") or {}
        usage_wanted = isinstance(options, dict) and options.get("include_usage") is True
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        answer = Answer(request, self.backend.text, deltas.put_nowait)
        self.worker.submit(answer)
        try:
            if stream:
                await self._stream(exchange, answer, deltas, shape, usage_wanted)
            else:
                await self._whole(exchange, answer, deltas, shape)
        finally:
            if not answer.done:
                self.worker.cancel(answer)

    async def _whole(self, exchange: Exchange, answer: Answer, deltas: asyncio.Queue[Delta], shape: Shape) -> None:
        text: list[str] = []
        logprobs: list[TokenLogprob] = []
        finish = None
        while finish is None:
            delta = await exchange.unless_gone(deltas.get())
            if delta.error is not None:
                raise delta.error
            text.append(delta.text)
            logprobs += delta.logprobs
            finish = delta.finish
        said = logprobs if answer.request.logprobs is not None else None
        await exchange.json(shape.whole("".join(text), finish, answer.usage(), said))

    async def _stream(
        self, exchange: Exchange, answer: Answer, deltas: asyncio.Queue[Delta], shape: Shape, usage_wanted: bool
    ) -> None:
        delta = await exchange.unless_gone(deltas.get())
        if delta.error is not None:
            raise delta.error
        await exchange.begin_events()
        for chunk in shape.opening():
            await exchange.event(chunk)
        while True:
            if delta.error is not None:
                await exchange.event(delta.error.body())
                break
            said = list(delta.logprobs) if answer.request.logprobs is not None else None
            for chunk in shape.chunks(delta.text, delta.finish, said):
                await exchange.event(chunk)
            if delta.finish is not None:
                if usage_wanted:
                    await exchange.event(shape.usage(answer.usage()))
                break
            delta = await exchange.unless_gone(deltas.get())
        await exchange.end_events()

    async def embeddings(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need("embed", exchange.path)
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Refused("encoding_format must be float or base64", "encoding_format")
        inputs = await self._inputs(body)
        vectors = await exchange.unless_gone(self.worker.call(lambda: self.backend.embed(inputs)))
        if body.get("dimensions") is not None:
            vectors = [self._shortened(vector, Fields(body)) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if form == "base64" else vector}
            for index, vector in enumerate(vectors)
        ]
        await exchange.json({"object": "list", "data": data, "model": self.name, "usage": self._read(inputs)})

    def _shortened(self, vector: list[float], fields: Fields) -> list[float]:
        wanted = fields.integer("dimensions", 1, len(vector))
        if wanted != len(vector):
            raise Refused(f"this model's vectors have {len(vector)} dimensions", "dimensions")
        return vector

    async def classify(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need("classify", exchange.path)
        inputs = await self._inputs(body)
        rows = await exchange.unless_gone(self.worker.call(lambda: self.backend.classify(inputs)))
        data = []
        for index, probabilities in enumerate(rows):
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            label = self.backend.labels[best] if best < len(self.backend.labels) else str(best)
            data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
        await exchange.json({"object": "list", "data": data, "model": self.name, "usage": self._read(inputs)})

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
            raise Refused("input must be a text, or a list of texts that is not empty", "input")
        if len(value) > MAX_INPUTS:
            raise Refused(f"input may hold {MAX_INPUTS} texts at the most", "input")
        inputs = [await self._input_tokens(one, "input") for one in value]
        for place, tokens in enumerate(inputs):
            if self.backend.context_tokens is not None and len(tokens) > self.backend.context_tokens:
                message = f"input[{place}] has {len(tokens)} tokens, and the model takes {self.backend.context_tokens}"
                raise Refused(message, "input", code="context_length_exceeded")
        return inputs

    async def tokenize(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need(next(iter(self.backend.tasks)), exchange.path)
        if "messages" in body:
            special = False
            text: Any = self._text().chat(Fields(body).messages(), None, {})
        else:
            text = body.get("content", body.get("prompt"))
            special = Fields(body).flag("add_special") or Fields(body).flag("add_special_tokens")
        if not isinstance(text, str):
            raise Refused("content (or prompt) must be a text", "content")
        tokens = await self._encode(text, special)
        await exchange.json({"tokens": tokens, "count": len(tokens), "max_model_len": self.backend.context_tokens})

    async def detokenize(self, exchange: Exchange) -> None:
        body = exchange.body_object()
        self._need(next(iter(self.backend.tasks)), exchange.path)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in tokens):
            raise Refused("tokens must be a list of token ids", "tokens")
        text = self._text().decode(tokens)
        await exchange.json({"content": text, "prompt": text})


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class Shape:
    """How an endpoint puts an answer into JSON."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, model: str) -> None:
        self.base = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        raise NotImplementedError

    def whole(
        self, text: str, finish: Finish, usage: dict[str, Any], logprobs: list[TokenLogprob] | None
    ) -> dict[str, Any]:
        return {
            **self.base,
            "object": self.whole_kind,
            "choices": [self.choice(text, finish, logprobs)],
            "usage": usage,
        }

    def chunks(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        raise NotImplementedError

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self.base, "object": self.chunk_kind, "choices": list(choices)}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self.chunk(), "usage": usage}


class ChatShape(Shape):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": 0, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self.chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})]

    def chunks(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        found = []
        if text or logprobs:
            said = self._logprobs(logprobs)
            found.append(self.chunk({"index": 0, "delta": {"content": text}, "logprobs": said, "finish_reason": None}))
        if finish is not None:
            found.append(self.chunk({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}))
        return found

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {**_named(one.text, one.logprob), "top_logprobs": [_named(text, logprob) for text, logprob in one.top]}
                for one in logprobs
            ]
        }


class TextShape(Shape):
    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        said = None
        if logprobs is not None:
            said = {
                "tokens": [one.text for one in logprobs],
                "token_logprobs": [one.logprob for one in logprobs],
                "top_logprobs": [dict(one.top) for one in logprobs],
            }
        return {"index": 0, "text": text, "logprobs": said, "finish_reason": finish}

    def chunks(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        return [self.chunk(self.choice(text, finish, logprobs))] if text or logprobs or finish else []


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Gone(Exception):
    """The client has closed its end."""


class BadHttp(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Connection(asyncio.StreamReaderProtocol):
    """A stream that also says when the other end has closed, while nobody reads from it."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.gone = loop.create_future()
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES, loop=loop)
        super().__init__(reader, lambda r, w: _converse(server, r, w, self), loop=loop)

    def eof_received(self) -> bool | None:
        self._note()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._note()
        super().connection_lost(exc)

    def _note(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


class Exchange:
    """One request, and the way to answer it."""

    def __init__(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        keep_alive: bool,
        chunked: bool,
        writer: asyncio.StreamWriter,
        gone: asyncio.Future[None],
    ) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.keep_alive = keep_alive
        self.chunked = chunked
        self.began = False
        self._writer = writer
        self._gone = gone

    def body_object(self) -> dict[str, Any]:
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise Refused("the body must be a JSON object")
        return found

    async def unless_gone(self, what: Awaitable[Any]) -> Any:
        """Waits for something, or until the client has closed."""
        task = asyncio.ensure_future(what)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone
            return task.result()
        finally:
            task.cancel()

    async def json(self, what: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        await self.send(json.dumps(what, ensure_ascii=False).encode("utf-8", "replace"), status=status, headers=headers)

    async def send(
        self,
        body: bytes,
        kind: str = "application/json",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.began = True
        head = self._head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self._writer.write(head + (b"" if self.method == "HEAD" else body))
        await self._writer.drain()

    async def begin_events(self) -> None:
        self.began = True
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        if self.chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            self.keep_alive = False
        self._writer.write(self._head(200, headers))

    async def event(self, what: dict[str, Any]) -> None:
        await self._part(b"data: " + json.dumps(what, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")

    async def end_events(self) -> None:
        await self._part(b"data: [DONE]\n\n")
        if self.chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()

    async def _part(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)
        await self._writer.drain()

    def _head(self, status: int, headers: dict[str, str]) -> bytes:
        reason = HTTPStatus(status).phrase
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        if not self.keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _converse(
    server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
) -> None:
    """Answers one request after another, until the client closes."""
    try:
        while True:
            try:
                exchange = await _read_request(reader, writer, connection.gone)
            except BadHttp as error:
                broken = Exchange("GET", "", {}, b"", False, False, writer, connection.gone)
                await broken.json(Refused(error.message, status=error.status).body(), error.status)
                return
            if exchange is None:
                return
            await server.answer(exchange)
            if not exchange.keep_alive:
                return
    except (ConnectionError, asyncio.IncompleteReadError, Gone):
        writer.transport.abort()
    except Exception:
        traceback.print_exc()
        writer.transport.abort()
    finally:
        writer.close()


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Future[None]
) -> Exchange | None:
    """The next request of a connection; `None` when there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise
        return None
    except asyncio.LimitOverrunError:
        raise BadHttp(431, "the request's head is too long") from None
    method, path, version, headers = parse_head(head)
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _read_body(reader, headers)
    return Exchange(method, path, headers, body, keep_alive, version == "HTTP/1.1", writer, gone)


def parse_head(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    """Method, path, version and headers."""
    first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadHttp(400, "this is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if line and (not colon or not name or name != name.strip()):
            raise BadHttp(400, "a header is not well formed")
        if line:
            name = name.lower()
            if name in ("content-length", "transfer-encoding") and name in headers:
                raise BadHttp(400, f"{name} stands there twice")
            headers[name] = value.strip()
    if "content-length" in headers and "transfer-encoding" in headers:
        raise BadHttp(400, "both content-length and transfer-encoding")
    path = words[1].split("?", 1)[0].split("#", 1)[0]
    return words[0], path.rstrip("/") or "/", words[2], headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    coding = headers.get("transfer-encoding", "").lower()
    if coding == "chunked":
        return await _read_chunks(reader)
    if coding:
        raise BadHttp(501, f"transfer-encoding {coding} is not known here")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadHttp(400, "content-length is no number")
    if int(length) > MAX_BODY_BYTES:
        raise BadHttp(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return await reader.readexactly(int(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        try:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0].strip(), 16)
        except (ValueError, asyncio.LimitOverrunError):
            raise BadHttp(400, "a chunk's size is no number") from None
        if size < 0 or len(body) + size > MAX_BODY_BYTES:
            raise BadHttp(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        if size == 0:
            while (await reader.readuntil(b"\r\n")) != b"\r\n":
                pass  # trailers
            return bytes(body)
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise BadHttp(400, "a chunk is longer than it says")


def parser_for(backend: type[Backend]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"An OpenAI-compatible server around {backend.engine}. "
        f"Clients must send the key that {KEY_VARIABLE} holds, where it is set.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="the model's file or folder")
    parser.add_argument("--served-name", help="the name that the API calls the model by")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=1, help="requests that are computed at once")
    parser.add_argument("--context", type=int, help="tokens of the longest request, prompt and answer together")
    backend.add_options(parser)
    return parser


def serve(backend: Backend, arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop. The one call of a backend's file."""
    options = parser_for(type(backend)).parse_args(arguments)
    options.served_name = options.served_name or Path(options.model).name
    if os.environ.get(SUPERVISED_VARIABLE):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Threads in the middle of a computation would hold up an ordinary exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        asyncio.run(_serve(backend, options))
    except OSError as error:
        what = "port is in use" if error.errno == errno.EADDRINUSE else str(error)
        print(f"bedplate-engine: cannot listen on {options.host}:{options.port}: {what}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)


async def _serve(backend: Backend, options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # From here on the loop itself is woken: it may be about to wait when the signal comes.
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(number, os._exit, 0)
    worker = Worker(backend, options, loop)
    server = Server(backend, worker, options.served_name, os.environ.pop(KEY_VARIABLE, None) or None)
    listening = await loop.create_server(
        lambda: Connection(server, loop), options.host, options.port, backlog=1024, reuse_address=True
    )
    worker.start()
    await listening.serve_forever()


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os._exit(0)
