"""Responses are parsed with correct timestamps, however the network splits them."""

from __future__ import annotations

import asyncio
import itertools
import json
from bisect import bisect_right
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.rough_server import make_chunk, make_event, make_stream, serve_rough

from bedplate.errors import UsageError
from bedplate.measure.load.answers import StreamedAnswer, read, split_events
from bedplate.measure.load.target import LoadTarget
from bedplate.measure.load.wire import HttpExchange, LoadConnection, ask

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
EVENTS = (make_event(" one"), make_event(" tw\u00f6"), make_event(" three", "length"), make_event(usage=USAGE))
STREAMED = make_stream(*EVENTS)
PLAIN_BODY = json.dumps(
    {
        "choices": [{"text": " all of it", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
).encode()
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(PLAIN_BODY),
    PLAIN_BODY,
)


class Transport:
    """The parts of a transport that a connection uses."""

    def __init__(self) -> None:
        self.aborted = False

    def write(self, data: bytes) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def receive(*pieces: bytes, close: bool = False) -> HttpExchange:
    """The exchange of a connection that receives these reads."""
    ended: list[HttpExchange] = []
    connection = LoadConnection(lambda _connection, exchange: ended.append(exchange))
    connection.connection_made(cast(Any, Transport()))
    connection.send(HttpExchange(0, 0), b"")
    for number, piece in enumerate(pieces):
        assert not ended, f"it ended before read {number} of {len(pieces)}"
        connection.data_received(piece)
    if close:
        connection.connection_lost(None)
    (exchange,) = ended
    return exchange


def split_bytes(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(set(places)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if end > start]


def check_streamed(exchange: HttpExchange) -> None:
    answer = read(exchange, keep_text=True)
    assert (answer.outcome, answer.error, answer.finish) == ("ok", None, "length")
    assert answer.text == " one tw\u00f6 three" and len(answer.text_ns) == 3
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 2)
    assert answer.last_ns == answer.text_ns[2] >= answer.text_ns[1] >= answer.text_ns[0] >= exchange.sent_ns


def test_a_stream_may_be_split_at_any_byte() -> None:
    for place in range(1, len(STREAMED)):
        check_streamed(receive(STREAMED[:place], STREAMED[place:]))


@given(st.lists(st.integers(1, len(STREAMED) - 1)))
def test_a_stream_may_be_split_at_several_bytes(places: list[int]) -> None:
    check_streamed(receive(*split_bytes(STREAMED, places)))


def test_a_stream_may_arrive_byte_by_byte() -> None:
    check_streamed(receive(*split_bytes(STREAMED, list(range(len(STREAMED))))))


@given(st.lists(st.integers(1, len(PLAIN) - 1)))
def test_a_response_with_content_length_may_be_split_anywhere(places: list[int]) -> None:
    answer = read(receive(*split_bytes(PLAIN, places)), keep_text=True)
    assert (answer.outcome, answer.text, answer.output_tokens, answer.finish) == ("ok", " all of it", 3, "stop")
    assert len(answer.text_ns) == 1


def test_accepts_trailers_and_chunk_extensions() -> None:
    framed = b"".join(make_chunk(each).replace(b"\r\n", b";a=b\r\n", 1) for each in (*EVENTS, b"data: [DONE]\n\n"))
    head = b"HTTP/1.1 100 Continue\r\n\r\n" + STREAMED[: STREAMED.index(b"\r\n\r\n") + 4]
    check_streamed(receive(head, framed, b"0\r\nx-after: 1\r\n\r\n"))


def test_a_response_may_end_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    check_streamed(receive(head + b"".join((*EVENTS, b"data: [DONE]\n\n")), close=True))


def test_an_incomplete_stream_is_cut() -> None:
    for kept in range(STREAMED.index(b"data:") + 1, STREAMED.index(b'"length"')):
        answer = read(receive(STREAMED[:kept], close=True))
        assert answer.outcome == "cut", STREAMED[:kept]


def test_a_complete_response_without_the_last_event_is_cut() -> None:
    assert read(receive(make_stream(make_event(" one"), done=False))).outcome == "cut"
    assert read(receive(make_stream(make_event(" one", "stop"), done=False))).outcome == "ok"


def test_an_error_event_in_a_stream_is_an_error() -> None:
    broken = make_stream(make_event(" one"), b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
    answer = read(receive(broken))
    assert (answer.outcome, answer.error) == ("error", "out of memory")


@given(st.binary(max_size=300))
def test_no_bytes_raise_an_exception(junk: bytes) -> None:
    for data in (junk, STREAMED[:80] + junk, make_stream(b"data: " + junk.replace(b"\n", b"") + b"\n\n")):
        ended: list[HttpExchange] = []
        connection = LoadConnection(lambda _connection, exchange, ended=ended: ended.append(exchange))  # type: ignore[misc]
        connection.connection_made(cast(Any, Transport()))
        connection.send(HttpExchange(0, 0), b"")
        connection.data_received(data)
        if not ended:
            connection.connection_lost(ConnectionResetError("gone"))
        (exchange,) = ended
        assert isinstance(read(exchange), StreamedAnswer)


@given(
    texts=st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), min_size=1
    ),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    data=st.data(),
)
def test_an_event_has_the_timestamp_of_the_read_with_its_first_byte(
    texts: list[str], newline: bytes, data: st.DataObject
) -> None:
    body, starts = b"", []
    for number, text in enumerate(texts):
        starts.append(len(body))
        comment = b": ping" + newline + newline if number % 3 == 2 else b""
        body += b"data: " + text.encode() + newline + newline + comment
    pieces = split_bytes(body, data.draw(st.lists(st.integers(1, len(body) - 1))))
    begins = list(itertools.accumulate(map(len, pieces), initial=0))[:-1]
    found = list(split_events(pieces, range(len(pieces))))
    assert [text_event.decode() for _, text_event in found] == texts
    assert [stamp for stamp, _ in found] == [bisect_right(begins, start) - 1 for start in starts]


def test_only_events_with_text_count_as_text() -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "Hm"}}]}\n\n'
    text_event = b'data: {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}\n\n'
    exchange = HttpExchange(0, 0)
    exchange.status, exchange.content_type, exchange.whole = 200, b"text/event-stream", True
    exchange.pieces, exchange.stamps = [role, thought, text_event], [1, 2, 3]
    answer = read(exchange, keep_text=True)
    assert answer.text_ns == [2, 3] and answer.text == "HmYes"


def test_a_real_socket_gives_the_same_result() -> None:
    def byte_by_byte(socket: Any, _asked: Any) -> None:
        for place in range(len(STREAMED)):
            socket.sendall(STREAMED[place : place + 1])

    with serve_rough(byte_by_byte) as server:
        target = LoadTarget.from_url(server.url)
        check_streamed(asyncio.run(ask(target, target.request("POST", "/v1/completions", b"{}"), 20)))


# targets


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "api"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", None),
        ("http://127.0.0.1:8000/", "127.0.0.1", 8000, "", None),
        ("https://api.example.com/v1", "api.example.com", 443, "", None),
        ("https://api.example.com/some/team/v1/", "api.example.com", 443, "/some/team", None),
        ("http://[::1]:9/v1/chat/completions", "::1", 9, "", "chat"),
        ("http://h/v1/completions", "h", 80, "", "completions"),
    ],
)
def test_parses_the_url_of_an_endpoint(url: str, host: str, port: int, prefix: str, api: str | None) -> None:
    target = LoadTarget.from_url(url)
    assert (target.host, target.port, target.prefix, target.api) == (host, port, prefix, api)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://h", "http://", "http://h:port", "http://u:p@h", "http://h/?a"]
)
def test_rejects_invalid_urls(url: str) -> None:
    with pytest.raises(UsageError):
        LoadTarget.from_url(url)


def test_sends_the_key_and_never_shows_it() -> None:
    target = LoadTarget.from_url("http://h", key="sk-secret")
    assert b"authorization: Bearer sk-secret\r\n" in target.request("GET", "/v1/models")
    assert "secret" not in repr(target) + str(target) + f"{target}"
    assert target.hide_key("Incorrect API key: sk-secret.") == "Incorrect API key: ***."
    with pytest.raises(UsageError):
        LoadTarget.from_url("http://h", key="sk\r\nx-evil: 1")
