"""The check of endpoints elsewhere finds out what they serve and which APIs they have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.conftest import HANG_S

from bedplate.hosting.endpoints import EndpointWatch
from bedplate.run.gateway import Gateway, GatewayBackend
from bedplate.run.gateway.elsewhere import RemoteAddress, RemoteBackend
from bedplate.values.capabilities import Capabilities

KEY = "sk-of-the-endpoint"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


async def check(row: dict[str, Any], statuses: dict[str, int]) -> tuple[RemoteBackend, list[tuple[str, str, bytes]]]:
    """A backend after its first check, and the requests that the endpoint got; its other paths are not there."""
    seen = []

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        seen.append((request.method, request.path, await request.read()))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "other"}, {"id": "Small", **row}]})
        return web.json_response({"error": {}}, status=statuses.get(request.path, 404))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address, *_) = runner.addresses
    backend = RemoteBackend("here", RemoteAddress.from_url(f"http://127.0.0.1:{address[1]}"), KEY, sent_name="small")
    await watch(backend)
    await runner.cleanup()
    return backend, seen


async def watch(backend: RemoteBackend) -> None:
    """Until its first check."""
    watching = EndpointWatch([backend], lambda line: None)
    task = asyncio.ensure_future(watching.run())
    await asyncio.wait_for(watching.checked.wait(), HANG_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("statuses", "lacking"),
    [
        ({}, {"messages", "responses"}),
        ({MESSAGES: 400, RESPONSES: 422}, set()),
        ({MESSAGES: 405, RESPONSES: 500}, {"messages"}),
        ({MESSAGES: 400, RESPONSES: 200}, {"responses"}),  # an answer to such a request is none
    ],
)
def test_apis_that_an_endpoint_lacks_are_found_without_a_prompt(statuses: dict[str, int], lacking: set[str]) -> None:
    backend, seen = asyncio.run(check({}, statuses))
    assert backend.state == "ready" and backend.lacking_apis == lacking
    empty = b'{"model":"small"}'
    assert seen == [("GET", "/v1/models", b""), ("POST", MESSAGES, empty), ("POST", RESPONSES, empty)]


def test_a_bedplate_with_several_models_has_all_apis() -> None:
    async def check_gateway() -> RemoteBackend:
        backends = [GatewayBackend(model, "llama.cpp") for model in ("small", "large")]
        for one in backends:
            one.state, one.address = "ready", ("127.0.0.1", 9)
        gateway = Gateway(backends)
        await gateway.start("127.0.0.1", 0)
        remote = RemoteBackend("here", RemoteAddress.from_url(gateway.url), sent_name="large")
        await watch(remote)
        await gateway.stop(0)
        return remote

    remote = asyncio.run(check_gateway())
    assert remote.state == "ready" and remote.lacking_apis == frozenset()


@pytest.mark.parametrize(
    ("row", "context", "known"),
    [
        ({}, None, None),
        ({"max_model_len": 4096, "capabilities": {"tools": "none", "vision": True}}, 4096, ("none", True)),
        ({"max_model_len": "long", "capabilities": {"completion_chat": True}}, None, None),
        ({"max_model_len": -1, "capabilities": ["completion"]}, None, None),
    ],
)
def test_context_and_capabilities_are_those_that_the_endpoint_lists(
    row: dict[str, Any], context: int | None, known: tuple[str, bool] | None
) -> None:
    backend, _ = asyncio.run(check(row, {}))
    assert backend.context_tokens == context
    found = backend.capabilities
    assert (known is None) == (found is None)
    if known is not None:
        assert found == Capabilities(tools="none", vision=True)
