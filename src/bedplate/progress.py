"""How long work tells where it stands. `show` draws it; callers from Python may ignore it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    def note(self, text: str) -> None:
        """One line about something that happened."""

    def step(self, label: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Work that takes a while; the context's value is called with how much of `total` is done."""


class Silent:
    """Tells nobody."""

    def note(self, text: str) -> None:
        return None

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield lambda done: None
