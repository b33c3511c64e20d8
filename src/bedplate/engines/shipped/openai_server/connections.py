"""uvicorn's HTTP protocol, without two faults with clients that send malformed requests or reset connections."""

from __future__ import annotations

import contextlib

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpProtocol(H11Protocol):
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn does not cancel this timer after a reset. It would keep the connection's objects until it expires.
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def send_400_response(self, msg: str) -> None:
        # A body may turn out to be malformed after its response has begun or ended. A response to HEAD has no body.
        with contextlib.suppress(LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()
