"""An engine with known timing and a fixed number of slots; further requests wait in its own queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from .scripted import DONE, STREAM_END, STREAM_HEAD, make_chunk, make_delta

EVENTS = 3


class SlottedEngine:
    """Streams `tokens` tokens in three events: the first after `ttft_s`, the others after `token_s` per token."""

    def __init__(self, slots: int, *, ttft_s: float = 0.03, token_s: float = 0.005, tokens: int = 12) -> None:
        self.port = 0
        self.most_at_once = 0
        self.answered = 0
        self._at_once = 0
        self._slots = asyncio.Semaphore(slots)
        self._ttft_s, self._token_s, self._tokens = ttft_s, token_s, tokens
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    async with self._slots:
                        await self.read(asked)
                        await self._answer(writer, asked.get("max_tokens") or self._tokens)
                finally:
                    self._at_once -= 1
        writer.close()

    async def read(self, asked: dict[str, Any]) -> None:
        await asyncio.sleep(self._ttft_s)

    async def _answer(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        writer.write(STREAM_HEAD + make_chunk(make_delta("a")))
        for _ in range(EVENTS - 1):
            await asyncio.sleep(tokens * self._token_s / (EVENTS - 1))
            writer.write(make_chunk(make_delta("b")))
        usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens}}
        writer.write(make_chunk(b"data: " + json.dumps(usage).encode() + b"\n\n" + DONE) + STREAM_END)
        self.answered += 1
