"""A fixed number of concurrent clients, each with one request after the other."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import aiohttp


class Crowd:
    """Within `async with`, `count` clients send requests; subclasses define a request in `one`."""

    def __init__(
        self, url: str, model: str, count: int, *, think_s: float, limit_s: float, key: str | None = None
    ) -> None:
        self.url, self.model, self.count = url, model, count
        self.think_s = think_s
        """The pause between an answer and the next request."""
        self._limit_s = limit_s
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._number = 0
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._limit_s),
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
        )
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Waits for all running requests."""
        self._over.set()
        await asyncio.gather(*self._tasks)
        await self.session.close()

    async def _go_on(self) -> None:
        while not self._over.is_set():
            self._number += 1
            await self.one(self._number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self.pause_s())

    async def one(self, number: int) -> None:
        raise NotImplementedError

    def pause_s(self) -> float:
        return self.think_s
