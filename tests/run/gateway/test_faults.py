"""Failing engines and disconnecting clients: every request gets an answer, and no connection or slot leaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bedplate.run.gateway import BackendState
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.run.gateway.exchange import GatewayExchange
from bedplate.run.gateway.pages import PageResponse

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    PROBLEMS,
    STREAM_END,
    STREAM_HEAD,
    USAGE,
    Answer,
    Bench,
    Client,
    End,
    Engine,
    Setup,
    decode_chunks,
    make_answer,
    make_backend,
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


async def ask(setup: Setup, body: dict[str, Any] | None = None, path: str = CHAT) -> Answer:
    return await (await setup.connect()).post(path, make_chat_body() if body is None else body)


def is_engine_stopped(answer: Answer, retry_after: str = "1") -> bool:
    assert answer.status == 502
    assert answer.headers["retry-after"] == retry_after
    assert answer.error["type"] == "server_error"
    return bool(answer.error["code"] == "engine_stopped")


# before the first byte


@pytest.mark.parametrize("how", list(End))
async def test_retries_once_when_an_idle_connection_closes(how: End) -> None:
    async with start_gateway() as setup:
        await ask(setup)
        setup.engine.answer(how)
        setup.engine.answer(make_answer({"n": 2}))
        assert (await ask(setup)).json == {"n": 2}
        assert [seen.line for seen in setup.engine.seen] == [0, 0, 1]
        assert setup.engine.seen[1].body == setup.engine.seen[2].body
        assert setup.count_outcome("ok") == 2


async def test_second_attempt_is_the_last_and_uses_a_new_connection() -> None:
    async with start_gateway() as setup:
        go_on = asyncio.Event()
        setup.engine.answer(go_on, make_answer(ANSWER))
        setup.engine.answer(go_on, make_answer(ANSWER))
        first, second = asyncio.ensure_future(ask(setup)), asyncio.ensure_future(ask(setup))
        await setup.engine.request(1)
        go_on.set()
        await wait_within(asyncio.gather(first, second))
        setup.engine.otherwise = (End.CLOSE,)  # two connections are idle now
        assert is_engine_stopped(await ask(setup))
        assert len(setup.engine.seen) == 4
        assert setup.engine.seen[3].line == 2


async def test_retry_precedes_waiting_requests() -> None:
    """It also opens a new connection."""
    async with start_gateway(max_connections=1) as setup:
        await ask(setup)
        fail, go_on = asyncio.Event(), asyncio.Event()
        setup.engine.answer(fail, End.CLOSE)
        setup.engine.answer(make_answer({"again": 1}))
        setup.engine.answer(go_on, make_answer({"waiting": 1}))
        again = asyncio.ensure_future(ask(setup, make_chat_body(user="again")))
        await setup.engine.request(1)
        waiting = asyncio.ensure_future(ask(setup, make_chat_body(user="waiting")))
        later = asyncio.ensure_future(ask(setup, make_chat_body(user="later")))
        await wait_until(lambda: setup.count_waiting() == 2, "two requests to wait")
        fail.set()
        go_on.set()
        await wait_within(asyncio.gather(again, waiting, later))
        assert [seen.json.get("user") for seen in setup.engine.seen[1:]] == ["again", "again", "waiting", "later"]
        assert setup.engine.seen[2].line != setup.engine.seen[1].line


@pytest.mark.parametrize("how", list(End))
async def test_closed_new_connection_is_an_error_without_retry(how: End) -> None:
    async with start_gateway(retry_after_s=4) as setup:
        setup.engine.answer(how)
        assert is_engine_stopped(await ask(setup), retry_after="4")
        assert len(setup.engine.seen) == 1
        assert setup.count_outcome("failed") == 1


async def test_engine_that_accepts_and_closes_is_an_error() -> None:
    """The connection may close before the request is written."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with start_gateway() as setup:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        setup.backend.address = server.sockets[0].getsockname()[:2]
        for _ in range(20):
            assert is_engine_stopped(await ask(setup))
        server.close()


async def test_connection_lost_while_connecting_is_an_error() -> None:
    """The same without sockets, where the order of events is deterministic."""
    bench = Bench()
    bench.engine.connection_lost(None)
    loop = asyncio.get_running_loop()

    class Lost:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        async def create_connection(self, factory: Any, *_: Any) -> Any:
            connection = factory()
            connection.connection_made(bench.to_engine)
            connection.connection_lost(None)
            return bench.to_engine, connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bedplate.run.gateway.upstream.asyncio.get_running_loop", lambda: Lost())
        patch.setattr(Lost, "create_task", lambda self, coro: loop.create_task(coro), raising=False)
        bench.client.data_received(request(CHAT, make_chat_body()))
        await wait_until(lambda: bench.to_client.writes, "an answer")
    assert bench.to_client.written.startswith(b"HTTP/1.1 502 ")
    assert bench.pool.active == 0


async def test_closes_connection_when_engine_sends_data_without_a_request() -> None:
    async with start_gateway() as setup:
        await ask(setup)
        setup.engine.lines[0].transport.write(make_answer({"nobody": "asked"}))
        await wait_until(lambda: setup.engine.lines[0].lost, "the connection to close")
        assert (await ask(setup)).json == ANSWER
        assert setup.engine.seen[1].line == 1


async def test_an_engine_that_refuses_connections_is_an_error() -> None:
    async with start_gateway() as setup:
        await setup.engine.stop()
        answer = await ask(setup)
        assert is_engine_stopped(answer)
        assert "does not accept connections" in answer.error["message"]


async def test_uses_new_address_of_a_restarted_engine() -> None:
    async with start_gateway() as setup:
        await ask(setup)
        other = Engine()
        await other.start()
        other.answer(make_answer({"n": 2}))
        setup.backend.address = ("127.0.0.1", other.port)
        assert (await ask(setup)).json == {"n": 2}
        await wait_until(lambda: setup.engine.lines[0].lost, "the idle connection to the old address to be closed")
        await other.stop()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("loading", "llama.cpp is still loading small (50%)"),
        ("restarting", "llama.cpp stopped and is being restarted"),
        ("failed", "llama.cpp failed repeatedly and is not restarted: out of memory"),
        ("stopped", "bedplate is shutting down"),
    ],
)
async def test_engine_that_is_not_ready_gets_503_at_once(state: BackendState, message: str) -> None:
    async with start_gateway(state=state, progress=0.5, reason="out of memory", retry_after_s=3) as setup:
        answer = await ask(setup)
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        assert answer.error == {"message": message, "type": "server_error", "param": None, "code": f"engine_{state}"}
        assert not setup.engine.seen


# after the head

DIES = {
    "with the head": (STREAM_HEAD, End.CLOSE),
    "in the middle of an event": (STREAM_HEAD + make_chunk(make_delta("a")[:-1]), End.CLOSE),
    "in the middle of a chunk": (STREAM_HEAD + make_chunk(make_delta("a"))[:9], End.RESET),
    "with a reset": (STREAM_HEAD, End.RESET),
}


@pytest.mark.parametrize("steps", DIES.values(), ids=DIES)
async def test_engine_that_dies_before_its_first_event_is_an_error(steps: tuple[Any, ...]) -> None:
    async with start_gateway() as setup:
        await ask(setup)
        setup.engine.answer(*steps)
        assert is_engine_stopped(await ask(setup, STREAM))
        assert len(setup.engine.seen) == 2


def parse_events(body: bytes) -> list[tuple[str | None, dict[str, Any]]]:
    """Name and data of every event, parsed strictly by the standard."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        assert set(fields) <= {"event", "data"}
        found.append((fields.get("event"), json.loads(fields["data"])))
    return found


FIRST_EVENTS = {
    CHAT: make_delta("a"),
    "/v1/completions": b'data: {"choices":[{"text":"a"}]}\n\n',
    "/v1/messages": b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":9}}}\n\n',
    "/v1/responses": b"event: response.created\n"
    b'data: {"type":"response.created","response":{"error":null,"usage":null},"sequence_number":4}\n\n',
}
CUTS = {
    "closes": (End.CLOSE,),
    "resets": (End.RESET,),
    "ends in order but too early": (STREAM_END,),
    "sends a chunk of no size": (b"zz\r\n",),
    "sends half of an event": (make_chunk(b'data: {"cho'), End.CLOSE),
}


@pytest.mark.parametrize("path", FIRST_EVENTS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
async def test_truncated_stream_ends_with_an_error_event(path: str, cut: tuple[Any, ...]) -> None:
    """The event has the format of its API, and the connection can be reused."""
    sent = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(FIRST_EVENTS[path]), sent, *cut)
        client = await setup.connect()
        await client.send(request(path, {**STREAM, "prompt": "x", "input": "x"}))
        assert (await client.head()).status == 200
        body = await client.chunk()
        sent.set()
        while piece := await client.chunk():
            body += piece
        assert body.startswith(FIRST_EVENTS[path]) and b"[DONE]" not in body
        name, error = parse_events(body)[-1]
        if path == "/v1/messages":
            assert (name, error["type"], error["error"]["type"]) == ("error", "error", "api_error")
            assert "llama.cpp" in error["error"]["message"]
        elif path == "/v1/responses":
            assert (name, error["type"], error["code"]) == ("error", "error", "engine_stopped")
            assert error["sequence_number"] == 5
            assert "llama.cpp" in error["message"]
        else:
            assert name is None
            assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "engine_stopped")
        assert (await client.get("/health")).status == 200
        assert (await client.post(CHAT, make_chat_body())).status == 200
        assert setup.read_metric("requests_in_flight") == 0


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_client_detects_a_truncated_stream(api: str) -> None:
    import openai

    async with start_gateway() as setup:
        path = CHAT if api == "chat" else "/v1/responses"
        setup.engine.answer(STREAM_HEAD + make_chunk(FIRST_EVENTS[path]) + STREAM_END)
        async with openai.AsyncOpenAI(base_url=f"{setup.gateway.url}/v1", api_key="none", max_retries=0) as client:
            if api == "chat":
                with pytest.raises(openai.APIError, match=r"llama\.cpp ended the stream"):
                    async for _ in await client.chat.completions.create(
                        model="", messages=[{"role": "user", "content": "x"}], stream=True
                    ):
                        pass
            else:
                events = [event async for event in await client.responses.create(model="", input="", stream=True)]
                assert isinstance(events[-1], openai.types.responses.ResponseErrorEvent)
                assert events[-1].message.startswith("llama.cpp ended the stream")


async def test_adds_no_error_event_after_one_of_the_engine() -> None:
    error = b'data: {"error":{"message":"out of memory"}}\n\n'
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), error))
        assert (await ask(setup, STREAM)).body == make_delta("a") + error


async def test_forwards_last_event_without_blank_line() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), b"data: [DONE]\n"))
        body = (await ask(setup, STREAM)).body
        assert body.startswith(make_delta("a") + b"data: [DONE]\n\n") and not body.strip().endswith(b"}")


async def test_ignores_blank_lines_after_the_last_event() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), DONE, b"\n"))
        assert (await ask(setup, STREAM)).body == make_delta("a") + DONE


async def test_empty_stream_is_an_error() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD + STREAM_END)
        assert is_engine_stopped(await ask(setup, STREAM))


@pytest.mark.parametrize("how", list(End))
async def test_body_shorter_than_content_length_is_an_error(how: End) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(ANSWER)[:-5], how)
        assert is_engine_stopped(await ask(setup))


async def test_connection_reset_does_not_end_a_body_without_length() -> None:
    sent = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"a":', sent, End.RESET)
        asking = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        ((link,),) = (route.links for route in setup.gateway.routes)
        pool = link.pool
        await wait_until(lambda: any(c._ends_at_close for c in list_engine_connections(setup)), "the head to arrive")
        sent.set()
        assert is_engine_stopped(await wait_within(asking))
        assert pool.active == 0


def list_engine_connections(setup: Setup) -> list[Any]:
    exchanges = [c._current for c in setup.gateway.connections if isinstance(c._current, GatewayExchange)]
    return [e._connection for e in exchanges if e._connection is not None]


@pytest.mark.parametrize(
    "answer",
    [
        b"\x15\x03\x01\x00\x02\x02\x50",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot hex\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n\x00\x00",
    ],
)
async def test_invalid_http_from_the_engine_is_an_error(answer: bytes) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(answer)
        assert is_engine_stopped(await ask(setup))
        assert (await ask(setup)).json == ANSWER


async def test_invalid_data_after_an_answer_only_closes_the_connection() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(ANSWER) + b"\x00junk")
        assert (await ask(setup)).json == ANSWER
        assert (await ask(setup)).json == ANSWER
        assert [seen.line for seen in setup.engine.seen] == [0, 1]


async def test_invalid_data_after_an_answer_does_not_reach_the_next_request() -> None:
    """The next request waits for that connection, and gets it before the invalid data is read."""
    go_on = asyncio.Event()
    async with start_gateway(max_connections=1) as setup:
        setup.engine.answer(go_on, make_answer({"n": 1}) + b"\x00junk")
        setup.engine.otherwise = (make_answer({"n": 2}),)
        first = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        second = asyncio.ensure_future(ask(setup))
        await wait_until(setup.count_waiting, "a request to wait")
        go_on.set()
        assert (await wait_within(first)).json == {"n": 1}
        assert (await wait_within(second)).json == {"n": 2}
        assert setup.engine.seen[-1].line == 1


@pytest.mark.parametrize(
    "junk",
    [b"no field at all\n\n", b"data\n\n", b": comment\n\n", b"data: {broken\n\n", b"data: \xff\xfe\n\n", b"\xff\n\n"],
)
async def test_forwards_malformed_events(junk: bytes) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), junk, b'data: "usage":{\n\n', USAGE, DONE))
        assert (await ask(setup, STREAM)).body == make_delta("a") + junk + b'data: "usage":{\n\n' + DONE


async def test_internal_error_is_answered_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For requests and for answers; a client never waits for a callback that raised."""

    def fail(*_: Any) -> Any:
        raise KeyError("a mistake")

    async with start_gateway() as setup:
        client = await setup.connect()
        with monkeypatch.context() as patch:
            patch.setattr("bedplate.run.gateway.sse.read_body_usage", fail)
            answer = await client.post(CHAT, make_chat_body())
            assert (answer.status, answer.error["code"]) == (502, "engine_stopped")
            assert PROBLEMS == ["internal error while forwarding an answer: KeyError('a mistake')"]
        assert (await client.post(CHAT, make_chat_body())).status == 200
        with monkeypatch.context() as patch:
            patch.setattr(setup.gateway, "find_route", fail)
            answer = await client.post(CHAT, make_chat_body())
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert PROBLEMS[1:] == ["internal error while reading a request: KeyError('a mistake')"]
            assert await client.is_closed()
        PROBLEMS.clear()


# clients that disconnect


async def leave_before_the_head_is_sent(setup: Setup, client: Client) -> None:
    await client.send(request(CHAT, STREAM)[:20])


async def leave_in_the_middle_of_the_body(setup: Setup, client: Client) -> None:
    await client.send(request(CHAT, STREAM)[:-3])


async def leave_before_the_first_token(setup: Setup, client: Client) -> None:
    setup.engine.answer(STREAM_HEAD, asyncio.Event())
    await client.send(request(CHAT, STREAM))
    await setup.engine.request(1)


async def leave_in_the_middle_of_the_stream(setup: Setup, client: Client) -> None:
    setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), asyncio.Event())
    await client.send(request(CHAT, STREAM))
    await client.head()
    await client.chunk()


async def leave_while_a_plain_answer_is_made(setup: Setup, client: Client) -> None:
    setup.engine.answer(make_answer(ANSWER)[:-5], asyncio.Event())
    await client.send(request(CHAT, make_chat_body()))
    await setup.engine.request(1)


async def leave_with_more_requests_in_the_pipe(setup: Setup, client: Client) -> None:
    setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), asyncio.Event())
    await client.send(request(CHAT, STREAM) * 3 + request("/health"))
    await client.head()


LEAVING = [
    leave_before_the_head_is_sent,
    leave_in_the_middle_of_the_body,
    leave_before_the_first_token,
    leave_in_the_middle_of_the_stream,
    leave_while_a_plain_answer_is_made,
    leave_with_more_requests_in_the_pipe,
]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("leave", LEAVING)
async def test_disconnect_cancels_the_request(leave: Any, how: str) -> None:
    """The engine sees its connection close, and other clients are not affected."""
    async with start_gateway() as setup:
        go_on = asyncio.Event()
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("x")), go_on, make_chunk(DONE) + STREAM_END)
        other = await setup.connect()
        await other.send(request(CHAT, STREAM))
        await other.head()
        client = await setup.connect()
        await leave(setup, client)
        if how == "close":
            await client.close()
        else:
            client.reset()
        for seen in setup.engine.seen[1:]:
            await wait_within(seen.gone.wait())
        await wait_until(lambda: len(setup.gateway.connections) == 1, "the connection to be forgotten")
        assert setup.read_metric("requests_in_flight") == 1
        assert setup.count_outcome("cancelled") == len(setup.engine.seen) - 1
        assert setup.count_active() == 1
        go_on.set()
        assert await other.chunk() + await other.chunk() == make_delta("x") + DONE
        assert await other.chunk() == b""


@pytest.mark.parametrize("whole", [True, False])
async def test_client_that_leaves_after_the_last_event_has_its_answer(whole: bool) -> None:
    """The end of the HTTP message arrives later, as from another machine."""
    async with start_gateway() as setup:
        backend, never = setup.gateway.backends[0], asyncio.Event()
        backend.health.failures = 1
        last = make_chunk(make_delta("x")) + (make_chunk(DONE) if whole else b"")
        setup.engine.answer(STREAM_HEAD + last, never)
        client = await setup.connect()
        await client.send(request(CHAT, STREAM))
        await client.head()
        for _ in range(1 + whole):
            await client.chunk()
        await client.close()
        await wait_within(setup.engine.seen[0].gone.wait())
        await wait_until(lambda: not setup.gateway.connections, "the connection to be forgotten")
        assert setup.count_outcome("ok" if whole else "cancelled") == 1
        assert backend.health.failures == (0 if whole else 1)


async def test_disconnect_while_waiting_removes_the_request() -> None:
    go_on = asyncio.Event()
    async with start_gateway(max_connections=1) as setup:
        setup.engine.answer(go_on, make_answer({"n": 1}))
        first = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        leaving = await setup.connect()
        await leaving.send(request(CHAT, make_chat_body(user="leaving")))
        await wait_until(lambda: setup.count_waiting() == 1, "a request to wait")
        last = asyncio.ensure_future(ask(setup, make_chat_body(user="last")))
        await wait_until(lambda: setup.count_waiting() == 2, "another to wait")
        await leaving.close()
        await wait_until(lambda: setup.count_waiting() == 1, "the first to be forgotten")
        assert setup.read_metric("requests_in_flight") == 2
        go_on.set()
        assert (await wait_within(first)).json == {"n": 1}
        assert (await wait_within(last)).json == ANSWER
        assert [seen.json.get("user") for seen in setup.engine.seen] == [None, "last"]
        assert setup.count_outcome("cancelled") == 1


async def test_disconnect_while_connecting_removes_the_request() -> None:
    async with start_gateway() as setup:
        for _ in range(20):
            client = await setup.connect()
            await client.send(request(CHAT, STREAM))
            client.reset()
        await wait_until(setup.is_at_rest, "all to be forgotten")
        assert (await ask(setup)).json == ANSWER


async def test_requests_beyond_the_engines_connections_wait_in_order() -> None:
    async with start_gateway(max_connections=2) as setup:
        gates = [asyncio.Event() for _ in range(6)]
        for number, gate in enumerate(gates):
            setup.engine.answer(gate, make_answer({"n": number}))
        ((link,),) = (route.links for route in setup.gateway.routes)
        pool = link.pool
        asking = []
        for number in range(6):
            client = await setup.connect()
            asking.append(asyncio.ensure_future(client.post(CHAT, make_chat_body(user=str(number)))))
            await wait_until(lambda n=number: len(setup.engine.seen) + setup.count_waiting() == n + 1, "it to be taken")  # type: ignore[misc]
        assert len(setup.engine.seen) == 2 and pool.active == 2
        for number, gate in enumerate(gates):
            gate.set()
            assert (await wait_within(asking[number])).json == {"n": number}
            assert pool.active <= 2
        assert [seen.json["user"] for seen in setup.engine.seen] == [str(n) for n in range(6)]
        assert {seen.line for seen in setup.engine.seen} == {0, 1}


@pytest.mark.parametrize("address_known", [True, False])
async def test_answers_all_waiting_requests_when_the_engine_dies(address_known: bool) -> None:
    async with start_gateway(max_connections=1) as setup:
        setup.engine.answer(asyncio.Event())
        asking = [asyncio.ensure_future(ask(setup)) for _ in range(5)]
        await wait_until(lambda: setup.count_waiting() == 4, "requests to wait")
        await setup.engine.request()
        if not address_known:
            setup.backend.address = None
            setup.backend.state = "restarting"
        await setup.engine.stop()
        answers = await wait_within(asyncio.gather(*asking))
        assert sorted(a.status for a in answers) == ([502] * 5 if address_known else [502] + [503] * 4)
        assert all(a.headers["retry-after"] == "1" for a in answers)
        if not address_known:
            assert {a.error["code"] for a in answers} == {"engine_stopped", "engine_restarting"}
        assert setup.count_outcome("failed") == 5


# slow readers

PIECE = make_delta("x" * 65_000)
NUM_PIECES = 400


async def stall_reader(setup: Setup, client: Client, body: dict[str, Any] = STREAM) -> None:
    """A client that requests 26 MB and reads nothing; returns when the engine cannot send more."""
    setup.engine.answer(STREAM_HEAD, *[make_chunk(PIECE)] * NUM_PIECES, make_chunk(DONE) + STREAM_END)
    number = len(setup.engine.seen)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(request(CHAT, body))
    seen = await setup.engine.request(number)
    line = setup.engine.lines[seen.line]
    await wait_until(lambda: line.unsent_bytes > 0 and not line._writable.is_set(), "the engine to be held up")


def count_buffered_bytes(setup: Setup) -> int:
    return sum(c._transport.get_write_buffer_size() for c in setup.gateway.connections if c._transport is not None)


async def test_slow_reader_pauses_only_its_own_stream() -> None:
    """Bytes that it does not read stay with the engine, and arrive when it continues to read."""
    async with start_gateway() as setup:
        client = await setup.connect()
        await stall_reader(setup, client)
        for _ in range(50):
            await asyncio.sleep(0)
            assert count_buffered_bytes(setup) < 2_000_000
        assert (await ask(setup)).json == ANSWER
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert answer.body == PIECE * NUM_PIECES + DONE


async def test_slow_reader_that_disconnects_frees_its_slot() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        await stall_reader(setup, client)
        client.reset()
        await wait_within(setup.engine.seen[0].gone.wait())
        await wait_until(setup.is_at_rest, "the request to end")


async def test_paused_connection_resumes_for_the_next_request() -> None:
    """The engine's connection is free when the engine has finished, though the client still has to read."""
    bench = Bench()
    bench.client.data_received(request(CHAT, STREAM))
    original = bench.to_client.write

    def overflow(data: bytes | bytearray | memoryview) -> None:
        original(data)
        if not bench.client._paused:
            bench.client.pause_writing()

    bench.to_client.write = overflow  # type: ignore[method-assign]
    bench.engine.data_received(make_stream(make_delta("a"), DONE))
    assert bench.to_engine.reading
    assert bench.pool.active == 0


async def test_next_answer_waits_until_slow_reader_has_read_the_last() -> None:
    """Otherwise answers to pipelined requests would fill the memory."""
    bench = Bench()
    bench.client.data_received(request(CHAT, STREAM))
    bench.engine.data_received(STREAM_HEAD + make_chunk(make_delta("a")))
    bench.client.pause_writing()
    assert not bench.to_engine.reading
    bench.engine.data_received(make_chunk(DONE) + STREAM_END)
    assert bench.client.deadline is not None
    asked = len(bench.to_engine.writes)
    bench.client.data_received(request(CHAT, STREAM))
    assert len(bench.to_engine.writes) == asked
    bench.client.resume_writing()
    assert len(bench.to_engine.writes) == asked + 1
    bench.engine.data_received(make_stream(make_delta("b"), DONE))
    assert bench.to_client.written.count(DONE) == 2


async def test_slow_reader_of_pages_gets_the_next_page() -> None:
    large = b"x" * 20_000_000
    async with start_gateway() as setup:
        setup.gateway.handed["/large"] = lambda _: PageResponse(large, "text/plain")
        client = await setup.connect()
        for _ in range(3):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request("/large") + request("/health"))
            (connection,) = setup.gateway.connections
            await wait_until(lambda: connection._paused, "more to be written than the client takes")  # noqa: B023
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await client.answer()).body == large
            assert (await client.answer()).status == 200
            assert (await client.get("/health")).status == 200


async def test_each_backend_has_its_own_connections() -> None:
    other = Engine()
    await other.start()
    async with start_gateway(make_backend(other.port, "large", names=frozenset(["large"]))) as setup:
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body(model="large"))).status == 200
        assert (await client.post(CHAT, make_chat_body(model="small"))).status == 200
        assert (len(other.seen), len(setup.engine.seen)) == (1, 1)
    await other.stop()


# the end of a request


@pytest.mark.parametrize("body", [make_chat_body(), STREAM], ids=["plain", "stream"])
async def test_error_in_the_accounting_does_not_leave_the_client_waiting(body: dict[str, Any]) -> None:
    def fail(_: FinishedRequest) -> None:
        raise KeyError("a mistake")

    async with start_gateway(on_end=fail) as setup:
        if body is STREAM:
            setup.engine.answer(make_stream(make_delta("a"), USAGE, DONE))
        answer = await wait_within(ask(setup, body))
        assert answer.status == 200
        assert PROBLEMS == ["internal error while accounting for a request: KeyError('a mistake')"]
        PROBLEMS.clear()
        assert setup.backend.in_flight == 0  # its slot is free


async def test_last_events_and_the_end_of_the_stream_are_one_write() -> None:
    bench = Bench()
    bench.client.data_received(request(CHAT, make_chat_body(stream=True, stream_options={"include_usage": True})))
    bench.engine.data_received(STREAM_HEAD + make_chunk(make_delta("a")))
    before = len(bench.to_client.writes)
    bench.engine.data_received(make_chunk(make_delta("b")) + make_chunk(USAGE) + make_chunk(DONE) + STREAM_END)
    assert len(bench.to_client.writes) == before + 1
    _, body, rest = decode_chunks(bench.to_client.written)
    assert (body, rest) == (make_delta("a") + make_delta("b") + USAGE + DONE, b"")


# engines that are replaced


async def test_500_of_an_engine_that_is_being_stopped_is_not_passed_on() -> None:
    """Engines answer their last requests with 500 while they shut down."""
    async with start_gateway() as setup:
        stopped = asyncio.Event()
        setup.engine.answer(stopped, make_answer({"error": "shutting down"}, "500 Internal Server Error"))
        asking = asyncio.ensure_future(ask(setup))
        await setup.engine.request()
        leaving = setup.gateway.remove(setup.backend, within_s=60)
        stopped.set()
        answer = await wait_within(asking)
        assert (answer.status, answer.error["code"]) == (503, "engine_stopped")
        assert answer.headers["retry-after"] == "1"
        assert await leaving


async def test_address_that_changes_while_a_request_connects_is_not_the_engines_failure() -> None:
    async with start_gateway() as setup:
        port = setup.backend.address
        setup.backend.address = ("127.0.0.1", await find_closed_port())

        def restore_address() -> None:
            """Called before the connection is opened; what it schedules runs before the attempt fails."""
            asyncio.get_running_loop().call_soon(setattr, setup.backend, "address", port)

        setup.backend.begun = restore_address
        answer = await wait_within(ask(setup))
        assert (answer.status, answer.error["code"]) == (503, "engine_stopped")
        assert setup.backend.health.failures == 0


async def find_closed_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
