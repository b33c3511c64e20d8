"""The null server: an OpenAI-compatible endpoint without a model, with exactly known timing, in a separate process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import httptools
import msgspec

from bedplate.errors import ExternalFailure
from bedplate.measure.load.deadlines import Deadlines
from bedplate.measure.load.loops import run

MODEL = "null-model"
CREATED = 1_700_000_000
# Two consecutive writes are the default because they reveal a gateway that leaves Nagle's algorithm on.
HEADER_MODES = ("apart", "together", "early")
HEADER_HELP = (
    "when to write the response headers: just before the first token, together with it, or at the request's end"
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
KINDS = {b"/v1/chat/completions": "chat", b"/v1/completions": "completions"}
TIMES_PAGE = b"/null/times"
MOST_TIMES = 1_000_000


class Timing(NamedTuple):
    """When the events of a stream are sent, from the end of the request."""

    first_ns: int
    interval_ns: int
    tokens: int
    """Output tokens if the request does not specify them."""
    headers: str = HEADER_MODES[0]
    overhead: int = 0
    """Tokens added to each prompt."""


class NullStreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class NullMessage(msgspec.Struct):
    content: Any = None


class NullRequest(msgspec.Struct, frozen=True):
    """The fields of a request that matter; others are ignored."""

    stream: bool | None = None
    stream_options: NullStreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt: Any = None
    messages: list[NullMessage] | None = None

    @property
    def usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def count_words(self) -> int:
        """The number of prompt tokens: each word is one token."""
        if self.messages is not None:
            return sum(len(each.content.split()) for each in self.messages if isinstance(each.content, str))
        if isinstance(self.prompt, list):
            return len(self.prompt) if all(isinstance(each, int) for each in self.prompt) else 1
        return len(str(self.prompt or "").split())


_decode_wanted = msgspec.json.Decoder(NullRequest).decode


@functools.lru_cache(maxsize=256)
def parse_request(body: bytes) -> NullRequest:
    try:
        return _decode_wanted(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NullRequest()


def make_json_response(value: object, status: bytes = b"200 OK") -> bytes:
    """A complete HTTP response."""
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def make_usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def make_event_head(kind: str, number: int) -> bytes:
    """The beginning of every event of one request."""
    what = (b"chatcmpl", b"chat.completion.chunk") if kind == "chat" else (b"cmpl", b"text_completion")
    return b'data: {"id":"%b-%032x","object":"%b","created":%d,"model":"%b",' % (
        what[0],
        number,
        what[1],
        CREATED,
        MODEL.encode(),
    )


@functools.lru_cache(maxsize=65536)
def make_token_chunk(kind: str, index: int, last: bool) -> tuple[bytes, bytes]:
    """The chunk size of a token and its content after the head; all heads of a kind have the same length."""
    # Segments of equal size change how Linux delays acknowledgements, so the words differ in length, as in text.
    word = f" w{index}{'abcdefg'[: index * 3 % 8]}"
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length" if last else None}
    if kind == "chat":
        choice["delta"] = {"content": word} if index else {"role": "assistant", "content": word}
    else:
        choice["text"] = word
    return make_chunk(kind, msgspec.json.encode({"choices": [choice]})[1:])


def make_chunk(kind: str, rest: bytes) -> tuple[bytes, bytes]:
    tail = rest + b"\n\n\r\n"
    return b"%x\r\n" % (len(make_event_head(kind, 0)) + len(tail) - 2), tail


@functools.lru_cache(maxsize=256)
def make_whole_response(kind: str, prompt_tokens: int, tokens: int) -> bytes:
    """The response to a request that does not stream."""
    text = "".join(f" w{index}" for index in range(tokens))
    answer = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    return make_json_response(
        {
            "id": "chatcmpl-0" if kind == "chat" else "cmpl-0",
            "object": "chat.completion" if kind == "chat" else "text_completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [{"index": 0, **answer, "logprobs": None, "finish_reason": "length"}],
            "usage": make_usage(prompt_tokens, tokens),
        }
    )


# Pages that routers probe before they send traffic.
PAGES: dict[bytes, object] = {
    b"/health": {},
    b"/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": CREATED, "owned_by": "null", "max_model_len": 32768}],
    },
    b"/get_model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0"},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0"},
    b"/version": {"version": "0"},
}


class NullEngine:
    """The state that all connections share."""

    def __init__(self, timing: Timing, deadlines: Deadlines) -> None:
        self.timing = timing
        self.deadlines = deadlines
        self.requests = itertools.count(1)
        self.pages = {path: make_json_response(page) for path, page in PAGES.items()}
        self.not_found = make_json_response({"error": {"message": "not found", "type": "not_found"}}, b"404 Not Found")
        self.times: list[tuple[int, int, int]] = []
        """For each ended stream: when its request arrived, and when its first and last token were sent."""

    def find_page(self, path: bytes) -> bytes:
        if path == TIMES_PAGE:
            times, self.times = self.times, []
            return make_json_response({"times_ns": times})
        return self.pages.get(path, self.not_found)


class NullStream:
    """One streamed response on one connection."""

    def __init__(
        self, connection: NullConnection, engine: NullEngine, kind: str, wanted: NullRequest, now_ns: int
    ) -> None:
        self.connection = connection
        self.engine = engine
        self.kind = kind
        self.wanted = wanted
        self.tokens = count_output_tokens(wanted, engine.timing)
        self.index = 0
        self.received_ns = now_ns
        self.first_ns = 0
        self.head = make_event_head(kind, next(engine.requests))
        if engine.timing.headers == "early":
            connection.write(STREAM_HEAD)
        engine.deadlines.at(now_ns + engine.timing.first_ns, self.send)

    def send(self, when_ns: int) -> None:
        """Writes the next token and schedules the one after it."""
        if self.connection.stream is not self:
            return
        index = self.index
        self.index = index + 1
        last = self.index == self.tokens
        size, tail = make_token_chunk(self.kind, index, last)
        data = size + self.head + tail if index else self.make_first_chunk(size, tail)
        if last:
            self.connection.stream = None
            self.connection.write(data + self.make_usage_chunk() + DONE)
            if len(self.engine.times) < MOST_TIMES:
                self.engine.times.append((self.received_ns, self.first_ns, time.monotonic_ns()))
        else:
            self.connection.write(data)
            self.engine.deadlines.at(when_ns + self.engine.timing.interval_ns, self.send)

    def make_first_chunk(self, size: bytes, tail: bytes) -> bytes:
        """The first event. Its id contains the actual delay, so that the client can subtract it."""
        mode = self.engine.timing.headers
        if mode == "apart":
            self.connection.write(STREAM_HEAD)
        self.first_ns = time.monotonic_ns()
        data = size + make_event_head(self.kind, self.first_ns - self.received_ns) + tail
        return STREAM_HEAD + data if mode == "together" else data

    def make_usage_chunk(self) -> bytes:
        if not self.wanted.usage:
            return b""
        counts = make_usage(self.wanted.count_words() + self.engine.timing.overhead, self.tokens)
        size, tail = make_chunk(self.kind, msgspec.json.encode({"choices": [], "usage": counts})[1:])
        return size + self.head + tail


def count_output_tokens(wanted: NullRequest, timing: Timing) -> int:
    return max(1, wanted.max_tokens or wanted.max_completion_tokens or timing.tokens)


class NullConnection(asyncio.Protocol):
    """One client connection; its requests are answered one after the other."""

    def __init__(self, engine: NullEngine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport | None = None
        self.stream: NullStream | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.stream = None

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self.transport:
                self.transport.abort()

    def write(self, data: bytes) -> None:
        """Writes data unless the connection is closed."""
        if self.transport:
            self.transport.write(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.body = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        """Answers, or starts a stream."""
        now_ns = time.monotonic_ns()
        path = self.url.partition(b"?")[0]
        kind = KINDS.get(path)
        if kind is None:
            self.write(self.engine.find_page(path))
            return
        wanted = parse_request(b"".join(self.body))
        if wanted.stream:
            self.stream = NullStream(self, self.engine, kind, wanted, now_ns)
        else:
            timing = self.engine.timing
            self.write(
                make_whole_response(kind, wanted.count_words() + timing.overhead, count_output_tokens(wanted, timing))
            )


async def serve(port: int, timing: Timing, with_parent: bool) -> None:
    """Serves on 127.0.0.1 until cancelled, or until its parent process ends."""
    loop = asyncio.get_running_loop()
    engine = NullEngine(timing, Deadlines(loop))
    server = await loop.create_server(lambda: NullConnection(engine), "127.0.0.1", port, backlog=4096)
    sys.stdout.write(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        if with_parent:
            await loop.run_in_executor(None, sys.stdin.buffer.read)
        else:
            await server.serve_forever()


class NullServer(NamedTuple):
    """A running null server."""

    url: str
    pid: int


@contextlib.contextmanager
def serve_null(
    *, first_ms: float = 50.0, interval_ms: float = 20.0, tokens: int = 64, overhead: int = 0
) -> Iterator[NullServer]:
    """Runs a null server as a process that ends with this one."""
    options = {"first-ms": first_ms, "interval-ms": interval_ms, "tokens": tokens}
    argv = [sys.executable, "-m", "bedplate.measure.load.null_server", "--with-parent", f"--overhead={overhead}"]
    argv += [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    with process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            if not line.startswith(b"listening on "):
                raise ExternalFailure("the null server did not start", cause=f"exit status {process.poll()}")
            yield NullServer(f"http://{line.split()[-1].decode()}", process.pid)
        finally:
            process.terminate()


def main() -> None:
    """Reads the options and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: choose a free port and print it")
    parser.add_argument(
        "--first-ms", type=float, default=50.0, help="milliseconds from the end of the request to the first token"
    )
    parser.add_argument("--interval-ms", type=float, default=20.0, help="milliseconds between tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens if the request does not specify them")
    parser.add_argument("--headers", choices=HEADER_MODES, default=HEADER_MODES[0], help=HEADER_HELP)
    parser.add_argument("--overhead", type=int, default=0, help="tokens added to each prompt")
    parser.add_argument("--with-parent", action="store_true", help="exit when standard input is closed")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    timing = Timing(
        first_ns=int(options.first_ms * 1e6),
        interval_ns=int(options.interval_ms * 1e6),
        tokens=options.tokens,
        headers=options.headers,
        overhead=options.overhead,
    )
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # the parent may end before the server listens
        run(serve(options.port, timing, options.with_parent))
    # A thread that waits for standard input would delay the exit.
    os._exit(0)


if __name__ == "__main__":
    main()
