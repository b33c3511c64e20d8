"""The order of candidates, written once more and in another way than in the search."""

from __future__ import annotations

import math

from bedplate.decide.candidates import EngineCandidate, verify_candidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.choose import EngineSearch
from bedplate.decide.order import exclude_candidates
from bedplate.values import Refusal

TTFT_MS, TPOT_MS = 2200.0, 110.0
"""The targets of a chat, which nobody asked for, and ten percent."""
MARGIN = 1.1


def list_misses(one: EngineCandidate, case: DecisionCase) -> list[float]:
    """Ratios of time to target and of requests to capacity that are above 1."""
    running = one.settings.slots * one.layout.data if one.engine.paged else 0
    found = [case.in_flight / max(1, one.max_concurrency, running)]
    target = case.workload.latency
    if one.expected is not None and case.workload.task == "generate":
        ttft_ms, tpot_ms = (target.ttft_ms, target.tpot_ms) if target is not None else (TTFT_MS, TPOT_MS)
        found += [one.expected.ttft_s * 1000 / ttft_ms] if ttft_ms else []
        found += [one.expected.tpot_s * 1000 / tpot_ms] if tpot_ms else []
    return [ratio for ratio in found if ratio > 1]


def count_lost_steps(one: EngineCandidate, case: DecisionCase) -> float:
    """How far from the published weights: 16, 8, 6, 5, 4 or fewer bits.

    An 8-bit cache is half a step, but with published weights as much as 8-bit weights.
    """
    narrow = one.settings.kv_type != "16-bit"
    published = case.model.quantization or "BF16"
    if not one.weights.is_chosen or one.weights.label in ("BF16", "F16", "F32", published):
        return 1.0 if narrow else 0.0
    bits = one.nominal_bits
    return 0.5 * narrow + next((step for step, least in enumerate((8, 6, 5, 4), 1) if bits > least - 0.15), 5)


def spans_machines(one: EngineCandidate) -> bool:
    chip = one.target.chip
    each = min(one.hardware.cards_per_node, (chip.per_host if chip is not None else None) or 1 << 20)
    return one.layout.tensor * one.layout.pipeline > max(1, each)


def is_better(one: EngineCandidate, chosen: EngineCandidate, case: DecisionCase) -> bool:
    """Whether the order clearly prefers `one`: by the targets first, then fidelity, simplicity and speed."""
    missed, chosen_missed = list_misses(one, case), list_misses(chosen, case)
    if bool(missed) != bool(chosen_missed):
        return not missed
    if missed:
        ratio = math.prod(chosen_missed) / math.prod(missed)
        # Steps of ten percent: what is less than one step apart may be in the same step or in the next.
        if ratio > MARGIN:
            return True
        if ratio < 0.999:
            return False
    for own, best in (
        (count_lost_steps(one, case), count_lost_steps(chosen, case)),
        (one.engine.effort, chosen.engine.effort),
        (one.weights.made == "converted", chosen.weights.made == "converted"),
        (spans_machines(one), spans_machines(chosen)),
    ):
        if own != best:
            return own < best and not missed
    if one.expected is None or chosen.expected is None:
        return False
    return one.expected.output_tok_s > MARGIN * chosen.expected.output_tok_s


def check_engine(search: EngineSearch, name: str) -> int:
    """Compares the chosen candidate of an engine with all others, and returns how many there are."""
    engine, case = search.engines[name], search.case
    found, chosen = search.get_candidates(engine), search.get_candidate(engine)
    if isinstance(found, Refusal) or isinstance(chosen, Refusal):
        return 0
    fitting = [one for one in found if one.fit.fits]
    _, excluded = exclude_candidates(fitting, case)
    for one in fitting:
        if id(one) in excluded or not is_better(one, chosen, case):
            continue
        few = case.peak_in_flight < 10 and count_lost_steps(one, case) == count_lost_steps(chosen, case)
        fewest = few and one.cards > chosen.cards and not list_misses(chosen, case)
        assert fewest or verify_candidate(one, case) is not None, (name, one, chosen)
    return len(fitting)
