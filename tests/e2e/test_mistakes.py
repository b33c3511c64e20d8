"""Mistakes of clients against the real engine: 4xx in the format of the API, and the engine continues to serve."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from tests.conftest import Served

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = json.dumps({"max_tokens": 4, **body}).encode()
    request = urllib.request.Request(f"{served.root}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "invalid_messages"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "invalid_messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "invalid_messages"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "unsupported_vision"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "tool_calls": "x"}]}, "invalid_messages"),
    (CHAT, {"messages": QUESTION, "tools": [{"type": "x"}]}, "invalid_tools"),
    (CHAT, {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}, "unsupported_forced_tools"),
    (CHAT, {"messages": QUESTION, "n": 1000}, "unsupported_n"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 20_000}]}, "context_length_exceeded"),
    ("/v1/completions", {"prompt": [49152]}, "invalid_tokens"),
    ("/v1/completions", {"prompt": [2**40]}, "invalid_tokens"),
    ("/v1/embeddings", {"input": "x"}, "unsupported_embeddings"),
    ("/v1/responses", {"input": []}, "invalid_messages"),
    ("/detokenize", {"tokens": [10**8]}, "invalid_tokens"),
]
"""The engine itself answers 500 or 501 to most of these, and 200 to others."""


@pytest.mark.parametrize(("path", "body", "code"), MISTAKES)
def test_a_mistake_is_refused_in_bedplates_terms(served: Served, path: str, body: dict[str, Any], code: str) -> None:
    status, answer = post(served, path, body)
    assert (status, answer["error"]["code"]) == (400, code)
    assert "--alias" not in answer["error"]["message"] and "mmproj" not in answer["error"]["message"]


def test_the_anthropic_api_has_its_own_errors(served: Served) -> None:
    mistakes: list[dict[str, Any]] = [{"messages": []}, {"messages": [{"role": 5, "content": "x"}]}, {"prompt": "x"}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for body in mistakes:
            status, answer = post(served, path, body)
            assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")


def test_json_formats_hold(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    status, answer = post(served, CHAT, {"messages": QUESTION, "response_format": form, "max_tokens": 64, "seed": 1})
    assert status == 200 and isinstance(json.loads(answer["choices"][0]["message"]["content"])["a"], int)
    finished = []
    # An answer that is cut off is no JSON, and the engine may write it between the marks of a code block.
    for seed in range(8):
        plain = {"response_format": {"type": "json_object"}, "max_tokens": 128, "seed": seed}
        status, answer = post(served, CHAT, {"messages": QUESTION, **plain})
        assert status == 200
        (choice,) = answer["choices"]
        finished += [choice["message"]["content"]] if choice["finish_reason"] == "stop" else []
    assert finished and all(isinstance(json.loads(text), dict) for text in finished)


def test_the_name_in_answers_is_the_served_name(served: Served) -> None:
    for name in ("smollm2-135m-instruct", "SmolLM2-135M-Instruct"):
        assert post(served, CHAT, {"messages": QUESTION, "model": name})[1]["model"] == "smollm2-135m-instruct"


def test_the_engine_is_not_blamed(served: Served) -> None:
    """It has no failure in the metrics, was not restarted, and states what it supports."""
    for path, body, _ in MISTAKES:
        post(served, path, body)
    with urllib.request.urlopen(f"{served.root}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert not [line for line in lines if 'outcome="failed"' in line and not line.endswith(" 0.0")]
    assert [line for line in lines if 'reason="unsupported_vision"' in line]
    assert [line for line in lines if line.startswith("bedplate_engine_restarts{") and line.endswith(" 0.0")]
    with urllib.request.urlopen(f"{served.root}/v1/models") as answer:
        (model,) = json.load(answer)["data"]
    assert model["capabilities"]["tools"] == "auto" and model["capabilities"]["json_schema"]
