"""What an endpoint did in the last ten minutes, by the second: counted as requests end, added up for who looks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from bedplate.values.live import History, Series, Times
from bedplate.values.traffic import ServedRequest

SPAN_S = 600
WINDOW_S = 60
"""Times and rates are of the answers that ended in so many seconds up to then."""
MOST_RECENT = 200
"""Requests of a model that are kept to judge by."""
_STEP = math.log(1.02)
"""Times are counted in classes that are 2 % wide, so that a busy second takes no more room than a calm one."""

Counts = dict[int, int]


class Standing(NamedTuple):
    """One model at one moment."""

    in_flight: int
    waiting: int
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    kv_use: float | None = None


class Tally:
    """What ended within one second, of one model."""

    __slots__ = ("completion_tokens", "ended", "failed", "standing", "tpot", "ttft")

    def __init__(self) -> None:
        self.ended = self.failed = self.completion_tokens = 0
        self.ttft: Counts = {}
        self.tpot: Counts = {}
        self.standing = Standing(0, 0)


class Second:
    __slots__ = ("at_s", "models", "tenants")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.models: dict[str, Tally] = {}
        self.tenants: dict[str, int] = {}
        """Tokens of each."""


class Used:
    """What one tenant used since the start."""

    __slots__ = ("cached_tokens", "completion_tokens", "failed", "prompt_tokens", "requests", "turned_away")

    def __init__(self) -> None:
        self.requests = self.failed = self.turned_away = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


class Recorder:
    """Hears of every request that has ended, and keeps the last `SPAN_S` seconds, and those that their windows need."""

    def __init__(self, now_s: float | None = None) -> None:
        self.seconds: deque[Second] = deque(maxlen=SPAN_S + WINDOW_S)
        self.used: dict[str, Used] = {}
        self.recent: dict[str, deque[ServedRequest]] = {}
        self._now = Second(int(time.time() if now_s is None else now_s))

    def hear(self, request: ServedRequest) -> None:
        prompt, completion = request.prompt_tokens or 0, request.completion_tokens or 0
        used = self.used.get(request.tenant)
        if used is None:
            used = self.used[request.tenant] = Used()
        if request.outcome == "turned_away":
            used.turned_away += 1
            return
        used.requests += 1
        used.failed += request.outcome == "failed"
        used.prompt_tokens += prompt
        used.cached_tokens += request.cached_tokens or 0
        used.completion_tokens += completion
        tenants = self._now.tenants
        tenants[request.tenant] = tenants.get(request.tenant, 0) + prompt + completion
        tally = self._tally(request.model)
        tally.ended += 1
        tally.failed += request.outcome == "failed"
        tally.completion_tokens += completion
        if request.ttft_ms is not None and request.outcome == "ok":
            count(tally.ttft, request.ttft_ms)
            if completion > 1:
                count(tally.tpot, (request.duration_ms - request.ttft_ms) / (completion - 1))
            self.recent[request.model].append(request)

    def close(self, standings: Mapping[str, Standing], now_s: float | None = None) -> None:
        """The second is over; `standings` is how each model stands at its end."""
        for model, standing in standings.items():
            self._tally(model).standing = standing
        self.seconds.append(self._now)
        # Later than the last one whatever the clock does: a page asks for what came after the last that it has.
        self._now = Second(max(self._now.at_s + 1, int(time.time() if now_s is None else now_s)))

    def tokens_of(self, tenant: str) -> int:
        """In the last `SPAN_S` seconds."""
        return sum(second.tenants.get(tenant, 0) for second in (*_last(self.seconds, SPAN_S), self._now))

    def window(self, model: str) -> list[Tally]:
        """The last minute, up to the end of the last second."""
        return [tally for one in _last(self.seconds, WINDOW_S) if (tally := one.models.get(model)) is not None]

    def history(self, models: Iterable[str], since_s: float = 0.0) -> History:
        """What came after `since_s`."""
        seconds = list(self.seconds)
        new = min(SPAN_S, sum(second.at_s > since_s for second in seconds))
        return History(
            at_s=tuple(second.at_s for second in seconds[len(seconds) - new :]),
            models={model: series([second.models.get(model) for second in seconds], new) for model in models},
        )

    def _tally(self, model: str) -> Tally:
        tally = self._now.models.get(model)
        if tally is None:
            tally = self._now.models[model] = Tally()
            if model not in self.recent:
                self.recent[model] = deque(maxlen=MOST_RECENT)
        return tally


def _last(seconds: deque[Second], number: int) -> Iterator[Second]:
    return islice(seconds, max(0, len(seconds) - number), None)


def count(counts: Counts, ms: float) -> None:
    """Puts a time into its class."""
    found = round(math.log(ms if ms > 0.001 else 0.001) / _STEP)
    counts[found] = counts.get(found, 0) + 1


def times(all_counts: Iterable[Counts]) -> Times:
    summed: Counts = {}
    for counts in all_counts:
        _add(summed, counts, 1)
    low, high = _quantiles(summed)
    return Times(p50_ms=low, p95_ms=high)


def series(tallies: Sequence[Tally | None], new: int) -> Series:
    """The last `new` of these seconds, with times and rates over the minute up to each."""
    first = len(tallies) - new
    rows = list(islice(_windows(tallies, first), new))
    columns: list[tuple[object, ...]] = list(zip(*rows, strict=True)) if rows else [()] * len(_COLUMNS)
    return Series(**dict(zip(_COLUMNS, columns, strict=True)))  # type: ignore[arg-type]


_COLUMNS = (
    "in_flight", "waiting", "memory_bytes", "gpu_bytes", "kv_use", "ended", "failed", "output_tok_s",
    "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms",
)  # fmt: skip


def _windows(tallies: Sequence[Tally | None], first: int) -> Iterator[tuple[float | None, ...]]:
    """One row for each second from `first` on; the window slides, so that each second is added and taken away once."""
    ttft: Counts = {}
    tpot: Counts = {}
    ended = failed = tokens = 0
    begin = max(0, first - WINDOW_S + 1)
    for number in range(begin, len(tallies)):
        leaving = tallies[number - WINDOW_S] if number - WINDOW_S >= begin else None
        for tally, sign in ((tallies[number], 1), (leaving, -1)):
            if tally is not None:
                _add(ttft, tally.ttft, sign)
                _add(tpot, tally.tpot, sign)
                ended += sign * tally.ended
                failed += sign * tally.failed
                tokens += sign * tally.completion_tokens
        if number >= first:
            here = tallies[number]
            standing = here.standing if here is not None else Standing(0, 0)
            rate = round(tokens / min(WINDOW_S, number + 1), 2)
            yield (*standing, ended, failed, rate, *_quantiles(ttft), *_quantiles(tpot))


def _add(to: Counts, counts: Counts, sign: int) -> None:
    for key, number in counts.items():
        left = to.get(key, 0) + sign * number
        if left:
            to[key] = left
        else:
            to.pop(key, None)


def _quantiles(counts: Counts) -> tuple[float | None, float | None]:
    """The median and the 95th percentile, to within a class."""
    whole = sum(counts.values())
    if not whole:
        return None, None
    ranks = [math.ceil(0.5 * whole), math.ceil(0.95 * whole)]
    found: list[float] = []
    passed = 0
    for key in sorted(counts):
        passed += counts[key]
        while len(found) < len(ranks) and passed >= ranks[len(found)]:
            found.append(float(f"{math.exp(key * _STEP):.3g}"))
    return found[0], found[1]
