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
from bedplate.values import replace_fields
from bedplate.values.simulation import LayoutName, Outcome, RouterName, Simulation
from bedplate.values.workload import LatencyTarget

SEARCH_REQUESTS = 20_000
"""Requests that the search simulates; the result is then checked with all requests."""
BAND_REQUESTS = 20_000
GROWTH = 1.06
"""Factor by which a fleet grows if it meets the targets with a part of the requests but not with all."""

Told = Callable[[str, int, int], None]
"""Progress: what is simulated, the number of requests, and how many have arrived."""


def ignore_progress(what: str, requests: int, arrived: int) -> None: ...


class FleetSearch(NamedTuple):
    """One deployment, one stream of requests and its targets."""

    deployment: Deployment
    stream: RequestStream
    target: LatencyTarget | None
    router: RouterName = "least-loaded"
    seed: int = 0
    told: Told = ignore_progress
    speed: float = 1.0
    """Factor on the estimated speed of all passes."""

    def simulate_layout(self, replicas: int, prefills: int = 0, *, most: int | None = None) -> Outcome:
        """Simulate one layout, with only the first `most` requests if that is given."""
        stream = self.stream if most is None else self.stream.take_first(most)
        fleet = self.deployment.make_fleet(replicas, router=self.router, prefills=prefills, seed=self.seed)
        if self.speed != 1.0:
            fleet = fleet._replace(steps=speed_up(fleet.steps, self.speed))
        what = _describe_fleet(fleet)
        ran = simulate(fleet, stream.make_book(), told=lambda arrived: self.told(what, len(stream), arrived))
        return compute_outcome(fleet, ran, self.deployment.cards, self.target, self.deployment.paid)


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
    """The fewest cards that meet the target, found by bisection for each layout; of equal ones, the simpler layout.

    Assumes that more replicas are never worse, which holds except for random variation between adjacent counts.
    """
    tried: list[Outcome] = []
    found: list[Outcome] = []
    asked_high = high
    for layout in layouts:
        best = _find_fewest(question, low, high, layout, tried)
        if best is not None:
            found.append(best)
            high = min(high, best.replicas)
    if not found:
        return make_simulation(question, None, tried)
    answer = min(found, key=lambda one: one.cards)
    return replace_fields(make_simulation(question, answer, tried), safe=_find_safe(question, answer, asked_high))


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
        traffic=question.stream.summarize(),
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


def _find_safe(question: FleetSearch, answer: Outcome, high: int) -> Outcome | None:
    """The fewest replicas of that layout that meet the target even at the slow end of the error band."""
    slow = question._replace(
        speed=1 / question.deployment.spread.high, stream=question.stream.take_first(BAND_REQUESTS)
    )
    return _find_fewest(slow, answer.replicas, high, answer.layout, [])


def _find_fewest(
    question: FleetSearch, low: int, high: int, layout: LayoutName, tried: list[Outcome]
) -> Outcome | None:
    """Search with a part of the requests, then grow the fleet until it meets the target with all of them."""
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

    fewest, best = low, None
    upper = high
    guess = min(high, max(low, _guess_replicas(question)))
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


def _guess_replicas(question: FleetSearch) -> int:
    """The start of the bisection: the number of replicas that would be busy all the time."""
    rate = question.stream.requests_per_s
    return max(1, math.ceil(rate * sum(compute_work_s(question)))) if rate is not None else 1


def compute_work_s(question: FleetSearch) -> tuple[float, float]:
    """A replica's time for one request: its prompt, and its share of the decode passes."""
    steps, limits, stream = question.deployment.steps, question.deployment.limits, question.stream
    prompt, output = stream.mean_prompt, stream.mean_output
    tokens = min(limits.batch_tokens, max(1, round(prompt)))
    prompt_s = (steps.prompt_s[tokens] + steps.pair_s * tokens * tokens / 2) * prompt / tokens
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
    return steps.decode_s[batch] + steps.context_s[batch] * batch * context


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
