"""Unmodified clients of other APIs against llama.cpp: as it has these APIs, and translated to chat completions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tests.api_clients import CHECKS
from tests.conftest import HANG_S, Served

from bedplate.engines.traits import RequestTraits
from bedplate.run.gateway import Gateway, GatewayBackend

MODEL = "smollm2-135m-instruct"


@contextlib.contextmanager
def serve_translated(served: Served) -> Iterator[str]:
    """A gateway before the endpoint, for which that is an engine with OpenAI's chat completions alone."""
    backend = GatewayBackend(MODEL, "llama.cpp")
    at = urlsplit(served.root)
    backend.address = (str(at.hostname), int(at.port or 0))
    backend.requests = RequestTraits()
    backend.state = "ready"
    loop = asyncio.new_event_loop()
    gateways: list[Gateway] = []

    async def start() -> str:
        gateways.append(Gateway([backend]))
        await gateways[0].start("127.0.0.1", 0)
        return gateways[0].url

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(HANG_S)
    finally:
        asyncio.run_coroutine_threadsafe(gateways[0].stop(0), loop).result(HANG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_S)
        loop.close()


@pytest.fixture(scope="module", params=["as they are", "translated"])
def root(request: pytest.FixtureRequest, served: Served) -> Iterator[str]:
    if request.param == "as they are":
        yield served.root
    else:
        with serve_translated(served) as url:
            yield url


@pytest.mark.parametrize(("client", "api"), CHECKS)
def test_an_unmodified_client_works(root: str, client: str, api: str) -> None:
    CHECKS[client, api](root, MODEL, tools=True)
