"""OpenTelemetry traces of requests: one span each, sent to a collector with OTLP over HTTP. Off by default.

A span has the shape of a request and its token counts, never its content. Its attributes follow the conventions for
generative AI.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec

from bedplate._version import __version__
from bedplate.run.gateway.elsewhere import RemoteAddress
from bedplate.run.gateway.exchange import GatewayExchange
from bedplate.run.gateway.heads import ClientRequest

if TYPE_CHECKING:
    import aiohttp

    from bedplate.run.gateway.exchange import RequestEnd
    from bedplate.values.traffic import ServedRequest

SEND_EVERY_S = 2.0
MOST_PENDING = 2048
MOST_SENT = 512
TIMEOUT_S = 10.0
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-|$)")
_OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "completions": "text_completion"}
"""The conventions' names of operations; others keep the name of their API."""
_SERVER_SPAN = 2
_ERROR = 2


class TraceContext(NamedTuple):
    """The span of one request, and the client's span that it belongs to."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: the client sent none."""
    sampled: bool

    def format_header(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}".encode()


def begin_span(parent: bytes) -> TraceContext:
    """A span below the one in a `traceparent` header, or the first one of a new trace."""
    span_id = f"{random.getrandbits(64) or 1:016x}"
    found = _PARENT.match(parent)
    if found is None or found[1] == b"ff" or not int(found[2], 16) or not int(found[3], 16):
        trace_id = f"{random.getrandbits(128) or 1:032x}"
        return TraceContext(trace_id, span_id, "", True)
    return TraceContext(found[2].decode(), span_id, found[3].decode(), bool(int(found[4], 16) & 1))


class TracedExchange(GatewayExchange):
    """A request whose span is exported at its end, and whose engine gets the span as its parent."""

    _trace: TraceContext | None = None

    def start(self) -> None:
        head = self._request.head
        parent = next((value for name, value in head.headers if name == b"traceparent"), b"")
        self._trace = trace = begin_span(parent)
        headers = [one for one in head.headers if one[0] != b"traceparent"]
        headers.append((b"traceparent", trace.format_header()))
        head = msgspec.structs.replace(head, headers=headers, _engine_head=None)
        self._request = ClientRequest(head, self._request.body, self._request.member)
        GatewayExchange.start(self)

    def _keep_record(self, end: RequestEnd) -> None:
        exporter = self._gateway.spans
        if not self._uncounted and exporter is not None and self._trace is not None and self._trace.sampled:
            exporter.add(build_span(self._build_record(end), self._trace))
        GatewayExchange._keep_record(self, end)


def build_span(row: ServedRequest, trace: TraceContext) -> dict[str, Any]:
    """The span of a request in OTLP's JSON encoding."""
    operation = _OPERATIONS.get(row.api, row.api)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": row.engine,
        "gen_ai.request.model": row.model,
        "gen_ai.response.model": row.model if row.outcome == "ok" else None,
        "gen_ai.request.max_tokens": row.max_tokens,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.completion_tokens,
        "gen_ai.response.finish_reasons": [row.finish] if row.finish is not None else None,
        "http.response.status_code": row.status,
        "error.type": (row.reason or str(row.status)) if row.outcome != "ok" else None,
        "bedplate.tenant": row.tenant,
        "bedplate.outcome": row.outcome,
        "bedplate.queue_ms": row.wait_ms,
        "bedplate.stream": row.stream,
    }
    begin_ns = round(row.at_s * 1e9)
    span: dict[str, Any] = {
        "traceId": trace.trace_id,
        "spanId": trace.span_id,
        "name": f"{operation} {row.model}",
        "kind": _SERVER_SPAN,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(begin_ns + round(row.duration_ms * 1e6)),
        "attributes": [
            {"key": key, "value": _encode_value(value)} for key, value in attributes.items() if value is not None
        ],
    }
    if trace.parent_id:
        span["parentSpanId"] = trace.parent_id
    if row.ttft_ms is not None:
        at_ns = begin_ns + round(row.ttft_ms * 1e6)
        span["events"] = [{"name": "first token", "timeUnixNano": str(at_ns)}]
    if row.outcome == "failed":
        span["status"] = {"code": _ERROR}
    return span


def _encode_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_encode_value(one) for one in value]}}
    return {"stringValue": str(value)}


def read_headers(text: str) -> dict[str, str]:
    """`name=value,…` with percent-encoded values, as in OTEL_EXPORTER_OTLP_HEADERS."""
    pairs = (piece.partition("=") for piece in text.split(",") if "=" in piece)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


class SpanExporter:
    """Sends spans to a collector in the background. A collector that fails loses spans, never requests."""

    def __init__(self, url: str, service: str, note: Callable[[str], None] = lambda text: None) -> None:
        """`OTEL_EXPORTER_OTLP_HEADERS` has the headers of each request, such as a key."""
        address = RemoteAddress.from_url(url, "--otlp-endpoint")
        base = address.url
        self.url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self.sent = self.lost = 0
        self._headers = read_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        self._service = service
        self._note = note
        self._pending: deque[dict[str, Any]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._failing = False

    def add(self, span: dict[str, Any]) -> None:
        if len(self._pending) >= MOST_PENDING:
            self.lost += 1
        else:
            self._pending.append(span)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Sends what is left. A request that is on its way is not given up."""
        if self._task is not None:
            self._stopping.set()
            await self._task

    async def _run(self) -> None:
        async with self._open_session() as session:
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), SEND_EVERY_S)
                while self._pending:
                    await self._send(session)
                    if self._failing:
                        break
        self.lost += len(self._pending)

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=False)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        import aiohttp

        batch = [self._pending.popleft() for _ in range(min(MOST_SENT, len(self._pending)))]
        failure = None
        try:
            body = msgspec.json.encode(self.encode_request(batch))
            headers = {"content-type": "application/json"}
            async with session.post(self.url, data=body, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    failure = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = type(error).__name__
        if failure is None:
            self.sent += len(batch)
            self._failing = False
            return
        self.lost += len(batch)
        if not self._failing:
            self._note(f"cannot send traces to {self.url}: {failure}; serving continues without them")
        self._failing = True

    def encode_request(self, spans: list[dict[str, Any]]) -> dict[str, Any]:
        resource = {"service.name": "bedplate", "service.version": __version__, "service.instance.id": self._service}
        attributes = [{"key": key, "value": _encode_value(value)} for key, value in resource.items()]
        scope = {"name": "bedplate.gateway", "version": __version__}
        return {
            "resourceSpans": [
                {"resource": {"attributes": attributes}, "scopeSpans": [{"scope": scope, "spans": spans}]}
            ]
        }
