"""Outcomes and latencies of requests at the incumbent and the challenger, and when the challenger is worse."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.knee import MET
from bedplate.run.gateway import GatewayBackend
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.values.migration import LatencySummary
from bedplate.values.workload import LatencyTarget

MOST_KEPT = 20_000
LEAST_SEEN = 6
"""Fewest requests of each side for a comparison of latencies."""
MORE_FAILED = 0.02
MORE_REFUSED = 0.05
LEAST_REFUSED = 3
IN_TIME_LESS = 0.1
MOSTLY = 0.75
"""Share of the challenger's requests that must exceed the limit. A few slow requests do not count as slow."""


class ObservedRequest(NamedTuple):
    """One request at one engine. Times count from the moment when the engine got it."""

    outcome: str
    begun: bool
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float

    @classmethod
    def from_ended(cls, ended: FinishedRequest) -> ObservedRequest:
        ttft_ms, duration_ms = ended.ttft_s and 1000 * ended.ttft_s, 1000 * ended.duration_s
        tokens, tpot_ms = ended.completion_tokens, None
        if tokens is not None and tokens > 1 and ended.outcome == "ok":
            # A response that was not streamed has no TTFT: its first token counts like the others.
            tpot_ms = (duration_ms - ttft_ms) / (tokens - 1) if ttft_ms is not None else duration_ms / tokens
        return cls(ended.outcome, ended.begun, ttft_ms, tpot_ms, duration_ms)


class RequestTally:
    """Collects the outcomes of the requests of some backends."""

    def __init__(self, backends: Iterable[GatewayBackend] = ()) -> None:
        self._seen: list[ObservedRequest] = []
        self._forgotten = 0
        self._backends: list[GatewayBackend] = []
        for backend in backends:
            self.listen(backend)

    @property
    def count(self) -> int:
        """The number of requests so far: a mark for `since`."""
        return self._forgotten + len(self._seen)

    def list_since(self, mark: int = 0) -> list[ObservedRequest]:
        return self._seen[max(0, mark - self._forgotten) :]

    def listen(self, backend: GatewayBackend) -> None:
        backend.on_end = self.add
        self._backends.append(backend)

    def close(self) -> None:
        for backend in self._backends:
            if backend.on_end == self.add:
                backend.on_end = None

    def add(self, ended: FinishedRequest) -> None:
        if ended.outcome in ("cancelled", "mistaken"):  # neither says anything about the engine
            return
        self._seen.append(ObservedRequest.from_ended(ended))
        if len(self._seen) >= MOST_KEPT:
            self._forgotten += MOST_KEPT // 2
            del self._seen[: MOST_KEPT // 2]


class LatencyLimits(NamedTuple):
    """The limits of the challenger's latency."""

    slower: float = 1.5
    """Largest factor over the incumbent's median, if there is no latency target."""
    target: LatencyTarget | None = None


def summarize_latency(seen: Sequence[ObservedRequest]) -> LatencySummary:
    return LatencySummary(
        requests=len(seen),
        failed=sum(one.outcome == "failed" for one in seen),
        refused=sum(one.outcome == "refused" for one in seen),
        ttft_ms=_compute_median(_list_ttfts(seen)),
        tpot_ms=_compute_median(_list_tpots(seen)),
    )


def explain_worse(
    challenger: Sequence[ObservedRequest],
    incumbent: Sequence[ObservedRequest],
    limits: LatencyLimits,
    *,
    compare_rejections: bool = True,
) -> str | None:
    """A clause that says why the challenger is worse; None if it is not, so far."""
    return (
        _explain_failures(challenger, incumbent)
        or (_explain_rejections(challenger, incumbent) if compare_rejections else None)
        or _explain_latency(challenger, incumbent, limits)
    )


def _explain_failures(challenger: Sequence[ObservedRequest], incumbent: Sequence[ObservedRequest]) -> str | None:
    lost = sum(one.outcome == "failed" and one.begun for one in challenger)
    if lost:
        return f"{lost} of {len(challenger)} responses were cut off"
    failed, usual = (sum(one.outcome == "failed" for one in side) for side in (challenger, incumbent))
    if failed >= 2 and failed / len(challenger) > usual / max(1, len(incumbent)) + MORE_FAILED:
        return f"{failed} of {len(challenger)} requests failed; before, {usual} of {len(incumbent)} failed"
    return None


def _explain_rejections(challenger: Sequence[ObservedRequest], incumbent: Sequence[ObservedRequest]) -> str | None:
    """Requests that only the incumbent accepts: too long for the challenger, or with fields that it does not have."""
    refused, usual = (sum(one.outcome == "refused" for one in side) for side in (challenger, incumbent))
    if refused >= LEAST_REFUSED and refused / len(challenger) > usual / max(1, len(incumbent)) + MORE_REFUSED:
        return f"it rejected {refused} of {len(challenger)} requests; before, {usual} of {len(incumbent)} were rejected"
    return None


def _explain_latency(
    challenger: Sequence[ObservedRequest], incumbent: Sequence[ObservedRequest], limits: LatencyLimits
) -> str | None:
    target = limits.target
    if target is not None and (target.ttft_ms is not None or target.tpot_ms is not None):
        return _explain_missed_target(challenger, incumbent, target)
    for name, read in (("TTFT", _list_ttfts), ("TPOT", _list_tpots)):
        mine, theirs = read(challenger), read(incumbent)
        if len(mine) < LEAST_SEEN or len(theirs) < LEAST_SEEN:
            continue
        usual = statistics.median(theirs)
        most = limits.slower * usual
        if statistics.median(mine) > most and sum(one > most for one in mine) >= MOSTLY * len(mine):
            factor = statistics.median(mine) / usual if usual else float("inf")
            return (
                f"the median {name} is {statistics.median(mine):,.0f} ms instead of {usual:,.0f} ms, "
                f"{factor:.1f} times as long; the limit is {limits.slower:g} times"
            )
    return None


def _explain_missed_target(
    challenger: Sequence[ObservedRequest], incumbent: Sequence[ObservedRequest], target: LatencyTarget
) -> str | None:
    mine, theirs = _check_targets(challenger, target), _check_targets(incumbent, target)
    if len(mine) < LEAST_SEEN:
        return None
    share = sum(mine) / len(mine)
    usual = sum(theirs) / len(theirs) if theirs else 1.0
    if share < MET and share < usual - IN_TIME_LESS:
        wanted = [
            f"{name} {value:g} ms" for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms)) if value
        ]
        return f"{share:.0%} of its requests meet the target ({', '.join(wanted)}); before, {usual:.0%} did"
    return None


def _check_targets(seen: Sequence[ObservedRequest], target: LatencyTarget) -> list[bool]:
    return [
        (target.ttft_ms is None or one.ttft_ms is None or one.ttft_ms <= target.ttft_ms)
        and (target.tpot_ms is None or one.tpot_ms is None or one.tpot_ms <= target.tpot_ms)
        for one in seen
        if one.outcome == "ok"
    ]


def explain_stuck(
    ended: int, in_flight: int, waited_s: float, incumbent: Sequence[ObservedRequest], limits: LatencyLimits
) -> str | None:
    """A clause that says that the challenger is too slow, if almost none of its requests have ended in `waited_s`."""
    durations = [one.duration_ms for one in incumbent if one.outcome == "ok"]
    if ended >= LEAST_SEEN or not in_flight or len(durations) < LEAST_SEEN:
        return None
    usual_s = statistics.median(durations) / 1000
    if waited_s <= 2 * limits.slower * usual_s:
        return None
    return f"{ended} requests ended in {waited_s:.0f} s, with {in_flight} in flight; before, one took {usual_s:.1f} s"


def _list_ttfts(seen: Sequence[ObservedRequest]) -> list[float]:
    return [one.ttft_ms for one in seen if one.outcome == "ok" and one.ttft_ms is not None]


def _list_tpots(seen: Sequence[ObservedRequest]) -> list[float]:
    return [one.tpot_ms for one in seen if one.tpot_ms is not None]


def _compute_median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
