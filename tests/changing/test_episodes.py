"""Recorded requests become episodes to replay, and their measurements become results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.changing.traffic import make_repeat, make_request, make_subject

from bedplate.changing.episodes import (
    LEAST_EPISODES,
    MOST_EPISODES,
    MOST_REQUESTS,
    MOST_SPAN_S,
    build_assumed_shapes,
    derive_results,
    make_cell,
    select_shapes,
    split_episodes,
    summarize_load,
)
from bedplate.cli.questions import parse_share
from bedplate.errors import UsageError
from bedplate.values import Workload
from bedplate.values.run import Quality
from bedplate.values.units import YEAR_S, parse_duration
from bedplate.values.workload import RequestShape


def test_only_completed_generation_requests_are_replayed_in_order() -> None:
    rows = [
        make_request(5.0),
        make_request(1.0),
        make_request(2.0, outcome="failed"),
        make_request(3.0, api="embeddings"),
    ]
    found = select_shapes(rows, 4096)
    assert [shape.started_s for shape in found.shapes] == [1.0, 5.0] and not found.too_long


def test_too_long_requests_are_skipped_and_counted() -> None:
    found = select_shapes([make_request(1.0), make_request(2.0, prompt_tokens=4000)], 1024)
    assert len(found.shapes) == 1 and found.too_long == 1


def test_shared_prefixes_are_kept() -> None:
    found = select_shapes([make_request(1.0, prompt_tokens=256, text_bytes=1024, prefix_hashes=(1, 2))], 4096)
    assert found.shapes[0].prefix_hashes == (1, 2) and found.shapes[0].prefix_block_tokens == 128


def make_shapes(moments: list[float], output_tokens: int = 20) -> list[RequestShape]:
    return [RequestShape(started_s=at, prompt_tokens=50, output_tokens=output_tokens) for at in sorted(moments)]


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=200), st.floats(0.01, 1))
def test_episodes_are_short_and_start_at_zero(moments: list[float], share: float) -> None:
    chosen = split_episodes(make_shapes(moments), share)
    assert LEAST_EPISODES <= len(chosen) <= MOST_EPISODES
    for episode in chosen:
        assert 1 <= len(episode) <= MOST_REQUESTS and episode[0].started_s == 0.0
        assert (episode[-1].started_s or 0.0) <= MOST_SPAN_S


def test_episodes_are_spread_over_the_whole_time() -> None:
    chosen = split_episodes(make_shapes([100.0 * number for number in range(100)]), 0.1)
    assert len(chosen) == 10
    assert len(split_episodes(make_shapes([1.0]), 0.1)) == LEAST_EPISODES, "the same request repeated"


def test_long_responses_make_short_episodes() -> None:
    assert max(map(len, split_episodes(make_shapes([0, 1, 2, 3], output_tokens=256), 1.0))) == 2


def test_without_records_the_assumed_workload_is_replayed() -> None:
    found = build_assumed_shapes(Workload(concurrency=3, prompt_tokens=100, output_tokens=50))
    assert len(found.shapes) == 3 and found.shapes[0].output_tokens == 50
    assert len(build_assumed_shapes(Workload(concurrency=64, output_tokens=256)).shapes) == 2


def test_different_episodes_have_different_loads() -> None:
    one, other = (
        summarize_load(split_episodes(make_shapes([1, 2]), 1), "a"),
        summarize_load(split_episodes(make_shapes([1, 2], 30), 1), "a"),
    )
    assert one.arrivals == "replay" and one.trace != other.trace and one.output_tokens == 20


def test_results_use_the_same_concurrency_for_both_engines() -> None:
    load = summarize_load(split_episodes(make_shapes([0, 0, 0]), 1), "a")
    fast, slow = (
        [make_repeat(number, duration_ms=duration, requests=3) for number in range(3)] for duration in (400, 800)
    )
    quality = Quality(verdict="ok", agreement=1.0)
    a = make_cell("r", "2026-01-01T00:00:00Z", "m", make_subject("slow"), load, slow, quality, "")
    b = make_cell("r", "2026-01-01T00:00:00Z", "m", make_subject("fast"), load, fast, quality, "")
    assert a.id != b.id
    mine, theirs = derive_results(a, b)
    assert mine.concurrency == theirs.concurrency == 3 and mine.is_comparable_to(theirs)
    assert mine.output_tok_s == pytest.approx(3 * 20 / 0.8) and theirs.output_tok_s == pytest.approx(3 * 20 / 0.4)
    assert theirs.quality == 1.0


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.1", 0.1), ("10", 0.1), ("100 %", 1.0), ("1", 1.0)])
def test_parses_shares(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-5", "a tenth", "nan"])
def test_rejects_invalid_shares(text: str) -> None:
    with pytest.raises(UsageError, match="is not a share"):
        parse_share(text)


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("10m", 600), ("1h", 3600), ("7d", 604800), ("5", 5)])
def test_parses_durations(text: str, value: float) -> None:
    assert parse_duration(text, "--for", positive=True, most_s=YEAR_S) == value


@pytest.mark.parametrize("text", ["", "0s", "-1m", "ten", "5y", "999999d"])
def test_rejects_invalid_durations(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        parse_duration(text, "--for", positive=True, most_s=YEAR_S)
