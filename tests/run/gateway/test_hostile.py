"""Hostile and faulty clients and engines: other clients are not affected, and memory is bounded."""

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
    Setup,
    make_answer,
    make_chat_body,
    make_chunk,
    make_delta,
    make_stream,
    request,
    start_gateway,
    wait_until,
    wait_within,
)

STREAM = make_chat_body(stream=True)
IDLE = 4500
MOST_BYTES_FOR_AN_IDLE_CONNECTION = 16_000
SECRET = "correct horse battery staple"


async def ask(setup: Setup, body: dict[str, Any] | None = None) -> Answer:
    client = await setup.connect()
    answer = await client.post(CHAT, body or make_chat_body())
    await client.close()
    return answer


@pytest.mark.measures
async def test_thousands_of_idle_connections_do_not_affect_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * IDLE + 1000  # the clients are in this process, too, and half of the descriptors are not for clients
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} open files are needed, and {hard} are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    idle: list[socket.socket] = []
    try:
        async with start_gateway() as setup:
            await ask(setup)
            gc.collect()
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for number in range(IDLE):
                pipe = socket.socket()
                pipe.setblocking(False)
                idle.append(pipe)
                await asyncio.get_running_loop().sock_connect(pipe, ("127.0.0.1", setup.port))
                if number % 2:
                    pipe.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")  # and no more for now
            await wait_until(lambda: len(setup.gateway.connections) == IDLE, "all to be connected")
            taken = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert taken < IDLE * MOST_BYTES_FOR_AN_IDLE_CONNECTION
            began = time.process_time()  # of the gateway and the client
            for _ in range(20):
                assert (await ask(setup)).json == ANSWER
            took_s = time.process_time() - began
            print(f"{IDLE} idle: {taken / IDLE:,.0f} bytes each; a request beside them {1000 * took_s / 20:.1f} ms")
            assert took_s < 2.0
            for pipe in idle:
                pipe.close()
            await wait_until(lambda: not setup.gateway.connections, "all to be gone")
    finally:
        tracemalloc.stop()
        for pipe in idle:
            pipe.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_client_may_disconnect_after_any_byte_sent(end: str) -> None:
    sent = request(CHAT, STREAM, x_request_id="7")
    async with start_gateway() as setup:
        setup.engine.otherwise = (make_stream(make_delta("a"), USAGE, DONE),)
        beside = await setup.connect()
        for length in range(len(sent) + 1):
            client = await setup.connect()
            await client.send(sent[:length])
            if end == "reset":
                client.reset()
            else:
                await client.close()
            if length % 16 == 0:
                assert (await beside.post(CHAT, STREAM)).body == make_delta("a") + DONE
        await wait_until(setup.is_at_rest, "all to be forgotten")
        assert setup.count_waiting() == 0 and setup.backend.in_flight == 0
        assert setup.gateway.tenants.default.in_flight == 0


async def test_client_may_disconnect_after_any_byte_received() -> None:
    whole = [make_delta("a"), make_delta("b"), USAGE, DONE]
    async with start_gateway() as setup:
        setup.engine.otherwise = (STREAM_HEAD, *[make_chunk(one) for one in whole], STREAM_END)
        beside = await setup.connect()
        size = len(await _read_all(setup))
        for length in range(0, size, 3):
            client = await setup.connect()
            await client.send(request(CHAT, STREAM, connection="close"))
            await wait_within(client.reader.readexactly(length))
            client.reset()
        assert (await beside.post(CHAT, STREAM)).body == make_delta("a") + make_delta("b") + DONE
        await wait_until(setup.is_at_rest, "all to be forgotten")
        assert setup.backend.in_flight == 0


async def _read_all(setup: Setup) -> bytes:
    client = await setup.connect()
    await client.send(request(CHAT, STREAM, connection="close"))
    return await wait_within(client.reader.read())


async def test_slow_senders_do_not_delay_others() -> None:
    sent = request(CHAT, make_chat_body())
    async with start_gateway() as setup:
        slow = [await setup.connect() for _ in range(50)]
        for place in range(0, len(sent), 8):
            for client in slow:
                client.writer.write(sent[place : place + 8])
            assert (await ask(setup)).json == ANSWER
        for client in slow:
            assert (await client.answer()).json == ANSWER


@pytest.mark.parametrize("framed", [b"content-length: 60000", b"transfer-encoding: chunked"])
async def test_limits_total_size_of_incomplete_bodies(framed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.run.gateway.client.MAX_ARRIVING_BYTES", 200_000)
    part = b"x" * 50_000 if b"length" in framed else make_chunk(b"x" * 50_000)
    async with start_gateway() as setup:
        slow = [await setup.connect() for _ in range(6)]
        for client in slow:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ::1\r\n" + framed + b"\r\n\r\n" + part)
        answers = [asyncio.ensure_future(client.answer()) for client in slow]
        await wait_until(lambda: sum(answer.done() for answer in answers) >= 2, "two to be refused")
        assert setup.gateway.arriving_bytes <= 200_000
        for refused in (answer.result() for answer in answers if answer.done()):
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert "retry-after" in refused.headers
        for answer in answers:
            answer.cancel()
        for client in slow:
            await client.close()
        await wait_until(lambda: not setup.gateway.connections, "all to be gone")
        assert setup.gateway.arriving_bytes == 0
        assert (await ask(setup)).json == ANSWER
        assert setup.gateway.arriving_bytes == 0


async def test_ends_stream_with_endless_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MAX_EVENT_BYTES", 100_000)
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD, *[make_chunk(b"data: " + b"x" * 10_000)] * 50, asyncio.Event())
        answer = await ask(setup, STREAM)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        setup.engine.answer(
            STREAM_HEAD, make_chunk(make_delta("a")), *[make_chunk(b"x" * 10_000)] * 50, asyncio.Event()
        )
        answer = await ask(setup, STREAM)
        assert answer.body.startswith(make_delta("a")) and b"event of more than 100,000 bytes" in answer.body
        assert (await ask(setup)).json == ANSWER


async def test_ends_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MAX_ANSWER_BYTES", 100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    async with start_gateway() as setup:
        setup.engine.answer(head, *[b" " * 10_000] * 50, asyncio.Event())
        answer = await ask(setup)
        assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
        assert (await ask(setup)).json == ANSWER


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
async def test_forwards_invalid_utf8_from_the_engine(junk: bytes) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), junk, USAGE, DONE))
        assert (await ask(setup, STREAM)).body == make_delta("a") + junk + DONE
        assert setup.count_outcome("ok") == 1


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"messages":"\xc3\x28"}', b'{"model":"\\ud800"}', b"[" * 100_000])
async def test_rejects_invalid_utf8_body_and_keeps_the_connection(body: bytes) -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        answer = await client.post(CHAT, body)
        assert answer.status in (400, 404) and answer.error
        assert (await client.post(CHAT, make_chat_body())).json == ANSWER


@pytest.mark.parametrize("value", ["5", 5.5, [], {}, None, True, -3, 10**30])
async def test_unvalidated_fields_may_have_any_value(value: object) -> None:
    """The engine validates them."""
    async with start_gateway() as setup:
        for name in ("max_tokens", "max_completion_tokens", "prompt_cache_key", "prompt", "temperature"):
            assert (await ask(setup, {**make_chat_body(), name: value})).json == ANSWER


async def test_prompts_and_answers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(SECRET.encode(), "500 Oops", "text/plain"))
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta(SECRET)), b"not a chunk")
        for body in (make_chat_body(), STREAM):
            await ask(setup, {**body, "messages": [{"role": "user", "content": SECRET}]})
        client = await setup.connect()
        await client.post(CHAT, f'{{"messages": "{SECRET}'.encode())
        await client.send(b"GET /" + SECRET.replace(" ", "+").encode() + b" HTTP/1.1\r\nbad header\r\n\r\n")
        await client.answer()
    assert SECRET not in caplog.text and SECRET.replace(" ", "+") not in caplog.text
