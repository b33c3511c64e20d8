"""One served model: the engines that answer for it, which of them gets a request, and who waits for one."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from bedplate.run.gateway.fair import SMOOTHING, FairQueue, Line
from bedplate.run.gateway.tenants import Unaccepted
from bedplate.run.gateway.upstream import EnginePool
from bedplate.run.gateway.watch import Meter, Meters

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import Backend
    from bedplate.run.gateway.exchange import Exchange

MUCH_MORE_LOADED = 4
"""Requests that a conversation's own replica may have in flight beyond the least loaded one and still be chosen."""
MOST_CREDIT = 8
"""Requests that a backend without room may be owed for its share, to get them when it has room again."""
MAX_WAITING_BYTES = 1_000_000_000
"""Bodies of requests that wait for an engine, in all."""
MOST_HELD = 256
HELD_S = 300.0
"""How many requests wait for an engine that is started on demand, and for how long."""
RETRY_AFTER_S = 5
LONGEST_RETRY_AFTER_S = 60


class Hold(NamedTuple):
    """While an engine is changed: how many requests wait, and for how long."""

    most: int
    wait_s: float
    until_ready: bool
    """Whether it ends by itself when there is an engine."""


class Way:
    """One backend with its connections and figures."""

    __slots__ = ("backend", "drained", "meter", "number", "pool", "removed")

    def __init__(self, backend: Backend, meters: Meters) -> None:
        self.backend = backend
        self.pool = EnginePool(backend)
        self.meter = meters.meter(backend.model, backend.engine)
        self.number = random.getrandbits(64)
        """What its place among the replicas of a conversation is by; chance, and no secret."""
        self.drained = asyncio.Event()
        self.removed = False

    def limit(self, by_slots: bool) -> int | None:
        """Requests that may be in it at once."""
        limit, slots = self.backend.max_connections, self.backend.slots
        if not by_slots or slots is None:
            return limit
        return slots if limit is None or slots < limit else limit

    def has_room(self, by_slots: bool) -> bool:
        limit = self.limit(by_slots)
        return limit is None or self.pool.active < limit


class Route:
    """The way to one model. Whatever waits, waits here, and goes when there is room in an engine and it is its turn."""

    def __init__(self, model: str, meters: Meters) -> None:
        self.model = model
        self.ways: list[Way] = []
        self.is_ready = False
        """Whether any backend takes new requests."""
        self.aliases: frozenset[str] = frozenset([model.lower()])
        """What it is called, whether an engine is there or not."""
        self.names: frozenset[str] = self.aliases
        self.allowed: frozenset[str] | None = None
        """The tenants that may use it; `None`: all of them."""
        self.on_demand = False
        """Whether an engine for it is started when somebody asks."""
        self.wanted = False
        """Whether somebody was told that it is needed."""
        self.want: Callable[[], None] = lambda: None
        self.held: Hold | None = None
        self.by_slots = False
        """Whether several tenants share the engines, so that nothing may wait inside of them."""
        self.max_wait_s: float | None = None
        self._meters = meters
        self.waiting: FairQueue[Exchange] = FairQueue()
        self.waiting_bytes = 0
        self._credits: dict[tuple[str, float], float] = {}
        self._service_s: float | None = None
        self._draining = False

    # who is there

    @property
    def backends(self) -> list[Backend]:
        return [way.backend for way in self.ways]

    @property
    def in_flight(self) -> int:
        return sum(way.backend.in_flight for way in self.ways)

    def meter_of_none(self) -> Meter:
        """For requests that come while no engine is there."""
        return self._meters.meter(self.model, "none")

    def add(self, way: Way) -> None:
        self.ways.append(way)
        self.names |= way.backend.names
        way.backend.changed = self._changed
        way.pool.freed = self.look
        self._changed(way.backend)

    def drop(self, way: Way) -> None:
        self.ways.remove(way)
        self.names = self.aliases.union(*(one.backend.names for one in self.ways))
        way.backend.changed = None
        self._changed(way.backend)

    def _changed(self, backend: Backend) -> None:
        self._credits.clear()
        self.is_ready = any(way.backend.takes_new for way in self.ways)
        if self.is_ready:
            self.wanted = False
            if self.held is not None and self.held.until_ready:
                self.held = None
        self.look()

    # what is asked of it

    def unaccepted(self, line: Line[Exchange], num_bytes: int) -> Unaccepted | None:
        """Why a request cannot be taken now; nothing is lost of one that is."""
        if not self.is_ready and self.on_demand and self.held is None:
            self.hold(MOST_HELD, HELD_S, until_ready=True)
        if self.held is not None or not self.is_ready:
            return self._unheld()
        if self.waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            message = f"too much waits for {self.model} already"
            return Unaccepted(503, message, "overloaded", RETRY_AFTER_S)
        wait_s = self.expected_wait_s(line)
        if wait_s is not None and self.max_wait_s is not None and wait_s > self.max_wait_s:
            message = (
                f"{self.model} is busy: a request would wait for about {wait_s:.0f} s, more than the "
                f"{self.max_wait_s:g} s that are allowed"
            )
            after_s = min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(wait_s - self.max_wait_s)))
            return Unaccepted(429, message, "overloaded", after_s)
        return None

    def _unheld(self) -> Unaccepted | None:
        """Nothing when the request may be held until there is an engine."""
        if self.held is None:
            if not self.ways:
                return Unaccepted(503, f"no engine is running for {self.model}", "not_running", RETRY_AFTER_S)
            backend = self.ways[0].backend
            if backend.state == "ready":
                return Unaccepted(503, f"{backend.engine} is being replaced", "engine_draining", RETRY_AFTER_S)
            return Unaccepted(503, backend.unavailable(), f"engine_{backend.state}", backend.retry_after_s)
        if len(self.waiting) >= self.held.most:
            message = f"{self.model} has no engine at this moment, and {self.held.most} requests wait for one already"
            return Unaccepted(503, message, "held_full", RETRY_AFTER_S)
        return None

    @property
    def is_free(self) -> bool:
        """Whether a request can be taken without a further look."""
        return self.is_ready and self.held is None and not self.waiting.count

    def expected_wait_s(self, line: Line[Exchange]) -> float | None:
        """About how long a new request of this tenant would wait, from how long requests took lately."""
        if not self.waiting:
            return 0.0
        if not self._service_s:
            return None
        waiting = [other for other in self.waiting.lines() if other.queue or other is line]
        share = line.weight / sum(other.weight for other in waiting)
        per_s = max(1, self.in_flight) / self._service_s * share
        return (len(line.queue) + 1) / per_s

    def take(self, exchange: Exchange) -> None:
        """Sends it to an engine, now or when it is its turn."""
        waiting = self.waiting
        # Seats are only kept where there is somebody else to keep them for.
        if (
            self.held is None
            and not waiting.count
            and (not (self.by_slots and waiting.is_shared) or self._may_pass(exchange.line))
        ):
            way = self._choose(exchange)
            if way is not None:
                self._send(exchange, way, exchange.sent_at)
                return
        self._wait(exchange)
        if self.on_demand and not self.is_ready:
            self.await_engine()

    def again(self, exchange: Exchange) -> None:
        """The same request once more, before all others of its tenant."""
        way = self._choose(exchange) if self.held is None else None
        if way is not None:
            self._send(exchange, way, monotonic())
        elif self.held is not None or self.is_ready:
            self._wait(exchange, first=True)
        else:
            self._end(exchange)

    def another_than(self, tried: list[Backend]) -> bool:
        """Whether there is a backend that has not been tried, or not often enough."""
        return any(way.backend.takes_new and tried.count(way.backend) < way.backend.attempts for way in self.ways)

    def forget(self, exchange: Exchange) -> None:
        """The client of a waiting request went away."""
        if self.waiting.leave(exchange.line, exchange):
            self.waiting_bytes -= exchange.num_bytes
            self.look()

    def has_read(self, exchange: Exchange) -> None:
        """Its first token is here, or none will come from the engine that it is at."""
        if not exchange.reading:
            return
        exchange.reading = False
        exchange.line.reading -= 1
        if self.waiting.count:
            self.look()

    def left(self, exchange: Exchange, way: Way) -> None:
        """A request that was in an engine goes to another."""
        self.has_read(exchange)
        self.waiting.left(exchange.line, exchange.cost_tokens)
        self._freed(way, monotonic())

    def ended(self, exchange: Exchange, way: Way, cost_tokens: float | None, now: float) -> None:
        """A request that was in an engine is over; `cost_tokens` is what it did cost, where that is known."""
        self.has_read(exchange)
        self.waiting.ended(exchange.line, exchange.cost_tokens, cost_tokens)
        if cost_tokens:
            took_s = now - exchange.sent_at
            self._service_s = (
                took_s if not self._service_s else self._service_s + SMOOTHING * (took_s - self._service_s)
            )
        self._freed(way, now)

    def _freed(self, way: Way, now: float) -> None:
        backend = way.backend
        backend.in_flight -= 1
        backend.last_used = now
        if way.removed and not backend.in_flight:
            way.drained.set()
        if self.waiting.count:
            self.look()

    def hold(self, most: int, wait_s: float, *, until_ready: bool = False) -> None:
        self.held = Hold(most, wait_s, until_ready)

    def await_engine(self) -> None:
        """Requests wait for an engine that is started on demand, and somebody is told to start it."""
        if self.held is None:
            self.hold(MOST_HELD, HELD_S, until_ready=True)
        if self.held is not None and self.held.until_ready and not self.wanted:
            self.wanted = True
            self.want()

    def release(self) -> None:
        self.held = None
        self.look()

    def give_up(self, message: str, code: str, retry_after_s: int) -> None:
        """Answers everything that waits: there will be no engine for it."""
        self.held = None
        self.wanted = False
        for exchange in self._all_waiting():
            exchange.not_served(message, code, retry_after_s)

    def tick(self, now: float) -> None:
        """Once in a while: what waited for too long is told so, and whoever is gone is forgotten."""
        if self.held is not None:
            for line in self.waiting.lines():
                for exchange in [one for one in line.queue if now - one.joined_at > self.held.wait_s]:
                    if self.waiting.leave(line, exchange):
                        self.waiting_bytes -= exchange.num_bytes
                        message = f"no engine was ready for {self.model} within {self.held.wait_s:g} s"
                        exchange.not_served(message, "held_too_long", RETRY_AFTER_S)
        self.waiting.forget_idle(now)
        self.look()

    # whose turn it is

    def look(self) -> None:
        """Something may be able to go. Through the loop, so that what has just ended is counted as ended."""
        if self.waiting.count and not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._draining = False
        if self.held is not None:
            return
        if not self.is_ready:
            if self.on_demand:
                self.await_engine()
                return
            for exchange in self._all_waiting():
                self._end(exchange)
            return
        now = monotonic()
        while self.waiting and self._has_room():
            seats, free = self._seats()
            found = self.waiting.take(free, seats, now)
            if found is None:
                return
            _, exchange = found
            self.waiting_bytes -= exchange.num_bytes
            if exchange.over:
                continue
            way = self._choose(exchange)
            if way is not None:
                self._send(exchange, way, now)
            elif self.another_than(exchange.tried):
                self._join(exchange, first=True)  # until there is room in one that it has not tried
                return
            else:
                self._end(exchange)

    def _wait(self, exchange: Exchange, *, first: bool = False) -> None:
        exchange.joined_at = monotonic()
        self._join(exchange, first=first)
        self.look()

    def _join(self, exchange: Exchange, *, first: bool) -> None:
        self.waiting_bytes += exchange.num_bytes
        self.waiting.join(exchange.line, exchange, monotonic(), first=first)

    def _all_waiting(self) -> list[Exchange]:
        found = []
        for line in self.waiting.lines():
            for exchange in list(line.queue):
                self.waiting.leave(line, exchange)
                self.waiting_bytes -= exchange.num_bytes
                found.append(exchange)
        return found

    def _end(self, exchange: Exchange) -> None:
        """There is no engine for a request that was taken."""
        why = self._unheld()
        if why is None:
            why = Unaccepted(503, f"no engine is running for {self.model}", "not_running", RETRY_AFTER_S)
        exchange.not_served(why.message, why.code, why.retry_after_s)

    def _send(self, exchange: Exchange, way: Way, now: float) -> None:
        backend = way.backend
        if backend.begun is not None:
            backend.begun()
        backend.in_flight += 1
        backend.last_used = now
        backend.health.sent()
        self.waiting.seated(exchange.line, exchange.cost_tokens, now)
        if exchange.streams:  # of others nobody knows when their prompts are read
            exchange.reading = True
            exchange.line.reading += 1
        exchange.sent_to(way, now)
        way.pool.take(exchange)

    def _has_room(self) -> bool:
        return any(way.has_room(self.by_slots) for way in self._able(()))

    def _able(self, tried: Sequence[Backend]) -> list[Way]:
        """Backends that take new requests and are well; when none is well, all are as good as each other."""
        able = [way for way in self.ways if way.backend.takes_new and tried.count(way.backend) < way.backend.attempts]
        if len(able) < 2:
            return able
        now = monotonic()
        return [way for way in able if way.backend.health.may_try(now)] or able

    def _seats(self) -> tuple[int | None, int | None]:
        """Requests that the engines take at once, and how many more that are now; nothing where there is no bound."""
        if not self.by_slots:
            return None, None
        seats = free = 0
        for way in self.ways:
            if way.backend.takes_new:
                limit = way.limit(True)
                if limit is None:
                    return None, None
                seats += limit
                free += max(0, limit - way.pool.active)
        return seats, free

    def _may_pass(self, line: Line[Exchange]) -> bool:
        seats, free = self._seats()
        return seats is None or free is None or self.waiting.may_pass(line, free, seats, monotonic())

    # which engine

    def _choose(self, exchange: Exchange) -> Way | None:
        """A backend with room that takes new requests, by share first, and among replicas by prefix and load."""
        if len(self.ways) == 1 and not exchange.tried:
            way = self.ways[0]
            return way if self.is_ready and way.has_room(self.by_slots) else None
        able = self._able(exchange.tried)
        with_room = [way for way in able if way.has_room(self.by_slots)]
        if len(able) < 2 or not with_room:
            return with_room[0] if with_room else None
        group = self._next_group(able, with_room)
        return self._best([way for way in with_room if (way.backend.group, way.backend.share) == group], exchange)

    def _next_group(self, able: list[Way], with_room: list[Way]) -> tuple[str, float]:
        """Smooth weighted round robin over groups of replicas: exact proportions, evenly spread."""
        weights: dict[tuple[str, float], float] = {}
        for way in able:
            key = (way.backend.group, way.backend.share)
            weights[key] = weights.get(key, 0.0) + way.backend.share
        if len(weights) == 1:
            return next(iter(weights))
        whole = sum(weights.values())
        for key, weight in weights.items():
            self._credits[key] = min(self._credits.get(key, 0.0) + weight, MOST_CREDIT * whole)
        open_keys = {(way.backend.group, way.backend.share) for way in with_room}
        chosen = max((key for key in weights if key in open_keys), key=self._credits.__getitem__)
        self._credits[chosen] -= whole
        return chosen

    @staticmethod
    def _best(replicas: list[Way], exchange: Exchange) -> Way:
        """The replica that has seen this conversation, unless it has much more to do than the least loaded one."""
        if len(replicas) == 1:
            return replicas[0]
        least = min(replicas, key=lambda way: way.backend.in_flight)
        prefix = exchange.affinity
        if prefix is None:
            return least
        own = max(replicas, key=lambda way: _mixed(prefix ^ way.number))
        return own if own.backend.in_flight <= least.backend.in_flight + MUCH_MORE_LOADED else least


def _mixed(number: int) -> int:
    """A number of 64 bits, all of whose bits depend on all of the given ones: the last steps of SplitMix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 31
