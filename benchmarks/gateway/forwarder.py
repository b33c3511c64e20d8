"""Forwards bytes between clients and an engine: no HTTP, no keys, no limits, no records.

The floor of this comparison: what a gateway on the same Python and uvloop costs before it does anything.
"""

import asyncio
import gc
import sys
from typing import cast
from urllib.parse import urlsplit

import uvloop


class Side(asyncio.Protocol):
    """One of the two connections. Each client has an engine connection of its own."""

    __slots__ = ("other", "transport", "unsent")

    def __init__(self, other: "Side | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.unsent = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what arrived before the engine's connection was open."""
        self.transport = cast(asyncio.Transport, transport)
        if self.unsent:
            self.transport.write(self.unsent)
            self.unsent = b""

    def data_received(self, data: bytes) -> None:
        """Forward at once."""
        other = self.other
        if other is not None and other.transport is not None:
            other.transport.write(data)
        elif other is not None:
            other.unsent += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other connection too."""
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class ClientSide(Side):
    """A client's connection; opens the one to the engine."""

    __slots__ = ("address", "opening")

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(Side(self))
        self.address = address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the engine."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self.opening = loop.create_task(loop.create_connection(lambda: cast(Side, self.other), *self.address))


async def main(upstream: str, port: int) -> None:
    """Serve on 127.0.0.1."""
    parts = urlsplit(upstream)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    await asyncio.get_running_loop().create_server(lambda: ClientSide(address), "127.0.0.1", port, backlog=4096)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
