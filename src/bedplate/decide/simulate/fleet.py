"""The discrete-event simulation of replicas and a router under a stream of requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.cache import Holders
from bedplate.decide.simulate.replica import ReplicaLimits, SimulatedReplica, Steps
from bedplate.decide.simulate.routers import (
    Loads,
    Router,
    make_least_loaded_router,
    make_prefix_router,
    make_random_router,
)
from bedplate.values.simulation import LayoutName, RouterName

TOLD_EVERY = 4096


class Transfer(NamedTuple):
    """The transfer of a prompt's KV cache from a prefill worker to a decode worker."""

    fixed_s: float
    token_s: float
    """Time per prompt token on the sender's link, which sends one prompt at a time."""


class Fleet(NamedTuple):
    """The simulated fleet."""

    steps: Steps
    limits: ReplicaLimits
    replicas: int
    """All replicas, prefill and decode workers included."""
    router: RouterName = "least-loaded"
    prefills: int = 0
    """The replicas that only compute prompts. 0: every replica does both."""
    transfer: Transfer = Transfer(0.0, 0.0)
    seed: int = 0

    @property
    def layout(self) -> LayoutName:
        return "disaggregated" if self.prefills else "aggregated"


class FleetRun(NamedTuple):
    """The result of a simulation."""

    book: Book
    replicas: tuple[SimulatedReplica, ...]
    end_s: float
    """From the first arrival to the last answer."""


def simulate(
    fleet: Fleet,
    book: Book,
    *,
    concurrency: int | None = None,
    apart_s: float = 0.0,
    think_s: Sequence[float] = (),
    told: Callable[[int], None] = lambda done: None,
) -> FleetRun:
    """Simulate all requests of the book. `concurrency`: a closed loop with this many clients.

    In a closed loop, the book has at most the arrivals of the first requests, and `apart_s` is the time between two
    requests that the client sends on the same occasion. `think_s` has for each request the time from its answer to the
    same client's next request.
    """
    events: list[tuple[float, int]] = []
    prefills = fleet.prefills
    fronts = prefills or fleet.replicas
    unit = fleet.router != "prefix"
    holders: Holders | None = None if unit else {}
    loads, behind = Loads(fronts), Loads(fleet.replicas - fronts)
    load = loads.load
    replicas = [
        SimulatedReplica(
            index, book, fleet.steps, fleet.limits, events, load, unit=unit, hands_over=prefills > 0, holders=holders
        )
        for index in range(fronts)
    ]  # fmt: skip
    replicas += [
        SimulatedReplica(
            fronts + place, book, fleet.steps, fleet.limits._replace(caches=False), events, behind.load, place=place
        )
        for place in range(fleet.replicas - fronts)
    ]
    total = len(book)
    fit = _make_fit_check(fleet, book)
    arrivals = list(book.arrival)
    if concurrency is not None:
        arrivals = arrivals[:concurrency] or [apart_s * number for number in range(min(concurrency, total))]
    elif len(arrivals) != total:
        raise ValueError("an open loop needs an arrival for each request")
    accept_s = fleet.steps.accept_s
    route = _make_router(fleet, book, loads, holders)
    wire = _TransferLink(fleet.transfer, book, events, behind, replicas[fronts:]) if prefills else None
    nxt, waiting_for, now = 0, min(total, len(arrivals)), 0.0
    weight = book.weight
    while True:
        if nxt < waiting_for and (not events or arrivals[nxt] <= events[0][0]):
            now = arrivals[nxt]
            rid, nxt = nxt, nxt + 1
            if not nxt % TOLD_EVERY:
                told(nxt)
            if not fit(rid):
                book.refused.append(rid)
                if think_s:
                    insort(arrivals, now + think_s[rid], lo=nxt)
                    waiting_for = min(total, len(arrivals))
                elif concurrency is not None and waiting_for < total:
                    arrivals.append(max(now, arrivals[-1]))
                    waiting_for += 1
                continue
            to = route(rid)
            load[to] += weight[rid]
            loads.update_place(to)
            replicas[to].arrive(rid, now)
            continue
        if not events:
            break
        now, index = heappop(events)
        if index < 0:
            if wire is not None:
                wire.arrive(index + total, now)
            continue
        replica = replicas[index]
        if replica.due != now:
            continue
        replica.wake(now)
        if replica.handed:
            if wire is not None:
                wire.send(index, replica.handed, now)
            replica.handed.clear()
            loads.update_place(index)
        if replica.left:
            if think_s:
                # Users go on until the last request has arrived, so that the rate does not fall before.
                for rid in replica.left:
                    insort(arrivals, book.done[rid] + accept_s + think_s[rid], lo=nxt)
                waiting_for = min(total, len(arrivals))
            elif concurrency is not None:
                for number, rid in enumerate(replica.left[: total - waiting_for]):
                    insort(arrivals, book.done[rid] + accept_s + apart_s * number, lo=nxt)
                    waiting_for += 1
            replica.left.clear()
            if index < fronts:
                loads.update_place(index)
            else:
                behind.update_place(index - fronts)
    book.arrival = arrivals[:total]
    return FleetRun(book, tuple(replicas), max(now, *book.done))


def _make_fit_check(fleet: Fleet, book: Book) -> Callable[[int], bool]:
    """A function that tells whether a request fits into an empty replica; engines refuse it otherwise."""
    room = min(fleet.limits.kv_blocks * fleet.limits.block_tokens, fleet.limits.longest)
    prompt, output = book.prompt, book.output
    return lambda rid: prompt[rid] + output[rid] <= room


def _make_router(fleet: Fleet, book: Book, loads: Loads, holders: Holders | None) -> Router:
    if fleet.router == "random":
        return make_random_router(len(loads.load), fleet.seed)
    return make_least_loaded_router(loads) if holders is None else make_prefix_router(book, loads, holders)


class _TransferLink:
    """The link between prefill and decode workers."""

    def __init__(
        self,
        transfer: Transfer,
        book: Book,
        events: list[tuple[float, int]],
        loads: Loads,
        workers: list[SimulatedReplica],
    ) -> None:
        self._transfer, self._book, self._events = transfer, book, events
        self._loads, self._workers = loads, workers
        self._free_at: dict[int, float] = {}

    def send(self, sender: int, rids: list[int], now: float) -> None:
        at = max(now, self._free_at.get(sender, 0.0))
        for rid in rids:
            at += self._book.prompt[rid] * self._transfer.token_s
            heappush(self._events, (at + self._transfer.fixed_s, rid - len(self._book)))
        self._free_at[sender] = at

    def arrive(self, rid: int, now: float) -> None:
        """Give the request to the decode worker with the fewest requests."""
        place = self._loads.find_least()
        self._loads.load[place] += 1
        self._loads.update_place(place)
        self._book.ready[rid] = 1
        self._workers[place].arrive(rid, now)
