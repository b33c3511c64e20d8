"""Makes the pictures of the live page in docs/images: the built-in model with its real engine, under a small load.

    python -m tests.show.pictures [--minutes 10] [--folder docs/images]

Serves the model with an own service, lets two users hold conversations with it, sends a request that is rejected, and
takes the pictures in a real browser while the load continues. They show what the machine reaches: nothing else should
run on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from tests.browser import Page, find_browser, open_browser

ROOT = Path(__file__).parents[2]
USERS = 2
QUESTIONS = (
    "Why is the sky blue?", "Name three rivers of France.", "What is a bedplate?", "Write a short poem about rain.",
    "How does a bicycle stay upright?", "Explain what a cache is.", "Which planet is the largest?", "And why?",
)  # fmt: skip
PICTURES = (("live-page", 1280, 1180, "light"), ("live-page-phone", 390, 1400, "dark"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the load lasts before the pictures")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images")
    given = parser.parse_args()
    if find_browser() is None:
        sys.exit("error: no browser was found\nhint: apt-get install chromium")
    command = [sys.executable, "-m", "bedplate", "serve", "builtin", "--port", "0", "--name", "demo", "--json"]
    service = subprocess.Popen([*command, "--users", str(USERS)], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        if not line:
            sys.exit("error: the service did not start")
        asyncio.run(take_pictures(json.loads(line)["url"], given.folder, 60 * given.minutes))
    finally:
        service.terminate()
        service.wait()


async def take_pictures(url: str, folder: Path, seconds: float) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        users = [asyncio.create_task(converse(session, url, random.Random(number))) for number in range(USERS)]
        try:
            await asyncio.sleep(seconds)
            async with session.post(f"{url}/chat/completions", json={"messages": []}) as answer:
                assert answer.status == 400, await answer.text()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
                async with open_browser(Path(profile)) as page:
                    for name, width, height, theme in PICTURES:
                        await take_picture(page, url.removesuffix("/v1"), folder / f"{name}.png", width, height, theme)
        finally:
            for user in users:
                user.cancel()
            for failed in await asyncio.gather(*users, return_exceptions=True):
                if not isinstance(failed, asyncio.CancelledError):
                    raise RuntimeError("a user's conversation ended") from failed


async def converse(session: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
    """One user: conversations of a few questions, with a pause to read each answer."""
    while True:
        messages: list[dict[str, Any]] = []
        for question in chance.sample(QUESTIONS, 4):
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": chance.randint(8, 48), "stream": True}
            said = ""
            async with session.post(f"{url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            said += choice["delta"].get("content") or ""
            messages.append({"role": "assistant", "content": said})
            await asyncio.sleep(chance.uniform(2, 12))


async def take_picture(page: Page, url: str, file: Path, width: int, height: int, theme: str) -> None:
    await page.open(url, width, theme)
    await page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
    )
    await page.call("Emulation.setScrollbarsHidden", hidden=True)
    await page.wait_until("!document.getElementById('all').hidden")
    await page.evaluate("document.getElementById('most').value = 24, document.getElementById('prompt').focus()")
    await page.write("What is the capital of France?")
    await page.press("Enter")
    await page.wait_until("/\\d tokens($| ·)/.test(document.getElementById('told').textContent)", 1800)
    await page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    try:
        await page.wait_until("document.getElementById('binding').textContent.trim()")
    except AssertionError:
        why = await page.evaluate("document.getElementById('bound').textContent")
        hint = "hint: run bedplate probe --measure before; nothing else may run on this machine"
        sys.exit(f"error: the page names no bottleneck: {why}\n{hint}")
    await page.save_picture(file, whole=False)
    assert not page.complaints, page.complaints
    print(file)


if __name__ == "__main__":
    main()
