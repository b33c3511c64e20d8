"""Workload drift: whether the observed workload still matches the one that the plan assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bedplate.decide import decide
from bedplate.decide.wording import join_alternatives
from bedplate.errors import BedplateError
from bedplate.facts.observed_workload import summarize_observed
from bedplate.facts.workload import to_workload
from bedplate.values import Decision, Workload

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedService

SPAN_S = 86400.0
ENOUGH = 100
"""Fewest requests for a statement about drift. A few trial requests are not a workload."""
FAR = 1.5
"""Factor by which a figure must differ, up or down. Lengths of real workloads vary less than this between days."""
MUCH_SHARED = 0.5
"""Share of the prompt tokens that must be a shared prefix before an unexpected one is reported."""


def describe_drift(service: HostedService) -> str | None:
    """A sentence about how the observed workload differs from the assumed one, and what the plan would be now.

    None if it does not differ, or if there were too few requests.
    """
    try:
        summary = summarize_observed(SPAN_S, model=service.name)
    except BedplateError:  # no requests, or the store cannot be read
        return None
    if summary.requests < ENOUGH:
        return None
    seen, assumed = to_workload(summary), service.wanted.workload
    differences = list_differences(assumed, seen)
    if not differences:
        return None
    decided = service.readied.decided
    now = decide(
        decided.hardware, decided.facts, seen, operations=service.wanted.operations, installable=True,
    )  # fmt: skip
    drifted = f"{summary.requests:,} requests in the last day had {', '.join(differences)}"
    return f"{drifted}; {describe_new_plan(decided.decision, now)}"


def list_differences(assumed: Workload, seen: Workload) -> list[str]:
    """The figures that differ from the assumed ones by more than `FAR`."""
    pairs = [
        ("prompt tokens", assumed.prompt_tokens, seen.prompt_tokens),
        ("output tokens", assumed.output_tokens, seen.output_tokens),
    ]
    # Without a stated concurrency the assumed one is an upper bound, and a lower figure is no drift.
    if assumed.concurrency is not None or seen.compute_in_flight() > assumed.compute_in_flight():
        pairs.append(("concurrent requests", assumed.compute_in_flight(), seen.compute_in_flight()))
    found = [f"{b:,} {what} instead of {a:,}" for what, a, b in pairs if max(a, b) >= FAR * min(a, b)]
    shared = seen.shared_prefix_tokens
    if shared >= MUCH_SHARED * seen.prompt_tokens and shared >= FAR * max(1, assumed.shared_prefix_tokens):
        found.append(f"a shared prefix of {shared:,} tokens instead of {assumed.shared_prefix_tokens:,}")
    return found


def describe_new_plan(before: Decision, now: Decision) -> str:
    if now.engine is None or now.settings is None:
        return f"this workload does not fit here: {join_alternatives(now.hints) or 'see bedplate plan'}"
    settings = f"{now.settings.slots} slots of {now.settings.context_tokens:,} tokens"
    if now.engine != before.engine:
        why = f" ({now.reasons[0].text})" if now.reasons else ""
        return f"a new plan would choose {now.engine} with {settings}{why}"
    if before.settings is not None and now.settings != before.settings:
        return f"a new plan would keep {now.engine}, with {settings}"
    return "a new plan would be the same"
