"""A null OpenAI-compatible engine: no model, exactly timed answers."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import time
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop
from deadlines import Deadlines

MODEL = "null-model"
CREATED = 1_700_000_000
PROMPT_TOKENS = 12

# Two writes in a row are the default because they can show a gateway that leaves Nagle's algorithm on.
HEADER_MODES = ("apart", "together", "early")
HEADER_HELP = "response headers: in a write just before the first token's, in the same write, or when the request ends"

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Timing:
    """When the chunks of a stream leave, counted from the end of the request."""

    first_ns: int
    interval_ns: int
    tokens: int
    headers: str


@dataclass(frozen=True)
class Wanted:
    """What a chat request asks for."""

    stream: bool
    usage: bool


@functools.lru_cache(maxsize=256)
def parse_wanted(body: bytes) -> Wanted:
    """Reads the streaming options of a request body."""
    try:
        request = json.loads(body)
        options = request.get("stream_options") or {}
        return Wanted(stream=request.get("stream") is True, usage=options.get("include_usage") is True)
    except (ValueError, AttributeError):
        return Wanted(stream=False, usage=False)


def compact(value: object) -> bytes:
    """Serializes JSON without blanks."""
    return json.dumps(value, separators=(",", ":")).encode()


def usage_of(tokens: int) -> dict[str, int]:
    """The usage object of an answer with this many tokens."""
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def json_response(value: object, status: bytes = b"200 OK") -> bytes:
    """A whole HTTP response with a JSON body."""
    body = compact(value)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def completion(tokens: int) -> dict[str, object]:
    """A chat completion that is not streamed."""
    message = {"role": "assistant", "content": "Nothing was computed for this answer."}
    return {
        "id": "chatcmpl-00000000000000000000000000000000",
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage_of(tokens),
    }


# What the peers ask a worker before they send it traffic.
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


class Engine:
    """The bytes that are the same for every request, built once."""

    def __init__(self, timing: Timing, deadlines: Deadlines) -> None:
        self.timing = timing
        self.deadlines = deadlines
        self.requests = itertools.count(1)
        self.completion = json_response(completion(7))
        self.pages = {path: json_response(page) for path, page in PAGES.items()}
        self.not_found = json_response({"error": {"message": "not found", "type": "not_found"}}, b"404 Not Found")
        self.tails = [self._tail(index) for index in range(timing.tokens)]
        # Every id has the same length, so the hexadecimal chunk sizes are constants too.
        self.sizes = [b"%x\r\n" % (len(self.head(0)) + len(tail) - 2) for tail in self.tails]
        self.usage_tail = compact({"choices": [], "usage": usage_of(timing.tokens)})[1:] + b"\n\n\r\n"
        self.usage_size = b"%x\r\n" % (len(self.head(0)) + len(self.usage_tail) - 2)
        self.done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    @staticmethod
    def head(number: int) -> bytes:
        """The start of every event of one request."""
        return b'data: {"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":%d,"model":"%b",' % (
            number,
            CREATED,
            MODEL.encode(),
        )

    def _tail(self, index: int) -> bytes:
        # Segments of one size change how Linux delays acknowledgements, so the words differ in length, as in text.
        word = f" w{index}{'abcdefg'[: index * 3 % 8]}"
        delta = {"content": word} if index else {"role": "assistant", "content": word}
        reason = "stop" if index == self.timing.tokens - 1 else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return compact({"choices": [choice]})[1:] + b"\n\n\r\n"


class Stream:
    """One answer under way on one connection."""

    def __init__(self, connection: "Connection", engine: Engine, usage: bool, now_ns: int) -> None:
        self.connection = connection
        self.engine = engine
        self.usage = usage
        self.index = 0
        self.received_ns = now_ns
        self.head = engine.head(next(engine.requests))
        if engine.timing.headers == "early":
            connection.write(STREAM_HEAD)
        engine.deadlines.at(now_ns + engine.timing.first_ns, self.send)

    def send(self, when_ns: int) -> None:
        """Writes the next token, and asks for the one after it."""
        engine, index = self.engine, self.index
        if self.connection.stream is not self:
            return
        head = self.head
        if not index:
            # How long the request was really held, where nothing changes the size: the load takes it off again, so
            # that a late timer of this engine is not booked on a gateway.
            head = engine.head(time.monotonic_ns() - self.received_ns)
        chunk = engine.sizes[index] + head + engine.tails[index]
        if not index:
            chunk = self.with_headers(chunk)
        self.index = index + 1
        if self.index < engine.timing.tokens:
            self.connection.write(chunk)
            engine.deadlines.at(when_ns + engine.timing.interval_ns, self.send)
            return
        usage = engine.usage_size + self.head + engine.usage_tail if self.usage else b""
        self.connection.stream = None
        self.connection.write(chunk + usage + engine.done)

    def with_headers(self, chunk: bytes) -> bytes:
        """Sends the headers before the first token, unless they are out already or go with it."""
        mode = self.engine.timing.headers
        if mode == "together":
            return STREAM_HEAD + chunk
        if mode == "apart":
            self.connection.write(STREAM_HEAD)
        return chunk


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport | None = None
        self.stream: Stream | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops the stream under way."""
        self.transport = None
        self.stream = None

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self.transport:
                self.transport.abort()

    def write(self, data: bytes) -> None:
        """Writes to a connection that may be gone."""
        if self.transport:
            self.transport.write(data)

    def on_message_begin(self) -> None:
        """Forgets the request before."""
        self.url = b""
        self.body = b""

    def on_url(self, url: bytes) -> None:
        """Collects the path."""
        self.url += url

    def on_body(self, body: bytes) -> None:
        """Collects the body."""
        self.body += body

    def on_message_complete(self) -> None:
        """Answers, or starts the clock of a stream."""
        now_ns = time.monotonic_ns()
        engine = self.engine
        if self.url == b"/v1/chat/completions":
            wanted = parse_wanted(self.body)
            if wanted.stream:
                self.stream = Stream(self, engine, wanted.usage, now_ns)
            else:
                self.write(engine.completion)
        else:
            self.write(engine.pages.get(self.url.partition(b"?")[0], engine.not_found))


async def serve(port: int, timing: Timing) -> None:
    """Serves on 127.0.0.1 until cancelled."""
    loop = asyncio.get_running_loop()
    engine = Engine(timing, Deadlines(loop))
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Reads the options and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and prints it")
    parser.add_argument("--first-ms", type=float, default=50.0, help="from the end of the request to the first token")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="between tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in a stream")
    parser.add_argument("--headers", choices=HEADER_MODES, default=HEADER_MODES[0], help=HEADER_HELP)
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    timing = Timing(
        first_ns=int(options.first_ms * 1e6),
        interval_ns=int(options.interval_ms * 1e6),
        tokens=options.tokens,
        headers=options.headers,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(options.port, timing))


if __name__ == "__main__":
    main()
