"""Helpers of migrations and shadows: addresses and names of engines, and progress from threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from bedplate.interrupts import check_cancelled, make_cancellable
from bedplate.measure.answers import EngineAddress

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import HostedEngine
    from bedplate.values import Plan


T = TypeVar("T")
CANCEL_S = 10.0
"""How long a cancelled operation waits until its thread has ended its child processes."""


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


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work. If this is cancelled, the work is cancelled too, and its child processes are ended.

    The thread is a daemon: a host that stops does not wait for work that cannot be cancelled, such as hashing a file.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(lambda one: None if one.cancelled() else one.exception())  # else asyncio logs it
    cancelled = threading.Event()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, result, failure)

    with make_cancellable(cancelled):
        context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="bedplate-work", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait({done}, timeout=CANCEL_S)
        raise


class ThreadProgress:
    """Progress from a thread, sent to the client by the event loop. Each report cancels the work if that was asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
        self._loop, self._tell = loop, tell

    def note(self, text: str) -> None:
        check_cancelled()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, text)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        self.note(label)
        yield lambda done: check_cancelled()
