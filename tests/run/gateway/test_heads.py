"""Heads that repeat on a connection are not parsed again. What reaches the engine and the client is the same."""

from __future__ import annotations

import asyncio

import pytest

from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.heads import learn_head

from .scripted import ANSWER, CHAT, Bench, make_answer, make_chat_body, request

FIRST = request(CHAT, make_chat_body(), authorization="Bearer sk-1", x_trace="a")
SECOND = request(CHAT, make_chat_body(user="someone else", max_tokens=5), authorization="Bearer sk-1", x_trace="a")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each head that was parsed."""
    heads: list[None] = []
    original = ClientConnection.on_headers_complete

    def count(self: ClientConnection) -> None:
        heads.append(None)
        original(self)

    monkeypatch.setattr(ClientConnection, "on_headers_complete", count)
    return heads


def send(bench: Bench, *pieces: bytes) -> bytes:
    """Sends a request and answers it; returns what the engine got."""
    before = len(bench.to_engine.writes)
    for piece in pieces:
        bench.client.data_received(piece)
    sent = b"".join(bench.to_engine.writes[before:])
    bench.engine.data_received(make_answer(ANSWER))
    return sent


async def test_repeated_head_reaches_the_engine_as_if_it_were_parsed(parsed: list[None]) -> None:
    fresh = send(Bench(), SECOND)
    bench = Bench()
    send(bench, FIRST)
    del parsed[:]
    assert send(bench, SECOND) == fresh
    assert send(bench, SECOND) == fresh
    assert not parsed
    assert bench.to_client.written.count(b"HTTP/1.1 200 ") == 3
    assert bench.tokens("prompt") == 3 * 7


@pytest.mark.parametrize(
    "other",
    [
        SECOND.replace(b"sk-1", b"sk-2"),
        SECOND.replace(b"x-trace: a", b"x-trace: b"),
        SECOND.replace(b"x-trace: a", b"x-trace: a\r\nx-more: 1"),
        request(CHAT, make_chat_body(stop="."), authorization="Bearer sk-1"),
    ],
    ids=["key", "header", "more headers", "fewer headers"],
)
async def test_other_heads_are_parsed(other: bytes) -> None:
    fresh = send(Bench(), other)
    bench = Bench()
    send(bench, FIRST)
    assert send(bench, other) == fresh
    assert send(bench, FIRST) == send(Bench(), FIRST)


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_request_in_pieces_is_parsed(size: int, parsed: list[None]) -> None:
    bench = Bench()
    send(bench, FIRST)
    assert send(bench, *(SECOND[at : at + size] for at in range(0, len(SECOND), size))) == send(Bench(), SECOND)
    assert len(parsed) == 3


async def test_pipelined_requests_are_answered_in_order_after_a_repeated_one() -> None:
    bench = Bench()
    send(bench, FIRST)
    bench.client.data_received(SECOND)
    bench.client.data_received(FIRST)
    bench.client.data_received(SECOND[:30])
    assert len(bench.to_engine.writes) == 2
    bench.engine.data_received(make_answer({"n": 1}))
    assert bench.to_client.writes[-1].endswith(b'{"n": 1}')
    await asyncio.sleep(0)
    assert len(bench.to_engine.writes) == 3
    bench.engine.data_received(make_answer({"n": 2}))
    bench.client.data_received(SECOND[30:])
    assert bench.to_engine.writes[-1] == send(Bench(), SECOND)


async def test_two_messages_in_one_read_are_not_taken_for_one_head() -> None:
    """The first has no body, so the second's Content-Length is the only one."""
    bench = Bench()
    bench.client.data_received(request("/health", method="GET") + FIRST)
    assert bench.client._repeated is None


@pytest.mark.parametrize("length", [b"+5", b"5 ", b" 5", b"", b"5\x00", b"\xb2", b"0x5", b"1_0", b"10"])
async def test_length_that_is_not_the_bodys_is_parsed(length: bytes) -> None:
    head = learn_head(b"POST / HTTP/1.1\r\ncontent-length: 5\r\nx: y\r\n\r\nhello")
    assert head is not None
    assert head.find_body(b"POST / HTTP/1.1\r\ncontent-length: 5\r\nx: y\r\n\r\nworld") == b"world"
    assert head.find_body(b"POST / HTTP/1.1\r\ncontent-length: %b\r\nx: y\r\n\r\nworld" % length) is None


def test_only_a_message_with_the_declared_length_is_recognized() -> None:
    """Also where the number of digits changes: the bytes after a shorter body may be another request."""
    head = learn_head(b"POST / HTTP/1.1\r\ncontent-length: 5\r\nx: y\r\n\r\nhello")
    assert head is not None
    sizes = (*range(13), *range(95, 105), *range(995, 1005), 3, 1000, 999, 99_999, 100_000, 9)
    for size in sizes:
        for more in (-2, -1, 0, 1, 2):
            body = b"z" * max(0, size + more)
            found = head.find_body(b"POST / HTTP/1.1\r\ncontent-length: %d\r\nx: y\r\n\r\n%b" % (size, body))
            assert found == (body if len(body) == size else None), (size, len(body))


@pytest.mark.parametrize(
    "message",
    [
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nhello",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nx-content-length: 5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\n\r\nhello",
        b"",
    ],
)
def test_ambiguous_heads_are_not_learned(message: bytes) -> None:
    assert learn_head(message) is None


async def test_answers_with_a_repeated_head_are_complete_or_parsed() -> None:
    bench = Bench()
    for number in range(3):
        bench.client.data_received(FIRST)
        bench.engine.data_received(make_answer({"n": "x" * number}))
    assert [write.rpartition(b"\r\n\r\n")[2] for write in bench.to_client.writes] == [
        b'{"n": ""}', b'{"n": "x"}', b'{"n": "xx"}'
    ]  # fmt: skip
    assert bench.engine._repeated is not None
    bench.client.data_received(FIRST)
    answer = make_answer({"n": 4})
    bench.engine.data_received(answer[:-1])
    assert len(bench.to_client.writes) == 3
    bench.engine.data_received(answer[-1:])
    assert bench.to_client.writes[-1].endswith(b'{"n": 4}')


async def test_data_after_an_answer_with_a_repeated_head_closes_the_connection() -> None:
    bench = Bench()
    send(bench, FIRST)
    bench.client.data_received(FIRST)
    bench.engine.data_received(make_answer(ANSWER) + b"\x00junk")
    assert bench.to_client.written.count(b"HTTP/1.1 200 ") == 2
    assert bench.to_engine.closing


async def test_slow_client_of_repeated_requests_is_not_answered_ahead() -> None:
    """While the client does not read its last answer, the next request waits."""
    bench = Bench()
    send(bench, FIRST)
    bench.client.pause_writing()
    bench.client.data_received(SECOND)
    assert len(bench.to_engine.writes) == 1
    bench.client.resume_writing()
    assert len(bench.to_engine.writes) == 2
