"""Checks of an endpoint with unmodified clients: `anthropic`, `openai` (Responses) and `ollama`.

Each check holds for a small model as well: it looks at formats, counts and texts, not at the quality of answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

QUESTION = "What is the capital of France? Answer in one word."
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Berlin"]}}, "required": ["city"],
}  # fmt: skip
CALL = 'Repeat this: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
"""So small a model needs exact instructions to call a tool."""


def check_chat(root: str, model: str, *, tools: bool) -> None:
    """OpenAI's own API: an answer, a stream, counts, errors, and with `tools` a call and its result."""
    import openai

    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You answer in one word."}, {"role": "user", "content": QUESTION},
        ]  # fmt: skip
        asked: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}
        plain = client.chat.completions.create(**asked)
        assert "Paris" in plain.choices[0].message.content, plain
        assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens > 10
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == plain.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
        cut = client.chat.completions.create(**{**asked, "max_tokens": 1})
        assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 1)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "gpt-17"})
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**asked, "messages": []})
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
        if not tools:
            with pytest.raises(openai.BadRequestError, match="tools"):
                client.chat.completions.create(**asked, tools=[tool])
            return
        question = {"role": "user", "content": CALL}
        asked |= {"messages": [question], "max_tokens": 80, "tools": [tool]}
        plain = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        for answer in (plain, final):
            assert answer.finish_reason == "tool_calls", answer
            (call,) = answer.message.tool_calls
            assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
        function = {"name": call.function.name, "arguments": call.function.arguments}
        said = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
        asked["messages"] = [question, said, result]
        assert client.chat.completions.create(**asked).choices


def check_anthropic(root: str, model: str, *, tools: bool) -> None:
    """Messages, streams, counts, errors, and with `tools` a call and its result."""
    import anthropic

    with anthropic.Anthropic(base_url=root, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": model, "max_tokens": 16, "extra_body": {"temperature": 0}, "system": "You answer in one word.",
            "messages": [{"role": "user", "content": QUESTION}],
        }  # fmt: skip
        plain = client.messages.create(**asked)
        assert plain.type == "message" and plain.model == model
        assert "Paris" in plain.content[0].text, plain
        counted = client.messages.count_tokens(
            **{name: asked[name] for name in ("model", "system", "messages")}
        ).input_tokens
        usage = plain.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted > 10
        with client.messages.stream(**asked) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
        assert len(texts) >= 1 and "".join(texts) == final.content[0].text == plain.content[0].text
        assert final.stop_reason == plain.stop_reason == "end_turn"
        assert final.usage.output_tokens == usage.output_tokens
        cut = client.messages.create(**{**asked, "max_tokens": 1})
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "claude-17"})
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**asked, "messages": []})
        if not tools:
            with pytest.raises(anthropic.BadRequestError, match="tools"):
                client.messages.create(**asked, tools=[{"name": "get_weather", "input_schema": SCHEMA}])
            return
        tool = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": SCHEMA}
        question = {"role": "user", "content": CALL}
        asked = {
            "model": model,
            "max_tokens": 80,
            "extra_body": {"temperature": 0},
            "messages": [question],
            "tools": [tool],
        }
        plain = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        for answer in (plain, final):
            assert answer.stop_reason == "tool_use", answer
            call = next(block for block in answer.content if block.type == "tool_use")
            assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
        said = [block.model_dump(exclude_none=True) for block in final.content]
        asked["messages"] = [question, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        assert client.messages.create(**asked).content


def check_responses(root: str, model: str, *, tools: bool) -> None:
    import openai

    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": model, "input": QUESTION, "instructions": "You answer in one word.", "temperature": 0,
            "max_output_tokens": 16,
        }  # fmt: skip
        plain = client.responses.create(**asked)
        assert "Paris" in plain.output_text and plain.status == "completed", plain
        assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens > 10
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert events[0].type == "response.created" and events[-1].type == "response.completed"
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == plain.output_text
        assert final.output_text == plain.output_text and final.usage.output_tokens == plain.usage.output_tokens
        turns = [{"role": "user", "content": QUESTION}, *plain.output, {"role": "user", "content": "And of Italy?"}]
        assert client.responses.create(**{**asked, "input": turns}).output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**{**asked, "model": "gpt-17"})
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**asked, previous_response_id=plain.id)
        cut = client.responses.create(**{**asked, "max_output_tokens": 1})
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        assert cut.usage.output_tokens == 1
        tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
        if not tools:
            with pytest.raises(openai.BadRequestError, match="tools"):
                client.responses.create(**asked, tools=[tool])
            return
        asked = {"model": model, "input": CALL, "temperature": 0, "max_output_tokens": 80, "tools": [tool]}
        plain = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            final = stream.get_final_response()
        for answer in (plain, final):
            call = next(item for item in answer.output if item.type == "function_call")
            assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}
        asked["input"] = [{"role": "user", "content": CALL}, *final.output, result]
        assert client.responses.create(**asked).output


def check_forced_calls(root: str, model: str) -> None:
    """`tool_choice` required and a named function always give a call whose arguments match the schema."""
    import openai

    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "get_map")
    ]
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "tools": tools,
        "temperature": 0, "max_tokens": 80,
    }  # fmt: skip
    named = {"type": "function", "function": {"name": "get_map"}}
    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        for choice, names in (("required", ("get_weather", "get_map")), (named, ("get_map",))):
            plain = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
                final = stream.get_final_completion().choices[0]
            for answer in (plain, final):
                assert answer.finish_reason == "tool_calls" and not answer.message.content, answer
                (call,) = answer.message.tool_calls
                assert call.function.name in names
                assert json.loads(call.function.arguments)["city"] in SCHEMA["properties"]["city"]["enum"]
        free = client.chat.completions.create(**asked, tool_choice="none").choices[0]
        assert free.message.content and not free.message.tool_calls


def check_ollama(root: str, model: str, *, tools: bool) -> None:
    import ollama

    client = ollama.Client(host=root)
    with contextlib.closing(client._client):
        _check_ollama(client, model, tools=tools)


def _check_ollama(client: Any, model: str, *, tools: bool) -> None:
    import ollama

    options = {"temperature": 0, "num_predict": 16}
    messages = [{"role": "user", "content": QUESTION}]
    assert [one.model for one in client.list().models] == [model]
    assert [one.model for one in client.ps().models] == [model]
    shown = client.show(model)
    assert shown.capabilities is not None and ("tools" in shown.capabilities) == tools
    plain = client.chat(model, messages, options=options)
    assert "Paris" in (plain.message.content or "") and plain.done and (plain.eval_count or 0) > 0
    parts = list(client.chat(model, messages, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == plain.message.content
    assert (parts[-1].done, parts[-1].eval_count) == (True, plain.eval_count)
    made = client.generate(model, QUESTION, options=options)
    assert made.response == plain.message.content
    cut = client.chat(model, messages, options={**options, "num_predict": 1})
    assert (cut.done_reason, cut.eval_count) == ("length", 1)
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat("llama17", messages)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    if not tools:
        with pytest.raises(ollama.ResponseError, match="tools"):
            client.chat(model, messages, tools=[tool], options=options)
    else:
        question = {"role": "user", "content": CALL}
        asked = client.chat(model, [question], tools=[tool], options={"temperature": 0, "num_predict": 80})
        call = next(iter(asked.message.tool_calls or ()))
        assert call.function.name == "get_weather" and call.function.arguments == {"city": "Paris"}
        result = {"role": "tool", "tool_name": "get_weather", "content": "18 degrees, sunny"}
        again = client.chat(model, [question, asked.message, result], tools=[tool], options=options)
        assert again.message.content or again.message.tool_calls


CHECKS: dict[tuple[str, str], Callable[..., None]] = {
    ("openai", "chat completions"): check_chat,
    ("anthropic", "Messages"): check_anthropic,
    ("openai", "Responses"): check_responses,
    ("ollama", "Ollama"): check_ollama,
}
"""The rows of the table in docs/apis.md: client and API → its check, which is run with each engine of the table."""
