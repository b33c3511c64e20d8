"""The search over layouts and machine sizes: independent of the starting machine, and monotone in the cards."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.commands import invoke
from tests.decide.test_simulate_fleets import make_test_deployment

from bedplate.decide.simulate import (
    Book,
    Deployment,
    FleetSearch,
    MeanLengths,
    find_cheapest,
    list_deployments,
    make_synthetic,
    simulate,
)
from bedplate.decide.simulate.outcome import estimate_noise
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import LatencyTarget, Workload
from bedplate.values.arrival import ArrivalProcess

STARTS = ("H100 SXM", "4x H100 SXM", "16x H100 SXM")
SEVENTY = "meta-llama/Llama-3.3-70B-Instruct"


@functools.cache
def make_h100() -> Deployment:
    """Not a fixture: hypothesis prints all arguments of a test that fails, and this one is long."""
    return make_test_deployment()


@pytest.fixture(scope="module")
def h100() -> Deployment:
    return make_h100()


def list_for(model: str, accelerator: str, count: int = 1, **work: Any) -> tuple[Deployment, ...]:
    asked = Workload(**{"concurrency": 64, **work})
    machine = make_simulated_hardware({"accelerator": accelerator, "count": count})
    return list_deployments(machine, find_model(model), asked, MeanLengths(asked.prompt_tokens, asked.output_tokens))


@pytest.mark.parametrize("arrivals", [("--rate", "20"), ("--set", "users=600"), ("--set", "concurrency=80")])
def test_answer_does_not_depend_on_the_starting_machine(arrivals: tuple[str, ...]) -> None:
    answers = []
    for start in STARTS:
        answer = invoke(
            "simulate", SEVENTY, "--hardware", start, "--requests", "250", *arrivals, "--slo", "ttft_ms=900,tpot_ms=30",
            "--replicas", "1..64", "--json",
        )  # fmt: skip
        assert answer.code == 0, answer
        answers.append(json.loads(answer.out))
    assert answers[1:] == answers[:-1]
    assert answers[0]["answer"]["meets"] and answers[0]["traffic"]["requests"] == 250


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", SEVENTY, "Qwen/Qwen3-235B-A22B"])
def test_replicas_are_the_same_from_every_machine_size(model: str) -> None:
    found = [[one.replica for one in list_for(model, "H100 SXM", count)] for count in (1, 8)]
    assert found[0] == found[1]
    layouts = [one.parallelism for one in found[0]]
    assert len(set(layouts)) == len(layouts) > 1
    assert all(one.cards == one.parallelism.tensor * one.parallelism.pipeline for one in found[0])
    assert len({(one.engine, one.quantization) for one in found[0]}) == 1


def test_replica_spans_machines_only_if_one_is_too_small() -> None:
    assert max(one.cards for one in list_for(SEVENTY, "H100 SXM")) == 8
    assert {(one.replica.engine, one.cards) for one in list_for("deepseek-ai/DeepSeek-R1", "A100 SXM 40GB")} == {
        ("vllm", 16)
    }


def test_pruned_search_finds_what_a_search_of_every_layout_finds() -> None:
    deployments = list_for(SEVENTY, "H100 SXM", prompt_tokens=1024, output_tokens=256)
    stream = make_synthetic(Workload(prompt_tokens=1024, output_tokens=256), 300, 15.0, seed=1)
    target = LatencyTarget(ttft_ms=800, tpot_ms=25)
    each = [find_cheapest(FleetSearch(one, stream, target), 1, 32, ("aggregated",)).answer for one in deployments]
    fewest = min(one.cards for one in each if one is not None)
    found = find_cheapest(
        FleetSearch(deployments[0], stream, target, others=deployments[1:]), 1, 32, ("aggregated",)
    ).answer  # fmt: skip
    assert found is not None and found.cards == fewest


lengths = st.sampled_from([64, 512, 3000])
arrivals = st.one_of(
    st.fixed_dictionaries({"users": st.sampled_from([20, 200, 1500]), "think_time_s": st.sampled_from([2.0, 30.0])}),
    st.fixed_dictionaries({"concurrency": st.sampled_from([4, 50, 300])}),
    st.fixed_dictionaries({"requests_per_s": st.sampled_from([2.0, 20.0, 150.0])}),
)


@settings(deadline=None, max_examples=20)
@given(
    arrivals,
    lengths,
    st.sampled_from([16, 128]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["least-loaded", "prefix", "random"]),
    st.builds(LatencyTarget, ttft_ms=st.sampled_from([50, 200, 1000]), tpot_ms=st.sampled_from([6, 10, 20])),
    st.booleans(),
    st.integers(0, 50),
)
def test_more_cards_are_never_worse_beyond_the_noise(
    arrival: dict[str, Any],
    prompt: int,
    output: int,
    spread: float,
    router: Any,
    target: LatencyTarget,
    shared: bool,
    seed: int,
) -> None:
    work = Workload(
        prompt_tokens=prompt, output_tokens=output, shared_prefix_tokens=prompt // 2 if shared else 0, **arrival
    )
    stream = make_synthetic(work, 250, seed=seed, spread=spread, prefixes=8)
    asked = FleetSearch(make_h100(), stream, target, router, seed)
    fleets = [asked.simulate_layout(replicas) for replicas in (1, 2, 4, 9)]
    for fewer, more in itertools.pairwise(fleets):
        assert fewer.on_target is not None and more.on_target is not None
        noise = (fewer.on_target_noise or 0.0) + (more.on_target_noise or 0.0)
        assert more.on_target >= fewer.on_target - noise, (fewer, more)


def test_no_token_comes_sooner_than_the_shortest_pass(h100: Deployment) -> None:
    """Prompts that join a pass delay their own first token; the tokens after it must not catch up."""
    work = Workload(prompt_tokens=3000, output_tokens=16, concurrency=4)
    ran = simulate(h100.make_fleet(2), make_synthetic(work, 250, seed=0, spread=0.5).make_book(), concurrency=4)
    book = ran.book
    assert max(book.late_s) > 0
    for first, done, made in zip(book.first, book.done, book.output, strict=True):
        if made > 1 and done > 0:
            assert (done - first) / (made - 1) >= h100.steps.decode_s[1]
    assert ran.end_s == pytest.approx(max(book.done))


def test_noise_is_that_of_groups_of_neighbors() -> None:
    assert estimate_noise([1] * 1000) < 0.01
    scattered = estimate_noise([1, 0] * 500)
    in_a_row = estimate_noise([1] * 500 + [0] * 500)
    assert scattered == pytest.approx(0.031, rel=0.05) and in_a_row > 5 * scattered
    assert estimate_noise([1]) == 1.0


def test_users_send_their_next_request_after_thinking(h100: Deployment) -> None:
    fleet = h100.make_fleet(1)
    think_s = [0.25] * 60
    ran = simulate(fleet, Book([100] * 60, [20] * 60, [0.0, 0.1, 0.2]), concurrency=3, think_s=think_s)
    book = ran.book
    assert len(book.arrival) == 60 and min(book.done) > 0
    ends = sorted(done + fleet.steps.accept_s for done in book.done)
    for number, came in enumerate(book.arrival[3:]):
        assert came == pytest.approx(ends[number] + 0.25)
    in_flight = [sum(came <= now < done for came, done in zip(book.arrival, book.done, strict=True)) for now in ends]
    assert max(in_flight) <= 3


@pytest.mark.parametrize("users", [100, 400])
def test_simulated_users_agree_with_the_closed_form(h100: Deployment, users: int) -> None:
    work = Workload(users=users, think_time_s=10, prompt_tokens=1024, output_tokens=256)
    stream = make_synthetic(work, 20 * users, seed=3, spread=0.3)
    assert stream.process is ArrivalProcess.USERS and stream.clients == users
    found = FleetSearch(h100, stream, None).simulate_layout(2)
    load = h100.solve_load(work, 2)
    assert found.requests_per_s == pytest.approx(load.requests_per_s, rel=0.1)
    assert found.in_flight_mean == pytest.approx(load.in_flight, rel=0.25)
