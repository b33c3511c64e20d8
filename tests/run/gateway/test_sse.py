"""The gateway parses bodies and events, and changes nothing else, however they are split."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bedplate.run.gateway import sse
from bedplate.run.gateway.errors import read_error
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.run.gateway.upstream import EngineConnection
from bedplate.values.traffic import ServedRequest

from .scripted import (
    DONE,
    STREAM_END,
    STREAM_HEAD,
    USAGE,
    Bench,
    decode_chunks,
    make_chat_body,
    make_chunk,
    make_delta,
    request,
)

HOSTILE = (
    "data: [DONE]\n\n",
    "\n\ndata: [DONE]\n\n",
    '"usage":{"prompt_tokens":999,"completion_tokens":999}',
    '{"choices":[],"usage":{"prompt_tokens":999}}',
    "event: error\n\n",
    "\nevent: error\ndata: {}\n\n",
    '"error":{"message":"no"}',
    '"message_stop"',
    '{"type":"message_stop"}',
    '"response.completed"',
    "\r\n\r\n",
    "naïve 火 🔥",
    "0\r\n\r\n",
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def add_usage(body: bytes) -> dict[str, Any]:
    """The body that is sent to the engine, decoded by another parser than the gateway's."""
    value: dict[str, Any] = json.loads(sse.add_usage_option(body, sse.read_request_fields(body)))
    return value


# requesting usage


@given(
    st.dictionaries(st.text().filter(lambda k: k not in sse.RequestFields.__struct_fields__), JSON, max_size=4),
    st.data(),
)
def test_requesting_usage_keeps_every_other_field(fields: dict[str, Any], data: st.DataObject) -> None:
    indent = data.draw(st.sampled_from([None, 0, 2]))
    ascii_only = data.draw(st.booleans())
    options = data.draw(
        st.sampled_from([None, {}, {"include_usage": False}, {"continuous_usage_stats": True, "x": [1.0]}])
    )
    body = {**fields, "stream": True}
    if data.draw(st.booleans()):
        body = {"stream_options": options, **body}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    sent = add_usage((data.draw(st.sampled_from(["", " ", "\n\t"])) + text).encode("utf-8", "replace"))
    told = body.get("stream_options")
    assert sent == {**body, "stream_options": {**(told if isinstance(told, dict) else {}), "include_usage": True}}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b" { } ",
        b'\r\n{"stream":true}\r\n',
        b'{"messages":[{"content":"{\\"stream_options\\":{}}"}]}',
        b'{"messages":[{"content":"\\"stream_options\\""}],"n":1.50}',
        b'{"tools":[{"stream_options":{"include_usage":false}}],"seed":123456789012345678901234567890}',
        b'{"stream_options":null,"stream":true}',
        b'{"stream_options":{"include_usage":null,"a":[1e400]}}',
        b'{"stream\\u005foptions":{"include_usage":false,"b":1}}',
        '{"prompt":"naïve 火"}'.encode(),
    ],
)
def test_requests_usage_in_unusual_bodies(body: bytes) -> None:
    before = json.loads(body)
    options = before.pop("stream_options", None) or {}
    sent = add_usage(body)
    assert sent.pop("stream_options") == {**options, "include_usage": True}
    assert sent == before


def test_requesting_usage_keeps_the_bytes_of_the_prompt() -> None:
    """Numbers and escapes reach the engine as they were written."""
    prompt = b'"prompt" : "\\u00e9\\/" , "temperature":0.70, "logit_bias":{ "1":1E2 }'
    assert prompt in sse.add_usage_option(b"{" + prompt + b"}", sse.RequestFields())
    kept = sse.add_usage_option(
        b'{"prompt":"\\u00e9\\/","n":0.70,"stream_options":{}}', sse.RequestFields(stream_options=None)
    )
    assert b'"\\u00e9\\/"' in kept and b"0.70" in kept


@pytest.mark.parametrize("body", [b'{"messages":[{"content":"\xff"}]}', b'{"a":' + b"[" * 100_000, b"[]", b"", b"{"])
def test_invalid_body_raises_an_error_that_callers_catch(body: bytes) -> None:
    with pytest.raises(sse.UNREADABLE):
        sse.read_request_fields(body)


# complete events


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", 0),
        (b"data: a", 0),
        (b"data: a\n", 0),
        (b"data: a\n\n", 9),
        (b"data: a\n\ndata: b", 9),
        (b"data: a\n\ndata: b\n\n", 18),
        (b"data: a\r\n\r", 0),
        (b"data: a\r\n\r\n", 11),
        (b"data: a\r\n\r\ndata: b\r\n", 11),
        (b"data: \xf0\x9f", 0),
    ],
)
def test_forwards_only_complete_events(data: bytes, whole: int) -> None:
    assert sse.measure_complete_events(data) == whole


# usage


@pytest.mark.parametrize("text", HOSTILE)
def test_ignores_text_that_looks_like_usage(text: str) -> None:
    assert not sse.may_have_usage(make_delta(text))


def test_finds_usage_after_events_with_null_usage() -> None:
    """SGLang sends `"usage":null` in every event, and several events may arrive together."""
    null = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
    usage = sse.TokenUsage()
    assert sse.may_have_usage(null + null + USAGE)
    assert sse.read_usage(null + USAGE + DONE, usage, drop=True) == null + DONE
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n',
        b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":-3}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3}\n\n',
        b'data:{"choices":[],"usage":{}} \nid: 7\n\n',
    ],
)
def test_an_event_alone_is_read_as_after_another(event: bytes, drop: bool) -> None:
    alone, after = sse.TokenUsage(), sse.TokenUsage()
    kept = sse.read_usage(event, alone, drop=drop)
    assert sse.read_usage(b": ping\n\n" + event, after, drop=drop) == b": ping\n\n" + kept
    assert alone == after


def test_usage_in_an_event_with_a_choice_is_counted_and_kept() -> None:
    both = b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    usage = sse.TokenUsage()
    assert sse.read_usage(both, usage, drop=True) == both
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":{"prompt_tokens":-1}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":"many"}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1}\n\n',
        b'data: {"choices":[],"usage":{"x":' + b"[" * 100_000 + b"\n\n",
        b'data: {"message":"\xff","usage":{}\n\n',
        b'"usage":{\n\n',
    ],
)
def test_ignores_invalid_counts(event: bytes) -> None:
    usage = sse.TokenUsage()
    assert sse.may_have_usage(event)
    assert sse.read_usage(event, usage, drop=True) == event
    sse.read_body_usage(event[6:], usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (None, None)


def test_reads_counts_of_the_messages_api_from_two_events() -> None:
    usage = sse.TokenUsage()
    start = (
        b"event: message_start\r\n"
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}\r\n\r\n'
    )
    end = b'event: message_delta\r\ndata: {"type":"message_delta","usage":{"output_tokens":4}}\r\n\r\n'
    assert sse.read_usage(start, usage, drop=True) == start
    assert sse.read_usage(end, usage, drop=True) == end
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 4)


def test_reads_counts_of_the_responses_api_from_the_response() -> None:
    usage = sse.TokenUsage()
    event = b'data: {"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":4}}}\n\n'
    assert sse.read_usage(event, usage, drop=True) == event
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 4)


# complete streams

WHOLE: list[tuple[sse.Api, bytes]] = [
    ("chat", DONE),
    ("chat", b"data:[DONE]\n\n"),
    ("chat", b"data: [DONE]\r\n\r\n"),
    ("chat", make_delta("a") + USAGE + DONE),
    ("chat", b'data: {"error":{"message":"no"}}\n\n'),
    ("completions", DONE),
    ("completions", b'data: {"error":"no"}\n\n'),
    ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"no"}}\n\n'),
    ("responses", b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'),
    ("responses", b'data: {"type": "response.incomplete", "response":{}}\n\n'),
    ("responses", b'data: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n'),
    ("responses", b'event: error\ndata: {"type":"error","code":"x"}\n\n'),
    ("responses", DONE),
    ("embeddings", b"anything"),
    ("other", b""),
]
CUT: list[tuple[sse.Api, bytes]] = [
    ("chat", b""),
    ("chat", make_delta("a")),
    ("chat", USAGE),
    ("chat", b'data: {"choices":[{"delta":{"content":"a"}}],"error":null}\n\n'),
    ("completions", b'data: {"choices":[{"text":"a"}]}\n\n'),
    ("messages", b'event: content_block_stop\ndata: {"type":"content_block_stop"}\n\n'),
    ("messages", b'data: {"type":"content_block_delta","delta":{"type":"message_stop"}}\n\n'),
    ("responses", b'data: {"type":"response.created","response":{"error":null,"usage":null}}\n\n'),
    (
        "responses",
        b'data: {"type":"response.created","response":{"tools":[{"parameters":{"properties":{"error":{}}}}]}}\n\n',
    ),
    ("responses", b'data: {"type":"response.output_text.delta","delta":"x"}\n\n'),
    *[(api, make_delta(text)) for api in ("chat", "messages", "responses") for text in HOSTILE],
]


@pytest.mark.parametrize(("api", "events"), WHOLE)
def test_recognizes_complete_streams(api: sse.Api, events: bytes) -> None:
    assert sse.is_complete(api, events)


@pytest.mark.parametrize(("api", "events"), CUT)
def test_recognizes_truncated_streams(api: sse.Api, events: bytes) -> None:
    assert not sse.is_complete(api, events)


# errors


@pytest.mark.parametrize(
    ("status", "body", "message", "kind", "code"),
    [
        (400, b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":64}}',
         "too long", "exceed_context_size_error", None),
        (400, b'{"error":{"code":"ctx","message":"too long","type":"x","param":"messages"}}', "too long", "x", "ctx"),
        (404, b'{"object":"error","message":"no such model","type":"NotFoundError","code":404}',
         "no such model", "NotFoundError", None),
        (422, b'{"detail":"field required"}', "field required", "invalid_request_error", None),
        (422, b'{"detail":[{"loc":["body"],"msg":"required"}]}', "[{'loc': ['body'], 'msg': 'required'}]",
         "invalid_request_error", None),
        (500, b'{"error":"out of memory"}', "out of memory", "server_error", None),
        (502, b"<html><body>Bad Gateway</body></html>", "<html><body>Bad Gateway</body></html>", "server_error", None),
        (503, b"", "the engine answered with status 503", "server_error", None),
        (500, b"\xff\xfe", "��", "server_error", None),
        (500, b'"\xff"', '"�"', "server_error", None),
        (500, b'["a"]', "['a']", "server_error", None),
        (500, b"null", "None", "server_error", None),
        (500, b"{}", "{}", "server_error", None),
        (500, b"[" * 5000, "[" * 2000, "server_error", None),
    ],
)  # fmt: skip
def test_reads_an_error_body_of_any_format(status: int, body: bytes, message: str, kind: str, code: str | None) -> None:
    error = read_error(status, body)
    assert (error.message, error.kind, error.code) == (message, kind, code)


# through both connections

Events = list[bytes]


@st.composite
def streams(draw: st.DrawFn) -> tuple[Events, bool]:
    """Events of a chat stream as engines write them, and whether they contain counts."""
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    space = draw(st.sampled_from([b"data: ", b"data:"]))
    tight = draw(st.booleans())
    nulls = draw(st.booleans())
    texts = draw(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20)), min_size=1, max_size=6))

    def event(value: object) -> bytes:
        separators = (",", ":") if tight else None
        text = json.dumps(value, separators=separators, ensure_ascii=draw(st.booleans()))
        return space + text.encode("utf-8", "replace") + end

    tail: dict[str, Any] = {"usage": None} if nulls else {}
    events = [event({"choices": [{"delta": {"content": text}}], **tail}) for text in texts]
    if draw(st.booleans()):
        events.insert(draw(st.integers(0, len(events))), b": a comment" + end)
    has_usage = draw(st.booleans())
    if has_usage:
        events.append(event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}))
    events.append(space + b"[DONE]" + end)
    return events, has_usage


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 5000), max_size=12)


@settings(deadline=None)
@given(streams(), PLACES, PLACES, st.booleans())
@example(([make_delta("火"), USAGE, DONE], True), list(range(400)), list(range(1000)), False)
@example(([make_delta("火"), USAGE, DONE], True), [], [], False)
@example(([make_delta("a").replace(b"\n\n", b"\r\n\r\n"), b"data: [DONE]\r\n\r\n"], False), list(range(400)), [], True)
def test_events_are_the_same_however_the_stream_is_split(
    stream: tuple[Events, bool], chunk_places: list[int], wire_places: list[int], asks_usage: bool
) -> None:
    """Split into HTTP chunks at some places, and into reads of the connection at others; or one read for each chunk."""
    events, has_usage = stream
    chunks = [make_chunk(piece) for piece in cut(b"".join(events), chunk_places)]
    reads = [STREAM_HEAD, *chunks, STREAM_END]
    if wire_places:
        reads = cut(b"".join(reads), wire_places)

    async def pass_through() -> tuple[Bench, bytes]:
        bench = Bench()
        options = {"stream_options": {"include_usage": True}} if asks_usage else {}
        bench.client.data_received(request("/v1/chat/completions", make_chat_body(stream=True, **options)))
        for piece in reads:
            bench.engine.data_received(piece)
        return bench, bench.to_client.written

    bench, written = asyncio.run(pass_through())
    head, body, rest = decode_chunks(written)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and rest == b""
    dropped = has_usage and not asks_usage
    assert body == b"".join(events[:-2] + events[-1:] if dropped else events)
    # Without usage, the tokens of prompt and text are counted; this engine cannot, so they are estimated.
    contents = [json.loads(event[5:])["choices"][0]["delta"]["content"] for event in events if b'"delta"' in event]
    prompt, answer = json.dumps(make_chat_body()["messages"]), "".join(contents)
    estimated = math.ceil(len(prompt) / 4), math.ceil(len(answer.encode()) / 4)
    assert (bench.tokens("prompt"), bench.tokens("completion")) == ((7, 3) if has_usage else estimated)
    assert bench.pool.active == 0


@settings(deadline=None)
@given(st.binary(max_size=300), PLACES)
@example(b"\n\n", [])
@example(b"data: \xff\xfe\n\n\xf0\x9f", [3])
def test_forwards_arbitrary_bytes_unchanged(junk: bytes, places: list[int]) -> None:
    """A stream without `[DONE]` ends with an error event, after everything before it was forwarded."""
    wire = STREAM_HEAD + b"".join(make_chunk(piece) for piece in cut(junk, places)) + STREAM_END

    async def pass_through() -> bytes:
        bench = Bench()
        bench.client.data_received(request("/v1/chat/completions", make_chat_body(stream=True)))
        bench.engine.data_received(wire)
        assert bench.pool.active == 0
        return bench.to_client.written

    written = asyncio.run(pass_through())
    if written.startswith(b"HTTP/1.1 200"):
        _, body, rest = decode_chunks(written)
        assert body.startswith(junk.rstrip(b"\r\n")) and rest == b""
        assert b'"code":"engine_stopped"' in body or sse.is_complete("chat", junk)
    else:
        assert not junk.strip() and written.startswith(b"HTTP/1.1 502")


def test_writes_head_and_first_event_together() -> None:
    async def pass_through() -> list[bytes]:
        bench = Bench()
        bench.client.data_received(request("/v1/chat/completions", make_chat_body(stream=True)))
        bench.engine.data_received(STREAM_HEAD)
        assert bench.to_client.writes == []
        bench.engine.data_received(make_chunk(make_delta("a")))
        bench.engine.data_received(make_chunk(make_delta("b")))
        return bench.to_client.writes

    first, second = asyncio.run(pass_through())
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(make_chunk(make_delta("a")))
    assert second == make_chunk(make_delta("b"))


# chunks that pass as they come


def relay(*reads: bytes) -> tuple[Bench, bytes]:
    """The body that a client gets of these reads after the head of the answer."""

    async def pass_through() -> Bench:
        bench = Bench()
        bench.client.data_received(request("/v1/chat/completions", make_chat_body(stream=True)))
        for piece in (STREAM_HEAD, *reads):
            bench.engine.data_received(piece)
        return bench

    bench = asyncio.run(pass_through())
    return bench, decode_chunks(bench.to_client.written)[1]


def test_chunks_after_the_first_reach_the_client_without_being_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[None] = []
    original = EngineConnection.on_chunk_complete

    def count(self: EngineConnection) -> None:
        parsed.append(None)
        original(self)

    monkeypatch.setattr(EngineConnection, "on_chunk_complete", count)
    events = [make_delta("word " * size) for size in (1, 2, 3, 50, 1, 900)]
    bench, body = relay(*map(make_chunk, (*events, USAGE, DONE)), STREAM_END)
    assert body == b"".join((*events, DONE))
    assert bench.to_client.writes[1:5] == [make_chunk(event) for event in events[1:5]]
    assert len(parsed) == 3 + 1, "the first event, the usage, an event of more than 4 kB, and the last chunk"
    assert bench.tokens("completion") == 3


@pytest.mark.parametrize(
    "reads",
    [
        [b"1A\r\n" + b"data: aaaaaaaaaaaaaaaaaa\n\n" + b"\r\n"],
        [b"1a;name=value\r\n" + b"data: aaaaaaaaaaaaaaaaaa\n\n" + b"\r\n"],
        [b"01a\r\n" + b"data: aaaaaaaaaaaaaaaaaa\n\n" + b"\r\n"],
        [make_chunk(b"data: aaaaaa"), make_chunk(b"aaaaaaaaaaaa\n\n")],
        [make_chunk(b"data: aaaaaaaaaaaaaaaaaa"), make_chunk(b"\n"), make_chunk(b"\n")],
        [b"1a\r\n", b"data: aaaaaaaaaaaaaaaaaa\n\n" + b"\r\n"],
        [b"1a\r\n" + b"data: aaaaaaaaaaaaaaaaaa\n\n", b"\r\n"],
        [b"1", b"a\r\n" + b"data: aaaaaaaaaaaaaaaaaa\n\n" + b"\r\n"],
    ],
    ids=["upper case", "extension", "leading zero", "half an event", "single bytes", "size", "no end", "half a size"],
)
def test_other_chunks_are_parsed(reads: list[bytes]) -> None:
    first, last = make_delta("first"), make_delta("last")
    bench, body = relay(make_chunk(first), *reads, make_chunk(last), make_chunk(DONE), STREAM_END)
    assert body == first + b"data: aaaaaaaaaaaaaaaaaa\n\n" + last + DONE
    assert bench.pool.active == 0


def test_data_that_looks_like_a_chunk_inside_one_is_not_taken_for_one() -> None:
    inner = make_chunk(make_delta("inner"))
    event = b"data: outer\n" + inner + b"\n\n"
    outer = make_chunk(event)
    begin = outer.index(inner)
    first = make_delta("first")
    reads = (outer[:begin], inner, outer[begin + len(inner) :])
    assert relay(make_chunk(first), *reads, make_chunk(DONE), STREAM_END)[1] == first + event + DONE


def test_name_of_the_model_is_replaced_in_every_chunk() -> None:
    events = [
        b'data: {"model":"/models/%b","choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"a" * 200, b"b" * size)
        for size in (1, 2, 60, 300)
    ]
    _, body = relay(*map(make_chunk, (*events, DONE)), STREAM_END)
    assert body == b"".join((*events, DONE)).replace(b"/models/" + b"a" * 200, b"small")


def test_stream_that_ends_after_an_unparsed_chunk_is_truncated() -> None:
    events = [make_delta("a"), make_delta("b")]
    _, body = relay(*map(make_chunk, events), STREAM_END)
    assert body.startswith(b"".join(events)) and b'"code":"engine_stopped"' in body


# why an answer ended


@given(st.lists(st.sampled_from([
    b'"finish_reason":"stop"', b'"finish_reason": "length"', b'"stop_reason":"end_turn"', b'"finish_reason":null',
    b'"finish_reason":"NOT THIS"', b'"a_reason":"x"', b'_reason"', b"text ", b"\n\n",
]), max_size=8))  # fmt: skip
def test_uses_the_last_finish_reason(parts: list[bytes]) -> None:
    data = b"".join(parts)
    said = sse._FINISH.findall(data)
    assert sse.find_finish_reason(data) == (said[-1].decode() if said else None)
    assert sse.find_finish_reason(b'"finish_reason":"first"', data) == (said[-1].decode() if said else "first")


# the prompt


@given(st.lists(st.text(max_size=30), min_size=1, max_size=3), st.booleans(), st.integers(1, 200))
def test_returns_beginning_and_length_of_the_prompt(words: list[str], tools: bool, most: int) -> None:
    messages = [{"role": "user", "content": word} for word in words]
    body = json.dumps({"messages": messages, **({"tools": words} if tools else {})}).encode()
    whole = (json.dumps(words).encode() if tools else b"") + json.dumps(messages).encode()
    assert sse.read_request_fields(body).get_prompt_text(most) == (whole[:most], len(whole))


@pytest.mark.parametrize("asks_usage", [False, True])
def test_finish_reason_is_recorded_when_each_event_arrives_alone(tmp_path: Path, asks_usage: bool) -> None:
    rows: list[ServedRequest] = []
    finish = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'

    async def pass_through() -> None:
        bench = Bench()
        bench.gateway.keeper = RequestRecorder(tmp_path / "store.sqlite")
        bench.gateway.keeper.listeners.append(rows.append)
        options = {"stream_options": {"include_usage": asks_usage}}
        bench.client.data_received(request("/v1/chat/completions", make_chat_body(stream=True, **options)))
        for piece in (STREAM_HEAD, *map(make_chunk, (make_delta("a"), finish, USAGE, DONE)), STREAM_END):
            bench.engine.data_received(piece)

    asyncio.run(pass_through())
    assert [(row.finish, row.completion_tokens) for row in rows] == [("length", 3)]


def nest(levels: int) -> bytes:
    return (
        b'{"a":' * (levels // 2) + b"[" * (levels - levels // 2) + b"]" * (levels - levels // 2) + b"}" * (levels // 2)
    )


@pytest.mark.parametrize("depth", [sse.MOST_LEVELS + sse._SPAN + 1, 20_000])
@pytest.mark.parametrize("before", [b"", b'{"a":[' + b"[]," * 999 + b"[]]},", rb'"\\\"]]]",' * 99])
def test_deep_requests_are_refused(depth: int, before: bytes) -> None:
    with pytest.raises(RecursionError, match="deeper than 500 levels"):
        sse.read_request_fields(b'{"metadata":[' + before + b"[" * depth + b"]" * depth + b"]}")


@pytest.mark.parametrize(
    "value",
    [
        nest(sse.MOST_LEVELS - 1),
        b"[" + nest(50) + (b"," + nest(50)) * 999 + b"]",
        json.dumps("[{" * 2_000).encode(),
        json.dumps('\\"[{' * 2_000 + "\\").encode(),
        b"[" + b",".join([json.dumps('a "[[[" b').encode()] * 2_000) + b"]",
    ],
    ids=["deep", "wide", "text", "escapes", "texts"],
)
def test_brackets_in_a_text_or_beside_each_other_are_not_deep(value: bytes) -> None:
    body = b'{"prompt":' + value + b"}"
    assert json.loads(body) and bytes(sse.read_request_fields(body).prompt) == value
