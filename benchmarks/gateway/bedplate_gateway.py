"""bedplate's gateway in front of any OpenAI-compatible server, for the comparison with other gateways."""

from __future__ import annotations

import argparse
import asyncio
import gc
from urllib.parse import urlsplit

import uvloop

from bedplate.run.gateway import Backend, Gateway


async def serve(upstream: str, port: int) -> None:
    address = urlsplit(upstream)
    backend = Backend("null", "null", aliases=("null-model",))
    backend.address = (address.hostname or "127.0.0.1", address.port or 80)
    backend.state = "ready"
    gateway = Gateway([backend])
    await gateway.start("127.0.0.1", port)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.upstream, options.port))
