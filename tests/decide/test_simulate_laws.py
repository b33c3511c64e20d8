"""Invariants of every simulation: no request is lost, limits are kept, and jumps agree with single passes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decide.stepwise import Asked, stepwise

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.fleet import Fleet, FleetRun, Transfer, simulate
from bedplate.decide.simulate.outcome import MET, CardPrice, compute_outcome
from bedplate.decide.simulate.replica import ReplicaLimits, Steps
from bedplate.measure import knee
from bedplate.values.workload import LatencyTarget

TICK = 1.0 / 1024
"""All times are multiples of this, which add up exactly, so both simulations must agree to the last bit."""
BATCH = 64


@st.composite
def steps_of(draw: st.DrawFn) -> Steps:
    def ticks(least: int, most: int) -> float:
        return draw(st.integers(least, most)) * TICK

    fixed, each, context = ticks(1, 64), ticks(0, 8), draw(st.integers(0, 4)) * TICK / 16
    prompt, token = ticks(1, 32), ticks(0, 4)
    return Steps(
        decode_s=tuple(fixed + each * count for count in range(BATCH + 1)),
        context_s=tuple([context] * (BATCH + 1)),
        prompt_s=tuple(prompt + token * tokens for tokens in range(BATCH + 1)),
        pair_s=draw(st.integers(0, 3)) * TICK / 64,
        share=draw(st.sampled_from([0.5, 0.75, 1.0])),
        hidden=draw(st.sampled_from([0.0, 0.25])),
        lag=draw(st.sampled_from([0.0, 0.5])),
        once_s=draw(st.integers(0, 1)) * TICK,
        accept_s=ticks(0, 16),
    )


@st.composite
def fleets(draw: st.DrawFn, routers: tuple[str, ...] = ("least-loaded",)) -> Fleet:
    slots = draw(st.integers(1, 8))
    replicas = draw(st.integers(1, 4))
    limits = ReplicaLimits(
        slots=slots,
        batch_tokens=draw(st.integers(slots + 1, BATCH)),
        kv_blocks=draw(st.integers(4, 40)),
        block_tokens=4,
        reserves=draw(st.booleans()),
        caches=draw(st.booleans()),
    )
    prefills = draw(st.integers(0, replicas - 1))
    transfer = Transfer(draw(st.integers(0, 8)) * TICK, draw(st.integers(0, 4)) * TICK)
    router: Any = draw(st.sampled_from(routers))
    return Fleet(draw(steps_of()), limits, replicas, router, prefills, transfer, draw(st.integers(0, 3)))


@st.composite
def asked(draw: st.DrawFn) -> list[Asked]:
    count = draw(st.integers(1, 24))
    now = 0
    found = []
    for number in range(count):
        now += draw(st.integers(0, 200))
        prompt, output = draw(st.integers(1, 90)), draw(st.integers(1, 40))
        family, known = draw(st.integers(0, 2)), draw(st.integers(0, 6))
        hashes = tuple((family, place) if place < known else (number, place) for place in range(prompt // 8 + 1))
        found.append(Asked(number, prompt, output, hashes, now * TICK))
    return found


HASH_TOKENS = 8


def make_book(requests: list[Asked], timed: bool = True) -> Book:
    return Book(
        [one.prompt for one in requests],
        [one.output for one in requests],
        [one.came for one in requests] if timed else [],
        [one.hashes for one in requests],
        HASH_TOKENS,
    )


def draw_concurrency(draw: int) -> int | None:
    return draw or None


@settings(deadline=None)
@given(fleets(), asked(), st.integers(0, 6).map(draw_concurrency), st.integers(0, 3))
def test_jumps_agree_with_single_passes(
    fleet: Fleet, requests: list[Asked], concurrency: int | None, apart: int
) -> None:
    ran = simulate(fleet, make_book(requests, concurrency is None), concurrency=concurrency, apart_s=apart * TICK)
    engines = stepwise(fleet, requests, HASH_TOKENS, concurrency, apart * TICK)
    assert ran.book.first == [one.first for one in requests]
    assert ran.book.done == [one.done for one in requests]
    assert [one.preemptions for one in ran.replicas] == [engine.preemptions for engine in engines]
    assert [one.peak_blocks for one in ran.replicas] == [engine.peak for engine in engines]


@settings(deadline=None)
@given(fleets(("random", "least-loaded", "prefix")), asked(), st.integers(0, 6).map(draw_concurrency))
def test_no_request_is_lost_and_limits_are_kept(fleet: Fleet, requests: list[Asked], concurrency: int | None) -> None:
    ran = simulate(fleet, make_book(requests, concurrency is None), concurrency=concurrency)
    book = ran.book
    room = fleet.limits.kv_blocks * fleet.limits.block_tokens
    assert book.refused == [one.number for one in requests if one.prompt + one.output > room]
    answered = [number for number in range(len(requests)) if number not in book.refused]
    for number in answered:
        assert book.arrival[number] <= book.first[number] <= book.done[number]
    assert all(book.done[number] < 0 and book.first[number] < 0 for number in book.refused)
    for replica in ran.replicas:
        assert replica.in_flight == 0
        assert replica.used_blocks == 0
        assert replica.peak_blocks <= replica.capacity
        assert replica.cache is None or 0 <= replica.cache.idle_blocks <= replica.capacity
        assert replica.busy_s <= ran.end_s * (1 + 1e-9)


@settings(deadline=None)
@given(fleets(("random", "least-loaded", "prefix")), asked(), st.integers(0, 6).map(draw_concurrency))
def test_work_is_conserved(fleet: Fleet, requests: list[Asked], concurrency: int | None) -> None:
    """Each prompt is computed once, except cached tokens, and again with its output after a preemption."""
    ran = simulate(fleet, make_book(requests, concurrency is None), concurrency=concurrency)
    served = [one for one in requests if one.number not in ran.book.refused]
    computed = sum(replica.computed_tokens for replica in ran.replicas)
    asked_for = sum(one.prompt for one in served)
    again = sum(ran.book.tokens[one.number] for one in served) - asked_for
    assert all(ran.book.tokens[one.number] + ran.book.left[one.number] == one.prompt + one.output for one in served), (
        "what a request was to say is said, before or after it was preempted"
    )
    if not sum(replica.preemptions for replica in ran.replicas):
        assert again == 0
        assert computed == asked_for - sum(ran.book.hits)
    else:
        assert computed + sum(ran.book.hits) > asked_for
    made = compute_outcome(fleet, ran, 1, None, CardPrice())
    assert made.output_tok_s * made.seconds == pytest.approx(sum(one.output for one in served))


@settings(deadline=None)
@given(fleets(("random", "least-loaded", "prefix")), asked())
def test_the_same_seed_gives_the_same_result(fleet: Fleet, requests: list[Asked]) -> None:
    one, other = (simulate(fleet, make_book(requests)) for _ in range(2))
    assert (one.book.first, one.book.done, one.end_s) == (other.book.first, other.book.done, other.end_s)


def make_fleet(replicas: int = 1, **changes: Any) -> Fleet:
    steps = Steps(
        decode_s=tuple(0.010 + 0.001 * count for count in range(65)),
        context_s=tuple([1e-6] * 65),
        prompt_s=tuple(0.010 + 0.0001 * tokens for tokens in range(1025)),
    )
    limits = ReplicaLimits(slots=64, batch_tokens=1024, kv_blocks=4096)
    return Fleet(steps, limits, replicas)._replace(**changes)


def simulate_requests(fleet: Fleet, count: int, gap_s: float = 0.0, prompt: int = 100, output: int = 10) -> FleetRun:
    return simulate(fleet, Book([prompt] * count, [output] * count, [gap_s * number for number in range(count)]))


def test_single_request_takes_its_prompt_and_decode_passes() -> None:
    ran = simulate_requests(make_fleet(), 1)
    assert ran.book.first == [pytest.approx(0.010 + 0.0001 * 100)]
    passes = sum(0.011 + 1e-6 * (100 + number) for number in range(9))
    assert ran.book.done == [pytest.approx(0.020 + passes)]


def test_long_prompt_is_chunked_between_tokens_of_others() -> None:
    book = Book([100, 2500], [200, 2], [0.0, 0.5])
    ran = simulate(make_fleet(), book)
    # Two full passes and one with the remaining 453 tokens; the first request gets a token in each.
    chunks = [1023, 1023, 454]
    alone_s = sum(0.010 + 0.0001 * tokens for tokens in chunks)
    assert ran.book.first[1] - 0.5 == pytest.approx(alone_s + 3 * 0.011, rel=0.05)


def test_requests_beyond_the_cache_wait_or_are_preempted() -> None:
    """Two requests of eight blocks each in a cache of twelve: both start, and one is preempted."""
    small = make_fleet()._replace(limits=ReplicaLimits(slots=8, batch_tokens=1024, kv_blocks=12))
    ran = simulate_requests(small, 2, prompt=64, output=64)
    assert ran.replicas[0].preemptions >= 1
    assert ran.book.done[0] < ran.book.done[1]
    aside = small._replace(limits=small.limits._replace(reserves=True))
    ran = simulate_requests(aside, 2, prompt=64, output=64)
    assert ran.replicas[0].preemptions == 0
    assert ran.book.first[1] >= ran.book.done[0]


def test_cached_prefix_is_not_computed_again() -> None:
    hashes = [("system",), ("system",), ("other",)]
    book = Book([600] * 3, [4] * 3, [0.0, 1.0, 2.0], hashes, 512)
    ran = simulate(make_fleet(), book)
    waited = [first - came for first, came in zip(ran.book.first, ran.book.arrival, strict=True)]
    assert waited == [pytest.approx(0.070), pytest.approx(0.010 + 0.0001 * 88), pytest.approx(0.070)]
    assert sum(ran.book.hits) == 512
    cold = simulate(
        make_fleet()._replace(limits=make_fleet().limits._replace(caches=False)), Book([600] * 3, [4] * 3, [0, 1, 2])
    )
    assert cold.book.hits == []


def test_prefix_router_has_more_cache_hits_than_random() -> None:
    count, kinds = 400, 16
    hashes = [(number % kinds * 7919 % kinds,) for number in range(count)]
    arrivals = [number * 0.05 for number in range(count)]

    def hits(router: Any) -> int:
        book = Book([1000] * count, [8] * count, arrivals, hashes, 960)
        return sum(simulate(make_fleet(16, router=router), book).book.hits)

    assert hits("prefix") > 0.9 * (count - kinds) * 960
    assert hits("random") < 0.7 * hits("prefix")


def test_least_loaded_router_waits_less_than_random() -> None:
    def p95(router: Any) -> float:
        fleet = make_fleet(8, router=router)
        found = compute_outcome(fleet, simulate_requests(fleet, 2000, gap_s=0.004, output=40), 1, None, CardPrice())
        assert found.ttft_ms is not None
        return found.ttft_ms.p95

    assert p95("least-loaded") < p95("random")


def test_prefill_workers_transfer_their_cache_over_a_link() -> None:
    fleet = make_fleet(2, prefills=1, transfer=Transfer(0.005, 1e-4))
    ran = simulate_requests(fleet, 1)
    assert ran.book.first == [pytest.approx(0.020 + 100 * 1e-4 + 0.005)]
    prefill, decode = ran.replicas
    assert prefill.computed_tokens == 100
    assert decode.computed_tokens == 0


def test_disaggregated_fleet_has_a_lower_tpot_p99() -> None:
    def tpot_p99(fleet: Fleet) -> float:
        found = compute_outcome(
            fleet, simulate_requests(fleet, 400, gap_s=0.05, prompt=900, output=50), 1, None, CardPrice()
        )
        assert found.tpot_ms is not None
        return found.tpot_ms.p99

    assert tpot_p99(make_fleet(4, prefills=2)) < tpot_p99(make_fleet(4))


def test_goodput_counts_requests_on_target_and_cost_counts_all_cards() -> None:
    fleet = make_fleet(2)
    ran = simulate_requests(fleet, 100, gap_s=0.02)
    found = compute_outcome(fleet, ran, 4, LatencyTarget(ttft_ms=30), CardPrice(2.0, 700.0))
    share = sum(first - came <= 0.030 for first, came in zip(ran.book.first, ran.book.arrival, strict=True)) / 100
    assert found.on_target == pytest.approx(share)
    assert found.goodput_requests_s == pytest.approx(share * 100 / found.seconds)
    assert found.cards == 8
    hours = 8 * found.seconds / 3600
    assert found.cost_per_million_tokens == pytest.approx(2.0 * hours / 1000 * 1e6)
    assert found.kwh_per_million_tokens == pytest.approx(0.7 * hours / 1000 * 1e6)
    assert compute_outcome(fleet, ran, 4, None, CardPrice()).goodput_requests_s is None


def test_required_share_on_target_is_that_of_bench() -> None:
    assert MET == knee.MET
