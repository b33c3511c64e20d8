"""Validation of request bodies, and responses in OpenAI's JSON format."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from .backend import BackendError, Finish
from .tools import FunctionCall, ToolCallParser
from .worker import TokenLogprob

MAX_STOPS = 16


class BodyFields:
    """The JSON object of a request. A wrong type raises an error instead of being converted."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def read_number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BackendError(f"{name} must be a number", name)
        if not low <= value <= high:
            raise BackendError(f"{name} must be between {low:g} and {high:g}", name)
        return float(value)

    def read_optional_number(self, name: str, low: float, high: float) -> float | None:
        return None if self.body.get(name) is None else self.read_number(name, low, low, high)

    def read_integer(self, name: str, low: int, high: int = 1 << 63) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            raise BackendError(f"{name} must be an integer", name)
        if not low <= value <= high:
            raise BackendError(
                f"{name} must be at least {low}" if value < low else f"{name} must be at most {high}", name
            )
        return int(value)

    def read_flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise BackendError(f"{name} must be true or false", name)
        return value

    def read_stops(self) -> tuple[str, ...]:
        value = self.body.get("stop")
        stops = [value] if isinstance(value, str) else value or []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise BackendError("stop must be a string or a list of strings", "stop")
        if len(stops) > MAX_STOPS:
            raise BackendError(f"stop may contain at most {MAX_STOPS} strings", "stop")
        return tuple(stop for stop in stops if stop)

    def read_messages(self) -> list[dict[str, Any]]:
        value = self.body.get("messages")
        if not isinstance(value, list) or not value:
            raise BackendError("messages must be a non-empty list", "messages")
        return [self._check_message(message, place) for place, message in enumerate(value)]

    def _check_message(self, message: Any, place: int) -> dict[str, Any]:
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BackendError(f"{where} must be an object with a role", where)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(self._read_part(part, where) for part in content)
        if content is not None and not isinstance(content, str):
            raise BackendError(f"{where}.content must be text", where)
        if content is None and not message.get("tool_calls"):
            raise BackendError(f"{where} has no content", where)
        return {**message, "content": content}

    def _read_part(self, part: Any, where: str) -> str:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BackendError(f"{where} contains {kind}: this server supports only text", where)


class ResponseFormat:
    """The JSON format of an endpoint's responses."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, model: str) -> None:
        self.base = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def make_opening(self) -> list[dict[str, Any]]:
        return []

    def make_choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        raise NotImplementedError

    def make_response(
        self, text: str, finish: Finish, usage: dict[str, Any], logprobs: list[TokenLogprob] | None
    ) -> dict[str, Any]:
        return {
            **self.base,
            "object": self.whole_kind,
            "choices": [self.make_choice(text, finish, logprobs)],
            "usage": usage,
        }

    def make_chunks(
        self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None
    ) -> list[dict[str, Any]]:
        raise NotImplementedError

    def make_chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self.base, "object": self.chunk_kind, "choices": list(choices)}

    def make_usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self.make_chunk(), "usage": usage}


class ChatFormat(ResponseFormat):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: str, calls: ToolCallParser | None = None) -> None:
        super().__init__(model)
        self.calls = calls

    def make_choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        content, calls = self._separate(text, finish)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        reason = self._name_finish(finish)
        return {"index": 0, "message": message, "logprobs": self._format_logprobs(logprobs), "finish_reason": reason}

    def _separate(self, text: str, finish: Finish | None) -> tuple[str, list[FunctionCall]]:
        if self.calls is None:
            return text, []
        content, calls = self.calls.feed(text)
        if finish is not None:
            rest, last = self.calls.flush()
            content, calls = content + rest, calls + last
        return content, calls

    def _name_finish(self, finish: Finish | None) -> str | None:
        return "tool_calls" if finish == "stop" and self.calls is not None and self.calls.count else finish

    def make_opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self.make_chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})]

    def make_chunks(
        self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None
    ) -> list[dict[str, Any]]:
        begin = self.calls.count if self.calls is not None else 0
        content, calls = self._separate(text, finish)
        deltas: list[tuple[dict[str, Any], Any]] = []
        if content or logprobs:
            deltas.append(({"content": content}, self._format_logprobs(logprobs)))
        if calls:
            listed = [{"index": index, **call.to_json()} for index, call in enumerate(calls, begin)]
            deltas.append(({"tool_calls": listed}, None))
        found = [
            self.make_chunk({"index": 0, "delta": delta, "logprobs": entry, "finish_reason": None})
            for delta, entry in deltas
        ]
        if finish is not None:
            reason = self._name_finish(finish)
            found.append(self.make_chunk({"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}))
        return found

    def _format_logprobs(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {
                    **_format_token(one.text, one.logprob),
                    "top_logprobs": [_format_token(text, logprob) for text, logprob in one.top],
                }
                for one in logprobs
            ]
        }


class CompletionFormat(ResponseFormat):
    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def make_choice(self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        entry = None
        if logprobs is not None:
            entry = {
                "tokens": [one.text for one in logprobs],
                "token_logprobs": [one.logprob for one in logprobs],
                "top_logprobs": [dict(one.top) for one in logprobs],
            }
        return {"index": 0, "text": text, "logprobs": entry, "finish_reason": finish}

    def make_chunks(
        self, text: str, finish: Finish | None, logprobs: list[TokenLogprob] | None
    ) -> list[dict[str, Any]]:
        return [self.make_chunk(self.make_choice(text, finish, logprobs))] if text or logprobs or finish else []


def _format_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
