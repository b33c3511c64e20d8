"""Requests stored in columns: a million requests are a few lists of numbers instead of a million objects."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

NEVER = -1.0


class Book:
    """The requests and their results. Times are in seconds since the first arrival."""

    __slots__ = (
        "arrival", "done", "ending", "first", "hash_tokens", "hashes", "hits", "joined", "late_s", "left", "output",
        "prompt", "ready", "refused", "tokens", "weight",
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
        """In ascending order. Empty for a closed loop, in which a request arrives when another one has finished."""
        self.hashes = hashes
        """Hashes of each prompt's blocks; equal hashes mean equal prefixes. `None`: nothing is shared."""
        self.hash_tokens = hash_tokens
        """Tokens per hash."""
        self.first = [NEVER] * count
        """Time of the first token."""
        self.late_s = [0.0] * count
        """Time from the pass that computes a token until the token is sent, the same for all tokens of a request."""
        self.done = [NEVER] * count
        self.refused: list[int] = []
        """Requests that are longer than the whole cache of a replica."""
        self.hits: list[int] = []
        """Prompt tokens that were in a cache, one entry for each request that found any."""
        self.tokens = list(prompt)
        """Tokens to compute before the next output token; after a preemption, the output so far is included."""
        self.left = list(output)
        """Output tokens that remain at the next admission."""
        self.joined = [0] * count
        """The replica's pass after which decoding started."""
        self.ending = [0] * count
        """The replica's pass after which decoding ends."""
        self.ready = bytearray(count)
        """1 if its cache was transferred from another worker."""
        self.weight = [1] * count
        """The load that it adds to its replica while it is in flight, as the router counts it."""

    def __len__(self) -> int:
        return len(self.prompt)
