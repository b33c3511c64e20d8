"""The workload in a trace, in one pass: lengths, arrivals, requests in flight and shared prefixes."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from bedplate.facts.traces import TOKEN_ERROR, TOKEN_RULE, BadRows, detect_format, open_trace, parse_trace
from bedplate.values.record import Basis
from bedplate.values.workload import (
    Arrivals,
    CacheSize,
    InFlight,
    LengthBin,
    LengthDistribution,
    PrefixReuse,
    RequestShape,
    Spread,
    TraceFormat,
    TraceSummary,
    Workload,
)

ASSUMED_TTFT_MS = 500.0
ASSUMED_TPOT_MS = 50.0
BATCH = 4096
EXACT_TOKENS = 2**16
"""Lengths below this are counted exactly; above, in steps of 1/32,768 of the length, to limit the number of counters.
"""
MAX_WINDOWS = 2**20
"""Seconds with requests that are counted separately: twelve days without a pause."""
HELD_BACK = 4096
"""Arrivals buffered for sorting, because logs are written as requests end."""
MAX_BLOCKS = 200_000
"""Prefix blocks kept in memory. Beyond this, every second one is sampled, then every fourth, and so on."""
MIXER = 0x9E3779B97F4A7C15
"""Multiplier that spreads consecutive block ids over all bits."""
CACHE_TOKENS = (1_000_000, 10_000_000, 100_000_000)
"""Typical cache sizes by order of magnitude: a replica's accelerators, its host's memory, and a shared store."""
SERIES_PARTS = 60
COARSE_CLOCK = 0.5
MODELS_NAMED = 20
MAX_TENANTS = 100_000


def summarize_trace(
    path: Path | str,
    kind: TraceFormat | None = None,
    *,
    ttft_ms: float = ASSUMED_TTFT_MS,
    tpot_ms: float = ASSUMED_TPOT_MS,
    cache_tokens: tuple[int, ...] = CACHE_TOKENS,
) -> TraceSummary:
    """Read a trace once and summarise its workload. `ttft_ms` and `tpot_ms` are assumed if the trace has no times."""
    source = "standard input" if str(path) == "-" else Path(path).name
    with open_trace(path) as stream:
        known = kind or detect_format(stream, source)
        bad = BadRows(source)
        meter = TraceMeter(ttft_ms=ttft_ms, tpot_ms=tpot_ms, cache_tokens=cache_tokens)
        meter.add_all(parse_trace(stream, known, bad))
    bad.check()
    return meter.make_summary(source, known, bad)


class TraceMeter:
    """All statistics of a trace, in memory that does not grow with it."""

    def __init__(
        self,
        *,
        ttft_ms: float = ASSUMED_TTFT_MS,
        tpot_ms: float = ASSUMED_TPOT_MS,
        cache_tokens: tuple[int, ...] = CACHE_TOKENS,
    ) -> None:
        self._prompt, self._output, self._total = LengthMeter(), LengthMeter(), LengthMeter()
        self._arrivals = ArrivalMeter()
        self._prefix = PrefixMeter(cache_tokens)
        self._cached = CachedMeter()
        self._ttft_ms, self._tpot_ms = ttft_ms, tpot_ms
        self._requests = 0
        self._timed = self._with_duration = 0
        self._outcomes: Counter[str] = Counter()
        self._tenants: set[str] = set()
        self._models: dict[str, None] = {}

    def add_all(self, shapes: Iterable[RequestShape]) -> None:
        rest = iter(shapes)
        while batch := list(islice(rest, BATCH)):
            self._add_batch(batch)

    def _add_batch(self, batch: list[RequestShape]) -> None:
        """Count a batch of requests, which is several times faster than one by one."""
        self._requests += len(batch)
        both = [(shape.prompt_tokens, shape.output_tokens) for shape in batch]
        self._prompt.add([prompt for prompt, _ in both if prompt is not None])
        self._output.add([output for _, output in both if output is not None])
        self._total.add([prompt + output for prompt, output in both if prompt is not None and output is not None])
        ttft_ms, tpot_ms = self._ttft_ms, self._tpot_ms
        arrivals = []
        for shape in batch:
            if shape.started_s is not None:
                lasts_ms = shape.duration_ms
                if lasts_ms is None:
                    lasts_ms = ttft_ms + tpot_ms * (shape.output_tokens or 0)
                else:
                    self._with_duration += 1
                arrivals.append((shape.started_s, lasts_ms / 1000))
        self._timed += len(arrivals)
        self._arrivals.add(arrivals)
        for shape in batch:
            if shape.prefix_hashes and shape.prompt_tokens is not None:
                self._prefix.add(shape.prefix_hashes, shape.prompt_tokens, shape.prefix_block_tokens)
        self._add_rare_fields(batch)

    def _add_rare_fields(self, batch: list[RequestShape]) -> None:
        """Count the fields that only some logs have."""
        for shape in batch:
            if shape.cached_tokens is not None and shape.prompt_tokens is not None:
                self._cached.add(shape.cached_tokens, shape.prompt_tokens)
            if shape.outcome != "ok":
                self._outcomes[shape.outcome] += 1
            if shape.tenant is not None and len(self._tenants) < MAX_TENANTS:
                self._tenants.add(shape.tenant)
            if shape.model is not None and len(self._models) < MODELS_NAMED:
                self._models[shape.model] = None

    def make_summary(self, source: str, kind: TraceFormat, bad: BadRows) -> TraceSummary:
        estimated = kind == "sharegpt"
        lengths = {
            name: meter.make_distribution("estimate" if estimated else "reported", TOKEN_ERROR if estimated else None)
            for name, meter in (("prompt", self._prompt), ("output", self._output), ("total", self._total))
        }
        arrivals = self._arrivals.make_arrivals() if self._timed else None
        return TraceSummary(
            source=source,
            format=kind,
            requests=self._requests,
            bad_rows=bad.count,
            bad_examples=tuple(bad.examples),
            outcomes=dict(self._outcomes),
            tenants=len(self._tenants) or None,
            models=tuple(self._models),
            prompt=lengths["prompt"],
            output=lengths["output"],
            total=lengths["total"],
            arrivals=arrivals,
            in_flight=self._make_in_flight() if arrivals is not None and arrivals.span_s else None,
            prefix=self._make_reuse(kind),
            notes=tuple(self._make_notes(kind, arrivals)),
        )

    def _make_in_flight(self) -> InFlight:
        measured = self._with_duration == self._timed
        assumption = None
        if not measured:
            some = (
                f" for the {1 - self._with_duration / self._timed:.0%} without a duration"
                if self._with_duration
                else ""
            )
            assumption = f"{self._ttft_ms:g} ms to the first token and {self._tpot_ms:g} ms for each one{some}"
        return InFlight(
            spread=self._arrivals.compute_in_flight(),
            basis="measured" if measured else "estimate",
            assumption=assumption,
            request_s=self._arrivals.mean_request_s,
        )

    def _make_reuse(self, kind: TraceFormat) -> PrefixReuse | None:
        if self._prefix.requests:
            return self._prefix.make_reuse()
        if self._cached.requests:
            basis: Basis = "estimate" if kind == "sharegpt" else "reported"
            how = "earlier turns of the same conversation" if kind == "sharegpt" else "the engine's own count"
            return self._cached.make_reuse(basis, how)
        return None

    def _make_notes(self, kind: TraceFormat, arrivals: Arrivals | None) -> list[str]:
        notes = []
        if kind == "sharegpt":
            notes.append(f"tokens are estimated without a tokenizer, {TOKEN_RULE}, ± {TOKEN_ERROR:.0%}")
        if arrivals is None:
            notes.append("the trace has no times, so arrival rate, bursts and requests in flight are unknown")
        elif arrivals.same_moment > COARSE_CLOCK:
            notes.append(
                "the trace's clock is coarse: most requests share a timestamp, so gaps and short peaks are not reliable"
            )
        if unknown := self._requests - self._prompt.count:
            notes.append(f"{unknown:,} requests without a prompt length are not included in the lengths")
        return notes + self._arrivals.make_notes() + self._prefix.make_notes()


class LengthMeter:
    """Counts lengths. Percentiles are exact up to 65,536 tokens and nearly exact above."""

    def __init__(self) -> None:
        self.count = self.total = self._max = 0
        self._counts: Counter[int] = Counter()

    def add(self, lengths: list[int]) -> None:
        if not lengths:
            return
        self.count += len(lengths)
        self.total += sum(lengths)
        longest = max(lengths)
        self._max = max(self._max, longest)
        self._counts.update(lengths if longest < EXACT_TOKENS else map(_round_long, lengths))

    def make_distribution(self, basis: Basis, error: float | None) -> LengthDistribution:
        return LengthDistribution(
            spread=compute_spread(self._counts, mean=self.total / self.count if self.count else 0.0, most=self._max),
            total_tokens=self.total,
            bins=self._make_bins(),
            basis=basis,
            error=error,
        )

    def _make_bins(self) -> tuple[LengthBin, ...]:
        bins: Counter[int] = Counter()
        for tokens, requests in self._counts.items():
            bins[tokens.bit_length()] += requests
        if not bins:
            return ()
        return tuple(
            LengthBin(from_tokens=1 << bits - 1 if bits else 0, to_tokens=(1 << bits) - 1, requests=bins[bits])
            for bits in range(min(bins), max(bins) + 1)
        )


def _round_long(tokens: int) -> int:
    """The length itself; for a very long one, its first 16 bits."""
    shift = max(0, tokens.bit_length() - 16)
    return tokens >> shift << shift


def compute_spread(weights: dict[int, int] | dict[int, float], mean: float, most: float) -> Spread:
    """Percentiles of weighted values: the smallest value that reaches the share."""
    shares = {0.5: 0.0, 0.9: 0.0, 0.99: 0.0}
    whole = sum(weights.values())
    reached: float = 0
    pending = list(shares)
    for value in sorted(weights):
        reached += weights[value]
        while pending and reached >= pending[0] * whole * (1 - 1e-12):
            shares[pending.pop(0)] = float(value)
    return Spread(mean=mean, p50=shares[0.5], p90=shares[0.9], p99=shares[0.99], max=float(most))


class ArrivalMeter:
    """Rate, bursts and requests in flight, from arrivals in nearly sorted order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float]] = []
        self._windows: Counter[int] = Counter()
        self._width_s = 1
        self._count = self._late = self._same = 0
        self._first_s = math.inf
        self._previous_s: float | None = None
        self._gaps_s = self._gaps_squared = 0.0
        self._ends: list[float] = []
        self._levels: dict[int, float] = {}
        self._level_since_s = 0.0
        self._most = 0
        self._durations_s = 0.0

    @property
    def mean_request_s(self) -> float:
        return self._durations_s / self._count if self._count else 0.0

    def add(self, arrivals: list[tuple[float, float]]) -> None:
        """Add arrivals in log order: arrival time and duration of each."""
        self._count += len(arrivals)
        self._durations_s += sum(lasts_s for _, lasts_s in arrivals)
        self._windows.update([int(started_s // self._width_s) for started_s, _ in arrivals])
        while len(self._windows) > MAX_WINDOWS:
            self._widen()
        self._waiting += arrivals
        if len(self._waiting) > 2 * HELD_BACK:
            self._process_oldest(len(self._waiting) - HELD_BACK)

    def _widen(self) -> None:
        self._width_s *= 10
        wider: Counter[int] = Counter()
        for window, requests in self._windows.items():
            wider[window // 10] += requests
        self._windows = wider

    def _process_oldest(self, count: int) -> None:
        """Process the oldest buffered arrivals in order of time.

        The rest stay buffered, because earlier ones may follow.
        """
        self._waiting.sort()
        for started_s, lasts_s in self._waiting[:count]:
            self._add_in_flight(self._count_gap(started_s), lasts_s)
        del self._waiting[:count]

    def _count_gap(self, started_s: float) -> float:
        """Count the gap since the previous arrival."""
        previous_s = self._previous_s
        if previous_s is None:
            self._first_s = self._level_since_s = started_s
        elif started_s >= previous_s:
            gap_s = started_s - previous_s
            self._gaps_s += gap_s
            self._gaps_squared += gap_s * gap_s
            if not gap_s:
                self._same += 1
        else:
            # Later in the log than the whole buffer: treat it as arriving now.
            self._late += 1
            self._first_s = min(self._first_s, started_s)
            return previous_s
        self._previous_s = started_s
        return started_s

    def _add_in_flight(self, now_s: float, lasts_s: float) -> None:
        """Add a request in flight, after removing those that ended before."""
        ends, levels, since_s = self._ends, self._levels, self._level_since_s
        while ends and ends[0] <= now_s:
            level, end_s = len(ends), heapq.heappop(ends)
            levels[level] = levels.get(level, 0.0) + end_s - since_s
            since_s = end_s
        level = len(ends)
        levels[level] = levels.get(level, 0.0) + now_s - since_s
        self._level_since_s = now_s
        heapq.heappush(ends, now_s + lasts_s)
        if level >= self._most:
            self._most = level + 1

    def _finish(self) -> None:
        self._process_oldest(len(self._waiting))

    def compute_in_flight(self) -> Spread:
        """The distribution from the first arrival to the last. The time after it has no arrivals and is left out."""
        self._finish()
        whole_s = sum(self._levels.values())
        mean = sum(level * took_s for level, took_s in self._levels.items()) / whole_s if whole_s else float(self._most)
        return compute_spread(self._levels, mean=mean, most=self._most)

    def make_arrivals(self) -> Arrivals:
        self._finish()
        span_s = (self._previous_s or 0.0) - self._first_s
        gaps = self._count - 1 - self._late
        return Arrivals(
            span_s=span_s,
            requests_per_s=(self._count - 1) / span_s if span_s else None,
            gap_cv=self._compute_gap_cv(gaps),
            peak_to_mean_1s=self._compute_peak_to_mean(1, span_s),
            peak_to_mean_10s=self._compute_peak_to_mean(10, span_s),
            peak_to_mean_60s=self._compute_peak_to_mean(60, span_s),
            same_moment=self._same / gaps if gaps > 0 else 0.0,
            series=self._make_series(span_s),
        )

    def make_notes(self) -> list[str]:
        if not self._late:
            return []
        return [f"{self._late:,} requests are far out of order: bursts and requests in flight are approximate"]

    def _compute_gap_cv(self, gaps: int) -> float | None:
        if gaps < 2 or not self._gaps_s:
            return None
        mean = self._gaps_s / gaps
        return math.sqrt(max(0.0, self._gaps_squared / gaps - mean * mean)) / mean

    def _compute_peak_to_mean(self, width_s: int, span_s: float) -> float | None:
        """`None` if the windows are wider than that, or the trace has fewer than two of them."""
        if self._width_s > width_s or span_s < 2 * width_s:
            return None
        step = width_s // self._width_s
        counts: Counter[int] = Counter()
        for window, requests in self._windows.items():
            counts[window // step] += requests
        return max(counts.values()) / width_s / (self._count / span_s)

    def _make_series(self, span_s: float) -> tuple[float, ...]:
        if not span_s:
            return ()
        parts = max(1, min(SERIES_PARTS, int(span_s // self._width_s)))
        counts = [0] * parts
        for window, requests in self._windows.items():
            middle_s = (window + 0.5) * self._width_s - self._first_s
            counts[min(parts - 1, max(0, int(middle_s / span_s * parts)))] += requests
        return tuple(requests * parts / span_s for requests in counts)


class PrefixMeter:
    """Simulates prefix caches: an unlimited one, and some of limited size with LRU eviction.

    A block's hash covers the prompt up to it, and whoever uses the end of a prompt also uses its beginning. Whether a
    block is cached therefore does not depend on its neighbors, and a sample of the blocks in proportionally smaller
    caches gives the same shares. The meter counts misses, not hits: a block that everyone shares misses once, so no
    single block dominates the sample.
    """

    def __init__(self, cache_tokens: tuple[int, ...] = CACHE_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self.requests = 0
        self._cache_tokens, self._max_blocks = cache_tokens, max_blocks
        self._block_tokens = 0
        self._caches: list[LruPrefixCache] = []
        self._seen: set[int] = set()
        self._skip_mask = 0
        self._tokens = self._new_tokens = 0
        self._matched = LengthMeter()
        self._compared = self._other_blocks = 0

    def add(self, hashes: tuple[int | str, ...], prompt_tokens: int, block_tokens: int | None) -> None:
        if not self._block_tokens:
            self._block_tokens = block_tokens or max(1, -(-prompt_tokens // len(hashes)))
            self._caches = [LruPrefixCache(max(1, tokens // self._block_tokens)) for tokens in self._cache_tokens]
        elif block_tokens not in (None, self._block_tokens):
            self._other_blocks += 1
            return
        self.requests += 1
        self._tokens += prompt_tokens
        blocks = [block if type(block) is int else _hash_to_number(block) for block in hashes]
        if not self._skip_mask:
            self._compare(blocks, prompt_tokens)
        self._count(blocks, prompt_tokens)

    def _compare(self, blocks: list[int], prompt_tokens: int) -> None:
        """Compare one prompt with the largest cache."""
        self._compared += 1
        if tokens := min(self._caches[-1].count_leading(blocks) * self._block_tokens, prompt_tokens):
            self._matched.add([tokens])

    def _count(self, blocks: list[int], prompt_tokens: int) -> None:
        """Count what every cache misses of the prompt, and add the prompt to it."""
        size, mask, weight = self._block_tokens, self._skip_mask, self._skip_mask + 1
        sampled = [block for block in blocks if not (block * MIXER >> 32) & mask] if mask else blocks
        # The last block may be shorter than the others, and tokens after it may belong to no block.
        short = max(0, len(blocks) * size - prompt_tokens) * weight
        uncovered = max(0, prompt_tokens - len(blocks) * size)
        last = blocks[-1]
        new = [block for block in sampled if block not in self._seen]
        self._new_tokens += uncovered + len(new) * size * weight - (short if last in new else 0)
        for cache in self._caches:
            missed, last_missed = cache.add_prompt(sampled, last)
            cache.missed_tokens += uncovered + missed * size * weight - (short if last_missed else 0)
        self._seen.update(new)
        if len(self._seen) > self._max_blocks:
            self._reduce_sampling()

    def _reduce_sampling(self) -> None:
        self._skip_mask = mask = self._skip_mask * 2 + 1
        self._seen = {block for block in self._seen if not (block * MIXER >> 32) & mask}
        for cache, tokens in zip(self._caches, self._cache_tokens, strict=True):
            cache.keep(self._seen, max(1, tokens // self._block_tokens // (mask + 1)))

    def make_reuse(self) -> PrefixReuse:
        def compute_saved_share(missed_tokens: int) -> float:
            return min(1.0, max(0.0, 1 - missed_tokens / self._tokens)) if self._tokens else 0.0

        by_cache = tuple(
            CacheSize(tokens=tokens, saved_share=compute_saved_share(cache.missed_tokens))
            for tokens, cache in zip(self._cache_tokens, self._caches, strict=True)
        )
        return PrefixReuse(
            saved_share=compute_saved_share(self._new_tokens),
            by_cache=by_cache,
            block_tokens=self._block_tokens,
            sharing_requests=self._matched.count / self._compared,
            typical_tokens=int(self._matched.make_distribution("reported", None).spread.p50),
            saved_tokens_per_request=by_cache[0].saved_share * self._tokens / self.requests,
            basis="measured",
            how=f"hashes of {self._block_tokens}-token blocks",
        )

    def make_notes(self) -> list[str]:
        notes = []
        if self._skip_mask:
            notes.append(
                f"prefix reuse is computed from one in {self._skip_mask + 1} prompt blocks, and sharing between "
                f"requests from the first {self._compared:,}"
            )
        if self._other_blocks:
            notes.append(f"{self._other_blocks:,} requests with another block size are not included in prefix reuse")
        return notes


class LruPrefixCache:
    """A prefix cache of limited size with LRU eviction."""

    def __init__(self, max_blocks: int) -> None:
        self.missed_tokens = 0
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count_leading(self, blocks: list[int]) -> int:
        """How many of a prompt's leading blocks are cached."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add_prompt(self, blocks: list[int], last: int) -> tuple[int, bool]:
        """Add a prompt to the cache. Returns how many of its blocks were missing, and whether the last one was."""
        held = self._blocks
        missed = 0
        last_missed = last not in held and last in blocks
        # In reverse order, so that a prompt's end is evicted before its beginning, without which it is useless.
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                missed += 1
        while len(held) > self._max_blocks:
            held.popitem(last=False)
        return missed, last_missed

    def keep(self, blocks: set[int], max_blocks: int) -> None:
        """Continue with a subset of the blocks in a proportionally smaller cache."""
        self._max_blocks = max_blocks
        self._blocks = OrderedDict.fromkeys(block for block in self._blocks if block in blocks)


class CachedMeter:
    """Cached prompt tokens as a log states them."""

    def __init__(self) -> None:
        self.requests = 0
        self._hits = 0
        self._tokens = 0
        self._shared = LengthMeter()

    def add(self, cached_tokens: int, prompt_tokens: int) -> None:
        self.requests += 1
        cached_tokens = min(cached_tokens, prompt_tokens)
        self._hits += cached_tokens
        self._tokens += prompt_tokens
        if cached_tokens:
            self._shared.add([cached_tokens])

    def make_reuse(self, basis: Basis, how: str) -> PrefixReuse:
        share = self._hits / self._tokens if self._tokens else 0.0
        return PrefixReuse(
            saved_share=share,
            sharing_requests=self._shared.count / self.requests,
            typical_tokens=int(self._shared.make_distribution("reported", None).spread.p50),
            saved_tokens_per_request=self._hits / self.requests,
            basis=basis,
            how=how,
        )


def _hash_to_number(name: int | str) -> int:
    """A textual hash as a 64-bit number."""
    if isinstance(name, int):
        return int(name)
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def to_workload(summary: TraceSummary) -> Workload:
    """The trace as a workload to plan for.

    Prompt and output are means, because an engine computes and holds sums over requests. The context is the 99th
    percentile of both together, so one request in a hundred may be longer. The concurrency covers 99 % of the time,
    because a plan must survive bursts.
    """
    prompt = max(1, round(summary.prompt.spread.mean))
    output = max(1, round(summary.output.spread.mean))
    concurrency = max(1, math.ceil(summary.in_flight.spread.p99)) if summary.in_flight is not None else None
    shared = 0
    if summary.prefix is not None:
        shared = min(prompt, round(summary.prefix.saved_tokens_per_request))
    rate = summary.arrivals.requests_per_s if summary.arrivals is not None else None
    return Workload(
        # Every user with a request in flight is active, so there are at least this many.
        users=max(concurrency or 1, 1),
        concurrency=concurrency,
        requests_per_s=float(f"{rate:.4g}") if rate else None,
        prompt_tokens=prompt,
        output_tokens=output,
        context_tokens=max(prompt + output, math.ceil(summary.total.spread.p99)),
        shared_prefix_tokens=shared,
        task="generate" if summary.output.total_tokens else "embed",
        origin="observed",
    )


def write_workload_yaml(summary: TraceSummary) -> str:
    """The intent's `workload` section. Each line has a comment with the source of its figure."""
    work = to_workload(summary)
    prompt, output, total = summary.prompt.spread, summary.output.spread, summary.total.spread
    rows: list[tuple[str, str]] = []
    flight, prefix, arrivals = summary.in_flight, summary.prefix, summary.arrivals
    if flight is not None:
        rows.append((f"users: {work.users}", "at least: the number of requests in flight"))
        why = "measured from durations" if flight.assumption is None else f"assuming {flight.assumption}"
        rows.append(
            (
                f"concurrency: {work.concurrency}",
                f"p99 over time (mean {flight.spread.mean:.3g}); {why}",
            )
        )
    if work.requests_per_s is not None and arrivals is not None:
        peak = arrivals.peak_to_mean_60s
        busiest = f"; the busiest minute has {peak:.3g} times that" if peak is not None else ""
        rows.append((f"requests_per_s: {work.requests_per_s:g}", f"mean{busiest}"))
    rows += [
        (
            f"prompt_tokens: {work.prompt_tokens}",
            f"mean; median {prompt.p50:g}, p99 {prompt.p99:g}, longest {prompt.max:g}",
        ),
        (
            f"output_tokens: {work.output_tokens}",
            f"mean; median {output.p50:g}, p99 {output.p99:g}, longest {output.max:g}",
        ),
        (
            f"context_tokens: {work.context_tokens}",
            f"p99 of prompt and output together; 1 % are longer, up to {total.max:g}",
        ),
    ]
    if prefix is not None:
        rows.append(
            (
                f"shared_prefix_tokens: {work.shared_prefix_tokens}",
                f"mean tokens that a prefix cache saves; {prefix.how}",
            )
        )
    rows += [(f"task: {work.task}", ""), (f"origin: {work.origin}", "")]
    width = max(len(row) for row, _ in rows) + 2
    # A file name may contain a line break, which would end the YAML comment.
    source = "".join(letter if letter.isprintable() else "?" for letter in summary.source)
    lines = [f"# {summary.requests:,} requests of {source}", "workload:"]
    lines += [f"  {row:<{width}}# {why}" if why else f"  {row}" for row, why in rows]
    return "\n".join(lines) + "\n"
