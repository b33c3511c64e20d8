"""Limits for clients, their error responses, and how the endpoint starts and stops."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import os
import socket
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from bedplate.errors import ExternalFailure, UsageError
from bedplate.run.gateway import Gateway, client, server
from bedplate.run.gateway.server import explain_bind_failure

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    PATIENCE_S,
    STREAM_END,
    STREAM_HEAD,
    Bench,
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

MB = 1_000_000
STREAM = make_chat_body(stream=True)

# bodies


def send_all(port: int, head: bytes, piece: bytes, times: int, end: bytes = b"") -> bytes:
    """A client that reads the answer only after it has sent everything."""
    with socket.create_connection(("127.0.0.1", port), 10) as pipe:
        pipe.sendall(head)
        for _ in range(times):
            pipe.sendall(piece)
        pipe.sendall(end)
        answer = b""
        while data := pipe.recv(1 << 16):
            answer += data
        return answer


def is_too_large(answer: bytes, limit: str) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ") and b"\r\nconnection: close" in head
    error = json.loads(body)["error"]
    assert limit in error["message"]
    return bool(error["code"] == "body_too_large")


BY_LENGTH = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {100 * MB}\r\n\r\n".encode()
BY_CHUNKS = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("head", "piece", "end"),
    [(BY_LENGTH, b"x" * MB, b""), (BY_CHUNKS, make_chunk(b"x" * MB), STREAM_END)],
    ids=["by its length", "in chunks"],
)
async def test_rejects_too_large_body_while_the_client_still_sends(head: bytes, piece: bytes, end: bytes) -> None:
    """Also for a client that reads only after it has sent everything; the gateway keeps none of it."""
    async with start_gateway(max_body_bytes=4 * MB) as setup:
        tracemalloc.start()
        answer = await wait_within(asyncio.to_thread(send_all, setup.port, head, piece, 100, end), 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert is_too_large(answer, "4,000,000 bytes")
        assert peak_bytes < 12 * MB
        assert not setup.engine.seen


@pytest.mark.parametrize("head", [BY_LENGTH, BY_CHUNKS + make_chunk(b"x" * 101)], ids=["by its length", "in chunks"])
async def test_rejects_too_large_body_before_it_is_complete(head: bytes) -> None:
    async with start_gateway(max_body_bytes=100) as setup:
        connection = await setup.connect()
        await connection.send(head)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_accepts_body_of_exactly_the_limit() -> None:
    body = json.dumps(make_chat_body()).encode()
    async with start_gateway(max_body_bytes=len(body)) as setup:
        connection = await setup.connect()
        assert (await connection.post(CHAT, body)).json == ANSWER
        assert (await connection.post(CHAT, body + b" ")).status == 413


async def test_rejected_client_may_finish_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """But only for a limited time."""
    monkeypatch.setattr(server, "_SWEEP_S", 0.01)
    monkeypatch.setattr(client, "LINGER_S", 0.2)
    monkeypatch.setattr(client, "MAX_LINGER_S", 3600)
    loop = asyncio.get_running_loop()
    async with start_gateway(max_body_bytes=100) as setup:
        patient, endless = await setup.connect(), await setup.connect()
        await patient.send(BY_LENGTH)
        assert (await patient.answer()).status == 413
        await wait_until(
            lambda: not setup.gateway.connections - {*list_others(setup, patient)}, "the silent one to be closed"
        )
        monkeypatch.setattr(client, "MAX_LINGER_S", 0.6)
        await endless.send(BY_LENGTH)
        began = loop.time()
        with pytest.raises(OSError):
            while loop.time() - began < PATIENCE_S:
                await endless.send(b"x" * 1000)
                await asyncio.sleep(0.01)
        assert loop.time() - began > 0.4


def list_others(setup: Setup, one: Any) -> list[Any]:
    port = one.writer.get_extra_info("sockname")[1]
    return [
        c
        for c in setup.gateway.connections
        if c._transport is not None and c._transport.get_extra_info("peername")[1] != port
    ]


async def test_limits_size_of_pipelined_bodies() -> None:
    """They wait in the socket once the gateway holds as much as one body of the maximum size."""
    body = json.dumps(make_chat_body(user="x" * 900_000)).encode()
    go_on = asyncio.Event()
    async with start_gateway(max_body_bytes=MB) as setup:
        setup.engine.answer(go_on, make_answer(ANSWER))
        connection = await setup.connect()
        sending = asyncio.ensure_future(connection.send(request(CHAT, body) * 15))
        await setup.engine.request()
        (inside,) = setup.gateway.connections
        await wait_until(
            lambda: inside._transport is not None and not inside._transport.is_reading(), "reading to stop"
        )
        assert sum(len(r.body) for r in inside._waiting) <= 2 * MB
        go_on.set()
        for _ in range(15):
            assert (await connection.answer()).status == 200
        await sending


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"not json",
        b'{"model":1}',
        b'{"stream":"yes"}',
        b'{"stream_options":[]}',
        b'{"stream_options":{"include_usage":"yes"}}',
        b'{"messages":[{"content":"\xff"}]}',
        b'{"model":"\xff"}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b"\xef\xbb\xbf{}",
        b'{"a":1}{"b":2}',
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_invalid_body_is_an_error_and_keeps_the_connection(body: bytes) -> None:
    async with start_gateway() as setup:
        connection = await setup.connect()
        answer = await connection.post(CHAT, body)
        assert (answer.status, answer.error["code"]) == (400, "bad_body")
        assert (await connection.post(CHAT, make_chat_body())).json == ANSWER
        assert len(setup.engine.seen) == 1


# heads


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: aaaa\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000,
        b"GET / HTTP/1.1\r\n" + b"x" * 1_000_000,
        BY_CHUNKS + b"0\r\n" + b"x: aaaa\r\n" * 20_000,
    ],
    ids=["target", "header", "many headers", "endless value", "endless name", "trailers"],
)
async def test_rejects_too_large_head(head: bytes) -> None:
    """Also when one header never ends, which the parser would buffer without limit."""
    async with start_gateway() as setup:
        connection = await setup.connect()
        sending = asyncio.ensure_future(connection.send(head))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
        await sending
        assert await connection.is_closed()


async def test_measures_head_in_two_pieces_as_a_whole() -> None:
    async with start_gateway() as setup:
        connection = await setup.connect()
        asked = request(CHAT, make_chat_body(), x_long="a" * 40_000, x_longer="b" * 40_000)
        await connection.send(asked[:50_000])
        (taken,) = setup.gateway.connections
        await wait_until(lambda: taken._fed, "the first piece")
        await connection.send(asked[50_000:])
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")


async def test_head_limit_is_the_same_for_many_pieces() -> None:
    async with start_gateway() as setup:
        connection = await setup.connect()
        asked = request(CHAT, make_chat_body(), x_long="a" * 60_000)
        for at in range(0, len(asked), 1000):
            await connection.send(asked[at : at + 1000])
            await asyncio.sleep(0)
        assert (await connection.answer()).json == ANSWER


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\nhost: localhost\n\n",
        b"GET / HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: a\r\n folded\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\ncontent-length: two\r\n\r\n{{}}".encode(),
        f"POST {CHAT} HTTP/1.1\r\ncontent-length: +2\r\n\r\n{{}}".encode(),
        f"POST {CHAT} HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{{}}".encode(),
        f"POST {CHAT} HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        BY_CHUNKS + b"zz\r\n",
    ],
)
async def test_rejects_invalid_http(garbage: bytes) -> None:
    """Also ambiguous lengths: a proxy and the gateway must not read different requests (request smuggling)."""
    async with start_gateway() as setup:
        connection = await setup.connect()
        await connection.send(garbage)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_http")
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
        assert not setup.engine.seen


# keys

KEY = "sk-the-right-key"


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, False),
        ({"authorization": f"Bearer {KEY}"}, True),
        ({"authorization": f"bearer  {KEY}"}, True),
        ({"x_api_key": KEY}, True),
        ({"authorization": "Bearer wrong"}, False),
        ({"authorization": f"Bearer {KEY}x"}, False),
        ({"authorization": f"Bearer {KEY[:-1]}"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": KEY}, False),
        ({"authorization": f"Basic {KEY}"}, False),
        ({"x_api_key": "wrong"}, False),
        ({"x_api_key": ""}, False),
        ({"api_key": KEY}, False),
    ],
)
async def test_accepts_only_the_right_key(headers: dict[str, str], passes: bool) -> None:
    async with start_gateway(api_key=KEY) as setup:
        for path, body in ((CHAT, make_chat_body()), ("/v1/models", None), ("/metrics", None), ("/nowhere", None)):
            connection = await setup.connect()
            await connection.send(request(path, body, **headers))
            answer = await connection.answer()
            if passes:
                assert answer.status == (404 if path == "/nowhere" else 200)
            else:
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY not in answer.body.decode()
        assert len(setup.engine.seen) == passes


@pytest.mark.parametrize("path", ["/", "/health", "/?a=b", "/favicon.ico"])
async def test_open_paths_need_no_key(path: str) -> None:
    async with start_gateway(api_key=KEY) as setup:
        assert (await (await setup.connect()).get(path)).status in (200, 404)


@pytest.mark.parametrize("path", ["/v1/models?/health", "//health", "/health/../v1/models", "/health%2f..", "/health/"])
async def test_paths_similar_to_open_paths_need_a_key(path: str) -> None:
    async with start_gateway(api_key=KEY) as setup:
        assert (await (await setup.connect()).get(path)).status == 401


async def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("bedplate.run.gateway.tenants.hmac.compare_digest", compare)
    async with start_gateway(api_key=KEY) as setup:
        assert (await (await setup.connect()).post(CHAT, make_chat_body(), x_api_key="wrong")).status == 401
        assert (await (await setup.connect()).post(CHAT, make_chat_body())).status == 401
        assert not compared  # the lookup uses a salted hash, whose timing reveals nothing
        assert (await (await setup.connect()).post(CHAT, make_chat_body(), x_api_key=KEY)).status == 200
        assert len(compared) == 1 and compared[0][0] == compared[0][1] != KEY.encode()


async def test_keys_appear_in_no_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the gateway's key nor one that a client tries, whatever error the request causes."""
    caplog.set_level(logging.DEBUG)
    tried = "sk-some-other-key"
    answers = b""
    async with start_gateway(api_key=KEY) as setup:
        setup.engine.otherwise = (make_answer(b"no", "500 Oops", "text/plain"),)
        for path, body in (
            (CHAT, make_chat_body()),
            (CHAT, b"{"),
            ("/nowhere", None),
            ("/[", None),
            ("/", None),
            ("/health", b"x"),
        ):
            for key in (KEY, tried):
                for header in ({"authorization": f"Bearer {key}"}, {"x_api_key": key}):
                    connection = await setup.connect()
                    await connection.send(request(path, body, connection="close", **header))
                    answers += await wait_within(connection.reader.read())
        connection = await setup.connect()
        await connection.send(f"GET / HTTP/1.1\r\nauthorization: Bearer {tried}\x00\r\n\r\n".encode())
        answers += (await connection.answer()).body
    assert len(answers) > 1000
    for key in (KEY, tried):
        assert key.encode() not in answers
        assert key not in caplog.text


# time


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes one deadline short, and the others longer than any test."""

    def only(**deadlines: float) -> None:
        monkeypatch.setattr(server, "_SWEEP_S", 0.01)
        for name in ("REQUEST_TIMEOUT_S", "KEEP_ALIVE_S", "STALLED_READER_S"):
            monkeypatch.setattr(client, name, deadlines.get(name, 100.0))

    return only


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the gateway's clock by so many seconds."""
    ahead_s = [0.0]
    for module in (server, client):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(server, "_SWEEP_S", 0.01)

    def go(seconds: float) -> None:
        ahead_s[0] += seconds

    return go


@pytest.mark.parametrize("sent", [b"G", b"GET / HT", request(CHAT, STREAM)[:-1]], ids=["letter", "head", "body"])
async def test_incomplete_request_times_out(sent: bytes, advance: Callable[[float], None]) -> None:
    async with start_gateway() as setup:
        connection = await setup.connect()
        await connection.send(sent)
        await wait_until(lambda: any(one._request_began for one in setup.gateway.connections), "it to arrive")
        advance(client.REQUEST_TIMEOUT_S)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert await connection.is_closed()


async def test_connection_without_a_request_is_closed(quick: Callable[..., None]) -> None:
    quick(REQUEST_TIMEOUT_S=0.05)
    async with start_gateway() as setup:
        assert await (await setup.connect()).is_closed()


async def test_an_idle_connection_is_closed(quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=0.05)
    async with start_gateway() as setup:
        for asked in (request("/health"), request(CHAT, make_chat_body())):
            connection = await setup.connect()
            await connection.send(asked)
            assert (await connection.answer()).status == 200
            assert await connection.is_closed()


async def test_no_deadline_ends_a_long_answer(advance: Callable[[float], None]) -> None:
    async with start_gateway() as setup:
        go_on = asyncio.Event()
        setup.engine.answer(go_on, make_answer(ANSWER))
        connection, ticking = await setup.connect(), await setup.connect()
        await connection.send(request(CHAT, make_chat_body()))
        await setup.engine.request()
        advance(1 + max(client.REQUEST_TIMEOUT_S, client.KEEP_ALIVE_S, client.STALLED_READER_S))
        assert await ticking.is_closed()  # by then the other deadline would have passed, too
        go_on.set()
        assert (await connection.answer()).json == ANSWER


@pytest.mark.parametrize("ended", [False, True], ids=["of a stream", "of an answer that is all written"])
async def test_disconnects_client_that_does_not_read(ended: bool, quick: Callable[..., None]) -> None:
    """Also when the engine has finished and only the last bytes are unread."""
    quick(STALLED_READER_S=0.1)
    async with start_gateway() as setup:
        piece = make_chunk(make_delta("x" * 65_000))
        if ended:
            setup.engine.answer(make_answer(b"x" * 20 * MB))
        else:
            setup.engine.answer(STREAM_HEAD, *[piece] * 400, make_chunk(DONE) + STREAM_END)
        connection = await setup.connect()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, STREAM))
        seen = await setup.engine.request()
        await wait_until(lambda: not setup.gateway.connections, "the gateway to give up")
        if not ended:
            await wait_within(seen.gone.wait())
            assert setup.count_outcome("cancelled") == 1


async def test_disconnects_client_that_does_not_read_while_closing(
    quick: Callable[..., None],
) -> None:
    quick(STALLED_READER_S=0.1)
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(b"x" * 20 * MB))
        connection = await setup.connect()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, STREAM, connection="close"))
        await setup.engine.request()
        await wait_until(lambda: not setup.gateway.connections, "the gateway to give up")


async def test_reader_that_catches_up_gets_the_normal_keep_alive() -> None:
    """The deadline of a stalled connection also applies when it becomes idle; otherwise it could stay forever."""
    bench = Bench()
    bench.client.data_received(request(CHAT, make_chat_body()))
    bench.client.pause_writing()
    bench.engine.data_received(make_answer(ANSWER))
    bench.client.resume_writing()
    assert bench.client.deadline is not None
    assert bench.client.deadline <= time.monotonic() + client.KEEP_ALIVE_S


# start


async def test_port_in_use_error_has_a_hint() -> None:
    async with start_gateway() as setup:
        with pytest.raises(ExternalFailure, match=f"port {setup.port} on 127.0.0.1 is in use") as caught:
            await Gateway([setup.backend]).start("127.0.0.1", setup.port)
        assert caught.value.hint is not None and f"--port {setup.port + 1}" in caught.value.hint


@pytest.mark.parametrize("host", ["256.1.1.1", "no-such-host.invalid", "192.0.2.1", "a" * 70 + ".example", "::g"])
async def test_address_of_another_machine_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        await Gateway([make_backend(1)]).start(host, 0)


@pytest.mark.parametrize("port", [-1, 65536, 10**6])
async def test_invalid_port_is_a_usage_error(port: int) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
        await Gateway([make_backend(1)]).start("127.0.0.1", port)


def test_privileged_port_error_has_a_hint() -> None:
    failure = explain_bind_failure(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "127.0.0.1", 80)
    assert isinstance(failure, ExternalFailure)
    assert failure.message == "no permission to listen on port 80"
    assert failure.hint is not None and "1023" in failure.hint


async def test_url_has_brackets_around_ipv6_addresses() -> None:
    gateway = Gateway([make_backend(1)])
    port = await gateway.start("::1", 0)
    assert gateway.url == f"http://[::1]:{port}"
    await gateway.stop(0)


# stop


async def test_stop_lets_streams_finish_and_accepts_no_new_ones() -> None:
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), go_on, make_chunk(DONE) + STREAM_END)
        busy, idle = await setup.connect(), await setup.connect()
        await idle.get("/health")
        await busy.send(request(CHAT, STREAM))
        await busy.head()
        assert await busy.chunk() == make_delta("a")
        stopping = asyncio.ensure_future(setup.gateway.stop(600))
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await setup.connect()
        assert not stopping.done()
        go_on.set()
        assert await busy.chunk() == DONE
        assert await busy.chunk() == b""
        assert await busy.is_closed()
        await wait_within(stopping)


async def test_stop_ends_slow_answers_with_an_error() -> None:
    """A stream gets an event, an unstreamed answer a status, and so does a request that waits for a connection."""
    async with start_gateway(max_connections=2) as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), asyncio.Event())
        setup.engine.answer(asyncio.Event())
        stream, plain_one, waiting = [await setup.connect() for _ in range(3)]
        await stream.send(request(CHAT, STREAM))
        await stream.head()
        assert await stream.chunk() == make_delta("a")
        await plain_one.send(request(CHAT, make_chat_body()))
        await setup.engine.request(1)
        await waiting.send(request(CHAT, make_chat_body()))
        await wait_until(lambda: setup.read_metric("requests_in_flight") == 3, "three requests")
        stopping = asyncio.ensure_future(setup.gateway.stop(0.05))
        event = await stream.chunk()
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert await stream.chunk() == b""
        for connection in (plain_one, waiting):
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert answer.headers["connection"] == "close"
        for connection in (stream, plain_one, waiting):
            assert await connection.is_closed()
        await wait_within(stopping)
        for seen in setup.engine.seen:
            await wait_within(seen.gone.wait())
        assert setup.is_at_rest()


async def test_stop_does_not_wait_for_client_that_does_not_read() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(b"x" * 20 * MB))
        connection = await setup.connect()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, make_chat_body()))
        await wait_until(lambda: setup.count_outcome("ok") == 1, "the engine's answer")
        await wait_within(setup.gateway.stop(0))
        assert not setup.gateway.connections


async def test_stop_while_connecting_leaves_no_connection() -> None:
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    fillers = []
    async with start_gateway() as setup:
        setup.backend.address = silent.getsockname()
        for _ in range(4):  # a full backlog: further connections are neither accepted nor refused
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
            fillers.append(filler)
        connection = await setup.connect()
        await connection.send(request(CHAT, make_chat_body()))
        await wait_until(lambda: setup.count_active() == 1, "the connection to be tried")
        await wait_within(setup.gateway.stop(0))
        assert (await connection.answer()).status == 503
        await wait_until(setup.is_at_rest, "the attempt to be given up")
    for pipe in (silent, *fillers):
        pipe.close()


async def test_stop_closes_connections_to_the_engine() -> None:
    async with start_gateway() as setup:
        engine: Engine = setup.engine
        await (await setup.connect()).post(CHAT, make_chat_body())
        await wait_within(setup.gateway.stop(0))
        await wait_until(lambda: engine.lines[0].lost, "the idle connection to be closed")
