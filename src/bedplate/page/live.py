"""Per-second counters of the last ten minutes. They are updated as requests end and summed when the page reads them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from bedplate.values.live import History, LiveSeries, RecentLatency, RecentRequest
from bedplate.values.traffic import ServedRequest

SPAN_S = 600
WINDOW_S = 60
"""Latencies and rates are computed over the responses that ended in a window of this length."""
SPELL_S = 5
"""Interval of the per-tenant counters. It is longer than a second because there may be many tenants."""
MOST_TENANTS = 500
"""Tenants with a history for their own page. For the tenants beyond, only totals since the start are kept."""
MOST_RECENT = 200
"""Requests kept per model for the diagnosis."""
MOST_LISTED = 300
"""Requests of all models and tenants that are kept for the list of recent requests."""
_STEP = math.log(1.02)
"""Latencies are counted in buckets 2 % wide, so that a busy second needs no more memory than an idle one."""

Counts = dict[int, int]
NOBODY: Mapping[str, int] = {}


class ModelSnapshot(NamedTuple):
    """The state of one model at one moment."""

    in_flight: int
    waiting: int
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    kv_use: float | None = None
    cpu_share: float | None = None
    gpu_share: float | None = None


class RequestCounts:
    """Counters of the requests that ended: of one model in one second, or of one tenant in `SPELL_S` seconds."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "ended", "failed", "prompt_tokens", "standing", "statuses", "tpot",
        "ttft", "turned_away", "wait",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ended = self.failed = self.turned_away = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.statuses: Counts = {}
        self.wait: Counts = {}
        self.ttft: Counts = {}
        self.tpot: Counts = {}
        self.standing = ModelSnapshot(0, 0)


class SecondCounts:
    __slots__ = ("at_s", "models", "statuses")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.statuses: Counts = {}
        self.models: dict[str, RequestCounts] = {}


class IntervalCounts:
    """The counters of each tenant in `SPELL_S` seconds."""

    __slots__ = ("at_s", "tenants")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.tenants: dict[str, RequestCounts] = {}


class TenantTotals:
    """The totals of one tenant since the start."""

    __slots__ = ("cached_tokens", "completion_tokens", "failed", "prompt_tokens", "reasons", "requests", "turned_away")

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self.requests = self.failed = self.turned_away = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


class LiveRecorder:
    """Counts every request that ends. Keeps `SPAN_S` seconds, and before them the seconds that their windows need."""

    def __init__(self, now_s: float | None = None) -> None:
        self.seconds: deque[SecondCounts] = deque(maxlen=SPAN_S + WINDOW_S)
        self.spells: deque[IntervalCounts] = deque(maxlen=(SPAN_S + WINDOW_S) // SPELL_S)
        self.used: dict[str, TenantTotals] = {}
        self.recent: dict[str, deque[ServedRequest]] = {}
        self.listed: deque[ServedRequest] = deque(maxlen=MOST_LISTED)
        self._now = SecondCounts(int(time.time() if now_s is None else now_s))
        self._spell = IntervalCounts(self._now.at_s)

    def record_request(self, request: ServedRequest) -> None:
        prompt, completion = request.prompt_tokens or 0, request.completion_tokens or 0
        cached = request.cached_tokens or 0
        self.listed.append(request)
        used = self.used.get(request.tenant)
        if used is None:
            used = self.used[request.tenant] = TenantTotals()
        own = self._get_tenant_counts(request.tenant)
        for statuses in (self._now.statuses, own.statuses):
            statuses[request.status] = statuses.get(request.status, 0) + 1
        if request.reason is not None:
            used.reasons[request.reason] = used.reasons.get(request.reason, 0) + 1
        if request.outcome == "turned_away":
            used.turned_away += 1
            own.turned_away += 1
            return
        failed = request.outcome == "failed"
        used.requests += 1
        used.failed += failed
        used.prompt_tokens += prompt
        used.cached_tokens += cached
        used.completion_tokens += completion
        if not request.model:  # refused before its model was known
            own.ended += 1
            return
        tally = self._get_model_counts(request.model)
        for one in (tally, own):
            one.ended += 1
            one.failed += failed
            one.prompt_tokens += prompt
            one.cached_tokens += cached
            one.completion_tokens += completion
        if request.wait_ms is not None:
            wait = find_bucket(request.wait_ms)
            tally.wait[wait] = tally.wait.get(wait, 0) + 1
            own.wait[wait] = own.wait.get(wait, 0) + 1
        if request.ttft_ms is not None and request.outcome == "ok":
            ttft = find_bucket(request.ttft_ms)
            tally.ttft[ttft] = tally.ttft.get(ttft, 0) + 1
            own.ttft[ttft] = own.ttft.get(ttft, 0) + 1
            if completion > 1:
                tpot = find_bucket((request.duration_ms - request.ttft_ms) / (completion - 1))
                tally.tpot[tpot] = tally.tpot.get(tpot, 0) + 1
                own.tpot[tpot] = own.tpot.get(tpot, 0) + 1
            self.recent[request.model].append(request)

    def end_second(
        self,
        standings: Mapping[str, ModelSnapshot],
        now_s: float | None = None,
        *,
        in_flight: Mapping[str, int] = NOBODY,
    ) -> None:
        """End the current second.

        `standings` is the state of each model, `in_flight` the number of running requests of each tenant.
        """
        for model, standing in standings.items():
            self._get_model_counts(model).standing = standing
        self.seconds.append(self._now)
        # Always later than the second before, even if the clock was set back: pages ask for the seconds after the last
        # one they have.
        self._now = SecondCounts(max(self._now.at_s + 1, int(time.time() if now_s is None else now_s)))
        if self._now.at_s >= self._spell.at_s + SPELL_S:
            for tenant, number in in_flight.items():
                if number or tenant in self._spell.tenants:
                    self._get_tenant_counts(tenant).standing = ModelSnapshot(number, 0)
            self.spells.append(self._spell)
            self._spell = IntervalCounts(self._now.at_s)

    def count_tokens(self, tenant: str) -> int:
        """Tokens in the last `SPAN_S` seconds, with a resolution of `SPELL_S`."""
        spells = (*islice(self.spells, max(0, len(self.spells) - SPAN_S // SPELL_S), None), self._spell)
        own = [tally for spell in spells if (tally := spell.tenants.get(tenant)) is not None]
        return sum(tally.prompt_tokens + tally.completion_tokens for tally in own)

    def count_statuses(self, tenant: str | None = None) -> dict[str, int]:
        """Requests of the last `SPAN_S` seconds by status code: of one tenant, or of all."""
        summed: Counts = {}
        if tenant is None:
            for second in (*_take_last(self.seconds, SPAN_S), self._now):
                _add(summed, second.statuses, 1)
        else:
            for spell in (*islice(self.spells, max(0, len(self.spells) - SPAN_S // SPELL_S), None), self._spell):
                if (own := spell.tenants.get(tenant)) is not None:
                    _add(summed, own.statuses, 1)
        return {str(status): summed[status] for status in sorted(summed)}

    def list_requests(self, most: int, tenant: str | None = None) -> tuple[RecentRequest, ...]:
        """The latest requests of one tenant, or of all; newest first."""
        chosen = (one for one in reversed(self.listed) if tenant is None or one.tenant == tenant)
        return tuple(
            RecentRequest(**{name: getattr(one, name) for name in RecentRequest.__struct_fields__})
            for one in islice(chosen, most)
        )

    def get_window(self, model: str) -> list[RequestCounts]:
        """The last `WINDOW_S` completed seconds."""
        return [tally for one in _take_last(self.seconds, WINDOW_S) if (tally := one.models.get(model)) is not None]

    def build_history(self, models: Iterable[str], since_s: float = 0.0) -> History:
        """The seconds after `since_s`."""
        seconds = list(self.seconds)
        new = min(SPAN_S, sum(second.at_s > since_s for second in seconds))
        return History(
            at_s=tuple(second.at_s for second in seconds[len(seconds) - new :]),
            models={model: build_series([second.models.get(model) for second in seconds], new) for model in models},
        )

    def build_tenant_history(self, tenant: str, since_s: float = 0.0) -> History:
        """The history of one tenant, in steps of `SPELL_S`."""
        spells = list(self.spells)
        new = min(SPAN_S // SPELL_S, sum(spell.at_s > since_s for spell in spells))
        return History(
            at_s=tuple(spell.at_s for spell in spells[len(spells) - new :]),
            own=build_series([spell.tenants.get(tenant) for spell in spells], new, SPELL_S),
        )

    def _get_tenant_counts(self, tenant: str) -> RequestCounts:
        tenants = self._spell.tenants
        tally = tenants.get(tenant)
        if tally is None:
            tally = RequestCounts()
            if len(tenants) < MOST_TENANTS:
                tenants[tenant] = tally
        return tally

    def _get_model_counts(self, model: str) -> RequestCounts:
        tally = self._now.models.get(model)
        if tally is None:
            tally = self._now.models[model] = RequestCounts()
            if model not in self.recent:
                self.recent[model] = deque(maxlen=MOST_RECENT)
        return tally


def _take_last(seconds: deque[SecondCounts], number: int) -> Iterator[SecondCounts]:
    return islice(seconds, max(0, len(seconds) - number), None)


def find_bucket(ms: float) -> int:
    return round(math.log(ms if ms > 0.001 else 0.001) / _STEP)


def summarize_times(all_counts: Iterable[Counts]) -> RecentLatency:
    summed: Counts = {}
    for counts in all_counts:
        _add(summed, counts, 1)
    low, high = _compute_quantiles(summed)
    return RecentLatency(p50_ms=low, p95_ms=high)


def build_series(tallies: Sequence[RequestCounts | None], new: int, each_s: int = 1) -> LiveSeries:
    """The last `new` entries, each `each_s` seconds long, with latencies and rates over the minute that ends there."""
    first = len(tallies) - new
    rows = list(islice(_slide_windows(tallies, first, each_s), new))
    columns: list[tuple[object, ...]] = list(zip(*rows, strict=True)) if rows else [()] * len(_COLUMNS)
    return LiveSeries(**dict(zip(_COLUMNS, columns, strict=True)))  # type: ignore[arg-type]


_COLUMNS = (
    "in_flight", "waiting", "memory_bytes", "gpu_bytes", "kv_use", "cpu_share", "gpu_share", "ended", "failed",
    "turned_away", "tokens", "output_tok_s", "prompt_tok_s", "cached_share", "wait_p50_ms", "wait_p95_ms",
    "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms",
)  # fmt: skip


def _slide_windows(
    tallies: Sequence[RequestCounts | None], first: int, each_s: int
) -> Iterator[tuple[float | None, ...]]:
    """One row per entry from `first` on. The window slides: each entry is added once and subtracted once."""
    ttft: Counts = {}
    tpot: Counts = {}
    wait: Counts = {}
    ended = failed = turned_away = prompt = cached = completion = 0
    window = WINDOW_S // each_s
    begin = max(0, first - window + 1)
    for number in range(begin, len(tallies)):
        leaving = tallies[number - window] if number - window >= begin else None
        for tally, sign in ((tallies[number], 1), (leaving, -1)):
            if tally is not None:
                _add(ttft, tally.ttft, sign)
                _add(tpot, tally.tpot, sign)
                _add(wait, tally.wait, sign)
                ended += sign * tally.ended
                failed += sign * tally.failed
                turned_away += sign * tally.turned_away
                prompt += sign * tally.prompt_tokens
                cached += sign * tally.cached_tokens
                completion += sign * tally.completion_tokens
        if number >= first:
            here = tallies[number]
            standing = here.standing if here is not None else ModelSnapshot(0, 0)
            spanned_s = min(WINDOW_S, (number + 1) * each_s)
            counted = (ended, failed, turned_away, prompt + completion)
            rates = (round(completion / spanned_s, 2), round(prompt / spanned_s, 2))
            share = round(cached / prompt, 3) if prompt else None
            times = (quantile for counts in (wait, ttft, tpot) for quantile in _compute_quantiles(counts))
            yield (*standing, *counted, *rates, share, *times)


def _add(to: Counts, counts: Counts, sign: int) -> None:
    for key, number in counts.items():
        left = to.get(key, 0) + sign * number
        if left:
            to[key] = left
        else:
            to.pop(key, None)


def _compute_quantiles(counts: Counts) -> tuple[float | None, float | None]:
    """The median and the 95th percentile, accurate to a bucket."""
    total = sum(counts.values())
    if not total:
        return None, None
    ranks = [math.ceil(0.5 * total), math.ceil(0.95 * total)]
    found: list[float] = []
    passed = 0
    for key in sorted(counts):
        passed += counts[key]
        while len(found) < len(ranks) and passed >= ranks[len(found)]:
            found.append(float(f"{math.exp(key * _STEP):.3g}"))
    return found[0], found[1]
