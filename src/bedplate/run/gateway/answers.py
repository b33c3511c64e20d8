"""The text of answers, to count the tokens of those for which the engine reported no usage."""

from __future__ import annotations

from typing import Any

import msgspec

from bedplate.run.gateway import sse


class _CalledFunction(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _CalledFunction | None = None


class _AnswerMessage(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: list[_ToolCall] | None = None

    def list_parts(self) -> list[Any]:
        calls = [call.function for call in self.tool_calls or () if call.function is not None]
        called = [part for one in calls for part in (one.name, one.arguments)]
        return [self.reasoning_content, self.reasoning, self.content, self.refusal, *called]


class _AnswerChoice(msgspec.Struct):
    index: Any = 0
    text: Any = None
    delta: _AnswerMessage | None = None
    message: _AnswerMessage | None = None
    finish_reason: Any = None


class _AnswerEvent(msgspec.Struct):
    choices: list[_AnswerChoice] | None = None


class _BlockDelta(msgspec.Struct):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None


class _TypedEvent(msgspec.Struct):
    """An event of the Messages API or the Responses API."""

    type: str = ""
    delta: _BlockDelta | str | None = None


_decode_answer = msgspec.json.Decoder(_AnswerEvent).decode
_decode_typed = msgspec.json.Decoder(_TypedEvent).decode


class AnswerText:
    """The generated text of each choice."""

    __slots__ = ("_parts", "finished", "stopped")

    def __init__(self) -> None:
        self._parts: dict[int, list[str]] = {}
        self.finished: set[int] = set()
        """Choices that are complete."""
        self.stopped: set[int] = set()
        """Choices that the model ended itself, with a token that is not part of the text."""

    @property
    def texts(self) -> dict[int, str]:
        return {index: "".join(parts) for index, parts in self._parts.items()}

    def read_events(self, api: sse.Api, events: bytes) -> None:
        for line in events.splitlines():
            if line.startswith(b"data:"):
                self._read(api, line[5:].strip())

    def read_body(self, body: bytes) -> None:
        """Reads a complete answer of the chat or completions API."""
        self._read("chat", body)

    def _read(self, api: sse.Api, data: bytes) -> None:
        try:
            if api in ("messages", "responses"):
                self._read_typed(_decode_typed(data))
                return
            for choice in _decode_answer(data).choices or ():
                self._read_choice(choice)
        except sse.UNREADABLE:
            return

    def _read_choice(self, choice: _AnswerChoice) -> None:
        index = choice.index if type(choice.index) is int else 0
        message = choice.delta or choice.message
        self._add(index, choice.text, *(message.list_parts() if message is not None else ()))
        if choice.finish_reason is not None:
            self.finished.add(index)
            if choice.finish_reason != "length":
                self.stopped.add(index)

    def _read_typed(self, event: _TypedEvent) -> None:
        delta = event.delta
        if isinstance(delta, str):
            if event.type.endswith(".delta"):
                self._add(0, delta)
        elif delta is not None:
            self._add(0, delta.text, delta.thinking, delta.partial_json)

    def _add(self, index: int, *parts: Any) -> None:
        self._parts.setdefault(index, []).extend(part for part in parts if isinstance(part, str) and part)
