"""Whose request goes next: tenants that wait share an engine by tokens and weight, and keep the seats that they use."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, Protocol, TypeVar

SEAT_KEPT_S = 5.0
"""A tenant's seats are kept for at least this long after it last used them, and at most twice as long."""
FIRST_COST_TOKENS = 500.0
"""What a request is taken to cost before any has ended."""
LEAD_REQUESTS = 4
"""Requests for each of its seats that a tenant may be ahead of others and still keep its seats."""
LEAD_READING = 2
"""Requests that others may be ahead of a tenant that crowds, and it still waits until their prompts are read."""
READ_AT_ONCE = 4
"""Of the seats of a tenant that crowds, one in so many may be reading a prompt while somebody else uses its own."""
SMOOTHING = 0.1


class Waiting(Protocol):
    """What stands in a line."""

    @property
    def over(self) -> bool: ...

    @property
    def cost_tokens(self) -> float: ...


W = TypeVar("W", bound=Waiting)


class Line(Generic[W]):
    """One tenant's requests for one model, first come first served."""

    __slots__ = (
        "_before",
        "_entry",
        "_now",
        "_since",
        "charged",
        "in_flight",
        "mean_cost",
        "name",
        "queue",
        "reading",
        "served",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.queue: deque[W] = deque()
        self.in_flight = 0
        self.reading = 0
        """Streams under way whose first token has not come: the engine reads their prompts."""
        self.served = 0.0
        """Tokens that it was given, by its weight; who has the least goes next."""
        self.mean_cost = FIRST_COST_TOKENS
        self.charged = 0.0
        """What its last request was charged on its way to the engine."""
        self._entry: tuple[float, int] | None = None
        self._since = 0.0
        self._now = self._before = 0

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.in_flight

    def wants(self, now: float) -> int:
        """The most seats that it could have used lately."""
        self.note(now)
        return max(self._now, self._before)

    def note(self, now: float) -> None:
        passed = now - self._since
        if passed > SEAT_KEPT_S:
            self._before = self._now if passed < 2 * SEAT_KEPT_S else 0
            self._now = 0
            self._since = now
        self._now = max(self._now, self.in_flight + len(self.queue))


class FairQueue(Generic[W]):
    """The lines of all tenants for one model.

    Each line has a counter of tokens served, divided by its weight. The one with the lowest goes next; it is charged
    what the request will probably cost, and the difference when that is known. A tenant that was away starts level
    with the others, neither with a debt nor with savings.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Line[W]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self.count = 0
        """Requests that wait."""
        self._number = 0

    def __len__(self) -> int:
        return self.count

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant was here lately."""
        return len(self._lines) > 1

    def line(self, name: str, weight: float) -> Line[W]:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(name, weight)
        line.weight = weight
        return line

    def lines(self) -> list[Line[W]]:
        return list(self._lines.values())

    def join(self, line: Line[W], waiting: W, now: float, *, first: bool = False) -> None:
        """Stands at the end of its line, or at its beginning when it has had its turn once."""
        self.wake(line)
        (line.queue.appendleft if first else line.queue.append)(waiting)
        self.count += 1
        line.note(now)
        if len(line.queue) == 1:
            self._enter(line)

    def wake(self, line: Line[W]) -> None:
        """Puts a tenant that was away level with those that are here, or with the last that were."""
        if len(self._lines) > 1 and line.is_idle:
            others = [other.served for other in self._lines.values() if other is not line and not other.is_idle]
            level = min(others) if others else max(other.served for other in self._lines.values())
            line.served = max(line.served, level)

    def leave(self, line: Line[W], waiting: W) -> bool:
        """Its client went away."""
        try:
            line.queue.remove(waiting)
        except ValueError:
            return False
        self.count -= 1
        if not line.queue:
            line._entry = None
        return True

    def take(self, free_seats: int | None, seats: int | None, now: float) -> tuple[Line[W], W] | None:
        """The next request, if any of those that wait may have one of the free seats."""
        aside: list[Line[W]] = []
        parts = self._parts(seats, now) if seats is not None else {}
        kept = self._kept(parts, now)
        all_kept = sum(kept.values())
        found: tuple[Line[W], W] | None = None
        while self._heap and found is None:
            served, number, name = heapq.heappop(self._heap)
            line = self._lines.get(name)
            if line is None or line._entry != (served, number):
                continue
            line._entry = None
            if free_seats is not None and (
                free_seats <= all_kept - kept.get(name, 0) or self._gives_way(line, parts, now)
            ):
                aside.append(line)
                continue
            found = line, line.queue.popleft()
            self.count -= 1
            if line.queue:
                aside.append(line)
        for line in aside:
            self._enter(line)
        return found

    def may_pass(self, line: Line[W], free_seats: int, seats: int, now: float) -> bool:
        """Whether a tenant may have a free seat at once when nobody waits."""
        parts = self._parts(seats, now)
        kept = self._kept(parts, now)
        return free_seats > sum(kept.values()) - kept.get(line.name, 0) and not self._gives_way(line, parts, now)

    def seated(self, line: Line[W], cost_tokens: float, now: float) -> None:
        """A request is on its way to the engine, and is charged what it will probably cost."""
        if len(self._lines) > 1:
            self.wake(line)
            line.in_flight += 1
            line.note(now)
        else:
            line.in_flight += 1
        line.charged = cost_tokens
        line.served += cost_tokens / line.weight
        if line.queue:
            self._enter(line)

    def left(self, line: Line[W], refund_tokens: float = 0.0) -> None:
        """A request has ended, or goes elsewhere; what it was charged too much is given back."""
        line.in_flight -= 1
        line.served -= refund_tokens / line.weight
        if line.queue:
            self._enter(line)

    def ended(self, line: Line[W], charged_tokens: float, cost_tokens: float | None) -> None:
        """A request has ended for good; `cost_tokens` is what it did cost, where that is known."""
        line.in_flight -= 1
        if cost_tokens is not None:
            line.mean_cost += SMOOTHING * (cost_tokens - line.mean_cost)
            line.served -= (charged_tokens - cost_tokens) / line.weight
        if line.queue:
            self._enter(line)

    def forget_idle(self, now: float) -> None:
        """Lines of tenants that have not been here for a while."""
        for name, line in list(self._lines.items()):
            if line.is_idle and not line.wants(now):
                del self._lines[name]

    def _parts(self, seats: int, now: float) -> dict[str, int]:
        """The fair part of the seats of each tenant that was here lately; nothing where there is only one."""
        active = [line for line in self._lines.values() if line.wants(now)]
        if len(active) < 2:
            return {}
        weights = sum(line.weight for line in active)
        return {line.name: int(seats * line.weight / weights) for line in active}

    def _kept(self, parts: dict[str, int], now: float) -> dict[str, int]:
        """Free seats that are kept for somebody: what each used lately, up to its fair part of all of them.

        Without them a tenant whose request comes a moment after another's took the seat would wait for the end of
        that one. Whoever was served more than its part keeps none.
        """
        if not parts:
            return {}
        lowest = min(self._lines[name].served for name in parts)
        kept = {}
        for name, part in parts.items():
            line = self._lines[name]
            unused = min(part, line.wants(now)) - line.in_flight
            if unused > 0 and line.served <= lowest + LEAD_REQUESTS * part * _cost(line):
                kept[name] = unused
        return kept

    def _gives_way(self, line: Line[W], parts: dict[str, int], now: float) -> bool:
        """Whether a tenant that wants more than its part waits until another's prompts are read.

        An engine reads prompts one after the other, or all of them at half the pace: beside a flood every first token
        would wait for a prompt of the flood's, too. Those that stay within their parts go at once. Whoever falls
        behind those that it waits for does not wait any longer: tokens are shared as before.
        """
        part = parts.get(line.name)
        if part is None or line.wants(now) <= part:
            return False
        lead = LEAD_READING * _cost(line)
        within = [
            other
            for name, fair in parts.items()
            if name != line.name and (other := self._lines[name]).wants(now) <= fair
        ]
        if not within or max(other.served for other in within) > line.served + lead:
            return False
        return line.reading >= max(1, part // READ_AT_ONCE) or any(other.reading for other in within)

    def _enter(self, line: Line[W]) -> None:
        if len(self._heap) > 64 + 4 * len(self._lines):  # mostly entries that no longer hold
            lines = self._lines
            self._heap = [one for one in self._heap if one[2] in lines and lines[one[2]]._entry == one[:2]]
            heapq.heapify(self._heap)
        self._number += 1
        line._entry = (line.served, self._number)
        heapq.heappush(self._heap, (line.served, self._number, line.name))


def _cost(line: Line[W]) -> float:
    """What one of its requests costs, by weight; what is under way is charged by guess."""
    return max(line.mean_cost, line.charged) / line.weight
