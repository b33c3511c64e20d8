"""Drives a real browser over its debugging port: viewport widths, themes, screenshots and PDF."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0", "about:blank",
)  # fmt: skip
START_LIMIT_S = 240


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.requested: list[str] = []
        """URLs that the page requested."""
        self.complaints: list[str] = []
        """Script errors and actions that the browser blocked."""

    async def call(self, method: str, **given: Any) -> Any:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": given})
        while True:
            answer = await self.socket.receive_json(timeout=START_LIMIT_S)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(answer["params"]["exceptionDetails"]))
            elif answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def open(self, page: Path | str, width: int, theme: str) -> None:
        """Open a file or a URL."""
        for part in ("Network", "Runtime", "Log"):
            await self.call(f"{part}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        await self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        await self.evaluate("new Promise(done => document.readyState == 'complete' ? done(1) : onload = () => done(1))")

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_until(self, expression: str, limit_s: float = 240) -> Any:
        """Wait until the expression is true, and return its value."""
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not (found := await self.evaluate(expression)):
                    await asyncio.sleep(0.05)
        assert found, f"{expression} was {found!r} after {limit_s} s; {self.complaints}"
        return found

    async def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            down = {"text": text} if kind == "keyDown" and text else {}
            code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **down)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def save_picture(self, file: Path, *, whole: bool = True) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    async def find_faults(self) -> list[str]:
        """What axe-core reports as serious or critical, except rules that are about more than one page."""
        from importlib.resources import files

        await self.call("Page.setBypassCSP", enabled=True)
        script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
        await self.call("Runtime.evaluate", expression=script)
        found = await self.evaluate("axe.run(document).then(found => found.violations)")
        return [
            f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes'][:3]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    async def count_pdf_pages(self) -> int:
        found = await self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(found["data"])))


@contextlib.asynccontextmanager
async def open_browser(folder: Path, *options: str) -> AsyncIterator[Page]:
    program = find_browser()
    assert program is not None
    process = subprocess.Popen(
        [program, f"--user-data-dir={folder}", *options, *OPTIONS],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        read = asyncio.to_thread(lambda: next(line for line in process.stderr or () if "ws://" in line))
        address = re.search(r"ws://([^/]+)/", await asyncio.wait_for(read, START_LIMIT_S))
        assert address is not None
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address[1]}/json/list") as answer:
                tab = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        process.communicate()
