"""Which replica gets a request: by chance, where the least is in flight, or where its beginning is cached already."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.cache import Holders

Router = Callable[[int], int]
"""A request's number to a replica's."""
PLACE_BITS = 20
STALE = 8
"""Entries for each replica from which on those that hold no longer are cleared away."""


class Loads:
    """What is in flight on each replica, and which has the least; of those that are alike, the first.

    A heap of loads with their replicas, in which old entries stay until they come to the top: with hundreds of
    replicas that is many times as fast as looking at all of them for each request.
    """

    __slots__ = ("_heap", "load")

    def __init__(self, replicas: int) -> None:
        self.load = [0] * replicas
        self._heap = list(range(replicas))

    def changed(self, place: int) -> None:
        """To be told after each change."""
        heap, load = self._heap, self.load
        if len(heap) > STALE * len(load) + STALE:
            heap[:] = [(one << PLACE_BITS) | number for number, one in enumerate(load)]
            heapify(heap)
        else:
            heappush(heap, (load[place] << PLACE_BITS) | place)

    def least(self) -> int:
        heap, load = self._heap, self.load
        while True:
            top = heap[0]
            place = top & ((1 << PLACE_BITS) - 1)
            if load[place] == top >> PLACE_BITS:
                return place
            heappop(heap)


def by_chance(replicas: int, seed: int) -> Router:
    # Not the traffic's own draws, which would choose a prompt's beginning and its replica alike.
    draw = random.Random(f"router {seed}").random  # noqa: S311
    return lambda rid: int(draw() * replicas)


def least_loaded(loads: Loads) -> Router:
    """Fewest requests in flight."""
    least = loads.least
    return lambda rid: least()


def prefix_aware(book: Book, loads: Loads, holders: Holders) -> Router:
    """The fewest tokens to be computed: what is in flight on a replica, and of the new prompt what it has not cached.

    A request in flight counts with the tokens of its prompt that were not cached, and with an average answer. Only
    those replicas are weighed that hold the longest part of its beginning, and the one with the least to do.
    """
    hashes = book.hashes
    if hashes is None:
        return least_loaded(loads)
    each, prompt, load, weight = book.hash_tokens, book.prompt, loads.load, book.weight
    answer = max(1, round(sum(book.output) / max(1, len(book.output))))

    def choose(rid: int) -> int:
        idlest = loads.least()
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
