"""Simulates tenants that share one engine. The fair queue is real; the engine and the time are simulated."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bedplate.run.gateway.fair import FairQueue, TenantQueue
from bedplate.run.gateway.tenants import BYTES_PER_TOKEN, Demand, TenantState
from bedplate.values.tenant import Tenant

STEP_S = 0.02
"""Of one token of each running sequence."""
PREFILL_TOKENS_PER_S = 2000.0
COUNT_S = 0.05
"""The time until the tokens of an aborted request are counted."""
RETRY_S = 0.1
"""The pause of a client after its request was rejected."""
RECONNECT_S = 0.001
"""The time from an answer to the client's next request."""


@dataclass(frozen=True)
class RequestKind:
    """What a client sends."""

    sequences: int = 1
    prompt_tokens: int = 40
    """Of each prompt."""
    output_tokens: int = 16
    """Of each sequence, at most; an answer may end earlier."""
    shares_prompt: bool = False
    """Whether all sequences are choices of one prompt."""
    aborted_after: int | None = None
    """Tokens after which the client disconnects."""
    shortest: float = 1.0
    """The length of the shortest answer, as a part of `output_tokens`."""


@dataclass(frozen=True)
class SimulatedTenant:
    """Clients of one tenant; each sends its next request after the last one has ended."""

    kinds: tuple[RequestKind, ...]
    clients: int
    weight: float = 1.0


@dataclass(eq=False)
class SimulatedRequest:
    tenant: str
    kind: RequestKind
    cost_tokens: float
    arrived: float
    over: bool = False

    @property
    def sequences(self) -> int:
        return self.kind.sequences


@dataclass
class SimulatedEngine:
    """One engine with `slots` slots behind the fair queue. `run` returns the tokens of each tenant."""

    slots: int
    tenants: dict[str, SimulatedTenant]
    seed: int = 0
    queue: FairQueue[SimulatedRequest] = field(default_factory=FairQueue)
    tokens: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    used_slot_s: float = 0.0
    """Slots times the seconds in which they were used."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free = self.slots
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._states = {name: TenantState(Tenant(name=name, weight=one.weight)) for name, one in self.tenants.items()}
        self._kinds = {name: itertools.cycle(one.kinds) for name, one in self.tenants.items()}
        self.waits_s = {name: [] for name in self.tenants}

    def compute_used_share(self) -> float:
        """Of the slots, on average."""
        return self.used_slot_s / (self.slots * self.now)

    def run(self, seconds: float, settling_s: float = 10.0) -> Counter[str]:
        """The tokens of requests that ended within so many seconds, after a time for settling."""
        for name, one in self.tenants.items():
            for number in range(one.clients):
                self._after(number * 0.001, lambda name=name: self._arrive(name))  # type: ignore[misc]
        before: Counter[str] = Counter()
        while self._events and self._events[0][0] < settling_s + seconds:
            at, _, act = heapq.heappop(self._events)
            if self.now < settling_s <= at:
                before = self.tokens.copy()
            self.now = at
            act()
        return self.tokens - before

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), act))

    def _get_line(self, name: str) -> TenantQueue[SimulatedRequest]:
        return self.queue.get_queue(name, self.tenants[name].weight)

    def _arrive(self, name: str) -> None:
        kind, line = next(self._kinds[name]), self._get_line(name)
        share = self.queue.count_share(line, self.slots, self.now)
        if kind.sequences > self.slots or (share is not None and kind.sequences > share):
            self._reject(name)
            return
        demand = Demand(1, kind.sequences) if kind.shares_prompt else Demand(kind.sequences)
        prompts = 1 if kind.shares_prompt else kind.sequences
        num_bytes = 100 + prompts * kind.prompt_tokens * BYTES_PER_TOKEN
        cost = self._states[name].estimate_cost_tokens(num_bytes, kind.output_tokens, demand)
        request = SimulatedRequest(name, kind, cost, self.now)
        if not self.queue.count and self.queue.may_pass(line, self._free, self.slots, self.now, kind.sequences):
            self._send(request)
        else:
            self.queue.add(line, request, self.now)
            self._dispatch()

    def _reject(self, name: str) -> None:
        self.rejected[name] += 1
        self._after(RETRY_S, lambda: self._arrive(name))

    def _dispatch(self) -> None:
        while self.queue.count and self._free and (found := self._take()) is not None:
            line, request = found
            share = self.queue.count_share(line, self.slots, self.now)
            if share is not None and request.sequences > share:
                self._reject(request.tenant)
            else:
                self._send(request)

    def _take(self) -> tuple[TenantQueue[SimulatedRequest], SimulatedRequest] | None:
        return self.queue.take(self._free, self.slots, self.now, self._free, self.slots)

    def _send(self, request: SimulatedRequest) -> None:
        kind, line = request.kind, self._get_line(request.tenant)
        assert request.sequences <= self._free, "more sequences than free slots"
        self._free -= request.sequences
        self.queue.charge_sent(line, request.cost_tokens, self.now, request.sequences)
        self.waits_s[request.tenant].append(self.now - request.arrived)
        lengths = [
            max(1, int(kind.output_tokens * self._random.uniform(kind.shortest, 1.0))) for _ in range(kind.sequences)
        ]
        if kind.aborted_after is not None:
            lengths = [min(length, kind.aborted_after) for length in lengths]
        prompts = 1 if kind.shares_prompt else kind.sequences
        prefill_s = prompts * kind.prompt_tokens / PREFILL_TOKENS_PER_S
        line.prefilling += 1
        self._after(prefill_s, lambda: self._end_prefill(request))
        used = prompts * kind.prompt_tokens + sum(lengths)
        took_s = prefill_s + max(lengths) * STEP_S
        self.used_slot_s += took_s * request.sequences
        self._after(took_s, lambda: self._end(request, used, sum(lengths)))

    def _end_prefill(self, request: SimulatedRequest) -> None:
        self._get_line(request.tenant).prefilling -= 1
        self._dispatch()

    def _end(self, request: SimulatedRequest, used: int, output: int) -> None:
        line, state, sequences = self._get_line(request.tenant), self._states[request.tenant], request.sequences
        self._free += sequences
        if request.kind.aborted_after is None:
            self.queue.settle_charge(line, request.cost_tokens, used, sequences)
            state.correct_charge(request.cost_tokens, used, output, self.now, sequences)
            self.tokens[request.tenant] += used
        else:
            self.queue.settle_charge(line, request.cost_tokens, None, sequences)
            self._after(COUNT_S, lambda: self._count_aborted(request, used, output))
        self._after(RECONNECT_S, lambda: self._arrive(request.tenant))
        self._dispatch()

    def _count_aborted(self, request: SimulatedRequest, used: int, output: int) -> None:
        self.queue.correct_charge(self._get_line(request.tenant), request.cost_tokens, used, request.sequences)
        self._states[request.tenant].correct_charge(request.cost_tokens, used, output, self.now, request.sequences)
        self.tokens[request.tenant] += used
        self._dispatch()
