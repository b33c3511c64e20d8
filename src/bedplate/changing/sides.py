"""What requests came to at the engine in service and at its challenger, and when that is worse."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.knee import MET
from bedplate.run.gateway import Backend
from bedplate.run.gateway.backend import Ended
from bedplate.values.migration import Latency
from bedplate.values.workload import LatencyTarget

MOST_KEPT = 20_000
LEAST_SEEN = 6
"""Requests of each side before their times are compared."""
MORE_FAILED = 0.02
MORE_REFUSED = 0.05
LEAST_REFUSED = 3
IN_TIME_LESS = 0.1
MOSTLY = 0.75
"""Of the challenger's requests that must be beyond the limit: a few slow ones do not make it slow."""


class Seen(NamedTuple):
    """One request at one side; times in milliseconds, from the moment when the engine got it."""

    outcome: str
    begun: bool
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float

    @classmethod
    def of(cls, ended: Ended) -> Seen:
        ttft_ms, duration_ms = ended.ttft_s and 1000 * ended.ttft_s, 1000 * ended.duration_s
        tokens, tpot_ms = ended.completion_tokens, None
        if tokens is not None and tokens > 1 and ended.outcome == "ok":
            # Of an answer in one piece, its first token counts as one like the others.
            tpot_ms = (duration_ms - ttft_ms) / (tokens - 1) if ttft_ms is not None else duration_ms / tokens
        return cls(ended.outcome, ended.begun, ttft_ms, tpot_ms, duration_ms)


class Tally:
    """Hears from some backends what became of their requests."""

    def __init__(self, backends: Iterable[Backend] = ()) -> None:
        self._seen: list[Seen] = []
        self._forgotten = 0
        self._backends: list[Backend] = []
        for backend in backends:
            self.listen(backend)

    @property
    def count(self) -> int:
        """All so far: a mark for `since`."""
        return self._forgotten + len(self._seen)

    def since(self, mark: int = 0) -> list[Seen]:
        return self._seen[max(0, mark - self._forgotten) :]

    def listen(self, backend: Backend) -> None:
        backend.on_end = self.add
        self._backends.append(backend)

    def close(self) -> None:
        for backend in self._backends:
            if backend.on_end == self.add:
                backend.on_end = None

    def add(self, ended: Ended) -> None:
        if ended.outcome == "cancelled":
            return
        self._seen.append(Seen.of(ended))
        if len(self._seen) >= MOST_KEPT:
            self._forgotten += MOST_KEPT // 2
            del self._seen[: MOST_KEPT // 2]


class Limits(NamedTuple):
    """What the challenger may be at the worst."""

    slower: float = 1.5
    """Times the incumbent's median, where no target says what latency has to be."""
    target: LatencyTarget | None = None


def latency(seen: Sequence[Seen]) -> Latency:
    return Latency(
        requests=len(seen),
        failed=sum(one.outcome == "failed" for one in seen),
        refused=sum(one.outcome == "refused" for one in seen),
        ttft_ms=_median(_ttfts(seen)),
        tpot_ms=_median(_tpots(seen)),
    )


def worse(challenger: Sequence[Seen], incumbent: Sequence[Seen], limits: Limits) -> str | None:
    """Why the challenger must not get more, in a clause; `None`: nothing shows so far."""
    return _failing(challenger, incumbent) or _refusing(challenger, incumbent) or _late(challenger, incumbent, limits)


def _failing(challenger: Sequence[Seen], incumbent: Sequence[Seen]) -> str | None:
    lost = sum(one.outcome == "failed" and one.begun for one in challenger)
    if lost:
        return f"{lost} of {len(challenger)} answers broke off"
    failed, usual = (sum(one.outcome == "failed" for one in side) for side in (challenger, incumbent))
    if failed >= 2 and failed / len(challenger) > usual / max(1, len(incumbent)) + MORE_FAILED:
        return f"{failed} of {len(challenger)} requests failed at it, and {usual} of {len(incumbent)} before"
    return None


def _refusing(challenger: Sequence[Seen], incumbent: Sequence[Seen]) -> str | None:
    """Requests that the engine in service takes and this one does not: too long, or with fields that it has not."""
    refused, usual = (sum(one.outcome == "refused" for one in side) for side in (challenger, incumbent))
    if refused >= LEAST_REFUSED and refused / len(challenger) > usual / max(1, len(incumbent)) + MORE_REFUSED:
        return f"it refused {refused} of {len(challenger)} requests; before, {usual} of {len(incumbent)} were refused"
    return None


def _late(challenger: Sequence[Seen], incumbent: Sequence[Seen], limits: Limits) -> str | None:
    target = limits.target
    if target is not None and (target.ttft_ms is not None or target.tpot_ms is not None):
        return _off_target(challenger, incumbent, target)
    for name, of in (("first tokens take", _ttfts), ("tokens take", _tpots)):
        mine, theirs = of(challenger), of(incumbent)
        if len(mine) < LEAST_SEEN or len(theirs) < LEAST_SEEN:
            continue
        usual = statistics.median(theirs)
        most = limits.slower * usual
        if statistics.median(mine) > most and sum(one > most for one in mine) >= MOSTLY * len(mine):
            times = statistics.median(mine) / usual if usual else float("inf")
            return (
                f"{name} {statistics.median(mine):,.0f} ms instead of {usual:,.0f} ms, {times:.1f} times as long, "
                f"where {limits.slower:g} times is the most"
            )
    return None


def _off_target(challenger: Sequence[Seen], incumbent: Sequence[Seen], target: LatencyTarget) -> str | None:
    mine, theirs = _in_time(challenger, target), _in_time(incumbent, target)
    if len(mine) < LEAST_SEEN:
        return None
    share = sum(mine) / len(mine)
    usual = sum(theirs) / len(theirs) if theirs else 1.0
    if share < MET and share < usual - IN_TIME_LESS:
        wanted = [
            f"{name} {value:g} ms" for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms)) if value
        ]
        return f"{share:.0%} of its requests meet the target ({', '.join(wanted)}), and {usual:.0%} did before"
    return None


def _in_time(seen: Sequence[Seen], target: LatencyTarget) -> list[bool]:
    return [
        (target.ttft_ms is None or one.ttft_ms is None or one.ttft_ms <= target.ttft_ms)
        and (target.tpot_ms is None or one.tpot_ms is None or one.tpot_ms <= target.tpot_ms)
        for one in seen
        if one.outcome == "ok"
    ]


def stuck(ended: int, in_flight: int, waited_s: float, incumbent: Sequence[Seen], limits: Limits) -> str | None:
    """Why requests of which hardly any comes to an end are too slow, after so long a wait."""
    durations = [one.duration_ms for one in incumbent if one.outcome == "ok"]
    if ended >= LEAST_SEEN or not in_flight or len(durations) < LEAST_SEEN:
        return None
    usual_s = statistics.median(durations) / 1000
    if waited_s <= 2 * limits.slower * usual_s:
        return None
    return (
        f"{ended} answers came in {waited_s:.0f} s, with {in_flight} under way, where one took {usual_s:.1f} s before"
    )


def _ttfts(seen: Sequence[Seen]) -> list[float]:
    return [one.ttft_ms for one in seen if one.outcome == "ok" and one.ttft_ms is not None]


def _tpots(seen: Sequence[Seen]) -> list[float]:
    return [one.tpot_ms for one in seen if one.tpot_ms is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
