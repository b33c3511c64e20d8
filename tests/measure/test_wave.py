"""Bursts of requests against the null server with known timing."""

from __future__ import annotations

import pytest

from bedplate.errors import ExternalFailure
from bedplate.measure.burst import APART_S, BurstCall, send_burst, send_burst_apart
from bedplate.measure.load import LoadTarget, PreparedEndpoint, prepare, run, serve_null
from bedplate.measure.summary import compute_output_tok_s
from bedplate.values.run import Load

LOAD = Load(concurrency=4, prompt_tokens=32, output_tokens=8)


def test_streams_send_one_request_each_and_start_one_after_the_other() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = LoadTarget.from_url(null.url)
        repeat = run(send_burst(target, LOAD, run(prepare(target, LOAD)), 1, 30.0))
    assert repeat is not None and [one.outcome for one in repeat.samples] == ["ok"] * 4
    begun = [one.at_s for one in repeat.samples]
    assert max(begun) - min(begun) >= APART_S, begun
    assert all(one.ttft_ms is not None and one.ttft_ms >= 50 for one in repeat.samples), (
        "the delayed start is not part of the TTFT"
    )
    assert repeat.seconds >= 0.085 + 3 * APART_S


def test_returns_none_if_the_time_limit_is_exceeded() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = LoadTarget.from_url(null.url)
        prepared = run(prepare(target, LOAD))
        assert run(send_burst(target, LOAD, prepared, 1, 0.02)) is None


def test_several_rounds_count_all_tokens_over_their_time() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = LoadTarget.from_url(null.url)
        repeat = run(send_burst(target, LOAD, run(prepare(target, LOAD)), 1, 30.0, rounds=3))
    assert repeat is not None and len(repeat.samples) == 12 and repeat.in_flight_max == 4
    assert repeat.delivered_tokens == 12 * 8 and repeat.exact_output
    assert compute_output_tok_s(repeat, LOAD) == pytest.approx(12 * 8 / repeat.seconds)
    # Each of four streams gets three answers of 85 ms one after the other.
    assert repeat.seconds >= 3 * 0.085


@pytest.mark.engine
def test_a_separate_process_gives_the_same_result_and_reports_phases() -> None:
    moments: list[str] = []
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = LoadTarget.from_url(null.url)
        prepared = run(prepare(target, LOAD))
        work = BurstCall(target=target, load=LOAD, prepared=prepared, number=1, limit_s=30.0, rounds=2, check=True)
        repeat = send_burst_apart(work, moments.append)
        assert repeat is not None and len(repeat.samples) == 8 and moments == ["begin", "end"]
        assert repeat.client.error_p50_ms is not None and repeat.client.cpu_share > 0
        assert repeat.client.loop_lag_p99_ms > 0
        late = BurstCall(target=target, load=LOAD, prepared=prepared, number=2, limit_s=0.02)
        assert send_burst_apart(late, moments.append) is None


def test_reports_an_unreachable_endpoint() -> None:
    prepared = PreparedEndpoint(model="nobody", api="completions")
    work = BurstCall(
        target=LoadTarget.from_url("http://127.0.0.1:9"), load=LOAD, prepared=prepared, number=1, limit_s=5.0
    )
    with pytest.raises(ExternalFailure, match="no response from"):
        send_burst_apart(work, lambda moment: None)
