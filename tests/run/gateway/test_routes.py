"""Several engines behind one model: whose turn it is, who is sick, and how one takes the place of another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import pytest

from bedplate.run.gateway import Backend
from bedplate.run.gateway import backend as backend_module
from bedplate.run.gateway.backend import SICK_AFTER, Health

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_HEAD,
    Answer,
    End,
    Engine,
    House,
    backend_at,
    chat,
    chunk,
    delta,
    plain,
    request,
    serving,
    until,
    within,
)

STREAM = chat(stream=True)


@contextlib.asynccontextmanager
async def another(house: House, **more: Any) -> AsyncIterator[tuple[Engine, Backend]]:
    """One more engine for the same model."""
    engine = Engine()
    await engine.start()
    more = {"engine": "pytorch", "group": "pytorch", **more}
    backend = backend_at(engine.port, **more)
    house.gateway.add(backend)
    try:
        yield engine, backend
    finally:
        await engine.stop()


async def ask(house: House, body: dict[str, Any] | None = None, **headers: str) -> Answer:
    client = await house.client()
    return await client.post(CHAT, body or chat(), **headers)


# who gets it


@pytest.mark.parametrize(("share", "expected"), [(1.0, 20), (0.25, 8), (1 / 9, 4), (0.0, 0)])
async def test_requests_are_divided_by_share_exactly(share: float, expected: int) -> None:
    async with serving() as house, another(house, share=share) as (other, _):
        client = await house.client()
        for _ in range(40):
            assert (await client.post(CHAT, chat())).status == 200
        assert len(other.seen) == expected and len(house.engine.seen) == 40 - expected


async def test_a_share_may_be_changed_at_any_time() -> None:
    async with serving() as house, another(house, share=0.0) as (other, backend):
        client = await house.client()
        for share, mine in ((0.0, 0), (1.0, 5), (0.0, 5)):
            backend.share = share
            for _ in range(10):
                await client.post(CHAT, chat())
            assert len(other.seen) == mine
        house.backend.share, backend.share = 0.0, 1.0
        await client.post(CHAT, chat())
        assert len(other.seen) == 6


def test_a_share_is_not_negative() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        backend_at(1).share = -1.0


async def test_a_backend_without_room_gets_its_part_when_it_has_room_again() -> None:
    async with serving() as house, another(house, max_connections=1) as (other, _):
        gate = asyncio.Event()
        other.answer(gate, plain(ANSWER))
        client = await house.client()
        waiting = [asyncio.ensure_future(ask(house)) for _ in range(2)]
        await until(lambda: other.seen and house.engine.seen, "one request at each")
        for _ in range(6):  # nobody waits while one engine has room
            assert (await client.post(CHAT, chat())).status == 200
        assert len(other.seen) == 1
        gate.set()
        await within(asyncio.gather(*waiting))
        for _ in range(6):
            await client.post(CHAT, chat())
        assert len(other.seen) == 7


def replica(house: House, **more: Any) -> dict[str, Any]:
    return {"engine": house.backend.engine, "group": house.backend.group, **more}


async def test_a_conversation_stays_at_one_replica_and_conversations_are_spread() -> None:
    async with serving() as house, another(house, **replica(house)) as (other, _):
        client = await house.client()
        for number in range(40):
            turns: list[dict[str, str]] = [{"role": "system", "content": "be brief" * 100}]
            places = set()
            for turn in range(3):
                turns.append({"role": "user", "content": f"{number}.{turn}"})
                before = len(other.seen)
                await client.post(CHAT, {"messages": turns})
                places.add(len(other.seen) > before)
                turns.append({"role": "assistant", "content": "yes"})
            assert len(places) == 1
        assert 20 < len(other.seen) < 100


async def test_the_clients_own_key_for_a_conversation_goes_before_its_words() -> None:
    async with serving() as house, another(house, **replica(house)) as (other, _):
        client = await house.client()
        for number in range(20):
            await client.post(CHAT, chat(prompt_cache_key="mine", messages=[{"role": "user", "content": str(number)}]))
        assert {len(other.seen), len(house.engine.seen)} == {0, 20}


async def test_a_conversation_leaves_its_replica_when_that_has_much_more_to_do() -> None:
    async with serving() as house, another(house, **replica(house)) as (other, _):
        gate = asyncio.Event()
        house.engine.otherwise = other.otherwise = (gate, plain(ANSWER))
        asking = [asyncio.ensure_future(ask(house)) for _ in range(16)]
        await until(lambda: len(other.seen) + len(house.engine.seen) == 16, "all to be sent")
        assert abs(len(other.seen) - len(house.engine.seen)) <= 5
        gate.set()
        await within(asyncio.gather(*asking))


# who is sick


@pytest.mark.parametrize("how", list(End))
async def test_what_one_backend_loses_another_answers(how: End) -> None:
    async with serving() as house, another(house) as (other, _):
        house.engine.otherwise = (how,)
        for number in range(6):
            other.answer(plain({"n": number}))
            assert (await ask(house)).json == {"n": number}
        assert house.outcome("ok", engine="pytorch") == 6
        assert len(house.engine.seen) <= SICK_AFTER


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad", "503 Busy"])
async def test_what_one_backend_fails_at_another_answers(status: str) -> None:
    async with serving() as house, another(house) as (other, _):
        house.engine.otherwise = (plain(b"{}", status),)
        assert [(await ask(house)).status for _ in range(4)] == [200] * 4
        assert len(other.seen) == 4
        other.otherwise = (plain(b"{}", status),)
        assert (await ask(house)).status == int(status[:3])


async def test_what_one_backend_refuses_is_not_asked_of_another() -> None:
    async with serving() as house, another(house, share=0.001) as (other, _):
        house.engine.answer(plain({"error": {"message": "too long"}}, "400 Bad Request"))
        assert (await ask(house)).status == 400
        assert not other.seen


async def test_a_stream_that_has_begun_is_never_begun_again() -> None:
    async with serving() as house, another(house, share=0.001) as (other, _):
        house.engine.answer(STREAM_HEAD + chunk(delta("a")), End.RESET)
        answer = await ask(house, STREAM)
        assert answer.body.startswith(delta("a")) and b'"engine_stopped"' in answer.body
        assert not other.seen


async def test_a_stream_without_a_whole_event_is_begun_elsewhere() -> None:
    async with serving() as house, another(house, share=0.001) as (other, _):
        house.engine.answer(STREAM_HEAD + chunk(delta("a")[:9]), End.RESET)
        other.answer(STREAM_HEAD + chunk(delta("b")) + chunk(DONE) + b"0\r\n\r\n")
        answer = await ask(house, STREAM)
        assert (answer.status, answer.body) == (200, delta("b") + DONE)


async def test_a_half_answer_of_one_backend_is_not_mixed_with_that_of_another() -> None:
    async with serving() as house, another(house, share=0.001) as (other, _):
        house.engine.answer(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half":', End.CLOSE)
        other.answer(plain({"whole": 1}))
        assert (await ask(house)).json == {"whole": 1}


async def test_when_all_backends_fail_each_is_tried_once_and_the_client_is_told() -> None:
    async with serving() as house, another(house) as (other, _):
        house.engine.otherwise = other.otherwise = (End.CLOSE,)
        answer = await ask(house)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        assert len(house.engine.seen) == len(other.seen) == 1


async def test_a_sick_replica_is_left_alone_and_tried_again_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FIRST_REST_S", 0.05)
    async with serving() as house, another(house):
        house.backend.health = Health()
        house.engine.otherwise = (plain(b"{}", "500 Oops"),)
        client = await house.client()
        while house.backend.health.is_well:
            assert (await client.post(CHAT, chat())).status == 200
        assert len(house.engine.seen) == SICK_AFTER
        house.engine.otherwise = (plain(ANSWER),)
        await until(lambda: house.backend.health.may_try(monotonic()), "its rest to end")
        while not house.backend.health.is_well:
            assert (await client.post(CHAT, chat())).status == 200
        assert len(house.engine.seen) == SICK_AFTER + 1


def test_each_rest_is_longer_than_the_last_and_a_success_ends_it() -> None:
    health = Health()
    for _ in range(SICK_AFTER - 1):
        health.failed(0.0)
    assert health.is_well and health.may_try(0.0)
    health.failed(0.0)
    assert not health.may_try(0.9) and health.may_try(1.0)
    health.sent()
    assert not health.may_try(1.0)  # one at a time
    health.failed(1.0)
    assert not health.may_try(2.9) and health.may_try(3.0)
    health.sent()
    health.ended_otherwise()
    assert health.may_try(3.0)
    for _ in range(20):
        health.failed(3.0)
    assert health.may_try(33.0)
    health.succeeded()
    assert health.is_well and health.may_try(0.0)


async def test_a_single_backend_is_asked_however_sick_it_is() -> None:
    async with serving() as house:
        house.engine.otherwise = (plain(b"{}", "500 Oops"),)
        for _ in range(2 * SICK_AFTER):
            assert (await ask(house)).status == 500
        house.engine.otherwise = (plain(ANSWER),)
        assert (await ask(house)).status == 200


# taking one away


async def test_a_backend_that_is_removed_gets_nothing_new_and_ends_what_it_has() -> None:
    async with serving() as house, another(house, share=0.001) as (other, _):
        gate = asyncio.Event()
        house.engine.answer(gate, plain({"n": 1}))
        first = asyncio.ensure_future(ask(house))
        await house.engine.request()
        gone = house.gateway.remove(house.backend)
        assert (await ask(house)).status == 200 and len(other.seen) == 1
        assert house.backend.in_flight == 1 and house.backend in house.gateway.backends
        gate.set()
        assert await within(gone)
        assert (await within(first)).json == {"n": 1}
        assert house.backend not in house.gateway.backends
        house.gateway.add(house.backend)


async def test_a_backend_that_is_not_done_in_time_stays_until_it_is_asked_again() -> None:
    async with serving() as house, another(house):
        gate = asyncio.Event()
        house.engine.otherwise = (STREAM_HEAD + chunk(delta("a")), gate)
        house.gateway.backends[1].share = 0.0
        client = await house.client()
        await client.send(request(CHAT, STREAM))
        await client.head()
        house.gateway.backends[1].share = 1.0
        assert not await house.gateway.remove(house.backend, within_s=0.02)
        assert house.backend in house.gateway.backends
        assert await within(house.gateway.remove(house.backend, within_s=0.02, cut=True))
        pieces = b""
        while piece := await client.chunk():
            pieces += piece
        assert pieces.startswith(delta("a")) and b"was stopped" in pieces
        house.gateway.add(house.backend)


async def test_a_model_without_a_backend_is_not_served_any_more() -> None:
    async with serving() as house:
        assert await within(house.gateway.remove(house.backend))
        assert (await ask(house, chat(model="small"))).status == 404
        house.gateway.add(house.backend)
        house.backend.share = 1.0
        assert (await ask(house, chat(model="small"))).status == 200


# holding


async def test_what_comes_while_an_engine_is_changed_waits_and_nothing_of_it_is_lost() -> None:
    async with serving() as house:
        house.gateway.hold("small", most=3)
        asking = [asyncio.ensure_future(ask(house)) for _ in range(3)]
        await until(lambda: house.waiting() == 3, "three to wait")
        refused = await ask(house)
        assert (refused.status, refused.error["code"]) == (503, "held_full")
        assert int(refused.headers["retry-after"]) > 0
        assert (await (await house.client()).get("/health")).status == 200
        assert await within(house.gateway.remove(house.backend))
        assert house.waiting() == 3 and not house.engine.seen
        new = Engine()
        await new.start()
        house.gateway.add(backend_at(new.port))
        house.gateway.release("small")
        assert [a.json for a in await within(asyncio.gather(*asking))] == [ANSWER] * 3
        assert len(new.seen) == 3
        await within(house.gateway.remove(house.gateway.backends[0]))
        await new.stop()
        house.gateway.add(house.backend)
        house.backend.share = 1.0


async def test_what_is_under_way_when_a_hold_begins_goes_on() -> None:
    async with serving() as house:
        gate = asyncio.Event()
        house.engine.answer(gate, plain({"n": 1}))
        first = asyncio.ensure_future(ask(house))
        await house.engine.request()
        house.gateway.hold("small")
        second = asyncio.ensure_future(ask(house))
        await until(house.waiting, "the second to wait")
        gate.set()
        assert (await within(first)).json == {"n": 1}
        assert house.waiting() == 1 and len(house.engine.seen) == 1
        house.gateway.release("small")
        assert (await within(second)).json == ANSWER


async def test_whoever_is_held_for_too_long_is_told() -> None:
    async with serving() as house:
        house.gateway.hold("small", wait_s=0.0)
        waiting = asyncio.ensure_future(ask(house))
        await until(house.waiting, "it to wait")
        house.gateway.tick()
        answer = await within(waiting)
        assert (answer.status, answer.error["code"]) == (503, "held_too_long")
        assert "retry-after" in answer.headers and not house.engine.seen
        house.gateway.release("small")


async def test_a_client_that_leaves_while_it_is_held_makes_room() -> None:
    async with serving() as house:
        house.gateway.hold("small", most=1)
        leaving = await house.client()
        await leaving.send(request(CHAT, chat()))
        await until(house.waiting, "it to wait")
        await leaving.close()
        await until(lambda: not house.waiting(), "it to be forgotten")
        other = asyncio.ensure_future(ask(house))
        await until(house.waiting, "another to wait")
        house.gateway.release("small")
        assert (await within(other)).json == ANSWER


# on demand


async def test_a_model_that_is_known_is_started_by_its_first_request() -> None:
    async with serving() as house:
        wanted: list[str] = []
        house.gateway.wanted = wanted.append
        house.gateway.known("Large", "unused")
        listed = (await (await house.client()).get("/v1/models")).json["data"]
        assert [row["id"] for row in listed] == ["small", "Large", "unused"]
        asking = [asyncio.ensure_future(ask(house, chat(model="large"))) for _ in range(3)]
        await until(lambda: house.waiting() == 3, "three to wait")
        assert wanted == ["Large"]
        large = Engine()
        await large.start()
        backend = backend_at(large.port, "Large")
        backend.state = "loading"
        house.gateway.add(backend)
        asking.append(asyncio.ensure_future(ask(house, chat(model="large"))))
        await until(lambda: house.waiting() == 4, "a fourth to wait")
        backend.state = "ready"
        assert [a.status for a in await within(asyncio.gather(*asking))] == [200] * 4
        assert len(large.seen) == 4 and wanted == ["Large"]
        assert await within(house.gateway.remove(backend))  # unloaded
        again = asyncio.ensure_future(ask(house, chat(model="large")))
        await until(lambda: len(wanted) == 2, "it to be wanted again")
        house.gateway.give_up("Large", "it does not fit beside small")
        answer = await within(again)
        assert (answer.status, answer.error["message"]) == (503, "it does not fit beside small")
        await large.stop()
        house.gateway.unknown("Large")
        assert (await ask(house, chat(model="large"))).status == 404


async def test_a_model_that_is_not_loaded_is_found_by_all_of_its_names() -> None:
    async with serving() as house:
        wanted: list[str] = []
        house.gateway.wanted = wanted.append
        house.gateway.known("large", aliases=("owner/Large", "large.gguf"))
        for loaded in (False, True, False):
            large = Engine()
            await large.start()
            backend = backend_at(large.port, "large")
            if loaded:
                house.gateway.add(backend)
            asking = [asyncio.ensure_future(ask(house, chat(model=name))) for name in ("Owner/large", "LARGE.gguf")]
            if not loaded:
                await until(lambda: house.waiting() == 2, "both to wait")
                assert wanted.pop() == "large" and not wanted
                house.gateway.add(backend)
            assert [a.status for a in await within(asyncio.gather(*asking))] == [200] * 2
            assert await within(house.gateway.remove(backend))
            await large.stop()
        assert (await ask(house, chat(model="small.gguf"))).status == 200


async def test_a_model_that_is_started_on_demand_holds_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.run.gateway.routes.MOST_HELD", 2)
    async with serving() as house:
        house.gateway.known("large")
        asking = [asyncio.ensure_future(ask(house, chat(model="large"))) for _ in range(2)]
        await until(lambda: house.waiting() == 2, "two to wait")
        assert (await ask(house, chat(model="large"))).status == 503
        assert (await ask(house, chat(model="small"))).status == 200
        house.gateway.give_up("large", "no")
        assert [a.status for a in await within(asyncio.gather(*asking))] == [503, 503]


async def test_what_waits_for_an_engine_on_demand_outlives_it() -> None:
    """It is unloaded, or dies, while requests wait for their turn: they wait for the next one."""
    async with serving(max_connections=1) as house:
        wanted: list[str] = []
        house.gateway.wanted = wanted.append
        house.gateway.known("small")
        gate = asyncio.Event()
        house.engine.answer(gate, plain(ANSWER))
        asking = [asyncio.ensure_future(ask(house)) for _ in range(3)]
        await until(lambda: house.waiting() == 2, "two to wait")
        await house.engine.request()
        house.backend.state = "restarting"
        await until(lambda: wanted == ["small"], "it to be wanted")
        gate.set()
        await asyncio.sleep(0)
        assert house.waiting() == 2
        house.backend.state = "ready"
        assert [a.status for a in await within(asyncio.gather(*asking))] == [200] * 3


async def test_a_request_that_waits_for_another_backend_does_not_spin() -> None:
    async with serving() as house, another(house, max_connections=1, share=0.001) as (other, _):
        gate = asyncio.Event()
        other.otherwise = (gate, plain(ANSWER))
        house.backend.share = 0.0
        first = asyncio.ensure_future(ask(house))
        await other.request()
        house.backend.share = 1.0
        house.engine.answer(End.CLOSE)
        second = asyncio.ensure_future(ask(house))
        await until(house.waiting, "it to wait for the other")
        turns = 0

        def count(route: object = house.gateway.routes[0], real: Any = house.gateway.routes[0]._drain) -> None:
            nonlocal turns
            turns += 1
            real()

        house.gateway.routes[0]._drain = count  # type: ignore[method-assign]
        for _ in range(50):
            await asyncio.sleep(0)
        assert turns < 5
        gate.set()
        assert [a.status for a in await within(asyncio.gather(first, second))] == [200, 200]


async def test_names_of_models_go_before_aliases_of_others() -> None:
    other = backend_at(1, "small.gguf")
    async with serving(other) as house:
        named, aliased = house.gateway.route_for("SMALL.gguf"), house.gateway.route_for("small")
        assert named is not None and named.backends == [other]
        assert aliased is not None and aliased.backends == [house.backend]
        assert house.gateway.route_for(None) is None


# before latency collapses


async def test_a_request_that_would_wait_for_too_long_is_turned_away_at_once() -> None:
    async with serving(max_connections=1) as house:
        gate = asyncio.Event()
        house.engine.answer(gate, plain(ANSWER))
        first = asyncio.ensure_future(ask(house))
        await house.engine.request()
        gate.set()
        await within(first)
        gate.clear()
        (route,) = house.gateway.routes
        assert route._service_s is not None
        route.max_wait_s = 2.5 * route._service_s  # the third that waits would wait for longer
        house.engine.otherwise = (gate, plain(ANSWER))
        asking = []
        for number in range(3):
            asking.append(asyncio.ensure_future(ask(house)))
            await until(lambda n=number: len(house.engine.seen) + house.waiting() == n + 2, "it to be taken")  # type: ignore[misc]
        answer = await ask(house)
        assert (answer.status, answer.error["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert house.metric("requests_total", api="chat", outcome="turned_away") == 1
        gate.set()
        assert [a.status for a in await within(asyncio.gather(*asking))] == [200] * 3
