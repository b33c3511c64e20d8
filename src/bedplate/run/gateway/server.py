"""The gateway: owns the public port, the connections behind it and the pages beside the APIs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING

from aiohttp import web

from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.run.gateway.client import MAX_HEAD_BYTES, ClientConnection
from bedplate.run.gateway.pages import pages
from bedplate.run.gateway.upstream import EnginePool
from bedplate.run.gateway.watch import Meter, Meters

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import Backend

DEFAULT_MAX_BODY_BYTES = 32 * 1000 * 1000
_SWEEP_S = 2.0
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
    ) -> None:
        self.backends = backends
        self.api_key = api_key.encode() if api_key is not None else None
        self.max_body_bytes = max_body_bytes
        self.connections: set[ClientConnection] = set()
        self._left = asyncio.Event()
        self.meters = Meters()
        self.url = ""
        self._ways = {id(b): (EnginePool(b), Meter(self.meters, b)) for b in backends}
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Binds the port (0: any free one) and answers from then on; returns the port."""
        if not 0 <= port <= 65535:  # uvloop never returns from binding such a port
            raise bind_failure(OSError(errno.EINVAL, "ports go from 0 to 65535"), host, port)
        self._runner = web.AppRunner(
            pages(self),
            access_log=None,
            handle_signals=False,
            keepalive_timeout=3600,
            # What a head may hold has been decided before it gets there.
            max_line_size=2 * MAX_HEAD_BYTES,
            max_field_size=2 * MAX_HEAD_BYTES,
            max_headers=MAX_HEAD_BYTES,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: ClientConnection(self), host, port, backlog=1024)
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise bind_failure(failure, host, port) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound}"
        self._sweeper = loop.create_task(self._sweep())
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
        if self._sweeper is not None:
            self._sweeper.cancel()
        for pool, _ in self._ways.values():
            pool.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def backend_for(self, model: str | None) -> Backend | None:
        """The backend that serves `model`; with no name given, the only one there is."""
        if not model:
            return self.backends[0] if len(self.backends) == 1 else None
        return next((b for b in self.backends if b.answers_to(model)), None)

    def left(self, connection: ClientConnection) -> None:
        """A client's connection is no more."""
        self.connections.discard(connection)
        self._left.set()

    def way_to(self, backend: Backend) -> tuple[EnginePool, Meter]:
        return self._ways[id(backend)]

    def new_inner_handler(self) -> asyncio.Protocol:
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("the gateway has not been started")
        return self._runner.server()

    async def _until_gone(self, connections: list[ClientConnection], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.connections.isdisjoint(connections):
                    self._left.clear()
                    await self._left.wait()

    async def _sweep(self) -> None:
        """One timer for all connections: a timer for each would cost more than the requests."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            for connection in [c for c in self.connections if c.deadline is not None and c.deadline < now]:
                connection.timed_out()


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
