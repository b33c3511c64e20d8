"""OpenTelemetry traces: spans of requests, passed-on trace context, and a collector that fails."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bedplate.run.gateway import tracing
from bedplate.run.gateway.tracing import MOST_PENDING, SpanExporter, begin_span, read_headers

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    USAGE,
    End,
    Setup,
    make_answer,
    make_chat_body,
    make_delta,
    make_stream,
    start_gateway,
    wait_until,
    wait_within,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the prompt is secret"


class Collector:
    """Receives traces as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        self.bodies.append(await request.json())
        await self.gate.wait()
        return web.json_response({"partialSuccess": {}})


@contextlib.asynccontextmanager
async def start(collector: Collector) -> AsyncIterator[tuple[Setup, SpanExporter]]:
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    async with TestServer(app) as server, start_gateway() as setup:
        exporter = SpanExporter(f"http://127.0.0.1:{server.port}", "chat")
        setup.gateway.trace(exporter)
        yield setup, exporter
        await setup.gateway.stop(0)


def list_spans(collector: Collector) -> list[dict[str, Any]]:
    return [span for body in collector.bodies for span in list_spans_of(body)]


def list_spans_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    (resource,) = body["resourceSpans"]
    assert read_attributes(resource["resource"])["service.name"] == "bedplate"
    (scope,) = resource["scopeSpans"]
    spans: list[dict[str, Any]] = scope["spans"]
    return spans


def read_attributes(span: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for one in span["attributes"]:
        ((kind, value),) = one["value"].items()
        found[one["key"]] = int(value) if kind == "intValue" else value
    return found


async def test_stream_has_a_span_of_the_clients_trace_and_the_engine_continues_it() -> None:
    collector = Collector()
    async with start(collector) as (setup, _):
        setup.engine.answer(make_stream(make_delta("one"), make_delta("two"), USAGE, DONE))
        body = make_chat_body(stream=True, max_tokens=9, messages=[{"role": "user", "content": SECRET}])
        answer = await (await setup.connect()).post(CHAT, body, traceparent=PARENT, tracestate="a=1")
        assert answer.status == 200
    (span,) = list_spans(collector)
    assert span["traceId"] == PARENT[3:35] and span["parentSpanId"] == PARENT[36:52] and span["kind"] == 2
    assert span["name"] == "chat small" and "status" not in span
    found = read_attributes(span)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "small"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (7, 3)
    assert found["gen_ai.request.max_tokens"] == 9 and found["gen_ai.provider.name"] == "llama.cpp"
    begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    (event,) = span["events"]
    assert event["name"] == "first token" and begin <= int(event["timeUnixNano"]) <= end
    (seen,) = setup.engine.seen
    assert seen.header("traceparent") == [f"00-{span['traceId']}-{span['spanId']}-01"]
    assert seen.header("tracestate") == ["a=1"]
    assert SECRET not in json.dumps(list_spans(collector))


async def test_request_without_context_begins_a_trace_and_a_failure_is_an_error() -> None:
    collector = Collector()
    async with start(collector) as (setup, _):
        client = await setup.connect()
        setup.engine.answer(End.RESET)
        assert (await client.post(CHAT, make_chat_body())).status == 502
        assert (await client.post(CHAT, make_chat_body())).status == 200
    failed, ok = list_spans(collector)
    assert failed["status"] == {"code": 2} and read_attributes(failed)["error.type"] == "engine_stopped"
    assert "status" not in ok and "parentSpanId" not in ok and failed["traceId"] != ok["traceId"]


async def test_requests_to_the_collector_have_the_form_of_the_protocol() -> None:
    """Read with the protocol's own definitions, which have no unknown fields and no values of other types."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    collector = Collector()
    async with start(collector) as (setup, _):
        client = await setup.connect()
        end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
        setup.engine.answer(make_stream(make_delta("one"), make_delta("two"), end, USAGE, DONE))
        await client.post(CHAT, make_chat_body(stream=True, max_tokens=9), traceparent=PARENT)
        setup.engine.otherwise = (End.RESET,)
        assert (await client.post(CHAT, make_chat_body())).status == 502
    spans = []
    for body in collector.bodies:
        # In the JSON of OTLP ids are hexadecimal; in that of protocol buffers bytes are base64.
        for span in list_spans_of(body):
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in span:
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        read = json_format.ParseDict(body, ExportTraceServiceRequest())
        spans += [span for resource in read.resource_spans for scope in resource.scope_spans for span in scope.spans]
    streamed, failed = spans
    assert (len(streamed.trace_id), len(streamed.span_id)) == (16, 8)
    assert streamed.trace_id.hex() == PARENT[3:35] and streamed.parent_span_id.hex() == PARENT[36:52]
    assert streamed.kind == Span.SPAN_KIND_SERVER and [event.name for event in streamed.events] == ["first token"]
    assert 0 < streamed.start_time_unix_nano < streamed.end_time_unix_nano
    (reasons,) = [one.value for one in streamed.attributes if one.key == "gen_ai.response.finish_reasons"]
    assert [one.string_value for one in reasons.array_value.values] == ["stop"]
    assert failed.status.code == Status.STATUS_CODE_ERROR and not failed.parent_span_id


async def test_client_that_does_not_sample_is_not_traced() -> None:
    collector = Collector()
    async with start(collector) as (setup, _):
        await (await setup.connect()).post(CHAT, make_chat_body(), traceparent=PARENT[:-1] + "0")
        assert setup.engine.seen[0].header("traceparent")[0].endswith("-00")
    assert not list_spans(collector)


async def test_stop_waits_for_the_spans_that_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.01)
    collector = Collector()
    collector.gate.clear()
    async with start(collector) as (setup, exporter):
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body())).status == 200
        await wait_until(lambda: len(collector.bodies) == 1, "the first spans to be sent")
        assert (await client.post(CHAT, make_chat_body())).status == 200
        stopping = asyncio.ensure_future(setup.gateway.stop(0))
        await wait_until(lambda: not setup.gateway.connections, "the gateway to stop")
        collector.gate.set()
        await wait_within(stopping)
        assert (exporter.sent, exporter.lost) == (2, 0) and len(list_spans(collector)) == 2


async def test_collector_that_fails_costs_spans_and_no_answers() -> None:
    notes: list[str] = []
    async with start_gateway() as setup:
        exporter = SpanExporter("http://127.0.0.1:9/", "chat", notes.append)
        setup.gateway.trace(exporter)
        client = await setup.connect()
        for _ in range(3):
            assert (await client.post(CHAT, make_chat_body())).status == 200
    assert exporter.lost == 3 and exporter.sent == 0
    assert len(notes) == 1 and "serving continues" in notes[0]


async def test_spans_that_wait_are_limited() -> None:
    exporter = SpanExporter("http://127.0.0.1:9", "chat")
    for _ in range(MOST_PENDING + 2):
        exporter.add({})
    assert exporter.lost == 2


async def test_without_an_option_nothing_is_traced() -> None:
    async with start_gateway() as setup:
        setup.engine.answer(make_answer(ANSWER))
        await (await setup.connect()).post(CHAT, make_chat_body(), traceparent=PARENT)
        assert setup.engine.seen[0].header("traceparent") == [PARENT] and setup.gateway.spans is None
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"00-abc",
        b"ff-" + PARENT[3:].encode(),
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32).encode(),
    ],
)
def test_invalid_context_begins_a_trace(header: bytes) -> None:
    found = begin_span(header)
    assert not found.parent_id and int(found.trace_id, 16) and int(found.span_id, 16) and found.sampled


def test_reads_headers_of_the_environment() -> None:
    assert read_headers("api-key=a%20b, x=1,broken") == {"api-key": "a b", "x": "1"}
