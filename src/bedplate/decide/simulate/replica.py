"""One simulated engine: continuous batching with chunked prefill over a paged cache.

Between two events the same sequences decode, and the time of a pass is affine in their tokens in the cache. So the time
of many passes is the sum of an arithmetic series, and the simulation jumps from event to event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import NamedTuple

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.cache import Holders, PrefixCache

IDLE = math.inf
NOBODY = -1
BLOCK_TOKENS = 16
WATERMARK = 0.01
"""Share of the cache that an admission leaves free for sequences that decode (vLLM's default)."""


class Steps(NamedTuple):
    """The times of one replica's passes in seconds. Tables, because they are looked up for every event."""

    decode_s: tuple[float, ...]
    """By the number of decoding sequences: the part that does not depend on their contexts."""
    context_s: tuple[float, ...]
    """By the number of decoding sequences: the time per token that they have in the cache together."""
    prompt_s: tuple[float, ...]
    """By the prompt tokens of a pass: the time without attention to earlier tokens."""
    pair_s: float = 0.0
    """Time per pair of a prompt token and a token that it attends to."""
    share: float = 1.0
    """Share of a prompt's time that it adds to a pass with decoding sequences."""
    once_s: float = 0.0
    """The part of a prompt's time that a pass has only once, such as reading the weights."""
    hidden: float = 0.0
    """Share of a prompt's time in such a pass that only delays its own tokens, after their passes."""
    lag: float = 0.0
    """Passes until a token of such a prompt is sent."""
    accept_s: float = 0.0
    """Time from a request's arrival to the scheduler and back; no pass waits for it."""


class ReplicaLimits(NamedTuple):
    """The capacity of one replica."""

    slots: int
    """Maximum concurrent requests."""
    batch_tokens: int
    """Maximum tokens of one pass, prompts and output together."""
    kv_blocks: int
    block_tokens: int = BLOCK_TOKENS
    reserves: bool = False
    """Whether admission reserves cache for the whole output, so that no request is ever preempted."""
    caches: bool = True
    """Whether it has a prefix cache."""
    longest: float = math.inf
    """Maximum tokens of one request, prompt and output together; longer ones are refused."""


class SimulatedReplica:
    """An engine's scheduler. It has at most one pending event: the end of one pass or of several."""

    __slots__ = (
        "_began", "_block", "_book", "_budget", "_context", "_count", "_ends", "_events", "_first_s", "_fresh",
        "_grows", "_half_s", "_hands_over", "_held", "_index", "_jumps", "_late_s", "_load", "_order",
        "_partial", "_passes", "_phases", "_place", "_slots", "_step", "_steps", "_todo", "_unit", "_used", "_waiting",
        "_watermark", "busy_s", "cache", "capacity", "computed_tokens", "due", "handed", "kv_block_s", "left",
        "peak_blocks", "preemptions",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        book: Book,
        steps: Steps,
        limits: ReplicaLimits,
        events: list[tuple[float, int]],
        load: list[int],
        *,
        place: int | None = None,
        unit: bool = True,
        hands_over: bool = False,
        holders: Holders | None = None,
    ) -> None:
        self._index, self._book, self._steps = index, book, steps
        self._slots, self._budget, self._block = limits.slots, limits.batch_tokens, limits.block_tokens
        self.capacity = limits.kv_blocks
        self._grows = not (limits.reserves or hands_over)
        self._watermark = int(limits.kv_blocks * WATERMARK) if self._grows else 0
        self._events, self._load, self._unit = events, load, unit
        self._place = index if place is None else place
        self._hands_over = hands_over
        self.handed: list[int] = []
        """Prompts that were computed for a decode worker since the caller last cleared this list."""
        self.left: list[int] = []
        """Requests that finished since the caller last cleared this list."""
        self._waiting: deque[int] = deque()
        self._ends: list[tuple[int, int]] = []
        """A heap of the passes after which sequences end."""
        self._order: dict[int, None] = {}
        """Decoding sequences in the order of admission: the last one is preempted first."""
        self._phases = [0] * limits.block_tokens
        """How many sequences need a new block in pass 0, 1, 2 … modulo the tokens of a block."""
        self._held: dict[int, list[Hashable]] = {}
        """Blocks of the prefix cache that a request uses."""
        self._fresh: list[int] = []
        """Requests whose prompts the current pass completes."""
        self._partial, self._todo = NOBODY, 0
        self._step = self._count = self._context = self._used = self._passes = 0
        self._jumps = False
        self._began = self._first_s = self._half_s = self._late_s = 0.0
        self.due = IDLE
        self.busy_s = self.kv_block_s = 0.0
        self.peak_blocks = self.preemptions = self.computed_tokens = 0
        blocks_each = book.hash_tokens // limits.block_tokens
        cached = limits.caches and book.hashes is not None and blocks_each > 0
        self.cache = PrefixCache(blocks_each, index, holders) if cached else None

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + self._count + len(self._fresh) + (self._partial != NOBODY)

    @property
    def used_blocks(self) -> int:
        """Blocks of running requests; unused blocks of the prefix cache count as free."""
        return self._used

    def arrive(self, rid: int, now: float) -> None:
        waiting = self._waiting
        waiting.append(rid)
        if self.due == IDLE:
            # A separate event, so that all requests that arrive at this moment are scheduled together.
            self.due = now
            self._passes = 0
            heappush(self._events, (now, self._index))
            return
        if not self._jumps or len(waiting) > 1 or self._count >= self._slots:
            return
        # The request is scheduled after the current pass, so the jump ends there.
        first_s, half_s = self._first_s, self._half_s
        span = now - self._began
        if half_s > 0.0:
            linear = first_s - half_s
            passes = int((math.sqrt(linear * linear + 4.0 * half_s * span) - linear) / (2.0 * half_s))
        else:
            passes = int(span / first_s)
        most = self._passes
        if passes >= most:
            passes = most - 1
        if passes < 1:
            passes = 1
        while passes < most and self._began + (passes * first_s + half_s * (passes * (passes - 1))) < now:
            passes += 1
        while passes > 1 and self._began + ((passes - 1) * first_s + half_s * ((passes - 1) * (passes - 2))) >= now:
            passes -= 1
        if passes < most:
            self._passes = passes
            self.due = due = self._began + (passes * first_s + half_s * (passes * (passes - 1)))
            heappush(self._events, (due, self._index))

    def wake(self, now: float) -> None:
        """Record the passes that have ended, and start the next ones."""
        passes = self._passes
        if passes:
            self._close(now, passes)
        self._open(now)

    def _close(self, now: float, passes: int) -> None:
        book, count = self._book, self._count
        took = now - self._began
        self.busy_s += took
        before = self._used
        if count:
            self._context += count * passes
            if self._grows:
                self._grow(passes)
            self._step = step = self._step + passes
            ends, ending = self._ends, book.ending
            used = self._used
            while ends and ends[0][0] <= step:
                at, rid = heappop(ends)
                if ending[rid] == at:
                    self._finish(rid, now)
        else:
            self._step += passes
            used = before
        if used > self.peak_blocks:
            self.peak_blocks = used
        self.kv_block_s += (before + used) * 0.5 * took
        if self._fresh:
            for rid in self._fresh:
                if self.cache is not None:
                    self._keep(rid)
                if self._hands_over:
                    self._release(rid, book.tokens[rid])
                    self._load[self._place] -= 1 if self._unit else book.weight[rid]
                    self.handed.append(rid)
                else:
                    self._join(rid, now, self._late_s)
            self._fresh = []

    def _grow(self, passes: int) -> None:
        """Add the blocks that the output of `passes` fills."""
        block, phases = self._block, self._phases
        start = self._step % block
        if passes == 1:
            grown = phases[start]
        else:
            whole, rest = divmod(passes, block)
            grown = whole * self._count
            if rest:
                end = start + rest
                grown += sum(phases[start:end])
                if end > block:
                    grown += sum(phases[: end - block])
        if grown:
            self._used += grown
            if self.cache is not None:
                self.cache.shrink(self.capacity - self._used)

    def _join(self, rid: int, now: float, late_s: float = 0.0) -> None:
        """Start decoding: the prompt is in the cache, and each token is sent `late_s` after its pass."""
        book = self._book
        if book.first[rid] < 0.0:
            book.first[rid] = now + late_s
            book.late_s[rid] = late_s
        left = book.left[rid] - 1
        tokens = book.tokens[rid]
        if left <= 0:
            self._release(rid, tokens)
            self._leave(rid, now)
            return
        step = self._step
        book.joined[rid] = step
        book.ending[rid] = end = step + left
        heappush(self._ends, (end, rid))
        self._order[rid] = None
        self._count += 1
        self._context += tokens
        if self._grows:
            self._phases[(step - tokens) % self._block] += 1

    def _finish(self, rid: int, now: float) -> None:
        self._stop(rid)
        self._leave(rid, now)

    def _stop(self, rid: int) -> int:
        """Remove a sequence from decoding; returns the number of passes that it was in."""
        book, step = self._book, self._step
        del self._order[rid]
        joined, tokens = book.joined[rid], book.tokens[rid]
        made = step - joined
        self._count -= 1
        self._context -= tokens + made
        if self._grows:
            self._phases[(joined - tokens) % self._block] -= 1
        self._release(rid, tokens + made)
        return made

    def _leave(self, rid: int, now: float) -> None:
        book = self._book
        book.done[rid] = now + book.late_s[rid]
        self._load[self._place] -= 1 if self._unit else book.weight[rid]
        self.left.append(rid)

    def _release(self, rid: int, tokens: int) -> None:
        if not self._grows and not self._hands_over:
            # The reserved tokens; `tokens` and `left` change only if requests are preempted.
            tokens = self._book.tokens[rid] + self._book.left[rid] - 1
        blocks = -(-tokens // self._block)
        if self.cache is not None and (held := self._held.pop(rid, None)):
            blocks += self.cache.drop(held) - len(held) * self.cache.blocks_each
        self._used -= blocks

    def _keep(self, rid: int) -> None:
        """Add the computed prompt to the prefix cache."""
        book, cache = self._book, self.cache
        if cache is None or book.hashes is None:
            return
        held = self._held.get(rid)
        known = len(held) if held else 0
        whole = min(len(book.hashes[rid]), book.prompt[rid] // book.hash_tokens)
        if whole > known:
            taken = cache.put(book.hashes[rid][known:whole])
            if taken:
                self._held.setdefault(rid, []).extend(taken)

    def _preempt(self) -> None:
        """Preempt the last admitted sequence; its output so far becomes part of its prompt."""
        rid = next(reversed(self._order))
        book = self._book
        made = self._stop(rid) + 1
        book.tokens[rid] += made
        book.left[rid] -= made
        book.ending[rid] = NOBODY
        book.ready[rid] = 0
        self._waiting.appendleft(rid)
        self.preemptions += 1

    def _open(self, now: float) -> None:
        preempted = False
        if self._grows and self._count:
            phase = self._step % self._block
            while self._phases[phase] > self.capacity - self._used:
                self._preempt()
                preempted = True
        tokens, pairs = 0, 0.0
        if self._partial != NOBODY:
            tokens, pairs = self._continue_prompt()
        if self._waiting and not preempted and self._partial == NOBODY:
            tokens, pairs = self._admit(tokens, pairs, now)
        count, steps = self._count, self._steps
        self._began = now
        if tokens:
            took = steps.prompt_s[tokens] + steps.pair_s * pairs
            self._late_s = 0.0
            if count:
                others = steps.decode_s[count] + steps.context_s[count] * self._context
                self._late_s = steps.hidden * took + steps.lag * others
                took = others + steps.share * (took - steps.once_s)
            self._passes = 1
            self._jumps = False
            self.computed_tokens += tokens
        elif count:
            ends, ending, step = self._ends, self._book.ending, self._step
            while ending[ends[0][1]] != ends[0][0]:
                heappop(ends)
            passes = ends[0][0] - step
            if preempted:
                passes = 1
            elif self._grows:
                free = self.capacity - self._used
                if count * (passes // self._block + 1) > free:
                    passes = min(passes, self._count_passes_within(free))
            each = steps.context_s[count]
            self._first_s = first_s = steps.decode_s[count] + each * self._context
            self._half_s = half_s = each * count * 0.5
            self._passes = passes
            self._jumps = passes > 1
            took = passes * first_s + half_s * (passes * (passes - 1))
        else:
            self.due = IDLE
            self._jumps = False
            self._passes = 0
            return
        self.due = due = now + took
        heappush(self._events, (due, self._index))

    def _count_passes_within(self, free: int) -> int:
        """Number of passes until the output needs more than `free` blocks."""
        block, phases = self._block, self._phases
        whole, rest = divmod(free, self._count)
        passes, phase = whole * block, self._step % block
        while phases[phase] <= rest:
            rest -= phases[phase]
            passes += 1
            phase = (phase + 1) % block
        return passes

    def _continue_prompt(self) -> tuple[int, float]:
        """Schedule the next chunk of the unfinished prompt."""
        rid, budget = self._partial, self._budget - self._count
        todo = self._todo
        take = min(todo, max(budget, 1))
        depth = self._book.tokens[rid] - todo
        self._todo = todo - take
        if take == todo:
            self._partial = NOBODY
            self._fresh.append(rid)
        return take, take * (depth + (take + 1) * 0.5)

    def _admit(self, tokens: int, pairs: float, now: float) -> tuple[int, float]:
        """Admit waiting requests in order while slots, cache blocks and the tokens of a pass suffice."""
        waiting, book, block, grows = self._waiting, self._book, self._block, self._grows
        slots = self._slots - self._count - len(self._fresh)
        budget = self._budget - self._count
        free = self.capacity - self._used
        if grows:
            free -= self._phases[self._step % block]
        while waiting and slots > 0 and tokens < budget:
            rid = waiting[0]
            length = book.tokens[rid]
            hits = idling = 0
            if self.cache is not None and book.hashes is not None and not book.ready[rid]:
                most = min(book.prompt[rid], length - 1) // book.hash_tokens
                hits, idling = self.cache.find_leading(book.hashes[rid], most)
                idling *= self.cache.blocks_each
            if grows or self._hands_over:
                blocks = -(-length // block)
                # One token more, because the first decode pass may need a block.
                asked = -(-(length + 1) // block) if grows else blocks
            else:
                blocks = asked = -(-(length + book.left[rid] - 1) // block)
            shared = hits * self.cache.blocks_each if self.cache is not None else 0
            # The last blocks are kept for decoding sequences, if there are any.
            spare = self._watermark if self._count or tokens else 0
            if asked - shared + idling > free - spare:
                break
            waiting.popleft()
            slots -= 1
            free -= asked - shared + idling
            self._used += blocks - shared + idling
            if hits and self.cache is not None and book.hashes is not None:
                names = list(book.hashes[rid][:hits])
                self.cache.hold(names)
                self._held[rid] = names
                book.hits.append(hits * book.hash_tokens)
            if self.cache is not None:
                self.cache.shrink(self.capacity - self._used)
            if book.ready[rid]:
                self._join(rid, now)
                if book.left[rid] > 1:
                    budget -= 1
                else:
                    # Its only token was computed with the prompt.
                    slots, free = slots + 1, free + asked
                continue
            depth = hits * book.hash_tokens
            todo = length - depth
            take = budget - tokens
            if take >= todo:
                take = todo
                self._fresh.append(rid)
            else:
                self._partial, self._todo = rid, todo - take
            tokens += take
            pairs += take * (depth + (take + 1) * 0.5)
        if self._used > self.peak_blocks:
            self.peak_blocks = self._used
        return tokens, pairs
