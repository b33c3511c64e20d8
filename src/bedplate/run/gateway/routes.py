"""The route of one model: its engines, which of them gets a request, and the queue of requests that wait."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from bedplate.run.gateway.fair import SMOOTHING, FairQueue, TenantQueue
from bedplate.run.gateway.model_name import ServedName
from bedplate.run.gateway.tenants import Rejection, reject_sequences
from bedplate.run.gateway.upstream import EnginePool
from bedplate.run.gateway.watch import EngineMeter, GatewayMetrics
from bedplate.values.capabilities import Capabilities, merge_capabilities

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.exchange import GatewayExchange
    from bedplate.run.gateway.tenants import TenantState

MUCH_MORE_LOADED = 4
"""A conversation stays on its replica while that has at most this many more requests in flight than the least loaded
one."""
MOST_CREDIT = 8
"""Limit of the requests that a backend without a free slot is owed for its share and gets once it has one."""
MAX_WAITING_BYTES = 1_000_000_000
"""Limit of the bodies of all requests that wait for an engine."""
MOST_HELD = 256
HELD_S = 300.0
"""Limits of the requests that wait for an engine that is loaded on demand: their number, and how long each waits."""
RETRY_AFTER_S = 5
LONGEST_RETRY_AFTER_S = 60


class Hold(NamedTuple):
    """Requests are queued while an engine is replaced: at most `most`, each for at most `wait_s`."""

    most: int
    wait_s: float
    until_ready: bool
    """Whether it ends as soon as an engine is ready."""


class SlotCount(NamedTuple):
    """The slots of a route's engines."""

    all: int
    free: int
    largest: int
    """Of the engine with the most slots."""
    room: int
    """The most that are free in one engine."""


class BackendLink:
    """One backend of a route, with its connection pool and metrics."""

    __slots__ = ("additional_sequences", "backend", "drained", "meter", "number", "pool", "removed")

    def __init__(self, backend: GatewayBackend, meters: GatewayMetrics) -> None:
        self.backend = backend
        self.pool = EnginePool(backend)
        self.meter = meters.get_meter(backend.model, backend.engine)
        self.number = random.getrandbits(64)
        """Orders the replicas for a conversation (rendezvous hashing); random, not secret."""
        self.drained = asyncio.Event()
        self.removed = False
        self.additional_sequences = 0
        """Sequences of its requests beyond one for each."""

    def get_limit(self, by_slots: bool) -> int | None:
        """The number of requests that may be sent to it concurrently; `None`: no limit."""
        limit, slots = self.backend.max_connections, self.backend.slots
        if not by_slots or slots is None:
            return limit
        return slots if limit is None or slots < limit else limit

    def has_room(self, by_slots: bool, sequences: int = 1) -> bool:
        limit = self.backend.slots if by_slots else None
        if limit is None or self.backend.max_connections is not None:
            limit = self.get_limit(by_slots)
        if limit is None:
            return True
        if not by_slots:
            return self.pool.active < limit
        return self.pool.active + self.additional_sequences + sequences <= limit


class Route:
    """All requests for one model. They wait here until an engine has a free slot and the fair queue selects them."""

    def __init__(self, model: str, meters: GatewayMetrics) -> None:
        self.model = model
        self.served_name = ServedName(model)
        self.links: list[BackendLink] = []
        self.is_ready = False
        """Whether any backend accepts new requests."""
        self.aliases: frozenset[str] = frozenset([model.lower()])
        """Names of the model that do not depend on its backends."""
        self.names: frozenset[str] = self.aliases
        self.capabilities: Capabilities | None = None
        """What at least one of its engines supports; `None`: not known."""
        self.allowed: frozenset[str] | None = None
        """The tenants that may use it; `None`: all of them."""
        self.on_demand = False
        """Whether a request for the model starts an engine."""
        self.held_s = HELD_S
        """How long a request waits for that engine."""
        self.wanted = False
        """Whether `want` has been called for the engine that requests wait for."""
        self.want: Callable[[], None] = lambda: None
        self.held: Hold | None = None
        self.by_slots = False
        """Whether several tenants share the engines: an engine then gets no more requests than it has slots."""
        self.max_wait_s: float | None = None
        self._meters = meters
        self.waiting: FairQueue[GatewayExchange] = FairQueue()
        self.waiting_bytes = 0
        self.request_fields: frozenset[str] | None = None
        """Fields for length and count that an engine of it understands; `None`: not known."""
        self.request_limits: Mapping[str, int] = {}
        self._credits: dict[tuple[str, float], float] = {}
        self._service_s: float | None = None
        self._draining = False

    # backends

    @property
    def backends(self) -> list[GatewayBackend]:
        return [link.backend for link in self.links]

    @property
    def in_flight(self) -> int:
        return sum(link.backend.in_flight for link in self.links)

    def may_be_used_by(self, member: TenantState) -> bool:
        return self.allowed is None or member.is_admin or member.name in self.allowed

    def get_meter_without_engine(self) -> EngineMeter:
        """The meter for requests that arrive while the model has no engine."""
        return self._meters.get_meter(self.model, "none")

    def add(self, link: BackendLink) -> None:
        self.links.append(link)
        self.names |= link.backend.names
        link.backend.changed = self._update_readiness
        link.backend.drop_requests = link.pool.drop_requests
        link.pool.freed = self.schedule_dispatch
        self._update_request_fields()
        self._update_readiness(link.backend)

    def drop(self, link: BackendLink) -> None:
        self.links.remove(link)
        self.names = self.aliases.union(*(one.backend.names for one in self.links))
        link.backend.changed = link.backend.drop_requests = None
        self._update_request_fields()
        self._update_readiness(link.backend)

    def _update_request_fields(self) -> None:
        """A field that one of several engines understands is accepted: while engines change, no client gets an error.

        The engine that ignores it generates less or more than expected, and the charge is corrected at the end.
        """
        known = [link.backend.requests for link in self.links if link.backend.requests is not None]
        all_known = bool(known) and len(known) == len(self.links)
        self.request_fields = frozenset().union(*(one.fields for one in known)) if all_known else None
        self.request_limits = {name: limit for one in known for name, limit in one.limits.items()}

    def _update_readiness(self, backend: GatewayBackend) -> None:
        self._credits.clear()
        open_links = [link for link in self.links if link.backend.takes_new]
        self.is_ready = bool(open_links)
        self.capabilities = merge_capabilities([link.backend.capabilities for link in open_links or self.links])
        if self.is_ready:
            self.wanted = False
            if self.held is not None and self.held.until_ready:
                self.held = None
        self.schedule_dispatch()

    # requests

    def check_admission(self, line: TenantQueue[GatewayExchange], num_bytes: int) -> Rejection | None:
        """Why a request cannot be accepted now; `None` where it can."""
        if not self.is_ready and self.on_demand and self.held is None:
            self.hold(MOST_HELD, self.held_s, until_ready=True)
        if self.held is not None or not self.is_ready:
            return self._check_hold()
        if self.waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            message = f"the requests that wait for {self.model} already hold {self.waiting_bytes:,} bytes"
            return Rejection(503, message, "overloaded", RETRY_AFTER_S)
        wait_s = self.estimate_wait_s(line)
        if wait_s is not None and self.max_wait_s is not None and wait_s > self.max_wait_s:
            message = (
                f"{self.model} is overloaded: the expected wait is {wait_s:.0f} s, longer than the limit of "
                f"{self.max_wait_s:g} s"
            )
            after_s = min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(wait_s - self.max_wait_s)))
            return Rejection(429, message, "overloaded", after_s)
        return None

    def check_sequences(self, line: TenantQueue[GatewayExchange], sequences: int) -> Rejection | None:
        """Why tenants that share the engines cannot run so many sequences in one request; `None` where they can.

        A request is not split: its slots are held until all of its sequences have ended, so it may have no more than
        the tenant's share of an engine.
        """
        count = self._count_slots() if sequences > 1 else None
        if count is None or not count.largest:
            return None
        largest = count.largest
        if sequences > largest:
            return reject_sequences(sequences, largest, "the sequences that an engine of this model runs at once are")
        share = self.waiting.count_share(line, largest, monotonic())
        if share is not None and sequences > share:
            message = (
                f"this request makes {sequences} sequences, and while other tenants use {self.model}, {share} of "
                f"{largest} slots are this tenant's share: send at most {share} in one request, or retry later"
            )
            return Rejection(429, message, "too_many_sequences", RETRY_AFTER_S)
        return None

    def _check_hold(self) -> Rejection | None:
        """Why a request cannot wait for an engine; `None` where it can."""
        if self.held is None:
            if not self.links:
                return Rejection(503, f"no engine is running for {self.model}", "not_running", RETRY_AFTER_S)
            backend = self.links[0].backend
            if backend.state == "ready":
                return Rejection(503, f"{backend.engine} is being replaced", "engine_draining", RETRY_AFTER_S)
            return Rejection(503, backend.explain_unavailable(), f"engine_{backend.state}", backend.retry_after_s)
        if len(self.waiting) >= self.held.most:
            message = f"no engine is ready for {self.model}, and {self.held.most} requests already wait for one"
            return Rejection(503, message, "held_full", RETRY_AFTER_S)
        return None

    def estimate_wait_s(self, line: TenantQueue[GatewayExchange]) -> float | None:
        """The expected wait of a new request of this tenant, from the durations of recent requests."""
        if not self.waiting:
            return 0.0
        if not self._service_s:
            return None
        waiting = [other for other in self.waiting.list_queues() if other.queue or other is line]
        share = line.weight / sum(other.weight for other in waiting)
        per_s = max(1, self.in_flight) / self._service_s * share
        return (len(line.queue) + 1) / per_s

    def take(self, exchange: GatewayExchange) -> None:
        """Sends the request to an engine, now or after those before it."""
        waiting = self.waiting
        # Slots are reserved only where several tenants share the engines.
        if (
            self.held is None
            and not waiting.count
            and (not (self.by_slots and waiting.is_shared) or self._may_pass(exchange.line, exchange.sequences))
        ):
            link = self._choose(exchange)
            if link is not None:
                self._send(exchange, link, exchange.sent_at)
                return
        self._wait(exchange)
        if self.on_demand and not self.is_ready:
            self.await_engine()

    def retry(self, exchange: GatewayExchange) -> None:
        """Sends the request again, before all others of its tenant."""
        link = self._choose(exchange) if self.held is None else None
        if link is not None:
            self._send(exchange, link, monotonic())
        elif self.held is not None or self.is_ready:
            self._wait(exchange, first=True)
        else:
            self._answer_unavailable(exchange)

    def wait_for_endpoint(self, exchange: GatewayExchange) -> None:
        """Keeps a request whose endpoint could not be reached until one can. Its time to wait began when it arrived."""
        self._join(exchange, first=True)
        self.await_engine()

    def has_untried_backend(self, tried: Sequence[GatewayBackend]) -> bool:
        """Whether a backend has not been tried yet, or fewer times than its `attempts`."""
        return any(link.backend.takes_new and tried.count(link.backend) < link.backend.attempts for link in self.links)

    def remove_waiting(self, exchange: GatewayExchange) -> None:
        """Removes a waiting request whose client disconnected."""
        if self.waiting.withdraw(exchange.line, exchange):
            self.waiting_bytes -= exchange.num_bytes
            self.schedule_dispatch()

    def end_prefill(self, exchange: GatewayExchange) -> None:
        """Counts the request's prefill as ended: its first token arrived, or none will come from this engine."""
        if not exchange.prefilling:
            return
        exchange.prefilling = False
        exchange.line.prefilling -= 1
        if self.waiting.count:
            self.schedule_dispatch()

    def release_for_retry(self, exchange: GatewayExchange, link: BackendLink) -> None:
        """Frees the slot of a request that will be sent to another engine."""
        self.end_prefill(exchange)
        self.waiting.refund(exchange.line, exchange.cost_tokens, exchange.sequences)
        self._free_slots(link, exchange.sequences, monotonic())

    def release_slot(self, exchange: GatewayExchange, link: BackendLink, cost_tokens: float | None, now: float) -> None:
        """Frees the slot of a request that has ended; `cost_tokens` is its actual cost, where known."""
        if exchange.prefilling:
            self.end_prefill(exchange)
        self.waiting.settle_charge(exchange.line, exchange.cost_tokens, cost_tokens, exchange.sequences)
        if cost_tokens:
            took_s, before_s = now - exchange.sent_at, self._service_s
            self._service_s = before_s + SMOOTHING * (took_s - before_s) if before_s else took_s
        self._free_slots(link, exchange.sequences, now)

    def estimate_progress(self, took_s: float) -> float:
        """How much of an answer of usual length exists after so many seconds, by the durations of recent requests."""
        return took_s / self._service_s if self._service_s else 1.0

    def _free_slots(self, link: BackendLink, sequences: int, now: float) -> None:
        backend = link.backend
        link.additional_sequences -= sequences - 1
        backend.in_flight -= 1
        backend.last_used = now
        if link.removed and not backend.in_flight:
            link.drained.set()
        if self.waiting.count:
            self.schedule_dispatch()

    def hold(self, most: int, wait_s: float, *, until_ready: bool = False) -> None:
        self.held = Hold(most, wait_s, until_ready)

    def await_engine(self) -> None:
        """Holds requests until the engine is ready, and has it started."""
        if self.held is None:
            self.hold(MOST_HELD, self.held_s, until_ready=True)
        if self.held is not None and self.held.until_ready and not self.wanted:
            self.wanted = True
            self.want()

    def release(self) -> None:
        self.held = None
        self.schedule_dispatch()

    def give_up(self, message: str, code: str, retry_after_s: int) -> None:
        """Answers all waiting requests with 503, since no engine will start."""
        self.held = None
        self.wanted = False
        for exchange in self._remove_all_waiting():
            exchange.reject_unserved(message, code, retry_after_s)

    def expire_waiting(self, now: float) -> None:
        """Rejects requests that waited too long, and forgets idle tenants. Called once a second."""
        if self.held is not None:
            for line in self.waiting.list_queues():
                for exchange in [one for one in line.queue if now - one.joined_at > self.held.wait_s]:
                    if self.waiting.withdraw(line, exchange):
                        self.waiting_bytes -= exchange.num_bytes
                        message = f"no engine was ready for {self.model} within {self.held.wait_s:g} s"
                        exchange.reject_unserved(message, "held_too_long", RETRY_AFTER_S)
        self.waiting.forget_idle(now)
        self.schedule_dispatch()

    # the queue

    def schedule_dispatch(self) -> None:
        """Schedules a pass over the queue. Through the loop, so that a request that just ended is counted as ended."""
        if self.waiting.count and not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._dispatch_waiting)

    def _dispatch_waiting(self) -> None:
        self._draining = False
        if self.held is not None:
            return
        if not self.is_ready:
            if self.on_demand:
                self.await_engine()
                return
            for exchange in self._remove_all_waiting():
                self._answer_unavailable(exchange)
            return
        now = monotonic()
        while self.waiting and self._has_room():
            count = self._count_slots()
            found = (
                self.waiting.take(None, None, now)
                if count is None
                else self.waiting.take(count.free, count.all, now, count.room, count.largest)
            )
            if found is None:
                return
            _, exchange = found
            self.waiting_bytes -= exchange.num_bytes
            if exchange.over:
                continue
            if (why := self.check_sequences(exchange.line, exchange.sequences)) is not None:
                exchange.reject(why)
                continue
            link = self._choose(exchange)
            if link is not None:
                self._send(exchange, link, now)
            elif self.has_untried_backend(exchange.tried):
                self._join(exchange, first=True)  # until a backend that it has not tried has a free slot
                return
            else:
                self._answer_unavailable(exchange)

    def _wait(self, exchange: GatewayExchange, *, first: bool = False) -> None:
        exchange.joined_at = monotonic()
        self._join(exchange, first=first)
        self.schedule_dispatch()

    def _join(self, exchange: GatewayExchange, *, first: bool) -> None:
        self.waiting_bytes += exchange.num_bytes
        self.waiting.add(exchange.line, exchange, monotonic(), first=first)

    def _remove_all_waiting(self) -> list[GatewayExchange]:
        found = []
        for line in self.waiting.list_queues():
            for exchange in list(line.queue):
                self.waiting.withdraw(line, exchange)
                self.waiting_bytes -= exchange.num_bytes
                found.append(exchange)
        return found

    def _answer_unavailable(self, exchange: GatewayExchange) -> None:
        """Answers an accepted request for which no engine runs."""
        why = self._check_hold()
        if why is None:
            why = Rejection(503, f"no engine is running for {self.model}", "not_running", RETRY_AFTER_S)
        exchange.reject_unserved(why.message, why.code, why.retry_after_s)

    def _send(self, exchange: GatewayExchange, link: BackendLink, now: float) -> None:
        backend = link.backend
        if backend.begun is not None:
            backend.begun()
        backend.sent += 1
        backend.in_flight += 1
        backend.last_used = now
        if backend.health.failures:
            backend.health.record_sent()
        link.additional_sequences += exchange.sequences - 1
        self.waiting.charge_sent(exchange.line, exchange.cost_tokens, now, exchange.sequences)
        if exchange.streams:  # the end of an unstreamed request's prefill is not visible
            exchange.prefilling = True
            exchange.line.prefilling += 1
        exchange.mark_sent(link, now)
        link.pool.take(exchange)

    def _has_room(self) -> bool:
        return any(link.has_room(self.by_slots) for link in self._list_usable(()))

    def _list_usable(self, tried: Sequence[GatewayBackend]) -> list[BackendLink]:
        """Healthy backends that accept new requests; all that accept requests when none is healthy."""
        usable = [
            link for link in self.links if link.backend.takes_new and tried.count(link.backend) < link.backend.attempts
        ]
        if len(usable) < 2:
            return usable
        now = monotonic()
        return [link for link in usable if link.backend.health.can_try(now)] or usable

    def _count_slots(self) -> SlotCount | None:
        """`None` where the number of requests is not limited by slots."""
        if not self.by_slots:
            return None
        slots = free = largest = room = 0
        for link in self.links:
            if link.backend.takes_new:
                limit = link.get_limit(True)
                if limit is None:
                    return None
                unused = max(0, limit - link.pool.active - link.additional_sequences)
                slots += limit
                free += unused
                largest = max(largest, limit)
                room = max(room, unused)
        return SlotCount(slots, free, largest, room)

    def _may_pass(self, line: TenantQueue[GatewayExchange], sequences: int) -> bool:
        count = self._count_slots()
        return count is None or self.waiting.may_pass(line, count.free, count.all, monotonic(), sequences)

    # choice of the engine

    def _choose(self, exchange: GatewayExchange) -> BackendLink | None:
        """Chooses a backend with a free slot: by share, then among replicas by prefix affinity and load."""
        if len(self.links) == 1 and not exchange.tried:
            link = self.links[0]
            return link if self.is_ready and link.has_room(self.by_slots, exchange.sequences) else None
        usable = self._list_usable(exchange.tried)
        if exchange.features:
            usable = [link for link in usable if link.backend.supports(exchange.features)] or usable
        with_room = [link for link in usable if link.has_room(self.by_slots, exchange.sequences)]
        if len(usable) < 2 or not with_room:
            return with_room[0] if with_room else None
        group = self._choose_group(usable, with_room)
        return self._choose_replica(
            [link for link in with_room if (link.backend.group, link.backend.share) == group], exchange
        )

    def _choose_group(self, usable: list[BackendLink], with_room: list[BackendLink]) -> tuple[str, float]:
        """Smooth weighted round robin over groups of replicas: exact proportions, evenly spread."""
        weights: dict[tuple[str, float], float] = {}
        for link in usable:
            key = (link.backend.group, link.backend.share)
            weights[key] = weights.get(key, 0.0) + link.backend.share
        if len(weights) == 1:
            return next(iter(weights))
        total = sum(weights.values())
        for key, weight in weights.items():
            self._credits[key] = min(self._credits.get(key, 0.0) + weight, MOST_CREDIT * total)
        open_keys = {(link.backend.group, link.backend.share) for link in with_room}
        chosen = max((key for key in weights if key in open_keys), key=self._credits.__getitem__)
        self._credits[chosen] -= total
        return chosen

    @staticmethod
    def _choose_replica(replicas: list[BackendLink], exchange: GatewayExchange) -> BackendLink:
        """The conversation's replica, unless it has many more requests in flight than the least loaded one."""
        if len(replicas) == 1:
            return replicas[0]
        least = min(replicas, key=lambda link: link.backend.in_flight)
        prefix = exchange.affinity
        if prefix is None:
            return least
        preferred = max(replicas, key=lambda link: mix_bits(prefix ^ link.number))
        return preferred if preferred.backend.in_flight <= least.backend.in_flight + MUCH_MORE_LOADED else least


def mix_bits(number: int) -> int:
    """Mixes all bits of a 64-bit number: the finalizer of SplitMix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 31
