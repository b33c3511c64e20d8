"""Requests in flight by Little's law, solved together with the latency at that number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bedplate.decide.load import solve_load
from bedplate.values import Workload
from bedplate.values.arrival import ArrivalProcess

times = st.floats(0.01, 20)
grows = st.floats(0, 0.2)


@given(st.integers(2, 100_000), st.floats(0.5, 600), times, grows)
def test_users_have_a_load_that_reproduces_itself(users: int, think_s: float, alone_s: float, each_s: float) -> None:
    work = Workload(users=users, think_time_s=think_s)
    load = solve_load(work, lambda in_flight: alone_s + each_s * in_flight, most=64)
    assert 1 <= load.in_flight <= users
    follows = work.compute_in_flight(alone_s + each_s * load.in_flight)
    # Numbers are rounded up, so one more may follow from one less.
    fewer = work.compute_in_flight(alone_s + each_s * (load.in_flight - 1))
    assert follows == load.in_flight or follows < load.in_flight <= fewer
    assert load.in_flight <= load.peak_in_flight <= users


@given(st.floats(0.01, 500), times, grows, st.integers(1, 4096))
def test_rate_beyond_the_capacity_fills_it(rate: float, alone_s: float, each_s: float, most: int) -> None:
    work = Workload(requests_per_s=rate)
    load = solve_load(work, lambda in_flight: alone_s + each_s * in_flight, most)
    assert load.arrival is ArrivalProcess.POISSON and load.requests_per_s == rate
    assert 1 <= load.in_flight <= most
    if load.in_flight < most:
        assert work.compute_in_flight(alone_s + each_s * load.in_flight) <= load.in_flight
    else:
        fits = work.compute_in_flight(alone_s + each_s * (most - 1)) <= most - 1
        assert most == 1 or not fits


def test_request_time_is_assumed_if_it_cannot_be_estimated() -> None:
    load = solve_load(Workload(users=100), lambda in_flight: None, most=8)
    assert load.request_time_assumed and load.request_s == 0.5 + 0.03 * 256
    assert load.description == (
        "100 users, 30 s between requests (assumed): 2.62 requests/s, 22 in flight if a request takes 8.18 s (assumed)"
    )
    # An embedding has no output tokens.
    assert Workload(users=100, task="embed").make_load().request_s == 0.5


def test_load_of_each_arrival_process_is_described() -> None:
    assert Workload(users=500, think_time_s=20).make_load(5.0).description == (
        "500 users, 20 s between requests: 20 requests/s, 100 in flight"
    )
    assert Workload(concurrency=64).make_load(8.0).description == "closed loop: 8 requests/s, 64 in flight"
    assert Workload(requests_per_s=4).make_load(2.5).description == "Poisson arrivals: 4 requests/s, 10 in flight"
    assert Workload().make_load(2.0).description == (
        "1 user, 30 s between requests (assumed): 0.0312 requests/s, 1 in flight"
    )
