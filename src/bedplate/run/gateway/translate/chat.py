"""Answers of chat completions, as far as other APIs have a place for them. Pure."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from bedplate.run.gateway.request_checks import RequestMistake
from bedplate.run.gateway.sse import UNREADABLE, TokenUsage


class ChatFunction(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class ChatToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: ChatFunction | None = None

    @property
    def name(self) -> str:
        return (self.function.name if self.function is not None else None) or ""

    @property
    def arguments(self) -> str:
        """As JSON text; some servers answer with an object."""
        given = self.function.arguments if self.function is not None else None
        if given is None:
            return ""
        return given if isinstance(given, str) else msgspec.json.encode(given).decode()


class ChatMessage(msgspec.Struct):
    """A message of an answer, or the next part of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None

    @property
    def thinking(self) -> str:
        """The reasoning: engines use either name for it, and some use both."""
        return self.reasoning_content or self.reasoning or ""


class ChatChoice(msgspec.Struct):
    delta: ChatMessage | None = None
    message: ChatMessage | None = None
    text: str | None = None
    """Of the completions API."""
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM's name for the stop string that was found."""


class EngineAnswer(msgspec.Struct):
    """An answer, or one event of a stream."""

    model: str | None = None
    choices: list[ChatChoice] = []
    error: Any = None
    type: str | None = None
    """`error`: an event that the gateway made, in the format of the client's API."""
    message: str | None = None
    code: str | None = None
    """Of such an event."""


_SPARE_LEVELS = 32
decode_answer = msgspec.json.Decoder(EngineAnswer).decode


def read_events(data: bytes) -> list[EngineAnswer]:
    """The events in a part of a stream; those that are not valid are skipped."""
    found = []
    for line in data.splitlines():
        if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
            try:
                found.append(decode_answer(text))
            except UNREADABLE:
                continue
    return found


def make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def read_object(text: str) -> dict[str, Any]:
    """The arguments of a tool call; a model may write text that is no JSON object, which is kept as one."""
    try:
        value = msgspec.json.decode(text or "{}")
    except UNREADABLE:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def decode_body(body: bytes) -> dict[str, Any]:
    """The body of a request. Its fields were checked as far as all APIs have them."""
    # What is nested almost too deeply to be decoded could not be encoded as a part of the translation or the answer.
    levels = _SPARE_LEVELS if body.count(b"[") + body.count(b"{") > _SPARE_LEVELS else 0
    value = msgspec.json.decode(b"[" * levels + body + b"]" * levels)
    for _ in range(levels):
        (value,) = value
    if not isinstance(value, dict):
        raise make_mistake("the body must be a JSON object", "body")
    return value


def make_mistake(message: str, param: str, code: str = "invalid_messages") -> RequestMistake:
    return RequestMistake(message, code, param)


def make_unsupported(message: str, param: str) -> RequestMistake:
    """For a field that has no counterpart in chat completions: it is rejected, never ignored."""
    return RequestMistake(message, "unsupported_parameter", param)


def refuse_fields(given: dict[str, Any], reasons: dict[str, str]) -> None:
    """Raises `RequestMistake` for the first of these fields that has a value."""
    for name, reason in reasons.items():
        if given.get(name):
            raise make_unsupported(f"{name} is not supported: {reason}", name)


def read_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise make_mistake(f"{param} must be a text", param)
    return value


def read_list(value: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise make_mistake(f"{param} must be a list of objects", param)
    return value


def join_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: one text, since many templates accept nothing else, unless it has images."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def arrange_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one of the system, at the beginning, and one of the user at a time.

    Many chat templates accept nothing else. A later one of the system stays where it is, as a marked part of the
    user's, so that no prefix of the prompt changes.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] == "system" and last and last["role"] != "system":
            text = join_parts(_list_parts(message))
            message = {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
        if message["role"] in ("system", "user") and last.get("role") == message["role"]:
            found[-1] = {**last, "content": join_parts([*_list_parts(last), *_list_parts(message)])}
        else:
            found.append(message)
    return found


def _list_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def copy_fields(source: dict[str, Any], target: dict[str, Any], *names: str) -> None:
    for name in names:
        if source.get(name) is not None:
            target[name] = source[name]


def count_uncached(usage: TokenUsage) -> int:
    return max(0, (usage.prompt_tokens or 0) - (usage.cached_tokens or 0))
