"""The routers of a simulated fleet: random, least loaded, or by cached prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.cache import Holders

Router = Callable[[int], int]
"""Maps the number of a request to that of a replica."""
PLACE_BITS = 20
STALE = 8
"""Entries per replica above which stale entries are removed."""


class Loads:
    """The load of each replica, and the least loaded one; the first of equally loaded replicas.

    A heap of loads with their replicas, in which stale entries stay until they reach the top: with hundreds of
    replicas this is many times faster than a scan for each request.
    """

    __slots__ = ("_heap", "load")

    def __init__(self, replicas: int) -> None:
        self.load = [0] * replicas
        self._heap = list(range(replicas))

    def update_place(self, place: int) -> None:
        """Must be called after each change of a load."""
        heap, load = self._heap, self.load
        if len(heap) > STALE * len(load) + STALE:
            heap[:] = [(one << PLACE_BITS) | number for number, one in enumerate(load)]
            heapify(heap)
        else:
            heappush(heap, (load[place] << PLACE_BITS) | place)

    def find_least(self) -> int:
        heap, load = self._heap, self.load
        while True:
            top = heap[0]
            place = top & ((1 << PLACE_BITS) - 1)
            if load[place] == top >> PLACE_BITS:
                return place
            heappop(heap)


def make_random_router(replicas: int, seed: int) -> Router:
    # Independent of the traffic's random numbers; otherwise prefix and replica of a request would be correlated.
    draw = random.Random(f"router {seed}").random  # noqa: S311
    return lambda rid: int(draw() * replicas)


def make_least_loaded_router(loads: Loads) -> Router:
    """Routes to the replica with the fewest requests in flight."""
    least = loads.find_least
    return lambda rid: least()


def make_prefix_router(book: Book, loads: Loads, holders: Holders) -> Router:
    """Routes to the replica with the fewest tokens to compute: its requests in flight and the uncached new prompt.

    A request in flight counts with its uncached prompt tokens and an average output. Only the replicas that hold the
    longest part of the prefix and the least loaded replica are considered.
    """
    hashes = book.hashes
    if hashes is None:
        return make_least_loaded_router(loads)
    each, prompt, load, weight = book.hash_tokens, book.prompt, loads.load, book.weight
    answer = max(1, round(sum(book.output) / max(1, len(book.output))))

    def choose(rid: int) -> int:
        idlest = loads.find_least()
        best: set[int] | None = None
        known = 0
        for name in hashes[rid]:
            there = holders.get(name)
            if there is None:
                break
            best = there
            known += 1
        saved = min(known * each, prompt[rid])
        if best is not None:
            near = idlest if idlest in best else min(best, key=load.__getitem__)
            if load[near] - saved <= load[idlest]:
                weight[rid] = prompt[rid] - saved + answer
                return near
        weight[rid] = prompt[rid] + answer
        return idlest

    return choose
