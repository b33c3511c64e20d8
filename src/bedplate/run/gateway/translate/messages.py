"""Anthropic's Messages API in terms of chat completions. Pure.

https://platform.claude.com/docs/en/api/messages and .../build-with-claude/streaming, November 2026.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bedplate.run.gateway.errors import encode_error, read_error
from bedplate.run.gateway.sse import TokenUsage
from bedplate.run.gateway.translate.chat import (
    ChatChoice,
    ChatMessage,
    EngineAnswer,
    arrange_messages,
    copy_fields,
    count_uncached,
    decode_answer,
    decode_body,
    join_parts,
    make_id,
    make_mistake,
    make_unsupported,
    read_events,
    read_list,
    read_object,
    read_text,
    refuse_fields,
)

_HOSTED = {
    "mcp_servers": "tools do not run here; declare them with an input_schema",
    "container": "tools do not run here; declare them with an input_schema",
    "thread": "conversations are not stored; send the whole conversation as messages",
}
"""Fields that need a server that runs tools or stores conversations."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesTranslation:
    """One request of the Messages API, and its answer."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self) -> None:
        self._stops: frozenset[str] = frozenset()
        self.restart()

    def restart(self) -> None:
        """Forgets the beginning of an answer, before the request is sent to another engine."""
        self._id = make_id("msg")
        self._has_begun = False
        self._open: str | int | None = None
        """The block that is being sent: text, thinking, or the index of a tool call."""
        self._num_blocks = 0
        self._has_calls = False
        self._reason: tuple[str, str | None] = ("end_turn", None)
        self._failed = False

    # the request

    def to_chat(self, body: bytes) -> bytes:
        given = decode_body(body)
        refuse_fields(given, _HOSTED)
        chat: dict[str, Any] = {"messages": arrange_messages(_read_messages(given))}
        copy_fields(given, chat, "model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        if stops := given.get("stop_sequences"):
            chat["stop"] = stops
            self._stops = frozenset(stops)
        if given.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        if tools := read_list(given.get("tools") or [], "tools"):
            chat["tools"] = [_read_tool(tool) for tool in tools]
            _read_choice(given.get("tool_choice"), chat)
        config = given.get("output_config")
        form = config.get("format") if isinstance(config, dict) else given.get("output_format")
        if isinstance(form, dict):
            schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return msgspec.json.encode(chat)

    # the answer

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        answer = decode_answer(body)
        choice = answer.choices[0] if answer.choices else ChatChoice()
        message = choice.message or ChatMessage()
        blocks: list[dict[str, Any]] = []
        if message.thinking:
            blocks.append({"type": "thinking", "thinking": message.thinking, "signature": ""})
        if text := message.content or message.refusal:
            blocks.append({"type": "text", "text": text})
        for call in message.tool_calls or ():
            name, values = call.name, read_object(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id or make_id("toolu"), "name": name, "input": values})
        self._has_calls = bool(message.tool_calls)
        self._read_reason(choice)
        return msgspec.json.encode(
            self._describe(answer.model, blocks, self._reason, {**_count(usage), "output_tokens": _get_output(usage)})
        )

    def write_stream(self, data: bytes) -> bytes:
        """The events for a part of the stream."""
        return b"".join(self._write_event(answer) for answer in read_events(data))

    def write_end(self, usage: TokenUsage) -> bytes:
        if self._failed:
            return b""
        reason, stop = self._reason
        counts = {**_count(usage), "output_tokens": _get_output(usage)}
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": counts}
        return self._close() + _encode(last) + _encode({"type": "message_stop"})

    def write_error(self, status: int, body: bytes) -> bytes:
        error = read_error(status, body)
        return encode_error("messages", status, error.message, error.kind, error.code)

    def _write_event(self, answer: EngineAnswer) -> bytes:
        if answer.error is not None:
            self._failed = True
            message = answer.error.get("message") if isinstance(answer.error, dict) else None
            error = {"type": "api_error", "message": str(message or answer.error)}
            return _encode({"type": "error", "error": error})
        out = b""
        if not self._has_begun:
            self._has_begun = True
            usage = {**_count(TokenUsage()), "output_tokens": 0}
            out = _encode({"type": "message_start", "message": self._describe(answer.model, [], (None, None), usage)})
        if not answer.choices:
            return out
        choice = answer.choices[0]
        delta = choice.delta or ChatMessage()
        if delta.thinking:
            out += self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._write_delta({"type": "thinking_delta", "thinking": delta.thinking})
        if text := delta.content or delta.refusal:
            out += self._open_block("text", {"type": "text", "text": ""})
            out += self._write_delta({"type": "text_delta", "text": text})
        for call in delta.tool_calls or ():
            self._has_calls = True
            if call.index != self._open:
                block = {"type": "tool_use", "id": call.id or make_id("toolu"), "name": call.name, "input": {}}
                out += self._open_block(call.index, block)
            if call.arguments:
                out += self._write_delta({"type": "input_json_delta", "partial_json": call.arguments})
        if choice.finish_reason is not None:
            self._read_reason(choice)
        return out

    def _open_block(self, kind: str | int, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open = kind
        return out + _encode({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _encode({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _write_delta(self, delta: dict[str, Any]) -> bytes:
        return _encode({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _read_reason(self, choice: ChatChoice) -> None:
        found = choice.stop_reason
        if isinstance(found, str) and found in self._stops:
            self._reason = "stop_sequence", found
        elif self._has_calls and choice.finish_reason == "stop":
            self._reason = "tool_use", None
        else:
            self._reason = _STOP_REASONS.get(choice.finish_reason or "stop", "end_turn"), None

    def _describe(
        self, model: str | None, blocks: list[dict[str, Any]], reason: tuple[str | None, str | None], usage: Any
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model or "",
            "content": blocks,
            "stop_reason": reason[0],
            "stop_sequence": reason[1],
            "usage": usage,
        }


class CountTranslation(MessagesTranslation):
    """A request for the number of tokens of a prompt."""

    def to_chat(self, body: bytes) -> bytes:
        given = msgspec.json.decode(super().to_chat(body))
        given.pop("stream", None)
        given.pop("stream_options", None)
        # For an engine that counts no prompts: it computes the prompt, and reports its length with the first token.
        return msgspec.json.encode({**given, "max_tokens": 1})

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        answer = msgspec.json.decode(body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else answer
        count = answer.get("count") if isinstance(answer, dict) else None
        if type(count) is not int:
            count = len(tokens) if isinstance(tokens, list) else usage.prompt_tokens or 0
        return msgspec.json.encode({"input_tokens": count})


def _encode(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _count(usage: TokenUsage) -> dict[str, int]:
    return {
        "input_tokens": count_uncached(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens or 0,
    }


def _get_output(usage: TokenUsage) -> int:
    return usage.completion_tokens or 0


# messages


def _read_messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if (system := given.get("system")) is not None:
        text = system if isinstance(system, str) else "\n".join(_read_system(read_list(system, "system")))
        if text:
            messages.append({"role": "system", "content": text})
    for place, message in enumerate(read_list(given.get("messages"), "messages")):
        role, content, where = message.get("role"), message.get("content"), f"messages[{place}].content"
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_read_assistant(read_list(content, where), where))
        else:
            messages += _read_user(str(role), read_list(content, where), where)
    return messages


def _read_system(blocks: list[dict[str, Any]]) -> list[str]:
    return [read_text(block.get("text"), "system") for block in blocks]


def _read_assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(read_text(block.get("text"), where))
        elif kind == "thinking":
            thoughts.append(read_text(block.get("thinking"), where))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": read_text(block.get("name"), where), "arguments": arguments}
            calls.append({"id": read_text(block.get("id"), where), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # no engine can read that
            raise make_unsupported(f"{where} has a block of type {kind}, which this endpoint does not support", where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(role: str, blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The results of tools are messages of their own, before what the user adds."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content, failed = block.get("content"), block.get("is_error") is True
            inner = [] if content is None else content
            found = [{"type": "text", "text": inner}] if isinstance(inner, str) else _read_parts(inner, where)
            if failed and all(part["type"] == "text" for part in found):
                found = [{"type": "text", "text": "\n".join(["Error:", *(part["text"] for part in found)])}]
            # Images have no place in a tool's message: they follow as the user's.
            parts += [part for part in found if part["type"] != "text"]
            text = "\n".join(part["text"] for part in found if part["type"] == "text")
            results.append(
                {"role": "tool", "tool_call_id": read_text(block.get("tool_use_id"), where), "content": text}
            )
        else:
            parts += _read_parts([block], where)
    return [*results, {"role": role, "content": join_parts(parts)}] if parts or not results else results


def _read_parts(blocks: Any, where: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for block in read_list(blocks, where):
        kind, source = block.get("type"), block.get("source")
        source = source if isinstance(source, dict) else {}
        if kind == "text":
            parts.append({"type": "text", "text": read_text(block.get("text"), where)})
        elif kind == "image" and source.get("type") == "base64":
            data = f"data:{source.get('media_type') or 'image/png'};base64,{read_text(source.get('data'), where)}"
            parts.append({"type": "image_url", "image_url": {"url": data}})
        elif kind == "image" and source.get("type") == "url":
            parts.append({"type": "image_url", "image_url": {"url": read_text(source.get("url"), where)}})
        elif kind == "document" and source.get("type") == "text":
            parts.append({"type": "text", "text": read_text(source.get("data"), where)})
        else:
            shown = f"{kind} from {source['type']}" if source.get("type") else kind
            raise make_unsupported(f"{where} has a block of type {shown}, which this endpoint does not support", where)
    return parts


# tools


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"the tool type {tool['type']} belongs to Anthropic's service; declare tools with an input_schema"
        raise make_unsupported(message, "tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise make_mistake(f"the tool {tool.get('name')} has no input_schema", "tools", "invalid_tools")
    function = {"name": tool.get("name"), "parameters": schema}
    copy_fields(tool, function, "description", "strict")
    return {"type": "function", "function": function}


def _read_choice(given: Any, chat: dict[str, Any]) -> None:
    if not isinstance(given, dict):
        return
    kind = given.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": given.get("name")}}
    else:
        chat["tool_choice"] = {"any": "required"}.get(str(kind), kind)
    if given.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False
