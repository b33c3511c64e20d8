"""Stub engines with fixed answers, wrong answers or none."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.hosting.stub_hosts import HANDLER, LISTEN, make_stub_environment, make_stub_readied

from bedplate.changing.migrate import MigrationRequest, MigrationRun
from bedplate.hosting.host import Host
from bedplate.run.ready import PreparedModel
from bedplate.values import replace_fields

WRITES = """
    asked_for = 0
    def do_POST(self):
        Handler.asked_for += 1
        if DIES_AFTER and Handler.asked_for > DIES_AFTER:
            os._exit(9)
        asked = self.asked()
        count = asked.get("max_tokens", 1)
        words = len(str(asked.get("prompt") or asked["messages"][-1]["content"]).split())
        usage = {"prompt_tokens": words, "completion_tokens": count, "total_tokens": words + count}
        chat = "prompt" not in asked
        said = [str(os.getpid())] * count if chat else [word(asked["prompt"], number) for number in range(count)]
        if asked.get("stream"):
            self.stream(said, chat, usage)
            return
        if chat:
            time.sleep(PAUSE_S * count)
        text = said[0] if chat else "".join(said)
        told = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self.answer({"choices": [{**told, "finish_reason": "length"}], "usage": usage})
    def stream(self, said, chat, usage):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, text in enumerate(said):
            time.sleep(PAUSE_S)
            told = {"delta": {"content": text}} if chat else {"text": text}
            end = "length" if number == len(said) - 1 else None
            self.event({"id": "a", "choices": [{"index": 0, **told, "finish_reason": end}]})
        self.event({"id": "a", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")
        self.close_connection = True
    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\\n\\n")
        self.wfile.flush()
WORDS = [" river", " stone", " lamp", " cloud", " house", " bread", " winter", " song"]
def word(prompt, number=0):
    return WORDS[hashlib.sha256(f"{SEED} {prompt} {number}".encode()).digest()[0] % 8]
"""


BASELINE = 40
"""Requests of the old engine with which a slow one is compared."""
SLOW_S = 0.3
"""Thirty times the usual pause before a token."""


def make_engine(
    folder: Path, name: str, *, seed: str = "same", pause_s: float = 0.01, dies_after: int = 0
) -> PreparedModel:
    """An engine for the model `alpha`. Engines of the same seed give the same answers."""
    settings = f"SEED, PAUSE_S, DIES_AFTER = {seed!r}, {pause_s}, {dies_after}"
    script = f"{HANDLER}{WRITES}{settings}{LISTEN}"
    environment = msgspec.structs.replace(make_stub_environment(folder / name, script), version=name)
    ready = make_stub_readied("alpha", environment)
    return dataclasses.replace(ready, plan=replace_fields(ready.plan, engine_version=name))


def offer_engines(monkeypatch: pytest.MonkeyPatch, **engines: PreparedModel) -> None:
    """Replace deciding and installing, which have their own tests, by these engines."""
    monkeypatch.setattr(
        MigrationRun, "_prepare_in_thread", lambda self, progress, hardware=None: engines[self.asked.engine]
    )


def offer_slow_engine(monkeypatch: pytest.MonkeyPatch, slow: PreparedModel) -> None:
    """The same for one engine that is to be rejected because it is slow.

    It is prepared when the old engine has served many requests, so that their median is the usual latency, also if the
    first ones had to wait.
    """

    def prepare(self: MigrationRun, progress: object, hardware: object = None) -> PreparedModel:
        while self._usual.count < BASELINE and self.host.state == "ready":
            time.sleep(0.005)
        return slow

    monkeypatch.setattr(MigrationRun, "_prepare_in_thread", prepare)


async def send_requests(host: Host, count: int, tokens: int = 3) -> list[tuple[int, dict[str, Any]]]:
    """Send concurrent requests and return all responses."""

    async def one(session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens}
        async with session.post(f"{host.url}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()

    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(one(session) for _ in range(count))))


class Load:
    """Keeps this many requests in flight."""

    def __init__(self, host: Host, streams: int) -> None:
        self._host, self._streams = host, streams
        self.statuses: list[int] = []
        self._over = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _go_on(self) -> None:
        while not self._over:
            ((status, _),) = await send_requests(self._host, 1)
            self.statuses.append(status)


def make_quick_request(engine: str, **more: Any) -> MigrationRequest:
    return MigrationRequest(engine=engine, **{"least_step_s": 0.2, "most_step_s": 3.0, **more})
