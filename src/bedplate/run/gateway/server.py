"""The gateway: owns the public port, its client connections and the routes to the engines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from time import monotonic, time
from typing import TYPE_CHECKING

from bedplate.errors import ExternalFailure, UsageError
from bedplate.run.gateway.choosing import ChoosingRoute
from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.counting import TokenCounting
from bedplate.run.gateway.descriptors import DescriptorBudget
from bedplate.run.gateway.engine_metrics import EngineMetricsPage
from bedplate.run.gateway.exchange import GatewayExchange
from bedplate.run.gateway.origins import OriginPolicy
from bedplate.run.gateway.pages import Action, Page
from bedplate.run.gateway.routes import BackendLink, Route
from bedplate.run.gateway.tenants import Tenants
from bedplate.run.gateway.translate.front import answer_translated
from bedplate.run.gateway.watch import GatewayMetrics
from bedplate.values.traffic import Outcome, ServedRequest

if TYPE_CHECKING:
    from bedplate.run.gateway import sse
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.recorder import RequestContent, RequestRecorder
    from bedplate.run.gateway.tenants import KeyDigest, TenantState
    from bedplate.run.gateway.tracing import SpanExporter
    from bedplate.values.intent import Routing
    from bedplate.values.tenant import Tenant

DEFAULT_MAX_BODY_BYTES = 32 * 1000 * 1000
_SWEEP_S = 1.0
_EVICTED_SHARE = 16
"""When descriptors are scarce, one in so many idle connections is closed at once: ordering them has a cost."""
_FLUSH_S = 0.5
"""How long the gateway waits for clients to read their last bytes when it stops."""
_COUNT_S = 2.0
"""How long it then waits for the engines to count the tokens of aborted requests."""


class Gateway:
    """One OpenAI-compatible endpoint for a list of backends."""

    def __init__(
        self,
        backends: list[GatewayBackend],
        *,
        api_key: str | None = None,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        max_wait_s: float | None = None,
        keeper: RequestRecorder | None = None,
        origins: OriginPolicy | None = None,
    ) -> None:
        """Requests whose expected wait is longer than `max_wait_s` are rejected.

        `keeper` loads the tenants from the store and writes the shape of each request to it. `origins` are the web
        pages that may use the endpoint, and the names of the endpoint.
        """
        self._limits = keeper.make_shared_limits() if keeper is not None else None
        self.tenants = Tenants(api_key, keeper.salt if keeper is not None else None, self._limits)
        self.keeper = keeper
        self.origins = origins or OriginPolicy()
        self.descriptors = DescriptorBudget(None, 0)
        if keeper is not None:
            self._replace_tenants(keeper.tenants, keeper.keys)
        self.max_body_bytes = max_body_bytes
        self.max_wait_s = max_wait_s
        self.seen: Callable[[ServedRequest, RequestContent], None] | None = None
        """Called after each accepted request, with its content: a shadow run sends the same to another engine."""
        self.wanted: Callable[[str], None] | None = None
        """Called when a request arrives for a registered model that has no engine, so that one is started."""
        self.starting = False
        """Whether models are still being registered; requests for unknown models then get 503 instead of 404."""
        self.exchange_type: type[GatewayExchange] = GatewayExchange
        self.spans: SpanExporter | None = None
        """Exports a span for each request; `None`: there are no traces."""
        self.connections: set[ClientConnection] = set()
        self.arriving_bytes = 0
        """Bodies of requests that are incomplete, or wait behind another request of the same connection."""
        self._left = asyncio.Event()
        self.meters = GatewayMetrics()
        self.counting = TokenCounting()
        self.engine_metrics = EngineMetricsPage()
        self.answer_translated = answer_translated
        """Answers requests of other APIs than OpenAI's."""
        self.url = ""
        self.date = _format_date_header()
        """The Date header, at most two seconds old."""
        self.handed: dict[str, Page] = {}
        """Registered pages by path; they take precedence over the gateway's own."""
        self.actions: dict[str, Action] = {}
        """What a POST to these paths does."""
        self.routing: Routing | None = None
        """How requests are divided where engines and endpoints elsewhere serve one model; set before they are added."""
        self._routes: dict[str, Route] = {}
        self._by_name: dict[str, Route] = {}
        self._allowed: dict[str, frozenset[str] | None] = {}
        self._leaving: set[asyncio.Task[bool]] = set()
        for backend in backends:
            self.add(backend)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopping = False

    def trace(self, spans: SpanExporter) -> None:
        """Exports a span for each request from now on."""
        from bedplate.run.gateway.tracing import TracedExchange

        self.spans, self.exchange_type = spans, TracedExchange
        spans.start()

    async def start(self, host: str, port: int) -> int:
        """Binds the port (0: any free one) and answers from then on; returns the port."""
        if not 0 <= port <= 65535:  # uvloop never returns from binding such a port
            raise explain_bind_failure(OSError(errno.EINVAL, "a port is a number from 0 to 65535"), host, port)
        loop = asyncio.get_running_loop()
        self.origins.bind(host)
        self.descriptors = DescriptorBudget.measure()
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=self.descriptors.backlog
            )
        except (OSError, UnicodeError) as error:
            failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise explain_bind_failure(failure, host, port) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{bound}"
        self._sweeper = loop.create_task(self._sweep())
        if self.keeper is not None:
            self.keeper.start(self._update_tenants)
        if self._limits is not None:
            self._limits.start()
        return bound

    async def stop(self, grace_s: float = 5.0) -> None:
        """Accepts no new connections, lets running answers finish for `grace_s`, and ends the others with an error."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        busy = [c for c in list(self.connections) if not c.close_when_idle()]
        await self._wait_until_gone(busy, grace_s)
        for connection in list(self.connections):
            connection.stop("bedplate is shutting down")
        await self._wait_until_gone(list(self.connections), _FLUSH_S)
        for connection in list(self.connections):
            connection.abort()
        await self._wait_until_gone(list(self.connections), _FLUSH_S)
        await self.counting.close(_COUNT_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._leaving:
            task.cancel()
        for route in self._routes.values():
            for link in route.links:
                link.pool.close()
        if self.spans is not None:
            await self.spans.stop()
        if self._limits is not None:
            await self._limits.stop()
        if self.keeper is not None:
            await self.keeper.stop()

    # models and their backends

    @property
    def backends(self) -> list[GatewayBackend]:
        """All backends, grouped by model."""
        return [backend for route in self._routes.values() for backend in route.backends]

    @property
    def keeps_content(self) -> bool:
        """Whether requests and answers are stored, or observed by a shadow run."""
        return self.seen is not None or (self.keeper is not None and self.keeper.content is not None)

    @property
    def needs_key(self) -> bool:
        return not self.tenants.is_open

    @property
    def routes(self) -> list[Route]:
        return list(self._routes.values())

    @property
    def models(self) -> list[str]:
        """The models that requests may name, whether an engine runs for them or not."""
        return list(self._routes)

    def add(self, backend: GatewayBackend) -> None:
        """Adds a backend, which gets its share of its model's requests as soon as it is ready."""
        link = BackendLink(backend, self.meters)
        route = self._routes.get(backend.model)
        if route is None:
            route = self._add_route(backend.model)
        route.add(link)
        self._index_routes()

    def remove(self, backend: GatewayBackend, *, within_s: float = 300.0, cut: bool = False) -> Awaitable[bool]:
        """Sends no new requests to the backend and removes it after its last one; returns False after `within_s`.

        A backend that has not finished in time stays, without new requests. Call this again to continue to wait, or
        with `cut` to end its remaining requests with an error.
        """
        link = self._find_link(backend)
        link.removed = True
        backend.share = 0.0
        task = asyncio.get_running_loop().create_task(self._drain(link, within_s, cut=cut))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    def register_models(self, *models: str, aliases: Iterable[str] = ()) -> None:
        """Registers models that are loaded on demand: a request for one calls `wanted` and waits for the engine.

        `aliases` are further names that requests may use for them.
        """
        names = frozenset(name.lower() for name in aliases)
        for model in models:
            route = self._routes.get(model) or self._add_route(model)
            route.on_demand = True
            route.aliases |= names
            route.names |= names
        self._index_routes()

    def hold_while_unreachable(self, model: str, wait_s: float) -> None:
        """Requests for the model wait, each for at most `wait_s`, while no endpoint of it can be reached."""
        route = self._get_route(model)
        route.on_demand = True
        route.held_s = wait_s

    def allow(self, model: str, tenants: Iterable[str]) -> None:
        """Restricts the model to these tenants and admins; with no tenants given, everybody may use it."""
        self._allowed[model] = frozenset(tenants) or None
        if (route := self._routes.get(model)) is not None:
            route.allowed = self._allowed[model]

    def unregister_model(self, model: str) -> None:
        """Ends loading on demand; requests that wait for the model get an error, unless it has a backend."""
        route = self._routes.get(model)
        if route is not None:
            route.on_demand = False
            self._remove_route_if_unused(route)

    def hold(self, model: str, *, most: int = 256, wait_s: float = 300.0) -> None:
        """Queues new requests for the model until `release`: at most `most`, each for at most `wait_s`.

        Running requests continue. Further requests get 503 with Retry-After before they are accepted.
        """
        self._get_route(model).hold(most, wait_s)

    def release(self, model: str) -> None:
        """Ends a hold: queued requests go to the engines first, then new ones."""
        self._get_route(model).release()

    def give_up(self, model: str, message: str, *, code: str = "not_running", retry_after_s: int = 5) -> None:
        """Answers all requests that wait for the model with 503 and `message`, since no engine will start."""
        self._get_route(model).give_up(message, code, retry_after_s)

    def count_waiting(self, model: str) -> int:
        """The number of requests that wait for an engine of the model."""
        return len(self._get_route(model).waiting)

    def count_in_flight(self, model: str) -> int:
        """The number of requests that the model's engines are processing."""
        return self._get_route(model).in_flight

    def find_route(self, model: str | None) -> Route | None:
        """The route of `model`; with no name given, the only route."""
        if not model:
            return next(iter(self._routes.values())) if len(self._routes) == 1 else None
        return self._by_name.get(model.lower())

    def record_rejection(
        self,
        route: Route | None,
        member: TenantState,
        api: sse.Api,
        asked: sse.RequestFields | None,
        num_bytes: int,
        status: int,
        reason: str,
        outcome: Outcome = "turned_away",
    ) -> None:
        """Counts and stores a request that was not accepted; `reason` is the code of its error."""
        model = route.model if route is not None else ""
        if route is not None:
            meter = route.links[0].meter if route.links else route.get_meter_without_engine()
            meter.record_rejection(api, outcome)
        self.meters.get_tenant_meter(member.name).record(outcome)
        self.meters.count_reason(reason, model, member.name)
        if self.keeper is not None:
            self.keeper.add(
                ServedRequest(
                    at_s=time(),
                    tenant=member.name,
                    model=model,
                    api=api,
                    stream=asked is not None and bool(asked.stream),
                    outcome=outcome,
                    status=status,
                    body_bytes=num_bytes,
                    max_tokens=asked.max_answer_tokens if asked is not None else None,
                    duration_ms=0.0,
                    reason=reason,
                )
            )

    def _find_link(self, backend: GatewayBackend) -> BackendLink:
        for route in self._routes.values():
            for link in route.links:
                if link.backend is backend:
                    return link
        raise KeyError(f"{backend.engine} is not a backend of this gateway")

    def _get_route(self, model: str) -> Route:
        route = self.find_route(model)
        if route is None:
            raise KeyError(f"{model} is not served by this gateway")
        return route

    def _add_route(self, model: str) -> Route:
        route = Route(model, self.meters) if self.routing is None else ChoosingRoute(model, self.meters, self.routing)
        self._routes[model] = route
        route.allowed = self._allowed.get(model)
        route.by_slots = self.tenants.has_several
        route.max_wait_s = self.max_wait_s
        route.want = lambda: self.wanted(model) if self.wanted is not None else None
        return route

    def _index_routes(self) -> None:
        """Indexes routes by name. A model's own name takes precedence over another model's alias."""
        names = {model.lower(): route for model, route in self._routes.items()}
        for route in self._routes.values():
            for name in route.names:
                names.setdefault(name, route)
        self._by_name = names

    def _remove_route_if_unused(self, route: Route) -> None:
        if not route.links and not route.on_demand:
            route.give_up(f"the model {route.model!r} is no longer served", "not_running", 5)
            del self._routes[route.model]
            self._index_routes()

    async def _drain(self, link: BackendLink, within_s: float, *, cut: bool) -> bool:
        backend = link.backend
        if backend.in_flight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await link.drained.wait()
        if backend.in_flight and not cut:
            return False
        if backend.in_flight:
            for connection in list(self.connections):
                connection.stop_at(backend, f"{backend.engine} was stopped")
        route = self._routes.get(backend.model)
        if route is not None and link in route.links:
            link.pool.close()
            route.drop(link)
            self._index_routes()
            self._remove_route_unless_held(route)
        return True

    def _remove_route_unless_held(self, route: Route) -> None:
        """Removes a route without a backend, unless a backend will follow: on hold, or loaded on demand."""
        if route.held is None:
            self._remove_route_if_unused(route)

    def add_connection(self, connection: ClientConnection, transport: asyncio.BaseTransport) -> None:
        budget = self.descriptors
        if self._is_stopping:  # it was in the backlog of the socket that listened
            connection.abort()
        elif budget.evict_from is not None:
            number = transport.get_extra_info("socket").fileno()
            if number >= budget.evict_from and not self._free_descriptors() and not budget.has_room(number):
                connection.abort()
        self.connections.add(connection)

    def _free_descriptors(self) -> bool:
        """Closes the connections that are idle for longest; returns whether a client's connection is being closed."""
        ranked = [(rank, id(one), one) for one in self.connections if (rank := one.rank_for_eviction()) is not None]
        for _, _, connection in heapq.nsmallest(max(1, len(ranked) // _EVICTED_SHARE), ranked):
            connection.abort()
        return bool(ranked) or any(connection.is_ending for connection in self.connections)

    def drop_connection(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self._left.set()

    async def _wait_until_gone(self, connections: list[ClientConnection], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.connections.isdisjoint(connections):
                    self._left.clear()
                    await self._left.wait()

    async def _sweep(self) -> None:
        """One timer for all connections: a timer per connection would cost more than the requests."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.date = _format_date_header()
            now = monotonic()
            for connection in [c for c in self.connections if c.deadline is not None and c.deadline < now]:
                connection.handle_timeout()
            self.run_periodic_checks()

    def _update_tenants(self, tenants: tuple[Tenant, ...], keys: tuple[KeyDigest, ...]) -> None:
        self._replace_tenants(tenants, keys)
        self.run_periodic_checks()

    def _replace_tenants(self, tenants: tuple[Tenant, ...], keys: tuple[KeyDigest, ...]) -> None:
        self.tenants.replace(tenants, keys)
        if self.keeper is not None and self.keeper.requires_key:
            self.tenants.require_key()

    def run_periodic_checks(self) -> None:
        """Does what is done once a second instead of for each request."""
        now = monotonic()
        for route in list(self._routes.values()):
            route.by_slots = self.tenants.has_several
            route.expire_waiting(now)


def _format_date_header() -> bytes:
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()


def explain_bind_failure(error: OSError, host: str, port: int) -> ExternalFailure | UsageError:
    """The error for a port that cannot be bound: why, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return ExternalFailure(
            f"port {port} on {host} is in use",
            hint=f"stop the process that listens there (ss -ltnp | grep :{port}), or use --port {port + 1}",
        )
    if error.errno == errno.EACCES:
        hint = "use a port above 1023, for example --port 8080"
        return ExternalFailure(f"no permission to listen on port {port}", cause=error.strerror, hint=hint)
    cause = error.strerror or str(error)
    return UsageError(f"cannot listen on {host}:{port}", cause=cause, hint="try --host 127.0.0.1 --port 8080")
