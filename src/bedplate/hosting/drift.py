"""Whether the work that an endpoint sees is still the work that its plan was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bedplate.decide import decide
from bedplate.decide.wording import join_alternatives
from bedplate.errors import BedplateError
from bedplate.facts.observed import observed
from bedplate.facts.workload import to_workload
from bedplate.values import Decision, Workload

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedService

SPAN_S = 86400.0
ENOUGH = 100
"""Requests below which nothing is said: a morning's tries are no work."""
FAR = 1.5
"""By which factor a figure must differ, up or down; lengths of real work vary by less than that from day to day."""
MUCH_SHARED = 0.5
"""Of the prompts, what must be shared to be worth telling where nobody expected it."""


def drift(service: HostedService) -> str | None:
    """In a sentence, how the observed work differs from what the plan assumed, and what the plan would be now.

    `None`: it does not differ, or too little of it was seen.
    """
    try:
        summary = observed(SPAN_S, model=service.name)
    except BedplateError:  # there was none, or the store cannot be read: nothing can be said
        return None
    if summary.requests < ENOUGH:
        return None
    seen, assumed = to_workload(summary), service.wanted.workload
    differences = differing(assumed, seen)
    if not differences:
        return None
    decided = service.readied.decided
    now = decide(decided.hardware, decided.facts, seen, operations=service.wanted.operations, installable=True)
    said = f"{summary.requests:,} requests in the last day had {', '.join(differences)}"
    return f"{said}; {consequence(decided.decision, now)}"


def differing(assumed: Workload, seen: Workload) -> list[str]:
    """What is far from what was assumed, in words."""
    pairs = [
        ("prompt tokens", assumed.prompt_tokens, seen.prompt_tokens),
        ("output tokens", assumed.output_tokens, seen.output_tokens),
    ]
    # Everyone at once is an upper bound; fewer than that is no surprise, unless somebody said how many there are.
    if assumed.concurrency is not None or seen.in_flight() > assumed.in_flight():
        pairs.append(("in flight at most", assumed.in_flight(), seen.in_flight()))
    found = [f"{b:,} {what} and not {a:,}" for what, a, b in pairs if max(a, b) >= FAR * min(a, b)]
    shared = seen.shared_prefix_tokens
    if shared >= MUCH_SHARED * seen.prompt_tokens and shared >= FAR * max(1, assumed.shared_prefix_tokens):
        found.append(f"{shared:,} prompt tokens that others begin with, and not {assumed.shared_prefix_tokens:,}")
    return found


def consequence(before: Decision, now: Decision) -> str:
    if now.engine is None or now.settings is None:
        return f"that does not fit here: {join_alternatives(now.hints) or 'see bedplate plan'}"
    settings = f"{now.settings.slots} slots of {now.settings.context_tokens:,} tokens"
    if now.engine != before.engine:
        why = f" ({now.reasons[0].text})" if now.reasons else ""
        return f"the plan for that is {now.engine}, {settings}{why}"
    if before.settings is not None and now.settings != before.settings:
        return f"the plan for that is {now.engine} again, with {settings}"
    return "the plan would be the same"
