"""When a challenger is worse than the incumbent: failures, rejections and latency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.changing.outcomes import (
    LEAST_SEEN,
    LatencyLimits,
    ObservedRequest,
    RequestTally,
    explain_stuck,
    explain_worse,
    summarize_latency,
)
from bedplate.run.gateway import GatewayBackend
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.values.workload import LatencyTarget


def make_seen(
    count: int, *, ttft_ms: float = 100.0, tpot_ms: float = 20.0, outcome: str = "ok", begun: bool = True
) -> list[ObservedRequest]:
    return [ObservedRequest(outcome, begun, ttft_ms, tpot_ms, ttft_ms + 10 * tpot_ms)] * count


def make_ended(outcome: str = "ok", tokens: int | None = 11, ttft_s: float | None = 0.1) -> FinishedRequest:
    return FinishedRequest(outcome, True, ttft_s, 0.3, 5, tokens, b"/v1/completions", b"{}")  # type: ignore[arg-type]


def test_equal_engine_is_not_worse() -> None:
    assert explain_worse(make_seen(50), make_seen(50), LatencyLimits()) is None


def test_one_cut_off_response_is_worse() -> None:
    reason = explain_worse([*make_seen(20), *make_seen(1, outcome="failed")], make_seen(50), LatencyLimits())
    assert reason == "1 of 21 responses were cut off"


def test_early_failures_count_if_more_than_before() -> None:
    failed = make_seen(2, outcome="failed", begun=False)
    assert "2 of 10 requests failed; before, 0 of 50 failed" in (
        explain_worse([*make_seen(8), *failed], make_seen(50), LatencyLimits()) or ""
    )
    assert explain_worse([*make_seen(49), *failed[:1]], make_seen(50), LatencyLimits()) is None, (
        "a single failure may be random"
    )
    assert explain_worse([*make_seen(8), *failed], [*make_seen(8), *failed], LatencyLimits()) is None, (
        "no more than before"
    )


def test_rejecting_accepted_requests_is_worse() -> None:
    refused = make_seen(3, outcome="refused", begun=False)
    assert "it rejected 3 of 13 requests" in (
        explain_worse([*make_seen(10), *refused], make_seen(50), LatencyLimits()) or ""
    )
    assert explain_worse([*make_seen(10), *refused], [*make_seen(10), *refused], LatencyLimits()) is None


def test_slower_tokens_are_worse_only_beyond_the_limit() -> None:
    assert explain_worse(make_seen(10, tpot_ms=28), make_seen(10), LatencyLimits(1.5)) is None
    reason = explain_worse(make_seen(10, tpot_ms=50), make_seen(10), LatencyLimits(1.5)) or ""
    assert "median TPOT is 50 ms instead of 20 ms, 2.5 times as long" in reason
    assert explain_worse(make_seen(10, tpot_ms=50), make_seen(10), LatencyLimits(3)) is None


def test_higher_ttft_is_worse() -> None:
    assert "median TTFT is 400 ms" in (explain_worse(make_seen(10, ttft_ms=400), make_seen(10), LatencyLimits()) or "")


def test_a_few_slow_requests_are_not_worse() -> None:
    assert explain_worse([*make_seen(6), *make_seen(4, ttft_ms=900)], make_seen(20), LatencyLimits()) is None


def test_too_few_requests_are_not_compared() -> None:
    assert explain_worse(make_seen(LEAST_SEEN - 1, ttft_ms=9000), make_seen(50), LatencyLimits()) is None
    assert explain_worse(make_seen(50, ttft_ms=9000), make_seen(LEAST_SEEN - 1), LatencyLimits()) is None


def test_latency_target_replaces_the_comparison() -> None:
    limits = LatencyLimits(1.5, LatencyTarget(ttft_ms=1000, tpot_ms=100))
    assert explain_worse(make_seen(10, ttft_ms=900, tpot_ms=90), make_seen(10), limits) is None, (
        "slower, but within the target"
    )
    reason = explain_worse(make_seen(10, tpot_ms=150), make_seen(10), limits) or ""
    assert reason == "0% of its requests meet the target (TTFT 1000 ms, TPOT 100 ms); before, 100% did"
    assert explain_worse(make_seen(10, tpot_ms=150), make_seen(10, tpot_ms=150), limits) is None, "no worse than before"


def test_requests_that_do_not_end_are_too_slow() -> None:
    assert (
        explain_stuck(1, 3, 60, make_seen(20), LatencyLimits())
        == "1 requests ended in 60 s, with 3 in flight; before, one took 0.3 s"
    )
    assert explain_stuck(0, 0, 60, make_seen(20), LatencyLimits()) is None, "no request is in flight"
    assert explain_stuck(1, 3, 0.5, make_seen(20), LatencyLimits()) is None, "too early to say"


@given(st.lists(st.floats(1, 1e5), min_size=LEAST_SEEN, max_size=30), st.floats(1, 10))
def test_engine_is_never_worse_than_itself(times: list[float], slower: float) -> None:
    same = [ObservedRequest("ok", True, one, one, 2 * one) for one in times]
    assert explain_worse(same, same, LatencyLimits(slower)) is None


def test_tally_counts_until_closed() -> None:
    one, other = GatewayBackend("m", "a"), GatewayBackend("m", "b")
    tally = RequestTally([one])
    tally.listen(other)
    assert one.on_end is not None and other.on_end is not None
    one.on_end(make_ended())
    mark = tally.count
    other.on_end(make_ended("failed"))
    other.on_end(make_ended("cancelled"))
    assert [each.outcome for each in tally.list_since(mark)] == ["failed"] and len(tally.list_since()) == 2
    assert tally.list_since()[0].tpot_ms == pytest.approx(20), "0.2 s for the ten tokens after the first"
    tally.close()
    assert one.on_end is None and other.on_end is None


def test_tally_drops_old_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.changing.outcomes.MOST_KEPT", 10)
    tally = RequestTally()
    for _ in range(9):
        tally.add(make_ended())
    mark = tally.count
    for _ in range(4):
        tally.add(make_ended("failed"))
    assert [each.outcome for each in tally.list_since(mark)] == ["failed"] * 4 and tally.count == 13


def test_latency_summary_uses_medians() -> None:
    found = summarize_latency(
        [*make_seen(3), *make_seen(1, ttft_ms=900), *make_seen(1, outcome="failed"), *make_seen(2, outcome="refused")]
    )
    assert (found.requests, found.failed, found.refused, found.ttft_ms) == (7, 1, 2, 100)
    assert summarize_latency([]).ttft_ms is None
