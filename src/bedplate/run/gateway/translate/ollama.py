"""Ollama's API in terms of OpenAI's: chat, generate and embeddings. Pure.

https://docs.ollama.com/api, November 2026.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Annotated, Any, ClassVar

import msgspec

from bedplate.run.gateway import sse
from bedplate.run.gateway.errors import read_error
from bedplate.run.gateway.sse import TokenUsage
from bedplate.run.gateway.translate.chat import (
    ChatMessage,
    ChatToolCall,
    EngineAnswer,
    copy_fields,
    decode_answer,
    decode_body,
    make_mistake,
    make_unsupported,
    read_events,
    read_list,
    read_object,
    read_text,
    refuse_fields,
)

_OPTIONS = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "seed": "seed", "stop": "stop", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}  # fmt: skip
"""Options of a request, and the fields of OpenAI's API, or of engines that extend it."""
_LOADING_OPTIONS = frozenset([
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep", "low_vram", "numa", "f16_kv",
    "vocab_only", "use_mlock", "draft_num_predict",
])  # fmt: skip
"""Options for loading a model, which bedplate has loaded: they have no effect."""
_LOGPROBS = dict.fromkeys(("logprobs", "top_logprobs"), "use /v1/chat/completions")
_NOT_IN_TEMPLATE = dict.fromkeys(
    ("suffix", "context", "template", "raw"), "the prompt is a message in the model's template; use /v1/completions"
)
_OF_IMAGES = dict.fromkeys(("width", "height", "steps"), "no model here makes images")
_MEDIA_TYPES = {b"\xff\xd8": "image/jpeg", b"\x89P": "image/png", b"GI": "image/gif", b"RI": "image/webp"}


class _VectorRow(msgspec.Struct):
    embedding: Any


class _VectorRows(msgspec.Struct):
    data: Annotated[list[_VectorRow], msgspec.Meta(min_length=1)]


_decode_vectors = msgspec.json.Decoder(_VectorRows).decode


class OllamaTranslation:
    """One request of Ollama's API, and its answer."""

    content_type = b"application/x-ndjson"
    api: ClassVar[sse.Api] = "chat"
    target = b"/v1/chat/completions"

    def __init__(self) -> None:
        self._started_ns = monotonic_ns()
        self.name = ""
        """The model, as the client called it."""
        self.has_prompt = True
        """Without one, Ollama only loads the model."""
        self.restart()

    def restart(self) -> None:
        self._calls: dict[int, ChatToolCall] = {}
        self._first_ns: int | None = None
        self._finish: str | None = None
        self._failed = False

    # the request

    def to_chat(self, body: bytes) -> bytes:
        given = decode_body(body)
        self.name = str(given.get("model") or "")
        refuse_fields(given, _LOGPROBS)
        asked = self._read(given)
        self.has_prompt = any(message["role"] != "system" for message in asked["messages"])
        if self.name:
            asked["model"] = self.name
        _read_options(given.get("options"), asked)
        _read_format(given.get("format"), asked)
        think = given.get("think")
        if isinstance(think, str):
            asked["reasoning_effort"] = think
        elif isinstance(think, bool):
            asked["chat_template_kwargs"] = {"enable_thinking": think}
        if given.get("stream") is not False:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(asked)

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": _read_messages(read_list(given.get("messages") or [], "messages"))}
        copy_fields(given, asked, "tools")
        return asked

    # the answer

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        answer = decode_answer(body)
        choice = answer.choices[0] if answer.choices else None
        message = (choice.message if choice is not None else None) or ChatMessage()
        text = message.content or (choice.text if choice is not None else None) or ""
        self._finish = choice.finish_reason if choice is not None else None
        shown = self._write_part(text, message.thinking, list(message.tool_calls or ()))
        return msgspec.json.encode({**self._begin(), **shown, **self._describe_end(usage)})

    def write_stream(self, data: bytes) -> bytes:
        return b"".join(self._write_event(answer) for answer in read_events(data))

    def write_end(self, usage: TokenUsage) -> bytes:
        if self._failed:
            return b""
        shown = self._write_part("", "", list(self._calls.values()))
        return _encode({**self._begin(), **shown, **self._describe_end(usage)})

    def write_loaded(self) -> bytes:
        """The answer to a request without a prompt."""
        return _encode({**self._begin(), **self._write_part("", "", []), "done": True, "done_reason": "load"})

    def write_error(self, status: int, body: bytes) -> bytes:
        return msgspec.json.encode({"error": read_error(status, body).message})

    def _write_event(self, answer: EngineAnswer) -> bytes:
        if answer.error is not None:
            self._failed = True
            message = answer.error.get("message") if isinstance(answer.error, dict) else None
            return _encode({"error": str(message or answer.error)})
        if not answer.choices:
            return b""
        choice = answer.choices[0]
        delta = choice.delta or ChatMessage()
        self._finish = choice.finish_reason or self._finish
        for call in delta.tool_calls or ():
            self._add_call(call)
        text = delta.content or choice.text or ""
        if not text and not delta.thinking:
            return b""
        if self._first_ns is None:
            self._first_ns = monotonic_ns()
        return _encode({**self._begin(), **self._write_part(text, delta.thinking, []), "done": False})

    def _add_call(self, call: ChatToolCall) -> None:
        """Ollama sends a call as a whole, so its parts are collected."""
        known = self._calls.get(call.index)
        if known is None or known.function is None:
            self._calls[call.index] = call
        elif call.function is not None:
            known.function.arguments = known.arguments + call.arguments

    def _write_part(self, text: str, thinking: str, calls: list[ChatToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": read_object(call.arguments)}} for call in calls
            ]
        return {"message": message}

    def _begin(self) -> dict[str, Any]:
        return {"model": self.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}

    def _describe_end(self, usage: TokenUsage) -> dict[str, Any]:
        now = monotonic_ns()
        first = self._first_ns or now
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": now - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens or 0,
            "prompt_eval_duration": first - self._started_ns,
            "eval_count": usage.completion_tokens or 0,
            "eval_duration": now - first,
        }


class GenerateTranslation(OllamaTranslation):
    """`/api/generate`: one prompt, in the model's template."""

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
        refuse_fields(given, _NOT_IN_TEMPLATE)
        refuse_fields(given, _OF_IMAGES)
        messages: list[dict[str, Any]] = []
        if given.get("system"):
            messages.append({"role": "system", "content": given["system"]})
        if given.get("prompt") or given.get("images"):
            messages.append({"role": "user", "content": given.get("prompt") or "", "images": given.get("images")})
        return {"messages": _read_messages(messages)}

    def _write_part(self, text: str, thinking: str, calls: list[ChatToolCall]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class EmbedTranslation(OllamaTranslation):
    """`/api/embed`: one vector for each text."""

    api: ClassVar[sse.Api] = "embeddings"
    target = b"/v1/embeddings"

    def to_chat(self, body: bytes) -> bytes:
        given = decode_body(body)
        self.name = str(given.get("model") or "")
        asked: dict[str, Any] = {"input": self._read_input(given), "encoding_format": "float"}
        copy_fields(given, asked, "model", "dimensions")
        return msgspec.json.encode(asked)

    def _read_input(self, given: dict[str, Any]) -> Any:
        return given.get("input")

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        vectors = [row.embedding for row in _decode_vectors(body).data]
        took_ns = monotonic_ns() - self._started_ns
        times = {"total_duration": took_ns, "load_duration": 0, "prompt_eval_count": usage.prompt_tokens or 0}
        return msgspec.json.encode({"model": self.name, "embeddings": vectors, **times})


class OldEmbedTranslation(EmbedTranslation):
    """`/api/embeddings`, which `/api/embed` replaced: one text."""

    def _read_input(self, given: dict[str, Any]) -> Any:
        return read_text(given.get("prompt"), "prompt")

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        return msgspec.json.encode({"embedding": _decode_vectors(body).data[0].embedding})


def _encode(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _read_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls have no ids in Ollama's API: results belong to the calls before them, by name and in order."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        content = read_text(message.get("content") or "", where)
        made: dict[str, Any] = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            made["tool_calls"] = []
            for number, call in enumerate(read_list(calls, where)):
                function = call.get("function")
                if not isinstance(function, dict):
                    raise make_mistake(f"{where} has a tool call without a function", where)
                name, arguments = str(function.get("name")), function.get("arguments")
                call_id = str(call.get("id") or f"call_{place}_{number}")
                text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
                entry = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
                made["tool_calls"].append(entry)
                open_calls.append((name, call_id))
        if made["role"] == "tool":
            called = message.get("tool_name") or message.get("name")
            found = next((one for one in open_calls if one[0] == called), open_calls[0] if open_calls else None)
            if found is None:
                raise make_mistake(f"{where} is the result of a tool that was not called", where)
            open_calls.remove(found)
            made["tool_call_id"] = found[1]
        if images := message.get("images"):
            if not isinstance(images, list):
                raise make_mistake(f"{where}.images must be a list", where)
            part = {"type": "text", "text": made["content"]}
            made["content"] = [*(_read_image(one, where) for one in images), part]
        messages.append(made)
    return messages


def _read_image(data: Any, where: str) -> dict[str, Any]:
    text = read_text(data, where)
    try:
        kind = _MEDIA_TYPES.get(base64.b64decode(text[:8])[:2], "image/png")
    except ValueError:
        raise make_mistake(f"{where} has an image that is not base64", where) from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{text}"}}


def _read_options(given: Any, asked: dict[str, Any]) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise make_mistake("options must be an object", "options", "invalid_value")
    for name, value in given.items():
        if value is None or name in _LOADING_OPTIONS:
            continue
        field = _OPTIONS.get(name)
        if field is None:
            raise make_unsupported(f"options.{name} is not supported", f"options.{name}")
        if field != "max_tokens" or (isinstance(value, int) and value >= 0):  # -1: until the model ends
            asked[field] = value
            if name == "repeat_penalty":  # llama.cpp's name
                asked[name] = value


def _read_format(form: Any, asked: dict[str, Any]) -> None:
    if form == "json":
        asked["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    elif form:
        raise make_mistake("format must be json or a JSON schema", "format", "invalid_response_format")
