"""The route of a model that engines here and endpoints elsewhere serve: by share, order, latency, price or load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bedplate.run.gateway.elsewhere import MAX_HOPS, count_hops
from bedplate.run.gateway.fair import SMOOTHING
from bedplate.run.gateway.routes import MUCH_MORE_LOADED, RETRY_AFTER_S, BackendLink, Route, mix_bits

if TYPE_CHECKING:
    from bedplate.run.gateway.exchange import GatewayExchange
    from bedplate.run.gateway.watch import GatewayMetrics
    from bedplate.values.intent import Routing

EXPLORE_EVERY = 20
"""Every 20th request goes to the backend whose latency was measured longest ago."""
NEAR = 1.25
"""Backends whose latency is at most this many times the lowest count as equal."""


class MeasuredLatency:
    """Smoothed durations of one backend, for streams and for whole answers."""

    __slots__ = ("chosen_at", "ttft_s", "whole_s")

    def __init__(self) -> None:
        self.ttft_s: float | None = None
        self.whole_s: float | None = None
        self.chosen_at = 0
        """The number of the last request that it got."""

    def record(self, took_s: float, *, streamed: bool) -> None:
        name = "ttft_s" if streamed else "whole_s"
        before: float | None = getattr(self, name)
        setattr(self, name, took_s if before is None else before + SMOOTHING * (took_s - before))


class ChoosingRoute(Route):
    """A route whose backends differ in place, price and speed."""

    def __init__(self, model: str, meters: GatewayMetrics, routing: Routing) -> None:
        super().__init__(model, meters)
        self.routing = routing
        self.latencies: dict[BackendLink, MeasuredLatency] = {}
        self._num_chosen = 0

    def drop(self, link: BackendLink) -> None:
        self.latencies.pop(link, None)
        super().drop(link)

    def release_slot(self, exchange: GatewayExchange, link: BackendLink, cost_tokens: float | None, now: float) -> None:
        if cost_tokens and not (exchange.streams and exchange.first_at is None):
            ended = exchange.first_at if exchange.streams and exchange.first_at is not None else now
            self._get_latency(link).record(ended - exchange.sent_at, streamed=exchange.streams)
        super().release_slot(exchange, link, cost_tokens, now)

    def _choose(self, exchange: GatewayExchange) -> BackendLink | None:
        usable = self._list_usable(exchange.tried)
        if (hops := count_hops(exchange.head)) and any(link.backend.remote for link in usable):
            # From another bedplate, which may be an endpoint of this one: engines here come first.
            here = [link for link in usable if link.backend.remote is None]
            if not here and hops >= MAX_HOPS:
                message = f"the request has passed {hops} bedplates, whose endpoints refer to one another"
                exchange.reject_unserved(message, "endpoint_loop", RETRY_AFTER_S)
                return None
            usable = here or usable
        if exchange.features:
            usable = [link for link in usable if link.backend.supports(exchange.features)] or usable
        with_room = [link for link in usable if link.has_room(self.by_slots, exchange.sequences)]
        if not with_room:
            return None
        self._num_chosen += 1
        chosen = self._choose_equal(self._list_best(with_room, exchange.streams), exchange)
        self._get_latency(chosen).chosen_at = self._num_chosen
        return chosen

    def _list_best(self, links: list[BackendLink], streamed: bool) -> list[BackendLink]:
        """The backends that the routing prefers; among them the conversation decides."""
        if len(links) == 1 or self.routing == "share":
            return links
        if self.routing == "load":
            return _list_lowest(links, [_measure_load(link) for link in links])
        if self.routing == "latency":
            return self._list_fastest(links, streamed)
        # An engine whose slots are all busy would queue the request.
        free = [link for link in links if link.backend.slots is None or link.backend.in_flight < link.backend.slots]
        links = free or links
        by_price = self.routing == "price"
        return _list_lowest(links, [link.backend.price if by_price else link.backend.rank for link in links])

    def _list_fastest(self, links: list[BackendLink], streamed: bool) -> list[BackendLink]:
        found = [self._get_latency(link) for link in links]
        measured = [one.ttft_s if streamed else one.whole_s for one in found]
        # One request at a time measures a backend for the first time, so that a slow one does not get all of them.
        pairs = list(zip(links, measured, strict=True))
        untried = [link for link, one in pairs if one is None and not link.backend.in_flight]
        known = [one for one in measured if one is not None]
        if untried or not known:
            return untried[:1] or _list_lowest(links, [_measure_load(link) for link in links])
        if self._num_chosen % EXPLORE_EVERY == 0:
            return [min(links, key=lambda link: self._get_latency(link).chosen_at)]
        limit = NEAR * min(known)
        return [link for link, one in pairs if one is not None and one <= limit]

    @staticmethod
    def _choose_equal(links: list[BackendLink], exchange: GatewayExchange) -> BackendLink:
        """The conversation's backend in proportion to the shares, unless it is much busier than the least loaded."""
        if len(links) == 1:
            return links[0]
        least = min(links, key=_measure_load)
        prefix = exchange.affinity
        if prefix is None:
            return least
        # Weighted rendezvous hashing: each backend is the highest for its share of all conversations.
        preferred = max(links, key=lambda link: _score(prefix ^ link.number, link.backend.share))
        is_near = _measure_load(preferred) <= _measure_load(least) + MUCH_MORE_LOADED
        return preferred if is_near else least

    def _get_latency(self, link: BackendLink) -> MeasuredLatency:
        found = self.latencies.get(link)
        if found is None:
            found = self.latencies[link] = MeasuredLatency()
        return found


def _list_lowest(links: list[BackendLink], values: list[float]) -> list[BackendLink]:
    lowest = min(values)
    return [link for link, value in zip(links, values, strict=True) if value == lowest]


def _measure_load(link: BackendLink) -> float:
    return link.backend.in_flight / link.backend.share


def _score(number: int, share: float) -> float:
    return -share / math.log(((mix_bits(number) >> 11) + 0.5) / 2**53)
