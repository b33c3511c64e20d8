"""The gateway's Prometheus metrics. Updated once per request, never per chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from bedplate.run.gateway.sse import TokenUsage

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.routes import Route

_LABELS = ("model", "engine")
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5, 10, 20, 60, 120)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class GatewayMetrics:
    """All metrics of one gateway.

    They are plain numbers, which cost a tenth of the client library's counters, and are collected when scraped.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._meters: dict[tuple[str, str], EngineMeter] = {}
        self._tenants: dict[str, TenantMeter] = {}
        self._routes: list[Route] = []
        self._unlogged = 0
        self._reasons: dict[tuple[str, str], int] = defaultdict(int)
        self._restarts: dict[tuple[str, str], int] = defaultdict(int)
        self._restarts_seen: WeakKeyDictionary[GatewayBackend, int] = WeakKeyDictionary()
        self.registry.register(self)

    def get_meter(self, model: str, engine: str) -> EngineMeter:
        """The meter of a model and engine; their replicas share it."""
        meter = self._meters.get((model, engine))
        if meter is None:
            meter = self._meters[model, engine] = EngineMeter()
        return meter

    def get_tenant_meter(self, name: str) -> TenantMeter:
        meter = self._tenants.get(name)
        if meter is None:
            meter = self._tenants[name] = TenantMeter()
        return meter

    def count_reason(self, reason: str, model: str = "", tenant: str | None = None) -> None:
        """Counts a request that was refused or failed; without a model, before its model was known."""
        self._reasons[model, reason] += 1
        if tenant is not None:
            self.get_tenant_meter(tenant).reasons[reason] += 1

    def render_all(self, routes: list[Route], unlogged: int = 0) -> bytes:
        self._routes, self._unlogged = routes, unlogged
        return generate_latest(self.registry)

    def render_tenant(self, tenant: str) -> bytes:
        """The metrics that one tenant may see: its own, and nothing that reveals those of others."""
        own = CollectorRegistry()
        own.register(_FixedCollector(list(self._collect_tenants({tenant: self.get_tenant_meter(tenant)}))))
        return generate_latest(own)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        requests = CounterMetricFamily("bedplate_requests", "Requests that ended", labels=(*_LABELS, "api", "outcome"))
        in_flight = GaugeMetricFamily("bedplate_requests_in_flight", "Requests that are being answered", labels=_LABELS)
        tokens = CounterMetricFamily("bedplate_tokens", "Tokens as the engine counted them", labels=(*_LABELS, "kind"))
        for labels, meter in self._meters.items():
            in_flight.add_metric(labels, meter.in_flight)
            tokens.add_metric((*labels, "prompt"), meter.prompt_tokens)
            tokens.add_metric((*labels, "completion"), meter.completion_tokens)
            for (api, outcome), count in meter.ended.items():
                requests.add_metric((*labels, api, outcome), count)
        unanswered = CounterMetricFamily(
            "bedplate_requests_unanswered",
            "Requests that were refused or failed, by reason",
            labels=("model", "reason"),
        )
        for reason_labels, count in self._reasons.items():
            unanswered.add_metric(reason_labels, count)
        yield from (requests, in_flight, tokens, unanswered)
        yield from self._collect_times()
        yield from self._collect_tenants(self._tenants)
        yield from self._collect_routes()

    def _collect_times(self) -> Iterator[Metric]:
        ttft = HistogramMetricFamily(
            "bedplate_time_to_first_token_seconds",
            "From the request's last byte to the first event of its stream",
            labels=_LABELS,
        )
        token_time = HistogramMetricFamily(
            "bedplate_time_per_output_token_seconds",
            "Time between the first and the last event, for each token after the first",
            labels=_LABELS,
        )
        duration = HistogramMetricFamily(
            "bedplate_request_seconds", "From the request's last byte to the end of its answer", labels=_LABELS
        )
        for labels, meter in self._meters.items():
            for family, times in ((ttft, meter.ttft), (token_time, meter.token_time), (duration, meter.duration)):
                family.add_metric(labels, times.count_buckets(), times.sum_s)
        yield from (ttft, token_time, duration)

    @staticmethod
    def _collect_tenants(tenants: Mapping[str, TenantMeter]) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "bedplate_tenant_requests", "Requests that ended, by tenant", labels=("tenant", "outcome")
        )
        tokens = CounterMetricFamily(
            "bedplate_tenant_tokens", "Tokens as the engine counted them, by tenant", labels=("tenant", "kind")
        )
        unanswered = CounterMetricFamily(
            "bedplate_tenant_requests_unanswered",
            "Requests that were refused or failed, by tenant and reason",
            labels=("tenant", "reason"),
        )
        for name, meter in tenants.items():
            for reason, count in meter.reasons.items():
                unanswered.add_metric((name, reason), count)
            tokens.add_metric((name, "prompt"), meter.prompt_tokens)
            tokens.add_metric((name, "completion"), meter.completion_tokens)
            for outcome, count in meter.ended.items():
                requests.add_metric((name, outcome), count)
        yield from (requests, tokens, unanswered)

    def _collect_routes(self) -> Iterator[Metric]:
        """Replicas of one engine are summed."""
        up = GaugeMetricFamily("bedplate_engine_up", "Number of engines that are ready", labels=_LABELS)
        restarts = GaugeMetricFamily("bedplate_engine_restarts", "Restarts of the running engines", labels=_LABELS)
        restarted = CounterMetricFamily("bedplate_engine_restarted", "Number of engine restarts", labels=_LABELS)
        waiting = GaugeMetricFamily("bedplate_requests_waiting", "Requests that wait for an engine", labels=("model",))
        for route in self._routes:
            waiting.add_metric((route.model,), len(route.waiting))
            by_engine: dict[str, list[GatewayBackend]] = {}
            for backend in route.backends:
                by_engine.setdefault(backend.engine, []).append(backend)
            for engine, backends in by_engine.items():
                up.add_metric((route.model, engine), sum(one.state == "ready" for one in backends))
                restarts.add_metric((route.model, engine), sum(map(_count_all_restarts, backends)))
                self._count_restarts((route.model, engine), backends)
        for labels, count in self._restarts.items():
            restarted.add_metric(labels, count)
        unlogged = GaugeMetricFamily(
            "bedplate_requests_unlogged", "Requests that could not be written to the store", value=self._unlogged
        )
        lost = CounterMetricFamily(
            "bedplate_requests_not_recorded", "Requests that could not be written to the store", value=self._unlogged
        )
        yield from (up, restarts, restarted, waiting, unlogged, lost)

    def _count_restarts(self, labels: tuple[str, str], backends: list[GatewayBackend]) -> None:
        """Adds the restarts since the last scrape. Unlike their sum, this never falls when an engine is removed."""
        for one in backends:
            before, now = self._restarts_seen.get(one, 0), _count_all_restarts(one)
            self._restarts[labels] += max(0, now - before)
            self._restarts_seen[one] = now


def _count_all_restarts(backend: GatewayBackend) -> int:
    return backend.restarts + backend.restarts_behind


class _FixedCollector:
    """A collector of given metrics."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class TenantMeter:
    """The metrics of one tenant."""

    __slots__ = ("completion_tokens", "ended", "prompt_tokens", "reasons")

    def __init__(self) -> None:
        self.ended: dict[str, int] = defaultdict(int)
        self.reasons: dict[str, int] = defaultdict(int)
        self.prompt_tokens = self.completion_tokens = 0

    def record(self, outcome: str, usage: TokenUsage | None = None) -> None:
        self.ended[outcome] += 1
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens or 0
            self.completion_tokens += usage.completion_tokens or 0

    def add_tokens(self, usage: TokenUsage) -> None:
        self.prompt_tokens += usage.prompt_tokens or 0
        self.completion_tokens += usage.completion_tokens or 0


class DurationHistogram:
    """A Prometheus histogram of durations."""

    __slots__ = ("_bounds_s", "_counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, took_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, took_s)] += 1
        self.sum_s += took_s

    def count_buckets(self) -> list[tuple[str, float]]:
        bounds = (*map(floatToGoString, self._bounds_s), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class EngineMeter:
    """The metrics of one model and engine."""

    __slots__ = ("completion_tokens", "duration", "ended", "in_flight", "prompt_tokens", "token_time", "ttft")

    def __init__(self) -> None:
        self.in_flight = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.ended: dict[tuple[str, str], int] = defaultdict(int)
        self.ttft = DurationHistogram(_TTFT_BUCKETS_S)
        self.token_time = DurationHistogram(_TOKEN_BUCKETS_S)
        self.duration = DurationHistogram(_REQUEST_BUCKETS_S)

    def record_rejection(self, api: str, outcome: str) -> None:
        self.ended[api, outcome] += 1

    def record(
        self,
        api: str,
        outcome: str,
        started: float,
        first: float | None,
        ended: float,
        usage: TokenUsage,
        sequences: int = 1,
    ) -> None:
        self.ended[api, outcome] += 1
        self.duration.observe(ended - started)
        if first is not None:
            self.ttft.observe(first - started)
            if usage.completion_tokens is not None and usage.completion_tokens > sequences:
                self.token_time.observe((ended - first) / (usage.completion_tokens / sequences - 1))
        self.prompt_tokens += usage.prompt_tokens or 0
        self.completion_tokens += usage.completion_tokens or 0

    def add_tokens(self, usage: TokenUsage) -> None:
        self.prompt_tokens += usage.prompt_tokens or 0
        self.completion_tokens += usage.completion_tokens or 0
