"""Arrival times, prompts, and the rule for repeats."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.measure.load.client_error import list_client_limits
from bedplate.measure.load.prompts import Prompts
from bedplate.measure.load.repeating import RepeatRule, compute_delivered_tok_s, find_halt_reason
from bedplate.measure.load.schedule import check_load, compute_stagger_s, schedule_arrivals
from bedplate.measure.load.words import WORDS
from bedplate.values.run import ClientAccuracy, Load, Repeat
from bedplate.values.workload import RequestShape

# arrivals


def list_arrivals(load: Load, count: int, round_number: int = 0) -> list[float]:
    return list(itertools.islice(schedule_arrivals(load, round_number), count))


def test_constant_arrivals_have_equal_gaps() -> None:
    assert list_arrivals(Load(arrivals="constant", requests_per_s=4), 5) == [0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_keep_the_rate() -> None:
    assert list_arrivals(Load(arrivals="burst", requests_per_s=6, burst=3), 7) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    moments = list_arrivals(Load(arrivals="poisson", requests_per_s=50, seed=3), 20_000)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *moments])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, abs=0.03)


def test_arrivals_depend_only_on_seed_and_round() -> None:
    load = Load(arrivals="poisson", requests_per_s=5, seed=7)
    assert list_arrivals(load, 20) == list_arrivals(load, 20) != list_arrivals(load, 20, round_number=1)


def test_a_replay_keeps_the_gaps_of_its_trace() -> None:
    shapes = [RequestShape(started_s=moment) for moment in (1005.5, 1000.0, 1000.25)]
    assert list(schedule_arrivals(Load(arrivals="replay"), 0, shapes)) == [0, 0.25, 5.5]


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(arrivals="poisson"),
        Load(arrivals="burst", requests_per_s=1),
        Load(arrivals="replay"),
        Load(concurrency=1, prompt_tokens=10, shared_prefix_tokens=10),
        Load(concurrency=100_000),
    ],
)
def test_rejects_incomplete_loads(load: Load) -> None:
    with pytest.raises(UsageError):
        check_load(load)


def test_rejects_a_replay_without_arrival_times() -> None:
    with pytest.raises(UsageError):
        check_load(Load(arrivals="replay"), [RequestShape(prompt_tokens=1)])


def test_starts_are_spread_over_one_request_within_half_of_the_warm_up() -> None:
    assert compute_stagger_s(64, 4.0, 1.0) == 1.0
    assert compute_stagger_s(64, 4.0, 30.0) == 2.0
    assert compute_stagger_s(1, 4.0, 1.0) == 0.0


# prompts


def make_prompts(
    seed: int = 0, round_number: int = 0, overhead: int = 0, shared: int = 0, space: bool = True
) -> Prompts:
    return Prompts(
        WORDS, WORDS, overhead, leading_space=space, seed=seed, round_number=round_number, shared_tokens=shared
    )  # fmt: skip


@given(
    tokens=st.integers(1, 600), overhead=st.integers(0, 40), shared=st.integers(0, 300), number=st.integers(-10, 10_000)
)
def test_a_prompt_has_exactly_the_requested_tokens(tokens: int, overhead: int, shared: int, number: int) -> None:
    text = make_prompts(overhead=overhead, shared=shared).make_text(number, tokens)
    assert len(text.split()) + overhead == max(tokens, overhead + 1)


def test_prompts_begin_differently() -> None:
    made = [make_prompts().make_text(number, 64).split() for number in range(len(WORDS))]
    assert len({words[0] for words in made}) == len(WORDS)
    more = [tuple(make_prompts().make_text(number, 64).split()[:2]) for number in range(0, 3000, 7)]
    assert len(set(more)) == len(more)


def test_prompts_depend_only_on_seed_and_round() -> None:
    assert make_prompts(seed=1).make_text(5, 100) == make_prompts(seed=1).make_text(5, 100)
    assert len({make_prompts(seed, number).make_text(5, 100) for seed in (1, 2) for number in (0, 1)}) == 4


def test_a_shared_prefix_has_exactly_the_requested_length_in_every_round() -> None:
    made = [
        make_prompts(round_number=each // 50, overhead=3, shared=40).make_text(each, 64).split() for each in range(100)
    ]
    assert len({tuple(words[:37]) for words in made}) == 1, "37 words and 3 tokens that the endpoint adds"
    assert len({words[37] for words in made[:50]}) == 50, "the first word after the prefix differs"


def test_a_replay_shares_the_prefix_blocks_of_its_trace() -> None:
    def text(*hashes: int) -> list[str]:
        shape = RequestShape(prompt_tokens=40, prefix_hashes=hashes, prefix_block_tokens=16)
        return make_prompts().make_text(hashes[-1], 40, shape).split()

    one, other = text(1, 2, 3), text(1, 2, 4)
    assert one[:32] == other[:32] and one[32:] != other[32:] and len(one) == len(other) == 40


# repeats


def make_repeat_of(tokens: float | None) -> Repeat:
    return Repeat(seconds=2.0, delivered_tokens=None if tokens is None else 2 * tokens)


def test_stops_when_the_interval_is_narrow() -> None:
    rule = RepeatRule(half_width=0.05, least=3, most=8, seconds=100)
    assert find_halt_reason([], 0, rule) is None
    assert find_halt_reason([100, 100], 10, rule) is None, "two repeats are not enough, even if equal"
    assert find_halt_reason([100, 101, 99], 10, rule) == "narrow"
    assert find_halt_reason([100, 130, 80], 10, rule) is None


def test_stops_at_the_time_limit_or_the_maximum_count() -> None:
    rule = RepeatRule(half_width=0.01, least=2, most=4, seconds=100)
    assert find_halt_reason([100, 130, 80], 60, rule) is None, "a fourth repeat ends within the limit"
    assert find_halt_reason([100, 130, 80], 80, rule) == "time"
    assert find_halt_reason([100], 60, rule) == "time", "a second repeat would exceed the limit"
    assert find_halt_reason([100, 130, 80, 120], 20, rule) == "most"


def test_stops_if_the_figure_is_unknown() -> None:
    assert find_halt_reason([None, None, None], 10, RepeatRule(least=3)) == "unknown"


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12), st.floats(0, 1000))
def test_a_rule_always_stops(values: list[float], spent: float) -> None:
    rule = RepeatRule(least=3, most=12, seconds=500)
    why = find_halt_reason(values, spent, rule)
    assert why is not None or (len(values) < 12 and spent + spent / len(values) <= 500)


def test_stops_at_the_first_narrow_count() -> None:
    figures = [100.0, 140.0, 101.0, 99.0, 100.0, 100.0, 100.0, 100.0]
    rule = RepeatRule(half_width=0.2, least=3, most=8, seconds=1000)
    found = [
        find_halt_reason([compute_delivered_tok_s(make_repeat_of(one)) for one in figures[:count]], 0.0, rule)
        for count in range(1, 7)
    ]
    assert found == [None] * 5 + ["narrow"]
    assert (
        compute_delivered_tok_s(make_repeat_of(140.0)) == 140.0
        and compute_delivered_tok_s(make_repeat_of(None)) is None
    )


# the client as the bottleneck


def test_reports_why_the_client_was_the_bottleneck() -> None:
    assert (
        list_client_limits(ClientAccuracy(cpu_share=0.2, loop_lag_p99_ms=3, send_lag_p99_ms=2, error_p99_ms=1), [50.0])
        == ()
    )
    (why,) = list_client_limits(ClientAccuracy(cpu_share=0.95), [50.0])
    assert "95%" in why
    (why,) = list_client_limits(ClientAccuracy(loop_lag_p99_ms=12), [50.0])
    assert "12.0 ms" in why
    assert not list_client_limits(ClientAccuracy(loop_lag_p99_ms=12), [2000.0]), (
        "it does not matter for a TTFT of two seconds"
    )
    assert len(list_client_limits(ClientAccuracy(send_lag_p99_ms=200, error_p50_ms=200), [])) == 2
    assert not list_client_limits(ClientAccuracy(error_p50_ms=0.2, error_p99_ms=200), [50.0]), (
        "the p99 of a one-second check does not count"
    )
