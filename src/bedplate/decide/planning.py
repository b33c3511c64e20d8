"""Turns a Decision into a Plan, which has all that `run` needs."""

from __future__ import annotations

from bedplate.decide.case import with_model_task
from bedplate.decide.wording import join_alternatives
from bedplate.errors import NotPossible
from bedplate.facts.published_weights import get_published_model
from bedplate.facts.unpack import make_dequantized
from bedplate.values import Decision, Model, Plan, Workload, replace_fields


def plan(decision: Decision, model: Model, workload: Workload) -> Plan:
    if decision.engine is None or decision.settings is None or decision.weights is None:
        first = decision.refused[0] if decision.refused else None
        # A reason that applies to all engines alike is not about one of them.
        is_common = len({one.why for one in decision.refused}) == 1
        raise NotPossible(
            f"{model.name} cannot be served here as requested",
            cause=(first.why if is_common else f"{first.engine}: {first.why}") if first else None,
            hint=join_alternatives(decision.hints) or (first.hint if first else None),
        )
    source = model if decision.unpacks else None
    if decision.weights.published is not None:
        model = get_published_model(model, decision.weights.published)
    workload = replace_fields(with_model_task(model, workload), load=decision.load)
    return Plan(
        engine=decision.engine,
        engine_version=decision.engine_version or "unpinned",
        model=(make_dequantized(model) or model) if decision.unpacks else model,
        source=source,
        workload=workload,
        weights=decision.weights,
        parallelism=decision.parallelism,
        settings=decision.settings,
        orchestrator=decision.orchestrator,
    )
