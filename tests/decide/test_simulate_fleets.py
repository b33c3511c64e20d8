"""Replicas from the estimator, traffic from traces or random numbers, and the search for the cheapest fleet."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide import decide
from bedplate.decide.simulate import (
    Book,
    Deployment,
    FleetSearch,
    MeanLengths,
    RequestStream,
    compute_outcome,
    find_cheapest,
    from_shapes,
    make_deployment,
    make_synthetic,
    search,
    simulate,
    simulate_one_layout,
)
from bedplate.decide.simulate.outcome import CardPrice
from bedplate.decide.simulate.routers import make_random_router
from bedplate.decide.simulate.search import list_splits
from bedplate.decide.simulate.times import make_decode_table, make_prompt_table, speed_up
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import look_up_model
from bedplate.facts.traces import BadRows, detect_format, open_trace, parse_trace
from bedplate.values import LatencyTarget, Workload, from_json, to_json
from bedplate.values.intent import Operations
from bedplate.values.simulation import Simulation
from bedplate.values.workload import RequestShape

CAPTURES = Path(__file__).parents[1] / "captures" / "traces"
WORK = Workload(concurrency=64, prompt_tokens=1024, output_tokens=256)


def make_test_deployment(work: Workload = WORK, accelerator: str = "NVIDIA H100 SXM 80GB", **more: Any) -> Deployment:
    model = look_up_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model is not None
    machine = make_simulated_hardware({"accelerator": accelerator, "count": 1, "ram_gb": 256, **more})
    decision = decide(machine, model, work)
    lengths = MeanLengths(work.prompt_tokens, work.output_tokens)
    return make_deployment(
        machine, model, decision, work, lengths, operations=Operations(price_per_hour=2.0, watts=700.0)
    )  # fmt: skip


@pytest.fixture(scope="module")
def h100() -> Deployment:
    return make_test_deployment()


def test_replica_agrees_with_the_plan(h100: Deployment) -> None:
    replica = h100.replica
    assert (replica.engine, replica.quantization, replica.cards) == ("vllm", "BF16", 1)
    assert replica.slots == 256
    # 80 GB minus 16 GB of weights, at 128 KiB per token in 16 bits.
    assert 400_000 < replica.kv_tokens < 550_000
    assert 0 < replica.low < 1 < replica.high
    assert "continuous batching" in replica.source


def test_pass_time_grows_with_its_work(h100: Deployment) -> None:
    steps = h100.steps
    assert all(one <= other for one, other in itertools.pairwise(steps.prompt_s[1:]))
    pairs = zip(steps.decode_s, steps.context_s, strict=True)
    full = [fixed + each * count * 1152 for count, (fixed, each) in enumerate(pairs)]
    assert all(one < other for one, other in itertools.pairwise(full[1:]))
    assert steps.pair_s > 0
    quick = speed_up(steps, 2.0)
    assert quick.decode_s[8] == pytest.approx(steps.decode_s[8] / 2)
    assert quick.prompt_s[100] == pytest.approx(steps.prompt_s[100] / 2)


@pytest.mark.parametrize("concurrency", [4, 16, 64])
def test_closed_loop_agrees_with_the_estimator(concurrency: int) -> None:
    """Both use the same pass times; the closed form averages what the simulator computes event by event."""
    model = look_up_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model is not None
    machine = make_simulated_hardware({"accelerator": "NVIDIA H100 SXM 80GB", "count": 1, "ram_gb": 256})
    work = Workload(concurrency=concurrency, prompt_tokens=1024, output_tokens=256)
    decision = decide(machine, model, work, "vllm")
    found = make_deployment(machine, model, decision, work, MeanLengths(1024, 256))
    expected = decision.estimate.output_tok_s
    assert expected is not None
    fleet = found.make_fleet(1)
    count = 12 * concurrency
    ran = simulate(fleet, Book([1024] * count, [256] * count), concurrency=concurrency, apart_s=0.001)
    got = compute_outcome(fleet, ran, 1, None, CardPrice())
    assert got.output_tok_s == pytest.approx(expected.value, rel=0.2)


def test_engine_with_slots_reserves_their_whole_context() -> None:
    found = make_test_deployment(
        Workload(concurrency=2, prompt_tokens=512, output_tokens=128), "NVIDIA GeForce RTX 4090"
    )
    if found.replica.engine not in ("llama.cpp", "exllamav3"):
        pytest.fail(f"the plan for two on a 4090 is {found.replica.engine}: choose another case for this test")
    assert found.limits.reserves
    assert found.limits.kv_blocks * 16 >= found.limits.slots * found.replica.context_tokens


def test_model_that_cannot_be_served_cannot_be_simulated() -> None:
    with pytest.raises(NotPossible, match="nothing to simulate"):
        model = look_up_model("meta-llama/Llama-3.1-405B-Instruct")
        assert model is not None
        machine = make_simulated_hardware({"accelerator": "NVIDIA GeForce RTX 3060", "count": 1, "ram_gb": 16})
        make_deployment(machine, model, decide(machine, model, WORK), WORK, MeanLengths(1024, 256))


def test_task_without_generation_is_a_usage_error() -> None:
    model = look_up_model("BAAI/bge-m3")
    assert model is not None
    machine = make_simulated_hardware({"accelerator": "NVIDIA H100 SXM 80GB", "count": 1, "ram_gb": 256})
    work = Workload(concurrency=4, task="embed")
    with pytest.raises(UsageError, match="only text generation can be simulated"):
        make_deployment(machine, model, decide(machine, model, work), work, MeanLengths(512, 1))


def test_table_is_exact_at_both_contexts_and_linear_between() -> None:
    lengths = MeanLengths(1000, 500)
    fixed, each = make_decode_table(
        lambda count, context: 0.01 + 1e-3 * count + 1e-7 * count * context**1.1, lengths, 8
    )
    for context in lengths.contexts:
        assert fixed[8] + each[8] * 8 * context == pytest.approx(0.018 + 8e-7 * context**1.1)
    table = make_prompt_table(lambda tokens: 0.01 + 1e-5 * tokens, 1000)
    assert len(table) == 1001
    assert table[777] == pytest.approx(0.01 + 1e-5 * 777)


# traffic


def read_stream(name: str) -> RequestStream:
    with open_trace(CAPTURES / name) as stream:
        bad = BadRows(name)
        return from_shapes(parse_trace(stream, detect_format(stream, name), bad), name)


def test_trace_keeps_its_arrivals_lengths_and_prefixes() -> None:
    stream = read_stream("mooncake-conversation.jsonl")
    assert stream.hashes is not None and stream.hash_tokens == 512
    assert stream.arrival[0] == 0.0 and stream.arrival == sorted(stream.arrival)
    assert len(stream.take_first(5)) == 5
    azure = read_stream("azure-2023-conv.csv")
    assert azure.hashes is None
    assert azure.summarize().requests == len(azure)


def test_rate_scales_the_arrivals_of_a_trace() -> None:
    name = "azure-2023-conv.csv"
    with open_trace(CAPTURES / name) as stream:
        found = from_shapes(parse_trace(stream, "azure", BadRows(name)), name, rate=100.0)
    assert found.requests_per_s == pytest.approx(100.0)
    assert "scaled to 100 requests/s" in found.notes[0]


def test_a_trace_without_times_needs_a_rate() -> None:
    rows = [RequestShape(prompt_tokens=10, output_tokens=5) for _ in range(4)]
    with pytest.raises(UsageError, match="has no arrival times"):
        from_shapes(rows, "log")
    assert from_shapes(rows, "log", rate=10.0, seed=1) == from_shapes(rows, "log", rate=10.0, seed=1)
    with pytest.raises(UsageError, match="no request with a prompt"):
        from_shapes([RequestShape(prompt_tokens=None, output_tokens=5, started_s=0.0)], "log")


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 500), st.floats(0, 2), st.integers(0, 100))
def test_synthetic_traffic_matches_the_workload(prompt: int, output: int, spread: float, seed: int) -> None:
    work = Workload(prompt_tokens=prompt, output_tokens=output)
    one = make_synthetic(work, 200, 10.0, seed=seed, spread=spread)
    assert one == make_synthetic(work, 200, 10.0, seed=seed, spread=spread)
    assert min(one.prompt) >= 1 and min(one.output) >= 1
    assert one.arrival == sorted(one.arrival)
    if spread == 0:
        assert set(one.prompt) == {prompt} and set(one.output) == {output}


def test_synthetic_lengths_have_the_requested_mean_and_spread() -> None:
    stream = make_synthetic(Workload(prompt_tokens=1000, output_tokens=100), 20_000, 10.0, seed=3, spread=0.5)
    assert stream.mean_prompt == pytest.approx(1000, rel=0.02)
    deviation = (sum((one - 1000) ** 2 for one in stream.prompt) / len(stream)) ** 0.5
    assert deviation == pytest.approx(500, rel=0.05)
    assert stream.requests_per_s == pytest.approx(10.0, rel=0.03)


def test_router_and_traffic_use_independent_random_numbers() -> None:
    """With a shared random sequence, a request's prefix and its replica would be correlated."""
    work = Workload(prompt_tokens=1024, output_tokens=16, shared_prefix_tokens=512)
    stream = make_synthetic(work, 2000, 10.0, seed=7, prefixes=40)
    assert stream.hashes is not None
    route = make_random_router(8, 7)
    met = {(name, route(number)) for number, name in enumerate(stream.hashes)}
    assert len(met) > 0.9 * 40 * 8


# the search


TARGET = LatencyTarget(ttft_ms=300, tpot_ms=20)


def make_question(h100: Deployment, rate: float = 60.0, count: int = 1500, **more: Any) -> FleetSearch:
    return FleetSearch(h100, make_synthetic(WORK, count, rate, seed=1, spread=0.5), TARGET, **more)


def test_cheapest_fleet_meets_the_target_and_a_smaller_one_does_not(h100: Deployment) -> None:
    asked = make_question(h100)
    found = find_cheapest(asked, 1, 512, ("aggregated",))
    assert found.answer is not None and found.answer.meets
    fewer = asked.simulate_layout(found.answer.replicas - 1)
    assert not fewer.meets
    assert len(found.tried) < 12
    assert found.slow is not None and found.fast is not None
    assert (found.slow.on_target or 0) <= (found.answer.on_target or 0) <= (found.fast.on_target or 0) + 0.02
    assert found.safe is not None and found.safe.meets
    assert found.safe.replicas >= found.answer.replicas
    assert from_json(Simulation, to_json(found)) == found


def test_unreachable_target_has_no_answer(h100: Deployment) -> None:
    asked = make_question(h100)._replace(target=LatencyTarget(ttft_ms=1))
    found = find_cheapest(asked, 1, 16, ("aggregated", "disaggregated"))
    assert found.answer is None
    assert found.tried and not any(one.meets for one in found.tried)


def test_disaggregated_layout_is_divided_by_prompt_work(h100: Deployment) -> None:
    long_prompts = make_question(h100)._replace(
        stream=make_synthetic(Workload(prompt_tokens=8000, output_tokens=20), 50, 1.0)
    )
    long_answers = make_question(h100)._replace(
        stream=make_synthetic(Workload(prompt_tokens=50, output_tokens=2000), 50, 1.0)
    )
    assert next(list_splits(long_prompts, 16)) > 10
    assert next(list_splits(long_answers, 16)) == 1
    assert all(1 <= split <= 15 for split in list_splits(long_prompts, 16))
    assert list(list_splits(long_prompts, 1)) == []


def test_requested_layout_is_simulated(h100: Deployment) -> None:
    asked = make_question(h100, count=300)
    found = simulate_one_layout(asked, 4, "disaggregated", 1)
    assert found.answer is not None
    assert (found.answer.layout, found.answer.replicas, found.answer.prefills) == ("disaggregated", 4, 1)
    assert len(found.tried) == 1
    assert found.answer.cost_per_million_tokens is not None


def test_partial_search_is_checked_with_all_requests(h100: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCH_REQUESTS", 200)
    found = find_cheapest(make_question(h100, rate=100.0, count=900), 1, 64, ("aggregated",))
    assert found.answer is not None and found.answer.meets
    assert found.answer.requests == 900
    assert {one.requests for one in found.tried} == {200, 900}
    whole = [one for one in found.tried if one.requests == 900]
    assert not any(one.meets for one in whole[:-1]), "the part is not the whole: it may take more replicas"
