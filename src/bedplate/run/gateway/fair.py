"""Fair queueing: tenants share an engine by tokens and weight, and keep the slots that they used recently."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, Protocol, TypeVar

SLOT_KEPT_S = 5.0
"""A tenant's slots stay reserved for at least this long after it last used them, and at most twice as long."""
FIRST_COST_TOKENS = 500.0
"""Expected cost of a request before any has ended."""
LEAD_REQUESTS = 2
"""A tenant keeps its slots while it is at most this many requests per slot ahead of the others."""
LEAD_PREFILL_REQUESTS = 2
"""A tenant above its share waits for others' prefills while it is at most this many requests behind them."""
SLOTS_PER_PREFILL = 4
"""A tenant above its share uses at most one in this many of its slots for prefill while others use theirs."""
MOST_PASSED = 8
"""So many smaller requests of a tenant may go before one that waits for several free slots at once."""
MOST_SEARCHED = 64
SMOOTHING = 0.1


class QueuedRequest(Protocol):
    """A request in a queue."""

    @property
    def over(self) -> bool: ...

    @property
    def cost_tokens(self) -> float: ...

    @property
    def sequences(self) -> int:
        """The slots that it needs."""


W = TypeVar("W", bound=QueuedRequest)


class TenantQueue(Generic[W]):
    """One tenant's requests for one model, in order of arrival."""

    __slots__ = (
        "_before",
        "_entry",
        "_now",
        "_since",
        "charged",
        "in_flight",
        "is_held_back",
        "mean_cost",
        "name",
        "passed",
        "prefilling",
        "queue",
        "queued_sequences",
        "served",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.queue: deque[W] = deque()
        self.queued_sequences = 0
        self.in_flight = 0
        """Sequences that the engines are processing."""
        self.passed = 0
        """Requests that went before the first one, which waits for several free slots."""
        self.is_held_back = False
        """Whether it leaves free slots to a tenant that was served less and waits for several of them."""
        self.prefilling = 0
        """Running streams without a first token."""
        self.served = 0.0
        """Tokens served, divided by the weight; the tenant with the fewest goes next."""
        self.mean_cost = FIRST_COST_TOKENS
        self.charged = 0.0
        """What each sequence of its last request was charged when it was sent."""
        self._entry: tuple[float, int] | None = None
        self._since = 0.0
        self._now = self._before = 0

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.in_flight

    def count_wanted_slots(self, now: float) -> int:
        """The most slots that it could have used recently."""
        self.record_demand(now)
        return max(self._now, self._before)

    def find_smaller(self, room: int) -> int | None:
        """The place of a request that fits into `room` slots, while the first one needs more.

        Without it, the tenant's free slots would stay unused until there are enough of them.
        """
        if room < 1 or self.passed >= MOST_PASSED:
            return None
        places = range(1, min(len(self.queue), MOST_SEARCHED))
        return next((place for place in places if self.queue[place].sequences <= room), None)

    def count_useful(self, unused: int) -> int:
        """How many of so many unused slots its next request can use, now or when its running requests have ended."""
        if not self.queue or (needed := self.queue[0].sequences) <= unused or self.find_smaller(unused) is not None:
            return unused
        return min(unused, max(0, needed - self.in_flight))

    def record_demand(self, now: float) -> None:
        passed = now - self._since
        if passed > SLOT_KEPT_S:
            self._before = self._now if passed < 2 * SLOT_KEPT_S else 0
            self._now = 0
            self._since = now
        self._now = max(self._now, self.in_flight + self.queued_sequences)


class FairQueue(Generic[W]):
    """The queues of all tenants for one model.

    Each tenant has a counter of served tokens, divided by its weight. The tenant with the lowest counter goes next. It
    is charged the expected cost of the request, and the difference when the request ends. A tenant that returns after a
    pause starts level with the others, with neither debt nor credit.
    """

    def __init__(self) -> None:
        self._lines: dict[str, TenantQueue[W]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self.count = 0
        """Requests in all queues."""
        self._number = 0
        self.is_shared = False
        """Whether more than one tenant has sent requests recently."""

    def __len__(self) -> int:
        return self.count

    def get_queue(self, name: str, weight: float) -> TenantQueue[W]:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = TenantQueue(name, weight)
            self.is_shared = len(self._lines) > 1
        line.weight = weight
        return line

    def list_queues(self) -> list[TenantQueue[W]]:
        return list(self._lines.values())

    def add(self, line: TenantQueue[W], waiting: W, now: float, *, first: bool = False) -> None:
        """Adds a request at the end of its tenant's queue; with `first`, at the beginning."""
        self.level_counter(line)
        (line.queue.appendleft if first else line.queue.append)(waiting)
        self.count += 1
        line.queued_sequences += waiting.sequences
        line.record_demand(now)
        if len(line.queue) == 1:
            self._push_entry(line)

    def level_counter(self, line: TenantQueue[W]) -> None:
        """Sets the counter of a tenant that returns to the level of the active ones, or of the last active ones."""
        if self.is_shared and line.is_idle:
            others = [other.served for other in self._lines.values() if other is not line and not other.is_idle]
            level = min(others) if others else max(other.served for other in self._lines.values())
            line.served = max(line.served, level)

    def withdraw(self, line: TenantQueue[W], waiting: W) -> bool:
        """Removes a request; returns whether it was in the queue."""
        try:
            line.queue.remove(waiting)
        except ValueError:
            return False
        self.count -= 1
        line.queued_sequences -= waiting.sequences
        if not line.queue:
            line._entry = None
        return True

    def take(
        self,
        free_slots: int | None,
        slots: int | None,
        now: float,
        room_in_one: int | None = None,
        most_in_one: int | None = None,
    ) -> tuple[TenantQueue[W], W] | None:
        """Removes and returns the next request that may use some of the free slots.

        A request that needs more slots than are free keeps those that become free from tenants that were served more
        than their share, until there are enough of them.

        `room_in_one` is the most slots that are free in one engine, `most_in_one` the most that an engine has. A
        request with more sequences than that, or than its tenant's share, is returned as soon as one slot is free; the
        caller rejects it.
        """
        skipped: list[TenantQueue[W]] = []
        served_of_first: float | None = None  # the counter of the first tenant whose request needs more slots
        parts = self._share_slots(slots, now) if slots is not None else {}
        reserved = self._reserve_slots(parts, now)
        all_kept = sum(reserved.values())
        found: tuple[TenantQueue[W], W] | None = None
        while self._heap and found is None:
            served, number, name = heapq.heappop(self._heap)
            line = self._lines.get(name)
            if line is None or line._entry != (served, number):
                continue
            line._entry = None
            needed = line.queue[0].sequences
            if needed > 1 and needed > max(1, min(parts.get(name, needed), most_in_one or needed)):
                needed = 1
            place: int | None = 0
            if free_slots is not None:
                room = free_slots - (all_kept - reserved.get(name, 0))
                room = room if room_in_one is None else min(room, room_in_one)
                must_leave = served_of_first is not None and self._must_leave_slots(line, parts, served_of_first)
                if must_leave or self._must_wait_for_prefill(line, parts, now):
                    place = None
                elif room < needed:
                    place = line.find_smaller(room)
                    if place is None and needed > 1 and served_of_first is None:
                        served_of_first = line.served
            if place is None:
                skipped.append(line)
                continue
            line.passed = line.passed + 1 if place else 0
            found = line, line.queue[place]
            del line.queue[place]
            self.count -= 1
            line.queued_sequences -= found[1].sequences
            if line.queue:
                skipped.append(line)
        for line in skipped:
            self._push_entry(line)
        return found

    def may_pass(self, line: TenantQueue[W], free_slots: int, slots: int, now: float, needed: int = 1) -> bool:
        """Whether a tenant may use free slots at once when no requests wait."""
        parts = self._share_slots(slots, now)
        reserved = self._reserve_slots(parts, now)
        reserved_for_others = sum(reserved.values()) - reserved.get(line.name, 0)
        return free_slots - reserved_for_others >= needed and not self._must_wait_for_prefill(line, parts, now)

    def count_share(self, line: TenantQueue[W], slots: int, now: float) -> int | None:
        """The slots of a tenant's fair share, at least one; `None` while no other tenant is active."""
        weights = sum(
            other.weight for other in self._lines.values() if other is not line and other.count_wanted_slots(now)
        )
        return max(1, int(slots * line.weight / (weights + line.weight))) if weights else None

    def charge_sent(self, line: TenantQueue[W], cost_tokens: float, now: float, sequences: int = 1) -> None:
        """Charges a request that is sent to the engine its expected cost."""
        if self.is_shared:
            self.level_counter(line)
            line.in_flight += sequences
            line.record_demand(now)
        else:
            line.in_flight += sequences
        line.is_held_back = False
        line.charged = cost_tokens / sequences
        line.served += cost_tokens / line.weight
        if line.queue:
            self._push_entry(line)

    def refund(self, line: TenantQueue[W], refund_tokens: float = 0.0, sequences: int = 1) -> None:
        """Frees the slots of a request that goes to another engine, and refunds its charge."""
        line.in_flight -= sequences
        line.served -= refund_tokens / line.weight
        if line.queue:
            self._push_entry(line)

    def settle_charge(
        self, line: TenantQueue[W], charged_tokens: float, cost_tokens: float | None, sequences: int = 1
    ) -> None:
        """Frees the slots of a request that has ended, and corrects its charge to `cost_tokens`, where known."""
        line.in_flight -= sequences
        if cost_tokens is not None:
            line.mean_cost += SMOOTHING * (cost_tokens / sequences - line.mean_cost)
            line.served -= (charged_tokens - cost_tokens) / line.weight
        if line.queue:
            self._push_entry(line)

    def correct_charge(
        self, line: TenantQueue[W], charged_tokens: float, cost_tokens: float, sequences: int = 1
    ) -> None:
        line.mean_cost += SMOOTHING * (cost_tokens / sequences - line.mean_cost)
        line.served -= (charged_tokens - cost_tokens) / line.weight
        if line.queue:
            self._push_entry(line)

    def forget_idle(self, now: float) -> None:
        """Removes the queues of tenants that have sent nothing for a while."""
        for name, line in list(self._lines.items()):
            if line.is_idle and not line.count_wanted_slots(now):
                del self._lines[name]
        self.is_shared = len(self._lines) > 1

    def _share_slots(self, slots: int, now: float) -> dict[str, int]:
        """The fair share of the slots of each recently active tenant; empty where there is only one."""
        active = [line for line in self._lines.values() if line.count_wanted_slots(now)]
        if len(active) < 2:
            return {}
        weights = sum(line.weight for line in active)
        return {line.name: int(slots * line.weight / weights) for line in active}

    def _reserve_slots(self, parts: dict[str, int], now: float) -> dict[str, int]:
        """Free slots that are reserved for each tenant: those that it used recently, up to its fair share.

        Without them, a tenant whose request arrives just after another tenant took the slot would wait until that
        request ends. A tenant that was served more than its share keeps none.
        """
        if not parts:
            return {}
        lowest = min(self._lines[name].served for name in parts)
        reserved = {}
        for name, part in parts.items():
            line = self._lines[name]
            unused = min(part, line.count_wanted_slots(now)) - line.in_flight
            if unused > 0 and not line.is_held_back and self._is_level(line, parts, lowest):
                reserved[name] = line.count_useful(unused)
        return reserved

    def _must_leave_slots(self, line: TenantQueue[W], parts: dict[str, int], served: float) -> bool:
        """Whether a tenant must leave free slots to one with this counter that waits for several of them.

        It leaves them until its lead is half of what makes it do so. Slots that are kept free are unused for a while,
        so this happens seldom and lasts for several requests.
        """
        line.is_held_back = not self._is_level(line, parts, served, 0.5 if line.is_held_back else 1.0)
        return line.is_held_back

    def _is_level(self, line: TenantQueue[W], parts: dict[str, int], served: float, part_of_lead: float = 1.0) -> bool:
        """Whether a tenant is at most a few requests ahead of one with this counter."""
        lead = LEAD_REQUESTS * max(1, parts.get(line.name, 1)) * _estimate_cost(line)
        return line.served <= served + part_of_lead * lead

    def _must_wait_for_prefill(self, line: TenantQueue[W], parts: dict[str, int], now: float) -> bool:
        """Whether a tenant that wants more than its share waits for the prefill of other tenants' requests.

        An engine prefills prompts one after the other, or all of them at half the speed: during a flood, each first
        token would also wait for a prompt of the flood. Tenants within their shares go at once. A tenant that falls
        behind those that it waits for stops waiting, so tokens are shared as before.
        """
        part = parts.get(line.name)
        if part is None or line.count_wanted_slots(now) <= part:
            return False
        lead = LEAD_PREFILL_REQUESTS * _estimate_cost(line)
        within = [
            other
            for name, fair in parts.items()
            if name != line.name and (other := self._lines[name]).count_wanted_slots(now) <= fair
        ]
        if not within or max(other.served for other in within) > line.served + lead:
            return False
        return line.prefilling >= max(1, part // SLOTS_PER_PREFILL) or any(other.prefilling for other in within)

    def _push_entry(self, line: TenantQueue[W]) -> None:
        if len(self._heap) > 64 + 4 * len(self._lines):  # most entries are outdated
            lines = self._lines
            self._heap = [one for one in self._heap if one[2] in lines and lines[one[2]]._entry == one[:2]]
            heapq.heapify(self._heap)
        self._number += 1
        line._entry = (line.served, self._number)
        heapq.heappush(self._heap, (line.served, self._number, line.name))


def _estimate_cost(line: TenantQueue[W]) -> float:
    """The expected cost of one of the tenant's requests, divided by its weight."""
    return max(line.mean_cost, line.charged) / line.weight
