"""The gateway forwards answers and streams, and serves pages, on persistent connections."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.run.gateway import BackendState, sse
from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.pages import PageRequest, PageResponse
from bedplate.run.gateway.tasks import TASK_APIS
from bedplate.run.gateway.watch import DurationHistogram
from bedplate.values.capabilities import Capabilities

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_END,
    STREAM_HEAD,
    USAGE,
    Client,
    End,
    Setup,
    Wire,
    make_answer,
    make_backend,
    make_chat_body,
    make_chunk,
    make_delta,
    make_stream,
    request,
    start_gateway,
    wait_within,
)

# plain answers


async def test_a_plain_answer_passes_unchanged() -> None:
    body = b'{ "choices": [{"message":{"content":"na\xc3\xafve"}}],\n"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(body))
        answer = await (await setup.connect()).post(CHAT, make_chat_body())
        assert (answer.status, answer.body) == (200, body)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["server"] == "bedplate"
        seen = setup.engine.seen[0]
        assert (seen.method, seen.target, seen.json) == ("POST", CHAT, make_chat_body())
        assert setup.read_metric("tokens_total", kind="prompt") == 7


@pytest.mark.parametrize(
    "path", [path.decode() for path, api in sse.APIS.items() if api not in {*TASK_APIS, "transcriptions"}]
)
async def test_every_api_goes_to_the_path_of_the_engine_that_reports_usage(path: str) -> None:
    target = {"/chat/completions": CHAT, "/completions": "/v1/completions", "/embeddings": "/v1/embeddings"}
    async with start_gateway() as setup:
        answer = await (await setup.connect()).post(f"{path}?beta=true", make_chat_body(prompt="x", input="x"))
        assert answer.json == ANSWER
        assert setup.engine.seen[0].target == target.get(path, path), "the query is not checked, so it is not forwarded"


async def test_accepts_answer_that_ends_with_the_connection() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"a":', b"1}", End.CLOSE)
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body())).json == {"a": 1}
        assert (await client.post(CHAT, make_chat_body())).json == ANSWER
        assert [seen.line for seen in setup.engine.seen] == [0, 1]


async def test_ignores_interim_responses_of_the_engine() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 102 Processing\r\n\r\n", make_answer(ANSWER))
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body())).json == ANSWER
        assert (await client.post(CHAT, make_chat_body())).json == ANSWER
        assert [seen.line for seen in setup.engine.seen] == [0, 0]


async def test_forwards_non_standard_status() -> None:
    """Such as Anthropic's 529, for which the standard library has no phrase."""
    async with start_gateway() as setup:
        setup.engine.answer(make_answer({"error": {"message": "overloaded"}}, "529 Overloaded"))
        answer = await (await setup.connect()).post("/v1/messages", make_chat_body())
        assert (answer.status, answer.json["error"]["message"]) == (529, "overloaded")


async def test_reuses_connections_to_the_engine() -> None:
    async with start_gateway() as setup:
        for _ in range(3):
            await (await setup.connect()).post(CHAT, make_chat_body())
        assert [seen.line for seen in setup.engine.seen] == [0, 0, 0]


async def test_opens_new_connection_after_engine_sends_close() -> None:
    async with start_gateway() as setup:
        setup.engine.otherwise = (
            make_answer(ANSWER).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1),
            End.CLOSE,
        )
        client = await setup.connect()
        for _ in range(3):
            assert (await client.post(CHAT, make_chat_body())).status == 200
        assert [seen.line for seen in setup.engine.seen] == [0, 1, 2]


async def test_chunked_body_reaches_the_engine_complete() -> None:
    """With its length, and without the trailers."""
    async with start_gateway() as setup:
        client = await setup.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        await client.send(head + make_chunk(b'{"mess'))
        await client.send(
            make_chunk(b'ages":[{"role":"user"}]}') + b"0\r\nx-trailer: 1\r\nauthorization: Bearer trailing\r\n\r\n"
        )
        assert (await client.answer()).status == 200
        seen = setup.engine.seen[0]
        assert seen.body == b'{"messages":[{"role":"user"}]}'
        assert seen.header("content-length") == ["30"]
        assert not seen.header("transfer-encoding") and not seen.header("x-trailer")
        assert (await client.get("/health")).status == 200


# streams


async def test_forwards_each_event_without_waiting_for_later_ones() -> None:
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(
            STREAM_HEAD + make_chunk(make_delta("a")),
            go_on,
            make_chunk(make_delta("b")) + make_chunk(DONE) + STREAM_END,
        )
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(stream=True)))
        head = await client.head()
        assert await client.chunk() == make_delta("a")
        assert not go_on.is_set()
        go_on.set()
        assert await client.chunk() + await client.chunk() + await client.chunk() == make_delta("b") + DONE
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert head.headers["cache-control"] == "no-cache"
        assert head.headers["server"] == "bedplate"


async def test_sends_response_head_with_the_first_event() -> None:
    """One packet instead of two; and if the engine dies before its first token, the client gets a proper status."""
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD, go_on, make_chunk(make_delta("a")) + make_chunk(DONE) + STREAM_END)
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(stream=True)))
        await setup.engine.request()
        reading = asyncio.ensure_future(client.reader.read(1 << 16))
        assert (await ask_as_another_client(setup)).status == 200  # after a complete exchange there is still no data
        assert not reading.done()
        go_on.set()
        first = await wait_within(reading)
        assert first.startswith(b"HTTP/1.1 200 OK\r\n") and make_chunk(make_delta("a")) in first


async def ask_as_another_client(setup: Setup) -> Any:
    return await (await setup.connect()).post(CHAT, make_chat_body())


async def test_requests_usage_and_removes_it_for_clients_that_did_not_request_it() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), USAGE, DONE))
        answer = await (await setup.connect()).post(CHAT, make_chat_body(stream=True))
        assert setup.engine.seen[0].json == {**make_chat_body(stream=True), "stream_options": {"include_usage": True}}
        assert answer.body == make_delta("a") + DONE
        assert setup.read_metric("tokens_total", kind="prompt") == 7
        assert setup.read_metric("tokens_total", kind="completion") == 3


async def test_forwards_usage_to_clients_that_requested_it() -> None:
    asked = make_chat_body(stream=True, stream_options={"include_usage": True})
    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), USAGE, DONE))
        answer = await (await setup.connect()).post(CHAT, asked)
        assert answer.body == make_delta("a") + USAGE + DONE
        assert setup.engine.seen[0].body == json.dumps(asked).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, make_chat_body()),
        ("/v1/messages", make_chat_body(stream=True)),
        ("/v1/responses", make_chat_body(stream=True, input="x")),
    ],
)
async def test_does_not_request_usage_for_apis_that_always_report_it(path: str, body: dict[str, Any]) -> None:
    async with start_gateway() as setup:
        await (await setup.connect()).post(path, body)
        assert setup.engine.seen[0].json == body


async def test_an_http_1_0_client_gets_a_stream_without_chunks_that_ends_with_the_connection() -> None:
    """Even if it requests keep-alive, since only the closed connection shows the end of the stream."""
    for keep in ("", "connection: keep-alive\r\n"):
        async with start_gateway() as setup:
            setup.engine.answer(make_stream(make_delta("a"), make_delta("b"), DONE))
            client = await setup.connect()
            body = json.dumps(make_chat_body(stream=True))
            await client.send(f"POST {CHAT} HTTP/1.0\r\n{keep}content-length: {len(body)}\r\n\r\n{body}".encode())
            answer = await client.answer()
            assert "transfer-encoding" not in answer.headers
            assert answer.headers["connection"] == "close"
            assert answer.body == make_delta("a") + make_delta("b") + DONE


async def test_an_http_1_0_client_gets_pages_and_answers_that_close() -> None:
    async with start_gateway() as setup:
        body = json.dumps(make_chat_body())
        for asked in (
            f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n{body}",
            "GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
        ):
            client = await setup.connect()
            await client.send(asked.encode())
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.is_closed()


@pytest.mark.parametrize("asked", [make_chat_body(), make_chat_body(stream=True)])
async def test_closes_connection_after_answer_to_connection_close(asked: dict[str, Any]) -> None:
    async with start_gateway() as setup:
        if "stream" in asked:
            setup.engine.answer(make_stream(make_delta("a"), DONE))
        client = await setup.connect()
        answer = await client.post(CHAT, asked, connection="close")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.is_closed()


async def test_ignores_data_after_the_last_request() -> None:
    """A request with `Connection: close` is the last one, whatever follows it in the same segment."""
    async with start_gateway() as setup:
        for last in (
            request(CHAT, make_chat_body(model="other"), connection="close"),
            request("/health", connection="close"),
        ):
            client = await setup.connect()
            await client.send(last + request("/health") + b"garbage")
            assert (await client.answer()).status in (200, 404)
            assert await client.is_closed()
        assert not setup.engine.seen


async def test_openai_client_reads_streams_to_their_end() -> None:
    import openai

    async with start_gateway() as setup:
        setup.engine.answer(make_stream(make_delta("a"), make_delta("b"), USAGE, DONE))
        async with openai.AsyncOpenAI(base_url=f"{setup.gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert [piece.choices[0].delta.content async for piece in stream] == ["a", "b"]


# connections


async def test_connection_that_is_accepted_while_the_gateway_stops_is_closed() -> None:
    async with start_gateway() as setup:
        await setup.gateway.stop(0)
        late, wire = ClientConnection(setup.gateway), Wire()
        late.connection_made(wire)
        assert wire.closing
        late.connection_lost(None)


async def test_one_connection_can_mix_apis_and_pages() -> None:
    async with start_gateway() as setup:
        setup.engine.otherwise = (make_stream(make_delta("a"), DONE),)
        client = await setup.connect()
        for _ in range(3):
            assert (await client.get("/health")).json["status"] == "ok"
            assert (await client.post(CHAT, make_chat_body(stream=True))).body == make_delta("a") + DONE
            assert (await client.get("/nowhere")).status == 404
            assert (await client.post(CHAT, b"{")).status == 400
            assert (await client.get("/v1/models")).json["object"] == "list"
        assert len(setup.gateway.connections) == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(go_on, make_answer({"n": 1}))
        setup.engine.answer(make_stream(make_delta("a"), DONE))
        client = await setup.connect()
        await client.send(
            request(CHAT, make_chat_body())
            + request("/health")
            + request(CHAT, make_chat_body(stream=True))
            + request(CHAT, b"[]")
            + request("/v1/models/small")
            + request(CHAT, make_chat_body())
        )
        await setup.engine.request()
        go_on.set()
        assert (await client.answer()).json == {"n": 1}
        assert (await client.answer()).json["status"] == "ok"
        assert (await client.answer()).body == make_delta("a") + DONE
        assert (await client.answer()).status == 400
        assert (await client.answer()).json["id"] == "small"
        assert (await client.answer()).json == ANSWER


async def test_pipelined_requests_beyond_the_limit_wait_in_the_socket() -> None:
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(go_on, make_answer({"n": 0}))
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body()))
        await setup.engine.request()
        for _ in range(40):
            await client.send(request("/health"))
        go_on.set()
        assert (await client.answer()).json == {"n": 0}
        for _ in range(40):
            assert (await client.answer()).status == 200


async def test_answers_valid_requests_before_invalid_data() -> None:
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(go_on, make_answer({"n": 1}))
        setup.engine.answer(make_answer({"n": 2}))
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body()) + request(CHAT, make_chat_body()) + b"\x00garbage\r\n\r\n")
        await setup.engine.request()
        go_on.set()
        assert (await client.answer()).json == {"n": 1}
        assert (await client.answer()).json == {"n": 2}
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_http")
        assert await client.is_closed()


async def test_reads_requests_that_arrive_byte_by_byte() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        for byte in request("/health") + request(CHAT, make_chat_body()):
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).json["status"] == "ok"
        assert (await client.answer()).json == ANSWER


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    body = json.dumps(make_chat_body()).encode()
    async with start_gateway() as setup:
        client = await setup.connect()
        await client.send(request(CHAT, body, expect="100-continue")[: -len(body)])
        assert (await client.head()).status == 100
        await client.send(body)
        assert (await client.answer()).json == ANSWER


async def test_expect_100_continue_behind_another_request_waits_for_its_answer() -> None:
    """Otherwise it would be written into the middle of that answer."""
    body = json.dumps(make_chat_body()).encode()
    go_on = asyncio.Event()
    async with start_gateway() as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), go_on, make_chunk(DONE) + STREAM_END)
        client = await setup.connect()
        await client.send(
            request(CHAT, make_chat_body(stream=True)) + request(CHAT, body, expect="100-continue")[: -len(body)]
        )
        await client.head()
        assert await client.chunk() == make_delta("a")
        go_on.set()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
        assert (await client.head()).status == 100
        await client.send(body)
        assert (await client.answer()).json == ANSWER


async def test_expect_100_continue_is_not_granted_to_a_body_that_is_too_large() -> None:
    async with start_gateway(max_body_bytes=100) as setup:
        client = await setup.connect()
        await client.send(f"POST {CHAT} HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 101\r\n\r\n".encode())
        assert (await client.answer()).status == 413


async def test_head_request_gets_headers_without_body() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        whole = await client.get("/health")
        await client.send(request("/health", method="HEAD"))
        head = await client.head()
        assert (head.status, head.headers["content-length"]) == (200, whole.headers["content-length"])
        assert (await client.get("/health")).body == whole.body


async def test_ignores_upgrade_header() -> None:
    """`curl --http2` sends it; the request is handled like any other, and so is the next."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQ"}
    async with start_gateway() as setup:
        client = await setup.connect()
        await client.send(request("/health", **offer) + request("/health") + request(CHAT, make_chat_body(), **offer))  # type: ignore[arg-type]
        assert (await client.answer()).json["status"] == "ok"
        assert (await client.answer()).json["status"] == "ok"
        assert (await client.answer()).json == ANSWER
        assert (await client.get("/health")).status == 200
        assert not setup.engine.seen[0].header("upgrade") and not setup.engine.seen[0].header("http2-settings")


async def test_rejects_connect_requests() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        await client.send(b"CONNECT example.com:443 HTTP/1.1\r\nhost: localhost:443\r\n\r\nTLS?")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert await client.is_closed()


async def test_accepts_request_target_in_absolute_form() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        assert (await client.post(f"http://test{CHAT}?a=b", make_chat_body())).json == ANSWER
        assert setup.engine.seen[0].target == CHAT
        assert (await client.get("http://test/health")).status == 200


# headers


async def test_forwards_headers_except_keys_and_hop_by_hop_headers() -> None:
    async with start_gateway(api_key="the-key") as setup:
        client = await setup.connect()
        await client.post(
            CHAT,
            make_chat_body(),
            authorization="Bearer the-key",
            x_api_key="the-key",
            cookie="session=1",
            content_type="application/x-www-form-urlencoded",  # curl's default for -d
            user_agent="test/1",
            x_request_id="r-1",
            anthropic_version="2023-06-01",
            traceparent="00-1-2-01",
            connection="keep-alive, X-Hop",
            x_hop="1",
            keep_alive="timeout=5",
            te="trailers",
            upgrade="",
            proxy_authorization="Basic x",
            proxy_connection="keep-alive",
            accept_encoding="gzip",
            content_encoding="gzip",  # the gateway has read the body as it is
            expect="nothing",
        )
        headers = dict(setup.engine.seen[0].headers)
        assert headers == {
            "host": "127.0.0.1",
            "content-length": str(len(setup.engine.seen[0].body)),
            "content-type": "application/json",
            "user-agent": "test/1",
            "x-request-id": "r-1",
            "anthropic-version": "2023-06-01",
            "traceparent": "00-1-2-01",
        }


# errors of the engine


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        ("400 Bad Request", "application/json", b'{"error":{"code":400,"message":"too long","type":"x"}}', "too long"),
        ("422 Unprocessable", "application/json", b'{"detail":"field required"}', "field required"),
        ("500 Internal", "text/html", b"<h1>Oops</h1>", "<h1>Oops</h1>"),
        ("503 Unavailable", "text/plain", b"", "the engine answered with status 503"),
        ("429 Too Many", "application/json", b'{"message":"\xff"}', '{"message":"�"}'),
        ("400 Bad Request", "text/event-stream", b'{"error":"no"}', "no"),
    ],
)
async def test_converts_engine_errors_to_openai_errors(status: str, kind: str, body: bytes, message: str) -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(body, status, kind))
        client = await setup.connect()
        answer = await client.post(CHAT, make_chat_body(stream=True))
        assert (answer.status, answer.error["message"]) == (int(status[:3]), message)
        assert setup.count_outcome("failed" if status.startswith("5") else "refused") == 1
        assert (await client.post(CHAT, make_chat_body())).status == 200


# models


@pytest.mark.parametrize("name", ["small", "SMALL", "Small Model", "small.GGUF", "", None])
async def test_finds_model_by_any_name_in_any_case_and_without_name(name: str | None) -> None:
    async with start_gateway() as setup:
        assert (await (await setup.connect()).post(CHAT, make_chat_body(model=name))).status == 200


async def test_unknown_model_gets_404() -> None:
    async with start_gateway() as setup:
        answer = await (await setup.connect()).post(CHAT, make_chat_body(model="gpt-5"))
        assert answer.status == 404
        assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")
        assert "'gpt-5'" in answer.error["message"] and "small" in answer.error["message"]
        assert not setup.engine.seen


async def test_unknown_model_gets_503_while_models_are_being_registered() -> None:
    """A client that reconnects to a restarted endpoint must not conclude that its model was removed."""
    async with start_gateway() as setup:
        setup.gateway.starting = True
        answer = await (await setup.connect()).post(CHAT, make_chat_body(model="gpt-5"))
        assert (answer.status, answer.error["code"]) == (503, "engine_loading")
        assert answer.headers["retry-after"] == "1"
        assert (await (await setup.connect()).post(CHAT, make_chat_body())).status == 200


async def test_routes_requests_by_model_name() -> None:
    async with start_gateway(make_backend(1, "large", names=frozenset(["large"]), state="loading")) as setup:
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body(model="small"))).status == 200
        assert (await client.post(CHAT, make_chat_body(model="large"))).status == 503
        assert (await client.post(CHAT, make_chat_body())).status == 404
        assert [row["id"] for row in (await client.get("/v1/models")).json["data"]] == ["small", "large"]
        health = await client.get("/health")
        assert (health.status, health.json["status"]) == (503, "loading")


# pages


async def test_unknown_path_gets_openai_error() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        answer = await client.get("/v1/nothing")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert "/v1/nothing" in answer.error["message"]
        assert (await client.post("/v1/nothing", b"x" * 100)).error["code"] == "not_found"
        assert answer.headers["server"] == "bedplate"


@pytest.mark.parametrize(("method", "path", "allowed"), [("DELETE", "/health", "GET,HEAD"), ("GET", CHAT, "POST")])
async def test_wrong_method_gets_405_with_allow_header(method: str, path: str, allowed: str) -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        await client.send(request(path, method=method))
        answer = await client.answer()
        assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", allowed)


async def test_lists_models_with_engine_context_and_capabilities() -> None:
    known = Capabilities(tools="auto", n=2)
    async with start_gateway(context_tokens=4096, capabilities=known) as setup:
        client = await setup.connect()
        answer = await client.get("/v1/models")
        (row,) = answer.json["data"]
        assert isinstance(row.pop("created"), int)
        assert row == {
            "id": "small",
            "object": "model",
            "owned_by": "bedplate",
            "engine": "llama.cpp",
            "engine_version": "b1",
            "max_model_len": 4096,
            "capabilities": msgspec.to_builtins(known),
        }
        assert answer.headers["server"] == "bedplate"
        assert (await client.get("/models")).json == answer.json
        assert (await client.get("/v1/models/SMALL")).json["id"] == "small"
        assert (await client.get("/v1/models/Small%20Model")).json["id"] == "small"
        missing = await client.get("/v1/models/org/other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "stopped"])
async def test_health_reports_engine_state_and_progress(state: BackendState) -> None:
    async with start_gateway(retry_after_s=9, progress=0.5) as setup:
        client = await setup.connect()
        ready = await client.get("/health")
        assert (ready.status, ready.json["status"]) == (200, "ok")
        setup.backend.state = state
        answer = await client.get("/health")
        assert (answer.status, answer.headers["retry-after"]) == (503, "9")
        assert answer.json == {
            "status": state,
            "models": {"small": {"engine": "llama.cpp", "state": state, "progress": 0.5}},
        }


async def test_health_reports_the_phase_of_a_start() -> None:
    async with start_gateway(state="loading") as setup:
        client = await setup.connect()
        setup.backend.phases.begin(known=True)
        setup.backend.phases.enter("compile")
        state = (await client.get("/health")).json["models"]["small"]
        assert state["phase"] == "compile" and state["phase_s"] >= 0
        setup.backend.phases.end()
        assert "phase" not in (await client.get("/health")).json["models"]["small"]


async def test_metrics_count_requests_tokens_and_times() -> None:
    go_on = asyncio.Event()
    async with start_gateway(restarts=2) as setup:
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), go_on, make_chunk(USAGE + DONE) + STREAM_END)
        client, watcher = await setup.connect(), await setup.connect()
        await client.send(request(CHAT, make_chat_body(stream=True)))
        await client.head()
        assert setup.read_metric("requests_in_flight") == 1
        go_on.set()
        await read_to_end(client)
        setup.engine.answer(make_answer({"error": "no"}, "400 Bad Request"))
        await client.post(CHAT, make_chat_body())
        answer = await watcher.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.body.decode().splitlines()
        which = 'engine="llama.cpp",model="small"'
        for line in (
            f"bedplate_requests_in_flight{{{which}}} 0.0",
            'bedplate_requests_total{api="chat",engine="llama.cpp",model="small",outcome="ok"} 1.0',
            'bedplate_requests_total{api="chat",engine="llama.cpp",model="small",outcome="refused"} 1.0',
            f"bedplate_time_to_first_token_seconds_count{{{which}}} 1.0",
            f"bedplate_time_per_output_token_seconds_count{{{which}}} 1.0",
            f"bedplate_request_seconds_count{{{which}}} 2.0",
            'bedplate_tokens_total{engine="llama.cpp",kind="prompt",model="small"} 7.0',
            'bedplate_tokens_total{engine="llama.cpp",kind="completion",model="small"} 3.0',
            f"bedplate_engine_up{{{which}}} 1.0",
            f"bedplate_engine_restarts{{{which}}} 2.0",
        ):
            assert line in lines


async def read_to_end(client: Client) -> None:
    while await client.chunk():
        pass


async def test_welcome_page_shows_how_to_send_requests() -> None:
    async with start_gateway() as setup:
        answer = await (await setup.connect()).get("/")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        text = answer.body.decode()
        assert "small is served by llama.cpp b1 (ready)" in text
        assert f"curl {setup.gateway.url}/v1/chat/completions" in text
        assert "YOUR-KEY" not in text


async def test_welcome_page_escapes_model_names() -> None:
    hostile = "<script>alert(1)</script>\"'{url}"
    async with start_gateway(model=hostile, api_key="the-key", state="loading", progress=0.25) as setup:
        answer = await (await setup.connect()).get("/", accept="text/html,*/*", x_api_key="the-key")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page = answer.body.decode()
        assert "<script" not in page
        assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;{url}") == 2
        assert "loading 25%" in page and "YOUR-KEY" in page and "the-key" not in page


async def test_serves_page_with_long_header() -> None:
    """The size of a head is limited only where the connection is read."""
    async with start_gateway() as setup:
        client = await setup.connect()
        assert (await client.get("/health", x_long="a" * 30_000)).status == 200
        assert (await client.get("/health?" + "a" * 30_000)).status == 200
        many = {f"x_{i}": "1" for i in range(500)}
        assert (await client.get("/health", **many)).status == 200


async def test_page_that_raises_gets_openai_error(caplog: pytest.LogCaptureFixture) -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        setup.backend.progress = object()  # type: ignore[assignment]
        answer = await client.get("/health")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "cannot build the page /health" in caplog.text
        assert (await client.get("/v1/models")).status == 200


async def test_head_request_gets_content_length_of_the_page() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        page = await client.get("/v1/models")
        await client.send(request("/v1/models", method="HEAD") + request("/v1/models"))
        head = await client.head()
        assert (head.status, head.headers["content-length"]) == (200, str(len(page.body)))
        assert (await client.answer()).body == page.body


async def test_decodes_path_and_query_for_pages() -> None:
    visits: list[PageRequest] = []

    def page(visit: PageRequest) -> PageResponse:
        visits.append(visit)
        return PageResponse(b"x", "text/plain", {"X-Frame-Options": "DENY"})

    async with start_gateway() as setup:
        setup.gateway.handed["/a b"] = page
        client = await setup.connect()
        answer = await client.get("/a%20b?name=%C3%BC&name=second&empty=", accept="text/html")
        assert answer.headers["x-frame-options"] == "DENY"
        ((_, _, accept, query),) = visits
        assert (accept, query) == ("text/html", {"name": "ü", "empty": ""})
        assert (await client.get("/v1/models/" + "".join(f"%{ord(letter):02x}" for letter in "small"))).status == 200


async def test_client_that_pipelines_pages_does_not_block_others() -> None:
    seen: list[int] = []

    def page(visit: PageRequest) -> PageResponse:
        seen.append(int(visit.query["client"]))
        return PageResponse(b"x", "text/plain")

    async with start_gateway() as setup:
        setup.gateway.handed["/page"] = page
        greedy, other = await setup.connect(), await setup.connect()
        for client in (greedy, other):
            assert (await client.get("/health")).status == 200
        greedy.writer.write(request("/page?client=1") * 2000)
        other.writer.write(request("/page?client=2"))
        await other.answer()
        assert seen.index(2) < 100
        for _ in range(2000):
            await greedy.answer()


# the Date header


async def test_every_response_has_a_date_header() -> None:
    async with start_gateway(api_key="sk-own") as setup:
        key = {"authorization": "Bearer sk-own"}
        client = await setup.connect()
        setup.engine.answer(make_answer(ANSWER))
        setup.engine.answer(make_stream(make_delta("a"), DONE))
        answers = [
            await client.post(CHAT, make_chat_body(), **key),
            await client.post(CHAT, make_chat_body(stream=True), **key),
            await client.get("/health"),
            await client.post(CHAT, make_chat_body(model="nobody's"), **key),
            await client.post(CHAT, make_chat_body()),
        ]
        assert [answer.status for answer in answers] == [200, 200, 200, 404, 401]
        for answer in answers:
            at = parsedate_to_datetime(answer.headers["date"])
            assert abs((at - dt.datetime.now(dt.UTC)).total_seconds()) < 5


# histograms


@given(st.lists(st.floats(0, 5000), max_size=50))
def test_histogram_buckets_are_cumulative(times_s: list[float]) -> None:
    bounds = (0.01, 0.5, 2.5, 1800.0)
    found = DurationHistogram(bounds)
    for took_s in times_s:
        found.observe(took_s)
    expected = [(str(bound), sum(one <= bound for one in times_s)) for bound in bounds]
    assert found.count_buckets() == [*expected, ("+Inf", len(times_s))]
    assert found.sum_s == pytest.approx(sum(times_s))
