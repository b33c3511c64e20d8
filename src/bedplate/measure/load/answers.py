"""Parse the responses of an endpoint from their bytes and timestamps, after the measurement. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bedplate.measure.load.wire import HttpExchange
from bedplate.values.run import Outcome

SHOWN_CHARACTERS = 300
REFUSED = (429, 503)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _CallContent(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    """A tool call, or a part of one in a stream."""

    index: int = 0
    id: str | None = None
    function: _CallContent | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Timings(msgspec.Struct):
    """llama.cpp reports cached tokens here, not in `usage`."""

    cache_n: int | None = None


class _ResponseEvent(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_ResponseEvent).decode


class StreamedAnswer(msgspec.Struct, kw_only=True):
    """One answer, with the timestamps of the events that contain text."""

    outcome: Outcome = "ok"
    error: str | None = None
    text_ns: list[int] = msgspec.field(default_factory=list)
    last_ns: int | None = None
    """Timestamp of the last event with text or a finish reason."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    text: str = ""
    tool_name: str = ""
    """Of the first tool call; empty: the answer has none."""
    tool_arguments: str = ""


def split_events(pieces: Sequence[bytes], stamps: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The data of each server-sent event, with the timestamp of the read that contained its first byte."""
    rest, rest_ns = b"", 0
    data: list[bytes] = []
    event_ns = 0
    for piece, stamp in zip(pieces, stamps, strict=True):
        lines = piece.split(b"\n")
        if rest:
            lines[0] = rest + lines[0]
        began_ns = rest_ns if rest else stamp
        rest = lines.pop()
        for line in lines:
            line_ns, began_ns = began_ns, stamp
            line = line.removesuffix(b"\r")
            if not line:
                if data:
                    yield event_ns, b"\n".join(data)
                    data = []
                continue
            if line.startswith(b"data:"):
                if not data:
                    event_ns = line_ns
                data.append(line[5:].removeprefix(b" "))
        # The incomplete line began in this read, unless it is the continuation of an earlier one.
        rest_ns = began_ns
    if rest.startswith(b"data:"):
        if not data:
            event_ns = rest_ns
        data.append(rest[5:].removeprefix(b" ").removesuffix(b"\r"))
    if data:
        yield event_ns, b"\n".join(data)


def read(exchange: HttpExchange, *, keep_text: bool = False) -> StreamedAnswer:
    """Parses one exchange; never raises."""
    answer = StreamedAnswer()
    if exchange.status == 200 and b"text/event-stream" in exchange.content_type:
        _read_stream(answer, exchange, keep_text)
    elif exchange.status == 200:
        _read_whole(answer, exchange, keep_text)
    elif exchange.status:
        answer.outcome = "refused" if exchange.status in REFUSED else "error"
        answer.error = f"HTTP {exchange.status}: {read_error_text(b''.join(exchange.pieces))}".removesuffix(": ")
    elif not exchange.timed_out:
        answer.outcome, answer.error = "error", exchange.error or "no response"
    if exchange.timed_out and answer.outcome != "error":
        answer.outcome, answer.error = "timeout", "the request exceeded its time limit"
    return answer


def _read_stream(answer: StreamedAnswer, exchange: HttpExchange, keep_text: bool) -> None:
    done = False
    texts: list[str] = []
    for stamp, data in split_events(exchange.pieces, exchange.stamps):
        if data.startswith(b"[DONE]"):
            done = True
            continue
        try:
            event = _decode(data)
        except UNREADABLE as error:
            # The last event of a truncated stream may be incomplete.
            if exchange.whole:
                answer.outcome, answer.error = "error", f"an event does not have the format of the API: {error}"
            continue
        if event.error is not None:
            answer.outcome, answer.error = "error", _shorten_error(event.error)
        text, called = _take(answer, event)
        if text or called or any(choice.finish_reason for choice in event.choices or ()):
            answer.last_ns = stamp
        if text or called:
            answer.text_ns.append(stamp)
            if keep_text:
                texts.append(text)
    answer.text = "".join(texts)
    if answer.outcome == "ok" and not done and answer.finish is None:
        answer.outcome, answer.error = "cut", exchange.error or "the stream ended without its last event"


def _read_whole(answer: StreamedAnswer, exchange: HttpExchange, keep_text: bool) -> None:
    """Reads the response of an endpoint that does not stream: the whole text arrives at its end."""
    body = b"".join(exchange.pieces)
    if not exchange.whole:
        answer.outcome, answer.error = "cut", exchange.error or "the response is incomplete"
        return
    try:
        event = _decode(body)
    except UNREADABLE as error:
        answer.outcome, answer.error = "error", f"the response does not have the format of the API: {error}"
        return
    if event.error is not None or not event.choices:
        answer.outcome, answer.error = "error", read_error_text(body)
        return
    text, called = _take(answer, event)
    answer.last_ns = exchange.stamps[-1]
    if text or called:
        answer.text_ns.append(exchange.stamps[-1])
        if keep_text:
            answer.text = text


def _take(answer: StreamedAnswer, event: _ResponseEvent) -> tuple[str, str]:
    """Records the counts and the finish reason of an event; returns its text and that of its tool calls."""
    usage = event.usage
    if usage is not None:
        answer.prompt_tokens = usage.prompt_tokens
        answer.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if answer.cached_tokens is None and event.timings is not None:
        answer.cached_tokens = event.timings.cache_n
    text = called = ""
    for choice in event.choices or ():
        if choice.finish_reason:
            answer.finish = choice.finish_reason
        text += choice.text or ""
        for part in (choice.delta, choice.message):
            if part is not None:
                text += part.content or part.reasoning_content or part.reasoning or ""
                for call in part.tool_calls or ():
                    called += _take_tool_call(answer, call)
    return text, called


def _take_tool_call(answer: StreamedAnswer, call: _CallPart) -> str:
    """Records the first tool call; returns the text that this part of a call adds."""
    if call.function is None:
        return ""
    name, arguments = call.function.name or "", call.function.arguments or ""
    if call.index == 0:
        answer.tool_name = answer.tool_name or name
        answer.tool_arguments += arguments
    return name + arguments


def read_error_text(body: bytes) -> str:
    """The message in the body of an error response."""
    try:
        document = msgspec.json.decode(body)
    except UNREADABLE:
        return body[:SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
    return _shorten_error(document)


def _shorten_error(document: object) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(document, dict) and document.get(key):
            return _shorten_error(document[key])
    text = document if isinstance(document, str) else msgspec.json.encode(document).decode()
    return text[:SHOWN_CHARACTERS].strip()
