"""What the gateway counts, for Prometheus. Touched once a request, never once a chunk."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bedplate.run.gateway.backend import Backend
from bedplate.run.gateway.sse import Usage

_LABELS = ("model", "engine")
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5, 10, 20, 60, 120)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Meters:
    """All series of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "bedplate_requests", "Requests that ended", (*_LABELS, "api", "outcome"), registry=self.registry
        )
        self.in_flight = Gauge(
            "bedplate_requests_in_flight", "Requests that are being answered", _LABELS, registry=self.registry
        )
        self.ttft = Histogram(
            "bedplate_time_to_first_token_seconds",
            "From the request's last byte to the first event of its stream",
            _LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.token_time = Histogram(
            "bedplate_time_per_output_token_seconds",
            "Time between the first and the last event, for each token after the first",
            _LABELS,
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.duration = Histogram(
            "bedplate_request_seconds",
            "From the request's last byte to the end of its answer",
            _LABELS,
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.tokens = Counter(
            "bedplate_tokens", "Tokens as the engine counted them", (*_LABELS, "kind"), registry=self.registry
        )
        self.engine_up = Gauge("bedplate_engine_up", "1 while the engine answers", _LABELS, registry=self.registry)
        self.engine_restarts = Gauge(
            "bedplate_engine_restarts", "Times that the engine was started again", _LABELS, registry=self.registry
        )

    def text(self, backends: list[Backend]) -> bytes:
        for backend in backends:
            self.engine_up.labels(backend.model, backend.engine).set(backend.state == "ready")
            self.engine_restarts.labels(backend.model, backend.engine).set(backend.restarts)
        return generate_latest(self.registry)


class Meter:
    """The series of one model and engine, looked up once."""

    def __init__(self, meters: Meters, backend: Backend) -> None:
        labels = (backend.model, backend.engine)
        self._requests = meters.requests
        self._labels = labels
        self.in_flight = meters.in_flight.labels(*labels)
        self._ttft = meters.ttft.labels(*labels)
        self._token_time = meters.token_time.labels(*labels)
        self._duration = meters.duration.labels(*labels)
        self._prompt = meters.tokens.labels(*labels, "prompt")
        self._completion = meters.tokens.labels(*labels, "completion")
        self._ended: dict[tuple[str, str], Counter] = {}

    def record(self, api: str, outcome: str, started: float, first: float | None, ended: float, usage: Usage) -> None:
        ended_counter = self._ended.get((api, outcome))
        if ended_counter is None:
            ended_counter = self._ended[api, outcome] = self._requests.labels(*self._labels, api, outcome)
        ended_counter.inc()
        self._duration.observe(ended - started)
        if first is not None:
            self._ttft.observe(first - started)
            if usage.completion_tokens is not None and usage.completion_tokens > 1:
                self._token_time.observe((ended - first) / (usage.completion_tokens - 1))
        if usage.prompt_tokens is not None:
            self._prompt.inc(usage.prompt_tokens)
        if usage.completion_tokens is not None:
            self._completion.inc(usage.completion_tokens)
