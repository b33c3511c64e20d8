"""Helpers of migrations and shadows: addresses and names of engines, and progress from threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bedplate.measure.answers import EngineAddress

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import HostedEngine
    from bedplate.values import Plan


def find_address(engine: HostedEngine) -> EngineAddress | None:
    """The address of an engine behind the gateway; None if it is not ready."""
    url = engine.url
    if url is None or engine.state != "ready":
        return None
    return EngineAddress(url, engine.backend.engine_key, engine.plan.model.served_name)


def get_last_address(engine: HostedEngine) -> EngineAddress:
    """The address of an engine that was ready. If it is not ready any more, requests to the address fail."""
    return find_address(engine) or EngineAddress("http://127.0.0.1:9", None, engine.plan.model.served_name)


def describe_plan(plan: Plan) -> str:
    return f"{plan.engine} {plan.engine_version} ({plan.weights.label})"


class ThreadProgress:
    """Progress from a thread, sent to the client by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
        self._loop, self._tell = loop, tell

    def note(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, text)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        self.note(label)
        yield lambda done: None
