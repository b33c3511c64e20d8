"""Mistakes of clients: answered with 4xx in the API's format, and never counted as a failure of an engine."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.engines import get_engine
from bedplate.run.gateway.backend import EJECT_AFTER, FinishedRequest
from bedplate.run.gateway.errors import read_engine_error, remove_options
from bedplate.run.gateway.model_name import ServedName
from bedplate.run.gateway.request_checks import FeatureFields, RequestMistake, check_request
from bedplate.run.gateway.sse import APIS, TRANSLATED, read_request_fields
from bedplate.values.capabilities import Capabilities, Feature, merge_capabilities

from .scripted import CHAT, DONE, make_answer, make_chat_body, make_stream, start_gateway
from .test_routes import add_engine

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
IMAGE = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
ALL = Capabilities(vision=True, vocab_size=100)
NONE = Capabilities(
    tools="none", json_schema=False, json_object=False, logprobs=False, n=1, stop=False, seed=False, vocab_size=100
)


def check(path: str, body: dict[str, Any], known: Capabilities | None = None) -> tuple[Feature, ...]:
    return check_request({**APIS, **TRANSLATED}[path.encode()], read_request_fields(json.dumps(body).encode()), known)


def ask_with(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


CHAT_MISTAKES: dict[str, list[dict[str, Any]]] = {
    "invalid_messages": [
        {},
        {"messages": []},
        {"messages": None},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": 7, "content": "x"}]},
        {"messages": [{"role": None, "content": "x"}]},
        ask_with(5),
        ask_with({"text": "x"}),
        ask_with(["x"]),
        ask_with([{"text": "no type"}]),
    ],
    "invalid_tools": [
        make_chat_body(tools="x"),
        make_chat_body(tools=[{"type": "x"}]),
        make_chat_body(tools=[{"type": "function", "function": {}}]),
        make_chat_body(functions=[{"name": "f"}]),
    ],
    "invalid_tool_choice": [
        make_chat_body(tool_choice="required"),
        make_chat_body(tools=[TOOL], tool_choice="banana"),
        make_chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
    ],
    "invalid_response_format": [
        make_chat_body(response_format="json"),
        make_chat_body(response_format={}),
        make_chat_body(response_format={"type": "json_schema"}),
        make_chat_body(response_format={"type": "json_schema", "json_schema": "x"}),
    ],
    "invalid_n": [make_chat_body(n=0), make_chat_body(n=-1), make_chat_body(n="2"), make_chat_body(n=1.5)],
    "invalid_stop": [make_chat_body(stop=5), make_chat_body(stop=[5]), make_chat_body(stop={"a": 1})],
    "invalid_seed": [make_chat_body(seed="x"), make_chat_body(seed=2**70)],
    "invalid_tokens": [make_chat_body(logit_bias={"100": 1}), make_chat_body(logit_bias={"-1": 1})],
}


@pytest.mark.parametrize(("code", "body"), [(code, body) for code, bodies in CHAT_MISTAKES.items() for body in bodies])
def test_a_malformed_chat_request_is_refused_whatever_the_engine(code: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestMistake) as found:
        check(CHAT, body, ALL)
    assert found.value.code == code and found.value.message


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {}, "invalid_prompt"),
        ("/v1/completions", {"prompt": None}, "invalid_prompt"),
        ("/v1/completions", {"prompt": 5}, "invalid_prompt"),
        ("/v1/completions", {"prompt": []}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [[]]}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [100]}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [-1]}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [1.5]}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [True]}, "invalid_tokens"),
        ("/v1/completions", {"prompt": [[1, 2], [3, 2**40]]}, "invalid_tokens"),
        ("/v1/embeddings", {"input": [2**31]}, "invalid_tokens"),
        ("/detokenize", {"tokens": [10**8]}, "invalid_tokens"),
        ("/v1/messages", {"messages": []}, "invalid_messages"),
        ("/v1/messages", {"messages": [{"role": 5, "content": "x"}]}, "invalid_messages"),
        ("/v1/messages", make_chat_body(tools=[{"x": 1}]), "invalid_tools"),
        ("/v1/messages", make_chat_body(tools=[OWN_TOOL], tool_choice={"type": "tool", "name": "g"}),
         "invalid_tool_choice"),
        ("/v1/responses", {}, "invalid_messages"),
        ("/v1/responses", {"input": []}, "invalid_messages"),
        ("/v1/responses", {"input": 5}, "invalid_messages"),
        ("/v1/responses", {"input": [{"content": "x"}]}, "invalid_messages"),
        ("/v1/responses", {"input": [{"role": 7, "content": "x"}]}, "invalid_messages"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}, "invalid_tools"),
    ],
)  # fmt: skip
def test_every_api_has_its_checks(path: str, body: dict[str, Any], code: str) -> None:
    known = Capabilities(vocab_size=100, embeddings=True)
    with pytest.raises(RequestMistake) as found:
        check(path, body, known)
    assert found.value.code == code


USES: list[tuple[str, dict[str, Any], tuple[Feature, ...]]] = [
    (CHAT, make_chat_body(tools=[TOOL]), ("tools",)),
    (CHAT, make_chat_body(tools=[TOOL], tool_choice="required"), ("tools", "forced_tools")),
    (CHAT, make_chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
     ("tools", "forced_tools")),
    (CHAT, make_chat_body(response_format={"type": "json_object"}), ("json_object",)),
    (CHAT, make_chat_body(response_format=SCHEMA), ("json_schema",)),
    (CHAT, make_chat_body(logprobs=True), ("logprobs",)),
    (CHAT, make_chat_body(n=2), ("n",)),
    (CHAT, make_chat_body(stop=["a"]), ("stop",)),
    (CHAT, make_chat_body(seed=0), ("seed",)),
    (CHAT, ask_with(IMAGE), ("vision",)),
    ("/v1/completions", {"prompt": [1, 99], "logprobs": 0}, ("logprobs",)),
    ("/v1/messages", make_chat_body(tools=[OWN_TOOL], tool_choice={"type": "any"}), ("tools", "forced_tools")),
    ("/v1/messages", ask_with([{"type": "image", "source": {}}]), ("vision",)),
    ("/v1/messages", make_chat_body(stop_sequences=["a"]), ("stop",)),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, ("json_object",)),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}, ("json_schema",)),
    ("/v1/responses", {"input": "x", "tools": [FLAT_TOOL], "tool_choice": "required"}, ("tools", "forced_tools")),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ("vision",)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "features"), USES)
def test_a_feature_is_recognized_and_refused_where_it_is_missing(
    path: str, body: dict[str, Any], features: tuple[Feature, ...]
) -> None:
    assert check(path, body) == check(path, body, ALL) == features
    with pytest.raises(RequestMistake) as found:
        check(path, body, NONE)
    assert found.value.code == f"unsupported_{features[0]}"
    assert "bedplate serve" in found.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, make_chat_body()),
        (CHAT, make_chat_body(stream=True, temperature=1, max_tokens=5, user="x")),
        (CHAT, ask_with([{"type": "text", "text": "x"}])),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        (CHAT, {"messages": [{"role": "environment", "content": "a role of the model's own template"}]}),
        (CHAT, make_chat_body(n=1, best_of=1, tools=[], tool_choice="none", response_format={"type": "text"})),
        (CHAT, make_chat_body(tools=None, logprobs=False, stop=None, stream_options=None)),
        (CHAT, make_chat_body(tools=[TOOL], tool_choice="none")),
        ("/v1/completions", {"prompt": "x", "logprobs": False}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": [[0, 99], [5]]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}),
        ("/tokenize", {"content": "x"}),
    ],
)
def test_a_plain_request_uses_no_feature(path: str, body: dict[str, Any]) -> None:
    assert check(path, body, NONE) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "function", "name", "role", "content", "allowed_tools", "format", "json_schema",
                         "schema", "--5", "-1", "9" * 5000]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    path=st.sampled_from([path.decode() for path in APIS]),
    fields=st.dictionaries(
        st.sampled_from([*FeatureFields.__struct_fields__, "messages", "prompt", "input", "tools"]), JSON, max_size=4
    ),
    known=st.sampled_from([None, ALL, NONE]),
)
def test_any_json_is_accepted_or_refused(path: str, fields: dict[str, Any], known: Capabilities | None) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", **fields}
    with contextlib.suppress(RequestMistake):
        check(path, body, known)


def test_embeddings_and_text_are_refused_by_a_model_of_the_other_kind() -> None:
    embeds = Capabilities(generation=False, embeddings=True)
    assert check("/v1/embeddings", {"input": "x"}, embeds) == ()
    for path, body, known in (("/v1/embeddings", {"input": "x"}, ALL), (CHAT, make_chat_body(), embeds)):
        with pytest.raises(RequestMistake, match="model"):
            check(path, body, known)


def test_the_number_of_choices_is_limited_in_terms_of_bedplates_option() -> None:
    two = Capabilities(n=2)
    assert check(CHAT, make_chat_body(n=2), two) == ("n",)
    with pytest.raises(RequestMistake, match="at most 2; bedplate serve --concurrency"):
        check(CHAT, make_chat_body(n=3), two)


def test_engines_of_one_model_support_what_one_of_them_supports() -> None:
    merged = merge_capabilities([NONE, Capabilities(tools="auto", n=4, json_object=False)])
    assert merged is not None
    assert (merged.tools, merged.n, merged.json_schema, merged.json_object) == ("auto", 4, True, False)
    assert merge_capabilities([NONE, None]) is None


# responses in the format of the API


async def test_a_missing_feature_is_refused_in_the_format_of_the_api() -> None:
    async with start_gateway(capabilities=NONE) as setup:
        client = await setup.connect()
        chat = await client.post(CHAT, make_chat_body(tools=[TOOL]))
        assert (chat.status, chat.error["code"], chat.error["type"]) == (
            400, "unsupported_tools", "invalid_request_error",
        )  # fmt: skip
        own = await client.post("/v1/messages", make_chat_body(tools=[OWN_TOOL]))
        assert (own.status, own.json["type"]) == (400, "error")
        assert own.json["error"] == {"type": "invalid_request_error", "message": chat.error["message"]}
        flat = await client.post("/v1/responses", {"input": "x", "tools": [FLAT_TOOL]})
        assert (flat.status, flat.error["code"]) == (400, "unsupported_tools")
        assert not setup.engine.seen
        assert setup.count_outcome("refused") == 1 and setup.count_outcome("refused", api="messages") == 1


async def test_requests_go_to_the_replica_that_supports_them() -> None:
    async with start_gateway(capabilities=NONE) as setup, add_engine(setup, capabilities=ALL) as (able, _):
        client = await setup.connect()
        for _ in range(6):
            assert (await client.post(CHAT, make_chat_body(tools=[TOOL]))).status == 200
        assert len(able.seen) == 6 and not setup.engine.seen


# errors of engines


LLAMA_500 = [
    ("Failed to parse messages: Missing 'role' in message: {}", "invalid_messages"),
    ("Failed to parse tools: Unsupported tool type: {}; tools = []", "invalid_tools"),
    ("image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
     "unsupported_vision"),
    ("vector::_M_range_check: __n (which is 100000000) >= this->size() (which is 49152)", "invalid_tokens"),
]  # fmt: skip


def answer_500(message: str) -> bytes:
    return make_answer({"error": {"code": 500, "message": message, "type": "server_error"}}, "500 Internal")


@pytest.mark.parametrize(("message", "code"), LLAMA_500)
async def test_a_mistake_that_the_engine_answers_with_500_is_the_clients(message: str, code: str) -> None:
    """It is not retried, ejects no replica, and no migration sees it as a failure."""
    ended: list[FinishedRequest] = []
    find = get_engine("llama.cpp").find_mistake
    async with (
        start_gateway(find_mistake=find, on_end=ended.append) as setup,
        add_engine(setup, find_mistake=find, share=0.0) as (other, backend),
    ):
        setup.engine.otherwise = other.otherwise = (answer_500(message),)
        backend.share = 1e-9
        client = await setup.connect()
        for _ in range(EJECT_AFTER + 2):
            answer = await client.post(CHAT, make_chat_body())
            assert (answer.status, answer.error["code"]) == (400, code)
            assert "mmproj" not in answer.error["message"]
        assert not other.seen and setup.backend.health.is_healthy
        assert {one.outcome for one in ended} == {"mistaken"}
        assert setup.count_outcome("refused") == EJECT_AFTER + 2


async def test_an_error_of_every_engine_is_the_requests_and_ejects_none() -> None:
    ended: list[FinishedRequest] = []
    async with start_gateway(on_end=ended.append) as setup, add_engine(setup, on_end=ended.append) as (other, backend):
        setup.engine.otherwise = other.otherwise = (make_answer(b"Internal Server Error", "500 Oops", "text/plain"),)
        client = await setup.connect()
        for _ in range(EJECT_AFTER + 2):
            assert (await client.post(CHAT, make_chat_body())).status == 500
        assert setup.backend.health.is_healthy and backend.health.is_healthy
        assert {one.outcome for one in ended} == {"mistaken"} and len(ended) == 2 * (EJECT_AFTER + 2)


async def test_an_error_that_another_engine_does_not_have_is_the_engines_failure() -> None:
    ended: list[FinishedRequest] = []
    async with start_gateway(on_end=ended.append) as setup, add_engine(setup, share=1e-9):
        setup.engine.otherwise = (make_answer(b"Internal Server Error", "500 Oops", "text/plain"),)
        client = await setup.connect()
        for _ in range(EJECT_AFTER):
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert not setup.backend.health.is_healthy
        assert [one.outcome for one in ended] == ["failed"] * EJECT_AFTER


async def test_a_prompt_that_is_too_long_for_one_engine_alone_counts_against_it() -> None:
    ended: list[FinishedRequest] = []
    find = get_engine("llama.cpp").find_mistake
    text = "request (900 tokens) exceeds the available context size (512 tokens), try increasing it"
    more: dict[str, Any] = {"find_mistake": find, "on_end": ended.append}
    async with start_gateway(context_tokens=512, **more) as setup:
        setup.engine.otherwise = (make_answer({"error": {"code": 400, "message": text}}, "400 Bad Request"),)
        client = await setup.connect()
        answer = await client.post(CHAT, make_chat_body())
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "512 tokens" in answer.error["message"] and "--context" in answer.error["message"]
        async with add_engine(setup, context_tokens=4096, share=0.0):
            await client.post(CHAT, make_chat_body())
    assert [one.outcome for one in ended] == ["mistaken", "refused"]


def test_error_messages_do_not_name_the_engines_options() -> None:
    text = 'no tools. "auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    assert remove_options(text) == "no tools."
    error = read_engine_error(
        400, json.dumps({"error": {"message": "Start it with `--embeddings`"}}).encode(), b"/x", None
    )
    assert error.message == "the engine rejected the request"
    missing = read_engine_error(404, b'{"detail":"Not Found"}', b"/v1/responses", None)
    assert (missing.status, missing.code) == (404, "unsupported_api") and "/v1/responses" in missing.message


# the served name


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"model":"/models/a b.gguf"}\n\n',
        b'data: {"model": "\\u00e4", "choices": [{"delta": {"content": "\\"model\\":\\"x\\""}}]}\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"model":"other"}}\n\n',
        b'data: {"type":"response.created","response":{"metadata":{"model":"mine"},"model":"other"}}\n\n',
    ],
)
async def test_every_event_of_a_stream_has_the_served_name(event: bytes) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(event, event, DONE))
        answer = await (await setup.connect()).post(CHAT, make_chat_body(stream=True))
        renamed = ServedName("small").find_renaming(event)
        assert renamed is not None and answer.body == 2 * event.replace(*renamed) + DONE
        for line in answer.body.splitlines():
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                assert (found.get("message") or found.get("response") or found)["model"] == "small"
        assert b'"metadata":{"model":"mine"}' in answer.body or b"metadata" not in event


@pytest.mark.parametrize("name", ["small", "/models/other", 'a"b'])
async def test_an_answer_has_the_served_name(name: str) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer({"choices": [{"message": {"content": '"model":"x"'}}], "model": name}))
        answer = await (await setup.connect()).post(CHAT, make_chat_body(model="Small Model"))
        assert answer.json == {"choices": [{"message": {"content": '"model":"x"'}}], "model": "small"}


def test_a_stream_with_the_served_name_is_not_changed() -> None:
    for event in (b'data: {"model":"small"}\n\n', b'data: {"model": "small"}\n\n', b": ping\n\n", b'data: {"a":1}\n\n'):
        assert ServedName("small").find_renaming(event) is None


async def test_tokens_of_messages_are_counted_only_for_messages() -> None:
    """llama.cpp answers 500 if they are missing."""
    async with start_gateway(capabilities=NONE) as setup:
        client = await setup.connect()
        mistakes: list[dict[str, Any]] = [{"prompt": "x"}, {"messages": []}, ask_with(5)]
        for body in mistakes:
            answer = await client.post("/v1/messages/count_tokens", body)
            assert (answer.status, answer.json["type"]) == (400, "error")
            assert answer.json["error"]["type"] == "invalid_request_error"
        assert not setup.engine.seen
        assert (await client.post("/v1/messages/count_tokens", make_chat_body())).status == 200


# reasons


async def test_refused_and_failed_requests_are_counted_by_reason() -> None:
    async with start_gateway(capabilities=NONE) as setup:
        client = await setup.connect()
        await client.post(CHAT, b"not json")
        await client.post(CHAT, make_chat_body(model="unknown"))
        await client.post(CHAT, {"messages": []})
        await client.post(CHAT, make_chat_body(tools=[TOOL]))
        setup.engine.answer(make_answer({"error": {"message": "bad temperature"}}, "400 Bad Request"))
        await client.post(CHAT, make_chat_body())
        setup.engine.answer(make_answer({"error": {"message": "out of memory"}}, "500 Oops"))
        await client.post(CHAT, make_chat_body())
        await client.get("/nowhere")
        await client.post(CHAT, make_chat_body())

        def count(reason: str, model: str = "small") -> float | None:
            labels = {"model": model, "reason": reason}
            return setup.gateway.meters.registry.get_sample_value("bedplate_requests_unanswered_total", labels)

        assert (count("bad_body", ""), count("model_not_found", "")) == (1, 1)
        assert (count("invalid_messages"), count("unsupported_tools")) == (1, 1)
        assert (count("refused_by_engine"), count("engine_error")) == (1, 1)
        own = setup.gateway.meters.render_tenant("default").decode()
        assert 'bedplate_tenant_requests_unanswered_total{reason="engine_error",tenant="default"} 1.0' in own
