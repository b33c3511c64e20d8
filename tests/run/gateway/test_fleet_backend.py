"""A backend with several engines behind its one address: a request that one of them failed goes there once more."""

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
    House,
    chat,
    chunk,
    delta,
    plain,
    serving,
    whole_stream,
)

FAILURES = [(End.CLOSE,), (End.RESET,), (plain({"error": "a worker died"}, "500 Internal Server Error"),)]


async def ask(house: House, body: dict[str, Any]) -> Answer:
    return await (await house.client()).post(CHAT, body)


@pytest.mark.parametrize("failure", FAILURES)
async def test_what_nobody_has_seen_is_tried_once_more_at_the_same_address(failure: tuple[Any, ...]) -> None:
    async with serving(attempts=2) as house:
        house.engine.answer(*failure)
        house.engine.answer(plain(ANSWER))
        assert (await ask(house, chat())).json == ANSWER
        assert house.engine.seen[0].body == house.engine.seen[1].body and len(house.engine.seen) == 2
        assert house.outcome("ok") == 1


@pytest.mark.parametrize("failure", FAILURES)
async def test_and_no_more_often_than_that(failure: tuple[Any, ...]) -> None:
    async with serving(attempts=2) as house:
        house.engine.otherwise = failure
        assert (await ask(house, chat())).status in (500, 502)
        assert len(house.engine.seen) == 2


async def test_a_stream_that_was_begun_ends_with_an_error_event_and_is_not_repeated() -> None:
    async with serving(attempts=2) as house:
        house.engine.answer(STREAM_HEAD + chunk(delta("a")), End.CLOSE)
        answer = await ask(house, chat(stream=True))
        assert answer.body.startswith(delta("a")) and b'"error"' in answer.body and b"[DONE]" not in answer.body
        assert len(house.engine.seen) == 1


async def test_a_stream_that_ends_politely_but_early_ends_with_an_error_event() -> None:
    """As Ray's proxy ends it when a replica is lost in the middle."""
    async with serving(attempts=2) as house:
        house.engine.answer(STREAM_HEAD + chunk(delta("a")) + STREAM_END)
        assert b'"error"' in (await ask(house, chat(stream=True))).body


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "Small Model"}, {"model": "small"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_is_named_as_it_is_served_where_that_is_wanted(named: dict[str, Any], stream: bool) -> None:
    async with serving(wants_name=True) as house:
        if stream:
            house.engine.answer(whole_stream(delta("a"), DONE))
        body = chat(stream, **named)
        assert (await ask(house, body)).status == 200
        seen = house.engine.seen[0].json
        assert seen.pop("stream_options", None) == ({"include_usage": True} if stream else None)
        assert seen == {**body, "model": "small"}


async def test_otherwise_it_stays_as_it_came() -> None:
    async with serving() as house:
        await ask(house, chat())
        assert "model" not in house.engine.seen[0].json


@given(
    st.dictionaries(st.text(max_size=8) | st.just("model"), st.integers() | st.text() | st.just({"model": 1})),
    st.text(),
)
def test_naming_the_model_changes_nothing_else(body: dict[str, Any], name: str) -> None:
    assert json.loads(sse.with_model(json.dumps(body).encode(), name)) == {**body, "model": name}
