"""Rerank, score and classify: what is checked, what is sent on, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from bedplate.values.capabilities import Capabilities

from .scripted import make_answer, start_gateway

RERANK = {"query": "a", "documents": ["b", {"text": "c"}]}
SCORE = {"text_1": "a", "text_2": ["b", "c"]}
CLASSIFY = {"input": ["a", "b"]}
READER = Capabilities(generation=False)


@pytest.mark.parametrize(
    ("path", "target", "api", "body"),
    [
        ("/v1/rerank", "/v1/rerank", "rerank", RERANK),
        ("/v2/rerank", "/v1/rerank", "rerank", RERANK),
        ("/rerank", "/v1/rerank", "rerank", RERANK),
        ("/score", "/score", "score", SCORE),
        ("/v1/score", "/score", "score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
        ("/classify", "/classify", "classify", CLASSIFY),
        ("/v1/classify", "/classify", "classify", {"input": [1, 2]}),
    ],
)
async def test_request_is_sent_on_and_its_tokens_are_counted(
    path: str, target: str, api: str, body: dict[str, Any]
) -> None:
    async with start_gateway(capabilities=READER) as setup:
        setup.engine.answer(make_answer({"results": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}))
        client = await setup.connect()
        assert (await client.post(path, body)).status == 200
        (seen,) = setup.engine.seen
        assert seen.target == target and seen.json == body
        assert setup.read_metric("tokens_total", kind="prompt") == 9 and setup.count_outcome("ok", api=api) == 1


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"content": "a"}]}, "text"),
        ("/v1/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_2"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"text": "a"}, "input"),
    ],
)
async def test_mistake_gets_400_before_an_engine_sees_it(path: str, body: dict[str, Any], word: str) -> None:
    async with start_gateway(capabilities=READER) as setup:
        answer = await (await setup.connect()).post(path, body)
        assert answer.status == 400 and word in answer.error["message"] and answer.error["code"] == "invalid_request"
        assert not setup.engine.seen


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", RERANK), ("/score", SCORE), ("/classify", CLASSIFY)])
async def test_model_that_generates_text_does_not_rank(path: str, body: dict[str, Any]) -> None:
    async with start_gateway(capabilities=Capabilities()) as setup:
        answer = await (await setup.connect()).post(path, body)
        assert answer.status == 400 and answer.error["code"] == "unsupported_task" and not setup.engine.seen
