"""The cheapest fleet that meets its targets: how many replicas, and whether prompts get workers of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bedplate.decide.simulate.deployment import Deployment
from bedplate.decide.simulate.fleet import Fleet, simulate
from bedplate.decide.simulate.outcome import MET, outcome
from bedplate.decide.simulate.times import faster
from bedplate.decide.simulate.traffic import Stream
from bedplate.values import replaced
from bedplate.values.simulation import LayoutName, Outcome, RouterName, Simulation
from bedplate.values.workload import LatencyTarget

SEARCH_REQUESTS = 20_000
"""Requests that a layout is tried with while searching; what is found is then tried with all of them."""
BAND_REQUESTS = 20_000
GROWTH = 1.06
"""What is found with a part of the traffic and fails with all of it grows by so much at a time."""

Told = Callable[[str, int, int], None]
"""What is being simulated, how many requests it has, and how many have arrived."""


def nobody(what: str, requests: int, arrived: int) -> None: ...


class Question(NamedTuple):
    """One deployment under one stream of requests."""

    deployment: Deployment
    stream: Stream
    target: LatencyTarget | None
    router: RouterName = "least-loaded"
    seed: int = 0
    told: Told = nobody
    speed: float = 1.0
    """All passes so many times as fast as estimated."""

    def outcome_of(self, replicas: int, prefills: int = 0, *, most: int | None = None) -> Outcome:
        """One layout; where that is said, with the first `most` requests alone."""
        stream = self.stream if most is None else self.stream.first(most)
        fleet = self.deployment.fleet(replicas, router=self.router, prefills=prefills, seed=self.seed)
        if self.speed != 1.0:
            fleet = fleet._replace(steps=faster(fleet.steps, self.speed))
        what = _words(fleet)
        ran = simulate(fleet, stream.book(), told=lambda arrived: self.told(what, len(stream), arrived))
        return outcome(fleet, ran, self.deployment.cards, self.target, self.deployment.paid)


def _words(fleet: Fleet) -> str:
    if fleet.prefills:
        return f"{fleet.prefills} + {fleet.replicas - fleet.prefills} workers"
    return f"{fleet.replicas} replicas"


def one_layout(question: Question, replicas: int, layout: LayoutName, prefills: int | None = None) -> Simulation:
    """So many replicas; where workers are apart and nobody says how they are divided, the best of a few ways."""
    if layout == "aggregated":
        tried = [question.outcome_of(replicas)]
    elif prefills is not None:
        tried = [question.outcome_of(replicas, prefills)]
    else:
        tried = [question.outcome_of(replicas, split) for split in splits(question, replicas)]
    return answered(question, max(tried, key=_worth), tried)


def cheapest(question: Question, low: int, high: int, layouts: tuple[LayoutName, ...]) -> Simulation:
    """The fewest cards that meet the target, each layout by halving; as cheap, the simpler one.

    More replicas are taken never to do worse, which holds but for chance among the last few.
    """
    tried: list[Outcome] = []
    found: list[Outcome] = []
    asked_high = high
    for layout in layouts:
        best = _fewest(question, low, high, layout, tried)
        if best is not None:
            found.append(best)
            high = min(high, best.replicas)
    if not found:
        return answered(question, None, tried)
    answer = min(found, key=lambda one: one.cards)
    return replaced(answered(question, answer, tried), safe=_safe(question, answer, asked_high))


def answered(question: Question, answer: Outcome | None, tried: list[Outcome]) -> Simulation:
    """With what the band of the estimate makes of the answer."""
    deployment, band = question.deployment, question.deployment.spread
    slow = fast = None
    if answer is not None:
        slow, fast = (
            question._replace(speed=1 / factor).outcome_of(answer.replicas, answer.prefills, most=BAND_REQUESTS)
            for factor in (band.high, band.low)
        )
    notes = list(question.stream.notes)
    if answer is not None and len(question.stream) > BAND_REQUESTS:
        notes.append(f"slow and fast are of the first {BAND_REQUESTS:,} requests")
    if answer is not None and answer.refused:
        most = deployment.replica.context_tokens
        notes.append(f"{answer.refused:,} requests are longer than {most:,} tokens or than the cache, and are refused")
    return Simulation(
        replica=deployment.replica,
        traffic=question.stream.summary(),
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


def _safe(question: Question, answer: Outcome, high: int) -> Outcome | None:
    """The fewest replicas of that layout that meet the target even if passes are slow, with a part of the traffic."""
    slow = question._replace(speed=1 / question.deployment.spread.high, stream=question.stream.first(BAND_REQUESTS))
    return _fewest(slow, answer.replicas, high, answer.layout, [])


def _fewest(question: Question, low: int, high: int, layout: LayoutName, tried: list[Outcome]) -> Outcome | None:
    """First with a part of the traffic, then with all of it, growing until that meets the target too."""
    part = SEARCH_REQUESTS if len(question.stream) > SEARCH_REQUESTS else None
    low = max(low, 2 if layout == "disaggregated" else 1)
    if low > high:
        return None

    def best_of(replicas: int, most: int | None) -> Outcome:
        found = []
        for split in splits(question, replicas) if layout == "disaggregated" else (0,):
            found.append(question.outcome_of(replicas, split, most=most))
            tried.append(found[-1])
            if found[-1].meets:
                break
        return max(found, key=_worth)

    fewest, best = low, None
    upper = high
    guess = min(high, max(low, _guess(question)))
    while fewest <= upper:
        got = best_of(guess, part)
        if got.meets:
            best, upper = got, guess - 1
        else:
            fewest = guess + 1
        guess = (fewest + upper) // 2 if best is not None else min(upper, max(fewest, 2 * guess))
    if best is None or part is None:
        return best
    replicas = best.replicas
    while True:
        got = best_of(replicas, None)
        if got.meets:
            return got
        if replicas >= high:
            return None
        replicas = min(high, max(replicas + 1, math.ceil(replicas * GROWTH)))


def _worth(one: Outcome) -> tuple[float, float]:
    return (one.on_target or 0.0, one.output_tok_s)


def _guess(question: Question) -> int:
    """Replicas whose passes would be busy all the time: where halving begins."""
    rate = question.stream.requests_per_s
    return max(1, math.ceil(rate * sum(work_s(question)))) if rate is not None else 1


def work_s(question: Question) -> tuple[float, float]:
    """What one request takes of a replica's time: its prompt, and its part of the passes that answer."""
    steps, limits, stream = question.deployment.steps, question.deployment.limits, question.stream
    prompt, output = stream.mean_prompt, stream.mean_output
    tokens = min(limits.batch_tokens, max(1, round(prompt)))
    prompt_s = (steps.prompt_s[tokens] + steps.pair_s * tokens * tokens / 2) * prompt / tokens
    context = prompt + output / 2
    most = min(limits.slots, max(1, int(limits.kv_blocks * limits.block_tokens / (prompt + output))))
    target = question.target
    batch = most
    if target is not None and target.tpot_ms is not None:
        # As many at once as still get their tokens in time.
        while batch > 1 and _pass_s(question, batch, context) > target.tpot_ms / 1000:
            batch = batch * 7 // 8
    return prompt_s, output * _pass_s(question, batch, context) / batch


def _pass_s(question: Question, batch: int, context: float) -> float:
    steps = question.deployment.steps
    return steps.decode_s[batch] + steps.context_s[batch] * batch * context


def splits(question: Question, replicas: int) -> Iterator[int]:
    """Ways to divide workers: by the work that prompts are, then a little to both sides."""
    if replicas < 2:
        return
    prompt_s, answer_s = work_s(question)
    ideal = replicas * prompt_s / (prompt_s + answer_s)
    near = min(replicas - 1, max(1, round(ideal)))
    step = max(1, round(replicas / 16))
    seen = set()
    for split in (near, near + step, near - step):
        split = min(replicas - 1, max(1, split))
        if split not in seen:
            seen.add(split)
            yield split
