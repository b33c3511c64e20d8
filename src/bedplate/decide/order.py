"""The order of candidates: latency targets, then fidelity, simplicity, speed and cost.

All candidates of all engines are compared by the same estimate. Rules with a name may exclude a candidate that the
order prefers; the decision then gives the rule as a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bedplate.decide.candidates import (
    COMFORT_TPOT_S,
    EVERYDAY_BITS,
    FETCHED_SHARE,
    LONG_CONVERSION_S,
    PRECISE_BITS,
    ROUNDED_OFF,
    SERVER_EFFORT,
    EngineCandidate,
    RejectedCandidate,
    compute_conversion_s,
    find_wrong_answers,
    get_least_bits,
    verify_candidate,
)
from bedplate.decide.case import MANY, DecisionCase
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.load import solve_candidate_load
from bedplate.decide.rules import DecisionRule
from bedplate.decide.targets import compute_shortfall, get_slack, list_latencies, meets_targets
from bedplate.engines import Engine
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.values import ArrivalProcess, Refusal
from bedplate.values.units import format_latency

SAME = 0.97
"""An estimate cannot tell candidates within three percent apart; then the one with fewer GPUs is preferred."""
MARGIN = 1.1
"""Within one class of fidelity and simplicity, no candidate is faster than the chosen one by more than this factor."""
NEAR_LOAD = 1.5
"""A plan that holds this many times the requests in flight sustains the load of the workload."""
CLASS_BITS = (PRECISE_BITS, 6.0, 5.0, 4.0)
"""Least bits per weight of each class of fidelity after the first, which is that of the published weights."""


class Standing(NamedTuple):
    """The place of a candidate in the order; the first field that differs decides."""

    shortfall: float
    """The factor by which it misses the latency targets and the number of requests; 1 if it misses none."""
    fidelity: int
    simplicity: tuple[int, bool, bool]
    speed: float
    cards: int

    @property
    def missed(self) -> int:
        """By how many steps of ten percent it misses the targets; 0 if it meets them."""
        return 0 if self.shortfall <= 1 else 1 + int(math.log(self.shortfall, MARGIN))

    @property
    def group(self) -> tuple[int, tuple[int, bool, bool]]:
        """Candidates of one group that meet the targets differ in speed and cost alone."""
        return self[1:3]

    def is_near(self, least: float) -> bool:
        """Whether it meets the targets as well as the candidate with the least shortfall."""
        return self.shortfall <= (least * MARGIN if least > 1 else 1.0)

    def beats(self, other: Standing) -> bool:
        """Whether the order prefers it: clearly, if they differ in how far they miss the targets or in speed alone."""
        if self.shortfall > other.shortfall:
            return False
        if not other.is_near(self.shortfall):
            return True
        return self.group < other.group or (self.group == other.group and self.speed > MARGIN * other.speed)


def get_standing(candidate: EngineCandidate, case: DecisionCase) -> Standing:
    return Standing(
        shortfall=compute_shortfall(candidate, case),
        fidelity=classify_fidelity(candidate, case),
        simplicity=classify_simplicity(candidate),
        speed=estimate_speed(candidate) if is_predicted(candidate, case) else float(candidate.layout.data),
        cards=candidate.cards,
    )


def is_predicted(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether `estimate_speed` compares candidates; for embeddings without an estimate, replicas count."""
    return candidate.expected is not None or case.workload.task == "generate"


def classify_fidelity(candidate: EngineCandidate, case: DecisionCase) -> int:
    """0: the weights as published, or in 16 bits, and a 16-bit cache; larger: less faithful.

    8 bits for the weights or for the cache are one class, 8 bits for both the next; then come weights of fewer bits,
    each with a 16-bit cache first.
    """
    weights, label = candidate.weights, candidate.weights.label
    kept = not weights.is_chosen or label in SIXTEEN_BIT or label == case.model.quantization
    bits = candidate.nominal_bits + ROUNDED_OFF
    lost = 0 if kept else 1 + sum(bits < least for least in CLASS_BITS)
    narrow = candidate.settings.kv_type != "16-bit"
    return 2 * lost + narrow if lost else 2 * narrow


def classify_simplicity(candidate: EngineCandidate) -> tuple[int, bool, bool]:
    """Effort of the engine, a conversion before the start, one replica on several machines."""
    ranks = candidate.layout.tensor * candidate.layout.pipeline
    several = ranks > 1 and ranks > _count_host_cards(candidate)
    return candidate.engine.effort, candidate.weights.made == "converted", several


def estimate_speed(candidate: EngineCandidate) -> float:
    """Total tokens per second; if that cannot be predicted, the number of concurrent requests."""
    return candidate.expected.output_tok_s if candidate.expected is not None else float(candidate.max_concurrency)


# named rules that exclude candidates that the order may prefer

Keeps = Callable[[Sequence[EngineCandidate], DecisionCase], list[EngineCandidate]]
EXCLUSIONS: list[DecisionRule[[Sequence[EngineCandidate], DecisionCase], list[EngineCandidate]]] = []
"""Each returns the candidates of one engine that it keeps; they apply in this order."""


SMALL_SHARE = 0.5
"""Share of a GPU's memory up to which each GPU holds all weights; with more, ranks that divide them hold more cache."""


def add_exclusion(rule_id: str, source: str) -> Callable[[Keeps], Keeps]:
    def keep(says: Keeps) -> Keeps:
        EXCLUSIONS.append(DecisionRule(rule_id, source, says))
        return says

    return keep


@add_exclusion("quant.least", 'landscape "for text generation, 4-bit quantization is often acceptable"')
def keep_enough_bits(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """Weights of fewer than 4 bits are used only if nothing else fits, and weights that had fewer than 8 bits are not
    quantized below 8 again."""
    least = get_least_bits(case.model)
    return [one for one in candidates if one.nominal_bits >= least]


@add_exclusion("quant.unpredicted", 'landscape "for text generation, 4-bit quantization is often acceptable"')
def keep_fewest_bits(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """If the speed of a local engine cannot be predicted, the fewest bits that suffice for text are used."""
    if case.workload.task != "generate" or case.workload.precision_sensitive:
        return list(candidates)
    if any(one.expected is not None or one.engine.effort >= SERVER_EFFORT for one in candidates):
        return list(candidates)
    fewest = min(one.bits for one in candidates)
    return [one for one in candidates if one.bits == fewest]


@add_exclusion("quant.fetched", "docs/published-weights.md: the source of each entry")
def keep_fetched(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """Nothing is converted if published weights have about the same bits: at least three quarters, or eight. Four bits
    are enough to avoid a conversion of five minutes or more."""
    most = max((one.nominal_bits for one in candidates if one.weights.published is not None), default=0.0)

    def is_needless(one: EngineCandidate) -> bool:
        bits = one.nominal_bits
        if one.weights.made != "converted" or most < min(bits, EVERYDAY_BITS):
            return False
        return most >= min(FETCHED_SHARE * bits, PRECISE_BITS) or compute_conversion_s(one, case) >= LONG_CONVERSION_S

    return [one for one in candidates if not is_needless(one)]


@add_exclusion("fit.on-cards", "physics: RAM is many times slower than the memory of a GPU")
def keep_on_cards(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """Weights stay in RAM only if all GPUs together cannot hold fewer bits; then the GPUs hold as many as they can."""
    if on_cards := [one for one in candidates if one.fit.offload is None]:
        return on_cards
    least: dict[object, tuple[int, int]] = {}
    for one in candidates:
        key = (one.weights, one.settings.kv_type)
        least[key] = min(least.get(key, _rank_host_share(one)), _rank_host_share(one))
    return [one for one in candidates if _rank_host_share(one) == least[one.weights, one.settings.kv_type]]


def _rank_host_share(candidate: EngineCandidate) -> tuple[int, int]:
    """Fewer bytes in RAM come first, then more GPUs."""
    return candidate.fit.offload.host_bytes if candidate.fit.offload is not None else 0, -candidate.cards


@add_exclusion("load.sustained", "physics: Little's law")
def keep_sustaining(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """A slower plan has more requests in flight: it is used only if it holds its own number, or if no plan does."""
    if not case.workload.depends_on_latency:
        return list(candidates)
    holding = [one for one in candidates if one.usual_concurrency >= case.in_flight]
    overloaded = {id(one) for one in holding if not _sustains_load(one, case)}
    return [one for one in candidates if id(one) not in overloaded] if len(overloaded) < len(holding) else []


def _sustains_load(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether it holds the requests that it has in flight; computed only if it may not."""
    work, most = case.workload, candidate.usual_concurrency
    if candidate.expected is None or most >= NEAR_LOAD * case.in_flight:
        return True
    in_flight = solve_candidate_load(candidate, case).in_flight
    return in_flight < most or (in_flight == most and work.arrival is not ArrivalProcess.POISSON)


@add_exclusion("layout.replicas", "physics: a replica without a request does nothing")
def keep_useful_replicas(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """There are no more replicas than requests in flight."""
    return [one for one in candidates if one.layout.data <= max(1, case.in_flight)]


@add_exclusion("layout.one-gpu", "physics: replicas exchange nothing, tensor ranks exchange activations in every layer")
def keep_whole_models(candidates: Sequence[EngineCandidate], case: DecisionCase) -> list[EngineCandidate]:
    """A small model, which one GPU serves within the targets and half of its memory holds, gets a replica for each GPU:
    no request crosses a link, and one GPU can fail alone."""
    if uses_fewest_cards(case):
        return list(candidates)
    alone = {
        (one.quantization, one.settings.kv_type)
        for one in candidates
        if one.layout.tensor * one.layout.pipeline == 1
        and one.fit.offload is None
        and all(need.weights_bytes <= SMALL_SHARE * (need.usable_bytes or 0) for need in one.fit.devices)
        and compute_shortfall(one, case) <= 1
        and (one.expected is None or is_quick(one, case))
    }
    return [
        one
        for one in candidates
        if one.layout.tensor * one.layout.pipeline == 1 or (one.quantization, one.settings.kv_type) not in alone
    ]


def exclude_candidates(
    candidates: Sequence[EngineCandidate], case: DecisionCase
) -> tuple[list[EngineCandidate], dict[int, str]]:
    """The candidates that no rule excludes, and by the identity of each other one the rule that excludes it."""
    left, excluded = list(candidates), {}
    for rule in EXCLUSIONS:
        kept = (rule.says(left, case) if left else None) or left
        if len(kept) < len(left):
            remaining = {id(one) for one in kept}
            excluded.update({id(one): rule.id for one in left if id(one) not in remaining})
            left = kept
    return left, excluded


def uses_fewest_cards(case: DecisionCase) -> bool:
    """Fewer than ten requests in flight use the fewest GPUs that are faster than twice reading speed, or than the TPOT
    target: nobody notices more."""
    return case.peak_in_flight < MANY


FEWEST: DecisionRule[[DecisionCase], bool] = DecisionRule("layout.fewest", "physics: reading speed", uses_fewest_cards)


def choose_best(candidates: Sequence[EngineCandidate], case: DecisionCase) -> EngineCandidate:
    """The first of one engine's candidates in the order, of those that no rule excludes."""
    left, _ = exclude_candidates(candidates, case)
    standings = [(get_standing(one, case), one) for one in left]
    least = min(standing.shortfall for standing, _ in standings)
    standings = [pair for pair in standings if pair[0].is_near(least)]
    first = min(standing.group for standing, _ in standings)
    group = [(standing, one) for standing, one in standings if standing.group == first]
    if uses_fewest_cards(case) and (quick := [pair for pair in group if is_quick(pair[1], case)]):
        fewest = min(standing.cards for standing, _ in quick)
        group = [pair for pair in quick if pair[0].cards == fewest]
    best = _choose_fastest(group)
    if count_hosts(best) == 1:
        return best
    # Replicas on several hosts need a load balancer, so that they are not used for a few percent.
    least = max(standing.speed for standing, _ in group) / MARGIN
    together = [pair for pair in group if pair[0].speed >= least and count_hosts(pair[1]) == 1]
    return _choose_fastest(together) if together else best


def _choose_fastest(group: Sequence[tuple[Standing, EngineCandidate]]) -> EngineCandidate:
    fastest = max(standing.speed for standing, _ in group)
    return min(
        ((standing, one) for standing, one in group if standing.speed >= fastest * SAME),
        key=lambda pair: (pair[0].cards, _rank_complexity(pair[1])),
    )[1]


def count_hosts(candidate: EngineCandidate) -> int:
    """The number of operating systems that all replicas together use."""
    return -(-candidate.cards // _count_host_cards(candidate))


def _count_host_cards(candidate: EngineCandidate) -> int:
    chip, each = candidate.target.chip, candidate.hardware.cards_per_node
    return max(1, min(each, (chip.per_host if chip is not None else None) or each))


def is_quick(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether it meets the TPOT target or, without one, is faster than twice reading speed."""
    target, expected = case.workload.latency, candidate.expected
    if target is not None and target.tpot_ms is not None:
        return meets_targets(candidate, case)
    return expected is not None and expected.tpot_s <= COMFORT_TPOT_S


def _rank_complexity(candidate: EngineCandidate) -> tuple[int, ...]:
    layout = candidate.layout
    return (layout.pipeline, layout.tensor, layout.expert, layout.attention_data, layout.data)


def choose_verified(
    engine: Engine, fitting: Sequence[EngineCandidate], case: DecisionCase, evidence: MachineEvidence, asked: bool
) -> EngineCandidate | Refusal:
    """The best of one engine's candidates that the verifier accepts.

    A combination that gave wrong answers on this machine is excluded, unless the engine was requested (`asked`) and has
    no other.
    """
    sound = [one for one in fitting if find_wrong_answers(one, evidence) is None]
    if not sound and not asked and (wrong := find_wrong_answers(fitting[0], evidence)) is not None:
        return engine.make_refusal(
            "unsuitable", f"gave wrong answers on this machine: {wrong.why}", f"--engine {engine.id} uses it anyway"
        )
    left = list(sound or fitting)
    rejected: list[RejectedCandidate] = []
    while left:
        chosen = choose_best(left, case)
        fault = verify_candidate(chosen, case)
        if fault is None:
            return replace(chosen, rejected=tuple(rejected))
        rejected.append(RejectedCandidate(chosen.quantization or "", chosen.layout, fault))
        left = [one for one in left if one is not chosen]
    first = rejected[0].fault
    return engine.make_refusal("impossible", first.why, first.hint)


def is_comparable(one: EngineCandidate, other: EngineCandidate) -> bool:
    """Whether both or neither have an estimate."""
    return (one.expected is None) == (other.expected is None)


def explain_loss(candidate: EngineCandidate, chosen: EngineCandidate, case: DecisionCase) -> str:
    """The first criterion of the order by which the two differ; the chosen candidate is preferred by it."""
    own, best = get_standing(candidate, case), get_standing(chosen, case)
    if not is_comparable(candidate, chosen):
        return f"the speed of {(candidate if candidate.expected is None else chosen).engine.name} cannot be predicted"
    if not own.is_near(best.shortfall) or (own.shortfall > best.shortfall and own.group < best.group):
        return _describe_missed(candidate, case)
    if own.fidelity != best.fidelity:
        if candidate.settings.kv_type != chosen.settings.kv_type == "16-bit" and candidate.bits >= chosen.bits:
            return "an 8-bit KV cache is less faithful"
        return f"less faithful: {candidate.quantization}, {candidate.bits:.1f} bits per weight"
    if own.simplicity != best.simplicity:
        return _describe_effort(own, best, candidate, chosen)
    if own.speed < best.speed * SAME:
        what = "tokens per second" if candidate.expected is not None else "concurrent requests"
        what = what if is_predicted(candidate, case) else "replicas"
        return f"{1 - own.speed / best.speed:.0%} fewer {what}"
    if own.cards > best.cards:
        return f"{own.cards} GPUs instead of {best.cards} for about the same speed"
    if candidate.engine is chosen.engine:
        return "about as fast, in a layout that is less simple"
    return f"about as fast as {chosen.engine.name}"


def _describe_missed(candidate: EngineCandidate, case: DecisionCase) -> str:
    if candidate.usual_concurrency < case.in_flight:
        return f"holds {candidate.usual_concurrency:,} of {case.in_flight:,} concurrent requests"
    over = [
        f"{name} {format_latency(took)} of {format_latency(limit)}"
        for name, took, limit in list_latencies(candidate, case)
        if took > limit * get_slack(case.workload)
    ]
    return f"misses the latency targets: {', '.join(over)}"


def _describe_effort(own: Standing, best: Standing, candidate: EngineCandidate, chosen: EngineCandidate) -> str:
    if own.simplicity[0] != best.simplicity[0]:
        return f"{candidate.engine.name} takes more effort to operate than {chosen.engine.name}"
    if own.simplicity[1] != best.simplicity[1]:
        return "its weights must be converted first"
    return "one replica spans several machines"
