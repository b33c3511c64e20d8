"""OpenAI's Responses API in terms of chat completions. Pure.

https://platform.openai.com/docs/api-reference/responses and .../responses-streaming, November 2026.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from bedplate.run.gateway.sse import TokenUsage
from bedplate.run.gateway.translate.chat import (
    ChatChoice,
    ChatMessage,
    ChatToolCall,
    EngineAnswer,
    arrange_messages,
    copy_fields,
    decode_answer,
    decode_body,
    join_parts,
    make_id,
    make_mistake,
    make_unsupported,
    read_events,
    read_list,
    read_text,
    refuse_fields,
)

_HOSTED = {
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "conversations are not stored; send the whole conversation as input",
    "prompt": "prompt templates are not stored; send the prompt as input",
    "background": "responses are not stored; use stream",
    "moderation": "inputs and answers are not moderated here",
    "top_logprobs": "use /v1/chat/completions",
}
"""Fields that need a server that stores responses, or have no counterpart."""
_ROLES = {"developer": "system"}
_SHOWN = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "reasoning", "text", "user")


class ResponsesTranslation:
    """One request of the Responses API, and its answer."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}
        self._namespaces: dict[str, dict[str, Any]] = {}
        """For each function that the engine gets of a namespace: the name and the namespace that the client knows."""
        self.restart()

    def restart(self) -> None:
        """Forgets the beginning of an answer, before the request is sent to another engine."""
        self._id = make_id("resp")
        self._at = int(time.time())
        self._model = ""
        self._number = 0
        self._has_begun = False
        self._items: list[dict[str, Any]] = []
        """The complete items of the output."""
        self._open: dict[str, Any] | None = None
        self._open_call: int | None = None
        """The index of the tool call that is being sent."""
        self._finish: str | None = None
        self._failed = False

    # the request

    def to_chat(self, body: bytes) -> bytes:
        given = self._given = decode_body(body)
        refuse_fields(given, _HOSTED)
        if given.get("truncation") == "auto":
            raise make_unsupported("truncation auto is not supported; shorten the input", "truncation")
        chat: dict[str, Any] = {"messages": arrange_messages(_read_input(given))}
        copy_fields(given, chat, "model", "temperature", "top_p", "stream", "user")
        if given.get("max_output_tokens") is not None:
            chat["max_tokens"] = given["max_output_tokens"]
        if given.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        if tools := read_list(given.get("tools") or [], "tools"):
            chat["tools"] = self._read_tools(tools)
            _read_choice(given.get("tool_choice"), chat)
            if given.get("parallel_tool_calls") is False:
                chat["parallel_tool_calls"] = False
        reasoning, text = given.get("reasoning"), given.get("text")
        if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
            chat["reasoning_effort"] = reasoning["effort"]
        if isinstance(text, dict) and isinstance(text.get("format"), dict):
            _read_format(text["format"], chat)
        return msgspec.json.encode(chat)

    def _read_tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The functions; those in a namespace get names that have it, which their calls lose again."""
        found = []
        for tool in tools:
            if tool.get("type") != "namespace":
                found.append(_read_tool(tool))
                continue
            for inner in read_list(tool.get("tools"), "tools"):
                function = _read_tool(inner)
                name = _join_name(tool.get("name"), inner.get("name"), "tools")
                self._namespaces[name] = {"name": inner.get("name"), "namespace": tool.get("name")}
                function["function"]["name"] = name
                found.append(function)
        return found

    # the answer

    def write_whole(self, body: bytes, usage: TokenUsage) -> bytes:
        answer = decode_answer(body)
        self._model = answer.model or ""
        choice = answer.choices[0] if answer.choices else ChatChoice()
        message = choice.message or ChatMessage()
        if message.thinking:
            self._items.append(_make_reasoning(message.thinking))
        if text := message.content or message.refusal:
            self._items.append(_make_message(text))
        self._items += [self._make_call(call, call.arguments) for call in message.tool_calls or ()]
        self._finish = choice.finish_reason
        return msgspec.json.encode(self._describe(usage))

    def write_stream(self, data: bytes) -> bytes:
        return b"".join(self._write_event(answer) for answer in read_events(data))

    def write_end(self, usage: TokenUsage) -> bytes:
        if self._failed:
            return b""
        out = self._close()
        response = self._describe(usage)
        return out + self._encode(f"response.{response['status']}", response=response)

    def write_error(self, status: int, body: bytes) -> bytes:
        return body  # it has the format of OpenAI's APIs

    def _write_event(self, answer: EngineAnswer) -> bytes:
        if answer.error is not None or answer.type == "error":
            return self._write_failure(answer)
        out = b""
        if not self._has_begun:
            self._has_begun, self._model = True, answer.model or ""
            response = self._describe(None)
            out = self._encode("response.created", response=response)
            out += self._encode("response.in_progress", response=response)
        if not answer.choices:
            return out
        choice = answer.choices[0]
        delta = choice.delta or ChatMessage()
        if delta.thinking:
            out += self._add_text("reasoning", "reasoning_text", delta.thinking)
        if text := delta.content or delta.refusal:
            out += self._add_text("message", "output_text", text)
        for call in delta.tool_calls or ():
            out += self._add_call(call)
        self._finish = choice.finish_reason or self._finish
        return out

    def _write_failure(self, answer: EngineAnswer) -> bytes:
        """An error of the engine, or of the gateway, in the middle of the stream."""
        self._failed = True
        error = answer.error if isinstance(answer.error, dict) else {}
        message = error.get("message") or answer.message or "the engine failed"
        return self._encode("error", code=error.get("code") or answer.code, message=str(message), param=None)

    def _add_text(self, kind: str, part_kind: str, text: str) -> bytes:
        out = b""
        if self._open is None or self._open["type"] != kind:
            out = self._close()
            item = _make_reasoning("") if kind == "reasoning" else _make_message("", "in_progress")
            part, item["content"] = item["content"][0], []
            out += self._begin(item)
            item["content"].append(part)
            out += self._encode("response.content_part.added", **self._place(), content_index=0, part=part)
        if self._open is not None:
            self._open["content"][0]["text"] += text
        name = f"response.{part_kind}.delta"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return out + self._encode(name, **self._place(), content_index=0, delta=text, **more)

    def _add_call(self, call: ChatToolCall) -> bytes:
        out = b""
        if self._open_call != call.index:
            out = self._close()
            out += self._begin({**self._make_call(call, ""), "status": "in_progress"})
            self._open_call = call.index
        if call.arguments and self._open is not None:
            self._open["arguments"] += call.arguments
            out += self._encode("response.function_call_arguments.delta", **self._place(), delta=call.arguments)
        return out

    def _make_call(self, call: ChatToolCall, arguments: str) -> dict[str, Any]:
        return {
            "id": make_id("fc"),
            "type": "function_call",
            "call_id": call.id or make_id("call"),
            **self._namespaces.get(call.name, {"name": call.name}),
            "arguments": arguments,
            "status": "completed",
        }

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = item
        return self._encode("response.output_item.added", output_index=len(self._items), item=item)

    def _close(self) -> bytes:
        """Ends the open item."""
        item = self._open
        if item is None:
            return b""
        place = self._place()
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            out = self._encode(name, **place, name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            out = self._encode(f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **more)
            out += self._encode("response.content_part.done", **place, content_index=0, part=part)
        if "status" in item:
            item["status"] = "incomplete" if self._finish == "length" else "completed"
        out += self._encode("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = self._open_call = None
        return out

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._open["id"] if self._open is not None else "", "output_index": len(self._items)}

    def _encode(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))

    def _describe(self, usage: TokenUsage | None) -> dict[str, Any]:
        """The response; without usage, its beginning."""
        given = self._given
        is_cut = self._finish in ("length", "content_filter")
        reason = "max_output_tokens" if self._finish == "length" else "content_filter"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if is_cut and usage is not None else None,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "truncation": "disabled",
            "usage": _describe_usage(usage) if usage is not None else None,
            **{name: given.get(name) for name in _SHOWN},
        }


def _describe_usage(usage: TokenUsage) -> dict[str, Any]:
    read, written = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def _make_message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": make_id("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}


def _make_reasoning(text: str) -> dict[str, Any]:
    return {
        "id": make_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


# the input


def _read_input(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions := given.get("instructions"):
        messages.append({"role": "system", "content": read_text(instructions, "instructions")})
    items = given.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    thoughts, shown = "", list[dict[str, Any]]()
    for place, item in enumerate(read_list(items, "input")):
        kind, where = item.get("type") or "message", f"input[{place}]"
        if shown and kind != "function_call_output":
            messages.append({"role": "user", "content": shown})
            shown = []
        if kind == "reasoning":
            thoughts += _read_reasoning(item, where)
        elif kind == "function_call":
            name = _join_name(item.get("namespace"), item.get("name"), where)
            arguments = read_text(item.get("arguments"), where)
            call_id = read_text(item.get("call_id"), where)
            function = {"name": name, "arguments": arguments}
            _extend_assistant(messages)["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            content = _read_content(item.get("output"), where)
            call_id = read_text(item.get("call_id"), where)
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            # Images have no place in a tool's message: they follow as the user's.
            shown += [part for part in parts if part["type"] != "text"]
        elif kind == "message":
            role = str(item.get("role"))
            content = _read_content(item.get("content"), where)
            messages.append({"role": _ROLES.get(role, role), "content": content})
        else:
            raise make_unsupported(f"{where} has the type {kind}, which this endpoint does not support", where)
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return [*messages, {"role": "user", "content": shown}] if shown else messages


def _extend_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a tool call belongs to: the assistant's last one, if nothing came after it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", [])
    return messages[-1]


def _read_reasoning(item: dict[str, Any], where: str) -> str:
    """Its text, if it has one: encrypted reasoning comes from another service."""
    parts = [*read_list(item.get("content") or [], where), *read_list(item.get("summary") or [], where)]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _read_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in read_list(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": read_text(part.get("text"), where)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": read_text(part.get("refusal"), where)})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise make_unsupported(f"{where} has a part of type {kind}, which this endpoint does not support", where)
    return join_parts(parts)


# tools and formats


def _join_name(namespace: Any, name: Any, where: str) -> str:
    """The name of a function for the engine; vLLM joins it in the same way."""
    text = read_text(name, where)
    return f"{read_text(namespace, where)}__{text}" if namespace else text


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"the tool type {tool.get('type')} belongs to OpenAI's service; declare tools of type function"
        raise make_unsupported(message, "tools")
    function: dict[str, Any] = {"name": tool.get("name")}
    copy_fields(tool, function, "description", "parameters", "strict")
    return {"type": "function", "function": function}


def _read_choice(given: Any, chat: dict[str, Any]) -> None:
    if isinstance(given, str):
        chat["tool_choice"] = given
    elif isinstance(given, dict) and given.get("type") == "function":
        name = _join_name(given.get("namespace"), given.get("name"), "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(given, dict) and given.get("type") == "allowed_tools":
        allowed = read_list(given.get("tools") or [], "tool_choice")
        names = {_join_name(tool.get("namespace"), tool.get("name"), "tool_choice") for tool in allowed}
        chat["tools"] = [tool for tool in chat["tools"] if tool["function"]["name"] in names]
        if not names or names != {tool["function"]["name"] for tool in chat["tools"]}:
            message = "tool_choice must allow functions that are in tools, at least one"
            raise make_mistake(message, "tool_choice", "invalid_tool_choice")
        chat["tool_choice"] = given.get("mode") or "auto"
    elif given is not None:
        raise make_unsupported("tool_choice names a tool that is not a function", "tool_choice")


def _read_format(form: dict[str, Any], chat: dict[str, Any]) -> None:
    kind = form.get("type")
    if kind == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif kind == "json_schema":
        schema: dict[str, Any] = {"name": form.get("name") or "answer"}
        copy_fields(form, schema, "schema", "strict", "description")
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind != "text":
        raise make_mistake(f"text.format.type {kind} is not supported", "text.format", "invalid_response_format")
