"""The closed form of an estimate and the simulated replica agree for every arrival process that both know."""

from __future__ import annotations

import random
import statistics

import pytest

from bedplate.decide.estimate.arrivals import BURST, USUAL_BENCHMARK, Arrivals
from bedplate.decide.estimate.batching import Layout, choose_kv_bits, classify_weights, get_efficiencies
from bedplate.decide.estimate.machine import make_chip_rates
from bedplate.decide.estimate.physics import get_shape
from bedplate.decide.estimate.serving import ServingTimes, estimate_under_load
from bedplate.decide.simulate import Book, Fleet, MeanLengths, ReplicaLimits, simulate
from bedplate.decide.simulate.times import make_batched_steps
from bedplate.facts.chips import find_chip
from bedplate.facts.known_models import find_model
from bedplate.values.arrival import ArrivalProcess

TTFT_WITHIN = 0.35
TPOT_WITHIN = 0.12
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

    def estimate(self, streams: int, arrivals: Arrivals) -> ServingTimes:
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


def check(found: ServingTimes, simulated: tuple[float, float]) -> None:
    assert found.token_s == pytest.approx(simulated[1], rel=TPOT_WITHIN)
    assert found.first_s == pytest.approx(simulated[0], rel=TTFT_WITHIN)


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
    check(pair.estimate(streams, BURST), simulated)


@pytest.mark.parametrize(("engine", "model", "tensor", "streams", "prompt", "output"), CASES)
def test_poisson_arrivals(engine: str, model: str, tensor: int, streams: int, prompt: int, output: int) -> None:
    pair, chance = Pair(engine, model, tensor, prompt, output), random.Random(2)
    found = pair.estimate(streams, Arrivals(ArrivalProcess.POISSON))
    # By Little's law, this rate keeps as many requests in flight.
    rate = streams / (found.first_s + output * found.token_s)
    arrivals, now = [], 0.0
    for _ in range(30 * streams):
        now += chance.expovariate(rate)
        arrivals.append(now)
    book = Book([prompt] * len(arrivals), [output] * len(arrivals), arrivals)
    check(found, pair.simulate(4 * streams, book, None))
