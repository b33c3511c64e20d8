"""Computes the figures of a simulation: latencies, goodput, cache use, cost and energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bedplate.decide.simulate.fleet import Fleet, FleetRun
from bedplate.values.cost import Price, compute_cost_per_million
from bedplate.values.simulation import LatencyDistribution, Outcome
from bedplate.values.statistics import compute_quantile
from bedplate.values.workload import LatencyTarget

MET = 0.95
"""Share of the requests that must meet the latency targets; `bench` uses the same share to find the knee."""
BATCHES = 20
"""Consecutive groups of requests whose shares on target give the noise of the whole: neighbors wait together, so single
requests are not independent."""
NORMAL_95 = 1.96


class CardPrice(NamedTuple):
    """Price and power of one card."""

    price_per_hour: float | None = None
    watts: float | None = None
    electricity_price: float | None = None


def summarize_times(seconds: list[float]) -> LatencyDistribution | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p95, p99 = (compute_quantile(ordered, share) * 1000 for share in (0.5, 0.95, 0.99))
    return LatencyDistribution(mean=sum(ordered) / len(ordered) * 1000, p50=p50, p95=p95, p99=p99)


def estimate_noise(met: Sequence[int]) -> float:
    """Half of the 95 % interval of the share of ones, from the shares of consecutive groups (batch means)."""
    count = len(met)
    groups = min(BATCHES, count)
    if groups < 2:
        return 1.0
    bounds = [count * number // groups for number in range(groups + 1)]
    shares = [sum(met[low:high]) / (high - low) for low, high in pairwise(bounds)]
    middle = sum(shares) / groups
    of_groups = sum((share - middle) ** 2 for share in shares) / (groups - 1) / groups
    # Even if all groups are alike, the next request may differ: at least one more success and failure (Agresti, Coull).
    share = (sum(met) + 2) / (count + 4)
    return min(1.0, NORMAL_95 * math.sqrt(max(of_groups, share * (1 - share) / (count + 4))))


def compute_outcome(
    fleet: Fleet, ran: FleetRun, cards_each: int, target: LatencyTarget | None, paid: CardPrice
) -> Outcome:
    book, accept_s = ran.book, fleet.steps.accept_s
    first_s, token_s, whole_s = [], [], []
    ttft_s = target.ttft_ms / 1000 if target is not None and target.ttft_ms is not None else float("inf")
    tpot_s = target.tpot_ms / 1000 if target is not None and target.tpot_ms is not None else float("inf")
    good = good_tokens = tokens = 0
    met = bytearray(len(book))
    for rid, (came, first, done, made) in enumerate(zip(book.arrival, book.first, book.done, book.output, strict=True)):
        if done < 0.0:
            continue
        tokens += made
        waited = first - came + accept_s
        first_s.append(waited)
        whole_s.append(done - came + accept_s)
        each = 0.0
        if made > 1:
            each = (done - first) / (made - 1)
            token_s.append(each)
        if waited <= ttft_s and each <= tpot_s:
            good += 1
            good_tokens += made
            met[rid] = 1
    answered, seconds = len(whole_s), max(ran.end_s, 1e-9) + accept_s
    cards = cards_each * fleet.replicas
    on_target = good / len(book) if target is not None and len(book) else None
    prompts = sum(book.prompt)
    # All cards count for the whole time, idle or not.
    spent = compute_cost_per_million(Price(**paid._asdict()), cards, tokens / seconds)
    room_s = seconds * sum(one.capacity for one in ran.replicas)
    return Outcome(
        layout=fleet.layout,
        router=fleet.router,
        replicas=fleet.replicas,
        prefills=fleet.prefills,
        cards=cards,
        requests=len(book),
        refused=len(book.refused),
        seconds=seconds,
        output_tok_s=tokens / seconds,
        requests_per_s=answered / seconds,
        on_target=on_target,
        on_target_noise=estimate_noise(met) if on_target is not None else None,
        goodput_requests_s=good / seconds if target is not None else None,
        goodput_tok_s=good_tokens / seconds if target is not None else None,
        ttft_ms=summarize_times(first_s),
        tpot_ms=summarize_times(token_s),
        e2e_ms=summarize_times(whole_s),
        kv_use_mean=min(1.0, sum(one.kv_block_s for one in ran.replicas) / room_s),
        kv_use_peak=max(one.peak_blocks / one.capacity for one in ran.replicas),
        busy_share=min(1.0, sum(one.busy_s for one in ran.replicas) / (seconds * len(ran.replicas))),
        in_flight_mean=sum(whole_s) / seconds,
        preemptions=sum(one.preemptions for one in ran.replicas),
        cache_hit_share=min(1.0, sum(book.hits) / prompts) if book.hashes is not None and prompts else None,
        cost_per_million_tokens=spent.cost_per_million_tokens,
        kwh_per_million_tokens=spent.kwh_per_million_tokens,
        meets=on_target >= MET if on_target is not None else None,
    )
