"""What an endpoint said, out of the bytes and stamps of its answer. Pure, and done after the clocks have stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bedplate.measure.load.wire import Exchange
from bedplate.values.run import Outcome

SHOWN_CHARACTERS = 300
REFUSED = (429, 503)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Delta(msgspec.Struct):
    content: str | None = None
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
    """llama.cpp's own, where its usage is silent about the cache."""

    cache_n: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer(msgspec.Struct, kw_only=True):
    """One answer, with the stamps of the events that carry text."""

    outcome: Outcome = "ok"
    error: str | None = None
    text_ns: list[int] = msgspec.field(default_factory=list)
    last_ns: int | None = None
    """Of the last event that carries text or the reason of the end."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    text: str = ""


def events_of(pieces: Sequence[bytes], stamps: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The data of each server-sent event, with the stamp of the read that brought its first byte."""
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
        # What is left began in this read, unless it is the same line that an earlier one began.
        rest_ns = began_ns
    if rest.startswith(b"data:"):
        if not data:
            event_ns = rest_ns
        data.append(rest[5:].removeprefix(b" ").removesuffix(b"\r"))
    if data:
        yield event_ns, b"\n".join(data)


def read(exchange: Exchange, *, keep_text: bool = False) -> Answer:
    """Everything that one exchange tells; never raises."""
    answer = Answer()
    if exchange.status == 200 and b"text/event-stream" in exchange.content_type:
        _read_stream(answer, exchange, keep_text)
    elif exchange.status == 200:
        _read_whole(answer, exchange, keep_text)
    elif exchange.status:
        answer.outcome = "refused" if exchange.status in REFUSED else "error"
        answer.error = f"HTTP {exchange.status}: {error_text(b''.join(exchange.pieces))}".removesuffix(": ")
    elif not exchange.timed_out:
        answer.outcome, answer.error = "error", exchange.error or "no answer came"
    if exchange.timed_out and answer.outcome != "error":
        answer.outcome, answer.error = "timeout", "it took longer than a request may"
    return answer


def _read_stream(answer: Answer, exchange: Exchange, keep_text: bool) -> None:
    done = False
    texts: list[str] = []
    for stamp, data in events_of(exchange.pieces, exchange.stamps):
        if data.startswith(b"[DONE]"):
            done = True
            continue
        try:
            event = _decode(data)
        except UNREADABLE as error:
            # The last event of a stream that was cut may be half of one.
            if exchange.whole:
                answer.outcome, answer.error = "error", f"an event is not what the API has: {error}"
            continue
        if event.error is not None:
            answer.outcome, answer.error = "error", _shown(event.error)
        text = _take(answer, event)
        if text or any(choice.finish_reason for choice in event.choices or ()):
            answer.last_ns = stamp
        if text:
            answer.text_ns.append(stamp)
            if keep_text:
                texts.append(text)
    answer.text = "".join(texts)
    if answer.outcome == "ok" and not done and answer.finish is None:
        answer.outcome, answer.error = "cut", exchange.error or "the stream ended without its last event"


def _read_whole(answer: Answer, exchange: Exchange, keep_text: bool) -> None:
    """An endpoint that does not stream: all of its text comes at its end."""
    body = b"".join(exchange.pieces)
    if not exchange.whole:
        answer.outcome, answer.error = "cut", exchange.error or "the answer is not whole"
        return
    try:
        event = _decode(body)
    except UNREADABLE as error:
        answer.outcome, answer.error = "error", f"the answer is not what the API has: {error}"
        return
    if event.error is not None or not event.choices:
        answer.outcome, answer.error = "error", error_text(body)
        return
    text = _take(answer, event)
    answer.last_ns = exchange.stamps[-1]
    if text:
        answer.text_ns.append(exchange.stamps[-1])
        if keep_text:
            answer.text = text


def _take(answer: Answer, event: _Event) -> str:
    """Books what an event says; returns its text."""
    usage = event.usage
    if usage is not None:
        answer.prompt_tokens = usage.prompt_tokens
        answer.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if answer.cached_tokens is None and event.timings is not None:
        answer.cached_tokens = event.timings.cache_n
    text = ""
    for choice in event.choices or ():
        if choice.finish_reason:
            answer.finish = choice.finish_reason
        text += choice.text or ""
        for said in (choice.delta, choice.message):
            if said is not None:
                text += said.content or said.reasoning_content or said.reasoning or ""
    return text


def error_text(body: bytes) -> str:
    """What the body of an error says, in as few words as it has."""
    try:
        said = msgspec.json.decode(body)
    except UNREADABLE:
        return body[:SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
    return _shown(said)


def _shown(said: object) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            return _shown(said[key])
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return text[:SHOWN_CHARACTERS].strip()
