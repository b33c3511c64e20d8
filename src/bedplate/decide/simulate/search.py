"""Finds the cheapest fleet that meets the targets: the number of replicas, aggregated or disaggregated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bedplate.decide.simulate.deployment import Deployment
from bedplate.decide.simulate.fleet import Fleet, simulate
from bedplate.decide.simulate.outcome import MET, compute_outcome
from bedplate.decide.simulate.times import speed_up
from bedplate.decide.simulate.traffic import RequestStream
from bedplate.values import ArrivalProcess, RequestLoad, Workload, replace_fields
from bedplate.values.simulation import LayoutName, Outcome, RouterName, Simulation
from bedplate.values.workload import LatencyTarget

SEARCH_REQUESTS = 20_000
"""Requests that the search simulates; the result is then checked with all requests."""
BAND_REQUESTS = 20_000
SEND_S = 0.001
"""Time between two requests that the client of a closed loop sends on the same occasion."""
SLACK = 0.8
"""The closed form's lower bound on the replicas is trusted down to this share of it."""
GROWTH = 1.06
"""Factor by which a fleet grows if it meets the targets with a part of the requests but not with all."""

Told = Callable[[str, int, int], None]
"""Progress: what is simulated, the number of requests, and how many have arrived."""


def ignore_progress(what: str, requests: int, arrived: int) -> None: ...


class FleetSearch(NamedTuple):
    """The replicas to choose from, one stream of requests and its targets."""

    deployment: Deployment
    stream: RequestStream
    target: LatencyTarget | None
    router: RouterName = "least-loaded"
    seed: int = 0
    told: Told = ignore_progress
    speed: float = 1.0
    """Factor on the estimated speed of all passes."""
    others: tuple[Deployment, ...] = ()
    """Further replicas that `find_cheapest` considers: other layouts and machine sizes."""
    workload: Workload | None = None
    """The workload that the stream stands for, to state its load in the result."""

    def simulate_layout(self, replicas: int, prefills: int = 0, *, most: int | None = None) -> Outcome:
        """Simulate one layout, with only the first `most` requests if that is given."""
        stream = self.stream if most is None else self.stream.take_first(most)
        fleet = self.deployment.make_fleet(replicas, router=self.router, prefills=prefills, seed=self.seed)
        if self.speed != 1.0:
            fleet = fleet._replace(steps=speed_up(fleet.steps, self.speed))
        what = _describe_fleet(fleet)
        self.told(what, len(stream), 0)
        ran = simulate(
            fleet, stream.make_book(), concurrency=stream.clients, apart_s=SEND_S, think_s=stream.think_s,
            told=lambda arrived: self.told(what, len(stream), arrived),
        )  # fmt: skip
        outcome = compute_outcome(fleet, ran, self.deployment.cards, self.target, self.deployment.paid)
        return replace_fields(outcome, parallelism=self.deployment.replica.parallelism)

    @property
    def can_meet_target(self) -> bool:
        """Whether a request that has a replica for itself meets the target, without any queue."""
        target, steps, stream = self.target, self.deployment.steps, self.stream
        if target is None:
            return True
        prompt, output = stream.mean_prompt, stream.mean_output
        if target.tpot_ms is not None and _compute_pass_s(self, 1, prompt + output / 2) > target.tpot_ms / 1000:
            return False
        # A cached prefix needs no time.
        alone_s = steps.accept_s + (compute_prompt_s(self) if stream.hashes is None else 0.0)
        return target.ttft_ms is None or alone_s <= target.ttft_ms / 1000

    @property
    def expected_replicas(self) -> float:
        """By the closed form: replicas that would be busy all the time, with full batches."""
        rate = self.stream.requests_per_s or self.stream.expected_rate
        return 1.0 if rate is None else rate * sum(compute_work_s(self))

    @property
    def fewest_replicas(self) -> int:
        """A lower bound by the closed form on the replicas that meet the target.

        A prompt with a shared prefix may be cached, so it counts for nothing. In a closed loop, a fleet that meets the
        target receives at least the requests that its clients send at the latency of the target.
        """
        stream, target, rate = self.stream, self.target, self.stream.requests_per_s
        if stream.clients is not None and target is not None and target.ttft_ms and target.tpot_ms:
            think_s = sum(stream.think_s) / len(stream.think_s) if stream.think_s else 0.0
            rate = stream.clients / (think_s + (target.ttft_ms + target.tpot_ms * stream.mean_output) / 1000)
        if rate is None:
            return 1
        prompt_s, answer_s = compute_work_s(self)
        work_s = answer_s if stream.hashes is not None else prompt_s + answer_s
        return max(1, math.ceil(rate * work_s * SLACK))


def _describe_fleet(fleet: Fleet) -> str:
    if fleet.prefills:
        return f"{fleet.prefills} + {fleet.replicas - fleet.prefills} workers"
    return f"{fleet.replicas} replicas"


def simulate_one_layout(
    question: FleetSearch, replicas: int, layout: LayoutName, prefills: int | None = None
) -> Simulation:
    """Simulate `replicas`; if a disaggregated layout has no number of prefill workers, the best of a few splits."""
    if layout == "aggregated":
        tried = [question.simulate_layout(replicas)]
    elif prefills is not None:
        tried = [question.simulate_layout(replicas, prefills)]
    else:
        tried = [question.simulate_layout(replicas, split) for split in list_splits(question, replicas)]
    return make_simulation(question, max(tried, key=_rank_outcome), tried)


def find_cheapest(question: FleetSearch, low: int, high: int, layouts: tuple[LayoutName, ...]) -> Simulation:
    """The fewest cards that meet the target over all replicas and layouts; of equal ones, the simpler layout.

    The closed form gives a lower bound of the cards for each replica. They are simulated from the smallest bound on,
    only as long as the bound is below the fewest cards found, and then first with the most cards that would be fewer.
    Assumes that more replicas are never worse, which holds except for the stated noise.
    """
    tried: list[Outcome] = []
    best: Outcome | None = None
    best_question = question
    for layout in layouts:
        for one in _rank_replicas(question):
            cards = one.deployment.cards
            most = high if best is None else min(high, (best.cards - 1) // cards)
            if best is not None and one.fewest_replicas > most:
                continue
            found = _find_fewest(one, low, most, layout, tried, from_above=best is not None)
            if found is not None:
                best, best_question = found, one
    if best is None:
        return make_simulation(question, None, tried)
    return replace_fields(
        make_simulation(best_question, best, tried), safe=_find_safe(best_question, best, high)
    )  # fmt: skip


def _rank_replicas(question: FleetSearch) -> list[FleetSearch]:
    """The replicas that can meet the target, those with the fewest cards by the closed form first."""
    every = [question._replace(deployment=one, others=()) for one in (question.deployment, *question.others)]
    able = [one for one in every if one.can_meet_target] or every[:1]
    return sorted(able, key=lambda one: (one.expected_replicas * one.deployment.cards, one.deployment.cards))


def make_simulation(question: FleetSearch, answer: Outcome | None, tried: list[Outcome]) -> Simulation:
    """The simulation's result, with the outcome at both ends of the estimate's error band."""
    deployment, band = question.deployment, question.deployment.spread
    slow = fast = None
    if answer is not None:
        slow, fast = (
            question._replace(speed=1 / factor).simulate_layout(answer.replicas, answer.prefills, most=BAND_REQUESTS)
            for factor in (band.high, band.low)
        )
    notes = list(question.stream.notes)
    if answer is not None and len(question.stream) > BAND_REQUESTS:
        notes.append(f"slow and fast are simulated with the first {BAND_REQUESTS:,} requests")
    if answer is not None and answer.refused:
        most = deployment.replica.context_tokens
        notes.append(f"{answer.refused:,} requests are refused: they are longer than {most:,} tokens or than the cache")
    return Simulation(
        replica=deployment.replica,
        traffic=replace_fields(question.stream.summarize(), load=_compute_load(question, answer)),
        target=question.target,
        met_share=MET,
        answer=answer,
        slow=slow,
        fast=fast,
        tried=tuple(tried),
        price_per_hour=deployment.paid.price_per_hour,
        watts=deployment.paid.watts,
        electricity_price=deployment.paid.electricity_price,
        notes=tuple(notes),
    )


def _compute_load(question: FleetSearch, answer: Outcome | None) -> RequestLoad | None:
    """The load by the closed form; on disaggregated workers, which have none, with the simulated request time."""
    work = question.workload
    if work is None:
        return None
    if answer is not None and answer.layout == "aggregated":
        load = question.deployment.solve_load(work, answer.replicas)
    else:
        simulated = answer.e2e_ms if answer is not None else None
        load = work.make_load(simulated.mean / 1000 if simulated is not None else None)
    traced = question.stream.process is ArrivalProcess.TRACE
    return replace_fields(load, arrival=ArrivalProcess.TRACE) if traced else load


def _find_safe(question: FleetSearch, answer: Outcome, high: int) -> Outcome | None:
    """The fewest replicas of that layout that meet the target even at the slow end of the error band."""
    slow = question._replace(
        speed=1 / question.deployment.spread.high, stream=question.stream.take_first(BAND_REQUESTS)
    )
    return _find_fewest(slow, answer.replicas, high, answer.layout, [])


def _find_fewest(
    question: FleetSearch, low: int, high: int, layout: LayoutName, tried: list[Outcome], *, from_above: bool = False
) -> Outcome | None:
    """Search with a part of the requests, then grow the fleet until it meets the target with all of them.

    `from_above`: try `high` first, because it probably does not meet the target.
    """
    part = SEARCH_REQUESTS if len(question.stream) > SEARCH_REQUESTS else None
    low = max(low, 2 if layout == "disaggregated" else 1)
    if low > high:
        return None

    def find_best(replicas: int, most: int | None) -> Outcome:
        found = []
        for split in list_splits(question, replicas) if layout == "disaggregated" else (0,):
            found.append(question.simulate_layout(replicas, split, most=most))
            tried.append(found[-1])
            if found[-1].meets:
                break
        return max(found, key=_rank_outcome)

    fewest, best = min(high, max(low, question.fewest_replicas)), None
    upper = high
    guess = high if from_above else min(high, max(fewest, math.ceil(question.expected_replicas)))
    while fewest <= upper:
        got = find_best(guess, part)
        if got.meets:
            best, upper = got, guess - 1
        else:
            fewest = guess + 1
        guess = (fewest + upper) // 2 if best is not None else min(upper, max(fewest, 2 * guess))
    if best is None or part is None:
        return best
    replicas = best.replicas
    while True:
        got = find_best(replicas, None)
        if got.meets:
            return got
        if replicas >= high:
            return None
        replicas = min(high, max(replicas + 1, math.ceil(replicas * GROWTH)))


def _rank_outcome(one: Outcome) -> tuple[float, float]:
    return (one.on_target or 0.0, one.output_tok_s)


def compute_prompt_s(question: FleetSearch) -> float:
    """A replica's time for one prompt of mean length that has a pass for itself."""
    steps, limits, prompt = question.deployment.steps, question.deployment.limits, question.stream.mean_prompt
    tokens = min(limits.batch_tokens, max(1, round(prompt)))
    return (steps.prompt_s[tokens] + steps.pair_s * tokens * tokens / 2) * prompt / tokens / question.speed


def compute_work_s(question: FleetSearch) -> tuple[float, float]:
    """A replica's time for one request: its prompt, and its share of the decode passes."""
    limits, stream = question.deployment.limits, question.stream
    prompt, output = stream.mean_prompt, stream.mean_output
    prompt_s = compute_prompt_s(question)
    context = prompt + output / 2
    most = min(limits.slots, max(1, int(limits.kv_blocks * limits.block_tokens / (prompt + output))))
    target = question.target
    batch = most
    if target is not None and target.tpot_ms is not None:
        # The largest batch that still meets the TPOT target.
        while batch > 1 and _compute_pass_s(question, batch, context) > target.tpot_ms / 1000:
            batch = batch * 7 // 8
    return prompt_s, output * _compute_pass_s(question, batch, context) / batch


def _compute_pass_s(question: FleetSearch, batch: int, context: float) -> float:
    steps = question.deployment.steps
    return (steps.decode_s[batch] + steps.context_s[batch] * batch * context) / question.speed


def list_splits(question: FleetSearch, replicas: int) -> Iterator[int]:
    """Numbers of prefill workers to try: in proportion to the prompts' share of the work, then a few more and fewer."""
    if replicas < 2:
        return
    prompt_s, answer_s = compute_work_s(question)
    ideal = replicas * prompt_s / (prompt_s + answer_s)
    near = min(replicas - 1, max(1, round(ideal)))
    step = max(1, round(replicas / 16))
    seen = set()
    for split in (near, near + step, near - step):
        split = min(replicas - 1, max(1, split))
        if split not in seen:
            seen.add(split)
            yield split
