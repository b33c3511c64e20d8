"""Prompts with exact token counts, built from words of one token each. The same seed gives the same prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bedplate.values.workload import RequestShape


class Prompts:
    """Consecutive prompts differ in their first token, so that a prefix cache has no effect."""

    def __init__(
        self,
        words: Sequence[str],
        starters: Sequence[str],
        overhead: int,
        *,
        leading_space: bool,
        seed: int,
        round_number: int,
        shared_tokens: int = 0,
    ) -> None:
        self._words = list(words)
        self._starters = list(starters)
        self._overhead = overhead
        self._space = " " if leading_space else ""
        self._origin = f"{seed}/{round_number}"
        rng = random.Random(self._origin)  # noqa: S311
        self._orders = [rng.sample(self._starters, len(self._starters))]
        self._orders += [rng.sample(self._words, len(self._words)) for _ in range(3)]
        # The shared prefix must be the same in all rounds.
        self._shared = self._draw_words(f"{seed}/shared", max(0, shared_tokens - overhead))

    def make_text(self, number: int, tokens: int, shape: RequestShape | None = None) -> str:
        """The prompt of a request; at least one word, even if the endpoint's overhead exceeds `tokens`."""
        room = max(1, tokens - self._overhead)
        if shape is not None and shape.prefix_hashes and shape.prefix_block_tokens:
            words = self._make_prefix_blocks(shape, room)
        else:
            words = self._shared[: room - 1]
        room -= len(words)
        if room > 0:
            words = words + self.encode_number(number, first=not words)[:room]
            room = max(1, tokens - self._overhead) - len(words)
        if room > 0:
            words = words + self._draw_words(f"{self._origin}/{number}", room)
        return self._space + " ".join(words)

    def encode_number(self, number: int, first: bool) -> list[str]:
        """The request number encoded as words: consecutive requests differ in the first one."""
        orders = self._orders if first else [self._orders[1], *self._orders[1:]]
        words = []
        for order in orders:
            number, place = divmod(number, len(order))
            words.append(order[place])
        return words

    def _make_prefix_blocks(self, shape: RequestShape, room: int) -> list[str]:
        """Words for the prefix blocks of a trace: the same hash gives the same words."""
        words: list[str] = []
        for block in shape.prefix_hashes:
            if len(words) >= room:
                break
            words += self._draw_words(f"{self._origin}/block {block}", shape.prefix_block_tokens or 1)
        return words[:room]

    def _draw_words(self, origin: str, count: int) -> list[str]:
        return random.Random(origin).choices(self._words, k=count)  # noqa: S311
