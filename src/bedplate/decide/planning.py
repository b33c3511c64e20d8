"""A Decision as a Plan: all that `run` needs, and nothing that it would have to decide."""

from __future__ import annotations

from bedplate.errors import AnswerIsNo
from bedplate.values import Decision, Model, Plan, Workload


def plan(decision: Decision, model: Model, workload: Workload) -> Plan:
    if decision.engine is None or decision.settings is None or decision.engine_version is None:
        why = "; ".join(f"{r.engine}: {r.why}" for r in decision.refused[:1])
        hint = "; or ".join(decision.hints) or None
        raise AnswerIsNo(f"nothing runs {model.name} here", cause=why or None, hint=hint)
    return Plan(
        engine=decision.engine,
        engine_version=decision.engine_version,
        model=model,
        workload=workload,
        parallelism=decision.parallelism,
        settings=decision.settings,
    )
