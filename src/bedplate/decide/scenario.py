"""A scenario as a workload. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bedplate.errors import UsageError
from bedplate.facts.scenarios import adjust_scenario, compute_means, fit_context, get_scenario
from bedplate.values.intent import Intent
from bedplate.values.record import replace_fields
from bedplate.values.scenario import Scenario
from bedplate.values.workload import Workload

LENGTHS = ("prompt_tokens", "output_tokens", "shared_prefix_tokens")
LOADS = ("users", "concurrency", "requests_per_s")
BATCH = "batch"
"""The scenario in which nobody waits for the answers."""


def apply_scenario(
    intent: Intent, name: str, given: Collection[str], max_context: int | None = None
) -> tuple[Intent, Scenario]:
    """The intent with the workload of a scenario, and the scenario as adjusted. Notes say what was assumed.

    `given`: fields of the workload that were specified. They replace those of the scenario, as do those of the intent
    that differ from their defaults.
    """
    if intent.services:
        raise UsageError("--scenario needs a single model, and the intent has services")
    work, usual = intent.workload, Workload()
    explicit = {field for field in work.__struct_fields__ if getattr(work, field) != getattr(usual, field)}
    explicit = (explicit | set(given)) - {"origin", "schema", "load"}
    known = get_scenario(name)
    lengths = {field: getattr(work, field) for field in LENGTHS if field in explicit}
    scenario = fit_context(adjust_scenario(known, **lengths), max_context)
    fields = make_workload_fields(scenario, with_load=not explicit & set(LOADS))
    notes = [describe_assumptions(scenario, {field: fields[field] for field in fields if field not in explicit})]
    before = make_workload_fields(fit_context(known, max_context), with_load=False)
    notes += [
        f"workload.{field}: {getattr(work, field)} as specified, instead of {before[field]} of the scenario {name}"
        for field in sorted(explicit & set(before))
        if before[field] != getattr(work, field)
    ]
    if scenario.context_tokens < known.context_tokens:
        notes.append(
            f"the model's context ends the sessions of the scenario {name} at {scenario.context_tokens:,} tokens "
            f"instead of {known.context_tokens:,}"
        )
    changed = {field: value for field, value in fields.items() if field not in explicit}
    workload = replace_fields(work, **changed, origin="asked")
    return replace_fields(intent, workload=workload, notes=(*intent.notes, *notes)), scenario


def make_workload_fields(scenario: Scenario, *, with_load: bool = True) -> dict[str, Any]:
    """The fields of a workload that the scenario determines; with `with_load` also its sessions at the same time."""
    means = compute_means(scenario)
    fields: dict[str, Any] = {
        "prompt_tokens": max(1, round(means.prompt_tokens)),
        "output_tokens": max(1, round(means.output_tokens)),
        "context_tokens": means.longest_tokens,
        "shared_prefix_tokens": scenario.system_tokens,
        "session_prefix_tokens": round(means.history_tokens),
        "structured_output": means.structured_share > 0,
    }
    if means.wait_s > 0:
        fields["think_time_s"] = round(means.wait_s, 1)
    if scenario.name == BATCH:
        fields["batch"] = True
    if with_load:
        fields["users" if means.wait_s > 0 else "concurrency"] = scenario.sessions
    return fields


WORDS = {
    "prompt_tokens": "prompts of {:,} tokens on average",
    "output_tokens": "answers of {:,}",
    "context_tokens": "requests of up to {:,}",
    "shared_prefix_tokens": "{:,} prompt tokens shared by all sessions",
    "session_prefix_tokens": "{:,} repeated from earlier turns",
    "think_time_s": "{:g} s between the requests of a session",
    "users": "{:,} sessions at the same time",
    "concurrency": "{:,} requests in flight",
}


def describe_assumptions(scenario: Scenario, fields: dict[str, Any]) -> str:
    parts = [text.format(fields[field]) for field, text in WORDS.items() if fields.get(field)]
    parts += ["structured output"] if fields.get("structured_output") else []
    parts += ["nobody waits for an answer"] if fields.get("batch") else []
    return f"assumed by the scenario {scenario.name}: {', '.join(parts)} (docs/scenarios.md)"
