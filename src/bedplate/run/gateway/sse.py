"""What the gateway parses of requests and event streams. Pure functions on bytes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from bedplate.run.gateway.request_checks import NOTHING, FeatureFields

Api = Literal[
    "chat", "completions", "responses", "messages", "embeddings", "rerank", "score", "classify", "transcriptions",
    "other",
]  # fmt: skip

APIS: dict[bytes, Api] = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "completions",
    b"/v1/embeddings": "embeddings",
    b"/chat/completions": "chat",
    b"/completions": "completions",
    b"/embeddings": "embeddings",
    b"/v1/rerank": "rerank",
    b"/v2/rerank": "rerank",
    b"/rerank": "rerank",
    b"/v1/score": "score",
    b"/score": "score",
    b"/v1/classify": "classify",
    b"/classify": "classify",
    b"/v1/audio/transcriptions": "transcriptions",
    b"/audio/transcriptions": "transcriptions",
    b"/tokenize": "other",
    b"/detokenize": "other",
}
TRANSLATED: dict[bytes, Api] = {
    b"/v1/responses": "responses",
    b"/v1/messages": "messages",
    b"/v1/messages/count_tokens": "other",
    b"/api/chat": "chat",
    b"/api/generate": "chat",
    b"/api/embed": "embeddings",
    b"/api/embeddings": "embeddings",
}
"""Other APIs, which are translated for engines that do not have them."""
CHECKED_AS: dict[bytes, Api] = {b"/v1/messages/count_tokens": "messages"}
"""Paths that generate nothing and have the format of an API that does."""
OPENAI_TARGETS = {
    b"/chat/completions": b"/v1/chat/completions",
    b"/completions": b"/v1/completions",
    b"/embeddings": b"/v1/embeddings",
    b"/rerank": b"/v1/rerank",
    b"/v2/rerank": b"/v1/rerank",
    b"/audio/transcriptions": b"/v1/audio/transcriptions",
    b"/v1/score": b"/score",
    b"/v1/classify": b"/classify",
}
"""Without /v1 some engines have APIs of their own, whose answers do not report usage; these paths get OpenAI's.
Rerank, score and classify have the paths that most engines know."""

# Each API marks the end of a complete stream; a stream without the mark was truncated, even if it was closed properly.
# In addition to these types, `data: [DONE]` and an error end a stream of any API.
_LAST_TYPES: dict[Api, frozenset[str]] = {
    "chat": frozenset(),
    "completions": frozenset(),
    "messages": frozenset(["message_stop", "error"]),
    "responses": frozenset(["response.completed", "response.incomplete", "response.failed", "error"]),
}
_DONE = b"data: [DONE]\n\n"
"""The last event of most streams."""
_FINISH = re.compile(rb'"(?:finish|stop)_reason": ?"([a-z_]{1,32})"')
_FINISH_REASONS = frozenset(["stop", "length", "tool_calls", "content_filter"])
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


class RequestStreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class RequestFields(FeatureFields):
    """The fields of a request body that decide how it is handled; all others pass through unchanged."""

    model: str | None = None
    stream: bool | None = None
    stream_options: RequestStreamOptions | None = None
    # The following are read but not validated; the engine does that.
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    prompt_cache_key: Any = None
    system: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING

    @property
    def max_answer_tokens(self) -> int | None:
        """The maximum length of the answer."""
        if self.n_predict is not None and type(self.n_predict) is int:  # takes precedence where it is understood
            return self.n_predict if self.n_predict >= 0 else None
        if self.max_completion_tokens is self.max_output_tokens is None:
            most = self.max_tokens
            return most if type(most) is int and most >= 0 else None
        for asked in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if type(asked) is int and asked >= 0:
                return asked
        return None

    def get_prompt_text(self, most_bytes: int) -> tuple[bytes, int]:
        """The beginning of the prompt, as JSON in the order of chat templates, and the length of all of it."""
        length = len(self.messages)
        if (
            self.tools is self.system is self.instructions is self.prompt is self.input is NOTHING
            and length <= most_bytes
        ):
            return bytes(self.messages), length
        parts = (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input)
        views = [memoryview(part) for part in parts if part is not NOTHING]
        length = sum(map(len, views))
        # A long prompt is not copied as a whole.
        return b"".join(views if length <= most_bytes else [view[:most_bytes] for view in views])[:most_bytes], length


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _UsageCounts(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None

    def find_cached_tokens(self) -> int | None:
        for details in (self.prompt_tokens_details, self.input_tokens_details):
            if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
                return max(0, int(details["cached_tokens"]))
        cached = self.cache_read_input_tokens
        return max(0, cached) if type(cached) is int else None


class _UsageHolder(msgspec.Struct):
    usage: _UsageCounts | None = None


class _UsageReport(msgspec.Struct):
    """An event or an answer, as far as it reports usage. The Messages and the Responses API have it in an object."""

    usage: _UsageCounts | None = None
    message: _UsageHolder | None = None
    response: _UsageHolder | None = None


class _UsageEvent(_UsageReport):
    choices: list[msgspec.Raw] | None = None


class _FinishedChoice(msgspec.Struct, gc=False):
    finish_reason: Any = None


class _WholeAnswer(_UsageReport):
    """An answer that is not streamed."""

    choices: list[_FinishedChoice] | None = None


class _LastEvent(msgspec.Struct):
    type: str | None = None
    error: Any = None


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens of one request as the engine counted them; chunks are never counted."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reports: int = 0
    """How many times the engine reported usage."""

    def add(self, other: TokenUsage) -> None:
        """Adds the usage of another sequence of the same request."""
        for name in ("cached_tokens", "prompt_tokens", "completion_tokens"):
            own, more = getattr(self, name), getattr(other, name)
            setattr(self, name, more if own is None else own + (more or 0))
        self.reports += other.reports

    def take(self, report: _UsageReport) -> bool:
        """Reads the counts of an event or an answer; returns whether it has any."""
        found = report.usage is not None
        if report.usage is not None:
            self.take_counts(report.usage)
        for holder in (report.message, report.response) if report.message or report.response else ():
            if holder is not None and holder.usage is not None:
                found = True
                self.take_counts(holder.usage)
        return found

    def take_counts(self, counts: _UsageCounts) -> None:
        self.reports += 1
        prompt = counts.prompt_tokens if counts.prompt_tokens is not None else counts.input_tokens
        completion = counts.completion_tokens if counts.completion_tokens is not None else counts.output_tokens
        if prompt is not None:
            self.prompt_tokens = prompt
        if completion is not None:
            self.completion_tokens = completion
        if (
            not counts.prompt_tokens_details is counts.input_tokens_details is counts.cache_read_input_tokens is None
            and (cached := counts.find_cached_tokens()) is not None
        ):
            self.cached_tokens = cached


_decode_asked = msgspec.json.Decoder(RequestFields).decode
_decode_whole = msgspec.json.Decoder(_WholeAnswer).decode
_decode_event = msgspec.json.Decoder(_UsageEvent).decode
_decode_last = msgspec.json.Decoder(_LastEvent).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by decoding for bytes that are not the expected JSON."""


MOST_LEVELS = 500
"""Deepest nesting that is accepted. The limit of decoding is 1,000 levels with Python 3.11, and 27,000 with 3.14."""
_SPAN = 100
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_request_fields(body: bytes) -> RequestFields:
    """Raises one of `UNREADABLE` for a body that does not have the API's format."""
    if not body.isascii():
        body.decode()  # fields that are skipped are not decoded, and engines fail on invalid UTF-8
    if body.count(b"[") + body.count(b"{") > MOST_LEVELS:
        _check_levels(body)
    return _decode_asked(body)


def _check_levels(body: bytes) -> None:
    """Refuses what is nested deeper than `MOST_LEVELS`, up to `_SPAN` levels more: brackets are counted, not walked."""
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    level = 0
    for begin in range(0, len(brackets), _SPAN):
        span = brackets[begin : begin + _SPAN]
        opened = span.count(b"[") + span.count(b"{")
        if level + opened > MOST_LEVELS + _SPAN:
            raise RecursionError(f"it is nested deeper than {MOST_LEVELS} levels")
        level += 2 * opened - len(span)


def add_usage_option(body: bytes, asked: RequestFields) -> bytes:
    """Sets `stream_options.include_usage`, so that the engine reports its token counts."""
    if asked.stream_options is None and b'"stream_options"' not in body:
        # Inserting the field keeps the client's bytes, and is cheap for long prompts.
        brace = body.index(b"{") + 1
        joint = b"" if body[brace:].lstrip()[:1] == b"}" else b","
        return body[:brace] + b'"stream_options":{"include_usage":true}' + joint + body[brace:]
    fields = _decode_fields(body)
    options = _decode_fields(fields["stream_options"]) if asked.stream_options is not None else {}
    options["include_usage"] = msgspec.Raw(b"true")
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


def set_model(body: bytes, name: str) -> bytes:
    """Sets the model's name, for backends that require the served name."""
    encoded = msgspec.json.encode(name)
    if b'"model"' not in body and b"\\u" not in body:  # a key may be written with escapes
        brace = body.index(b"{") + 1
        joint = b"" if body[brace:].lstrip()[:1] == b"}" else b","
        return b'%s"model":%s%s%s' % (body[:brace], encoded, joint, body[brace:])
    return msgspec.json.encode({**_decode_fields(body), "model": msgspec.Raw(encoded)})


def set_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """Sets fields, also those that the client sent: otherwise it could choose an adapter of another tenant."""
    return msgspec.json.encode({**_decode_fields(body), **fields})


def is_stream(content_type: bytes) -> bool:
    return content_type[:17].lower() == b"text/event-stream"


def measure_complete_events(data: bytes) -> int:
    """How many bytes of `data` are complete events; the rest must wait for more data."""
    if data.endswith((b"\n\n", b"\r\n\r\n")):
        return len(data)
    plain, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def may_have_usage(events: bytes) -> bool:
    # In a JSON string quotes are escaped, so the model's text cannot match.
    at = events.find(b'"usage":')
    while at >= 0:
        if events[at + 8 : at + 12].lstrip()[:1] == b"{":
            return True
        at = events.find(b'"usage":', at + 8)  # some engines send `"usage":null` in every event but the last
    return False


def read_usage(events: bytes, usage: TokenUsage, *, drop: bool, adds: bool = False) -> bytes:
    """Reads token counts from complete events; with `drop`, removes events that contain nothing else.

    With `adds`, each report is for another sequence; otherwise the last one is for all of them.
    """
    if not adds and events.startswith(b"data:") and events.find(b"\n\n") == len(events) - 2:  # one event, as usual
        try:
            only = _decode_event(events[5:])
        except UNREADABLE:
            return events
        return b"" if usage.take(only) and drop and only.choices == [] else events
    separator = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    kept = []
    for event in events.split(separator):
        at = event.find(b"data:")
        if at >= 0 and b'"usage"' in event:
            try:
                decoded = _decode_event(event[at + 5 :].strip())
            except UNREADABLE:
                decoded = None
            if decoded is not None:
                report = TokenUsage() if adds else usage
                found = report.take(decoded)
                if adds and found:
                    usage.add(report)
                if found and drop and decoded.choices == []:
                    continue
        kept.append(event)
    return separator.join(kept)


def read_body_usage(body: bytes, usage: TokenUsage) -> str | None:
    """Reads the token counts of an answer that is not streamed; returns its finish reason, if it is a usual one."""
    try:
        answer = _decode_whole(body)
    except UNREADABLE:
        return None
    if answer.usage is not None and answer.message is answer.response is None:
        usage.take_counts(answer.usage)
    else:
        usage.take(answer)
    reason = answer.choices[-1].finish_reason if answer.choices else None
    return reason if type(reason) is str and reason in _FINISH_REASONS else None


def find_finish_reason(*events: bytes) -> str | None:
    """Why the answer ended, from the last of these events that contains a reason."""
    for data in reversed(events):
        # From the end, where the reason is, since answers may be long.
        at = data.rfind(b'_reason"')
        while at >= 0:
            if match := _FINISH.match(data, max(0, at - 7)) or _FINISH.match(data, max(0, at - 5)):
                return str(match[1].decode())
            at = data.rfind(b'_reason"', 0, at)
    return None


def is_complete(api: Api, last_events: bytes) -> bool:
    """Whether a stream that ended with these events was complete, or reported an error."""
    if last_events == _DONE or last_events.endswith(b"\n" + _DONE):
        return True
    last_types = _LAST_TYPES.get(api)
    return last_types is None or any(_is_last(line, last_types) for line in reversed(last_events.splitlines()))


def _is_last(line: bytes, last_types: frozenset[str]) -> bool:
    if not line.startswith(b"data:"):
        return line.removeprefix(b"event:").strip() == b"error"
    data = line[5:].strip()
    if data == b"[DONE]":
        return True
    try:
        event = _decode_last(data)
    except UNREADABLE:
        return False
    return event.error is not None or event.type in last_types


def encode_error(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def encode_error_event(api: Api, message: str, kind: str, code: str, after: bytes = b"") -> bytes:
    """The last event of a stream that failed, in the format of its API; `after` are the events before it."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    if api == "messages":
        body = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    if api == "responses":
        numbers = _SEQUENCE_NUMBER.findall(after)
        event = {**error, "type": "error", "sequence_number": int(numbers[-1]) + 1 if numbers else 0}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"
