"""Several engines for one model: routing, ejection of failing engines, and replacement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import pytest

from bedplate.run.gateway import GatewayBackend
from bedplate.run.gateway import backend as backend_module
from bedplate.run.gateway.backend import EJECT_AFTER, Health

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_HEAD,
    Answer,
    End,
    Engine,
    Setup,
    make_answer,
    make_backend,
    make_chat_body,
    make_chunk,
    make_delta,
    request,
    start_gateway,
    wait_until,
    wait_within,
)

STREAM = make_chat_body(stream=True)


@contextlib.asynccontextmanager
async def add_engine(setup: Setup, **more: Any) -> AsyncIterator[tuple[Engine, GatewayBackend]]:
    """One more engine for the same model."""
    engine = Engine()
    await engine.start()
    more = {"engine": "pytorch", "group": "pytorch", **more}
    backend = make_backend(engine.port, **more)
    setup.gateway.add(backend)
    try:
        yield engine, backend
    finally:
        await engine.stop()


async def ask(setup: Setup, body: dict[str, Any] | None = None, **headers: str) -> Answer:
    client = await setup.connect()
    return await client.post(CHAT, body or make_chat_body(), **headers)


# routing


@pytest.mark.parametrize(("share", "expected"), [(1.0, 20), (0.25, 8), (1 / 9, 4), (0.0, 0)])
async def test_requests_are_divided_by_share_exactly(share: float, expected: int) -> None:
    async with start_gateway() as setup, add_engine(setup, share=share) as (other, _):
        client = await setup.connect()
        for _ in range(40):
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert len(other.seen) == expected and len(setup.engine.seen) == 40 - expected


async def test_a_share_may_be_changed_at_any_time() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.0) as (other, backend):
        client = await setup.connect()
        for share, mine in ((0.0, 0), (1.0, 5), (0.0, 5)):
            backend.share = share
            for _ in range(10):
                await client.post(CHAT, make_chat_body())
            assert len(other.seen) == mine
        setup.backend.share, backend.share = 0.0, 1.0
        await client.post(CHAT, make_chat_body())
        assert len(other.seen) == 6


def test_rejects_negative_share() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        make_backend(1).share = -1.0


async def test_backend_without_free_slot_gets_its_share_later() -> None:
    async with start_gateway() as setup, add_engine(setup, max_connections=1) as (other, _):
        gate = asyncio.Event()
        other.answer(gate, make_answer(ANSWER))
        client = await setup.connect()
        waiting = [asyncio.ensure_future(ask(setup)) for _ in range(2)]
        await wait_until(lambda: other.seen and setup.engine.seen, "one request at each")
        for _ in range(6):  # no request waits while one engine has a free slot
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert len(other.seen) == 1
        gate.set()
        await wait_within(asyncio.gather(*waiting))
        for _ in range(6):
            await client.post(CHAT, make_chat_body())
        assert len(other.seen) == 7


def describe_replica(setup: Setup, **more: Any) -> dict[str, Any]:
    return {"engine": setup.backend.engine, "group": setup.backend.group, **more}


async def test_conversation_stays_on_one_replica_and_conversations_are_distributed() -> None:
    async with start_gateway() as setup, add_engine(setup, **describe_replica(setup)) as (other, _):
        client = await setup.connect()
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


async def test_prompt_cache_key_takes_precedence_over_the_prompt() -> None:
    async with start_gateway() as setup, add_engine(setup, **describe_replica(setup)) as (other, _):
        client = await setup.connect()
        for number in range(20):
            await client.post(
                CHAT, make_chat_body(prompt_cache_key="mine", messages=[{"role": "user", "content": str(number)}])
            )
        assert {len(other.seen), len(setup.engine.seen)} == {0, 20}


async def test_conversation_leaves_its_replica_when_that_is_overloaded() -> None:
    async with start_gateway() as setup, add_engine(setup, **describe_replica(setup)) as (other, _):
        gate = asyncio.Event()
        setup.engine.otherwise = other.otherwise = (gate, make_answer(ANSWER))
        asking = [asyncio.ensure_future(ask(setup)) for _ in range(16)]
        await wait_until(lambda: len(other.seen) + len(setup.engine.seen) == 16, "all to be sent")
        assert abs(len(other.seen) - len(setup.engine.seen)) <= 5
        gate.set()
        await wait_within(asyncio.gather(*asking))


# retries and ejection


@pytest.mark.parametrize("how", list(End))
async def test_retries_lost_request_on_another_backend(how: End) -> None:
    async with start_gateway() as setup, add_engine(setup) as (other, _):
        setup.engine.otherwise = (how,)
        for number in range(6):
            other.answer(make_answer({"n": number}))
            assert (await ask(setup)).json == {"n": number}
        assert setup.count_outcome("ok", engine="pytorch") == 6
        assert len(setup.engine.seen) <= EJECT_AFTER


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad", "503 Busy"])
async def test_retries_failed_request_on_another_backend(status: str) -> None:
    async with start_gateway() as setup, add_engine(setup) as (other, _):
        setup.engine.otherwise = (make_answer(b"{}", status),)
        assert [(await ask(setup)).status for _ in range(4)] == [200] * 4
        assert len(other.seen) == 4
        other.otherwise = (make_answer(b"{}", status),)
        assert (await ask(setup)).status == int(status[:3])


async def test_does_not_retry_rejected_request() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.001) as (other, _):
        setup.engine.answer(make_answer({"error": {"message": "too long"}}, "400 Bad Request"))
        assert (await ask(setup)).status == 400
        assert not other.seen


async def test_never_restarts_a_started_stream() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.001) as (other, _):
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), End.RESET)
        answer = await ask(setup, STREAM)
        assert answer.body.startswith(make_delta("a")) and b'"engine_stopped"' in answer.body
        assert not other.seen


async def test_retries_stream_without_a_complete_event() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.001) as (other, _):
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")[:9]), End.RESET)
        other.answer(STREAM_HEAD + make_chunk(make_delta("b")) + make_chunk(DONE) + b"0\r\n\r\n")
        answer = await ask(setup, STREAM)
        assert (answer.status, answer.body) == (200, make_delta("b") + DONE)


async def test_partial_answer_is_not_mixed_with_another_backends() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.001) as (other, _):
        setup.engine.answer(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half":', End.CLOSE)
        other.answer(make_answer({"whole": 1}))
        assert (await ask(setup)).json == {"whole": 1}


async def test_tries_each_backend_once_then_answers_with_an_error() -> None:
    async with start_gateway() as setup, add_engine(setup) as (other, _):
        setup.engine.otherwise = other.otherwise = (End.CLOSE,)
        answer = await ask(setup)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        assert len(setup.engine.seen) == len(other.seen) == 1


async def test_ejects_failing_replica_and_sends_one_trial_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FIRST_PAUSE_S", 0.05)
    async with start_gateway() as setup, add_engine(setup):
        setup.backend.health = Health()
        setup.engine.otherwise = (make_answer(b"{}", "500 Oops"),)
        client = await setup.connect()
        while setup.backend.health.is_healthy:
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert len(setup.engine.seen) == EJECT_AFTER
        setup.engine.otherwise = (make_answer(ANSWER),)
        await wait_until(lambda: setup.backend.health.can_try(monotonic()), "its rest to end")
        while not setup.backend.health.is_healthy:
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert len(setup.engine.seen) == EJECT_AFTER + 1


def test_each_failed_trial_doubles_the_pause_and_success_ends_it() -> None:
    health = Health()
    for _ in range(EJECT_AFTER - 1):
        health.record_failure(0.0)
    assert health.is_healthy and health.can_try(0.0)
    health.record_failure(0.0)
    assert not health.can_try(0.9) and health.can_try(1.0)
    health.record_sent()
    assert not health.can_try(1.0)  # one at a time
    health.record_failure(1.0)
    assert not health.can_try(2.9) and health.can_try(3.0)
    health.record_sent()
    health.record_inconclusive()
    assert health.can_try(3.0)
    for _ in range(20):
        health.record_failure(3.0)
    assert health.can_try(33.0)
    health.record_success()
    assert health.is_healthy and health.can_try(0.0)


async def test_single_failing_backend_still_gets_requests() -> None:
    async with start_gateway() as setup:
        setup.engine.otherwise = (make_answer(b"{}", "500 Oops"),)
        for _ in range(2 * EJECT_AFTER):
            assert (await ask(setup)).status == 500
        setup.engine.otherwise = (make_answer(ANSWER),)
        assert (await ask(setup)).status == 200


# removal


async def test_removed_backend_finishes_its_requests_and_gets_no_new_ones() -> None:
    async with start_gateway() as setup, add_engine(setup, share=0.001) as (other, _):
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer({"n": 1}))
        first = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        gone = setup.gateway.remove(setup.backend)
        assert (await ask(setup)).status == 200 and len(other.seen) == 1
        assert setup.backend.in_flight == 1 and setup.backend in setup.gateway.backends
        gate.set()
        assert await wait_within(gone)
        assert (await wait_within(first)).json == {"n": 1}
        assert setup.backend not in setup.gateway.backends
        setup.gateway.add(setup.backend)


async def test_backend_that_does_not_finish_in_time_stays_until_removed_again() -> None:
    async with start_gateway() as setup, add_engine(setup):
        gate = asyncio.Event()
        setup.engine.otherwise = (STREAM_HEAD + make_chunk(make_delta("a")), gate)
        setup.gateway.backends[1].share = 0.0
        client = await setup.connect()
        await client.send(request(CHAT, STREAM))
        await client.head()
        setup.gateway.backends[1].share = 1.0
        assert not await setup.gateway.remove(setup.backend, within_s=0.02)
        assert setup.backend in setup.gateway.backends
        assert await wait_within(setup.gateway.remove(setup.backend, within_s=0.02, cut=True))
        pieces = b""
        while piece := await client.chunk():
            pieces += piece
        assert pieces.startswith(make_delta("a")) and b"was stopped" in pieces
        setup.gateway.add(setup.backend)


async def test_model_without_backend_is_removed() -> None:
    async with start_gateway() as setup:
        assert await wait_within(setup.gateway.remove(setup.backend))
        assert (await ask(setup, make_chat_body(model="small"))).status == 404
        setup.gateway.add(setup.backend)
        setup.backend.share = 1.0
        assert (await ask(setup, make_chat_body(model="small"))).status == 200


# holding


async def test_requests_wait_while_an_engine_is_replaced() -> None:
    async with start_gateway() as setup:
        setup.gateway.hold("small", most=3)
        asking = [asyncio.ensure_future(ask(setup)) for _ in range(3)]
        await wait_until(lambda: setup.count_waiting() == 3, "three to wait")
        refused = await ask(setup)
        assert (refused.status, refused.error["code"]) == (503, "held_full")
        assert int(refused.headers["retry-after"]) > 0
        assert (await (await setup.connect()).get("/health")).status == 200
        assert await wait_within(setup.gateway.remove(setup.backend))
        assert setup.count_waiting() == 3 and not setup.engine.seen
        new = Engine()
        await new.start()
        setup.gateway.add(make_backend(new.port))
        setup.gateway.release("small")
        assert [a.json for a in await wait_within(asyncio.gather(*asking))] == [ANSWER] * 3
        assert len(new.seen) == 3
        await wait_within(setup.gateway.remove(setup.gateway.backends[0]))
        await new.stop()
        setup.gateway.add(setup.backend)
        setup.backend.share = 1.0


async def test_running_requests_continue_during_a_hold() -> None:
    async with start_gateway() as setup:
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer({"n": 1}))
        first = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        setup.gateway.hold("small")
        second = asyncio.ensure_future(ask(setup))
        await wait_until(setup.count_waiting, "the second to wait")
        gate.set()
        assert (await wait_within(first)).json == {"n": 1}
        assert setup.count_waiting() == 1 and len(setup.engine.seen) == 1
        setup.gateway.release("small")
        assert (await wait_within(second)).json == ANSWER


async def test_request_held_for_too_long_gets_503() -> None:
    async with start_gateway() as setup:
        setup.gateway.hold("small", wait_s=0.0)
        waiting = asyncio.ensure_future(ask(setup))
        await wait_until(setup.count_waiting, "it to wait")
        setup.gateway.run_periodic_checks()
        answer = await wait_within(waiting)
        assert (answer.status, answer.error["code"]) == (503, "held_too_long")
        assert "retry-after" in answer.headers and not setup.engine.seen
        setup.gateway.release("small")


async def test_disconnect_during_a_hold_frees_its_place() -> None:
    async with start_gateway() as setup:
        setup.gateway.hold("small", most=1)
        leaving = await setup.connect()
        await leaving.send(request(CHAT, make_chat_body()))
        await wait_until(setup.count_waiting, "it to wait")
        await leaving.close()
        await wait_until(lambda: not setup.count_waiting(), "it to be forgotten")
        other = asyncio.ensure_future(ask(setup))
        await wait_until(setup.count_waiting, "another to wait")
        setup.gateway.release("small")
        assert (await wait_within(other)).json == ANSWER


# on demand


async def test_first_request_starts_a_registered_model() -> None:
    async with start_gateway() as setup:
        wanted: list[str] = []
        setup.gateway.wanted = wanted.append
        setup.gateway.register_models("Large", "unused")
        listed = (await (await setup.connect()).get("/v1/models")).json["data"]
        assert [row["id"] for row in listed] == ["small", "Large", "unused"]
        asking = [asyncio.ensure_future(ask(setup, make_chat_body(model="large"))) for _ in range(3)]
        await wait_until(lambda: setup.count_waiting() == 3, "three to wait")
        assert wanted == ["Large"]
        large = Engine()
        await large.start()
        backend = make_backend(large.port, "Large")
        backend.state = "loading"
        setup.gateway.add(backend)
        asking.append(asyncio.ensure_future(ask(setup, make_chat_body(model="large"))))
        await wait_until(lambda: setup.count_waiting() == 4, "a fourth to wait")
        backend.state = "ready"
        assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [200] * 4
        assert len(large.seen) == 4 and wanted == ["Large"]
        assert await wait_within(setup.gateway.remove(backend))  # unloaded
        again = asyncio.ensure_future(ask(setup, make_chat_body(model="large")))
        await wait_until(lambda: len(wanted) == 2, "it to be wanted again")
        setup.gateway.give_up("Large", "it does not fit beside small")
        answer = await wait_within(again)
        assert (answer.status, answer.error["message"]) == (503, "it does not fit beside small")
        await large.stop()
        setup.gateway.unregister_model("Large")
        assert (await ask(setup, make_chat_body(model="large"))).status == 404


async def test_finds_unloaded_model_by_all_of_its_names() -> None:
    async with start_gateway() as setup:
        wanted: list[str] = []
        setup.gateway.wanted = wanted.append
        setup.gateway.register_models("large", aliases=("owner/Large", "large.gguf"))
        for loaded in (False, True, False):
            large = Engine()
            await large.start()
            backend = make_backend(large.port, "large")
            if loaded:
                setup.gateway.add(backend)
            asking = [
                asyncio.ensure_future(ask(setup, make_chat_body(model=name))) for name in ("Owner/large", "LARGE.gguf")
            ]
            if not loaded:
                await wait_until(lambda: setup.count_waiting() == 2, "both to wait")
                assert wanted.pop() == "large" and not wanted
                setup.gateway.add(backend)
            assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [200] * 2
            assert await wait_within(setup.gateway.remove(backend))
            await large.stop()
        assert (await ask(setup, make_chat_body(model="small.gguf"))).status == 200


async def test_limits_requests_that_wait_for_a_model_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.run.gateway.routes.MOST_HELD", 2)
    async with start_gateway() as setup:
        setup.gateway.register_models("large")
        asking = [asyncio.ensure_future(ask(setup, make_chat_body(model="large"))) for _ in range(2)]
        await wait_until(lambda: setup.count_waiting() == 2, "two to wait")
        assert (await ask(setup, make_chat_body(model="large"))).status == 503
        assert (await ask(setup, make_chat_body(model="small"))).status == 200
        setup.gateway.give_up("large", "no")
        assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [503, 503]


async def test_requests_keep_waiting_when_an_engine_on_demand_fails() -> None:
    """The engine is unloaded or dies while requests wait: they wait for the next one."""
    async with start_gateway(max_connections=1) as setup:
        wanted: list[str] = []
        setup.gateway.wanted = wanted.append
        setup.gateway.register_models("small")
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer(ANSWER))
        asking = [asyncio.ensure_future(ask(setup)) for _ in range(3)]
        await wait_until(lambda: setup.count_waiting() == 2, "two to wait")
        await setup.engine.request()
        setup.backend.state = "restarting"
        await wait_until(lambda: wanted == ["small"], "it to be wanted")
        gate.set()
        await asyncio.sleep(0)
        assert setup.count_waiting() == 2
        setup.backend.state = "ready"
        assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [200] * 3


async def test_request_that_waits_for_another_backend_does_not_busy_loop() -> None:
    async with start_gateway() as setup, add_engine(setup, max_connections=1, share=0.001) as (other, _):
        gate = asyncio.Event()
        other.otherwise = (gate, make_answer(ANSWER))
        setup.backend.share = 0.0
        first = asyncio.ensure_future(ask(setup))
        await other.request()
        setup.backend.share = 1.0
        setup.engine.answer(End.CLOSE)
        second = asyncio.ensure_future(ask(setup))
        await wait_until(setup.count_waiting, "it to wait for the other")
        turns = 0

        def count(
            route: object = setup.gateway.routes[0], real: Any = setup.gateway.routes[0]._dispatch_waiting
        ) -> None:
            nonlocal turns
            turns += 1
            real()

        setup.gateway.routes[0]._dispatch_waiting = count  # type: ignore[method-assign]
        for _ in range(50):
            await asyncio.sleep(0)
        assert turns < 5
        gate.set()
        assert [a.status for a in await wait_within(asyncio.gather(first, second))] == [200, 200]


async def test_model_name_takes_precedence_over_aliases_of_others() -> None:
    other = make_backend(1, "small.gguf")
    async with start_gateway(other) as setup:
        named, aliased = setup.gateway.find_route("SMALL.gguf"), setup.gateway.find_route("small")
        assert named is not None and named.backends == [other]
        assert aliased is not None and aliased.backends == [setup.backend]
        assert setup.gateway.find_route(None) is None


# early rejection


async def test_rejects_request_whose_expected_wait_is_too_long() -> None:
    async with start_gateway(max_connections=1) as setup:
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer(ANSWER))
        first = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        gate.set()
        await wait_within(first)
        gate.clear()
        (route,) = setup.gateway.routes
        assert route._service_s is not None
        route.max_wait_s = 2.5 * route._service_s  # the third waiting request would exceed it
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        asking = []
        for number in range(3):
            asking.append(asyncio.ensure_future(ask(setup)))
            await wait_until(lambda n=number: len(setup.engine.seen) + setup.count_waiting() == n + 2, "it to be taken")  # type: ignore[misc]
        answer = await ask(setup)
        assert (answer.status, answer.error["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert setup.read_metric("requests_total", api="chat", outcome="turned_away") == 1
        gate.set()
        assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [200] * 3
