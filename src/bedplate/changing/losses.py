"""What clients would lose with another engine: features, slots and context, compared with the requests of a day."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bedplate.engines import get_plan_engine
from bedplate.errors import NotPossible
from bedplate.usage_store import open_usage_store
from bedplate.values import Plan
from bedplate.values.capabilities import FEATURE_NAMES, Capabilities
from bedplate.values.traffic import ServedRequest
from bedplate.values.units import format_seconds

RECENT_S = 86_400.0


class ServiceOffer(NamedTuple):
    """What all replicas of a model offer to clients."""

    name: str
    """The engine, for messages."""
    capabilities: Capabilities | None
    slots: int
    context_tokens: int

    @classmethod
    def from_plan(cls, plan: Plan, replicas: int) -> ServiceOffer:
        known = get_plan_engine(plan).describe_capabilities(plan)
        name = f"{plan.engine} {plan.engine_version}"
        return cls(name, known, plan.settings.slots * replicas, plan.settings.context_tokens)


class RecentUse(NamedTuple):
    """What answered requests used."""

    features: frozenset[str] = frozenset()
    most_in_flight: int = 0
    longest_tokens: int = 0
    """Prompt and answer of the longest request."""


class Loss(NamedTuple):
    text: str
    was_used: bool


def read_recent_use(model: str, path: Path | None = None, since_s: float = RECENT_S) -> RecentUse:
    """The use of a served model in the last day. Reads the store, so it belongs into a thread."""
    return summarize_use(open_usage_store(path).read_requests(time.time() - since_s, model=model))


def summarize_use(rows: Iterable[ServedRequest]) -> RecentUse:
    features: set[str] = set()
    begun, ended = array("d"), array("d")
    longest = 0
    for row in rows:
        if row.engine is None or row.outcome != "ok":
            continue
        features.update(row.features)
        longest = max(longest, (row.prompt_tokens or 0) + (row.completion_tokens or 0))
        begun.append(row.at_s + (row.wait_ms or 0.0) / 1000)
        ended.append(row.at_s + row.duration_ms / 1000)
    return RecentUse(frozenset(features), count_most_at_once(begun, ended), longest)


def count_most_at_once(begun: Iterable[float], ended: Iterable[float]) -> int:
    most = current = 0
    ends = sorted(ended)
    done = 0
    for moment in sorted(begun):
        while done < len(ends) and ends[done] <= moment:
            done += 1
            current -= 1
        current += 1
        most = max(most, current)
    return most


def find_losses(before: ServiceOffer, after: ServiceOffer, used: RecentUse) -> list[Loss]:
    """What `after` lacks of `before`. An engine that does not state its features has those that requests used."""
    found, had = [], before.capabilities
    if after.capabilities is not None:
        for feature, name in FEATURE_NAMES.items():
            was_used = feature in used.features
            if (was_used if had is None else had.supports(feature)) and not after.capabilities.supports(feature):
                found.append(Loss(name, was_used))
    if after.slots < before.slots:
        text = f"concurrent requests: {after.slots} instead of {before.slots}"
        used_slots = used.most_in_flight > after.slots
        found.append(Loss(f"{text} (up to {used.most_in_flight} ran at once)" if used_slots else text, used_slots))
    if after.context_tokens < before.context_tokens:
        text = f"context length: {after.context_tokens:,} instead of {before.context_tokens:,} tokens"
        used_context = used.longest_tokens > after.context_tokens
        found.append(Loss(f"{text} (a request had {used.longest_tokens:,})" if used_context else text, used_context))
    return found


def check_losses(before: ServiceOffer, after: ServiceOffer, used: RecentUse, *, force: bool) -> list[str]:
    """Notes about what clients lose; raises if requests of the last day used it, unless `force`."""
    losses = find_losses(before, after, used)
    needed = [one.text for one in losses if one.was_used]
    since = f"the last {format_seconds(RECENT_S)}"
    if needed and not force:
        raise NotPossible(
            f"{after.name} lacks what requests used in {since}: {'; '.join(needed)}",
            cause=f"{before.name} has it",
            hint="--force continues anyway; requests for it are then refused",
        )
    notes = [f"{after.name} lacks what requests used in {since}: {text}" for text in needed]
    unneeded = [one.text for one in losses if not one.was_used]
    return [*notes, *(f"{after.name} has less than {before.name}, unused in {since}: {text}" for text in unneeded)]
