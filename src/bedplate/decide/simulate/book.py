"""Requests, column by column: a million of them are lists of numbers, not a million objects."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

NEVER = -1.0


class Book:
    """What is asked, and what becomes of it. Times are seconds from the first arrival."""

    __slots__ = (
        "arrival", "done", "ending", "first", "hash_tokens", "hashes", "hits", "joined", "left", "output", "prompt",
        "ready", "refused", "tokens", "weight",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        arrival: Sequence[float] = (),
        hashes: Sequence[Sequence[Hashable]] | None = None,
        hash_tokens: int = 0,
    ) -> None:
        count = len(prompt)
        self.prompt, self.output = list(prompt), list(output)
        self.arrival = list(arrival)
        """In order. Empty for a closed loop, in which a request comes when another one has left."""
        self.hashes = hashes
        """Of each prompt's blocks; equal ones stand for equal beginnings. `None`: nothing is shared."""
        self.hash_tokens = hash_tokens
        """Tokens that one of them stands for."""
        self.first = [NEVER] * count
        """When the first token came."""
        self.done = [NEVER] * count
        self.refused: list[int] = []
        """Longer than the whole cache of a replica."""
        self.hits: list[int] = []
        """Prompt tokens that were in a cache, one entry for each request that found any."""
        self.tokens = list(prompt)
        """That a pass must compute before the next answer token; after a preemption, what was answered counts too."""
        self.left = list(output)
        """Answer tokens that are still to come when it is next admitted."""
        self.joined = [0] * count
        """The pass of its replica after which it began to answer, and the one after which it ends."""
        self.ending = [0] * count
        self.ready = bytearray(count)
        """1 where its cache came from another worker."""

        self.weight = [1] * count
        """What it adds to the load of its replica while it is in flight, as its router counts that."""

    def __len__(self) -> int:
        return len(self.prompt)
