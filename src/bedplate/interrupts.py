"""Cancellation of blocking work in threads, and clean-up of the state that an interrupt leaves in the interpreter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class OperationCancelled(BaseException):
    """The operation that this thread works for was cancelled. Like KeyboardInterrupt, it is not an error."""


class Terminated(SystemExit):
    """SIGTERM was received. It ends the command like Ctrl-C: temporary folders are removed, child processes ended."""


def raise_on_sigterm() -> None:
    """Let SIGTERM raise `Terminated` in the main thread, instead of ending the process without any clean-up."""
    signal.signal(signal.SIGTERM, _raise_terminated)


def end_by_sigterm() -> None:
    """End the process by SIGTERM, so that its parent sees the same status as without a handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _raise_terminated(number: int, frame: object) -> None:
    raise Terminated(128 + number)


@contextmanager
def make_cancellable(cancelled: threading.Event) -> Iterator[None]:
    """Within the block, and in threads that copy its context, `check_cancelled` raises once the event is set."""
    before = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(before)


def check_cancelled() -> None:
    """Raise if the current operation was cancelled. Code that blocks for long calls it now and then."""
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise OperationCancelled


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C and SIGTERM that arrive within the block take effect at its end.

    `subprocess.Popen` can be interrupted after the process was started and before anybody knows it.
    """
    if threading.current_thread() is not threading.main_thread():  # signals interrupt only the main thread
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, instead of with a traceback of the interpreter's clean-up.

    Engines end with the process: their wardens see to it.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))


def forget_interrupts() -> None:
    """Let a module run by `python -m` exit with its own status after a handled KeyboardInterrupt.

    CPython sets a flag when KeyboardInterrupt passes through code that was compiled from a string, such as a
    dataclass's generated methods. With the flag set, it ends the process by SIGINT even if the exception was caught.
    Running any other string clears the flag.
    """
    exec("")  # noqa: S102
