"""The progress interface of long operations. `show` draws it; Python callers may pass `SilentProgress`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


def can_redraw(console: Console) -> bool:
    """Whether bars and tables can be drawn in place; otherwise progress is written as lines."""
    return console.is_terminal and not console.is_dumb_terminal


class StepFailure(Exception):
    """Leaves a step that was not completed, so that it is not reported as completed."""


class Progress(Protocol):
    def note(self, text: str) -> None:
        """Report one line about an event."""

    def step(self, label: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Open a step. Call the context's value with the part of `total` that is done."""


class SilentProgress:
    """Reports nothing."""

    def note(self, text: str) -> None:
        return None

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield lambda done: None
