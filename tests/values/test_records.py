"""Records are frozen and strict, and survive JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.values import (
    Accelerator,
    Cpu,
    Decision,
    DeviceNeed,
    Disk,
    Endpoint,
    Estimate,
    Figure,
    Fit,
    Hardware,
    Launch,
    Link,
    Memory,
    Model,
    Offload,
    Parallelism,
    Plan,
    Reason,
    Record,
    Refusal,
    Settings,
    TensorGroup,
    Weights,
    Workload,
    from_json,
    make_estimate,
    to_json,
)
from bedplate.values.portfolio import Placement, Portfolio
from bedplate.values.result import Result
from bedplate.values.units import format_latency, format_memory, format_seconds, format_size

text = st.text(max_size=20)
count = st.integers(0, 2**60)
positive = st.integers(1, 2**40)
figures = st.builds(
    Figure,
    value=st.floats(0, 1e18),
    low=st.floats(0, 1e18),
    high=st.floats(0, 1e18),
    basis=st.sampled_from(["measured", "reported", "spec", "estimate"]),
    source=st.none() | text,
)
cpus = st.builds(
    Cpu, name=text, arch=text, logical_cores=positive, allowed_cores=st.floats(0.1, 1024),
    allowed_physical_cores=positive, instruction_sets=st.lists(text, max_size=3).map(tuple),
)  # fmt: skip
hardware = st.builds(
    Hardware,
    os=st.sampled_from(["linux", "macos", "windows"]),
    cpu=cpus,
    memory=st.builds(Memory, total_bytes=count, available_bytes=count, bandwidth_bytes_s=st.none() | figures),
    accelerators=st.lists(
        st.builds(
            Accelerator, name=text, vendor=st.sampled_from(["nvidia", "amd", "apple"]), memory_bytes=st.none() | count
        ),
        max_size=3,
    ).map(tuple),
    links=st.lists(st.builds(Link, kind=st.just("nvlink"), a=text, b=text, bandwidth_bytes_s=figures), max_size=2).map(
        tuple
    ),
    disk=st.none() | st.builds(Disk, path=text, total_bytes=count, free_bytes=count),
)
models = st.builds(
    Model, name=text, format=st.just("gguf"), files=st.lists(text, max_size=2).map(tuple), architecture=text,
    parameters=count, weight_bytes=count, num_layers=positive, kv_bytes_per_token=count,
    tensor_groups=st.lists(
        st.builds(TensorGroup, type=text, tensors=count, parameters=count, bytes=count), max_size=3
    ).map(tuple),
)  # fmt: skip
workloads = st.builds(
    Workload, users=positive, concurrency=st.none() | positive, prompt_tokens=positive, output_tokens=positive
)
settings = st.builds(Settings, slots=positive, context_tokens=positive, threads=st.none() | positive)
sizes = st.integers(1, 64)
layouts = st.builds(Parallelism, tensor=sizes, pipeline=sizes, data=sizes, expert=sizes, attention_data=sizes)
weights = st.builds(
    Weights, label=text, made=st.sampled_from(["as it is", "while loading", "converted"]), format=st.just("gguf")
)
needs = st.builds(
    DeviceNeed, device=text, count=positive, weights_bytes=count, kv_bytes=count, activation_bytes=figures,
    overhead_bytes=figures, usable_bytes=st.none() | count,
)  # fmt: skip
fits = st.builds(
    Fit, fits=st.booleans(), devices=st.lists(needs, max_size=2).map(tuple), concurrency=count, max_concurrency=count,
    offload=st.none() | st.builds(
        Offload, kind=st.sampled_from(["layers", "experts"]), device_layers=count, host_layers=count, host_bytes=count
    ),
)  # fmt: skip
decisions = st.builds(
    Decision, engine=st.none() | text, model=text, fits=st.booleans(), max_concurrency=count,
    settings=st.none() | settings, memory=st.none() | fits, weights=st.none() | weights, parallelism=layouts,
    estimate=st.builds(Estimate, ttft_ms=st.none() | figures, memory_gb=st.none() | figures),
    reasons=st.lists(st.builds(Reason, rule=text, text=text, source=text), max_size=2).map(tuple),
    refused=st.lists(st.builds(Refusal, engine=text, kind=st.just("impossible"), why=text), max_size=2).map(tuple),
    launch=st.none() | st.builds(Launch, argv=st.lists(text).map(tuple), env=st.dictionaries(text, text, max_size=2)),
)  # fmt: skip
plans = st.builds(
    Plan, engine=text, engine_version=text, model=models, workload=workloads, weights=weights, parallelism=layouts,
    settings=settings, orchestrator=st.none() | text,
)  # fmt: skip
results = st.builds(
    Result, at=text, machine=text, engine=text, model=text, concurrency=positive, prompt_tokens=positive,
    output_tokens=positive, parallelism=layouts, output_tok_s=st.none() | st.floats(0, 1e9),
)  # fmt: skip
portfolios = st.builds(
    Portfolio, engine=st.none() | text, text=text, free=st.dictionaries(text, count, max_size=2),
    placements=st.lists(
        st.builds(Placement, service=text, pool=st.none() | text, accelerators=count, decision=decisions), max_size=2
    ).map(tuple),
)  # fmt: skip
endpoints = st.builds(Endpoint, url=text, model=text, engine=text, engine_version=text, pid=count, log=text)


@given(st.one_of(hardware, models, workloads, fits, decisions, plans, endpoints, results, portfolios))
def test_every_record_survives_json(record: Record) -> None:
    assert from_json(type(record), to_json(record)) == record
    assert msgspec.to_builtins(record)["schema"].endswith("/1")


@pytest.mark.parametrize("kind", [Hardware, Model, Workload, Fit, Decision, Plan, Endpoint, Figure, Result, Portfolio])
def test_records_cannot_be_changed(kind: type[Record]) -> None:
    assert kind.__struct_config__.frozen


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UsageError) as bad:
        from_json(Workload, '{"user": 3}')
    assert "user" in (bad.value.cause or "") and bad.value.exit_code == 2


def test_a_value_out_of_range_is_named() -> None:
    with pytest.raises(UsageError) as bad:
        from_json(Workload, '{"users": 0}')
    assert "$.users" in (bad.value.cause or "")


def test_a_record_of_another_version_is_rejected() -> None:
    with pytest.raises(UsageError):
        from_json(Workload, '{"schema": "workload/99"}')


class Open(Record, frozen=True):
    value: Any


def test_a_record_that_is_nested_too_deeply_is_rejected() -> None:
    with pytest.raises(UsageError, match="not a valid Open"):
        from_json(Open, '{"value":' + "[" * 50_000 + "]" * 50_000 + "}")


def test_concurrency_by_littles_law() -> None:
    assert Workload(users=200, think_time_s=30).compute_in_flight(request_s=10) == 50
    assert Workload(requests_per_s=4).compute_in_flight(request_s=2.5) == 10
    assert Workload(users=200, concurrency=7).compute_in_flight(request_s=10) == 7
    assert Workload(users=200).compute_in_flight() == 200


def test_request_tokens_are_the_context_or_prompt_plus_output() -> None:
    assert Workload(prompt_tokens=100, output_tokens=28).request_tokens == 128
    assert Workload(prompt_tokens=100, output_tokens=28, context_tokens=4096).request_tokens == 4096


def test_a_device_need_fits_only_if_its_upper_bound_does() -> None:
    def need(usable_bytes: int | None) -> DeviceNeed:
        return DeviceNeed(
            device="host", weights_bytes=1000, kv_bytes=200, activation_bytes=make_estimate(10, 1.0),
            overhead_bytes=make_estimate(100, 0.5), usable_bytes=usable_bytes,
        )  # fmt: skip

    assert need(1370).fits and not need(1369).fits
    assert need(0).total_bytes == 1310 and need(0).high_bytes == 1370
    assert not need(None).fits


@pytest.mark.parametrize(
    ("given_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (98_362_432, "98.4 MB"),
        (999_999, "1 MB"),
        (15_000_000_000, "15 GB"),
        (3.2e15, "3200 TB"),
    ],
)
def test_sizes_in_decimal_units(given_bytes: float, shown: str) -> None:
    assert format_size(given_bytes) == shown


def test_latencies_of_ten_seconds_and_more_are_not_milliseconds() -> None:
    written = [format_latency(ms) for ms in (35.1, 9_999, 41_909, 7_260_000)]
    assert written == ["35.1 ms", "9,999 ms", "41.9 s", "2 h 01 min"]


def test_memory_in_binary_units_and_durations() -> None:
    assert format_memory(25_275_125_760) == "23.5 GiB" and format_memory(1024) == "1 KiB"
    written = [format_seconds(s) for s in (0.035, 1.44, 125.0, 9000.0, 86_400.0)]
    assert written == ["35 ms", "1.4 s", "2 min 05 s", "2 h 30 min", "24 h"]
