"""A simple implementation of the scheduling policy, one pass at a time, to check the simulator's jumps."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from bedplate.decide.simulate.fleet import Fleet
from bedplate.decide.simulate.replica import WATERMARK


@dataclass
class Asked:
    number: int
    prompt: int
    output: int
    hashes: tuple[object, ...] = ()
    came: float = 0.0
    first: float = -1.0
    done: float = -1.0
    made: int = 0
    """Output tokens so far."""
    computed: int = 0
    """Tokens in the cache."""
    todo: int = 0
    """Tokens to compute: of the prompt, and of the output before a preemption."""
    target: int = 0
    """Tokens in the cache after that."""
    held: list[object] = field(default_factory=list)
    transferred: bool = False


class Engine:
    def __init__(self, fleet: Fleet, hash_tokens: int, hands_over: bool, caches: bool) -> None:
        self.fleet, self.limits, self.steps = fleet, fleet.limits, fleet.steps
        self.hands_over = hands_over
        self.hash_tokens = hash_tokens
        self.blocks_each = hash_tokens // self.limits.block_tokens
        self.caches = caches and self.limits.caches and self.blocks_each > 0
        self.grows = not (self.limits.reserves or hands_over)
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.prefilling: list[Asked] = []
        self.now_computing: list[tuple[Asked, int]] = []
        self.shared: dict[object, int] = {}
        self.idle: OrderedDict[object, None] = OrderedDict()
        self.due: float | None = None
        self.load = 0
        self.peak = 0
        self.preemptions = 0
        self.late_s = 0.0

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def own_blocks(self, one: Asked) -> int:
        """Cache blocks that only this request uses."""
        if self.limits.reserves and not self.hands_over:
            whole = self.blocks_of(one.prompt + one.output - 1)
        else:
            whole = self.blocks_of(max(one.target, one.computed))
        return whole - len(one.held) * self.blocks_each

    @property
    def used(self) -> int:
        shared = len(self.shared) * self.blocks_each
        return shared + sum(self.own_blocks(one) for one in (*self.running, *self.prefilling))

    def forget(self) -> None:
        while self.used + len(self.idle) * self.blocks_each > self.limits.kv_blocks:
            self.idle.popitem(last=False)

    def let_go(self, one: Asked) -> None:
        for name in reversed(one.held):
            self.shared[name] -= 1
            if not self.shared[name]:
                del self.shared[name]
                self.idle[name] = None
        one.held = []

    def leading(self, one: Asked) -> list[object]:
        if not self.caches or one.transferred:
            return []
        most = min(one.prompt, one.prompt + one.made - 1) // self.hash_tokens
        found: list[object] = []
        for name in one.hashes[:most]:
            if name not in self.shared and name not in self.idle:
                break
            found.append(name)
        return found

    def finish_pass(self, now: float) -> tuple[list[Asked], list[Asked]]:
        """The finished requests, and those whose prompt goes to a decode worker."""
        left, handed = [], []
        for one in self.running:
            one.made += 1
            one.computed += 1
            one.target = one.computed
        self.forget()
        self.peak = max(self.peak, self.used)
        for one in [one for one in self.running if one.made == one.output]:
            self.running.remove(one)
            self.let_go(one)
            one.done = max(now, one.first)
            left.append(one)
        for one, tokens in self.now_computing:
            one.computed += tokens
            one.todo -= tokens
            if one.todo:
                continue
            self.prefilling.remove(one)
            if self.caches:
                whole = min(len(one.hashes), one.prompt // self.hash_tokens)
                for name in one.hashes[len(one.held) : whole]:
                    if name not in self.shared and name not in self.idle:
                        self.shared[name] = 1
                        one.held.append(name)
            if self.hands_over:
                self.let_go(one)
                handed.append(one)
            else:
                left += self.begin(one, now, self.late_s)
        self.now_computing = []
        return left, handed

    def begin(self, one: Asked, now: float, late_s: float = 0.0) -> list[Asked]:
        if one.first < 0:
            one.first = now + late_s
        one.made += 1
        if one.made == one.output:
            self.let_go(one)
            one.done = max(now, one.first)
            return [one]
        self.running.append(one)
        return []

    def needing(self) -> int:
        if not self.grows:
            return 0
        return sum(one.computed % self.limits.block_tokens == 0 for one in self.running)

    def begin_pass(self, now: float) -> list[Asked]:
        limits, steps = self.limits, self.steps
        preempted = False
        while self.needing() > limits.kv_blocks - self.used:
            last = self.running.pop()
            self.let_go(last)
            last.computed = last.target = last.todo = 0
            last.transferred = False
            self.waiting.insert(0, last)
            self.preemptions += 1
            preempted = True
        left: list[Asked] = []
        chunks: list[tuple[Asked, int, int]] = []
        tokens = 0
        budget = limits.batch_tokens - len(self.running)
        if self.prefilling:
            one = self.prefilling[0]
            take = min(one.todo, max(1, budget))
            chunks.append((one, take, one.computed))
            tokens += take
        cut = bool(chunks) and chunks[0][1] < chunks[0][0].todo
        free = limits.kv_blocks - self.used - self.needing()
        seats = limits.slots - len(self.running) - len(self.prefilling)
        while self.waiting and not preempted and not cut and seats > 0 and tokens < budget:
            one = self.waiting[0]
            length = one.prompt + one.made - (1 if one.transferred else 0)
            hits = self.leading(one)
            idling = sum(name in self.idle for name in hits) * self.blocks_each
            if limits.reserves and not self.hands_over:
                asked = self.blocks_of(one.prompt + one.output - 1)
            else:
                asked = self.blocks_of(length + 1) if self.grows else self.blocks_of(length)
            spare = int(limits.kv_blocks * WATERMARK) if self.grows and (self.running or tokens) else 0
            needed = asked - len(hits) * self.blocks_each + idling
            if needed > free - spare:
                break
            self.waiting.pop(0)
            free -= needed
            seats -= 1
            for name in hits:
                self.idle.pop(name, None)
                self.shared[name] = self.shared.get(name, 0) + 1
            one.held = list(hits)
            one.computed, one.target = len(hits) * self.hash_tokens, length
            one.todo = length - one.computed
            if one.transferred:
                one.computed, one.todo = length, 0
                one.made -= 1
                ended = self.begin(one, now)
                self.forget()
                if ended:
                    left += ended
                    free, seats = free + needed, seats + 1
                else:
                    budget -= 1
                continue
            take = min(one.todo, budget - tokens)
            cut = take < one.todo
            self.prefilling.append(one)
            chunks.append((one, take, one.computed))
            tokens += take
            self.forget()
        self.peak = max(self.peak, self.used)
        self.now_computing = [(one, take) for one, take, _ in chunks]
        count = len(self.running)
        if not tokens and not count:
            self.due = None
            return left
        context = sum(one.computed for one in self.running)
        took = steps.decode_s[count] + steps.context_s[count] * context if count else 0.0
        if tokens:
            pairs = sum(take * (depth + (take + 1) * 0.5) for _, take, depth in chunks)
            prompt_s = steps.prompt_s[tokens] + steps.pair_s * pairs
            self.late_s = steps.hidden * prompt_s + steps.lag * took if count else 0.0
            took = took + steps.share * (prompt_s - steps.once_s) if count else prompt_s
        self.due = now + took
        return left


def stepwise(
    fleet: Fleet,
    requests: list[Asked],
    hash_tokens: int = 0,
    concurrency: int | None = None,
    apart_s: float = 0.0,
) -> list[Engine]:
    """Simulate all requests. The only router is the first of the least loaded replicas."""
    assert fleet.router == "least-loaded"
    prefills = fleet.prefills
    engines = [
        Engine(fleet, hash_tokens, index < prefills, index < (prefills or fleet.replicas))
        for index in range(fleet.replicas)
    ]
    fronts = engines[:prefills] if prefills else engines
    room = min(fleet.limits.kv_blocks * fleet.limits.block_tokens, fleet.limits.longest)
    coming = [one.came for one in requests]
    if concurrency is not None:
        coming = [apart_s * number for number in range(min(concurrency, len(requests)))]
    sent: list[tuple[float, int, Asked]] = []
    free_at = dict.fromkeys(range(fleet.replicas), 0.0)
    woken: dict[int, float] = {}
    number = 0
    while True:
        boundaries = [(engine.due, index) for index, engine in enumerate(engines) if engine.due is not None]
        times = [time for time, _ in boundaries] + [time for time, _, _ in sent]
        if number < len(coming) and (not times or coming[number] <= min(times)):
            now, one = coming[number], requests[number]
            number += 1
            if one.prompt + one.output > room:
                if concurrency is not None and len(coming) < len(requests):
                    coming.append(max(now, coming[-1]))
                continue
            one.came = now
            _give(min(fronts, key=lambda engine: engine.load), one, now, woken, engines)
            continue
        if not times:
            return engines
        if sent and min(sent)[0] <= min(times):
            sent.sort(key=lambda entry: entry[:2])
            now, _, one = sent.pop(0)
            one.transferred = True
            one.made = 1
            _give(min(engines[prefills:], key=lambda engine: engine.load), one, now, woken, engines)
            continue
        now, index = min(boundaries)
        engine = engines[index]
        left: list[Asked] = []
        handed: list[Asked] = []
        if index in woken:
            del woken[index]
        else:
            left, handed = engine.finish_pass(now)
        left += engine.begin_pass(now)
        engine.load -= len(left) + len(handed)
        at = max(now, free_at[index])
        for one in handed:
            at += one.prompt * fleet.transfer.token_s
            sent.append((at + fleet.transfer.fixed_s, one.number, one))
        free_at[index] = at
        if concurrency is not None:
            for number_left in range(min(len(left), len(requests) - len(coming))):
                coming.append(max(now + fleet.steps.accept_s + apart_s * number_left, coming[-1]))


def _give(engine: Engine, one: Asked, now: float, woken: dict[int, float], engines: list[Engine]) -> None:
    engine.load += 1
    engine.waiting.append(one)
    if engine.due is None:
        engine.due = now
        woken[engines.index(engine)] = now
