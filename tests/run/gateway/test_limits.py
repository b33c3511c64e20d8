"""What clients may not do, how they are told, and how the endpoint starts and stops."""

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

from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.run.gateway import Gateway, client, server
from bedplate.run.gateway.server import bind_failure

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    PATIENCE_S,
    STREAM_END,
    STREAM_HEAD,
    Bench,
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

MB = 1_000_000
STREAM = chat(stream=True)

# bodies


def send_all(port: int, head: bytes, piece: bytes, times: int, end: bytes = b"") -> bytes:
    """A client on a socket of its own that looks at the answer only when it has sent everything."""
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


BY_LENGTH = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {100 * MB}\r\n\r\n".encode()
BY_CHUNKS = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("head", "piece", "end"),
    [(BY_LENGTH, b"x" * MB, b""), (BY_CHUNKS, chunk(b"x" * MB), STREAM_END)],
    ids=["by its length", "in chunks"],
)
async def test_a_body_that_is_too_large_is_refused_though_the_client_sends_on(
    head: bytes, piece: bytes, end: bytes
) -> None:
    """Also to a client that does not look before it has sent it all; and the gateway keeps none of it."""
    async with serving(max_body_bytes=4 * MB) as house:
        tracemalloc.start()
        answer = await within(asyncio.to_thread(send_all, house.port, head, piece, 100, end), 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert is_too_large(answer, "4,000,000 bytes")
        assert peak_bytes < 12 * MB
        assert not house.engine.seen


@pytest.mark.parametrize("head", [BY_LENGTH, BY_CHUNKS + chunk(b"x" * 101)], ids=["by its length", "in chunks"])
async def test_a_body_that_is_too_large_is_refused_before_it_is_all_there(head: bytes) -> None:
    async with serving(max_body_bytes=100) as house:
        connection = await house.client()
        await connection.send(head)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_a_body_of_just_the_limit_passes() -> None:
    body = json.dumps(chat()).encode()
    async with serving(max_body_bytes=len(body)) as house:
        connection = await house.client()
        assert (await connection.post(CHAT, body)).json == ANSWER
        assert (await connection.post(CHAT, body + b" ")).status == 413


async def test_a_refused_client_is_given_time_as_long_as_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    monkeypatch.setattr(server, "_SWEEP_S", 0.01)
    monkeypatch.setattr(client, "LINGER_S", 0.2)
    monkeypatch.setattr(client, "MAX_LINGER_S", 3600)
    loop = asyncio.get_running_loop()
    async with serving(max_body_bytes=100) as house:
        patient, endless = await house.client(), await house.client()
        await patient.send(BY_LENGTH)
        assert (await patient.answer()).status == 413
        await until(lambda: not house.gateway.connections - {*others(house, patient)}, "the silent one to be closed")
        monkeypatch.setattr(client, "MAX_LINGER_S", 0.6)
        await endless.send(BY_LENGTH)
        began = loop.time()
        with pytest.raises(OSError):
            while loop.time() - began < PATIENCE_S:
                await endless.send(b"x" * 1000)
                await asyncio.sleep(0.01)
        assert loop.time() - began > 0.4


def others(house: House, one: Any) -> list[Any]:
    port = one.writer.get_extra_info("sockname")[1]
    return [
        c
        for c in house.gateway.connections
        if c._transport is not None and c._transport.get_extra_info("peername")[1] != port
    ]


async def test_pipelined_bodies_are_not_kept_without_bound() -> None:
    """They wait in the socket when as much as one largest body waits here."""
    body = json.dumps(chat(user="x" * 900_000)).encode()
    go_on = asyncio.Event()
    async with serving(max_body_bytes=MB) as house:
        house.engine.answer(go_on, plain(ANSWER))
        connection = await house.client()
        sending = asyncio.ensure_future(connection.send(request(CHAT, body) * 15))
        await house.engine.request()
        (inside,) = house.gateway.connections
        await until(lambda: inside._transport is not None and not inside._transport.is_reading(), "reading to stop")
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
async def test_a_body_that_cannot_be_used_is_an_error_and_the_connection_stays(body: bytes) -> None:
    async with serving() as house:
        connection = await house.client()
        answer = await connection.post(CHAT, body)
        assert (answer.status, answer.error["code"]) == (400, "bad_body")
        assert (await connection.post(CHAT, chat())).json == ANSWER
        assert len(house.engine.seen) == 1


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
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    """Also when one header never ends, which the parser would keep for ever."""
    async with serving() as house:
        connection = await house.client()
        sending = asyncio.ensure_future(connection.send(head))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
        await sending
        assert await connection.is_closed()


async def test_a_head_in_two_pieces_is_measured_as_a_whole() -> None:
    async with serving() as house:
        connection = await house.client()
        asked = request(CHAT, chat(), x_long="a" * 40_000, x_longer="b" * 40_000)
        await connection.send(asked[:50_000])
        (taken,) = house.gateway.connections
        await until(lambda: taken._fed, "the first piece")
        await connection.send(asked[50_000:])
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")


async def test_a_head_in_many_pieces_may_be_as_large_as_one_in_a_single_piece() -> None:
    async with serving() as house:
        connection = await house.client()
        asked = request(CHAT, chat(), x_long="a" * 60_000)
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
        b"GET / HTTP/1.1\nhost: x\n\n",
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
async def test_what_is_not_http_is_an_error(garbage: bytes) -> None:
    """Ambiguous lengths too: two readers of one request must not see two requests."""
    async with serving() as house:
        connection = await house.client()
        await connection.send(garbage)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_http")
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
        assert not house.engine.seen


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
async def test_a_key_is_needed_and_only_the_right_one_passes(headers: dict[str, str], passes: bool) -> None:
    async with serving(api_key=KEY) as house:
        for path, body in ((CHAT, chat()), ("/v1/models", None), ("/metrics", None), ("/nowhere", None)):
            connection = await house.client()
            await connection.send(request(path, body, **headers))
            answer = await connection.answer()
            if passes:
                assert answer.status == (404 if path == "/nowhere" else 200)
            else:
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY not in answer.body.decode()
        assert len(house.engine.seen) == passes


@pytest.mark.parametrize("path", ["/", "/health", "/?a=b", "/favicon.ico"])
async def test_some_pages_need_no_key(path: str) -> None:
    async with serving(api_key=KEY) as house:
        assert (await (await house.client()).get(path)).status in (200, 404)


@pytest.mark.parametrize("path", ["/v1/models?/health", "//health", "/health/../v1/models", "/health%2f..", "/health/"])
async def test_a_path_that_looks_open_needs_a_key(path: str) -> None:
    async with serving(api_key=KEY) as house:
        assert (await (await house.client()).get(path)).status == 401


async def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("bedplate.run.gateway.tenants.hmac.compare_digest", compare)
    async with serving(api_key=KEY) as house:
        assert (await (await house.client()).post(CHAT, chat(), x_api_key="wrong")).status == 401
        assert (await (await house.client()).post(CHAT, chat())).status == 401
        assert not compared  # what is looked up is a salted hash, of which nothing can be learned by trying
        assert (await (await house.client()).post(CHAT, chat(), x_api_key=KEY)).status == 200
        assert len(compared) == 1 and compared[0][0] == compared[0][1] != KEY.encode()


async def test_keys_come_into_no_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Not the gateway's own and not one that a client tries, whatever goes wrong with the request."""
    caplog.set_level(logging.DEBUG)
    tried = "sk-some-other-key"
    answers = b""
    async with serving(api_key=KEY) as house:
        house.engine.otherwise = (plain(b"no", "500 Oops", "text/plain"),)
        for path, body in (
            (CHAT, chat()),
            (CHAT, b"{"),
            ("/nowhere", None),
            ("/[", None),
            ("/", None),
            ("/health", b"x"),
        ):
            for key in (KEY, tried):
                for header in ({"authorization": f"Bearer {key}"}, {"x_api_key": key}):
                    connection = await house.client()
                    await connection.send(request(path, body, connection="close", **header))
                    answers += await within(connection.reader.read())
        connection = await house.client()
        await connection.send(f"GET / HTTP/1.1\r\nauthorization: Bearer {tried}\x00\r\n\r\n".encode())
        answers += (await connection.answer()).body
    assert len(answers) > 1000
    for key in (KEY, tried):
        assert key.encode() not in answers
        assert key not in caplog.text


# time


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes deadlines short: one of them really, the others longer than any test."""

    def only(**deadlines: float) -> None:
        monkeypatch.setattr(server, "_SWEEP_S", 0.01)
        for name in ("REQUEST_TIMEOUT_S", "KEEP_ALIVE_S", "STALLED_READER_S"):
            monkeypatch.setattr(client, name, deadlines.get(name, 100.0))

    return only


@pytest.mark.parametrize("sent", [b"G", b"GET / HT", request(CHAT, STREAM)[:-1]], ids=["letter", "head", "body"])
async def test_a_request_that_does_not_arrive_is_given_up(sent: bytes, quick: Callable[..., None]) -> None:
    quick(REQUEST_TIMEOUT_S=0.05)
    async with serving() as house:
        connection = await house.client()
        await connection.send(sent)
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert await connection.is_closed()


async def test_a_connection_that_never_asks_is_closed(quick: Callable[..., None]) -> None:
    quick(REQUEST_TIMEOUT_S=0.05)
    async with serving() as house:
        assert await (await house.client()).is_closed()


async def test_an_idle_connection_is_closed(quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=0.05)
    async with serving() as house:
        for asked in (request("/health"), request(CHAT, chat())):
            connection = await house.client()
            await connection.send(asked)
            assert (await connection.answer()).status == 200
            assert await connection.is_closed()


async def test_a_long_answer_is_not_cut_by_any_deadline(quick: Callable[..., None]) -> None:
    quick(REQUEST_TIMEOUT_S=0.03, KEEP_ALIVE_S=0.03)
    async with serving() as house:
        go_on = asyncio.Event()
        house.engine.answer(go_on, plain(ANSWER))
        connection, ticking = await house.client(), await house.client()
        await connection.send(request(CHAT, chat()))
        await house.engine.request()
        assert await ticking.is_closed()  # by then the other's would have run out too
        go_on.set()
        assert (await connection.answer()).json == ANSWER


@pytest.mark.parametrize("ended", [False, True], ids=["of a stream", "of an answer that is all written"])
async def test_a_client_that_does_not_read_is_given_up(ended: bool, quick: Callable[..., None]) -> None:
    """Also when the engine is done with it, and the last bytes would wait here for ever."""
    quick(STALLED_READER_S=0.1)
    async with serving() as house:
        piece = chunk(delta("x" * 65_000))
        if ended:
            house.engine.answer(plain(b"x" * 20 * MB))
        else:
            house.engine.answer(STREAM_HEAD, *[piece] * 400, chunk(DONE) + STREAM_END)
        connection = await house.client()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, STREAM))
        seen = await house.engine.request()
        await until(lambda: not house.gateway.connections, "the gateway to give up")
        if not ended:
            await within(seen.gone.wait())
            assert house.outcome("cancelled") == 1


async def test_a_client_that_does_not_read_is_given_up_when_its_connection_is_closing(
    quick: Callable[..., None],
) -> None:
    quick(STALLED_READER_S=0.1)
    async with serving() as house:
        house.engine.answer(plain(b"x" * 20 * MB))
        connection = await house.client()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, STREAM, connection="close"))
        await house.engine.request()
        await until(lambda: not house.gateway.connections, "the gateway to give up")


async def test_a_reader_that_catches_up_has_the_usual_time_for_its_next_request() -> None:
    """The clock of a connection that was stalled runs on when it is idle, else it could stay for ever."""
    bench = Bench()
    bench.client.data_received(request(CHAT, chat()))
    bench.client.pause_writing()
    bench.engine.data_received(plain(ANSWER))
    bench.client.resume_writing()
    assert bench.client.deadline is not None
    assert bench.client.deadline <= time.monotonic() + client.KEEP_ALIVE_S


# start


async def test_a_port_in_use_is_said_with_what_to_do() -> None:
    async with serving() as house:
        with pytest.raises(OutsideFailed, match=f"port {house.port} on 127.0.0.1 is in use") as caught:
            await Gateway([house.backend]).start("127.0.0.1", house.port)
        assert caught.value.hint is not None and f"--port {house.port + 1}" in caught.value.hint


@pytest.mark.parametrize("host", ["256.1.1.1", "no-such-host.invalid", "192.0.2.1", "a" * 70 + ".example", "::g"])
async def test_an_address_that_is_not_ours_is_a_bad_question(host: str) -> None:
    with pytest.raises(BadQuestion, match="cannot listen on"):
        await Gateway([backend_at(1)]).start(host, 0)


@pytest.mark.parametrize("port", [-1, 65536, 10**6])
async def test_a_port_that_does_not_exist_is_a_bad_question(port: int) -> None:
    with pytest.raises(BadQuestion, match=f"cannot listen on 127.0.0.1:{port}"):
        await Gateway([backend_at(1)]).start("127.0.0.1", port)


def test_a_port_that_needs_rights_is_said_with_what_to_do() -> None:
    failure = bind_failure(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "127.0.0.1", 80)
    assert isinstance(failure, OutsideFailed)
    assert failure.message == "no permission to listen on port 80"
    assert failure.hint is not None and "1023" in failure.hint


async def test_the_url_is_one_that_clients_can_use() -> None:
    gateway = Gateway([backend_at(1)])
    port = await gateway.start("::1", 0)
    assert gateway.url == f"http://[::1]:{port}"
    await gateway.stop(0)


# stop


async def test_stopping_lets_a_stream_finish_and_takes_no_new_one() -> None:
    go_on = asyncio.Event()
    async with serving() as house:
        house.engine.answer(STREAM_HEAD + chunk(delta("a")), go_on, chunk(DONE) + STREAM_END)
        busy, idle = await house.client(), await house.client()
        await idle.get("/health")
        await busy.send(request(CHAT, STREAM))
        await busy.head()
        assert await busy.chunk() == delta("a")
        stopping = asyncio.ensure_future(house.gateway.stop(600))
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await house.client()
        assert not stopping.done()
        go_on.set()
        assert await busy.chunk() == DONE
        assert await busy.chunk() == b""
        assert await busy.is_closed()
        await within(stopping)


async def test_stopping_ends_what_takes_too_long_with_an_error() -> None:
    """A stream with an event, a plain answer with a status, and one that still waits for a connection too."""
    async with serving(max_connections=2) as house:
        house.engine.answer(STREAM_HEAD + chunk(delta("a")), asyncio.Event())
        house.engine.answer(asyncio.Event())
        stream, plain_one, waiting = [await house.client() for _ in range(3)]
        await stream.send(request(CHAT, STREAM))
        await stream.head()
        assert await stream.chunk() == delta("a")
        await plain_one.send(request(CHAT, chat()))
        await house.engine.request(1)
        await waiting.send(request(CHAT, chat()))
        await until(lambda: house.metric("requests_in_flight") == 3, "three requests")
        stopping = asyncio.ensure_future(house.gateway.stop(0.05))
        event = await stream.chunk()
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert await stream.chunk() == b""
        for connection in (plain_one, waiting):
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert answer.headers["connection"] == "close"
        for connection in (stream, plain_one, waiting):
            assert await connection.is_closed()
        await within(stopping)
        for seen in house.engine.seen:
            await within(seen.gone.wait())
        assert house.is_at_rest()


async def test_stopping_does_not_wait_for_a_client_that_does_not_read() -> None:
    async with serving() as house:
        house.engine.answer(plain(b"x" * 20 * MB))
        connection = await house.client()
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request(CHAT, chat()))
        await until(lambda: house.outcome("ok") == 1, "the engine's answer")
        await within(house.gateway.stop(0))
        assert not house.gateway.connections


async def test_stopping_while_a_connection_is_being_made_leaves_nothing() -> None:
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    fillers = []
    async with serving() as house:
        house.backend.address = silent.getsockname()
        for _ in range(4):  # a full backlog: further connections are neither made nor refused
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
            fillers.append(filler)
        connection = await house.client()
        await connection.send(request(CHAT, chat()))
        await until(lambda: house.active() == 1, "the connection to be tried")
        await within(house.gateway.stop(0))
        assert (await connection.answer()).status == 503
        await until(house.is_at_rest, "the attempt to be given up")
    for pipe in (silent, *fillers):
        pipe.close()


async def test_the_engine_is_asked_over_connections_that_stop_with_the_gateway() -> None:
    async with serving() as house:
        engine: Engine = house.engine
        await (await house.client()).post(CHAT, chat())
        await within(house.gateway.stop(0))
        await until(lambda: engine.lines[0].lost, "the idle connection to be closed")
