"""bedplate's gateway in front of any OpenAI-compatible server, for the comparison with other gateways."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bedplate import store
from bedplate.run.gateway import Gateway, GatewayBackend
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.values.tenant import Tenant, TenantKey, digest_key


def two_tenants(path: Path, key: str) -> None:
    """A tenant with this key and limits that are never reached, and a second tenant that shares the engine."""
    for name, own in (("one", key), ("other", key[::-1])):
        store.put_tenant(Tenant(name=name, requests_per_minute=10**9, tokens_per_minute=10**12, in_flight=10**6), path)
        store.add_key(name, TenantKey(id=name, created_at=""), digest_key(own.encode(), store.get_salt(path)), path)


async def serve(upstream: str, port: int, path: Path | None) -> None:
    address = urlsplit(upstream)
    backend = GatewayBackend("null-model", "null")
    backend.address = (address.hostname or "127.0.0.1", address.port or 80)
    backend.state = "ready"
    backend.slots = 4096
    gateway = Gateway([backend], keeper=RequestRecorder(path) if path is not None else None, max_wait_s=120.0)
    await gateway.start("127.0.0.1", port)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", type=Path, help="enable tenants and record each request in this file")
    options = parser.parse_args()
    if options.store is not None:
        options.store.unlink(missing_ok=True)
        two_tenants(options.store, os.environ["GATEWAY_BENCH_KEY"])
    uvloop.run(serve(options.upstream, options.port, options.store))
