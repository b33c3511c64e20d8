"""Anthropic's Messages and OpenAI's Responses for engines that have only chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bedplate.engines.traits import RequestTraits, TokenCounter
from bedplate.run.gateway.request_checks import RequestMistake
from bedplate.run.gateway.sse import MOST_LEVELS
from bedplate.run.gateway.translate.messages import MessagesTranslation
from bedplate.run.gateway.translate.responses import ResponsesTranslation
from bedplate.values.capabilities import Capabilities
from bedplate.values.tenant import Tenant

from .scripted import (
    CHAT,
    DONE,
    USAGE,
    Answer,
    End,
    Engine,
    Setup,
    make_answer,
    make_backend,
    make_chunk,
    make_delta,
    make_stream,
    request,
    start_gateway,
    wait_until,
)

PLAIN = RequestTraits(counter=TokenCounter(prompts={"chat": "/tokenize"}))
NATIVE = RequestTraits(apis=frozenset(["messages", "responses"]))
MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
ASKED = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
WHOLE = {
    "model": "small.gguf", "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}  # fmt: skip
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}


def make_event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"model": "m", "choices": [choice]}).encode() + b"\n\n"


def call(index: int, name: str | None = None, arguments: str = "", id: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": index, **({"id": id} if id else {}), "function": function}]}


CALLS = (
    make_event({"role": "assistant", "content": ""}),
    make_event({"reasoning_content": "Hm."}),
    make_event({"content": "I "}),
    make_event({"content": "look."}),
    make_event(call(0, "look", "", "a1")),
    make_event(call(0, None, '{"x":')),
    make_event(call(0, None, "1}")),
    make_event(call(1, "look", '{"x":2}', "a2")),
    make_event({}, "tool_calls"),
    USAGE,
    DONE,
)


def read_events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream. The name of each is its type."""
    events = []
    for block in answer.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def post(setup: Setup, path: str, body: dict[str, Any], **headers: str) -> Answer:
    return await (await setup.connect()).post(path, body, **headers)


# requests


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = json.loads(MessagesTranslation().to_chat(json.dumps(body).encode()))
    return chat


def test_a_conversation_with_tools_keeps_its_order_and_ids() -> None:
    chat = to_chat({
        **ASKED, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}], "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stop_sequences": ["END"], "top_k": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "there"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes"},
                {"type": "tool_use", "id": "a1", "name": "look", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "fog"}]},
                {"type": "text", "text": "And?"}]},
        ],
    })  # fmt: skip
    assert chat["messages"] == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Look\nthere"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}]},
        {"role": "tool", "tool_call_id": "a1", "content": "fog"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    schema = TOOL["input_schema"]
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": schema}}
    ]
    assert (chat["tool_choice"], chat["parallel_tool_calls"], chat["stop"]) == ("required", False, ["END"])
    assert (chat["max_tokens"], chat["top_k"], "stream" in chat) == (9, 5, False)


def test_images_and_failed_tools_are_translated() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    failed = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "no such file"}
    user = {"role": "user", "content": [failed, image, {"type": "text", "text": "What?"}]}
    chat = to_chat({**ASKED, "messages": [user]})
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert chat["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "Error:\nno such file"},
        {"role": "user", "content": [url, {"type": "text", "text": "What?"}]},
    ]


def test_a_json_schema_is_translated() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    made = to_chat({**ASKED, "output_config": {"format": form}})["response_format"]
    assert made == {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "a", "name": "b"}]}]},
        {"tools": [{"name": "look"}]},
    ],
)
def test_what_has_no_counterpart_is_refused_and_not_dropped(more: dict[str, Any]) -> None:
    with pytest.raises(RequestMistake):
        to_chat({**ASKED, **more})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0]"),
    ],
)
async def test_a_stored_or_hosted_part_of_the_responses_api_is_refused(more: dict[str, Any], param: str) -> None:
    async with start_gateway(requests=PLAIN) as setup:
        answer = await post(setup, RESPONSES, {"model": "small", "input": "x", **more})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", param)
        assert not setup.engine.seen


def test_items_of_the_responses_api_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "In the town"},
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "fog"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done"}]},
    ]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    body = {"input": items, "instructions": "You", "tools": [tool, {**tool, "name": "other"}], "tool_choice": choice,
            "max_output_tokens": 5, "reasoning": {"effort": "low"}, "stream": True,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}  # fmt: skip
    chat = json.loads(ResponsesTranslation().to_chat(json.dumps(body).encode()))
    function = {"name": "look", "arguments": "{}"}
    assert chat["messages"] == [
        {"role": "system", "content": "You\nBe brief"},
        {"role": "user", "content": "In the town\nLook"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "a", "type": "function", "function": function},
            {"id": "b", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "fog"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "assistant", "content": "Done"},
    ]  # fmt: skip
    assert [one["function"]["name"] for one in chat["tools"]] == ["look"] and chat["tool_choice"] == "required"
    assert (chat["max_tokens"], chat["reasoning_effort"]) == (5, "low")
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {}}
    assert chat["stream"] and chat["stream_options"] == {"include_usage": True}


def test_only_the_first_message_is_of_the_system() -> None:
    """Claude Code sends one after the user's; many chat templates accept none there."""
    later = "<system-reminder>\nNow in French.\n</system-reminder>"
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "fog"}
    told = {"role": "system", "content": [{"type": "text", "text": "Now in French."}]}
    for content, expected in (
        ("hi", [{"role": "user", "content": f"hi\n{later}"}]),
        ([result], [{"role": "tool", "tool_call_id": "a", "content": "fog"}, {"role": "user", "content": later}]),
        ([image], [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://a/b.png"}}, {"type": "text", "text": later}]}]),
    ):  # fmt: skip
        chat = to_chat({**ASKED, "system": "Be", "messages": [{"role": "user", "content": content}, told]})
        assert chat["messages"] == [{"role": "system", "content": "Be"}, *expected]


NAMESPACE = {"type": "namespace", "name": "agents", "description": "Agents", "tools": [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]}  # fmt: skip
FLAT = {"type": "function", "function": {"name": "agents__look", "parameters": {"type": "object"}, "strict": False}}


async def test_functions_in_a_namespace_are_called_by_the_name_that_the_client_knows() -> None:
    """As Codex declares them."""
    call_item = {"type": "function_call", "call_id": "a", "namespace": "agents", "name": "look", "arguments": "{}"}
    body = {"model": "small", "tools": [NAMESPACE], "tool_choice": {**call_item, "type": "function"}, "input": [
        {"role": "user", "content": "x"}, call_item,
        {"type": "function_call_output", "call_id": "a", "output": [
            {"type": "input_text", "text": "fog"}, {"type": "input_image", "image_url": "data:image/png;base64,aGk="}]},
    ]}  # fmt: skip
    answer = {"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "agents__look", "arguments": "{}"}}]}
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.answer(make_answer({**WHOLE, "choices": [{"message": answer, "finish_reason": "tool_calls"}]}))
        (made,) = (await post(setup, RESPONSES, body)).json["output"]
        assert (made["type"], made["namespace"], made["name"], made["call_id"]) == (
            "function_call", "agents", "look", "b",
        )  # fmt: skip
        seen = setup.engine.seen[0].json
        assert seen["tools"] == [FLAT] and seen["tool_choice"]["function"]["name"] == "agents__look"
        _, said, result, shown = seen["messages"]
        assert said["tool_calls"][0]["function"]["name"] == "agents__look" and result["content"] == "fog"
        assert shown["role"] == "user" and shown["content"][0]["type"] == "image_url"

        parts = make_event(call(0, "agents__look", "{}", "b")), make_event({}, "tool_calls"), USAGE, DONE
        setup.engine.answer(make_stream(*parts))
        events = read_events(await post(setup, RESPONSES, {**body, "stream": True}))
        items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
        assert {(item["namespace"], item["name"]) for item in items} == {("agents", "look")} and len(items) == 2
        assert events[-1]["response"]["output"] == items[1:]


# answers


async def test_the_engine_gets_a_chat_request_and_the_client_a_message() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.answer(make_answer(WHOLE))
        answer = await post(setup, f"{MESSAGES}?beta=true", ASKED, anthropic_version="2023-06-01")
        assert setup.engine.seen[0].target == CHAT
        assert setup.engine.seen[0].json == ASKED
        made = answer.json
        assert made.pop("id").startswith("msg_")
        assert made == {
            "type": "message", "role": "assistant", "model": "small", "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                      "output_tokens": 3},
        }  # fmt: skip
        assert setup.count_outcome("ok", "messages") == 1
        assert setup.read_metric("tokens_total", kind="prompt") == 7


async def test_a_streamed_message_has_a_block_for_each_kind_of_content() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.answer(make_stream(*CALLS))
        events = read_events(await post(setup, MESSAGES, {**ASKED, "stream": True}))
        assert setup.engine.seen[0].json["stream_options"] == {"include_usage": True}
        assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
        blocks: list[dict[str, Any]] = []
        for event in events[1:-2]:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "parts": [], "open": True})
            elif event["type"] == "content_block_delta":
                assert blocks[event["index"]]["open"]
                blocks[event["index"]]["parts"].append(next(v for k, v in event["delta"].items() if k != "type"))
            else:
                assert event["type"] == "content_block_stop"
                blocks[event["index"]]["open"] = False
        assert not any(block["open"] for block in blocks)
        assert [(block["type"], block.get("id"), "".join(block["parts"])) for block in blocks] == [
            ("thinking", None, "Hm."), ("text", None, "I look."), ("tool_use", "a1", '{"x":1}'),
            ("tool_use", "a2", '{"x":2}'),
        ]  # fmt: skip
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert (events[-2]["usage"]["input_tokens"], events[-2]["usage"]["output_tokens"]) == (7, 3)
        assert events[-1] == {"type": "message_stop"}
        assert setup.count_outcome("ok", "messages") == 1
        assert setup.read_metric("tokens_total", kind="completion") == 3


async def test_a_streamed_response_has_an_item_for_each_kind_of_content() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.answer(make_stream(*CALLS))
        events = read_events(await post(setup, RESPONSES, {"model": "small", "input": "x", "stream": True}))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        last = events[-1]
        assert last["type"] == "response.completed" and last["response"]["output"] == done
        assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
        assert done[1]["content"][0]["text"] == "I look." and done[1]["status"] == "completed"
        assert [(item["call_id"], item["arguments"]) for item in done[2:]] == [("a1", '{"x":1}'), ("a2", '{"x":2}')]
        assert last["response"]["usage"]["total_tokens"] == 10 and last["response"]["model"] == "small"
        added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
        assert added == [item["id"] for item in done]


async def test_an_answer_that_was_cut_says_so() -> None:
    cut = {**WHOLE, "choices": [{**WHOLE["choices"][0], "finish_reason": "length"}]}  # type: ignore[index]
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.otherwise = (make_answer(cut),)
        assert (await post(setup, MESSAGES, ASKED)).json["stop_reason"] == "max_tokens"
        made = (await post(setup, RESPONSES, {"model": "small", "input": "x"})).json
        assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        found = {**WHOLE, "choices": [{**WHOLE["choices"][0], "stop_reason": "END"}]}  # type: ignore[index]
        setup.engine.otherwise = (make_answer(found),)
        made = (await post(setup, MESSAGES, {**ASKED, "stop_sequences": ["END"]})).json
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")


async def test_tokens_are_counted_by_the_engines_path_or_by_a_prefill() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        setup.engine.answer(make_answer({"tokens": [1, 2, 3], "count": 3}))
        assert (await post(setup, COUNT, {**ASKED, "system": "Be"})).json == {"input_tokens": 3}
        assert setup.engine.seen[0].target == "/tokenize"
        assert [one["role"] for one in setup.engine.seen[0].json["messages"]] == ["system", "user"]
    async with start_gateway(requests=RequestTraits()) as setup:
        setup.engine.answer(make_answer(WHOLE))
        assert (await post(setup, COUNT, ASKED)).json == {"input_tokens": 7}
        assert (setup.engine.seen[0].target, setup.engine.seen[0].json["max_tokens"]) == (CHAT, 1)


# errors, in the format of the API


async def test_errors_of_the_gateway_and_of_the_engine_have_anthropics_format() -> None:
    def check(answer: Answer, status: int, kind: str) -> str:
        assert answer.status == status and answer.json["type"] == "error"
        assert answer.json["error"]["type"] == kind
        return str(answer.json["error"]["message"])

    async with start_gateway(requests=PLAIN, api_key="secret") as setup:
        for path in (MESSAGES, COUNT):
            check(await post(setup, path, ASKED), 401, "authentication_error")
            check(await post(setup, path, {**ASKED, "model": "other"}, x_api_key="secret"), 404, "not_found_error")
            check(await post(setup, path, {"messages": 5}, x_api_key="secret"), 400, "invalid_request_error")
        setup.engine.answer(make_answer({"error": {"message": "boom", "type": "x"}}, "500 Internal Server Error"))
        assert check(await post(setup, MESSAGES, ASKED, x_api_key="secret"), 500, "api_error") == "boom"
        setup.engine.answer(make_answer(b"not JSON"))
        check(await post(setup, MESSAGES, ASKED, x_api_key="secret"), 502, "api_error")
    async with start_gateway(requests=PLAIN, state="loading") as setup:
        answer = await post(setup, MESSAGES, ASKED)
        check(answer, 503, "overloaded_error")
        assert answer.headers["retry-after"]


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, ASKED), (RESPONSES, {"model": "small", "input": "x"})])
async def test_a_stream_that_breaks_ends_with_an_error_and_not_as_a_complete_answer(
    path: str, body: dict[str, Any]
) -> None:
    async with start_gateway(requests=PLAIN) as setup:
        head = make_stream(make_delta("a")).removesuffix(b"0\r\n\r\n")
        setup.engine.answer(head, End.CLOSE)
        events = read_events(await post(setup, path, {**body, "stream": True}))
        assert events[-1]["type"] == "error" and "stopped" in json.dumps(events[-1])
        if path == RESPONSES:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        setup.engine.answer(head, make_chunk(b'data: {"error":{"message":"out of memory"}}\n\n'), b"0\r\n\r\n")
        events = read_events(await post(setup, path, {**body, "stream": True}))
        assert events[-1]["type"] == "error" and "out of memory" in json.dumps(events[-1])


async def test_tools_that_the_model_does_not_support_are_refused() -> None:
    async with start_gateway(requests=PLAIN, capabilities=Capabilities(tools="none")) as setup:
        answer = await post(setup, MESSAGES, {**ASKED, "tools": [TOOL]})
        assert answer.status == 400 and "tools" in answer.json["error"]["message"]
        assert not setup.engine.seen


# several engines, limits, accounting


async def test_engines_that_have_the_api_get_the_request_as_it_is() -> None:
    async with start_gateway(requests=NATIVE) as setup:
        body = {**ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
        await post(setup, MESSAGES, body)
        assert (setup.engine.seen[0].target, setup.engine.seen[0].json) == (MESSAGES, body)


async def test_a_request_survives_a_change_of_the_engine_while_it_waits() -> None:
    """It was accepted for an engine with the API, and goes to one without it; and the other way round."""
    for first, second, target in ((NATIVE, PLAIN, CHAT), (PLAIN, NATIVE, MESSAGES)):
        other = Engine()
        await other.start()
        async with start_gateway(requests=first) as setup:
            setup.gateway.hold("small")
            asking = asyncio.ensure_future(post(setup, MESSAGES, ASKED))
            await wait_until(setup.count_waiting, "the request to wait")
            setup.gateway.add(make_backend(other.port, requests=second))
            assert await setup.gateway.remove(setup.backend)
            other.answer(make_answer(WHOLE if second is PLAIN else {"type": "message", "content": []}))
            setup.gateway.release("small")
            assert (await asking).json["type"] == "message"
            assert other.seen[0].target == target
        await other.stop()


async def test_a_failed_engine_is_replaced_by_one_with_another_api() -> None:
    other = Engine()
    await other.start()
    backend = make_backend(other.port, engine="onnxruntime", requests=PLAIN)
    async with start_gateway(backend, requests=NATIVE) as setup:
        for _ in range(2):
            setup.engine.otherwise = (End.CLOSE,)
            other.otherwise = (make_stream(*CALLS),)
            events = read_events(await post(setup, MESSAGES, {**ASKED, "stream": True}))
            assert events[-1] == {"type": "message_stop"} and events[0]["type"] == "message_start"
        assert {one.target for one in other.seen} == {CHAT}
        assert {one.target for one in setup.engine.seen} == {MESSAGES}
    await other.stop()


async def test_limits_of_a_tenant_hold_for_translated_requests() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        setup.gateway.tenants.replace((Tenant(name="default", requests_per_minute=1),), ())
        setup.engine.otherwise = (make_answer(WHOLE),)
        assert (await post(setup, MESSAGES, ASKED)).status == 200
        refused = await post(setup, MESSAGES, ASKED)
        assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"]


async def test_an_aborted_stream_is_counted_by_the_text_that_was_sent() -> None:
    async with start_gateway(requests=PLAIN) as setup:
        pause = asyncio.Event()
        setup.engine.answer(make_stream(make_delta("Hello")).removesuffix(b"0\r\n\r\n"), pause)
        setup.engine.otherwise = (make_answer({"tokens": [1, 2], "count": 2}),)
        client = await setup.connect()
        await client.send(request(MESSAGES, {**ASKED, "stream": True}))
        await client.head()
        await client.chunk()
        client.reset()
        await wait_until(lambda: len(setup.engine.seen) == 3, "the prompt and the answer to be counted")
        prompt, text = setup.engine.seen[1:]
        assert prompt.json["messages"] == ASKED["messages"] and text.json["prompt"] == "Hello"
        await wait_until(lambda: setup.read_metric("tokens_total", kind="completion") == 3, "two, and one unsent")
        pause.set()


USER = {"role": "user", "content": "a"}
DEEP = "[" * 5_000 + "]" * 5_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "metadata": 1e999}'),
        (MESSAGES, f'{{"messages": [{{"role": "user", "content": "a"}}], "metadata": {DEEP}}}'),
        (COUNT, '{"messages": [{"role": "user", "content": "a"}], "metadata": 1e999}'),
        (RESPONSES, '{"input": "a", "metadata": {"x": -1e999}}'),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": 5}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [5]}]}),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}],
                     "tool_choice": {"type": "allowed_tools", "tools": [{"name": [1]}], "mode": "required"}}),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}],
                     "tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}}),
        ("/api/chat", '{"messages": [{"role": "user", "content": "a"}], "options": {"temperature": 1e999}}'),
        ("/api/chat", {"messages": [{**USER, "images": 5}]}),
        ("/api/chat", {"messages": [{**USER, "images": {"a": 1}}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": {"a": 1}}]}),
        ("/api/generate", {"prompt": "a", "images": 5}),
        ("/api/generate", {"prompt": {"a": 1}}),
        ("/api/generate", {"prompt": "a", "system": 5}),
    ],
)  # fmt: skip
async def test_a_field_that_cannot_be_translated_gets_400(path: str, body: dict[str, Any] | str) -> None:
    async with start_gateway(requests=PLAIN) as setup:
        sent = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        answer = await (await setup.connect()).post(path, sent)
        assert answer.status == 400 and not setup.engine.seen
        assert setup.gateway.meters.get_tenant_meter("default").ended["refused"] == 1


@pytest.mark.parametrize("name", ["metadata", "tools"])
async def test_no_depth_of_nesting_is_accepted_and_fails_in_the_answer(name: str) -> None:
    deepest = 0
    async with start_gateway(requests=PLAIN) as setup:
        client = await setup.connect()
        for depth in range(MOST_LEVELS - 10, MOST_LEVELS + 110):
            setup.engine.otherwise = (make_answer(WHOLE),)
            nested = "[" * depth + "]" * depth
            given = nested if name == "metadata" else f'[{{"type": "function", "name": "f", "parameters": {nested}}}]'
            answer = await client.post(RESPONSES, f'{{"input": "a", "{name}": {given}}}'.encode())
            assert answer.status in (200, 400), depth
            deepest = depth if answer.status == 200 else deepest
        assert MOST_LEVELS - 5 <= deepest <= MOST_LEVELS + 100 and setup.backend.health.failures == 0


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{}]}, {"data": [5]}, []])
@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_an_answer_of_another_format_is_the_engines_failure(path: str, answer: Any) -> None:
    async with start_gateway(requests=PLAIN, capabilities=Capabilities(embeddings=True)) as setup:
        setup.engine.answer(make_answer(json.dumps(answer).encode()))
        got = await post(setup, path, {"model": "small", "input": "a", "prompt": "a"})
        assert got.status == 502 and "does not have the format" in got.json["error"]
