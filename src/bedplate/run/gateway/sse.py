"""The little that the gateway must understand of requests and event streams. Pure; bytes in, bytes out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "other"]

APIS: dict[bytes, Api] = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "completions",
    b"/v1/responses": "responses",
    b"/v1/messages": "messages",
    b"/v1/messages/count_tokens": "other",
    b"/v1/embeddings": "embeddings",
    b"/chat/completions": "chat",
    b"/completions": "completions",
    b"/embeddings": "embeddings",
    b"/tokenize": "other",
    b"/detokenize": "other",
}

# Each API has its own way of saying that a stream is whole; without it the stream was cut, however politely.
# A mark counts only where a line begins or inside of quotes, so that text which a model writes is never taken for one.
_END_MARKS: dict[Api, tuple[bytes, ...]] = {
    "chat": (b"\ndata: [DONE]", b"\ndata:[DONE]"),
    "completions": (b"\ndata: [DONE]", b"\ndata:[DONE]"),
    "messages": (b'"message_stop"',),
    "responses": (b'"response.completed"', b'"response.incomplete"', b'"response.failed"'),
}
_ERROR_MARKS = (b'"error":', b"\nevent: error")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Asked(msgspec.Struct):
    """The fields of a request body that decide how it is handled; all others pass through untouched."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Nested(msgspec.Struct):
    usage: _Counts | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Counts | None = None
    message: _Nested | None = None
    response: _Nested | None = None


class Usage:
    """Tokens of one request as the engine counted them; chunks are never counted."""

    __slots__ = ("completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def take(self, event: _Event) -> bool:
        found = False
        for holder in (event, event.message, event.response):
            counts = holder.usage if holder is not None else None
            if counts is None:
                continue
            found = True
            prompt = counts.prompt_tokens if counts.prompt_tokens is not None else counts.input_tokens
            completion = counts.completion_tokens if counts.completion_tokens is not None else counts.output_tokens
            self.prompt_tokens = prompt if prompt is not None else self.prompt_tokens
            self.completion_tokens = completion if completion is not None else self.completion_tokens
        return found


_decode_asked = msgspec.json.Decoder(Asked).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def read_asked(body: bytes) -> Asked:
    """Raises `msgspec.DecodeError` (its `ValidationError` included) when the body is not what the API takes."""
    return _decode_asked(body)


def with_usage_asked(body: bytes, asked: Asked) -> bytes:
    """The body with `stream_options.include_usage` set, so that the engine tells its token counts."""
    if asked.stream_options is None and b'"stream_options"' not in body:
        # Splicing keeps the client's own bytes, and costs nothing for long prompts.
        brace = body.index(b"{") + 1
        joint = b"" if body[brace:].lstrip()[:1] == b"}" else b","
        return body[:brace] + b'"stream_options":{"include_usage":true}' + joint + body[brace:]
    whole: dict[str, Any] = msgspec.json.decode(body)
    options = whole.get("stream_options")
    whole["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return msgspec.json.encode(whole)


def whole_events(data: bytes) -> int:
    """How many bytes of `data` are whole events; what follows must wait for its end."""
    if data.endswith((b"\n\n", b"\r\n\r\n")):
        return len(data)
    plain, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def may_have_usage(events: bytes) -> bool:
    # Inside of a JSON string the quotes are escaped, so text that a model writes cannot look like this.
    at = events.find(b'"usage":')
    return at >= 0 and events[at + 8 : at + 12].lstrip()[:1] == b"{"


def read_usage(events: bytes, usage: Usage, *, drop: bool) -> bytes:
    """Takes token counts out of whole events; with `drop`, leaves out those that exist only to carry the counts."""
    separator = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    kept = []
    for event in events.split(separator):
        at = event.find(b"data:")
        if at >= 0 and b'"usage"' in event:
            try:
                decoded = _decode_event(event[at + 5 :].strip())
            except msgspec.DecodeError:
                decoded = None
            if decoded is not None and usage.take(decoded) and drop and decoded.choices == []:
                continue
        kept.append(event)
    return separator.join(kept)


def read_body_usage(body: bytes, usage: Usage) -> None:
    """Token counts of an answer that came in one piece."""
    if b'"usage"' in body:
        try:
            usage.take(_decode_event(body))
        except msgspec.DecodeError:
            return


def is_whole(api: Api, last_events: bytes) -> bool:
    """Whether a stream that ended with these events said that it was complete, or that it failed."""
    marks = _END_MARKS.get(api)
    lines = b"\n" + last_events
    return marks is None or any(mark in lines for mark in (*marks, *_ERROR_MARKS))


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """An OpenAI error object."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(api: Api, message: str, kind: str, code: str) -> bytes:
    """The last event of a stream that could not be finished, as clients of each API expect it."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    if api == "messages":
        body = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    if api == "responses":
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **error}) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def as_openai_error(status: int, body: bytes) -> bytes:
    """Whatever an engine says about a failure, as an OpenAI error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return error_body(body[:2000].decode("utf-8", "replace").strip() or f"the engine answered {status}", kind, None)
    error = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
        code = error.get("code")
        code = None if code is None or code == status else str(code)
        return error_body(str(message), str(error.get("type") or kind), code, error.get("param"))
    return error_body(str(error), kind, None)
