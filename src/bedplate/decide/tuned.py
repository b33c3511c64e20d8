"""Applies the results of `bedplate tune` to decisions: the settings, and the figures measured with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bedplate.decide.candidates import Candidate, in_form
from bedplate.decide.case import Case
from bedplate.decide.estimate import expectation_for
from bedplate.decide.evidence import Evidence
from bedplate.decide.memory import fit
from bedplate.values import Estimate, Figure, replaced
from bedplate.values.tuning import Proof, Side, Tuned, words_of


def with_tuning(candidate: Candidate, case: Case, evidence: Evidence) -> Candidate:
    """The candidate with the tuned settings for this workload, if there are any and they fit."""
    found = tuning_for(evidence.tunings, candidate, case)
    return (as_tuned(candidate, found, case, evidence) or candidate) if found is not None else candidate


def tuning_for(tunings: Iterable[Tuned], candidate: Candidate, case: Case) -> Tuned | None:
    """The newest proven tuning result for this engine, weights, layout and a similar workload."""
    for one in tunings:
        plan, best = one.side("plan"), one.side("tuned")
        if not one.proven or plan is None or best is None or one.engine != candidate.engine.id:
            continue
        same_build = one.build == "native" or one.engine_version == (candidate.engine.version or "unpinned")
        same = (plan.weights, plan.settings.device, one.parallelism) == (
            candidate.weights,
            candidate.settings.device,
            candidate.layout,
        )
        if same and same_build and one.covers(case.workload):
            return one
    return None


def as_tuned(candidate: Candidate, tuned: Tuned, case: Case, evidence: Evidence) -> Candidate | None:
    """`None` if it does not fit: less memory may be free now than during tuning."""
    plan, best = tuned.side("plan"), tuned.side("tuned")
    if plan is None or best is None:
        return None
    settings = replaced(candidate.settings, **_changes(plan, best))
    model = in_form(case.model, best.weights) if best.weights != candidate.weights else candidate.model
    need = fit(candidate.hardware, model, case.workload, candidate.engine, parallelism=candidate.layout,
               settings=settings)  # fmt: skip
    if not need.fits:
        return None
    expected = expectation_for(
        candidate.hardware, model, candidate.engine.id, candidate.layout, case.workload, slots=settings.slots,
        offload=need.offload, factor=evidence.factor(candidate.engine.id, candidate.target.device),
    )  # fmt: skip
    return replace(
        candidate, weights=best.weights, model=model, settings=settings, fit=need, expected=expected, tuned=tuned
    )


def _changes(plan: Side, best: Side) -> dict[str, Any]:
    """Only the settings that tuning changed; the others, such as the context, come from this decision."""
    names = plan.settings.__struct_fields__
    pairs = ((name, getattr(plan.settings, name), getattr(best.settings, name)) for name in names)
    return {name: after for name, before, after in pairs if before != after}


def measured_estimate(tuned: Tuned, case: Case, estimate: Estimate) -> Estimate:
    """Replace estimated figures by measured ones, if they were measured under exactly this load."""
    best, load = tuned.side("tuned"), tuned.load
    work = case.workload
    asked = (case.in_flight, work.prompt_tokens, work.output_tokens)
    if best is None or asked != (load.concurrency, load.prompt_tokens, load.output_tokens):
        return estimate
    given = {"output_tok_s": best.output_tok_s, "ttft_ms": best.ttft_ms, "tpot_ms": best.tpot_ms}
    source = f"bedplate tune, {tuned.at[:10]}"
    return replaced(estimate, **{name: replaced(one, source=source) for name, one in given.items() if one is not None})


def tuning_words(tuned: Tuned) -> str:
    """Such as "weights Q8_0, ubatch 256, tuned for throughput …; 2.8 times the tokens per second of …"."""
    best = tuned.side("tuned")
    text = f"{words_of(best.turned) if best is not None else ''}, tuned for {tuned.objective} "
    text += f"with {tuned.load.concurrency} requests in flight"
    # The comparison with the engine defaults first, then the one with the plan.
    for proof in sorted(tuned.proofs, key=lambda one: one.against == "plan"):
        if proof.output_tok_s is not None:
            text += f"; {_times(proof)} {'the untuned plan' if proof.against == 'plan' else f'{tuned.engine} defaults'}"
    return text


def _times(proof: Proof) -> str:
    gain: Figure | None = proof.output_tok_s
    if gain is None:
        return ""
    words = f"{gain.value:.2f} times the tokens per second (95% confidence {gain.low:.2f} to {gain.high:.2f})"
    if proof.ttft_ms is not None:
        words += f" and {1 / proof.ttft_ms.value:.2f} times the time to first token"
    return f"{words} of"
