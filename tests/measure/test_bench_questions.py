"""Parsing of the options of `bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.measure.bench import label_engine
from bedplate.measure.questions import name_trace, parse_engines, parse_loads, parse_target
from bedplate.measure.replays import read_shapes
from bedplate.values.run import BenchMatrix, Load
from bedplate.values.units import parse_duration
from bedplate.values.workload import LatencyTarget

read_budget = partial(parse_duration, field="--budget", positive=True)


def test_parses_engine_lists() -> None:
    assert parse_engines("installed") == "installed" and parse_engines(" all ") == "all"
    assert parse_engines("vllm, sglang,vllm") == ("vllm", "sglang")
    for wrong in ("", " , ", "all,vllm"):
        with pytest.raises(UsageError):
            parse_engines(wrong)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("45", 45), ("2 min", 120)])
def test_parses_budgets(text: str, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "0", "10 days", "1e3"])
def test_rejects_invalid_budgets(text: str) -> None:
    with pytest.raises(UsageError):
        read_budget(text)


def test_parses_targets() -> None:
    assert parse_target("ttft_ms=500,tpot_ms=50") == LatencyTarget(ttft_ms=500, tpot_ms=50)
    assert parse_target(" tpot_ms = 7.5 ") == LatencyTarget(tpot_ms=7.5)
    for wrong in ("", "ttft=5", "ttft_ms", "ttft_ms=0", "ttft_ms=x", "ttft_ms=1,ttft_ms=2", "e2e_ms=5"):
        with pytest.raises(UsageError):
            parse_target(wrong)


def test_parses_loads() -> None:
    assert [load.concurrency for load in parse_loads()] == [1, 4, 8, 16]
    closed = parse_loads(concurrency="8, 2,8", prompt_tokens=64, shared_prefix_tokens=32, seed=3)
    assert [load.concurrency for load in closed] == [8, 2]
    assert all(load.shared_prefix_tokens == 32 and load.seed == 3 and load.arrivals == "closed" for load in closed)
    opened = parse_loads(rate="0.5,2", arrivals="burst", burst=4)
    assert [(load.requests_per_s, load.burst, load.concurrency) for load in opened] == [(0.5, 4, None), (2, 4, None)]
    assert parse_loads(rate="2")[0].burst is None


@pytest.mark.parametrize(
    "given",
    [
        {"concurrency": "0"}, {"concurrency": "1.5"}, {"concurrency": "x"}, {"concurrency": ","}, {"rate": "-1"},
        {"rate": "nan"}, {"concurrency": "1", "rate": "2"}, {"prompt_tokens": 32, "shared_prefix_tokens": 32},
        {"concurrency": ",".join(map(str, range(1, 70)))}, {"trace": Path("/no/such/file")},
    ],
)  # fmt: skip
def test_rejects_invalid_loads(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        parse_loads(**given)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    for read in (parse_engines, read_budget, parse_target, lambda one: parse_loads(concurrency=one, rate=None)):
        try:
            read(text)
        except UsageError as error:
            assert error.message


def test_a_trace_is_named_by_its_hash_and_limited_to_the_measured_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:{second:02d}.000000,100,{10 + second}" for second in range(0, 40, 10)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert name_trace(path).startswith("trace.csv ") and len(name_trace(path)) == len("trace.csv ") + 12
    assert [shape.output_tokens for shape in read_shapes(path, 20)] == [10, 20, 30]
    (load,) = parse_loads(trace=path)
    assert load.arrivals == "replay" and load.trace == name_trace(path)


def test_rejects_a_trace_without_arrival_times(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text('[{"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]}]')
    with pytest.raises(UsageError, match="no arrival times"):
        read_shapes(path, 20)


def test_labels_contain_the_version_if_an_engine_has_several() -> None:
    matrix = BenchMatrix(engines=("vllm@0.26.0", "vllm@0.32.0", "sglang@0.5.15"), loads=(Load(concurrency=1),))
    assert (
        label_engine(matrix, "vllm", "0.26.0") == "vllm@0.26.0" and label_engine(matrix, "sglang", "0.5.15") == "sglang"
    )
