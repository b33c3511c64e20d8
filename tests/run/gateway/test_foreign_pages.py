"""A real browser shows pages of other origins, which try to use an endpoint without keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.browser import Page, open_browser

from bedplate.run.gateway.origins import OriginPolicy

from .scripted import ANSWER, CHAT, make_chat_body, start_gateway

pytestmark = pytest.mark.browser

EVIL = "evil.test"
RESOLVES_TO_THIS_MACHINE = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
BODY = json.dumps(json.dumps(make_chat_body()))

POSTS_TEXT = """
fetch(%s, {method: "POST", mode: "no-cors", headers: {"content-type": "text/plain"}, body: %s})
    .then(answer => answer.type, error => "failed: " + error)
"""
SUBMITS_FORM = """
new Promise(done => {
    const frame = document.createElement("iframe");
    frame.name = "frame" + Math.random();
    document.body.append(frame);
    const form = document.createElement("form");
    Object.assign(form, {action: %s, method: "post", enctype: "text/plain", target: frame.name});
    const field = document.createElement("input");
    [field.name, field.value] = ['{"messages":[{"role":"user","content":"', '"}]}'];
    form.append(field);
    document.body.append(form);
    frame.onload = () => done("loaded");
    form.submit();
})
"""
SENDS_JSON = """
fetch(%s, {method: "POST", headers: {"content-type": "application/json", "authorization": "Bearer none"}, body: %s})
    .then(answer => answer.json(), error => "failed: " + error)
"""
READS = "fetch(%s).then(answer => answer.text(), error => 'failed: ' + error)"


@contextlib.asynccontextmanager
async def serve_page() -> AsyncIterator[int]:
    """The port of a server with an empty page at every path."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<!doctype html><p>hi")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def attack(page: Page, endpoint: str) -> list[object]:
    target = json.dumps(endpoint + CHAT)
    return [
        await page.evaluate(POSTS_TEXT % (target, BODY)),
        await page.evaluate(SUBMITS_FORM % target),
        await page.evaluate(SENDS_JSON % (target, BODY)),
        await page.evaluate(READS % json.dumps(endpoint + "/v1/models")),
    ]


@pytest.mark.parametrize("host", [EVIL, "127.0.0.1", "localhost"])
async def test_pages_of_another_origin_do_not_reach_the_engine(host: str, tmp_path: Path) -> None:
    async with (
        start_gateway() as setup,
        start_gateway(origins=OriginPolicy((), ["*"])) as opened,
        serve_page() as port,
        open_browser(tmp_path, RESOLVES_TO_THIS_MACHINE) as page,
    ):
        await page.open(f"http://{host}:{port}/", 800, "light")
        assert (await page.evaluate("location.host")) == f"{host}:{port}"
        text, form, answer, models = await attack(page, f"http://127.0.0.1:{setup.port}")
        assert (text, form) == ("opaque", "loaded"), "the browser did send them"
        assert str(answer).startswith("failed: ") and str(models).startswith("failed: ")
        assert not setup.engine.seen
        # The same page, where it is allowed.
        _, _, answer, models = await attack(page, f"http://127.0.0.1:{opened.port}")
        assert answer == ANSWER and "small" in str(models)
        assert len(opened.engine.seen) == 3


async def test_page_whose_name_resolves_to_this_machine_is_rejected(tmp_path: Path) -> None:
    """DNS rebinding: to the browser the endpoint has the same origin as the page."""
    async with (
        start_gateway() as setup,
        start_gateway(origins=OriginPolicy([EVIL])) as opened,
        open_browser(tmp_path, RESOLVES_TO_THIS_MACHINE) as page,
    ):
        for path in ("/", "/v1/models", "/metrics"):
            await page.open(f"http://{EVIL}:{setup.port}{path}", 800, "light")
            assert "host_not_allowed" in await page.evaluate("document.body.textContent")
        assert (await page.evaluate(SENDS_JSON % (json.dumps(CHAT), BODY)))["error"]["code"] == "host_not_allowed"
        assert not setup.engine.seen
        await page.open(f"http://{EVIL}:{opened.port}/", 800, "light")
        assert await page.evaluate(SENDS_JSON % (json.dumps(CHAT), BODY)) == ANSWER


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_pages_of_the_endpoint_itself_work(host: str, tmp_path: Path) -> None:
    async with start_gateway() as setup, open_browser(tmp_path) as page:
        await page.open(f"http://{host}:{setup.port}/", 800, "light")
        assert await page.evaluate(SENDS_JSON % (json.dumps(CHAT), BODY)) == ANSWER
        assert "small" in await page.evaluate(READS % json.dumps("/v1/models"))
