"""Watch: how a running service stands today, what made somebody look again, and what came of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Decision
from bedplate.values.migration import Migration
from bedplate.values.record import Record
from bedplate.values.shadow import Shadowed
from bedplate.values.verdict import EXIT_CODES, Answer
from bedplate.values.workload import LatencyTarget, Workload

TriggerKind = Literal["schedule", "release", "bedplate", "driver", "workload", "latency", "asked"]


class Outlook(Record, frozen=True, kw_only=True):
    """One served model as its host sees it now, and what would be decided for it today."""

    schema: Literal["outlook/1"] = "outlook/1"
    model: str
    engine: str
    engine_version: str
    quantization: str | None = None
    machine: str
    driver: str | None = None
    """Of the accelerators."""
    requests: int
    """That were seen in the last day."""
    workload: Workload
    """What the decision is for: the observed work where enough was seen, else what was assumed."""
    drift: str | None = None
    late: str | None = None
    """How the latency target is missed."""
    target: LatencyTarget | None = None
    decision: Decision
    """Without regard to which engine serves now."""


class Trigger(Record, frozen=True, kw_only=True):
    kind: TriggerKind
    text: str


class Untried(Record, frozen=True, kw_only=True):
    """A challenger that was not measured."""

    engine: str
    why: str


class Watched(Record, frozen=True, kw_only=True):
    """One evaluation."""

    schema: Literal["watch/1"] = "watch/1"
    at: str
    service: str
    model: str
    engine: str
    engine_version: str
    triggers: tuple[Trigger, ...]
    answer: Answer
    text: str
    challenger: str | None = None
    """Who the answer speaks of."""
    planned: str | None = None
    """The engine that a plan would choose today."""
    shadows: tuple[Shadowed, ...] = ()
    untried: tuple[Untried, ...] = ()
    report: str | None = None
    """Where its page is."""
    migration: Migration | None = None
    notes: tuple[str, ...] = ()
    took_s: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]


class Seen(Record, frozen=True, kw_only=True):
    """What a watch remembers from one evaluation to the next."""

    schema: Literal["watch-state/1"] = "watch-state/1"
    at_s: float
    driver: str | None = None
    drift: str | None = None
    late: str | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """What bedplate installs of each engine."""
    releases: dict[str, str] = msgspec.field(default_factory=dict)
    """The newest of each engine's package on the index."""
