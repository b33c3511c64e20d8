"""Rerank, score and classify: what is checked, what is sent on, and what is counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bedplate.run.gateway.tasks import read_task
from bedplate.run.gateway.tenants import Demand
from bedplate.values.capabilities import Capabilities
from bedplate.values.tenant import Tenant
from bedplate.values.traffic import ServedRequest

from .scripted import make_answer, request, start_gateway, wait_until

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


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        ("rerank", {"query": "q" * 400, "documents": ["d" * 4, {"text": "d" * 4}] * 50}, 100 * 101),
        ("score", {"text_1": "q" * 400, "text_2": ["d" * 4] * 100}, 100 * 101),
        ("score", {"text_1": ["q" * 400] * 2, "text_2": ["d" * 4] * 2}, 202),
        ("score", {"text_1": ["q" * 400], "text_2": "d" * 4}, 101),
        ("classify", {"input": "a" * 40}, 10),
        ("classify", {"input": ["a" * 40, "ä" * 20]}, 20),
        ("classify", {"input": [1, 2, 3]}, 3),
        ("classify", {"input": [[1, 2, 3], [4]]}, 4),
    ],
)
def test_query_is_charged_with_each_of_its_documents(api: Any, body: dict[str, Any], tokens: int) -> None:
    demand = read_task(api, json.dumps(body).encode(), READER)
    assert isinstance(demand, Demand) and (demand.prompt_tokens, demand.sequences) == (tokens, 1)


async def test_long_query_for_many_documents_uses_up_the_limit_while_it_runs() -> None:
    async with start_gateway(capabilities=READER) as setup:
        setup.gateway.tenants.replace([Tenant(name="default", tokens_per_minute=1_500_000)], ())
        ends = asyncio.Event()
        setup.engine.answer(ends, make_answer({"results": [], "usage": {"prompt_tokens": 1_010_000}}))
        body = {"query": "q" * 4_000, "documents": ["d" * 40] * 1_000}
        first, second = await setup.connect(), await setup.connect()
        await first.send(request("/v1/rerank", body))
        await setup.engine.request()
        answer = await second.post("/v1/rerank", body)
        assert answer.status == 429 and answer.error["code"] == "tokens_per_minute" and len(setup.engine.seen) == 1
        ends.set()
        assert (await first.answer()).status == 200


@pytest.mark.parametrize("aborted", [False, True], ids=["no usage", "aborted"])
async def test_request_that_no_engine_counts_is_recorded_with_the_estimate(aborted: bool) -> None:
    ended: list[ServedRequest] = []
    async with start_gateway(capabilities=READER) as setup:
        setup.gateway.seen = lambda row, content: ended.append(row)
        never = asyncio.Event()
        setup.engine.answer(never if aborted else make_answer({"results": []}))
        client = await setup.connect()
        await client.send(request("/v1/rerank", {"query": "q" * 400, "documents": ["d" * 4] * 10}))
        if aborted:
            await wait_until(lambda: setup.engine.seen, "the request at the engine")
            client.reset()
        await wait_until(lambda: ended, "the record")
        assert ended[0].prompt_tokens == 1_010 and ended[0].outcome == ("cancelled" if aborted else "ok")
