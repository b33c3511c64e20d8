"""A backend whose address is a load balancer: a request that failed is sent to the same address once more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.run.gateway import sse

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_END,
    STREAM_HEAD,
    Answer,
    End,
    Setup,
    make_answer,
    make_chat_body,
    make_chunk,
    make_delta,
    make_stream,
    start_gateway,
)

FAILURES = [(End.CLOSE,), (End.RESET,), (make_answer({"error": "a worker died"}, "500 Internal Server Error"),)]


async def ask(setup: Setup, body: dict[str, Any]) -> Answer:
    return await (await setup.connect()).post(CHAT, body)


@pytest.mark.parametrize("failure", FAILURES)
async def test_retries_unstarted_answer_once_at_the_same_address(failure: tuple[Any, ...]) -> None:
    async with start_gateway(attempts=2) as setup:
        setup.engine.answer(*failure)
        setup.engine.answer(make_answer(ANSWER))
        assert (await ask(setup, make_chat_body())).json == ANSWER
        assert setup.engine.seen[0].body == setup.engine.seen[1].body and len(setup.engine.seen) == 2
        assert setup.count_outcome("ok") == 1


@pytest.mark.parametrize("failure", FAILURES)
async def test_retries_at_the_same_address_only_once(failure: tuple[Any, ...]) -> None:
    async with start_gateway(attempts=2) as setup:
        setup.engine.otherwise = failure
        assert (await ask(setup, make_chat_body())).status in (500, 502)
        assert len(setup.engine.seen) == 2


async def test_started_stream_ends_with_an_error_event_without_retry() -> None:
    async with start_gateway(attempts=2) as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), End.CLOSE)
        answer = await ask(setup, make_chat_body(stream=True))
        assert answer.body.startswith(make_delta("a")) and b'"error"' in answer.body and b"[DONE]" not in answer.body
        assert len(setup.engine.seen) == 1


async def test_incomplete_stream_that_closes_normally_ends_with_an_error_event() -> None:
    """Ray's proxy ends a stream like this when a replica is lost."""
    async with start_gateway(attempts=2) as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")) + STREAM_END)
        assert b'"error"' in (await ask(setup, make_chat_body(stream=True))).body


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "Small Model"}, {"model": "small"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_sets_served_model_name_if_the_backend_requires_it(named: dict[str, Any], stream: bool) -> None:
    async with start_gateway(wants_name=True) as setup:
        if stream:
            setup.engine.answer(make_stream(make_delta("a"), DONE))
        body = make_chat_body(stream, **named)
        assert (await ask(setup, body)).status == 200
        seen = setup.engine.seen[0].json
        assert seen.pop("stream_options", None) == ({"include_usage": True} if stream else None)
        assert seen == {**body, "model": "small"}


async def test_keeps_model_name_otherwise() -> None:
    async with start_gateway() as setup:
        await ask(setup, make_chat_body())
        assert "model" not in setup.engine.seen[0].json


@given(
    st.dictionaries(st.text(max_size=8) | st.just("model"), st.integers() | st.text() | st.just({"model": 1})),
    st.text(),
)
def test_setting_model_name_changes_nothing_else(body: dict[str, Any], name: str) -> None:
    assert json.loads(sse.set_model(json.dumps(body).encode(), name)) == {**body, "model": name}


def test_a_model_name_whose_key_has_escapes_is_replaced() -> None:
    assert json.loads(sse.set_model(b'{"mod\\u0065l":"a","seed":1}', "b")) == {"model": "b", "seed": 1}
