"""A replica's prefix cache: blocks that nobody uses any more are kept until their room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Holders = dict[Hashable, set[int]]
"""Which replicas hold a block: what a router with an ear to the engines' events knows."""


class PrefixCache:
    """Prompts' beginnings by their hashes, each a fixed number of blocks of the engine's cache."""

    __slots__ = ("_holders", "_idle", "_replica", "_used", "blocks_each", "idle_blocks")

    def __init__(self, blocks_each: int, replica: int, holders: Holders | None = None) -> None:
        self.blocks_each = blocks_each
        self.idle_blocks = 0
        """That no request uses: they may be forgotten."""
        self._used: dict[Hashable, int] = {}
        """By how many requests."""
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._replica = replica
        self._holders = holders

    def leading(self, hashes: Sequence[Hashable], most: int) -> tuple[int, int]:
        """How many of a prompt's first blocks are there, and how many of them nobody uses now."""
        used, idle = self._used, self._idle
        found = idling = 0
        for name in hashes:
            if found == most:
                break
            if name in idle:
                idling += 1
            elif name not in used:
                break
            found += 1
        return found, idling

    def hold(self, hashes: Sequence[Hashable]) -> None:
        """One more request uses these, all of which are there."""
        used, idle = self._used, self._idle
        for name in hashes:
            if name in used:
                used[name] += 1
            else:
                del idle[name]
                used[name] = 1
                self.idle_blocks -= self.blocks_each

    def put(self, hashes: Sequence[Hashable]) -> list[Hashable]:
        """A request has computed these; those that another one put in meanwhile stay the other's."""
        used, idle, holders = self._used, self._idle, self._holders
        taken = [name for name in hashes if name not in used and name not in idle]
        for name in taken:
            used[name] = 1
            if holders is not None:
                holders.setdefault(name, set()).add(self._replica)
        return taken

    def drop(self, names: Sequence[Hashable]) -> int:
        """A request leaves; returns the blocks that nobody uses now."""
        used, idle = self._used, self._idle
        freed = 0
        # Backwards, so that a prompt's end is forgotten before its beginning, without which it is of no use.
        for name in reversed(names):
            if used[name] == 1:
                del used[name]
                idle[name] = None
                freed += 1
            else:
                used[name] -= 1
        self.idle_blocks += freed * self.blocks_each
        return freed * self.blocks_each

    def shrink(self, most_blocks: int) -> None:
        """Forgets what was used longest ago until no more than this lies idle."""
        idle, holders = self._idle, self._holders
        while self.idle_blocks > most_blocks:
            name, _ = idle.popitem(last=False)
            self.idle_blocks -= self.blocks_each
            if holders is not None:
                there = holders[name]
                there.discard(self._replica)
                if not there:
                    del holders[name]
