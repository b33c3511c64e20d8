"""Clients and engines that mean no good, or do not know better: others are not disturbed, and memory is bounded."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import time
import tracemalloc
from typing import Any

import pytest

from bedplate.run.gateway import exchange as exchange_module

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_END,
    STREAM_HEAD,
    USAGE,
    Answer,
    House,
    chat,
    chunk,
    delta,
    plain,
    request,
    serving,
    until,
    whole_stream,
    within,
)

STREAM = chat(stream=True)
IDLE = 5000
MOST_BYTES_FOR_AN_IDLE_CONNECTION = 16_000
SECRET = "correct horse battery staple"


async def ask(house: House, body: dict[str, Any] | None = None) -> Answer:
    client = await house.client()
    answer = await client.post(CHAT, body or chat())
    await client.close()
    return answer


@pytest.mark.measures
async def test_thousands_of_idle_connections_cost_little_and_disturb_nobody() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * IDLE + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} open files are needed, and {hard} are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    idle: list[socket.socket] = []
    try:
        async with serving() as house:
            await ask(house)
            gc.collect()
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for number in range(IDLE):
                pipe = socket.socket()
                pipe.setblocking(False)
                idle.append(pipe)
                await asyncio.get_running_loop().sock_connect(pipe, ("127.0.0.1", house.port))
                if number % 2:
                    pipe.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")  # and nothing more for now
            await until(lambda: len(house.gateway.connections) == IDLE, "all to be connected")
            taken = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert taken < IDLE * MOST_BYTES_FOR_AN_IDLE_CONNECTION
            began = time.process_time()  # the gateway's and the client's
            for _ in range(20):
                assert (await ask(house)).json == ANSWER
            took_s = time.process_time() - began
            print(f"{IDLE} idle: {taken / IDLE:,.0f} bytes each; a request beside them {1000 * took_s / 20:.1f} ms")
            assert took_s < 2.0
            for pipe in idle:
                pipe.close()
            await until(lambda: not house.gateway.connections, "all to be gone")
    finally:
        tracemalloc.stop()
        for pipe in idle:
            pipe.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_client_may_leave_after_any_byte_that_it_sends(end: str) -> None:
    sent = request(CHAT, STREAM, x_request_id="7")
    async with serving() as house:
        house.engine.otherwise = (whole_stream(delta("a"), USAGE, DONE),)
        beside = await house.client()
        for length in range(len(sent) + 1):
            client = await house.client()
            await client.send(sent[:length])
            if end == "reset":
                client.reset()
            else:
                await client.close()
            if length % 16 == 0:
                assert (await beside.post(CHAT, STREAM)).body == delta("a") + DONE
        await until(house.is_at_rest, "all to be forgotten")
        assert house.waiting() == 0 and house.backend.in_flight == 0
        assert house.gateway.tenants.default.in_flight == 0


async def test_a_client_may_leave_after_any_byte_that_it_gets() -> None:
    whole = [delta("a"), delta("b"), USAGE, DONE]
    async with serving() as house:
        house.engine.otherwise = (STREAM_HEAD, *[chunk(one) for one in whole], STREAM_END)
        beside = await house.client()
        size = len(await _all_of(house))
        for length in range(0, size, 3):
            client = await house.client()
            await client.send(request(CHAT, STREAM, connection="close"))
            await within(client.reader.readexactly(length))
            client.reset()
        assert (await beside.post(CHAT, STREAM)).body == delta("a") + delta("b") + DONE
        await until(house.is_at_rest, "all to be forgotten")
        assert house.backend.in_flight == 0


async def _all_of(house: House) -> bytes:
    client = await house.client()
    await client.send(request(CHAT, STREAM, connection="close"))
    return await within(client.reader.read())


async def test_senders_that_are_slow_hold_up_nobody() -> None:
    sent = request(CHAT, chat())
    async with serving() as house:
        slow = [await house.client() for _ in range(50)]
        for place in range(0, len(sent), 8):
            for client in slow:
                client.writer.write(sent[place : place + 8])
            assert (await ask(house)).json == ANSWER
        for client in slow:
            assert (await client.answer()).json == ANSWER


@pytest.mark.parametrize("framed", [b"content-length: 60000", b"transfer-encoding: chunked"])
async def test_bodies_of_many_slow_senders_are_bounded_together(framed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.run.gateway.client.MAX_ARRIVING_BYTES", 200_000)
    part = b"x" * 50_000 if b"length" in framed else chunk(b"x" * 50_000)
    async with serving() as house:
        slow = [await house.client() for _ in range(6)]
        for client in slow:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + framed + b"\r\n\r\n" + part)
        answers = [asyncio.ensure_future(client.answer()) for client in slow]
        await until(lambda: sum(answer.done() for answer in answers) >= 2, "two to be refused")
        assert house.gateway.arriving_bytes <= 200_000
        for refused in (answer.result() for answer in answers if answer.done()):
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert "retry-after" in refused.headers
        for answer in answers:
            answer.cancel()
        for client in slow:
            await client.close()
        await until(lambda: not house.gateway.connections, "all to be gone")
        assert house.gateway.arriving_bytes == 0
        assert (await ask(house)).json == ANSWER
        assert house.gateway.arriving_bytes == 0


async def test_an_event_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MAX_EVENT_BYTES", 100_000)
    async with serving() as house:
        house.engine.answer(STREAM_HEAD, *[chunk(b"data: " + b"x" * 10_000)] * 50, asyncio.Event())
        answer = await ask(house, STREAM)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        house.engine.answer(STREAM_HEAD, chunk(delta("a")), *[chunk(b"x" * 10_000)] * 50, asyncio.Event())
        answer = await ask(house, STREAM)
        assert answer.body.startswith(delta("a")) and b"event of more than 100,000 bytes" in answer.body
        assert (await ask(house)).json == ANSWER


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MAX_ANSWER_BYTES", 100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    async with serving() as house:
        house.engine.answer(head, *[b" " * 10_000] * 50, asyncio.Event())
        answer = await ask(house)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        assert (await ask(house)).json == ANSWER


@pytest.mark.parametrize(
    "junk",
    [
        b"data: \xff\xfe\xfd\n\n",
        b'data: {"choices":[{"delta":{"content":"\xc3\x28"}}]}\n\n',
        b'data: {"usage":{"prompt_tokens":"\xff"}}\n\n',
        b"\x00\x01\x02\n\n",
        b"data: " + b"[" * 5000 + b'"usage":{' + b"\n\n",
    ],
)
async def test_bytes_that_are_no_text_pass_from_the_engine_without_harm(junk: bytes) -> None:
    async with serving() as house:
        house.engine.answer(whole_stream(delta("a"), junk, USAGE, DONE))
        assert (await ask(house, STREAM)).body == delta("a") + junk + DONE
        assert house.outcome("ok") == 1


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"messages":"\xc3\x28"}', b'{"model":"\\ud800"}', b"[" * 100_000])
async def test_bodies_that_are_no_text_are_refused_and_the_connection_stays(body: bytes) -> None:
    async with serving() as house:
        client = await house.client()
        answer = await client.post(CHAT, body)
        assert answer.status in (400, 404) and answer.error
        assert (await client.post(CHAT, chat())).json == ANSWER


@pytest.mark.parametrize("value", ["5", 5.5, [], {}, None, True, -3, 10**30])
async def test_fields_that_are_only_looked_at_may_be_anything(value: object) -> None:
    """Whether they make sense is for the engine to say."""
    async with serving() as house:
        for name in ("max_tokens", "max_completion_tokens", "prompt_cache_key", "messages", "prompt", "tools"):
            assert (await ask(house, {name: value})).json == ANSWER


async def test_what_is_asked_and_answered_comes_into_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as house:
        house.engine.answer(plain(SECRET.encode(), "500 Oops", "text/plain"))
        house.engine.answer(STREAM_HEAD + chunk(delta(SECRET)), b"not a chunk")
        for body in (chat(), STREAM):
            await ask(house, {**body, "messages": [{"role": "user", "content": SECRET}]})
        client = await house.client()
        await client.post(CHAT, f'{{"messages": "{SECRET}'.encode())
        await client.send(b"GET /" + SECRET.replace(" ", "+").encode() + b" HTTP/1.1\r\nbad header\r\n\r\n")
        await client.answer()
    assert SECRET not in caplog.text and SECRET.replace(" ", "+") not in caplog.text
