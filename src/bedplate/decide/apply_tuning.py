"""Applies the results of `bedplate tune` to decisions: the settings, and the figures measured with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bedplate.decide.candidates import EngineCandidate, convert_model
from bedplate.decide.case import DecisionCase
from bedplate.decide.estimate import compute_expectation
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.memory import fit
from bedplate.values import Estimate, Figure, replace_fields
from bedplate.values.tuning import ComparedSettings, Proof, TuningRun, describe_changes


def with_tuning(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> EngineCandidate:
    """The candidate with the tuned settings for this workload, if there are any and they fit."""
    found = find_tuning(evidence.tunings, candidate, case)
    return (apply_tuning(candidate, found, case, evidence) or candidate) if found is not None else candidate


def find_tuning(tunings: Iterable[TuningRun], candidate: EngineCandidate, case: DecisionCase) -> TuningRun | None:
    """The newest proven tuning result for this engine, weights, layout and a similar workload."""
    for one in tunings:
        plan, best = one.find_side("plan"), one.find_side("tuned")
        if not one.is_proven or plan is None or best is None or one.engine != candidate.engine.id:
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


def apply_tuning(
    candidate: EngineCandidate, tuned: TuningRun, case: DecisionCase, evidence: MachineEvidence
) -> EngineCandidate | None:
    """`None` if it does not fit: less memory may be free now than during tuning."""
    plan, best = tuned.find_side("plan"), tuned.find_side("tuned")
    if plan is None or best is None:
        return None
    settings = replace_fields(candidate.settings, **_find_changes(plan, best))
    model = convert_model(case.model, best.weights) if best.weights != candidate.weights else candidate.model
    need = fit(candidate.hardware, model, case.workload, candidate.engine, parallelism=candidate.layout,
               settings=settings)  # fmt: skip
    if not need.fits:
        return None
    expected = compute_expectation(
        candidate.hardware, model, candidate.engine.id, candidate.layout, case.workload, slots=settings.slots,
        offload=need.offload, factor=evidence.get_factor(candidate.engine.id, candidate.target.device),
        kv_bits=candidate.engine.get_stored_cache_bits(settings.kv_type),
    )  # fmt: skip
    return replace(
        candidate, weights=best.weights, model=model, settings=settings, fit=need, expected=expected, tuned=tuned
    )


def _find_changes(plan: ComparedSettings, best: ComparedSettings) -> dict[str, Any]:
    """Only the settings that tuning changed; the others, such as the context, come from this decision."""
    names = plan.settings.__struct_fields__
    pairs = ((name, getattr(plan.settings, name), getattr(best.settings, name)) for name in names)
    return {name: after for name, before, after in pairs if before != after}


def use_measured_figures(tuned: TuningRun, case: DecisionCase, estimate: Estimate) -> Estimate:
    """Replace estimated figures by measured ones, if they were measured under exactly this load."""
    best, load = tuned.find_side("tuned"), tuned.load
    work = case.workload
    asked = (case.in_flight, work.prompt_tokens, work.output_tokens)
    if best is None or asked != (load.concurrency, load.prompt_tokens, load.output_tokens):
        return estimate
    given = {"output_tok_s": best.output_tok_s, "ttft_ms": best.ttft_ms, "tpot_ms": best.tpot_ms}
    source = f"bedplate tune, {tuned.at[:10]}"
    return replace_fields(
        estimate, **{name: replace_fields(one, source=source) for name, one in given.items() if one is not None}
    )


def describe_tuning(tuned: TuningRun) -> str:
    """Such as "weights Q8_0, ubatch 256, tuned for throughput …; 2.8 times the tokens per second of …"."""
    best = tuned.find_side("tuned")
    text = f"{describe_changes(best.turned) if best is not None else ''}, tuned for {tuned.objective} "
    text += f"with {tuned.load.concurrency} requests in flight"
    # The comparison with the engine defaults first, then the one with the plan.
    for proof in sorted(tuned.proofs, key=lambda one: one.against == "plan"):
        if proof.output_tok_s is not None:
            other = "the untuned plan" if proof.against == "plan" else f"{tuned.engine} defaults"
            text += f"; {_describe_gain(proof)} {other}"
    return f"{text} (bedplate runs discard {tuned.id} removes it)"


def _describe_gain(proof: Proof) -> str:
    gain: Figure | None = proof.output_tok_s
    if gain is None:
        return ""
    words = f"{gain.value:.2f} times the tokens per second (95% confidence {gain.low:.2f} to {gain.high:.2f})"
    if proof.ttft_ms is not None:
        words += f" and {1 / proof.ttft_ms.value:.2f} times the time to first token"
    return f"{words} of"
