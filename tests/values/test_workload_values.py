"""Workloads by Little's law and its inverse; request shapes, summaries and intents survive JSON."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.values import Workload, from_json, to_json
from bedplate.values.intent import Intent, NodePool, Operations, PlatformTenant, Service
from bedplate.values.record import Record
from bedplate.values.workload import (
    Arrivals,
    CacheSize,
    InFlight,
    LengthBin,
    LengthDistribution,
    PrefixReuse,
    RequestShape,
    Spread,
    TraceSummary,
    apply_littles_law,
    invert_littles_law,
)

some = st.floats(0.001, 1e6)
counts = st.integers(1, 10**6)
shares = st.floats(0, 1)
text = st.text(min_size=1, max_size=12)
spreads = st.builds(Spread, mean=some, p50=some, p90=some, p99=some, max=some)
lengths = st.builds(
    LengthDistribution, spread=spreads, total_tokens=counts, basis=st.just("reported"), error=st.none() | shares,
    bins=st.lists(st.builds(LengthBin, from_tokens=counts, to_tokens=counts, requests=counts), max_size=3).map(tuple),
)  # fmt: skip
summaries = st.builds(
    TraceSummary, source=text, format=st.sampled_from(["azure", "mooncake", "sharegpt", "bedplate"]), requests=counts,
    bad_examples=st.lists(text, max_size=2).map(tuple), outcomes=st.dictionaries(text, counts, max_size=2),
    prompt=lengths, output=lengths, total=lengths,
    arrivals=st.none() | st.builds(
        Arrivals, span_s=some, requests_per_s=st.none() | some, gap_cv=st.none() | some,
        peak_to_mean_1s=st.none() | some, peak_to_mean_10s=some, peak_to_mean_60s=some, same_moment=shares,
        series=st.lists(some, max_size=3).map(tuple),
    ),
    in_flight=st.none() | st.builds(InFlight, spread=spreads, basis=st.just("estimate"), request_s=some),
    prefix=st.none() | st.builds(
        PrefixReuse, saved_share=shares, sharing_requests=shares, typical_tokens=counts, saved_tokens_per_request=some,
        by_cache=st.lists(st.builds(CacheSize, tokens=counts, saved_share=shares), max_size=2).map(tuple),
        basis=st.just("measured"), how=text,
    ),
)  # fmt: skip
facts = st.dictionaries(text, st.one_of(text, counts, st.booleans()), max_size=3)
models = st.one_of(text, facts)
works = st.builds(Workload, users=counts, concurrency=st.none() | counts, prompt_tokens=counts)
intents = st.builds(
    Intent, hardware=st.none() | text | facts, model=st.none() | models, workload=works,
    operations=st.builds(Operations, machinery=st.sampled_from([None, "none", "cluster"]), price_per_hour=some),
    pools=st.lists(st.builds(NodePool, name=text, accelerator=text, count=counts), max_size=2).map(tuple),
    services=st.lists(st.builds(Service, model=models, workload=works, pool=st.none() | text), max_size=2).map(tuple),
    tenants=st.lists(st.builds(PlatformTenant, name=text, share=st.none() | st.floats(0.01, 1)), max_size=2).map(tuple),
)  # fmt: skip
request_shapes = st.builds(
    RequestShape, started_s=st.none() | some, prompt_tokens=st.none() | counts, output_tokens=counts,
    duration_ms=st.none() | some, prefix_hashes=st.lists(st.one_of(text, counts), max_size=3).map(tuple),
    tenant=st.none() | text, outcome=st.sampled_from(["ok", "error", "cancelled", "refused"]),
)  # fmt: skip


@given(st.one_of(summaries, intents, request_shapes))
def test_every_record_survives_json(record: Record) -> None:
    assert from_json(type(record), to_json(record)) == record
    assert msgspec.to_builtins(record)["schema"].endswith("/1")


def test_a_line_of_the_request_log_is_short_and_has_its_version() -> None:
    shape = RequestShape(started_s=1.5, prompt_tokens=7)
    line = msgspec.json.encode(shape)
    assert msgspec.json.decode(line) == {"schema": "request/1", "started_s": 1.5, "prompt_tokens": 7}
    with pytest.raises(UsageError):
        from_json(RequestShape, '{"schema": "request/2", "started_s": 1}')


@given(some, some)
def test_littles_law_and_its_inverse_agree(requests_per_s: float, request_s: float) -> None:
    in_flight = apply_littles_law(requests_per_s, request_s)
    assert invert_littles_law(in_flight, request_s) == pytest.approx(requests_per_s)


def test_the_rate_that_a_concurrency_sustains() -> None:
    assert Workload(concurrency=64).compute_arrivals_per_s(request_s=8) == 8
    assert Workload(requests_per_s=3, concurrency=64).compute_arrivals_per_s(request_s=8) == 3
    assert Workload(users=200, think_time_s=30).compute_arrivals_per_s(request_s=10) == 5
    assert (
        Workload(users=200).compute_arrivals_per_s(request_s=10) == 5
    )  # thirty seconds of thinking, when nothing is said


@given(counts, some, some)
def test_users_never_have_more_in_flight_than_there_are_users(users: int, think_s: float, request_s: float) -> None:
    work = Workload(users=users, think_time_s=think_s)
    in_flight = work.compute_in_flight(request_s)
    assert 1 <= in_flight <= users
    assert in_flight - 1 <= work.compute_arrivals_per_s(request_s) * request_s + 1e-6


def test_integer_results_are_not_rounded_up() -> None:
    assert Workload(users=3, think_time_s=0.2).compute_in_flight(request_s=0.1) == 1


def test_nodes_of_a_pool() -> None:
    assert NodePool(name="a", accelerator="H100", count=20, gpus_per_node=8).nodes == 3
    assert NodePool(name="a", accelerator="H100", count=8).nodes == 1
    assert NodePool(name="a", cpu="Xeon", count=5).nodes == 5
