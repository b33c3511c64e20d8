"""The plans that were not chosen: each with its estimate, and the criterion or the rule that decided against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bedplate.decide.candidates import EngineCandidate, find_nearest, make_shortage, verify_candidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.explain import estimate_candidate
from bedplate.decide.order import (
    EXCLUSIONS,
    FEWEST,
    SAME,
    Standing,
    choose_best,
    exclude_candidates,
    explain_loss,
    get_standing,
    is_comparable,
)
from bedplate.decide.rules import DecisionRule
from bedplate.decide.wording import describe_shortage
from bedplate.values import Alternative, Parallelism, Reason
from bedplate.values.units import format_figure

MOST_VERIFIED = 3
"""Layouts of the same weights that are verified before the weights count as not served."""
NAMED_RULES: tuple[DecisionRule[..., Any], ...] = (*EXCLUSIONS, FEWEST)
PRINTED = {rule.id: rule for rule in NAMED_RULES}
"""Rules whose reason is printed if the order prefers an alternative that they exclude."""


class NamedRule(NamedTuple):
    """Why an engine is not chosen, whatever its estimate."""

    rule: str
    why: str


class EngineAlternatives(NamedTuple):
    """The candidates of one engine."""

    candidates: Sequence[EngineCandidate]
    excluded_by: NamedRule | None
    """`None`: it is the engine of the chosen candidate."""


def list_alternatives(
    chosen: EngineCandidate | None, engines: Sequence[EngineAlternatives], case: DecisionCase
) -> tuple[Alternative, ...]:
    """The best layout of each engine, quantization and cache type, and every layout of the chosen ones; best first."""
    best = get_standing(chosen, case) if chosen is not None else None
    found = [pair for engine in engines for pair in _list_of_engine(engine, chosen, best, case)]
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))


Place = tuple[bool, bool, int, tuple[int, tuple[int, bool, bool]], float]


def _list_of_engine(
    listed: EngineAlternatives, chosen: EngineCandidate | None, best: Standing | None, case: DecisionCase
) -> Iterator[tuple[Place, Alternative]]:
    fitting = [one for one in listed.candidates if one.fit.fits]
    _, excluded = exclude_candidates(fitting, case)
    groups: dict[tuple[str | None, str], list[EngineCandidate]] = {}
    for one in listed.candidates:
        groups.setdefault((one.quantization, one.settings.kv_type), []).append(one)
    for group in groups.values():
        able = [one for one in group if one.fit.fits]
        if not able:
            yield _make_place(group[0], case, fits=False), _describe_unfitting(find_nearest(group), case)
        elif chosen is not None and _has_same_weights(group[0], chosen):
            own = (chosen.layout, chosen.settings.cards)
            for one in (one for one in able if (one.layout, one.settings.cards) != own):
                yield _describe_first([one], listed.excluded_by, excluded, chosen, best, case)
        else:
            kept = [one for one in able if id(one) not in excluded]
            yield _describe_first(kept or able, listed.excluded_by, excluded, chosen, best, case)


def _has_same_weights(one: EngineCandidate, chosen: EngineCandidate) -> bool:
    return (one.engine.id, one.weights, one.settings.kv_type) == (
        chosen.engine.id, chosen.weights, chosen.settings.kv_type,
    )  # fmt: skip


def _make_place(candidate: EngineCandidate, case: DecisionCase, *, fits: bool) -> Place:
    standing = get_standing(candidate, case)
    return not fits, candidate.expected is None, standing.missed, standing.group, -standing.speed


def _describe_unfitting(candidate: EngineCandidate, case: DecisionCase) -> Alternative:
    return Alternative(
        engine=candidate.engine.id,
        quantization=candidate.quantization,
        parallelism=candidate.layout,
        fits=False,
        why_not=describe_shortage(make_shortage(candidate)),
    )


def _describe_first(
    able: list[EngineCandidate],
    excluded_by: NamedRule | None,
    excluded: dict[int, str],
    chosen: EngineCandidate | None,
    best: Standing | None,
    case: DecisionCase,
) -> tuple[Place, Alternative]:
    """The best of these candidates that the verifier accepts."""
    left, fault, one = list(able), None, able[0]
    for _ in range(MOST_VERIFIED):
        one = choose_best(left, case)
        if (fault := verify_candidate(one, case)) is None or len(left) == 1:
            break
        left = [other for other in left if other is not one]
    if fault is not None:
        why, rule = fault.why, None
    else:
        why, rule = _explain(one, excluded_by, excluded.get(id(one)), chosen, best, case)
    return _make_place(one, case, fits=fault is None), Alternative(
        engine=one.engine.id,
        quantization=one.quantization,
        parallelism=one.layout,
        settings=one.settings,
        estimate=estimate_candidate(one, case),
        fits=fault is None,
        why_not=why,
        rule=rule,
    )


def _explain(
    one: EngineCandidate,
    excluded_by: NamedRule | None,
    exclusion: str | None,
    chosen: EngineCandidate | None,
    best: Standing | None,
    case: DecisionCase,
) -> tuple[str, str | None]:
    """Why it was not chosen, and the rule if the order prefers it."""
    if chosen is None or best is None:
        return (excluded_by.why, excluded_by.rule) if excluded_by is not None else ("no engine was chosen", None)
    own = get_standing(one, case)
    if not is_comparable(one, chosen) or not own.beats(best):
        lost = explain_loss(one, chosen, case)
        is_alike = own.is_near(best.shortfall) and own.group == best.group
        is_tied = is_alike and own.speed >= best.speed * SAME and own.cards <= best.cards
        return (f"{lost}; {excluded_by.why}" if is_tied and excluded_by is not None else lost), None
    if excluded_by is not None:
        return excluded_by.why, excluded_by.rule
    if exclusion is not None:
        return PRINTED[exclusion].sentence, exclusion
    if FEWEST.says(case):
        enough = "one GPU is" if chosen.cards == 1 else f"{chosen.cards} GPUs are"
        return f"{enough} fast enough for {case.concurrent_requests}", FEWEST.id
    return explain_loss(one, chosen, case), None


def list_exceptions(alternatives: Sequence[Alternative], chosen: EngineCandidate) -> tuple[Reason, ...]:
    """A reason for each rule that excluded a plan of the chosen engine although the order prefers it."""
    found: dict[str, Alternative] = {}
    for one in alternatives:
        if one.rule is not None and one.rule in PRINTED and one.engine == chosen.engine.id:
            found.setdefault(one.rule, one)
    return tuple(
        Reason(rule=name, text=_describe_exception(one), source=PRINTED[name].citation) for name, one in found.items()
    )


def _describe_exception(one: Alternative) -> str:
    speed = one.estimate.output_tok_s
    rate = f", about {format_figure(speed.value)} tok/s" if speed is not None else ""
    cache = " with an 8-bit KV cache" if one.settings is not None and one.settings.kv_type != "16-bit" else ""
    on_cpu = one.settings is not None and one.settings.device == "cpu"
    what = f"{one.quantization}{cache} on {'the CPU' if on_cpu else _count_cards(one.parallelism)}{rate}"
    return f"not {what}: {one.why_not[0].lower()}{one.why_not[1:].rstrip('.')}"


def _count_cards(layout: Parallelism) -> str:
    cards = layout.tensor * layout.pipeline * layout.data
    divided = [f"tensor parallel {layout.tensor}"] if layout.tensor > 1 else []
    divided += [f"{layout.pipeline} pipeline stages"] if layout.pipeline > 1 else []
    return ", ".join([f"{cards} GPUs" if cards > 1 else "one GPU", *divided])
