"""Ollama's API in front of an engine with OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bedplate.engines.traits import RequestTraits
from bedplate.run.gateway.translate.ollama import GenerateTranslation, OllamaTranslation
from bedplate.values.capabilities import Capabilities

from .scripted import CHAT, DONE, USAGE, Answer, End, Setup, make_answer, make_delta, make_stream, start_gateway

USER = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "small:latest", "messages": [USER]}
WHOLE = {
    "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "Hello"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


async def post(setup: Setup, path: str, body: dict[str, Any], **headers: str) -> Answer:
    return await (await setup.connect()).post(path, body, **headers)


def read_lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.decode().splitlines()]


async def test_a_chat_is_streamed_in_lines_unless_the_client_declines() -> None:
    async with start_gateway(requests=RequestTraits()) as setup:
        setup.engine.answer(make_stream(make_delta(""), make_delta("Hel"), make_delta("lo"), USAGE, DONE))
        lines = read_lines(await post(setup, "/api/chat", {**ASKED, "keep_alive": "5m"}))
        assert [line["message"]["content"] for line in lines] == ["Hel", "lo", ""]
        assert [line["done"] for line in lines] == [False, False, True]
        assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"], lines[-1]["done_reason"]) == (7, 3, "stop")
        assert setup.engine.seen[0].target == CHAT and setup.engine.seen[0].json["model"] == "small"
        setup.engine.answer(make_answer(WHOLE))
        made = (await post(setup, "/api/chat", {**ASKED, "stream": False})).json
        assert (made["message"]["content"], made["done"], made["done_reason"]) == ("Hello", True, "length")
        assert "stream" not in setup.engine.seen[1].json
        assert setup.count_outcome("ok") == 2 and setup.read_metric("tokens_total", kind="completion") == 6


async def test_generate_uses_the_models_template() -> None:
    async with start_gateway(requests=RequestTraits()) as setup:
        setup.engine.answer(make_answer(WHOLE))
        asked = {"model": "small", "prompt": "Why?", "system": "Be brief", "stream": False}
        made = (await post(setup, "/api/generate", asked)).json
        assert made["response"] == "Hello" and "message" not in made
        assert [one["content"] for one in setup.engine.seen[0].json["messages"]] == ["Be brief", "Why?"]
        assert setup.engine.seen[0].target == CHAT
        loaded = (await post(setup, "/api/generate", {"model": "small"})).json
        assert loaded["done_reason"] == "load" and len(setup.engine.seen) == 1


def test_options_formats_and_tools_are_translated() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    calls = [{"function": {"name": "look", "arguments": {"x": 1}}}, {"function": {"name": "find", "arguments": {}}}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    body = {
        **ASKED, "tools": [tool], "format": {"type": "object"}, "stream": False, "think": False,
        "options": {"num_predict": 5, "temperature": 0, "num_ctx": 4096, "repeat_penalty": 1.1, "stop": ["a"]},
        "messages": [USER, called, {"role": "tool", "tool_name": "find", "content": "F"},
                     {"role": "tool", "tool_name": "look", "content": "L"}],
    }  # fmt: skip
    chat = json.loads(OllamaTranslation().to_chat(json.dumps(body).encode()))
    assert (chat["max_tokens"], chat["temperature"], chat["stop"], chat["tools"]) == (5, 0, ["a"], [tool])
    assert chat["repetition_penalty"] == chat["repeat_penalty"] == 1.1 and "num_ctx" not in chat
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    look, find = chat["messages"][1]["tool_calls"]
    assert look["function"] == {"name": "look", "arguments": '{"x":1}'}
    results = {one["content"]: one["tool_call_id"] for one in chat["messages"][2:]}
    assert results == {"F": find["id"], "L": look["id"]}
    image = json.loads(GenerateTranslation().to_chat(b'{"prompt": "What?", "images": ["/9j/4AAQ"]}'))
    assert image["messages"][0]["content"][0]["image_url"]["url"] == "data:image/jpeg;base64,/9j/4AAQ"


async def test_a_tool_call_is_sent_as_a_whole() -> None:
    parts = [
        {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"x"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ]
    events = [b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [p]}}]}).encode() + b"\n\n" for p in parts]
    async with start_gateway(requests=RequestTraits()) as setup:
        setup.engine.answer(make_stream(*events, USAGE, DONE))
        lines = read_lines(await post(setup, "/api/chat", ASKED))
        assert [line["message"].get("tool_calls") for line in lines] == [
            [{"function": {"name": "look", "arguments": {"x": 1}}}]
        ]


async def test_texts_are_embedded() -> None:
    rows = {"data": [{"embedding": [1.0, 2.0]}, {"embedding": [3.0, 4.0]}], "usage": {"prompt_tokens": 5}}
    known = Capabilities(generation=False, embeddings=True)
    async with start_gateway(requests=RequestTraits(), capabilities=known) as setup:
        setup.engine.otherwise = (make_answer(rows),)
        made = (await post(setup, "/api/embed", {"model": "small", "input": ["a", "b"]})).json
        assert (made["embeddings"], made["prompt_eval_count"]) == ([[1.0, 2.0], [3.0, 4.0]], 5)
        assert setup.engine.seen[0].target == "/v1/embeddings" and setup.engine.seen[0].json["input"] == ["a", "b"]
        made = (await post(setup, "/api/embeddings", {"model": "small", "prompt": "a"})).json
        assert made == {"embedding": [1.0, 2.0]}
        assert (await post(setup, "/api/show", {"model": "small"})).json["capabilities"] == ["embedding"]


async def test_models_are_listed_shown_and_counted_as_running() -> None:
    async with start_gateway(context_tokens=2048, capabilities=Capabilities(tools="auto")) as setup:
        client = await setup.connect()
        assert [one["model"] for one in (await client.get("/api/tags")).json["models"]] == ["small"]
        (running,) = (await client.get("/api/ps")).json["models"]
        assert (running["name"], running["context_length"]) == ("small", 2048)
        assert (await client.get("/api/version")).json["version"].count(".") == 2
        for name in ("small", "small:latest"):
            shown = (await client.post("/api/show", {"model": name})).json
            assert shown["capabilities"] == ["completion", "tools"]
            assert shown["model_info"]["bedplate.context_length"] == 2048
        missing = await client.post("/api/show", {"model": "other"})
        assert missing.status == 404 and "other" in missing.json["error"]
        assert (await client.get("/api/show")).status == 405


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({**ASKED, "model": "other"}, 404),
        ({**ASKED, "options": {"mirostat": 1}}, 400),
        ({**ASKED, "format": "xml"}, 400),
        ({**ASKED, "options": []}, 400),
    ],
)
async def test_errors_have_ollamas_format(body: dict[str, Any], status: int) -> None:
    async with start_gateway(requests=RequestTraits()) as setup:
        answer = await post(setup, "/api/chat", body)
        assert answer.status == status and isinstance(answer.json["error"], str) and not setup.engine.seen
        bad = await (await setup.connect()).post("/api/chat", b"{not json")
        assert bad.status == 400 and isinstance(bad.json["error"], str)
    async with start_gateway(requests=RequestTraits(), api_key="secret") as setup:
        for path in ("/api/chat", "/api/show"):
            refused = await post(setup, path, ASKED)
            assert refused.status == 401 and isinstance(refused.json["error"], str)


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    async with start_gateway(requests=RequestTraits()) as setup:
        setup.engine.answer(make_stream(make_delta("a")).removesuffix(b"0\r\n\r\n"), End.CLOSE)
        lines = read_lines(await post(setup, "/api/chat", ASKED))
        assert lines[0]["message"]["content"] == "a" and "stopped" in lines[-1]["error"]


async def test_a_path_of_ollama_that_is_not_served_has_an_error_in_its_format() -> None:
    async with start_gateway() as setup:
        answer = await post(setup, "/api/pull", {"model": "small"})
        assert answer.status == 404 and "there is no page at /api/pull" in answer.json["error"]
