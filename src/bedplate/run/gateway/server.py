"""The gateway: owns the public port, the connections behind it and the pages beside the APIs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from time import monotonic, time
from typing import TYPE_CHECKING

from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.run.gateway.client import ClientConnection
from bedplate.run.gateway.pages import Page
from bedplate.run.gateway.routes import Route, Way
from bedplate.run.gateway.tenants import Tenants, Unaccepted
from bedplate.run.gateway.watch import Meters
from bedplate.values.traffic import ServedRequest

if TYPE_CHECKING:
    from bedplate.run.gateway import sse
    from bedplate.run.gateway.backend import Backend
    from bedplate.run.gateway.keeper import Keeper, Words
    from bedplate.run.gateway.tenants import KeyDigest, Member
    from bedplate.values.tenant import Tenant

DEFAULT_MAX_BODY_BYTES = 32 * 1000 * 1000
_SWEEP_S = 1.0
_FLUSH_S = 0.5
"""How long the last words to a client may take when the endpoint goes away."""


class Gateway:
    """One OpenAI-compatible endpoint for a list of backends."""

    def __init__(
        self,
        backends: list[Backend],
        *,
        api_key: str | None = None,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        max_wait_s: float | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """`max_wait_s` turns requests away that would wait for longer than that.

        `keeper` brings the tenants that the store knows, and keeps the shape of each request there.
        """
        self.tenants = Tenants(api_key, keeper.salt if keeper is not None else None)
        self.keeper = keeper
        if keeper is not None:
            self.tenants.replace(keeper.tenants, keeper.keys)
        self.max_body_bytes = max_body_bytes
        self.max_wait_s = max_wait_s
        self.seen: Callable[[ServedRequest, Words], None] | None = None
        """Called after each request that was accepted, with its words: for those who try the same on another engine."""
        self.wanted: Callable[[str], None] | None = None
        """Called when a request comes for a model that is known and has no engine: somebody should start one."""
        self.starting = False
        """While models are still being made known: one that is not known yet may be so in a moment."""
        self.connections: set[ClientConnection] = set()
        self.arriving_bytes = 0
        """Of requests that are not whole yet, or wait behind another of the same connection."""
        self._left = asyncio.Event()
        self.meters = Meters()
        self.url = ""
        self.date = _date()
        """The header that says what time it is, not older than two seconds."""
        self.handed: dict[str, Page] = {}
        """Pages of others, by path: they go before the gateway's own."""
        self._routes: dict[str, Route] = {}
        self._by_name: dict[str, Route] = {}
        self._allowed: dict[str, frozenset[str] | None] = {}
        self._leaving: set[asyncio.Task[bool]] = set()
        for backend in backends:
            self.add(backend)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Binds the port (0: any free one) and answers from then on; returns the port."""
        if not 0 <= port <= 65535:  # uvloop never returns from binding such a port
            raise bind_failure(OSError(errno.EINVAL, "ports go from 0 to 65535"), host, port)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: ClientConnection(self), host, port, backlog=1024)
        except (OSError, UnicodeError) as error:
            failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise bind_failure(failure, host, port) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound}"
        self._sweeper = loop.create_task(self._sweep())
        if self.keeper is not None:
            self.keeper.start(self._tenants_changed)
        return bound

    async def stop(self, grace_s: float = 5.0) -> None:
        """Takes no new connection, lets answers under way finish for `grace_s`, and ends the rest with an error."""
        if self._server is not None:
            self._server.close()
        busy = [c for c in list(self.connections) if not c.close_when_idle()]
        await self._until_gone(busy, grace_s)
        for connection in list(self.connections):
            connection.stop("bedplate is shutting down")
        await self._until_gone(list(self.connections), _FLUSH_S)
        for connection in list(self.connections):
            connection.abort()
        await self._until_gone(list(self.connections), _FLUSH_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._leaving:
            task.cancel()
        for route in self._routes.values():
            for way in route.ways:
                way.pool.close()
        if self.keeper is not None:
            await self.keeper.stop()

    # models and their backends

    @property
    def backends(self) -> list[Backend]:
        """All that are there, those of one model together."""
        return [backend for route in self._routes.values() for backend in route.backends]

    @property
    def needs_key(self) -> bool:
        return not self.tenants.is_open

    @property
    def routes(self) -> list[Route]:
        return list(self._routes.values())

    @property
    def models(self) -> list[str]:
        """What can be asked for, whether an engine runs for it or not."""
        return list(self._routes)

    def add(self, backend: Backend) -> None:
        """From now on the backend gets its share of its model's requests, as soon as it is ready."""
        way = Way(backend, self.meters)
        route = self._routes.get(backend.model)
        if route is None:
            route = self._new_route(backend.model)
        route.add(way)
        self._name_routes()

    def remove(self, backend: Backend, *, within_s: float = 300.0, cut: bool = False) -> Awaitable[bool]:
        """From now on the backend gets nothing new. Ends when its last request has, or says False after `within_s`.

        A backend that is not done in time is still there, without new requests; call it again to go on waiting, or with
        `cut` to end with an error what is left of it then.
        """
        way = self._way(backend)
        way.removed = True
        backend.share = 0.0
        task = asyncio.get_running_loop().create_task(self._drained(way, within_s, cut=cut))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    def known(self, *models: str, aliases: Iterable[str] = ()) -> None:
        """Models that may be asked for though no engine runs for them: `wanted` is then called, and requests wait.

        `aliases` are what else each of them is called, as a backend of it would be.
        """
        names = frozenset(name.lower() for name in aliases)
        for model in models:
            route = self._routes.get(model) or self._new_route(model)
            route.on_demand = True
            route.aliases |= names
            route.names |= names
        self._name_routes()

    def allow(self, model: str, tenants: Iterable[str]) -> None:
        """Only these may use the model, and whoever may see everything; with none named, everybody may."""
        self._allowed[model] = frozenset(tenants) or None
        if (route := self._routes.get(model)) is not None:
            route.allowed = self._allowed[model]

    def unknown(self, model: str) -> None:
        """The model is not started on demand any more; what waits for it is answered, unless it has a backend."""
        route = self._routes.get(model)
        if route is not None:
            route.on_demand = False
            self._dismiss(route)

    def hold(self, model: str, *, most: int = 256, wait_s: float = 300.0) -> None:
        """New requests for the model wait, up to `most` and each for up to `wait_s`, until `release`.

        What is under way goes on. Whatever is too much is answered with 503 and Retry-After before it is accepted.
        """
        self._route(model).hold(most, wait_s)

    def release(self, model: str) -> None:
        """Requests go to the engines again, those that were held first."""
        self._route(model).release()

    def give_up(self, model: str, message: str, *, code: str = "not_running", retry_after_s: int = 5) -> None:
        """Answers what waits for the model with 503 and `message`: there will be no engine for it."""
        self._route(model).give_up(message, code, retry_after_s)

    def waiting(self, model: str) -> int:
        """Requests that wait for an engine of the model."""
        return len(self._route(model).waiting)

    def in_flight(self, model: str) -> int:
        """Requests that engines of the model are working on."""
        return self._route(model).in_flight

    def route_for(self, model: str | None) -> Route | None:
        """The way to `model`; with no name given, to the only one there is."""
        if not model:
            return next(iter(self._routes.values())) if len(self._routes) == 1 else None
        return self._by_name.get(model.lower())

    def unaccepted(self, route: Route, member: Member, num_bytes: int) -> Unaccepted | None:
        """Why the route cannot take a request of this tenant."""
        if route.is_free:
            return None
        return route.unaccepted(route.waiting.line(member.name, member.weight), num_bytes)

    def turned_away(
        self, route: Route, member: Member, api: sse.Api, asked: sse.Asked, num_bytes: int, status: int
    ) -> None:
        """A request that was not accepted is counted all the same."""
        (route.ways[0].meter if route.ways else route.meter_of_none()).turned_away(api)
        self.meters.tenant(member.name).record("turned_away")
        if self.keeper is not None:
            self.keeper.add(
                ServedRequest(
                    at_s=time(),
                    tenant=member.name,
                    model=route.model,
                    api=api,
                    stream=bool(asked.stream),
                    outcome="turned_away",
                    status=status,
                    body_bytes=num_bytes,
                    max_tokens=asked.most_tokens,
                    duration_ms=0.0,
                )
            )

    def _way(self, backend: Backend) -> Way:
        for route in self._routes.values():
            for way in route.ways:
                if way.backend is backend:
                    return way
        raise KeyError(f"{backend.engine} is no backend of this gateway")

    def _route(self, model: str) -> Route:
        route = self.route_for(model)
        if route is None:
            raise KeyError(f"{model} is not served by this gateway")
        return route

    def _new_route(self, model: str) -> Route:
        route = self._routes[model] = Route(model, self.meters)
        route.allowed = self._allowed.get(model)
        route.by_slots = self.tenants.several
        route.max_wait_s = self.max_wait_s
        route.want = lambda: self.wanted(model) if self.wanted is not None else None
        return route

    def _name_routes(self) -> None:
        """A model's own name goes before what is another's by the way."""
        names = {model.lower(): route for model, route in self._routes.items()}
        for route in self._routes.values():
            for name in route.names:
                names.setdefault(name, route)
        self._by_name = names

    def _dismiss(self, route: Route) -> None:
        if not route.ways and not route.on_demand:
            route.give_up(f"{route.model} is not served here any more", "not_running", 5)
            del self._routes[route.model]
            self._name_routes()

    async def _drained(self, way: Way, within_s: float, *, cut: bool) -> bool:
        backend = way.backend
        if backend.in_flight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await way.drained.wait()
        if backend.in_flight and not cut:
            return False
        if backend.in_flight:
            for connection in list(self.connections):
                connection.stop_at(backend, f"{backend.engine} was stopped")
        route = self._routes.get(backend.model)
        if route is not None and way in route.ways:
            way.pool.close()
            route.drop(way)
            self._name_routes()
            self._dismiss_if_last(route)
        return True

    def _dismiss_if_last(self, route: Route) -> None:
        """A model without a backend is gone, unless one is to come: it is held, or started on demand."""
        if route.held is None:
            self._dismiss(route)

    def left(self, connection: ClientConnection) -> None:
        """A client's connection is no more."""
        self.connections.discard(connection)
        self._left.set()

    async def _until_gone(self, connections: list[ClientConnection], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.connections.isdisjoint(connections):
                    self._left.clear()
                    await self._left.wait()

    async def _sweep(self) -> None:
        """One timer for all connections: a timer for each would cost more than the requests."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.date = _date()
            now = monotonic()
            for connection in [c for c in self.connections if c.deadline is not None and c.deadline < now]:
                connection.timed_out()
            self.tick()

    def _tenants_changed(self, tenants: tuple[Tenant, ...], keys: tuple[KeyDigest, ...]) -> None:
        self.tenants.replace(tenants, keys)
        self.tick()

    def tick(self) -> None:
        """What is looked at now and then, and not for each request."""
        now = monotonic()
        for route in list(self._routes.values()):
            route.by_slots = self.tenants.several
            route.tick(now)


def _date() -> bytes:
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()


def bind_failure(error: OSError, host: str, port: int) -> OutsideFailed | BadQuestion:
    """Why nothing can listen there, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return OutsideFailed(
            f"port {port} on {host} is in use",
            hint=f"stop what listens there (ss -ltnp | grep :{port}), or choose another: --port {port + 1}",
        )
    if error.errno == errno.EACCES:
        hint = "choose one above 1023: --port 8080"
        return OutsideFailed(f"port {port} may not be opened", cause=error.strerror, hint=hint)
    cause = error.strerror or str(error)
    return BadQuestion(f"cannot listen on {host}:{port}", cause=cause, hint="try --host 127.0.0.1 --port 8080")
