"""The closed form of an estimate and the simulated replica agree for every arrival process that both know."""

from __future__ import annotations

import random
import statistics

import pytest

from bedplate.decide import decide
from bedplate.decide.estimate.arrivals import BENCH, BURST, USERS, USUAL_BENCHMARK, RequestArrivals, choose_arrivals
from bedplate.decide.estimate.batching import (
    ACCEPT_SHARE,
    Layout,
    choose_kv_bits,
    classify_weights,
    compute_steady,
    count_rank_work,
    get_efficiencies,
)
from bedplate.decide.estimate.machine import make_chip_rates
from bedplate.decide.estimate.physics import get_shape
from bedplate.decide.estimate.serving import ServingTimes, estimate_under_load, expect
from bedplate.decide.simulate import Book, Fleet, MeanLengths, ReplicaLimits, simulate
from bedplate.decide.simulate.times import make_batched_steps
from bedplate.facts.chips import find_chip
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Parallelism, Workload
from bedplate.values.arrival import ArrivalProcess

TTFT_WITHIN = 0.35
TPOT_WITHIN = 0.12
BURST_WITHIN = 0.65
"""In a burst, the closed form also has what was fitted for it: first tokens that are sent a pass later, and waits that
differ between engines."""
ROUNDS = 10
CASES = [
    ("vllm", "nvidia/Llama-3.1-70B-Instruct-FP8", 8, 64, 1024, 512), ("vllm", "openai/gpt-oss-120b", 4, 32, 2048, 256),
    ("sglang", "deepseek-ai/DeepSeek-R1", 8, 64, 1024, 1024),
    ("tensorrt-llm", "meta-llama/Llama-3.1-8B", 1, 32, 512, 256),
]  # fmt: skip


class Pair:
    """One engine and model: the closed form, and a simulation of the same passes."""

    def __init__(self, engine: str, model: str, tensor: int, prompt: int, output: int) -> None:
        self.engine, self.prompt, self.output, self.layout = engine, prompt, output, Layout(tensor)
        self.machine = make_chip_rates(find_chip("NVIDIA H200 SXM 141GB", guess=True).chip, tensor)
        self.shape = get_shape(find_model(model))
        self.e = get_efficiencies(engine, self.machine.family, classify_weights(self.shape))

    def estimate(self, streams: int, arrivals: RequestArrivals) -> ServingTimes:
        return estimate_under_load(
            self.machine, self.shape, self.engine, self.layout, concurrency=streams, prompt_tokens=self.prompt,
            output_tokens=self.output, arrivals=arrivals,
        )[0]  # fmt: skip

    def simulate(self, streams: int, book: Book, concurrency: int | None) -> tuple[float, float]:
        """Mean time to first token and mean time per token."""
        steps = make_batched_steps(
            self.machine, self.shape, self.e, self.layout, MeanLengths(self.prompt, self.output), slots=streams,
            batch_tokens=8192, kv_bits=choose_kv_bits(self.shape),
        )  # fmt: skip
        fleet = Fleet(steps, ReplicaLimits(streams, 8192, 1_000_000), 1)
        ran = simulate(fleet, book, concurrency=concurrency).book
        first = [one - came + steps.accept_s for one, came in zip(ran.first, ran.arrival, strict=True)]
        each = [
            (done - one) / (made - 1) for done, one, made in zip(ran.done, ran.first, ran.output, strict=True)
        ]  # fmt: skip
        return statistics.mean(first), statistics.mean(each)


def check(found: ServingTimes, simulated: tuple[float, float], ttft_within: float = TTFT_WITHIN) -> None:
    assert found.token_s == pytest.approx(simulated[1], rel=TPOT_WITHIN)
    assert found.first_s == pytest.approx(simulated[0], rel=ttft_within)


@pytest.mark.parametrize(("engine", "model", "tensor", "streams", "prompt", "output"), CASES)
def test_closed_loop(engine: str, model: str, tensor: int, streams: int, prompt: int, output: int) -> None:
    pair, chance = Pair(engine, model, tensor, prompt, output), random.Random(1)
    lengths = [round(output * chance.uniform(0.8, 1.0) / 0.9) for _ in range(ROUNDS * streams)]
    book = Book([prompt] * len(lengths), lengths)
    check(pair.estimate(streams, USUAL_BENCHMARK), pair.simulate(streams, book, streams))


@pytest.mark.parametrize(("engine", "model", "tensor", "streams", "prompt", "output"), CASES)
def test_closed_loop_of_equal_requests(
    engine: str, model: str, tensor: int, streams: int, prompt: int, output: int
) -> None:
    pair = Pair(engine, model, tensor, prompt, output)
    count = ROUNDS * streams
    simulated = pair.simulate(streams, Book([prompt] * count, [output] * count), streams)
    check(pair.estimate(streams, USUAL_BENCHMARK._replace(spread=0.0)), simulated)


@pytest.mark.parametrize(("engine", "model", "tensor", "streams", "prompt", "output"), CASES)
def test_burst(engine: str, model: str, tensor: int, streams: int, prompt: int, output: int) -> None:
    pair = Pair(engine, model, tensor, prompt, output)
    simulated = pair.simulate(streams, Book([prompt] * streams, [output] * streams, [0.0] * streams), None)
    check(pair.estimate(streams, BURST), simulated, BURST_WITHIN)


@pytest.mark.parametrize(("engine", "model", "tensor", "streams", "prompt", "output"), CASES)
def test_poisson_arrivals(engine: str, model: str, tensor: int, streams: int, prompt: int, output: int) -> None:
    pair, chance = Pair(engine, model, tensor, prompt, output), random.Random(2)
    found = pair.estimate(streams, RequestArrivals(ArrivalProcess.POISSON))
    # By Little's law, this rate keeps as many requests in flight.
    rate = streams / (found.first_s + output * found.token_s)
    arrivals, now = [], 0.0
    for _ in range(30 * streams):
        now += chance.expovariate(rate)
        arrivals.append(now)
    book = Book([prompt] * len(arrivals), [output] * len(arrivals), arrivals)
    check(found, pair.simulate(4 * streams, book, None))


@pytest.mark.parametrize(
    ("asked", "process", "words"),
    [
        (Workload(users=64), ArrivalProcess.USERS, "users with think time"),
        (Workload(users=64, requests_per_s=3.0), ArrivalProcess.POISSON, "Poisson arrivals"),
        (Workload(concurrency=64), ArrivalProcess.CLOSED, "a closed loop"),
    ],
)
def test_a_plan_names_the_arrival_process_that_it_assumes(asked: Workload, process: ArrivalProcess, words: str) -> None:
    assert choose_arrivals(asked).process is process
    pair = Pair("vllm", "nvidia/Llama-3.1-70B-Instruct-FP8", 8, 1024, 512)
    found = expect(
        pair.machine, pair.shape, "vllm", Parallelism(tensor=8), concurrency=64, prompt_tokens=1024, output_tokens=512,
        slots=256, arrivals=choose_arrivals(asked),
    )  # fmt: skip
    assert found.source.endswith(f", for {words}")


def test_equal_requests_of_bench_stay_apart_unless_their_prompts_queue() -> None:
    """bench spreads its first requests over the time of one."""
    pair = Pair("vllm", "meta-llama/Llama-3.1-8B", 1, 512, 128)
    few, many = (pair.estimate(streams, BENCH) for streams in (4, 64))
    burst, spread = (pair.estimate(64, one) for one in (BURST, USERS))
    assert few.first_s == pytest.approx(pair.estimate(4, USERS).first_s, rel=0.1)
    assert many.first_s == pytest.approx(burst.first_s, rel=0.2)
    assert many.first_s > 4 * spread.first_s
    assert many.token_s < spread.token_s


def test_models_that_are_computed_quickly_wait_for_the_process_that_accepts_requests() -> None:
    pair = Pair("vllm", "meta-llama/Llama-3.2-1B", 1, 512, 128)
    slow = pair.e._replace(request_s=2 * pair.e.request_s)
    work = count_rank_work(pair.machine, pair.shape, pair.layout, 512, 128, 16.0)
    usual, longer = (compute_steady(work, e, 256.0, 1e6, arrival=BENCH.terms) for e in (pair.e, slow))
    accept_s = ACCEPT_SHARE * pair.e.request_s
    assert longer[0] - usual[0] > 0.9 * 128 * accept_s  # half of 256 requests are accepted before
    assert usual[1] * 128 > 256 * accept_s, "a round is not shorter than the time to accept its requests"


def test_a_plan_for_requests_in_flight_states_the_ttft_of_equal_requests() -> None:
    hardware = make_simulated_hardware({"accelerator": "H100 SXM", "ram_gb": 256})
    model = find_model("meta-llama/Llama-3.1-8B")

    def list_notes(workload: Workload) -> list[str]:
        return [note for note in decide(hardware, model, workload, "vllm").notes if "equal lengths" in note]

    (note,) = list_notes(Workload(concurrency=64, prompt_tokens=512, output_tokens=128))
    assert "`bedplate bench` sends them" in note and "TTFT" in note
    assert not list_notes(Workload(concurrency=2, prompt_tokens=512, output_tokens=128))
    assert not list_notes(Workload(users=64, prompt_tokens=512, output_tokens=128))


def test_requests_that_arrive_together_wait_before_their_first_token_instead_of_between_tokens() -> None:
    pair = Pair("vllm", "nvidia/Llama-3.1-70B-Instruct-FP8", 8, 1024, 256)
    spread, together = (pair.estimate(64, arrivals) for arrivals in (USERS, USUAL_BENCHMARK._replace(spread=0.0)))
    assert together.first_s > 2 * spread.first_s
    assert together.token_s < spread.token_s
    # The time of a whole request hardly changes.
    whole, other = (one.first_s + 256 * one.token_s for one in (spread, together))
    assert whole == pytest.approx(other, rel=0.1)
