"""A replica's prefix cache: unused blocks are kept until their memory is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Holders = dict[Hashable, set[int]]
"""The replicas that hold a block, as a router that receives the engines' cache events knows them."""


class PrefixCache:
    """Prompt prefixes by their hashes, each a fixed number of blocks of the engine's cache."""

    __slots__ = ("_holders", "_idle", "_replica", "_used", "blocks_each", "idle_blocks")

    def __init__(self, blocks_each: int, replica: int, holders: Holders | None = None) -> None:
        self.blocks_each = blocks_each
        self.idle_blocks = 0
        """Blocks that no request uses and that may be evicted."""
        self._used: dict[Hashable, int] = {}
        """The number of requests that use each block."""
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._replica = replica
        self._holders = holders

    def find_leading(self, hashes: Sequence[Hashable], most: int) -> tuple[int, int]:
        """How many of a prompt's first blocks are cached, and how many of these no request uses now."""
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
        """Count one more request for these blocks, all of which must be cached."""
        used, idle = self._used, self._idle
        for name in hashes:
            if name in used:
                used[name] += 1
            else:
                del idle[name]
                used[name] = 1
                self.idle_blocks -= self.blocks_each

    def put(self, hashes: Sequence[Hashable]) -> list[Hashable]:
        """Add computed blocks, except those that another request has added in the meantime; returns the added ones."""
        used, idle, holders = self._used, self._idle, self._holders
        taken = [name for name in hashes if name not in used and name not in idle]
        for name in taken:
            used[name] = 1
            if holders is not None:
                holders.setdefault(name, set()).add(self._replica)
        return taken

    def drop(self, names: Sequence[Hashable]) -> int:
        """Release a request's blocks; returns how many no request uses now."""
        used, idle = self._used, self._idle
        freed = 0
        # In reverse, so that the end of a prompt is evicted before its beginning, without which it is useless.
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
        """Evict the least recently used blocks until at most this many are unused."""
        idle, holders = self._idle, self._holders
        while self.idle_blocks > most_blocks:
            name, _ = idle.popitem(last=False)
            self.idle_blocks -= self.blocks_each
            if holders is not None:
                there = holders[name]
                there.discard(self._replica)
                if not there:
                    del holders[name]
